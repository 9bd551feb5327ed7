"""The kernels that `gpu_compare.py` compares: ways to attend and to choose tokens, in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from coppice.kernels.attention.interface import LayerCache
from coppice.kernels.schedule.cost import CostModel
from coppice.kernels.schedule.items import build_tree_schedule
from coppice.kernels.schedule.tiles import Tile
from coppice.kernels.triton.backend import TritonBackend
from gpu_suite.attention import Bench, Way
from gpu_suite.attention_cases import PAGE_SIZE, Case, Sizes, bytes_moved, flop
from gpu_suite.worker import Row, reason

#: What makes each way, which may fail.
Ways = dict[str, Callable[[], Way]]

STAGES = (3, 5)
TILES = (
    Case("decode", 64, 4096),
    Case("decode", 256, 4096),
    Case("prefill", 1, 8192, 8192),
    Case("prefill", 1, 2048 + 8192, 2048),
)
#: Those whose pieces of keys once had no room in a graph.
LONG = (Case("decode", 32, 8192), Case("decode", 64, 32768), Case("decode", 256, 8192))
EIGHT_BITS = (Case("decode", 64, 4096), Case("decode", 64, 32768), TILES[-1])
#: Prompts that are causal, and the level that 64 and 256 sequences share: rows and keys.
CAUSAL, WIDE = ((8192, 8192), (2048, 2048 + 8192)), ((64, 8192), (256, 8192))

_CLOSE, _ROUNDED = 0.01, 0.1  # off by this part of the norm: by other sums, by a cache of e4m3


def tile_stages(bench: Bench, deadline: float) -> Iterator[Row]:
    """Tiles of keys in flight: as many as are chosen, and others."""
    for case in TILES:

        def of(data: _Data) -> Ways:
            staged = {n: _Staged(bench.device, n) for n in STAGES}
            return {f"{n} stages": partial(data.attend, each) for n, each in staged.items()}

        yield from _attention(bench, deadline, "stages of tiles", case, of)


def in_graphs(bench: Bench, deadline: float) -> Iterator[Row]:
    """Attention by a plan of its own, and as a graph has it: all pieces must have room there."""
    for case in LONG:
        yield from _attention(bench, deadline, "attention in graphs", case, lambda data: {
            "by its plan": partial(data.attend, TritonBackend(bench.device)),
            "in a graph": partial(data.in_graph, TritonBackend(bench.device)),
        })  # fmt: skip


def eight_bits(bench: Bench, deadline: float) -> Iterator[Row]:
    """Attention over a cache of bfloat16, and over one of e4m3, which has half of the bytes."""
    for case in EIGHT_BITS:

        def of(data: _Data) -> Ways:
            backend, cache = TritonBackend(bench.device), data.cache
            ones = torch.ones(bench.sizes.kv_heads, device=bench.device)
            halves = (each.to(torch.float8_e4m3fn) for each in (cache.k, cache.v))
            rounded = LayerCache(*halves, (ones, ones))
            return {
                "bfloat16": partial(data.attend, backend),
                "e4m3": partial(data.attend, backend, rounded),
            }

        yield from _attention(bench, deadline, "fp8 cache", case, of, _ROUNDED, {"e4m3": 0.5})


def flashinfer_kernels(bench: Bench, deadline: float) -> Iterator[Row]:
    """FlashInfer's prefill kernels for Ampere (fa2) and for Hopper (fa3)."""
    shapes = [("causal prefill", *each) for each in CAUSAL]
    shapes += [("wide shared level", *each) for each in WIDE]
    for kind, rows, keys in shapes:
        if bench.quick:
            rows, keys = max(2, rows // 128), keys // 128
        sizes, device = bench.sizes, bench.device
        stem = {"benchmark": "fa2 beside fa3", "kernel": kind, "rows": rows, "keys": keys}
        if time.perf_counter() > deadline:
            yield {**stem, "left_out": "the part's time was over"}
            continue
        shape = (-(-keys // PAGE_SIZE), PAGE_SIZE, sizes.kv_heads, sizes.head_dim)
        cache = LayerCache(*torch.randn(2, *shape, device=device, dtype=torch.bfloat16))
        q = torch.randn(rows, sizes.heads, sizes.head_dim, device=device, dtype=torch.bfloat16)
        causal = kind == "causal prefill"
        seen = rows * (keys - rows) + rows * (rows + 1) // 2 if causal else rows * keys
        ways: Ways = {  # which may not import, be built, or run on this chip
            name: partial(_by_flashinfer, name, q, cache, keys, sizes, causal=causal)
            for name in ("fa2", "fa3")
        }
        work = 4 * sizes.head_dim * sizes.heads * seen
        yield from _compared(bench, stem, ways, _CLOSE, dict.fromkeys(ways, 0), work)


def _by_flashinfer(
    name: str, q: torch.Tensor, cache: LayerCache, keys: int, sizes: Sizes, *, causal: bool
) -> Way:
    import flashinfer

    workspace = torch.zeros(128 * 2**20, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=name)
    pages = len(cache.k)
    order = torch.from_numpy(np.random.default_rng(0).permutation(pages).astype(np.int32))

    def numbers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    wrapper.plan(
        numbers(0, len(q)), numbers(0, pages), order.to(q.device),
        numbers((keys - 1) % PAGE_SIZE + 1), sizes.heads, sizes.kv_heads, sizes.head_dim,
        PAGE_SIZE, causal=causal, sm_scale=sizes.scale, q_data_type=q.dtype,
        kv_data_type=cache.k.dtype, o_data_type=q.dtype, seq_lens=numbers(keys),
    )  # fmt: skip
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=q.device)
    made: Way = lambda: wrapper.run(  # noqa: E731
        q, (cache.k, cache.v), out=out, lse=lse, return_lse=True
    )[0]
    return made


class _Staged(TritonBackend):
    """Tiles with another number of stages."""

    def __init__(self, device: torch.device, stages: int) -> None:
        super().__init__(device)
        self._stages = stages

    def cost_model(self, *arguments: Any) -> CostModel:
        model = super().cost_model(*arguments)

        def staged(tile: Tile) -> Tile:
            return replace(tile, stages=self._stages)

        tiles = replace(model.tiles, few=staged(model.tiles.few), many=staged(model.tiles.many))
        return replace(model, tiles=tiles)


class _Data:
    """The tensors of a case: a cache, and the queries, keys and values of its rows."""

    def __init__(self, bench: Bench, case: Case) -> None:
        self._bench = bench
        self.plan, sizes = case.plan(), bench.sizes
        self.pages = int(self.plan.page_indices.max()) + 1
        place: dict[str, Any] = {"device": bench.device, "dtype": torch.bfloat16}
        shape = (self.pages, PAGE_SIZE, sizes.kv_heads, sizes.head_dim)
        self.cache = LayerCache(*(torch.randn(shape, **place) for _ in range(2)))
        rows = self.plan.num_rows
        self.q = torch.randn(rows, sizes.heads, sizes.head_dim, **place)
        self.k, self.v = torch.randn(2, rows, sizes.kv_heads, sizes.head_dim, **place)

    def attend(
        self, backend: TritonBackend, cache: LayerCache | None = None, prepared: Any = None
    ) -> Way:
        prepared = prepared or backend.prepare(self.plan, num_pages=self.pages)
        scale, over = self._bench.sizes.scale, cache or self.cache
        return lambda: backend.attend(self.q, self.k, self.v, over, prepared, scale=scale)[0]

    def in_graph(self, backend: TritonBackend) -> Way:
        """Attention that is captured with the plan of a first step of one token each."""
        plan = self.plan
        batch = plan.num_rows
        (fixed,) = backend.fixed_plans(
            [batch], page_size=PAGE_SIZE, num_pages=self.pages,
            max_pages=int(np.diff(plan.page_indptr).max()),
        )[0]  # fmt: skip
        first = np.arange(batch + 1, dtype=np.int32)
        ones = np.ones(batch, np.int32)
        pages = plan.page_indices[plan.page_indptr[:-1]]
        short = replace(plan, context_len=ones, page_indptr=first, page_indices=pages)
        if not fixed.load(short):
            raise ArithmeticError("a graph has no room for sequences of one token")
        attend = self.attend(backend, prepared=fixed)
        attend()
        if self._bench.device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = attend()

            def replayed(read: object = attend) -> torch.Tensor:  # keeps what the graph reads
                graph.replay()
                return out
        else:
            replayed = attend
        if not fixed.load(plan):
            raise ArithmeticError("the pieces of these contexts have no room in a graph")
        return replayed


def _attention(
    bench: Bench,
    deadline: float,
    benchmark: str,
    case: Case,
    make: Callable[[_Data], Ways],
    close: float = _CLOSE,
    shares: dict[str, float] | None = None,
) -> Iterator[Row]:
    """Compares ways of a case; ``shares``: the part of the cache's bytes that a way reads."""
    case = case.at(bench.sizes)
    stem = {"benchmark": benchmark, "case": case.part, "rows": case.rows, "batch": case.batch}
    if time.perf_counter() > deadline:
        yield {**stem, "left_out": "the part's time was over"}
        return
    data = _Data(bench, case)
    ways = make(data)
    moved = bytes_moved(data.plan, build_tree_schedule(data.plan, None, bench.sizes.model),
                        bench.sizes)  # fmt: skip
    shares = shares or {}
    of_each = {
        name: moved["all"] - round((1 - shares.get(name, 1.0)) * moved["kv"]) for name in ways
    }
    work = flop(data.plan, bench.sizes)
    yield from _compared(bench, stem, ways, close, of_each, work)


def _compared(
    bench: Bench,
    stem: Row,
    makers: Ways,
    close: float,
    moved: dict[str, int],
    work: int,
) -> Iterator[Row]:
    """A row for each way, all timed in turn; ``ratio`` is how many times the first one's rate."""
    expected: torch.Tensor | None = None
    ways: dict[str, Way] = {}
    failed: dict[str, str] = {}
    for name, make in makers.items():
        try:
            way = make()
            found = way().float()
            if expected is None:
                expected = found
            elif not (off := float((found - expected).norm() / expected.norm())) < close:
                raise ArithmeticError(f"its result is off by {off:.3g} of the norm")
            ways[name] = way
        except Exception as error:
            if not bench.works():
                raise
            failed[name] = reason(error)
    for name, error_text in failed.items():
        yield {**stem, "way": name, "left_out": error_text}
    if not ways:
        return
    times = bench.times(ways, bench.rounds)
    first = times[next(iter(times))]
    for name, measured in times.items():
        seconds = statistics.median(measured)
        ratios = sorted(a / b for a, b in zip(first, measured, strict=True))
        yield {
            **stem,
            "way": name,
            "ratio": round(ratios[len(ratios) // 2], 3),
            "ratio_low": round(ratios[len(ratios) // 10], 3),
            "ratio_high": round(ratios[-1 - len(ratios) // 10], 3),
            "times": {
                "median_ms": round(seconds * 1e3, 4),
                **({"gb_per_s": round(moved[name] / seconds / 1e9, 1)} if moved[name] else {}),
                "tflop_per_s": round(work / seconds / 1e12, 2),
            },
        }
