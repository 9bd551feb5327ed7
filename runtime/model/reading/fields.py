"""The values of a `config.json`, each checked when it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from coppice.runtime.model.config import DTYPE_NAMES


class Fields:
    """What a `config.json` holds; what it leaves out has a default.

    Every method takes the name of a field and raises ``ValueError`` with the name, the value and
    what is allowed if the value is something else.

    Args:
        raw: the content of the file.
        defaults: of the fields that may be left out.
    """

    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.raw = raw
        self._defaults = defaults

    def get(self, name: str) -> Any:
        """The value as it is; None if it has neither a value nor a default."""
        return self.raw.get(name, self._defaults.get(name))

    def size(self, name: str) -> int:
        """A whole number of at least 1."""
        value = self.get(name)
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1")
        return value

    def optional_size(self, name: str) -> int | None:
        """A whole number of at least 1, or nothing."""
        return None if self.get(name) is None else self.size(name)

    def count(self, name: str) -> int:
        """A whole number of at least 0."""
        value = self.get(name)
        if type(value) is not int or value < 0:
            raise ValueError(f"{name} is {value!r}; it must be an integer of at least 0")
        return value

    def number(self, name: str) -> float:
        """A number above 0."""
        value = self.get(name)
        if not is_number(value) or value <= 0:
            raise ValueError(f"{name} is {value!r}; it must be a number above 0")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """A number above 0, or nothing."""
        return None if self.get(name) is None else self.number(name)

    def switch(self, name: str) -> bool:
        """True or false; false if it has neither a value nor a default."""
        value = self.raw.get(name, self._defaults.get(name, False))
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; it must be true or false")
        return value

    def dtype(self) -> str:
        """The name of the type that the file declares; float32 if it declares none."""
        # transformers 5 writes dtype, earlier versions wrote torch_dtype.
        declared = self.raw.get("dtype")
        value = self.raw.get("torch_dtype") if declared is None else declared
        if value is None:
            return "float32"
        if not isinstance(value, str) or value not in DTYPE_NAMES:
            raise ValueError(f"dtype is {value}; supported are {', '.join(DTYPE_NAMES)}")
        return value


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether it is an integer or a float (JSON's true and false are neither)."""
    return isinstance(value, int | float) and not isinstance(value, bool)
