"""How the weights of a checkpoint are stored, as its folder shows without reading them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from coppice.runtime.model.config_file import read_config
from coppice.runtime.model.files.formats import FORMATS
from coppice.runtime.model.files.gguf.around import TYPES
from coppice.runtime.model.files.index import indexed
from coppice.runtime.model.files.quantized.method import read_method


@dataclass(frozen=True, slots=True)
class Stored:
    """The files of a checkpoint.

    Attributes:
        name: of the quantised form, for people; None: plain numbers.
        bytes: of all files with weights; None: they are not here, or not all of them.
        eight_bit: whether it is made for products of 8 bits, so that a CPU keeps it as int8.
    """

    name: str | None
    bytes: int | None
    eight_bit: bool = False


def read_stored(folder: Path) -> Stored:
    """How a checkpoint is stored. Raises ValueError for a form that is not read."""
    size = _bytes_of_files(folder)
    types = folder / TYPES
    if types.is_file():  # a folder around a GGUF file
        held = [kind for kind in json.loads(types.read_text()) if kind not in _PLAIN]
        return Stored("GGUF's " + ", ".join(sorted(held)) if held else None, size)
    given = read_config(folder).get("quantization_config")
    if isinstance(given, dict) and given.get("quant_method") == "mxfp4":
        return Stored("MXFP4", size)
    method = read_method(folder)
    return Stored(None, size) if method is None else Stored(method.name, size, method.eight_bit)


def _bytes_of_files(folder: Path) -> int | None:
    """Bytes of the files that would be read."""
    for name in (name for names in FORMATS.values() for name in names):
        found = sorted(folder.glob(name))
        if found and name.endswith(".index.json"):
            found = [folder / each for each in dict.fromkeys(indexed(found[0]).values())]
        if found:
            return sum(map(_size, found)) if all(each.is_file() for each in found) else None
    return None


def _size(file: Path) -> int:
    return file.stat().st_size


_PLAIN = ("F32", "F16", "BF16")
