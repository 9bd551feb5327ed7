"""The operations of a decoder on rows between matrix products, fused, on a CPU in float32.

``RowKernels`` runs numba's compiled functions (``rows_numba``). Where numba is missing or fails it
runs the same operations in torch, several times slower. All tensors are float32 and contiguous
within a row unless noted otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from ctypes import memmove
from functools import cache
from types import ModuleType

import numpy as np
import torch
import torch.nn.functional as F

from coppice.kernels.attention.interface import rotate
from coppice.kernels.cpu.code import threads
from coppice.kernels.cpu.code.hadamard import transformed

_log = logging.getLogger(__name__)
_NOTHING = np.empty((0, 0), np.float32)
_NO_BIAS = np.empty(0, np.float32)


class RowKernels:
    """Operations on rows; ``fused`` is the compiled module, None for torch's operators."""

    def __init__(self, fused: ModuleType | None) -> None:
        self._fused = fused

    def add_norm(
        self, x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """``x [..., W] += added``, and RMSNorm of the sum times ``weight``, a new tensor.

        ``weight`` is ``[W]``, or ``[H, W]`` for ``x [T, H, W]``; then nothing may be added.
        """
        if self._fused is None or weight.dim() > 1:
            if added is not None:
                x.add_(added)
            # torch's own rms_norm is six passes over x on a CPU, this is three.
            norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            inverse = (norm * norm / x.shape[-1]).add_(eps).rsqrt_()
            return (x * inverse).mul_(weight)
        out = torch.empty_like(x)
        other = _NOTHING if added is None else added.numpy()
        self._fused.add_norm(
            x.numpy(), other, weight.numpy(), np.float32(eps), out.numpy(), torch.get_num_threads()
        )
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` of ``gate | up [T, 2 W]``, a new tensor ``[T, W]``."""
        return self._gate_mul(gate_up, gelu=False)

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``gelu(gate) * up`` likewise, by GELU's approximation with tanh."""
        return self._gate_mul(gate_up, gelu=True)

    def _gate_mul(self, gate_up: torch.Tensor, *, gelu: bool) -> torch.Tensor:
        rows, width = gate_up.shape
        if self._fused is None:
            gate, up = gate_up.chunk(2, dim=-1)
            gate = F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)
            return gate.mul_(up)
        out = torch.empty(rows, width // 2)
        self._fused.gate_mul(gelu, gate_up.numpy(), out.numpy(), torch.get_num_threads())
        return out

    def rotate_write(
        self,
        qk: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        signed_sin: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """``AttentionBackend.write_rotated``, but queries and keys are returned as one tensor."""
        rows, heads, dim = qk.shape
        if self._fused is None:
            rotated = rotate(qk, cos, signed_sin)
            keys = rotated[:, heads - v.shape[1] :]
            for cache, new in ((k_cache, keys), (v_cache, v)):
                cache.flatten(0, 1).index_copy_(0, slots, new.to(cache.dtype))
            return rotated
        out = torch.empty(qk.shape)
        slots_of = k_cache.shape[0] * k_cache.shape[1]
        self._fused.rotate_write(
            flat_heads(qk), qk.stride(0), flat_heads(v), v.stride(0),
            cos.reshape(rows, dim).numpy(), signed_sin.reshape(rows, dim).numpy(),
            bits(k_cache).reshape(slots_of, -1), bits(v_cache).reshape(slots_of, -1), slots.numpy(),
            out.view(rows, heads * dim).numpy(), torch.get_num_threads(),
        )  # fmt: skip
        return out

    def copy_pages(
        self, addresses: Sequence[int], size: int, src: Sequence[int], dst: Sequence[int]
    ) -> None:
        """Copies blocks of ``size`` bytes, ``src[i]`` to ``dst[i]``, in order, at each address."""
        if self._fused is None:
            for first in addresses:
                for source, target in zip(src, dst, strict=True):
                    memmove(first + target * size, first + source * size, size)
            return
        self._fused.copy_pages(*(np.array(each, np.int64) for each in (addresses, src, dst)), size)

    def quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each row of ``x [T, W]``, transformed, as levels from -127 to 127, and its peak, ``[T]``.

        Levels are int8, and multiply a weight whose rows were transformed (``hadamard``).
        """
        if self._fused is None:
            x = transformed(x)
            peaks = x.abs().amax(dim=-1).clamp_(min=1e-30)  # of zeros any scale will do
            return (x * (127.0 / peaks)[:, None]).round_().to(torch.int8), peaks
        levels, peaks = torch.empty(x.shape, dtype=torch.int8), torch.empty(len(x))
        self._fused.quantize(x.numpy(), levels.numpy(), peaks.numpy(), torch.get_num_threads())
        return levels, peaks

    def rescale(
        self,
        product: torch.Tensor,
        peaks: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """``product`` int32 ``[T, W]`` times ``peaks [T]`` and ``scale [W]``, plus ``bias [W]``."""
        if self._fused is None:
            out = product.float().mul_(scale).mul_(peaks[:, None])
            return out if bias is None else out.add_(bias)
        out = torch.empty(product.shape)
        added = _NO_BIAS if bias is None else bias.numpy()
        self._fused.rescale(
            product.numpy(), peaks.numpy(), scale.numpy(), added, out.numpy(),
            torch.get_num_threads(),
        )  # fmt: skip
        return out


@cache
def row_kernels() -> RowKernels:
    """The fastest kernels that work here; compiles them or loads them from numba's cache."""
    threads.calm_waiting_threads()
    try:
        from coppice.kernels.cpu.layer import rows_numba

        _try_out(RowKernels(rows_numba))
    except Exception as error:  # numba raises its own types, LLVM's, ImportError and OSError
        _log.info("rows are worked by torch's operators: %s: %s", type(error).__name__, error)
        return RowKernels(None)
    return RowKernels(rows_numba)


def flat_heads(heads: torch.Tensor) -> np.ndarray:
    """``[T, H, D]`` with heads side by side as one flat array from its first element on."""
    rows, count, dim = heads.shape
    if not rows:
        return _NO_BIAS
    flat: np.ndarray = heads.as_strided(((rows - 1) * heads.stride(0) + count * dim,), (1,)).numpy()
    return flat


def bits(cache: torch.Tensor) -> np.ndarray:
    """A cache's memory, flat, as compiled code takes it: bfloat16 as uint16."""
    flat = cache.detach().view(-1)
    array: np.ndarray = (flat.view(torch.uint16) if flat.dtype == torch.bfloat16 else flat).numpy()
    return array


def _try_out(kernels: RowKernels) -> None:
    """Compares each kernel with torch's operators, on one row and on enough for several threads.

    So all are compiled or loaded here, where torch can replace them, and not in a step.
    """
    with torch.inference_mode():
        for rows in (1, 520):
            for got, expected in zip(
                _results(kernels, rows), _results(RowKernels(None), rows), strict=True
            ):
                slack = 1.01 if got.dtype == torch.int8 else 1e-4  # a tie may go either way
                if not torch.allclose(got.float(), expected.float(), atol=slack):
                    raise ArithmeticError("the compiled kernels give wrong results on a line")


def _results(kernels: RowKernels, rows: int) -> list[torch.Tensor]:
    """The result of each kernel for rows of 64 numbers on a line."""
    x = torch.linspace(-3, 3, rows * 64).view(rows, 64)
    weight = torch.linspace(0.5, 1, 64)
    levels, peaks = kernels.quantize(x)
    heads, angles = x.view(rows, 4, 16), x[:, :16].contiguous().view(rows, 1, 16)
    k_cache, v_cache = torch.zeros(rows, 1, 1, 16), torch.zeros(rows, 1, 1, 16)
    rotated = kernels.rotate_write(
        heads[:, :3], heads[:, 3:], angles, angles, k_cache, v_cache, torch.arange(rows)
    )
    return [
        kernels.add_norm(x.clone(), x, weight, 1e-5),
        kernels.silu_mul(x),
        kernels.gelu_mul(x),
        levels,
        peaks,
        kernels.rescale((x * 40).int(), peaks, weight, weight) / 127,
        rotated,
        k_cache,
        v_cache,
    ]
