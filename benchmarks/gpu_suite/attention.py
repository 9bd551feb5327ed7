"""The process that measures the cases of `kernels_gpu.py`: roofs, ways to attend, times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from coppice.kernels.attention.interface import AttentionCase, AttentionPlan, LayerCache
from coppice.kernels.schedule.items import build_tree_schedule
from gpu_suite.attention_cases import (
    CASE_SECONDS,
    ITEMSIZE,
    PAGE_SIZE,
    QUICK,
    WHOLE,
    Case,
    Sizes,
    cases,
    described,
)
from gpu_suite.worker import Plan, reason, serve_parts

if TYPE_CHECKING:
    from gpu_suite.flashinfer_ways import FlashInferWays

#: The most bytes of a case's cache, and of the contiguous copies for torch.
MOST_BYTES, MOST_COPIED = 40 * 2**30, 10 * 2**30

Way = Callable[[], torch.Tensor]


def serve(connection: Connection, plan: Plan) -> None:
    """Measures the parts of a plan, in the process that `run_parts` starts."""
    bench = Bench(QUICK if plan.quick else WHOLE, quick=plan.quick, roofs=plan.roofs)
    parts: dict[str, Callable[[], list[dict[str, Any]]]] = {"roofs": bench.measure_roofs}
    for case in cases():
        parts[case.part] = lambda case=case: bench.measure(case.at(bench.sizes))
    serve_parts(connection, plan, parts, bench)


class Bench:
    """The device, its roofs, and FlashInfer if its kernels are there."""

    def __init__(self, sizes: Sizes, *, quick: bool, roofs: dict[str, float]) -> None:
        self.sizes, self.roofs = sizes, roofs
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.rounds = 2 if quick else 25
        self.quick = quick
        self._flashinfer: FlashInferWays | None = None
        self.without_flashinfer: str | None = None
        from gpu_suite.flashinfer_ways import FlashInferWays

        case = AttentionCase(
            sizes.heads, sizes.kv_heads, sizes.head_dim, PAGE_SIZE, torch.bfloat16,
            torch.bfloat16, sizes.scale,
        )  # fmt: skip
        try:
            self._flashinfer = FlashInferWays(self.device, case)
        except Exception as error:  # its import and its kernels may raise anything
            self.without_flashinfer = reason(error)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def works(self) -> bool:
        """Whether the device still computes after an error."""
        try:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self.synchronize()
        except Exception:
            return False
        return True

    def measure_roofs(self) -> list[dict[str, Any]]:
        """Measures GB/s of a copy (reads and writes count) and TFLOP/s of a bfloat16 product."""
        words, side = (2**20, 256) if self.quick else (2**30, 8192)
        source = torch.empty(words, dtype=torch.int32, device=self.device)
        target = torch.empty_like(source)
        a, b = torch.randn(2, side, side, device=self.device, dtype=torch.bfloat16)
        copy = statistics.median(self.times({"copy": lambda: target.copy_(source)}, 20)["copy"])
        product = statistics.median(self.times({"product": lambda: a @ b}, 20)["product"])
        self.roofs = {
            "copy_gb_per_s": 2 * source.nbytes / copy / 1e9,
            "matmul_tflop_per_s": 2 * side**3 / product / 1e12,
        }
        rounded = {name: round(value, 1) for name, value in self.roofs.items()}
        return [{"without_flashinfer": self.without_flashinfer, "times": rounded}]

    def times(self, ways: dict[str, Way], rounds: int) -> dict[str, list[float]]:
        """Seconds of each way in each round; on a GPU by events, with a flushed L2 cache.

        Every way first runs three times, which also compiles it.
        """
        for way in ways.values():
            for _ in range(1 if self.quick else 3):
                way()
        self.synchronize()
        started = time.perf_counter()
        times: dict[str, list[float]] = {way: [] for way in ways}
        for done in range(rounds):
            for name, way in ways.items():
                times[name].append(self._seconds(way))
            if done >= 4 and time.perf_counter() - started > CASE_SECONDS:
                break
        return times

    def _seconds(self, way: Way) -> float:
        if self.device.type != "cuda":
            started = time.perf_counter()
            way()
            return time.perf_counter() - started
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # 256 MiB, more than the L2 cache holds.
        torch.empty(64 * 2**20, dtype=torch.int32, device=self.device).zero_()
        # The GPU is busy while the host prepares the launch, so that the host's time does not
        # count: a step's launches are queued one after another, too.
        torch.cuda._sleep(3_000_000)
        begin.record()
        way()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3

    def measure(self, case: Case) -> list[dict[str, Any]]:
        """A row for each way to compute a case's attention; a way that fails has `error`."""
        from coppice.kernels.triton.backend import TritonBackend

        sizes = self.sizes
        row = described(case, sizes)
        plan = case.plan()
        pages = int(plan.page_indices.max()) + 1
        shape = (pages, PAGE_SIZE, sizes.kv_heads, sizes.head_dim)
        if 2 * int(np.prod(shape)) * ITEMSIZE > MOST_BYTES:
            return [{**row, "left_out": "its cache is too large"}]
        place: dict[str, Any] = {"device": self.device, "dtype": torch.bfloat16}
        layer = LayerCache(*(torch.randn(shape, **place) for _ in range(2)))
        q = torch.randn(plan.num_rows, sizes.heads, sizes.head_dim, **place)
        k, v = torch.randn(2, plan.num_rows, sizes.kv_heads, sizes.head_dim, **place)
        backend = TritonBackend(self.device)

        def attend(each: AttentionPlan) -> Way:
            prepared = backend.prepare(each, num_pages=pages)
            return lambda: backend.attend(q, k, v, layer, prepared, scale=sizes.scale)[0]

        ways: dict[str, Way] = {"plain": attend(replace(plan, stretches=()))}
        moved = {"plain": row["bytes"]["all"]}
        if case.levels:
            ways["tree"], moved["tree"] = attend(plan), row["bytes_tree"]["all"]
        failed: dict[str, str] = {}
        if self._flashinfer is not None:
            try:
                for name, way in self._flashinfer.of(plan, sizes.model, (q, k, v), layer).items():
                    ways[name] = way
                    moved[name] = moved["plain" if name == "flashinfer" else "tree"]
            except Exception as error:
                failed["flashinfer"] = reason(error)
        name = "torch, contiguous"
        moved[name] = row["bytes"]["all"]
        context = int(plan.context_len[0])
        if case.batch * context * sizes.kv_heads * sizes.model.key_bytes <= MOST_COPIED:
            ways[name] = self._contiguous(case, plan, q, layer)
        expected = ways["plain"]()
        for name, way in list(ways.items()):
            try:
                torch.testing.assert_close(
                    way().reshape(expected.shape), expected, rtol=2e-2, atol=2e-2
                )
            except Exception as error:
                if name == "plain" or not self.works():
                    raise
                failed[name] = reason(error)
                del ways[name]
        times = self.times(ways, self.rounds)
        planned = self._plan_ms(plan)
        made = [{**row, "way": name, "error": error} for name, error in failed.items()]
        for name, measured in times.items():
            seconds = statistics.median(measured)
            ratios = sorted(a / b for a, b in zip(times["plain"], measured, strict=True))
            goals = {
                what: goal
                for what, goal in case.goals
                if name == ("tree" if what == "ratio" else "plain")
            }
            rate = row["flop"] / seconds / 1e12 / self.roofs["matmul_tflop_per_s"]
            made.append(
                {
                    **row,
                    "way": name,
                    "ratio": round(ratios[len(ratios) // 2], 3),
                    "ratio_low": round(ratios[len(ratios) // 10], 3),
                    "ratio_high": round(ratios[-1 - len(ratios) // 10], 3),
                    "of_copy": round(moved[name] / seconds / 1e9 / self.roofs["copy_gb_per_s"], 3),
                    "of_matmul": round(rate, 3),
                    **({"goal": goals} if goals else {}),
                    "times": {"median_ms": round(seconds * 1e3, 4), "plan_ms": planned},
                }
            )
        return made

    def _contiguous(
        self, case: Case, plan: AttentionPlan, q: torch.Tensor, layer: LayerCache
    ) -> Way:
        """torch's attention over contiguous copies of each sequence's keys and values."""
        sizes, context = self.sizes, int(plan.context_len[0])
        table = torch.from_numpy(plan.page_indices.reshape(case.batch, -1)).long().to(self.device)
        whole = [
            cache[table].flatten(1, 2)[:, :context].transpose(1, 2).contiguous()
            for cache in (layer.k, layer.v)
        ]
        rows = q.view(case.batch, case.rows, sizes.heads, sizes.head_dim).transpose(1, 2)
        rows, mask = rows.contiguous(), None
        if case.rows > 1 and context > case.rows:
            from torch.nn.attention.bias import causal_lower_right

            mask = causal_lower_right(case.rows, context)

        def attend() -> torch.Tensor:
            # [batch, heads, rows, head_dim] -> rows before heads, as in our layout.
            return torch.nn.functional.scaled_dot_product_attention(
                rows, *whole, attn_mask=mask, is_causal=case.rows > 1 and case.rows == context,
                scale=sizes.scale, enable_gqa=True,
            ).transpose(1, 2)  # fmt: skip

        return attend

    def _plan_ms(self, plan: AttentionPlan) -> float:
        """The least milliseconds that the processor takes to check and schedule a step's plan."""
        found = []
        for _ in range(5):
            started = time.perf_counter()
            plan.check()
            build_tree_schedule(plan, None, self.sizes.model)
            found.append(time.perf_counter() - started)
        return round(min(found) * 1e3, 3)
