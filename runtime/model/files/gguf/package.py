"""The package `gguf`, and files opened with it; what is wrong with a file is said in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def gguf_package(file: Path) -> Any:
    """The module `gguf`. Raises ValueError with the command that installs it."""
    try:
        import gguf
    except ImportError:
        raise ValueError(
            f"{file} is a GGUF file, which needs the package gguf to be read: pip install gguf"
        ) from None
    return gguf


def opened(file: Path) -> Any:
    """gguf's reader of a file; its data are mapped. Raises ValueError, naming the file."""
    gguf = gguf_package(file)
    try:
        reader = gguf.GGUFReader(file)
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist") from None
    except Exception as error:  # a broken file can fail anywhere
        raise ValueError(_broken(file, error)) from error
    for tensor in reader.tensors:
        if tensor.data_offset + tensor.n_bytes > file.stat().st_size:
            raise ValueError(_broken(file, None))
    return reader


def _broken(file: Path, error: Exception | None) -> str:
    """The reason: not such a file, or the first tensor that it does not hold whole."""
    with file.open("rb") as content:
        if content.read(4) != b"GGUF":
            return f"{file} is not a GGUF file: it does not begin with GGUF"
    size = file.stat().st_size
    try:
        from transformers.integrations.gguf import GgufHeader

        header = GgufHeader.from_file(str(file))
        for info in header.tensors:
            end = header.data_start + info.offset + info.nbytes
            if end > size:
                return (
                    f"{file} is only a part of a GGUF file: tensor {info.name} ends at byte {end}, "
                    f"and the file has {size}"
                )
    except Exception:  # then the list of tensors is broken as well
        pass
    return f"{file} is a broken GGUF file, or only a part of one: {error}"
