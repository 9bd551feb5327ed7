"""Tensors of `pytorch_model.bin`, one file or many with an index; nothing in them is executed.

torch reads such a pickle with `weights_only`, which builds tensors and containers and calls nothing
else. Files that torch has written since 1.6 are mapped, so a shard takes memory as it is read.
"""

from __future__ import annotations

import re
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from coppice.runtime.model.files.index import indexed
from coppice.runtime.model.files.source import Header, TensorSource, bytes_of

SINGLE = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"
_REMEDY = (
    "convert the checkpoint to safetensors where you trust it (transformers' save_pretrained "
    "writes them), and give that folder"
)


class PickledSource(TensorSource):
    """Tensors of the pickles in a folder; one shard at a time is kept open.

    Raises ValueError, naming the file, where one is missing, broken, holds code, or is not what the
    index says.
    """

    def __init__(self, folder: Path) -> None:
        self._open: dict[str, torch.Tensor] = {}
        self._open_file: Path | None = None
        self.headers = {}
        index = folder / INDEX
        files = indexed(index) if index.exists() else None
        for file in dict.fromkeys(files.values() if files is not None else [SINGLE]):
            path = folder / file
            held = _loaded(path)
            names = list(held) if files is None else [n for n, own in files.items() if own == file]
            for name in names:
                if name not in held:
                    raise ValueError(f"{path} lacks tensor {name}, though {INDEX} puts it there")
                shape, dtype = tuple(held[name].shape), held[name].dtype
                self.headers[name] = Header(shape, dtype, path, bytes_of(shape, dtype))

    def read(self, name: str) -> torch.Tensor:
        file = self.headers[name].file
        if self._open_file != file:
            self._open = {}  # before the next one is opened
            self._open, self._open_file = _loaded(file), file
        return self._open[name]


def _loaded(file: Path) -> dict[str, torch.Tensor]:
    if not file.exists():
        raise ValueError(f"{file} does not exist, though {INDEX} names it")
    content = _unpickled(file)
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    tensors = isinstance(content, dict) and {
        name: each for name, each in content.items() if isinstance(each, torch.Tensor)
    }
    if not tensors:
        raise ValueError(f"{file} holds a {type(content).__name__}; it must hold tensors by name")
    return tensors


def _unpickled(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, UnpicklingError) as error:
        if "mmap can only be used" not in str(error):
            raise _refusal(file, error) from error
    except Exception as error:  # a pickle can fail in any way
        raise _refusal(file, error) from error
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise _refusal(file, error) from error


def _refusal(file: Path, error: Exception) -> Exception:
    text = str(error)
    if "Cannot allocate memory" in text or isinstance(error, MemoryError):
        return MemoryError(f"{file}: {text}")
    wanted = re.search(r"GLOBAL ([\w.]+)", text)
    if isinstance(error, UnpicklingError) and wanted:
        return ValueError(
            f"{file} is a pickle that calls code ({wanted[1]}), which is not executed here; "
            f"{_REMEDY}"
        )
    first = text.strip().splitlines()
    return ValueError(
        f"{file} is not a file of tensors that torch.save has written, or only a part of one: "
        f"{type(error).__name__}: {first[0] if first else 'it is empty'}"
    )
