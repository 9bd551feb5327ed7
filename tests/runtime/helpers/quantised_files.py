"""Checkpoints in AWQ, GPTQ, compressed-tensors and FP8, and the numbers that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def words(numbers: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Numbers `[n, m]` packed along the rows into int32 `[n, m * bits / 32]`, one by one."""
    per = 32 // bits
    out = torch.zeros(len(numbers), numbers.shape[1] // per, dtype=torch.int64)
    for place in range(per):
        column = place if order is None else order[place]
        out |= numbers[:, column::per].long() << (bits * place)
    return torch.where(out >= 1 << 31, out - (1 << 32), out).to(torch.int32)


def rounded(
    weight: torch.Tensor, bits: int, group: int, *, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers from 0 `[out, in]`, scales and zero points `[out, groups]`."""
    grouped = weight.view(len(weight), -1, group)
    top = (1 << bits) - 1
    if symmetric:
        scale = grouped.abs().amax(-1) / (top // 2)
        zero = torch.full_like(scale, 1 << (bits - 1))
    else:
        low, high = grouped.amin(-1), grouped.amax(-1)
        scale = (high - low) / top
        zero = (-low / scale).round().clamp(1, top)
    scale = scale.half().float()
    numbers = (grouped / scale[..., None] + zero[..., None]).round().clamp(0, top)
    return numbers.view(weight.shape).int(), scale, zero.int()


def awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    numbers, scale, zero = rounded(weight, 4, 32, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {
        "qweight": words(numbers.t(), 4, order),
        "qzeros": words(zero.t(), 4, order),
        "scales": scale.t().contiguous().half(),
    }
    return parts, (numbers - zero.repeat_interleave(32, 1)) * scale.repeat_interleave(32, 1)


def gptq(
    weight: torch.Tensor, *, bits: int, version: int = 1, shuffled: bool = False
) -> tuple[Tensors, torch.Tensor]:
    inputs = weight.shape[1]
    order = torch.randperm(inputs) if shuffled else torch.arange(inputs)
    numbers, scale, zero = rounded(weight[:, order], bits, 32, symmetric=version == 1)
    groups = torch.empty(inputs, dtype=torch.int32)
    groups[order] = torch.arange(inputs, dtype=torch.int32) // 32
    back = numbers[:, order.argsort()]
    parts = {
        "qweight": words(back, bits).t().contiguous(),
        "qzeros": words(zero.t() - int(version == 1), bits),
        "scales": scale.t().contiguous().half(),
        "g_idx": groups,
    }
    return parts, (back - zero[:, groups.long()]) * scale[:, groups.long()]


def packed(
    weight: torch.Tensor, *, symmetric: bool, group: int = 32
) -> tuple[Tensors, torch.Tensor]:
    numbers, scale, zero = rounded(weight, 4, group, symmetric=symmetric)
    parts = {
        "weight_packed": words(numbers, 4),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        parts["weight_zero_point"] = words(zero.t().contiguous(), 4).t().contiguous()
    spread = scale.repeat_interleave(group, 1)
    return parts, (numbers - zero.repeat_interleave(group, 1)) * spread


def uneven(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """GPTQ without `g_idx`, in groups of 24 inputs, of which the last has fewer."""
    rows, inputs = weight.shape
    wide = torch.zeros(rows, -(-inputs // 24) * 24)
    wide[:, :inputs] = weight
    numbers, scale, zero = rounded(wide, 4, 24, symmetric=True)
    parts = {
        "qweight": words(numbers[:, :inputs], 4).t().contiguous(),
        "qzeros": words(zero.t() - 1, 4),
        "scales": scale.t().contiguous().half(),
    }
    spread = (each.repeat_interleave(24, 1)[:, :inputs] for each in (zero, scale))
    middle, factor = spread
    return parts, (numbers[:, :inputs] - middle) * factor


def int8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    numbers = (weight / scale).round().to(torch.int8)
    return {"weight": numbers, "weight_scale": scale}, numbers * scale


def fp8(weight: torch.Tensor, *, per: str) -> tuple[Tensors, torch.Tensor]:
    rows, columns = weight.shape
    if per == "tensor":
        scale = (weight.abs().max() / 448).reshape(1)
        spread: torch.Tensor = scale.expand(rows, columns)
    elif per == "row":
        scale = weight.abs().amax(1, keepdim=True) / 448
        spread = scale.expand(rows, columns)
    else:  # blocks of 32 x 48, of which the last are smaller
        down, right = -(-rows // 32), -(-columns // 48)
        scale = torch.rand(down, right) * 0.1 + 0.01
        spread = scale.repeat_interleave(32, 0)[:rows].repeat_interleave(48, 1)[:, :columns]
    numbers = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    name = "weight_scale_inv" if per == "block" else "weight_scale"
    parts = {"weight": numbers, name: scale.float().contiguous(), "input_scale": torch.ones(1)}
    return parts, numbers.float() * spread


COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
CASES: dict[str, tuple[Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]], dict[str, Any]]] = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
    "gptq 4": (lambda w: gptq(w, bits=4), {"quant_method": "gptq", "bits": 4}),
    "gptq 8": (lambda w: gptq(w, bits=8), {"quant_method": "gptq", "bits": 8}),
    "gptq order": (lambda w: gptq(w, bits=4, shuffled=True), {"quant_method": "gptq", "bits": 4}),
    "gptq v2": (
        lambda w: gptq(w, bits=4, version=2),
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
    ),
    "w4a16": (lambda w: packed(w, symmetric=True), COMPRESSED),
    "w4a16 zeros": (lambda w: packed(w, symmetric=False), COMPRESSED),
    "w4a16 group 16": (lambda w: packed(w, symmetric=True, group=16), COMPRESSED),
    "gptq uneven": (uneven, {"quant_method": "gptq", "bits": 4, "group_size": 24}),
    "w8a8": (int8, COMPRESSED | {"format": "int-quantized"}),
    "fp8 tensor": (lambda w: fp8(w, per="tensor"), COMPRESSED | {"format": "float-quantized"}),
    "fp8 row": (lambda w: fp8(w, per="row"), {"quant_method": "fbgemm_fp8"}),
    "fp8 block": (
        lambda w: fp8(w, per="block"),
        {"quant_method": "fp8", "weight_block_size": [32, 48]},
    ),
}


def write_quantised(source: Path, case: str, folder: Path) -> tuple[Path, Path]:
    """Folders of a checkpoint whose projections are quantised, and of the decoded numbers."""
    torch.manual_seed(5)
    rounding, described = CASES[case]
    given = load_file(source / "model.safetensors")
    one, other = folder / "quantised", folder / "decoded"
    parts: Tensors = {}
    whole: Tensors = {}
    for name, tensor in given.items():
        if name.endswith("_proj.weight"):
            made, whole[name] = rounding(tensor)
            parts |= {f"{name.removesuffix('weight')}{part}": t for part, t in made.items()}
        else:
            parts[name] = whole[name] = tensor
    config = json.loads((source / "config.json").read_text())
    for place, tensors, more in (
        (one, parts, {"quantization_config": described}),
        (other, whole, {}),
    ):
        place.mkdir(exist_ok=True)
        (place / "config.json").write_text(json.dumps(config | more))
        save_file({n: t.contiguous() for n, t in tensors.items()}, place / "model.safetensors")
    return one, other
