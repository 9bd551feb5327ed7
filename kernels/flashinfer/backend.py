"""The attention backend for an NVIDIA GPU that calls FlashInfer's kernels (Ye et al. 2025, MLSys).

``levels`` cuts a step into levels. Each shared level runs through FlashInfer's prefill wrapper, by
fa2's kernels or by fa3's (``choice``), and so do the chunks of prompts. The last level of decoding
sequences runs through the decode wrapper where few query heads share a KV head, else through the
prefill wrapper: its fa2 kernels are what the decode wrapper calls for tensor cores, and it copies
no array from pageable memory, for which the host would wait. A kernel of ours merges all partial
results of a row, in float32.

Steps whose rows are trees of tokens run by our own Triton kernels, which take what a row sees as
the bits of a number. FlashInfer takes a mask of rows by all of their keys, which would have to be
laid out, sent and packed anew in each step.

FlashInfer's log-sum-exps are to base 2 and are converted in the merge. Our own Triton kernels
write, rotate and copy K and V: FlashInfer rotates and appends to the cache by two kernels, so that
keys go to memory and back between them (its one fused kernel for 16-bit caches is for two head
counts only).
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import numpy as np
import torch

from coppice.kernels.attention.checks import check_attend
from coppice.kernels.attention.interface import (
    AttentionCase,
    AttentionPlan,
    LayerCache,
    SharedStretch,
)
from coppice.kernels.flashinfer.choice import CHOICES, most_split, prefers_fa3, without_fa3
from coppice.kernels.flashinfer.fixed import FlashInferFixedPlan, fixed_plans
from coppice.kernels.flashinfer.levels import Level, SharedLevel, build_levels, choose_levels
from coppice.kernels.flashinfer.wrappers import (
    WORKSPACE_BYTES,
    Fa3,
    LayerKind,
    SentSchedule,
    Wrappers,
    never,
)
from coppice.kernels.schedule.cost import CostModel, SharedRange
from coppice.kernels.schedule.tiles import choose_tiles
from coppice.kernels.transfer import Outbox
from coppice.kernels.triton.backend import TritonBackend
from coppice.kernels.triton.base import GpuBackend, on
from coppice.kernels.triton.plans import PreparedPlan as TritonPlan
from coppice.kernels.triton.plans import TritonFixedPlan

_log = logging.getLogger(__name__)

HEAD_DIMS = (64, 128, 256)

_NO_BUILDING = "FLASHINFER_DISABLE_JIT"

_Asked = tuple[int | None, CostModel]


class PreparedPlan:
    """A checked plan with its schedules.

    That of each window is made when the first such layer asks, or beforehand (``expect``), so that
    it goes with other things to the device. ``asked``: what layers asked for.
    """

    __slots__ = ("_device", "_schedules", "_tables", "asked", "plan")

    def __init__(
        self, plan: AttentionPlan, device: torch.device, tables: torch.Tensor | None
    ) -> None:
        self.plan = plan
        self._device = device
        self._tables = tables
        self._schedules: dict[_Asked, SentSchedule] = {}
        self.asked: set[_Asked] = set()

    def schedule(self, window: int | None, model: CostModel) -> SentSchedule:
        key = (window, model)
        self.asked.add(key)
        if key not in self._schedules:
            outbox = Outbox(self._device)
            self.expect([key], outbox)
            outbox.send()
        return self._schedules[key]

    def expect(self, asked: Iterable[_Asked], outbox: Outbox) -> None:
        """Make these schedules, which go with ``outbox``."""
        for window, model in asked:
            shared = choose_levels(self.plan, window, model)
            made = build_levels(self.plan, window, shared)
            self._schedules[window, model] = SentSchedule(made, self.plan, outbox, self._tables)


class FlashInferBackend(GpuBackend):
    """Attention by FlashInfer's kernels, beside our own for the cache.

    The constructor tries ``case`` on a small batch, for which FlashInfer loads its kernels or
    builds them; without a case that happens at the first use. Raises ``ValueError``, by name, for a
    device that is not CUDA, where FlashInfer cannot be imported, and for a case that it does not
    cover here.
    """

    name = "flashinfer"
    dtypes = (torch.bfloat16, torch.float16)
    softcaps = True
    branches = True
    ordered = True
    mixed_plans = True
    _on_cuda = False

    def __init__(
        self, device: torch.device, case: AttentionCase | None = None, *, kernels: str = "auto"
    ) -> None:
        """``kernels``: one of ``choice.CHOICES``."""
        super().__init__(device)
        if kernels not in CHOICES:
            allowed = ", ".join(map(repr, CHOICES[:-1]))
            raise ValueError(
                f"flashinfer_kernels is {kernels!r}; it must be {allowed} or {CHOICES[-1]!r}"
            )
        try:
            import flashinfer
        except Exception as error:  # it raises types of its own where versions do not match
            raise ValueError(
                "attention_backend is 'flashinfer', which cannot be imported here "
                f"({_summary(error)}); install the extra 'flashinfer', or take 'triton'"
            ) from error
        self._library = flashinfer
        # The decode wrapper wants zeros at its first use.
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[LayerKind, Wrappers] = {}
        self._before: PreparedPlan | None = None  # of the last step
        self._kernels = kernels
        self._on_cuda = self._on_cuda or device.type == "cuda"
        self._with_fa3: set[LayerKind] = set()
        self._ours = TritonBackend(device)
        # Our kernels write the cache, and older chips have no 8-bit numbers for them.
        self.scaled_dtypes = self._ours.scaled_dtypes
        self._case = case
        if case is not None:
            self._cover(case)

    def prepare(
        self, plan: AttentionPlan, *, num_pages: int | None = None, outbox: Outbox | None = None
    ) -> PreparedPlan | TritonPlan:
        if plan.branches is not None:
            self._ours.tables = self.tables
            return self._ours.prepare(plan, num_pages=num_pages, outbox=outbox)
        plan.check(num_pages)
        self._check_tables(plan)
        made = PreparedPlan(plan, self.device, self.tables)
        if outbox is not None:
            if self._before is not None:
                made.expect(self._before.asked, outbox)
            self._before = made
        return made

    def fixed_plans(
        self,
        sizes: Sequence[int],
        *,
        page_size: int,
        num_pages: int,
        max_pages: int,
        branches: bool = False,
        most_sequences: int | None = None,
    ) -> Sequence[Sequence[FlashInferFixedPlan | TritonFixedPlan]]:
        self._ours.tables = self.tables
        made = self._ours.fixed_plans(
            sizes,
            page_size=page_size,
            num_pages=num_pages,
            max_pages=max_pages,
            branches=branches,
        )
        split = None
        if self._case is not None:
            split = most_split(self._case.num_kv_heads, self._multiprocessors)
        return fixed_plans(
            sizes,
            {size: plan for size, (plan,) in zip(sizes, made, strict=True)},
            split=split,
            most_sequences=most_sequences,
            page_size=page_size,
            num_pages=num_pages,
            max_pages=max_pages,
            library=self._library,
            workspace=self._workspace,
            cost_model=self.cost_model,
            tables=self.tables,
        )

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: LayerCache,
        prepared: PreparedPlan | FlashInferFixedPlan | TritonPlan | TritonFixedPlan,
        *,
        scale: float,
        sliding_window: int | None = None,
        logit_softcap: float | None = None,
        lse_read: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(prepared, TritonPlan | TritonFixedPlan):
            return self._ours.attend(
                q, k, v, cache, prepared, scale=scale, sliding_window=sliding_window,
                logit_softcap=logit_softcap, lse_read=lse_read,
            )  # fmt: skip
        check_attend(self, prepared.plan, q, k, v, cache, sliding_window, logit_softcap)
        kind = LayerKind(
            sliding_window, logit_softcap, float(scale), q.shape[1], cache.k.shape[2], q.shape[2],
            prepared.plan.page_size, q.dtype, cache.k.dtype,
        )  # fmt: skip
        with on(self.device):
            return self.plan(kind, prepared).run(q, cache, lse_read=lse_read)

    def plan(self, kind: LayerKind, prepared: PreparedPlan | FlashInferFixedPlan) -> Wrappers:
        """The wrappers of a kind of layers, which hold the plan of this step."""
        _check_head_dim(kind.head_dim)
        if isinstance(prepared, FlashInferFixedPlan):
            return prepared.wrappers(kind)
        if kind not in self._wrappers:
            fa3 = self._fa3_for(kind) if kind in self._with_fa3 else never
            self._wrappers[kind] = Wrappers(self._library, self._workspace, kind, fa3)
        wrappers = self._wrappers[kind]
        wrappers.plan(prepared.schedule(kind.window, self.cost_model(kind)))
        return wrappers

    def cost_model(self, kind: LayerKind) -> CostModel:
        """The cost model that chooses levels; fa2's tiles have as many rows as our own."""
        return CostModel(
            choose_tiles(kind.head_dim, kind.dtype.itemsize, kind.group),
            kind.group,
            kind.kv_heads,
            kind.head_dim,
            2 * kind.head_dim * kind.cache_dtype.itemsize,
            self._multiprocessors,
        )

    def _fa3_for(self, kind: LayerKind) -> Fa3:
        """Which levels fa3 computes where it works."""
        if self._kernels == "fa3":
            return always
        return partial(prefers_fa3, model=self.cost_model(kind))

    def _cover(self, case: AttentionCase) -> None:
        """Try every kind of layer of the case with every kind of level; ``ValueError``, by name."""
        _check_head_dim(case.head_dim)
        for name, found, allowed in (
            ("dtype", case.dtype, self.dtypes),
            ("cache_dtype", case.cache_dtype, (case.dtype, *self.scaled_dtypes)),
        ):
            if found not in allowed:
                raise ValueError(
                    f"{name} is {found}; attention_backend 'flashinfer' takes "
                    f"{', '.join(map(str, allowed))}"
                )
        _log.info("FlashInfer loads its kernels, or builds what is not built yet, for minutes")
        for window in case.sliding_windows:
            # Scales for an 8-bit cache are measured with one of the weights' type.
            for cache_dtype in dict.fromkeys((case.dtype, case.cache_dtype)):
                kind = LayerKind(
                    window, case.logit_softcap, case.scale, case.num_heads, case.num_kv_heads,
                    case.head_dim, case.page_size, case.dtype, cache_dtype,
                )  # fmt: skip
                try:
                    self._try_out(kind, never)
                except Exception as error:  # of FlashInfer, its compiler, CUDA, or a wrong result
                    self._check_device(error)
                    raise ValueError(
                        f"attention_backend 'flashinfer' does not cover {kind.dtype} queries over "
                        f"a cache of {cache_dtype} with heads of {kind.head_dim}, sliding_window "
                        f"{window} and logit_softcap {kind.softcap} here ({_summary(error)})"
                    ) from error
                self._try_fa3(kind)
        if self._with_fa3:
            _log.info("FlashInfer's fa3 computes the rows of prompts where it takes less time")

    def _try_fa3(self, kind: LayerKind) -> None:
        """Try fa3, unless it is not asked for; ``ValueError`` where nothing else is."""
        if self._kernels == "fa2":
            return
        reason = without_fa3(self._capability, kind.head_dim, kind.dtype, kind.cache_dtype)
        if reason is None:
            try:
                # Building takes up to half an hour: only who asks for fa3 waits for it.
                with nullcontext() if self._kernels == "fa3" else _nothing_built():
                    self._try_out(kind, always)
                self._with_fa3.add(kind)
                del self._wrappers[kind]  # those in use choose level by level
                return
            except Exception as error:
                self._check_device(error)
                reason = _summary(error)
        if self._kernels == "fa3":
            raise ValueError(
                f"flashinfer_kernels is 'fa3', which does not cover {kind.dtype} queries over a "
                f"cache of {kind.cache_dtype} with heads of {kind.head_dim} here ({reason}); take "
                "'auto' or 'fa2'"
            )
        _log.info("FlashInfer's fa2 computes everything, not its fa3: %s", reason)

    def _check_device(self, error: Exception) -> None:
        """Raise ``RuntimeError`` if the device does not compute any more: no backend would then."""
        if not self._on_cuda:
            return
        try:
            torch.cuda.synchronize(self.device)
        except Exception as lost:
            raise RuntimeError(
                f"{self.device} failed when FlashInfer was tried ({_summary(error)}), and does not "
                f"compute any more ({_summary(lost)}); start again with attention_backend 'triton'"
            ) from error

    def _try_out(self, kind: LayerKind, fa3: Fa3) -> None:
        """Attend to keys and values of ones: three sequences below a shared page, one a chunk.

        First the chunk is the last, then the first: so all variants of our own kernels around
        FlashInfer's are compiled, too.
        """
        size, device = kind.page_size, self.device
        shared: tuple[SharedLevel, ...] = ()
        if kind.window is None or kind.window >= size + 2:
            shared = ((SharedRange(0, size, np.arange(3)),),)
        shape = (5, size, kind.kv_heads, kind.head_dim)
        ones = torch.ones(shape, device=device).to(kind.cache_dtype)
        scales = None
        if kind.cache_dtype in self.scaled_dtypes:
            scales = (torch.ones(kind.kv_heads, device=device),) * 2
        q = torch.ones(4, kind.heads, kind.head_dim, dtype=kind.dtype, device=device) / 8
        wrappers = Wrappers(self._library, self._workspace, kind, fa3)
        score = kind.head_dim / 8 * kind.scale
        if kind.softcap is not None:
            score = kind.softcap * math.tanh(score / kind.softcap)
        for counts in ((1, 1, 2), (2, 1, 1)):
            own = iter((1, 2, 3, 4))
            pages = [[0, *(next(own) for _ in range(count))] for count in counts]
            plan = AttentionPlan(
                page_size=size,
                query_start=np.cumsum([0, *counts]).astype(np.int32),
                context_len=np.array([size + count for count in counts], np.int32),
                page_indptr=np.cumsum([0, *map(len, pages)]).astype(np.int32),
                page_indices=np.concatenate(pages).astype(np.int32),
                stretches=(SharedStretch(0, 1, np.arange(3, dtype=np.int32)),),
            )
            with on(device):
                outbox = Outbox(device)
                sent = SentSchedule(build_levels(plan, kind.window, shared), plan, outbox)
                outbox.send()
                wrappers.plan(sent)
                out, lse = wrappers.run(q, LayerCache(ones, ones, scales))
            context = [size + 1 + row for count in counts for row in range(count)]
            seen = [min(keys, kind.window or keys) for keys in context]
            expected = torch.tensor([score + math.log(keys) for keys in seen])[:, None]
            if not (
                torch.allclose(out.float().cpu(), torch.ones(()), atol=0.02)
                and torch.allclose(lse.cpu(), expected, atol=0.02)
            ):
                raise ArithmeticError("its results are wrong on a batch of ones")
        self._wrappers[kind] = wrappers


def always(level: Level) -> bool:
    """fa3's kernels compute all that may be theirs."""
    return True


@contextmanager
def _nothing_built() -> Iterator[None]:
    """While it is open, FlashInfer loads what is built, and builds nothing."""
    before = os.environ.get(_NO_BUILDING)
    os.environ[_NO_BUILDING] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_BUILDING]
        else:
            os.environ[_NO_BUILDING] = before


def _check_head_dim(head_dim: int) -> None:
    if head_dim not in HEAD_DIMS:
        allowed = ", ".join(map(str, HEAD_DIMS))
        raise ValueError(
            f"head_dim is {head_dim}; attention_backend 'flashinfer' has kernels for {allowed}"
        )


def _summary(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
