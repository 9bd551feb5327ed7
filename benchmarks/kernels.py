"""The CPU kernels, attention and choice of tokens, beside what torch does; all ways in turn.

    python benchmarks/kernels.py [--json FILE] [--quick] [--cpu]

On a machine with a GPU it runs `kernels_gpu.py` instead, unless `--cpu` is given.

One JSON object a line. `ratio` is how many times faster a way is than the row's baseline: the
median over rounds of baseline time / its time; each round runs all ways one after another.
`ratio_low` and `ratio_high` are the 10th and 90th percentiles. `times` are the best round's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from common.harness import Rows, compare, machine, parser, ratio_rows
from coppice.kernels.cpu.code.threads import calm_waiting_threads

# The engine leaves the environment alone if a wait policy of either OpenMP is set. This one is for
# Intel's, which is not used here: so the threads wait as is their default.
_DEFAULT_WAIT = {"KMP_BLOCKTIME": "200"}
STEP_SETTINGS: dict[str, dict[str, str]] = {
    "omp, idle threads spin (OpenMP's default)": {"NUMBA_THREADING_LAYER": "omp", **_DEFAULT_WAIT},
    "omp, idle threads spin briefly (the engine's)": {"NUMBA_THREADING_LAYER": "omp"},
    "omp, idle threads sleep": {"NUMBA_THREADING_LAYER": "omp", "OMP_WAIT_POLICY": "passive"},
    "workqueue, torch's spin": {"NUMBA_THREADING_LAYER": "workqueue", **_DEFAULT_WAIT},
    "workqueue, torch's spin briefly": {"NUMBA_THREADING_LAYER": "workqueue"},
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--step", type=int, metavar="ROUNDS", help=argparse.SUPPRESS)
    options.add_argument(
        "--cpu", action="store_true", help="measure the CPU's kernels even if there is a GPU"
    )
    arguments = options.parse_args()
    if not arguments.cpu and not arguments.step and "gpu" in machine():
        import kernels_gpu

        kernels_gpu.main()
        return
    outside = dict(os.environ)
    calm_waiting_threads()
    if arguments.step:
        print(json.dumps(_time_steps(arguments.step)))
        return
    rows = Rows(arguments.json)
    where = machine()
    for row in _rows(arguments.quick, outside):
        rows.add(**row, machine=where)


def _rows(quick: bool, outside: dict[str, str]) -> list[dict[str, Any]]:
    rounds = 5 if quick else 15
    rows = [_start_up(outside)]
    shared = 512 if quick else 2048
    rows += _shared_decode(32, shared, 128, 16, 8, 128, rounds)
    rows += _shared_decode(8, shared, 128, 14, 2, 64, rounds)
    rows += _plain_decode(1, 4 * shared, 16, 8, 128, rounds)
    rows += _prefill(512 if quick else 2048, shared, 16, 8, 128, rounds)
    rows += _stretch_rule(rounds, quick)
    rows += _choice(32, 32_000, rounds)
    rows += _choice(8 if quick else 32, 151_936, rounds)
    rows += _steps(2 if quick else 5, outside)
    return rows


def _start_up(outside: dict[str, str]) -> dict[str, Any]:
    """Seconds until a backend is ready: with kernels to compile, and with numba's cache."""
    code = (
        "import time, torch; t = time.perf_counter()\n"
        "from coppice.kernels.backends import select_backend\n"
        "select_backend('cpu', torch.device('cpu')); print(time.perf_counter() - t)"
    )
    with tempfile.TemporaryDirectory() as folder:
        seconds = [
            float(_python(["-c", code], {**outside, "NUMBA_CACHE_DIR": folder}).strip())
            for _ in range(2)
        ]
    times = {"cold_s": round(seconds[0], 2), "warm_s": round(seconds[1], 2)}
    return {
        "benchmark": "start-up",
        "cold_over_warm": round(seconds[0] / seconds[1], 1),
        "times": times,
    }


class _Batch:
    """Random caches, and the same batch as a plan with a shared stretch and as one without."""

    def __init__(
        self, batch: int, shared: int, own: int, rows: int, heads: int, kv_heads: int, dim: int
    ) -> None:
        import numpy as np
        import torch

        from coppice.kernels.attention.interface import (
            AttentionPlan,
            LayerCache,
            SharedStretch,
        )
        from coppice.kernels.backends import select_backend

        size = 16
        stem, tail = shared // size, -(-own // size)
        pages = stem + batch * tail
        self.backend = select_backend("cpu", torch.device("cpu"))
        self.tables = np.concatenate(
            [
                np.tile(np.arange(stem), (batch, 1)),
                stem + np.arange(batch * tail).reshape(batch, tail),
            ],
            axis=1,
        ).astype(np.int32)
        self.caches = (
            torch.randn(pages, size, kv_heads, dim),
            torch.randn(pages, size, kv_heads, dim),
        )
        self.layer = LayerCache(*self.caches)
        self.q = torch.randn(batch * rows, heads, dim)
        self.k, self.v = torch.randn(2, batch * rows, kv_heads, dim)
        self.scale = dim**-0.5
        self.context = shared + own

        def plan(stretches: tuple[SharedStretch, ...]) -> Any:
            made = AttentionPlan(
                page_size=size,
                query_start=np.arange(batch + 1, dtype=np.int32) * rows,
                context_len=np.full(batch, self.context, dtype=np.int32),
                page_indptr=np.arange(batch + 1, dtype=np.int32) * self.tables.shape[1],
                page_indices=self.tables.reshape(-1),
                stretches=stretches,
            )
            return self.backend.prepare(made, num_pages=pages)

        self.plain = plan(())
        self.tree = self.plain
        if stem and batch > 1:
            members = np.arange(batch, dtype=np.int32)
            self.tree = plan((SharedStretch(0, stem, members),))

    def attend(self, prepared: Any) -> Any:
        own = self.q, self.k, self.v
        out, _ = self.backend.attend(*own, self.layer, prepared, scale=self.scale)
        return out

    def gather_and_sdpa(self) -> Any:
        """What an engine without paged kernels does: copies all pages, then calls SDPA once."""
        import torch

        index = torch.from_numpy(self.tables.reshape(-1).astype("int64"))
        batch = len(self.tables)
        k, v = (
            cache.index_select(0, index).view(batch, -1, *cache.shape[2:])[:, : self.context]
            for cache in self.caches
        )
        q = self.q.view(batch, -1, *self.q.shape[1:]).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(
            q, k.transpose(1, 2), v.transpose(1, 2), scale=self.scale, enable_gqa=True
        )


def _shared_decode(
    batch: int, shared: int, own: int, heads: int, kv_heads: int, dim: int, rounds: int
) -> list[dict[str, Any]]:
    import torch

    data = _Batch(batch, shared, own, 1, heads, kv_heads, dim)
    shape = {
        "batch": batch,
        "shared": shared,
        "own": own,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": dim,
    }
    ways = {
        "gather + scaled_dot_product_attention": data.gather_and_sdpa,
        "pages in place, every sequence": lambda: data.attend(data.plain),
        "shared stretch once": lambda: data.attend(data.tree),
    }
    a, b, c = (way() for way in ways.values())
    torch.testing.assert_close(b, c, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(a.transpose(1, 2).reshape(c.shape), c, rtol=1e-4, atol=1e-5)
    return compare("shared decode", shape, ways, rounds)


def _plain_decode(
    batch: int, context: int, heads: int, kv_heads: int, dim: int, rounds: int
) -> list[dict[str, Any]]:
    data = _Batch(batch, 0, context, 1, heads, kv_heads, dim)
    shape = {
        "batch": batch,
        "context": context,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": dim,
    }
    ways = {
        "gather + scaled_dot_product_attention": data.gather_and_sdpa,
        "pages in place": lambda: data.attend(data.plain),
        "sum of the keys and of the values": lambda: [cache.sum() for cache in data.caches],
    }
    rows = compare("plain decode", shape, ways, rounds)
    moved = sum(cache.nbytes for cache in data.caches)
    for row in rows:
        row["times"]["gb_per_s"] = round(moved / row["times"]["best_ms"] / 1e6, 2)
    return rows


def _prefill(
    rows: int, cached: int, heads: int, kv_heads: int, dim: int, rounds: int
) -> list[dict[str, Any]]:
    import torch

    data = _Batch(1, 0, cached + rows, rows, heads, kv_heads, dim)
    flat = [cache.flatten(0, 1) for cache in data.caches]
    for cache, own in zip(flat, (data.k, data.v), strict=True):
        cache[cached : cached + rows] = own
    mask = torch.ones(rows, cached + rows, dtype=torch.bool).tril(cached)

    def masked() -> Any:
        k, v = (cache[: cached + rows].transpose(0, 1)[None] for cache in flat)
        return torch.nn.functional.scaled_dot_product_attention(
            data.q.transpose(0, 1)[None], k, v, mask, scale=data.scale, enable_gqa=True
        )

    ways = {
        "scaled_dot_product_attention with a mask": masked,
        "chunk and prefix apart": lambda: data.attend(data.plain),
    }
    a, b = (way() for way in ways.values())
    torch.testing.assert_close(a[0].transpose(0, 1), b, rtol=1e-4, atol=1e-5)
    shape = {"rows": rows, "cached": cached, "heads": heads, "kv_heads": kv_heads, "head_dim": dim}
    return compare("prefill", shape, ways, max(3, rounds // 3))


def _stretch_rule(rounds: int, quick: bool) -> list[dict[str, Any]]:
    """From which length sharing pays: forced, beside the same batch without a stretch."""
    import torch

    from coppice.kernels.cpu.attention.full_lanes import MOST_LANES, TILE
    from coppice.kernels.cpu.code.simd import LANES
    from coppice.kernels.schedule.cost import CostModel
    from coppice.kernels.schedule.cpu import build_cpu_schedule, cpu_cost_model

    rows = []
    reckoned = CostModel.row_bytes
    for heads, kv_heads, dim in ((16, 8, 128), (14, 2, 64), (9, 3, 64))[: 1 if quick else 3]:
        model = cpu_cost_model(
            heads,
            kv_heads,
            dim,
            lanes=LANES,
            most_lanes=MOST_LANES,
            keys=TILE,
            threads=torch.get_num_threads(),
        )
        for batch in (2, 8, 32):
            for shared in (16, 64, 256, 1024):
                data = _Batch(batch, shared, 64, 1, heads, kv_heads, dim)
                schedule = build_cpu_schedule(data.tree.plan, None, model)
                # With a negative cost of partial results, every stretch is shared.
                CostModel.row_bytes = -(10**9)  # type: ignore[assignment, method-assign]
                data.attend(data.tree)  # makes its schedule, which the plan keeps
                CostModel.row_bytes = reckoned  # type: ignore[method-assign]
                shape = {
                    "batch": batch,
                    "shared": shared,
                    "heads": heads,
                    "kv_heads": kv_heads,
                    "head_dim": dim,
                    "rule_shares": bool(schedule.tree.shared),
                }
                ways: dict[str, Callable[[], Any]] = {
                    "every sequence": partial(data.attend, data.plain),
                    "shared stretch once": partial(data.attend, data.tree),
                }
                rows += compare("stretch rule", shape, ways, rounds)[1:]
    return rows


def _choice(batch: int, vocabulary: int, rounds: int) -> list[dict[str, Any]]:
    """The choice of tokens from random rows, at temperature 0.8, with top-p 0.95 and without."""
    import numpy as np
    import torch

    from coppice.kernels.sampling import choose as choice
    from coppice.kernels.sampling.columns import COLUMNS, MIN_P, TEMPERATURE, TOP_K, TOP_P, UNIFORM

    logits = torch.randn(batch, vocabulary) * 4
    columns = np.ones((batch, COLUMNS))
    columns[:, TEMPERATURE] = 0.8
    columns[:, TOP_K], columns[:, MIN_P] = vocabulary, 0
    columns[:, UNIFORM] = np.random.default_rng(0).random(batch)
    compiled = choice.compiled_choice

    def by_sorting() -> Any:
        """As transformers' `generate` does it."""
        scaled = logits / 0.8
        if top_p < 1:
            ordered, order = scaled.sort(descending=False)
            less = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
            less[:, -1] = False
            scaled = scaled.masked_fill(torch.zeros_like(less).scatter_(1, order, less), -torch.inf)
        return scaled.softmax(-1).multinomial(1)

    def by_halving() -> Any:
        choice.compiled_choice = lambda: None  # type: ignore[assignment]
        try:
            return choice.choose(logits, columns)
        finally:
            choice.compiled_choice = compiled

    rows = []
    for top_p in (0.95, 1.0):
        columns[:, TOP_P] = top_p
        shape = {"batch": batch, "vocabulary": vocabulary, "top_p": top_p}
        ways: dict[str, Callable[[], Any]] = {
            "sort and multinomial": by_sorting,
            "halving, in torch": by_halving,
            "compiled": lambda: choice.choose(logits, columns),
        }
        assert torch.equal(ways["compiled"](), by_halving())
        rows += compare("choice of tokens", shape, ways, rounds)
    return rows


def _steps(repeats: int, outside: dict[str, str]) -> list[dict[str, Any]]:
    """The pattern of a step, products in torch and attention in numba, by settings of threads."""
    times: dict[str, list[float]] = {name: [] for name in STEP_SETTINGS}
    for _ in range(repeats):
        for name, setting in STEP_SETTINGS.items():
            times[name].append(
                json.loads(_python([__file__, "--step", "40"], {**outside, **setting}))
            )
    return ratio_rows("step", {"rows": 32, "linear": "1024x4096", "context": 128}, times)


def _time_steps(rounds: int) -> float:
    """Median seconds of a linear layer of 32 rows followed by attention of 32 decodes."""
    import torch

    data = _Batch(32, 0, 128, 1, 16, 8, 128)
    x, weight = torch.randn(32, 1024), torch.randn(4096, 1024)
    times = []
    for _ in range(rounds + 5):
        started = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        data.attend(data.plain)
        times.append(time.perf_counter() - started)
    return sorted(times[5:])[rounds // 2]


def _python(arguments: Sequence[str], environment: dict[str, str]) -> str:
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout


if __name__ == "__main__":
    main()
