"""The adapters that a server starts with, as its option `lora_modules` names them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple


class Module(NamedTuple):
    """An adapter that a server starts with."""

    name: str
    path: str
    base_model_name: str | None = None


def parse_module(given: str) -> list[Module]:
    """The adapters of one value of `lora_modules`: NAME=PATH, a JSON object, or a list of them.

    Raises ValueError for what is neither.
    """
    what = (
        'lora_modules must be NAME=PATH, or JSON such as {"name": "a", "path": "folder"}, '
        f"got {given!r}"
    )
    if not given.lstrip().startswith(("{", "[")):
        name, separator, path = given.partition("=")
        if not (separator and name.strip() and path.strip()):
            raise ValueError(what)
        return [Module(name.strip(), path.strip())]
    try:
        value = json.loads(given)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    found = []
    for each in value if isinstance(value, list) else [value]:
        texts = isinstance(each, dict) and all(
            isinstance(text, str) and text.strip() for text in each.values() if text is not None
        )
        if not texts or not {"name", "path"} <= set(each) <= set(Module._fields):
            raise ValueError(what)
        found.append(Module(**each))
    return found


def check_names(name: str, base: str | None, served: Sequence[str]) -> None:
    """Raises ValueError if an adapter of the model `base` can't be named so.

    `served` are the names of the server's model.
    """
    if name in served:
        raise ValueError(f"lora_name must not be the model's own, got {name!r}")
    if base is not None and base not in served:
        raise ValueError(f"base_model_name must be one of {', '.join(served)}, got {base!r}")


def all_modules(given: Sequence[str]) -> list[Module]:
    """The adapters of all values of `lora_modules`.

    Raises ValueError for a bad one, and for two of one name.
    """
    found: list[Module] = [module for each in given for module in parse_module(each)]
    names: set[str] = set()
    for module in found:
        if module.name in names:
            raise ValueError(f"lora_modules: two adapters are named {module.name!r}")
        names.add(module.name)
    return found
