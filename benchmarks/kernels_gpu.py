"""Measure the attention kernels on a GPU, Triton's and FlashInfer's, against what the chip can do.

    python benchmarks/kernels_gpu.py --json benchmarks/results/kernels-gpu.jsonl
    python benchmarks/kernels_gpu.py --dry-run --json benchmarks/results/kernels-gpu-model.jsonl

The first is the one command for a machine with an H100 or H200. Each case stops after so many
seconds that all are through in under 8 minutes, by reckoning: it has not run on a GPU yet. The
second needs none: it prints each case with the bytes and FLOP that the plan of the step moves and
computes, and no times.

One JSON object a line: first the roofs, a device-to-device copy and a large matrix product, then
the cases, each measured in rounds that run all its ways in turn. ``of_copy`` and ``of_matmul`` are
the bandwidth and the FLOP/s that a way reached, as fractions of the roofs, counted with the bytes
that it has to move (each page that it reads once, as often as its own plan reads it) and the FLOP
of unmasked scores. ``ratio`` is how many times faster than the first way it is, with the 10th and
90th percentile over rounds. Ways: every sequence by itself (plain paged decode), the tree, torch's
scaled_dot_product_attention over contiguous copies of the same keys where they fit, and, where
FlashInfer imports and its kernels are there, the first two by its kernels, and the tree by its own
cascade wrapper. Where they are not, the first line says why.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from harness import Rows, machine, parser

from coppice.kernels.interface import AttentionCase, AttentionPlan, LayerCache, SharedStretch
from coppice.kernels.tiles import choose_tiles
from coppice.kernels.tree_cost import CostModel
from coppice.kernels.tree_schedule import TreeSchedule, build_tree_schedule, row_positions

if TYPE_CHECKING:
    from flashinfer_ways import FlashInferWays

PAGE_SIZE = 16
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
ITEMSIZE = 2  # bfloat16
SCALE = HEAD_DIM**-0.5
MODEL = CostModel(
    choose_tiles(HEAD_DIM, ITEMSIZE),
    HEADS // KV_HEADS,
    KV_HEADS,
    HEAD_DIM,
    2 * HEAD_DIM * ITEMSIZE,
)
#: The most bytes of cache that a case may take, and of contiguous copies for torch beside it.
MOST_BYTES, MOST_COPIED = 40 * 2**30, 10 * 2**30
#: Seconds that one case may take, beside compiling: fewer rounds are run where it would take more.
CASE_SECONDS = 6.0


@dataclass(frozen=True)
class Case:
    """``batch`` sequences of ``rows`` new tokens, ``own`` tokens in all beyond shared ones.

    ``levels`` are (members of each group in order, tokens of the stretch), the root first.
    """

    name: str
    batch: int
    own: int
    rows: int = 1
    levels: tuple[tuple[int, int], ...] = ()

    def plan(self) -> AttentionPlan:
        tables: list[list[int]] = [[] for _ in range(self.batch)]
        stretches, used = [], 0
        for members, tokens in self.levels:
            pages = tokens // PAGE_SIZE
            for first in range(0, self.batch, members):
                group = np.arange(first, first + members, dtype=np.int32)
                stretches.append(SharedStretch(len(tables[first]), pages, group))
                for i in group.tolist():
                    tables[i] += range(used, used + pages)
                used += pages
        context = [len(table) * PAGE_SIZE + self.own for table in tables]
        for table in tables:
            more = -(-self.own // PAGE_SIZE)
            table += range(used, used + more)
            used += more
        # Pages as a pool that has been in use hands them out: none beside the one before it.
        order = np.random.default_rng(0).permutation(used)
        return AttentionPlan(
            page_size=PAGE_SIZE,
            query_start=np.arange(self.batch + 1, dtype=np.int32) * self.rows,
            context_len=np.array(context, np.int32),
            page_indptr=np.cumsum([0, *map(len, tables)]).astype(np.int32),
            page_indices=np.concatenate([order[table] for table in tables]).astype(np.int32),
            stretches=tuple(stretches),
        )


def cases() -> Iterator[Case]:
    for batch in (1, 8, 64, 256):
        for context in (512, 4096, 32768):
            yield Case("decode", batch, context)
    for rows in (512, 2048, 8192):
        for cached in (0, 8192, 32768):
            yield Case("prefill", 1, rows + cached, rows)
    yield Case("tree: 64 under 8k", 64, 256, levels=((64, 8192),))
    yield Case("tree: 2k, 8 x 8k, 64", 64, 256, levels=((64, 2048), (8, 8192)))
    yield Case("tree: beam 8 at 4k", 8, 16, levels=((8, 4096),))
    yield Case("tree: 2 under 32k", 2, 64, levels=((2, 32768),))
    yield Case("tree: too short to share", 64, 4096, levels=((64, 32),))


def bytes_moved(plan: AttentionPlan, schedule: TreeSchedule) -> dict[str, int]:
    """K and V read, partial results written and read, queries and output, in bytes."""
    ends = 2 * plan.num_rows * HEADS * HEAD_DIM * ITEMSIZE
    kv = schedule.keys_read * MODEL.key_bytes * KV_HEADS
    partials = schedule.num_partials * MODEL.row_bytes
    return {"kv": kv, "partials": partials, "all": kv + partials + ends}


def flop(plan: AttentionPlan) -> int:
    """Of both products, over the keys that rows see: 4 * head_dim for each head and key."""
    return 4 * HEAD_DIM * HEADS * int((row_positions(plan).astype(np.int64) + 1).sum())


def described(case: Case) -> dict[str, Any]:
    """A case, and what its plan moves with the tree and without."""
    plan = case.plan()
    plain_plan = replace(plan, stretches=())
    tree = build_tree_schedule(plan, None, MODEL)
    plain = build_tree_schedule(plain_plan, None, MODEL)
    row: dict[str, Any] = {
        "benchmark": case.name,
        "batch": case.batch,
        "rows": case.rows,
        "context": int(plan.context_len[0]),
        "flop": flop(plan),
        "bytes": bytes_moved(plan, plain),
        "programs": sum(len(launch.items) for launch in plain.launches) * KV_HEADS,
    }
    if case.levels:
        row["bytes_tree"] = bytes_moved(plan, tree)
        row["shared"] = [[s.begin, s.end, len(s.members)] for s in tree.shared]
        row["bytes_ratio"] = round(row["bytes"]["all"] / row["bytes_tree"]["all"], 2)
    return row


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--dry-run", action="store_true", help="bytes and FLOP only, no GPU")
    arguments = options.parse_args()
    rows = Rows(arguments.json)
    where = machine()
    if not arguments.dry_run and "gpu" not in where:
        options.error("no GPU is here: give --dry-run for the model of bytes and FLOP")
    chosen = list(cases())
    if arguments.quick:
        chosen = [case for case in chosen if case.batch * case.own <= 8 * 4096]
    if arguments.dry_run:
        for case in chosen:
            rows.add(**described(case), machine=where)
        return
    _measure(chosen, rows, where, arguments)


def _measure(
    chosen: list[Case], rows: Rows, where: dict[str, Any], arguments: argparse.Namespace
) -> None:
    import torch
    from flashinfer_ways import FlashInferWays

    roofs = _roofs()
    flashinfer, why = None, None
    try:
        flashinfer = FlashInferWays(
            torch.device("cuda"),
            AttentionCase(
                HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, torch.bfloat16, torch.bfloat16, SCALE
            ),
        )
    except ValueError as error:
        why = str(error)
    rows.add(benchmark="roofs", without_flashinfer=why, times=roofs, machine=where)
    for case in chosen:
        for row in _measured(case, roofs, flashinfer, 5 if arguments.quick else 25):
            rows.add(**row, machine=where)


def _roofs() -> dict[str, float]:
    """GB/s of a copy, counting reads and writes, and TFLOP/s of a bfloat16 product."""
    import torch

    source = torch.empty(2**30, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    copy = statistics.median(_times({"copy": lambda: target.copy_(source)}, 20)["copy"])
    product = statistics.median(_times({"product": lambda: a @ b}, 20)["product"])
    return {
        "copy_gb_per_s": round(2 * source.nbytes / copy / 1e9, 1),
        "matmul_tflop_per_s": round(2 * 8192**3 / product / 1e12, 1),
    }


def _times(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each way in each round, by events on the stream; the second level cache is swept.

    Every way first runs three times, which also compiles it.
    """
    import torch

    swept = torch.empty(64 * 2**20, dtype=torch.int32, device="cuda")
    for way in ways.values():
        for _ in range(3):
            way()
    torch.cuda.synchronize()
    started = time.perf_counter()
    times: dict[str, list[float]] = {way: [] for way in ways}
    for done in range(rounds):
        for name, way in ways.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            swept.zero_()
            # The queue is kept busy while the host prepares the launch, so that its time is not
            # counted: a step's launches are queued behind one another as well.
            torch.cuda._sleep(3_000_000)
            begin.record()
            way()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) / 1e3)
        if done >= 4 and time.perf_counter() - started > CASE_SECONDS:
            break
    return times


def _measured(
    case: Case, roofs: dict[str, float], flashinfer: FlashInferWays | None, rounds: int
) -> list[dict[str, Any]]:
    import torch

    from coppice.kernels.triton_backend import TritonBackend

    told = described(case)
    plan = case.plan()
    pages = int(plan.page_indices.max()) + 1
    shape = (pages, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    if 2 * int(np.prod(shape)) * ITEMSIZE > MOST_BYTES:
        return [{**told, "left_out": "its cache is too large"}]
    place: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    caches = [torch.randn(shape, **place) for _ in range(2)]
    q = torch.randn(plan.num_rows, HEADS, HEAD_DIM, **place)
    k, v = torch.randn(2, plan.num_rows, KV_HEADS, HEAD_DIM, **place)
    backend = TritonBackend(torch.device("cuda"))
    layer = LayerCache(*caches)

    def attend(each: AttentionPlan) -> Callable[[], Any]:
        prepared = backend.prepare(each, num_pages=pages)
        return lambda: backend.attend(q, k, v, layer, prepared, scale=SCALE)[0]

    ways = {"plain": attend(replace(plan, stretches=()))}
    moved = {"plain": told["bytes"]["all"]}
    if case.levels:
        ways["tree"], moved["tree"] = attend(plan), told["bytes_tree"]["all"]
    if flashinfer is not None:
        for name, way in flashinfer.of(plan, MODEL, (q, k, v), layer).items():
            ways[name] = way
            moved[name] = moved["plain" if name == "flashinfer" else "tree"]
    expected = ways["plain"]()
    for way in ways.values():
        torch.testing.assert_close(way(), expected, rtol=2e-2, atol=2e-2)
    context = int(plan.context_len[0])
    if case.batch * context * KV_HEADS * MODEL.key_bytes <= MOST_COPIED:
        table = torch.from_numpy(plan.page_indices.reshape(case.batch, -1)).long().cuda()
        whole = [
            cache[table].flatten(1, 2)[:, :context].transpose(1, 2).contiguous() for cache in caches
        ]
        rows = q.view(case.batch, case.rows, HEADS, HEAD_DIM).transpose(1, 2).contiguous()
        mask = None
        if case.rows > 1 and context > case.rows:
            from torch.nn.attention.bias import causal_lower_right

            mask = causal_lower_right(case.rows, context)

        def contiguous() -> Any:
            return torch.nn.functional.scaled_dot_product_attention(
                rows, *whole, attn_mask=mask, is_causal=case.rows == context,
                scale=SCALE, enable_gqa=True,
            )  # fmt: skip

        ways["torch, contiguous"], moved["torch, contiguous"] = contiguous, told["bytes"]["all"]
    times = _times(ways, rounds)
    made = []
    for way, measured in times.items():
        seconds = statistics.median(measured)
        ratios = sorted(a / b for a, b in zip(times["plain"], measured, strict=True))
        made.append(
            {
                **told,
                "way": way,
                "ratio": round(ratios[len(ratios) // 2], 3),
                "ratio_low": round(ratios[len(ratios) // 10], 3),
                "ratio_high": round(ratios[-1 - len(ratios) // 10], 3),
                "of_copy": round(moved[way] / seconds / 1e9 / roofs["copy_gb_per_s"], 3),
                "of_matmul": round(told["flop"] / seconds / 1e12 / roofs["matmul_tflop_per_s"], 3),
                "times": {"median_ms": round(seconds * 1e3, 4)},
            }
        )
    return made


if __name__ == "__main__":
    main()
