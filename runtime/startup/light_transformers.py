"""Keeps transformers' models, or torch too, out of a process that wants its tokenizers only."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any


@cache
def leave_out_models() -> None:
    """Call before a config or tokenizer is loaded, and before transformers' Auto classes are named.

    Configs check the name of an activation against a table that lies among transformers' models,
    and with those come torch's compiler and its distributed tensors: 2.5 to 5 s of the start of
    every process, on a machine where torch takes 2 to 3. Where torch is missing transformers leaves
    the check out; so it is told that, for that one import. ``load_model_config`` checks the name.
    Without effect if the models are there already.
    """
    from transformers.utils import import_utils

    _scan_once()
    name = "transformers.utils.type_validators"
    if name in sys.modules:
        return
    known = import_utils.is_torch_available
    import_utils.is_torch_available = _no
    try:
        from transformers.utils import type_validators
    except ImportError:  # another version of transformers, which may do without the table
        return
    finally:
        import_utils.is_torch_available = known
    # As the module would have them.
    type_validators.is_torch_available = known
    if known():
        import torch

        type_validators.torch = torch


def leave_out_torch() -> None:
    """For a process that computes nothing, before all else here: it is told that torch is missing.

    Tokenizers and chat templates then take a quarter of the time and a third of the memory to load.
    Without effect if torch is there already. It is for good, and transformers' models can't be
    loaded any more: not for a process that is a user's own.
    """
    import transformers.utils
    from transformers.utils import import_utils

    if "torch" not in sys.modules:
        transformers.utils.is_torch_available = import_utils.is_torch_available = _no


def _no() -> bool:
    return False


def _scan_once() -> None:
    """Has the package of transformers' models imported without reading all their files again.

    transformers reads 1,600 files to learn what each of its models exports, once for itself and
    once more for that package, which the Auto classes need: 0.45 s. The second result is a part of
    the first, which transformers keeps, and is taken from there.
    """
    import transformers
    from transformers.utils import import_utils

    if "transformers.models" in sys.modules or not hasattr(import_utils, "define_import_structure"):
        return
    read = import_utils.define_import_structure
    folder = Path(transformers.__file__).parent / "models"
    inside = f"{folder.name}."

    def known(path: str, prefix: str | None = None) -> Any:
        if prefix is not None or Path(path) != folder / "__init__.py":
            return read(path, prefix)
        return {
            backends: {
                name.removeprefix(inside): exported
                for name, exported in modules.items()
                if name.startswith(inside)
            }
            for backends, modules in read(folder, prefix=folder.name).items()
        }

    import_utils.define_import_structure = known
    try:
        import transformers.models
    finally:
        import_utils.define_import_structure = read
