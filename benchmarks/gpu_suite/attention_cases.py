"""The cases of `kernels_gpu.py`: their shapes and plans, and the bytes and FLOP of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coppice.kernels.attention.interface import AttentionPlan, SharedStretch
from coppice.kernels.schedule.cost import CostModel
from coppice.kernels.schedule.items import TreeSchedule, build_tree_schedule, row_positions
from coppice.kernels.schedule.tiles import choose_tiles

PAGE_SIZE = 16
ITEMSIZE = 2  # bfloat16
#: Seconds of measuring a case, compilation not counted; one that takes longer runs fewer rounds.
CASE_SECONDS = 6.0


@dataclass(frozen=True)
class Sizes:
    """The shape of heads, and divisors of the cases' lengths (`shorter`) and batches (`fewer`)."""

    heads: int
    kv_heads: int
    head_dim: int
    shorter: int = 1
    fewer: int = 1

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def model(self) -> CostModel:
        group = self.heads // self.kv_heads
        tiles = choose_tiles(self.head_dim, ITEMSIZE, group)
        key_bytes = 2 * self.head_dim * ITEMSIZE
        return CostModel(tiles, group, self.kv_heads, self.head_dim, key_bytes)


WHOLE = Sizes(heads=32, kv_heads=8, head_dim=128)
QUICK = Sizes(heads=4, kv_heads=2, head_dim=64, shorter=128, fewer=16)


@dataclass(frozen=True)
class Case:
    """`batch` sequences of `rows` new tokens each, with `own` tokens besides the shared ones.

    `levels` are (sequences in each group, tokens of the shared stretch), the root first.
    """

    name: str
    batch: int
    own: int
    rows: int = 1
    levels: tuple[tuple[int, int], ...] = ()
    goals: tuple[tuple[str, float], ...] = ()

    #: Time limit in seconds, with compilation, preparation and copies.
    seconds: float = 45.0

    @property
    def part(self) -> str:
        """A name that no other case has."""
        shape = f"{self.batch} x {self.own}" if self.rows == 1 else f"{self.rows} of {self.own}"
        return f"{self.name}, {shape}"

    def at(self, sizes: Sizes) -> Case:
        """The case at these sizes, at least: whole pages, and two sequences a group."""

        def count(many: int) -> int:
            return many if many == 1 else max(2, many // sizes.fewer)

        def length(tokens: int) -> int:
            return tokens if tokens == 1 else max(PAGE_SIZE, tokens // sizes.shorter)

        levels = tuple((count(members), length(tokens)) for members, tokens in self.levels)
        rows, own = length(self.rows), length(self.own)
        return replace(self, batch=count(self.batch), own=own, rows=rows, levels=levels)

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
        # Pages in random order, as a pool that was in use hands them out.
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
            goals = (("of_copy", 0.85),) if batch >= 64 and context >= 4096 else ()
            yield Case("decode", batch, context, goals=goals)
    for rows in (512, 2048, 8192):
        for cached in (0, 8192, 32768):
            yield Case("prefill", 1, rows + cached, rows, goals=(("of_matmul", 0.6),))
    ten, never_slower = (("ratio", 10.0),), (("ratio", 0.98),)
    yield Case("tree: 64 under 8k", 64, 256, levels=((64, 8192),), goals=ten)
    three = ((64, 2048), (8, 8192))
    yield Case("tree: 2k, 8 x 8k, 64", 64, 256, levels=three, goals=never_slower)
    yield Case("tree: beam 8 at 4k", 8, 16, levels=((8, 4096),), goals=never_slower)
    yield Case("tree: 2 under 32k", 2, 64, levels=((2, 32768),), goals=never_slower)
    yield Case("tree: too short to share", 64, 4096, levels=((64, 32),), goals=never_slower)


def bytes_moved(plan: AttentionPlan, schedule: TreeSchedule, sizes: Sizes) -> dict[str, int]:
    """Bytes of K and V, of partial results (written and read), of all with queries and output."""
    ends = 2 * plan.num_rows * sizes.heads * sizes.head_dim * ITEMSIZE
    kv = schedule.keys_read * sizes.model.key_bytes * sizes.kv_heads
    partials = schedule.num_partials * sizes.model.row_bytes
    return {"kv": kv, "partials": partials, "all": kv + partials + ends}


def flop(plan: AttentionPlan, sizes: Sizes) -> int:
    """FLOP of both products over the keys that rows see: 4 * head_dim for each head and key."""
    seen = int((row_positions(plan).astype(np.int64) + 1).sum())
    return 4 * sizes.head_dim * sizes.heads * seen


def described(case: Case, sizes: Sizes) -> dict[str, Any]:
    """The row of a case: its shape, and what its plan moves with the tree and without."""
    plan, model = case.plan(), sizes.model
    plain_plan = replace(plan, stretches=())
    tree = build_tree_schedule(plan, None, model)
    plain = build_tree_schedule(plain_plan, None, model)
    row: dict[str, Any] = {
        "benchmark": case.name,
        "batch": case.batch,
        "rows": case.rows,
        "context": int(plan.context_len[0]),
        "flop": flop(plan, sizes),
        "bytes": bytes_moved(plan, plain, sizes),
        "programs": sum(len(launch.items) for launch in plain.launches) * sizes.kv_heads,
    }
    if case.levels:
        row["bytes_tree"] = bytes_moved(plan, tree, sizes)
        row["shared"] = [[s.begin, s.end, len(s.members)] for s in tree.shared]
        row["bytes_ratio"] = round(row["bytes"]["all"] / row["bytes_tree"]["all"], 2)
    return row
