"""Sizes in bytes as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4,
          "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}  # fmt: skip


def size_text(size: int) -> str:
    """A size as people read it: 64.0 GiB, 12 bytes."""
    for unit, bytes_ in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= bytes_:
            return f"{size / bytes_:,.1f} {unit}"
    return f"{size} bytes"


def parse_size(name: str, value: str | int) -> int:
    """The bytes that `value` stands for, such as 64GiB, 500MB or a number.

    Raises ValueError that names `name` for anything else, and for less than 1 byte.
    """
    size = 0
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?\s*", value.upper())
        if found is not None:
            size = int(float(found[1]) * _UNITS[found[2] or ""])
    if size < 1:
        raise ValueError(f"{name} must be a size such as 64GiB or 500MB, got {value!r}")
    return size
