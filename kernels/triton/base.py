"""What the attention backends of a GPU share: writes to the cache and copies of pages, in Triton.

On a CPU they run only where Triton interprets its kernels (``TRITON_INTERPRET=1`` before the first
import of triton), which is for tests: a tile takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
import triton

from coppice.kernels.attention.checks import check_cache, check_copy, check_rows
from coppice.kernels.attention.interface import (
    AttentionBackend,
    AttentionPlan,
    HeadNorm,
    LayerCache,
    brief,
)
from coppice.kernels.schedule.cost import H100_MULTIPROCESSORS
from coppice.kernels.transfer import Outbox, send
from coppice.kernels.triton.cache import copy_page_words, rotate_rows, write_rows
from coppice.kernels.triton.delivery import Blocks
from coppice.kernels.triton.dependent import dependent

#: Whether Triton runs its kernels in Python. It works on the raw bits of 16-bit floats, so that
#: kernels must turn them into float32 first.
INTERPRETED = not isinstance(write_rows, triton.JITFunction)

# 32-bit words of a page that a program copies.
_COPY_WORDS = 1024

# Numbers of a row's heads that a program rotates: 16 heads of 128, by four warps.
_HEAD_NUMBERS = 2048


class GpuBackend(AttentionBackend):
    """Cache writes and page copies as Triton kernels, compiled at their first use.

    Raises ``ValueError`` for a device that the kernels do not run on.
    """

    norms_heads = True
    resident_tables = True

    def __init__(self, device: torch.device) -> None:
        if INTERPRETED and device.type != "cpu":
            raise ValueError(
                f"device is {device}; with TRITON_INTERPRET set attention_backend {self.name!r} "
                "runs on 'cpu' only"
            )
        if not INTERPRETED and device.type != "cuda":
            raise ValueError(
                f"device is {device}; attention_backend {self.name!r} runs on 'cuda' only (on "
                "'cpu' where TRITON_INTERPRET=1 is set before triton is imported, for tests)"
            )
        self.device = device
        self._capability = capability_of(device)
        self._multiprocessors = H100_MULTIPROCESSORS
        if device.type == "cuda":
            self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self._blocks = Blocks(device)

    def outbox(self, device: torch.device) -> Outbox:
        return Outbox(device, self._blocks)

    def _check_tables(self, plan: AttentionPlan) -> None:
        """Refuse a plan that points to page tables which are not there."""
        start = plan.table_start
        if start is None:
            return
        if self.tables is None:
            raise ValueError(
                "table_start of the plan is given; without tables on the device it must be None"
            )
        ends = start + np.diff(plan.page_indptr)
        if int(start.min()) < 0 or int(ends.max()) > len(self.tables):
            raise ValueError(
                f"table_start of the plan is {brief(start)}; page tables must lie within the "
                f"{len(self.tables)} entries on the device"
            )

    def write_kv(
        self, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, slots: torch.Tensor
    ) -> None:
        check_cache(self, k, v, cache)
        check_rows(k=k, v=v)
        if not len(k):
            return
        width = k.shape[1] * k.shape[2]
        block = triton.next_power_of_2(width)
        with on(self.device):
            write_rows[(len(k),)](
                k, v, cache.k, cache.v, *(cache.scales or (k, v)), slots, k.stride(0), v.stride(0),
                WIDTH=width, BLOCK=block, HEAD_DIM=k.shape[2], SCALED=cache.scales is not None,
                INTERPRETED=INTERPRETED, num_warps=min(8, max(1, block // 256)),
                **dependent(self.device),
            )  # fmt: skip

    def write_rotated(
        self,
        qk: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        signed_sin: torch.Tensor,
        cache: LayerCache,
        slots: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._write_heads(qk, v, None, cos, signed_sin, cache, slots)

    def write_normed(
        self,
        qk: torch.Tensor,
        v: torch.Tensor,
        norm: HeadNorm,
        cos: torch.Tensor,
        signed_sin: torch.Tensor,
        cache: LayerCache,
        slots: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = tuple(qk.shape[1:])
        if tuple(norm.weight.shape) != shape or not norm.weight.is_contiguous():
            raise ValueError(
                f"norm.weight has shape {tuple(norm.weight.shape)} and strides "
                f"{norm.weight.stride()}; it must be {shape}, contiguous"
            )
        return self._write_heads(qk, v, norm, cos, signed_sin, cache, slots)

    def _write_heads(
        self,
        qk: torch.Tensor,
        v: torch.Tensor,
        norm: HeadNorm | None,
        cos: torch.Tensor,
        signed_sin: torch.Tensor,
        cache: LayerCache,
        slots: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kv_heads, head_dim = cache.k.shape[2:]
        both = qk.shape[1]
        heads = both - kv_heads
        check_cache(self, qk[:, heads:], v, cache)
        check_rows(qk=qk, v=v)
        if head_dim % 2:
            raise ValueError(f"qk has heads of {head_dim}; rotation needs an even number")
        rotated = torch.empty(qk.shape, dtype=qk.dtype, device=qk.device)
        if len(qk):
            width = triton.next_power_of_2(head_dim)
            block = min(triton.next_power_of_2(both), max(1, _HEAD_NUMBERS // width))
            with on(self.device):
                rotate_rows[(len(qk), triton.cdiv(both, block))](
                    qk, v, cos.contiguous(), signed_sin.contiguous(),
                    v if norm is None else norm.weight, rotated, cache.k, cache.v,
                    *(cache.scales or (v, v)), slots, qk.stride(0), v.stride(0),
                    0.0 if norm is None else norm.eps,
                    HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, BLOCK_H=block,
                    BLOCK_D=width, NORMED=norm is not None, SCALED=cache.scales is not None,
                    INTERPRETED=INTERPRETED, num_warps=max(1, block * width // 512),
                    **dependent(self.device),
                )  # fmt: skip
        return rotated[:, :heads], rotated[:, heads:]

    def copy_pages(
        self, caches: Sequence[LayerCache], src: Sequence[int], dst: Sequence[int]
    ) -> None:
        tensors = [pages for layer in caches for pages in (layer.k, layer.v)]
        for count in {len(each) for each in tensors}:
            check_copy(count, src, dst)
        for each in tensors:
            if not each.is_contiguous() or each[:1].nbytes != tensors[0][:1].nbytes:
                raise ValueError("caches: all must be contiguous, with pages of the same size")
        if not src or not tensors:
            return
        page_bytes = tensors[0][:1].nbytes
        if page_bytes % 4:
            raise ValueError(f"caches have pages of {page_bytes} bytes; it must be a multiple of 4")
        words = page_bytes // 4
        numbers = [*src, *dst], [pages.data_ptr() for pages in tensors]
        pages, addresses = send([np.array(each, np.int64) for each in numbers], self.device)
        block = min(_COPY_WORDS, triton.next_power_of_2(words))
        with on(self.device):
            copy_page_words[(len(src), len(tensors), triton.cdiv(words, block))](
                addresses, pages, len(src), WORDS=words, BLOCK=block, num_warps=4
            )


def capability_of(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU; (0, 0) of a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def on(device: torch.device) -> AbstractContextManager[object]:
    """A context in which Triton launches kernels on that GPU; of a CPU, an empty one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
