"""The attention backend for a machine without a GPU: numba over pages, torch's flash kernel beside.

Decode rows read their private pages in place with a compiled kernel. Everything that has many rows
for the same keys goes to torch's CPU flash kernel: a prefill chunk against itself (causal, from k
and v), a chunk against its cached prefix, and a shared stretch against all rows below it. Partial
results over disjoint keys are merged by log-sum-exp. ``cpu_schedule`` decides who reads what.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import ModuleType

import numpy as np
import torch

from coppice.kernels import threads
from coppice.kernels.checks import check_attend, check_cache, check_copy
from coppice.kernels.cpu_rows import row_kernels
from coppice.kernels.cpu_schedule import Band, KeyRange, Read, Schedule, build_schedule
from coppice.kernels.interface import AttentionBackend, AttentionPlan, LayerCache

_log = logging.getLogger(__name__)
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

# Up to so many folded query rows a shared stretch is read where it lies, by two matrix products.
# torch's flash kernel cuts the rows into blocks of 32 and lays out the keys again for each: with
# 1,024 shared keys, 3 KV heads of 64 and 16 or 32 rows, all of ``attend`` took 0.75 to 0.85 of the
# time with products. With 192 folded rows there was nothing in it; from there on the flash kernel
# reads a copy laid out by head, for the rows of a view lie num_kv_heads * head_dim apart, often a
# power of two, and so fall on the same few cache lines.
_PRODUCT_ROWS = 128
# Each run read as a view costs a call and a merge; runs shorter than this on average are gathered.
_VIEW_TOKENS = 256
# Tokens copied at a time: what is copied stays in cache for the product, and the scratch memory
# stays small. 512 to 2,048 are alike; at 256 the product itself runs 1.15 times longer.
_BLOCK_TOKENS = 1024


class PreparedPlan:
    """A checked plan with its schedules, made when the first layer with that window asks."""

    __slots__ = ("_schedules", "num_threads", "plan")

    def __init__(self, plan: AttentionPlan) -> None:
        # A copy, for the kernels are compiled for arrays that can be written to.
        self.plan = replace(plan, page_indices=plan.page_indices.copy())
        self.num_threads = threads.use_torch_threads()
        self._schedules: dict[int | None, Schedule] = {}

    def schedule(self, window: int | None) -> Schedule:
        if window not in self._schedules:
            self._schedules[window] = build_schedule(self.plan, window, self.num_threads)
        return self._schedules[window]


class CpuBackend(AttentionBackend):
    """Attention in float32 on the CPU; other types are refused by name.

    Making one compiles the kernels or loads them from numba's cache. Where numba is missing or
    fails, plain torch does their work, several times slower, and a warning says why.
    """

    name = "cpu"
    dtypes = (torch.float32,)

    def __init__(self) -> None:
        threads.calm_waiting_threads()
        self._kernels = _load_kernels()
        self._rows = row_kernels()
        self._scratch = _Scratch()

    def write_kv(
        self, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, slots: torch.Tensor
    ) -> None:
        check_cache(self, k, v, cache)
        cache.k.flatten(0, 1).index_copy_(0, slots, k)
        cache.v.flatten(0, 1).index_copy_(0, slots, v)

    def write_rotated(
        self,
        qk: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        signed_sin: torch.Tensor,
        cache: LayerCache,
        slots: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        heads = qk.shape[1] - v.shape[1]
        check_cache(self, qk[:, heads:], v, cache)
        rotated = self._rows.rotate_write(qk, v, cos, signed_sin, cache.k, cache.v, slots)
        return rotated[:, :heads], rotated[:, heads:]

    def copy_pages(
        self, caches: Sequence[LayerCache], src: Sequence[int], dst: Sequence[int]
    ) -> None:
        for layer in caches:
            check_copy(len(layer.k), src, dst)
            for pages in (layer.k, layer.v):
                for source, destination in zip(src, dst, strict=True):
                    pages[destination].copy_(pages[source])

    def prepare(self, plan: AttentionPlan, *, num_pages: int | None = None) -> PreparedPlan:
        plan.check(num_pages)
        return PreparedPlan(plan)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: LayerCache,
        prepared: PreparedPlan,
        *,
        scale: float,
        sliding_window: int | None = None,
        logit_softcap: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        check_attend(self, prepared.plan, q, k, v, cache, sliding_window, logit_softcap)
        layer = _Layer(self._kernels, self._scratch, prepared, q, k, v, cache, scale)
        schedule = prepared.schedule(sliding_window)
        # Pieces, chunks and bands write their rows, each row exactly once; reads merge into them.
        if len(schedule.pieces):
            layer.attend_pieces(schedule)
        for start, stop in schedule.chunks:
            layer.attend_chunk(start, stop)
        for band in schedule.bands:
            layer.attend_band(band)
        for read in schedule.reads:
            layer.attend_read(read)
        return layer.out, layer.lse


class _Layer:
    """One call of ``attend``: its tensors, and one method for each kind of work."""

    def __init__(
        self,
        kernels: ModuleType,
        scratch: _Scratch,
        prepared: PreparedPlan,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: LayerCache,
        scale: float,
    ) -> None:
        self.kernels = kernels
        self.scratch = scratch
        self.plan = prepared.plan
        self.num_threads = prepared.num_threads
        self.q, self.k, self.v = q.detach(), k.detach(), v.detach()
        self.caches = cache.k.detach(), cache.v.detach()
        self.kv_heads, self.head_dim = cache.k.shape[2:]
        self.group = q.shape[1] // self.kv_heads
        self.scale = scale
        self.out = torch.empty(q.shape, dtype=torch.float32)
        self.lse = torch.empty(q.shape[:2], dtype=torch.float32)

    def attend_pieces(self, schedule: Schedule) -> None:
        rows, heads = self.lse.shape
        extra = torch.empty(schedule.num_extra, heads * self.head_dim)
        extra_lse = torch.empty(schedule.num_extra, heads)
        self.kernels.attend_rows(
            self.q.reshape(rows, -1).contiguous().numpy(),
            self.caches[0].view(-1).numpy(),
            self.caches[1].view(-1).numpy(),
            self.plan.page_indices,
            schedule.pieces,
            schedule.shares,
            schedule.merges,
            self.plan.page_size,
            self.kv_heads,
            self.head_dim,
            np.float32(self.scale),
            self.out.view(rows, -1).numpy(),
            self.lse.numpy(),
            extra.numpy(),
            extra_lse.numpy(),
        )

    def attend_chunk(self, start: int, stop: int) -> None:
        # Query heads of a group lie along the batch, over one copy of the keys with stride 0.
        q = self.q[start:stop].unflatten(1, (self.kv_heads, self.group)).permute(2, 1, 0, 3)
        k, v = (
            own[start:stop].transpose(0, 1).contiguous().expand(self.group, -1, -1, -1)
            for own in (self.k, self.v)
        )
        self._put(start, stop, *_flash(q, k, v, 0.0, True, scale=self.scale))

    def attend_band(self, band: Band) -> None:
        rows = slice(band.start, band.stop)
        q = self.q[rows].unflatten(1, (self.kv_heads, self.group)).permute(2, 1, 0, 3)
        k, v = (
            part.expand(self.group, -1, -1, -1)
            for part in self._gather(band.keys, 0, band.keys.count)
        )
        result = _flash(q, k, v, 0.0, False, attn_mask=band.mask, scale=self.scale)
        self._put(band.start, band.stop, *result)

    def attend_read(self, read: Read) -> None:
        count = len(read.rows)
        # Query heads of a group are folded into rows: [1, kv_heads, rows * group, dim].
        q = self.q.index_select(0, torch.from_numpy(read.rows))
        q = q.unflatten(1, (self.kv_heads, self.group)).transpose(0, 1)
        q = q.reshape(1, self.kv_heads, count * self.group, self.head_dim)
        for k, v in self._parts(read.keys, count * self.group):
            # [1, kv_heads, rows * group, dim] and [1, kv_heads, rows * group]
            if q.shape[2] <= _PRODUCT_ROWS:
                other, other_lse = _attend_few(q, k, v, self.scale)
            else:
                other, other_lse = _flash(q, k, v, 0.0, False, scale=self.scale)
            shape = (self.kv_heads, count, self.group)
            self.kernels.merge_rows(
                self.out.numpy(),
                self.lse.numpy(),
                read.rows,
                other.contiguous().view(*shape, self.head_dim).numpy(),
                other_lse.contiguous().view(shape).numpy(),
                self.num_threads,
            )

    def _put(self, start: int, stop: int, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Store results ``[group, kv_heads, rows, dim]`` and ``[group, kv_heads, rows]``."""
        shape = (self.kv_heads, self.group)
        self.out[start:stop].unflatten(1, shape).copy_(out.permute(2, 1, 0, 3))
        self.lse[start:stop].unflatten(1, shape).copy_(lse.permute(2, 1, 0))

    def _parts(
        self, keys: KeyRange, folded_rows: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The keys and values of a range: a view of each run where that pays, else copied blocks.

        Every part is ``[1, kv_heads, tokens, dim]`` and is good until the next is asked for.
        """
        if folded_rows > _PRODUCT_ROWS or keys.count < _VIEW_TOKENS * len(keys.runs):
            for begin in range(0, keys.count, _BLOCK_TOKENS):
                yield self._gather(keys, begin, min(_BLOCK_TOKENS, keys.count - begin))
            return
        flat_k, flat_v = (cache.flatten(0, 1) for cache in self.caches)
        for start, count in keys.runs:
            for begin in range(start, start + count, _BLOCK_TOKENS):
                rows = slice(begin, min(begin + _BLOCK_TOKENS, start + count))
                yield (
                    flat_k[rows].transpose(0, 1).unsqueeze(0),
                    flat_v[rows].transpose(0, 1).unsqueeze(0),
                )

    def _gather(self, keys: KeyRange, begin: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy ``count`` tokens of a range, from its ``begin``-th on, into the scratch memory."""
        shape = (2, self.kv_heads, count, self.head_dim)
        parts = self.scratch.tensor(shape)
        # Only the pages in question: the torch fallback copies those that it is given whole.
        size = self.plan.page_size
        at = keys.first + begin
        pages = keys.pages[at // size : -(-(at + count) // size)]
        k_cache, v_cache = (cache.numpy() for cache in self.caches)
        self.kernels.gather_heads(
            k_cache, v_cache, pages, at % size, count, parts.numpy(), self.num_threads
        )
        return parts[0].unsqueeze(0), parts[1].unsqueeze(0)


def _attend_few(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``_flash`` gives for ``q [1, kv_heads, rows, dim]``, by two products."""
    scores = torch.bmm(q[0] * scale, k[0].transpose(-1, -2))
    top = scores.amax(dim=-1, keepdim=True)
    total = scores.sub_(top).exp_().sum(dim=-1, keepdim=True)
    out = torch.bmm(scores, v[0]).div_(total)
    return out.unsqueeze(0), top.add_(total.log_()).squeeze(-1).unsqueeze(0)


class _Scratch:
    """Memory for copied keys and values, kept between calls: fresh pages cost as much as a copy."""

    __slots__ = ("_memory",)

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def tensor(self, shape: tuple[int, ...]) -> torch.Tensor:
        """An uninitialised float32 tensor; it overwrites the one handed out before."""
        size = math.prod(shape)
        if self._memory.numel() < size:
            self._memory = torch.empty(size)
        return self._memory[:size].view(shape)


def _load_kernels() -> ModuleType:
    """The compiled kernels, tried on a small batch; plain torch, with a warning, if that fails."""
    try:
        from coppice.kernels import paged_numba

        _try_out(paged_numba)
    except Exception as error:  # numba raises its own types, LLVM's, ImportError and OSError
        from coppice.kernels import paged_torch

        _log.warning(
            "CPU attention runs in plain torch, several times slower: numba's kernels could not "
            "be used (%s: %s)",
            type(error).__name__,
            str(error).strip().split("\n")[0],
        )
        return paged_torch
    return paged_numba


def _try_out(kernels: ModuleType) -> None:
    """Run every kernel, on one thread's share and on two, so that compiling fails here if it does.

    One row of two query heads over two keys, all ones, in two pieces that are merged.
    """
    cache = np.ones((1, 4, 1, 8), np.float32)
    flat, table = cache.reshape(-1), np.zeros(1, np.int32)
    q = np.ones((1, 16), np.float32)
    out, extra = np.empty((1, 16), np.float32), np.empty((1, 16), np.float32)
    lse, extra_lse = np.empty((1, 2), np.float32), np.empty((1, 2), np.float32)
    pieces, merges = np.array([[0, 0, 0, 1, -1], [0, 0, 1, 2, 0]]), np.array([[0, 0, 1]])
    for shares in ([0, 2], [0, 1, 2]):
        kernels.attend_rows(
            q, flat, flat, table, pieces, np.array(shares), merges, 4, 1, 8, np.float32(1),
            out, lse, extra, extra_lse,
        )  # fmt: skip
    part = np.empty((2, 1, 4, 8), np.float32)
    kernels.gather_heads(cache, cache, table, 0, 4, part, 2)
    many = kernels.MERGE_SHARED_FROM // 16
    outs, lses = np.ones((many, 2, 8), np.float32), np.zeros((many, 2), np.float32)
    others, other_lses = np.ones((1, many, 2, 8), np.float32), np.zeros((1, many, 2), np.float32)
    for sharing in (1, 2):
        kernels.merge_rows(outs, lses, np.arange(many), others, other_lses, sharing)
    if not all(np.allclose(got, 1) for got in (out, part, outs)):
        raise ArithmeticError("the compiled kernels give wrong results on a batch of ones")
