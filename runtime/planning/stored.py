"""How the weights of a checkpoint are stored, as its folder shows without reading them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from coppice.runtime.model.config_file import read_config
from coppice.runtime.model.files.formats import FORMATS, GGUF_FOUR_BITS
from coppice.runtime.model.files.gguf.around import TYPES
from coppice.runtime.model.files.index import indexed
from coppice.runtime.model.files.quantized.method import read_method


@dataclass(frozen=True, slots=True)
class Stored:
    """The files of a checkpoint.

    Attributes:
        name: of the quantised form, for people; None: plain numbers.
        bytes: of all files with weights; None: they are not here, or not all of them.
        on_cpu: the quantization that a CPU keeps it in, since it is made for its products.
    """

    name: str | None
    bytes: int | None
    on_cpu: str | None = None


def read_stored(folder: Path) -> Stored:
    """How a checkpoint is stored. Raises ValueError for a form that is not read."""
    size = _bytes_of_files(folder)
    types = folder / TYPES
    if types.is_file():  # a folder around a GGUF file
        held = [kind for kind in json.loads(types.read_text()) if kind not in _PLAIN]
        four = bool(set(held) & set(GGUF_FOUR_BITS)) and not set(held) & set(_FEWER)
        name = "GGUF's " + ", ".join(sorted(held)) if held else None
        return Stored(name, size, "int4" if four else None)
    given = read_config(folder).get("quantization_config")
    if isinstance(given, dict) and given.get("quant_method") == "mxfp4":
        return Stored("MXFP4", size)
    method = read_method(folder)
    if method is None:
        return Stored(None, size)
    kept = "int8" if method.eight_bit else "int4" if method.bits == 4 else None
    return Stored(method.name, size, kept)


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
# Files that are named after these have some matrices of 4 bits, too.
_FEWER = ("Q2_K", "Q3_K", "Q5_K", "Q5_0", "Q5_1")
