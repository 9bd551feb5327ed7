"""Chooses the reader for the files of a checkpoint, and what decodes quantised weights over it."""

from __future__ import annotations

from pathlib import Path

from coppice.runtime.model.files import pickled, safetensor
from coppice.runtime.model.files.source import TensorSource


def open_tensors(folder: Path) -> TensorSource:
    """The tensors of the checkpoint in a folder: of safetensors, else of `pytorch_model.bin`.

    Raises ValueError that names the folder, or the file and the tensor, for what cannot be read.
    """
    for reader, names in (
        (safetensor.SafetensorsSource, (safetensor.INDEX, safetensor.SINGLE)),
        (pickled.PickledSource, (pickled.INDEX, pickled.SINGLE)),
    ):
        if any((folder / name).exists() for name in names):
            return reader(folder)
    raise ValueError(
        f"{folder} holds none of {safetensor.SINGLE}, {pickled.SINGLE} and their indices"
        f"{_others(folder)} (load_format='dummy' runs without weights)"
    )


def _others(folder: Path) -> str:
    """Files that look like weights, for people."""
    suffixes = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
    found = sorted(each.name for each in folder.iterdir() if each.suffix in suffixes)
    if not found:
        return ""
    more = ", ..." if len(found) > 5 else ""
    return f"; {', '.join(found[:5])}{more} cannot be read under such names"
