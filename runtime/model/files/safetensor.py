"""Tensors of safetensors files, one or many with an index."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from coppice.runtime.model.files.index import indexed
from coppice.runtime.model.files.source import Header, TensorSource, bytes_of
from coppice.runtime.model.parallel.cut import Cut

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Bytes that are read through one mapping of a file, at least.
_READ_AT_ONCE = 1 << 23
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class SafetensorsSource(TensorSource):
    """Tensors of the safetensors files in a folder.

    Raises ValueError, naming the file, where one is missing, broken or not what the index says.
    """

    def __init__(self, folder: Path) -> None:
        self._open_file: Path | None = None
        self._open: safe_open | None = None
        self._read = 0
        index = folder / INDEX
        files = indexed(index) if index.exists() else dict.fromkeys(_names(folder / SINGLE))
        self.headers = {}
        for file in dict.fromkeys(files.values()):
            path = folder / (file or SINGLE)
            self.headers |= _headers(path, [name for name, own in files.items() if own == file])

    def read(self, name: str) -> torch.Tensor:
        return self._taken(name, lambda file: file.get_tensor(name))

    def read_part(self, name: str, cut: Cut) -> torch.Tensor:
        def take(file: safe_open) -> torch.Tensor:
            own = file.get_slice(name)
            before = (slice(None),) * cut.dim
            parts = [own[(*before, slice(each.start, each.stop))] for each in cut.ranges]
            return parts[0] if len(parts) == 1 else torch.cat(parts, cut.dim)

        return self._taken(name, take)

    def _taken(self, name: str, take: Callable[[safe_open], torch.Tensor]) -> torch.Tensor:
        """What `take` reads of the file that has this tensor."""
        file = self.headers[name].file
        # Opened anew from time to time: a mapping keeps every page that was ever read through it,
        # so a single one would hold the weights a second time in the end. (Opening it for each
        # tensor would take a fifth of the time of loading.)
        if self._open is None or self._open_file != file or self._read > _READ_AT_ONCE:
            self._open, self._open_file, self._read = _opened(file), file, 0
        try:
            tensor = take(self._open)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file}: tensor {name} cannot be read: {error}") from error
        self._read += tensor.nbytes
        return tensor


def _names(file: Path) -> list[str]:
    return list(_opened(file).keys())


def _headers(file: Path, names: list[str]) -> dict[str, Header]:
    opened, found = _opened(file), {}
    held = set(opened.keys())
    for name in names:
        if name not in held:
            raise ValueError(f"{file} lacks tensor {name}, though {INDEX} puts it there")
        part = opened.get_slice(name)
        dtype, shape = _DTYPES.get(part.get_dtype()), tuple(part.get_shape())
        if dtype is None:
            raise ValueError(
                f"{file}: tensor {name} is of type {part.get_dtype()}; types that are read are "
                f"{', '.join(_DTYPES)}"
            )
        found[name] = Header(shape, dtype, file, bytes_of(shape, dtype))
    return found


def _opened(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist, though {INDEX} names it") from None
    except (SafetensorError, OSError) as error:
        if "Cannot allocate memory" in str(error):
            raise MemoryError(f"{file}: {error}") from error
        raise ValueError(
            f"{file} is not a safetensors file, or only a part of one: {error}"
        ) from error
