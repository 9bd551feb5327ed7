"""What a step's attention costs, and what to share and split for it to cost least.

A stretch of pages that sequences share can be read once for all rows below it, or by each of them.
Reading once saves bytes; it costs each row a partial result that is written and merged, and perhaps
another launch. All is counted in bytes that move between memory and the chip's multiprocessors (of
a CPU, threads), by which decoding is bound; a launch and the start of a program count as the bytes
that move meanwhile. No number of sequences is special: two pay where their stretch is long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from coppice.kernels.interface import AttentionPlan
from coppice.kernels.tiles import Tile, Tiles

# The estimates below are for an H100, reckoned from its data sheet and not measured yet;
# `cpu_schedule` has the CPU's.

# One more kernel in the queue costs about 3 microseconds of idle chip, at 3.3 TB/s.
LAUNCH_BYTES = 10_000_000

H100_MULTIPROCESSORS = 132

# A program's start (its item, rows, queries, first page ids) takes as long as walking these keys.
START_KEYS = 64

# The splits that are tried. Below 256 keys a program is mostly start and partial result.
SPLITS = (256, 512, 1024, 2048, 4096, 8192, 16384)

# From so many waves of programs on, the last one's being half empty does not matter.
_MANY_WAVES = 8


@dataclass(frozen=True, slots=True)
class CostModel:
    """The shape of heads, the tiles and the chip that a schedule is made for.

    ``key_bytes``: one token's K and V for one KV head. ``group``: query heads of a KV head.
    """

    tiles: Tiles
    group: int
    kv_heads: int
    head_dim: int
    key_bytes: int
    multiprocessors: int = H100_MULTIPROCESSORS
    launch_bytes: int = LAUNCH_BYTES

    #: How much longer merging takes than its bytes.
    merge_work: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.group > self.tiles.few.queries:
            raise ValueError(
                f"q has {self.group} heads for each KV head; it must have at most "
                f"{self.tiles.few.queries} with heads of {self.head_dim} of this type"
            )

    @property
    def few_rows(self) -> int:
        return self.tiles.few.queries // self.group

    @property
    def many_rows(self) -> int:
        return self.tiles.many.queries // self.group

    @property
    def row_bytes(self) -> int:
        """A partial result of one row, all heads in float32, written once and read once."""
        return self.merge_work * 2 * 4 * self.group * self.kv_heads * (self.head_dim + 1)

    def key_work(self, rows: np.ndarray) -> np.ndarray:
        """What a key of an item of so many rows takes, in those of a lone row.

        The same, wherever reading is all that takes time.
        """
        return np.ones(rows.shape)

    def reads(self, rows: np.ndarray) -> np.ndarray:
        """How often so many rows read the keys that they share, weighted with the work of each."""
        blocks = np.where(rows <= self.few_rows, 1, -(-rows // self.many_rows))
        return blocks * self.key_work(-(-rows // blocks))

    def merge_cost(self, partials: int) -> float:
        return self.launch_bytes + partials * self.row_bytes


@dataclass(frozen=True, slots=True, eq=False)
class SharedRange:
    """Keys ``begin .. end``, which all rows of ``members`` (sequences, ascending) see."""

    begin: int
    end: int
    members: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Tasks:
    """Rows and the keys they walk, before either is cut: int64 arrays of one length but ``rows``.

    Task t's rows are the next ``counts[t]`` of ``rows`` (int32), its page table begins at
    ``table[t]``, its keys are ``begin[t] .. end[t]``, less what causality hides.
    """

    rows: np.ndarray
    counts: np.ndarray
    table: np.ndarray
    begin: np.ndarray
    end: np.ndarray

    @classmethod
    def of(cls, plan: AttentionPlan, shared: tuple[SharedRange, ...]) -> Tasks:
        """The shared ranges, parents first, and then what they leave of every sequence."""
        size = np.diff(plan.query_start).astype(np.int64)
        cursor = np.zeros(plan.num_sequences, np.int64)
        rows: list[np.ndarray] = []
        heads: list[tuple[np.ndarray, ...]] = []

        def add(sequences: np.ndarray, begin: np.ndarray, end: np.ndarray) -> None:
            rows.append(plan.rows_of(sequences))
            heads.append((size[sequences], plan.page_indptr[sequences], begin, end))

        for each in shared:
            members = each.members
            if len(behind := members[cursor[members] < each.begin]):
                add(behind, cursor[behind], np.full(len(behind), each.begin))
            rows.append(plan.rows_of(members))
            table = plan.page_indptr[members[:1]]
            count = np.array([len(rows[-1])])
            heads.append((count, table, np.array([each.begin]), np.array([each.end])))
            cursor[members] = each.end
        everyone = np.arange(plan.num_sequences)
        add(everyone, cursor, plan.context_len)
        counts, table, begin, end = (
            np.concatenate(column).astype(np.int64) for column in zip(*heads, strict=True)
        )
        return cls(np.concatenate(rows).astype(np.int32), counts, table, begin, end)


def choose_shared(
    plan: AttentionPlan, window: int | None, model: CostModel
) -> tuple[SharedRange, ...]:
    """The stretches to read once for all rows below them, parents before children.

    From the root down, a stretch is shared where that saves more bytes than its partial results
    cost. What it saves is reckoned against its keys being read by the groups below it. A stretch
    that is not shared goes on with its children: they share it, each for its own members. With a
    window, only sequences all of whose rows see all of the stretch can share it. O(stretches).
    """
    stretches = sorted(plan.stretches, key=lambda s: s.first_page)
    size = plan.page_size
    counts = np.diff(plan.query_start)
    seen_from = np.zeros(plan.num_sequences, np.int64)
    if window is not None:
        seen_from = np.maximum(plan.context_len.astype(np.int64) - window, 0)
    alone = model.reads(counts)

    able, rows, reads, parent = [], [], [], []
    owner = np.full(plan.num_sequences, -1)
    for index, stretch in enumerate(stretches):
        members = stretch.members[seen_from[stretch.members] <= stretch.first_page * size]
        able.append(members)
        rows.append(int(counts[members].sum()))
        reads.append(float(alone[members].sum()))
        parent.append(int(owner[stretch.members[0]]))
        owner[stretch.members] = index

    # From the leaves up: how often a stretch's keys are read if it is not shared, but those below
    # it may be. Where its parent's keys were added to it, would it be shared?
    for index in range(len(stretches) - 1, -1, -1):
        above = parent[index]
        if above < 0 or not len(able[index]):
            continue
        tokens = (stretches[index].num_pages + stretches[above].num_pages) * size
        if saved_bytes(rows[index], reads[index], tokens, 1, model) > 0:
            reads[above] += float(model.reads(np.array(rows[index]))) - alone[able[index]].sum()
        else:
            reads[above] += reads[index] - alone[able[index]].sum()

    cursor = np.zeros(plan.num_sequences, np.int64)
    chosen = []
    for index, stretch in enumerate(stretches):
        members = able[index]
        if len(members) < 2:
            continue
        begin, end = stretch.first_page * size, (stretch.first_page + stretch.num_pages) * size
        reached = int(cursor[members[0]])
        parts = 1
        if (cursor[members] == reached).all() and (seen_from[members] <= reached).all():
            begin = reached
        elif (cursor[members] < begin).any():
            parts = 2
        if saved_bytes(rows[index], reads[index], end - begin, parts, model) > 0:
            chosen.append(SharedRange(begin, end, members))
            cursor[members] = end
    return tuple(chosen)


def saved_bytes(rows: int, reads: float, tokens: int, parts: int, model: CostModel) -> float:
    """Bytes saved by reading ``tokens`` once for ``rows`` instead of ``reads`` times.

    ``parts``: partial results that it costs each row.
    """
    fewer = reads - float(model.reads(np.array(rows)))
    return fewer * tokens * model.key_bytes * model.kv_heads - rows * parts * model.row_bytes


def best_split(
    length: np.ndarray, rows: np.ndarray, tile: Tile, model: CostModel
) -> tuple[int, float]:
    """The most keys that a program should walk, and what the walks then cost in bytes.

    ``length`` and ``rows`` are those of each block. Programs run in waves of as many as the chip
    holds. Too few of them leave it idle, and so does the last wave: splitting evens that out, and
    costs starts, partial results and a merge.
    """
    held = model.multiprocessors * tile.resident
    best: tuple[int, float] | None = None
    work = length * model.key_work(rows)
    for split in (int(length.max()), *SPLITS):
        if split > length.max():
            break
        pieces = -(-length // split)
        programs = int(pieces.sum()) * model.kv_heads // tile.heads
        waves = programs / held
        waves = waves + 0.5 if waves > _MANY_WAVES else -(-programs // held)
        mean = float(work.sum()) / int(pieces.sum())
        longest = float((work / pieces).max())
        walk = max(waves * (mean + START_KEYS), longest + START_KEYS)
        cost = walk * held * model.key_bytes * tile.heads
        partials = int((rows * pieces)[pieces > 1].sum())
        total = cost + (model.merge_cost(partials) if partials else 0.0)
        if best is None or total < best[1]:
            best = split, total
            walked = cost
    assert best is not None
    return best[0], walked
