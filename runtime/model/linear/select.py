"""Chooses the class of linear layers that the options, the device and the checkpoint call for."""

from __future__ import annotations

import logging

import torch

from coppice.kernels.cpu.code.processor import has_bfloat16
from coppice.kernels.cpu.layer.matmul.float_products import float_kernels
from coppice.kernels.cpu.layer.matmul.int8_products import panel_kernels
from coppice.runtime.model.layers import Linear
from coppice.runtime.model.linear.deterministic import SteadyLinear
from coppice.runtime.model.linear.eight_bit import Fp8Linear, Int8Linear, check_plain_product
from coppice.runtime.model.linear.grouped import Int4Linear
from coppice.runtime.model.linear.sixteen_bit import BFloat16Linear, Float16Linear, HalfLinear

_log = logging.getLogger(__name__)


def linear_class(
    quantization: str | None,
    device: torch.device,
    dtype: torch.dtype,
    *,
    halves: torch.dtype | None = None,
    deterministic: bool = False,
    bfloat16: bool = False,
) -> type[Linear]:
    """The class of projections for ``quantization``; None for float weights.

    ``halves`` is the 16-bit type of the checkpoint's weights, if all have the same: on a CPU that
    computes in float32 they stay in it, where such products can be compiled. ``deterministic`` asks
    for products in which a row depends on no other row; there are none for 8-bit weights.
    ``bfloat16`` asks for products of bfloat16 in a model that is float32 otherwise, on a CPU.

    Raises ``ValueError`` that names the reason where the device, the type of the model or torch's
    product does not serve: ``int8``, and ``int4``, whose head is int8, need a CPU whose int8
    products are exact (where none is compiled, sums of torch's can saturate); ``fp8`` needs a GPU
    with products of 8-bit floats, and bfloat16.
    """
    if bfloat16:
        if not has_bfloat16():
            _log.warning(
                "dtype is 'bfloat16', and this processor has no instructions for it (AVX512-BF16, "
                "AMX, or ARM's): 'float32' is faster and more exact"
            )
        return BFloat16Linear
    if deterministic:
        if quantization is not None:
            raise ValueError(
                f"quantization is {quantization!r}; with deterministic True it must be None"
            )
        return SteadyLinear
    if quantization is None:
        if halves and device.type == "cpu" and dtype == torch.float32 and float_kernels():
            return Float16Linear if halves == torch.float16 else HalfLinear
        return Linear
    if quantization in ("int8", "int4"):
        if device.type != "cpu":
            raise ValueError(
                f"quantization {quantization!r} runs on a CPU only; device is {device}, which "
                "takes 'fp8'"
            )
        if panel_kernels() is None:
            check_plain_product()
        return Int8Linear if quantization == "int8" else Int4Linear
    _check_fp8_device(device)
    if dtype != torch.bfloat16:
        raise ValueError(
            f"quantization 'fp8' computes in bfloat16; dtype is {str(dtype).split('.')[-1]}"
        )
    return Fp8Linear


def _check_fp8_device(device: torch.device) -> None:
    """Refuse to run where there is no product of 8-bit floats."""
    if device.type != "cuda":
        raise ValueError(
            f"quantization 'fp8' runs on a GPU only; device is {device}, which takes 'int8' or "
            "'int4'"
        )
    chip = torch.cuda.get_device_properties(device)
    if (chip.major, chip.minor) < (8, 9):
        raise ValueError(
            "quantization 'fp8' needs a GPU with products of 8-bit floats, of compute capability "
            f"8.9 or later; this one has {chip.major}.{chip.minor}"
        )
