"""Chooses the reader for the files of a checkpoint, and what decodes quantised weights over it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from coppice.runtime.model.files import pickled, safetensor
from coppice.runtime.model.files.gguf.blocks import GgufSource
from coppice.runtime.model.files.quantized.view import decoded
from coppice.runtime.model.files.source import TensorSource


def open_tensors(
    folder: Path, wanted: Callable[[], Collection[str]] = tuple, *, lossless: bool = False
) -> TensorSource:
    """The tensors of the checkpoint in a folder: safetensors, else `pytorch_model.bin`, else GGUF.

    `wanted` returns the names that the model has, from which those of GGUF files follow.
    Quantised weights are decoded to 16 bits, or with `lossless` to float32.

    Raises ValueError that names the folder, or the file and the tensor, for what cannot be read.
    """
    for reader, names in (
        (safetensor.SafetensorsSource, (safetensor.INDEX, safetensor.SINGLE)),
        (pickled.PickledSource, (pickled.INDEX, pickled.SINGLE)),
    ):
        if any((folder / name).exists() for name in names):
            return decoded(reader(folder), folder, lossless=lossless)
    if any(folder.glob("*.gguf")):
        return GgufSource(folder, wanted(), lossless=lossless)
    raise ValueError(
        f"{folder} holds none of {safetensor.SINGLE}, {pickled.SINGLE}, their indices and GGUF"
        f"{_others(folder)} (load_format='dummy' runs without weights)"
    )


def _others(folder: Path) -> str:
    """Files that look like weights, for people."""
    suffixes = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx")
    found = sorted(each.name for each in folder.iterdir() if each.suffix in suffixes)
    if not found:
        return ""
    more = ", ..." if len(found) > 5 else ""
    return f"; {', '.join(found[:5])}{more} cannot be read under such names"
