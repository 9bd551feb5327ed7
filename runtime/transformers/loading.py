"""Loads the weights of a described checkpoint with transformers' own loader."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.utils import logging as their_logging

from coppice.runtime.model.files.opening import open_tensors
from coppice.runtime.model.layers import Linear
from coppice.runtime.model.linear.select import linear_class
from coppice.runtime.model.weight_size import smaller_weights
from coppice.runtime.startup.room import check_room, explained
from coppice.runtime.transformers.adopt import adopt
from coppice.runtime.transformers.attention import NAME
from coppice.runtime.transformers.describe import Described
from coppice.runtime.transformers.foreign import ForeignModel
from coppice.runtime.transformers.fuse import fuse
from coppice.runtime.transformers.network import Network

_log = logging.getLogger(__name__)

# Loading fewer numbers than this takes no time in which anybody looks at a progress bar.
_FEW = 1 << 28


def load_foreign(
    path: Path,
    described: Described,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    quantization: str | None = None,
    bfloat16: bool = False,
    seed: int = 0,
) -> ForeignModel:
    """transformers' model with weights: those in ``path``, or random ones for ``"dummy"``.

    Weights of 16 bits are loaded as such, also where the model computes in float32; one matrix at a
    time is then converted. ``bfloat16``: products are of bfloat16, as in ``load_decoder``.

    Raises ``ValueError`` for weights that are missing, broken or of another shape, and for a model
    whose tokens affect each other beside attention; ``TooLittleMemory`` if the weights do not fit.
    """
    declared = described.model.torch_dtype
    widened = device.type == "cpu" and dtype == torch.float32 and declared.itemsize == 2
    halves = declared if widened else None
    linear = linear_class(quantization, device, dtype, halves=halves, bfloat16=bfloat16)
    taken = _bytes(described, linear, dtype)
    remedy = smaller_weights(quantization, device)
    check_room("the weights", taken, device, remedy)
    with explained("the weights", taken, device, remedy), _quiet(described):
        stored = torch.bfloat16 if bfloat16 else declared if widened else dtype
        if load_format == "dummy":
            model = _random(described, stored, seed)
        else:
            model = _read(path, described, stored)
        network = Network(model.eval(), described.model.head)
        fuse(network, linear=linear, dtype=dtype, device=device)
        adopt(network, linear=linear, dtype=dtype, device=device)
        network.to(device)
        loaded = ForeignModel(described.model, described.layers, network)
    if loaded.mixes_tokens():
        raise ValueError(
            f"{described.model.architecture} cannot run through transformers: its tokens affect "
            "each other not by attention alone, and what else they share is not kept with a prefix"
        )
    return loaded


def _read(path: Path, described: Described, dtype: torch.dtype) -> PreTrainedModel:
    name = described.model.architecture
    if any(path.glob("*.gguf")) and not any(path.glob("*.safetensors")):
        raise ValueError(
            f"{path} holds GGUF, which our own families read, and transformers' {name} does not: "
            "give model_impl 'coppice' if it is one of them, or the model's safetensors"
        )
    open_tensors(path)  # for its errors, which name the file and what to do
    try:
        model, info = described.auto_class.from_pretrained(
            path,
            config=copy.deepcopy(described.config),
            dtype=dtype,
            attn_implementation=NAME,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:
        if isinstance(error, RuntimeError) and "memory" in str(error):
            raise
        lines = [line for line in str(error).strip().splitlines() if line.strip()]
        raise ValueError(
            f"{path}: transformers does not load it as {name}: {' '.join(lines[:3])[:500]}"
        ) from error
    for kind, what in (
        ("missing_keys", "lacks tensors"),
        ("mismatched_keys", "has tensors of another shape"),
        ("error_msgs", "is not loaded"),
    ):
        if info.get(kind):
            shown = ", ".join(sorted(map(str, info[kind]))[:5])
            raise ValueError(f"{path} {what} for {name}: {shown}")
    if info.get("unexpected_keys"):
        names = sorted(map(str, info["unexpected_keys"]))
        _log.warning(
            "%s: %d tensors are not part of transformers' %s and are left out: %s",
            path, len(names), name, ", ".join(names[:5]),
        )  # fmt: skip
    return model


def _random(described: Described, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """Normal numbers of deviation 0.02 for matrices, and what the model's class starts with."""
    model = described.auto_class.from_config(
        copy.deepcopy(described.config), dtype=dtype, attn_implementation=NAME
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.02, generator=generator)
    return model


def _bytes(described: Described, linear: type[Linear], dtype: torch.dtype) -> int:
    matrices = described.matrices * linear.stored_as(dtype)[0] / 8
    return round(matrices) + described.others * dtype.itemsize


@contextmanager
def _quiet(described: Described) -> Iterator[None]:
    """Without transformers' progress bars while a small model is loaded."""
    shown = their_logging.is_progress_bar_enabled()
    if described.matrices + described.others > _FEW or not shown:
        yield
        return
    their_logging.disable_progress_bar()
    try:
        yield
    finally:
        their_logging.enable_progress_bar()
