"""The index of a checkpoint in several files: which file holds each tensor."""

from __future__ import annotations

import json
from pathlib import Path


def indexed(index: Path) -> dict[str, str]:
    """The file of each tensor, by the tensor's name, as an index lists them.

    Raises ValueError for something else, and for a file outside the index's own folder.
    """
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): str(file) for name, file in listed.items()}
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{index} is not an index of a checkpoint's files: {error!r}") from error
    outside = [file for file in files.values() if Path(file).name != file]
    if outside:
        raise ValueError(f"{index} names {outside[0]!r}; its files must lie beside it")
    return files
