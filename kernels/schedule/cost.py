"""What a step's attention costs, and what to share and split for it to cost least.

A stretch of pages that sequences share can be read once for all rows below it, or by each of them.
Reading once saves bytes; it costs each row a partial result that is written and merged, and perhaps
another launch. All costs are counted in bytes that move between memory and the chip's
multiprocessors (of a CPU, threads), since these bound decoding; a launch and the start of a program
count as the bytes that could move meanwhile. No least number of sequences is set: two share a
stretch that is long enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from coppice.kernels.attention.interface import AttentionPlan
from coppice.kernels.schedule.tiles import Tile, Tiles

# Fitted to an H200, on which plain decoding takes what the model says within 7 %
# (`benchmarks/fit_cost.py`); `schedule.cpu` has those of a CPU.

# One more kernel in the queue costs about 5 microseconds of idle chip, at 4.3 TB/s.
LAUNCH_BYTES = 22_000_000

H100_MULTIPROCESSORS = 132

# A program's start (its item, rows, queries, first page ids) takes as long as walking these keys.
START_KEYS = 154

# The splits that are tried. Below 256 keys a program is mostly start and partial result.
SPLITS = (256, 512, 1024, 2048, 4096, 8192, 16384)

# From this number of waves of programs on, it does not matter that the last one is half empty.
_MANY_WAVES = 8


@dataclass(frozen=True, slots=True)
class CostModel:
    """The shape of heads, the tiles and the chip that a schedule is made for.

    ``key_bytes``: one token's K and V for one KV head. ``group``: query heads of a KV head; where
    they are more than the rows of the smaller tile, they are divided into ``parts`` of ``packed``
    heads, which read the same keys.
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
    #: The keys whose walk takes as long as a program's start.
    start_keys: ClassVar[int] = START_KEYS

    @property
    def parts(self) -> int:
        return -(-self.group // self.tiles.few.queries)

    @property
    def packed(self) -> int:
        return -(-self.group // self.parts)

    @property
    def programs(self) -> int:
        """The number of programs of an item, if a program serves one KV head."""
        return self.kv_heads * self.parts

    @property
    def few_rows(self) -> int:
        return self.tiles.few.queries // self.packed

    @property
    def many_rows(self) -> int:
        return self.tiles.many.queries // self.packed

    @property
    def row_bytes(self) -> int:
        """A partial result of one row, all heads in float32, written once and read once."""
        return self.merge_work * 2 * 4 * self.group * self.kv_heads * (self.head_dim + 1)

    def key_work(self, rows: np.ndarray) -> np.ndarray:
        """The time of a key in an item of each of these numbers of rows, relative to a lone row.

        It is 1 wherever only reading takes time.
        """
        return np.ones(rows.shape)

    def reads(self, rows: np.ndarray) -> np.ndarray:
        """How often each of these numbers of rows reads its shared keys, weighted with the work."""
        blocks = np.where(rows <= self.few_rows, 1, -(-rows // self.many_rows))
        return blocks * self.parts * self.key_work(-(-rows // blocks))

    def merge_cost(self, partials: int) -> float:
        return self.launch_bytes + partials * self.row_bytes


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that a schedule may have: items with few packed queries, others, rows of all items.

    ``many`` is 0 where no item can be wide.
    """

    few: int
    many: int
    entries: int


@dataclass(frozen=True, slots=True, eq=False)
class SharedRange:
    """Keys ``begin .. end``, which all rows of ``members`` (sequences, ascending) see."""

    begin: int
    end: int
    members: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Tasks:
    """Rows and the keys they walk, before either is cut; all but ``rows`` int64 of one length.

    Task t's rows are the next ``counts[t]`` of ``rows`` (int32), its page table begins at
    ``table[t]`` (of ``table_starts`` of the plan), its keys are ``begin[t] .. end[t]``, less what
    causality hides.
    """

    rows: np.ndarray
    counts: np.ndarray
    table: np.ndarray
    begin: np.ndarray
    end: np.ndarray

    @classmethod
    def of(cls, plan: AttentionPlan, shared: tuple[SharedRange, ...]) -> Tasks:
        """The shared ranges, and what sequences walk alone before and after these.

        O(rows + members) in numpy.
        """
        size = np.diff(plan.query_start).astype(np.int64)
        context = plan.context_len.astype(np.int64)
        everyone = np.arange(plan.num_sequences)
        # Every member's ranges in the order of keys, and after them the end of its own.
        members = np.concatenate([*(each.members for each in shared), everyone]).astype(np.int64)
        lengths = np.array([len(each.members) for each in shared], np.int64)
        begins = np.array([each.begin for each in shared], np.int64)
        ends = np.array([each.end for each in shared], np.int64)
        begin = np.concatenate([np.repeat(begins, lengths), context])
        end = np.concatenate([np.repeat(ends, lengths), context])
        order = np.argsort(members, kind="stable")
        reached = _before(members, order, end, 0)
        # The keys between a range and the one before it, and after the last range.
        shared_entries = int(lengths.sum())
        after = np.flatnonzero((reached < begin) | (np.arange(len(members)) >= shared_entries))
        alone = members[after]
        begins = np.concatenate([begins, reached[after]])
        heads = np.concatenate([[each.members[0] for each in shared], alone]).astype(np.int64)
        sequences = np.concatenate([members[:shared_entries], alone])
        lengths = np.concatenate([lengths, np.ones(len(alone), np.int64)])
        # By their first key, so that a row's tasks come in the order of keys.
        sort = np.argsort(begins, kind="stable")
        rank = np.empty(len(sort), np.int64)
        rank[sort] = np.arange(len(sort))
        sequences = sequences[np.argsort(np.repeat(rank, lengths), kind="stable")]
        lengths = lengths[sort]
        return cls(
            plan.rows_of(sequences).astype(np.int32),
            np.add.reduceat(size[sequences], np.cumsum(lengths) - lengths),
            plan.table_starts[heads[sort]].astype(np.int64),
            begins[sort],
            np.concatenate([ends, begin[after]])[sort],
        )


def _before(owner: np.ndarray, order: np.ndarray, values: np.ndarray, first: int) -> np.ndarray:
    """For each entry the value of the one before it of the same owner, else ``first``.

    ``order`` sorts the entries by owner, stably.
    """
    found = np.full(len(owner), first, values.dtype)
    same = owner[order[1:]] == owner[order[:-1]]
    found[order[1:][same]] = values[order[:-1][same]]
    return found


def choose_shared(
    plan: AttentionPlan, window: int | None, model: CostModel
) -> tuple[SharedRange, ...]:
    """The stretches to read once for all rows below them, parents before children.

    From the root down, a stretch is shared where that saves more bytes than its partial results
    cost. The alternative to compare with is that the groups below it read its keys. A stretch that
    is not shared passes to its children: each shares it for its own members. With a window, only
    sequences all of whose rows see all of the stretch can share it. O(members) in numpy, with a
    Python loop over stretches.
    """
    stretches = sorted(plan.stretches, key=lambda s: s.first_page)
    if not stretches:
        return ()
    size = plan.page_size
    counts = np.diff(plan.query_start).astype(np.int64)
    alone = model.reads(counts)
    lengths = np.array([len(stretch.members) for stretch in stretches])
    starts = np.cumsum(lengths) - lengths
    begins = np.array([stretch.first_page for stretch in stretches]) * size
    ends = begins + np.array([stretch.num_pages for stretch in stretches]) * size
    members = np.concatenate([stretch.members for stretch in stretches])
    index_of = np.repeat(np.arange(len(stretches)), lengths)
    seen_from = np.zeros(len(members), np.int64)
    if window is not None:
        seen_from = np.maximum(plan.context_len.astype(np.int64) - window, 0)[members]
    able = seen_from <= begins[index_of]
    rows = np.add.reduceat(np.where(able, counts[members], 0), starts)
    own_reads = np.add.reduceat(np.where(able, alone[members], 0.0), starts)
    latest = np.maximum.reduceat(np.where(able, seen_from, 0), starts).tolist()
    left = np.add.reduceat(able.astype(np.int64), starts).tolist()
    above = _before(members, np.argsort(members, kind="stable"), index_of, -1)
    parent = above[starts].tolist()
    # Whether all members start from the same key, for every choice above them.
    alike = np.logical_and.reduceat(able & (above == above[starts][index_of]), starts).tolist()

    shared_reads = model.reads(np.maximum(rows, 1)).tolist()
    reads, own, row_counts = own_reads.tolist(), own_reads.tolist(), rows.tolist()
    first, last = begins.tolist(), ends.tolist()

    # From the leaves up: how often a stretch's keys are read if it is not shared, but those below
    # it may be. A child counts as sharing them if it would be shared with them added to its own.
    for index in range(len(stretches) - 1, -1, -1):
        up = parent[index]
        if up < 0 or not left[index]:
            continue
        tokens = last[index] - first[index] + last[up] - first[up]
        fewer = reads[index] - shared_reads[index]
        once = saved_bytes(row_counts[index], fewer, tokens, 1, model) > 0
        reads[up] += (shared_reads[index] if once else reads[index]) - own[index]

    cursor = np.zeros(plan.num_sequences, np.int64)
    reached = [0] * len(stretches)  # the key after it from which members go on, if alike
    chosen = []
    for index, stretch in enumerate(stretches):
        up = parent[index]
        if alike[index] and (up < 0 or alike[up]):
            low = high = 0 if up < 0 else reached[up]
        else:
            alike[index] = False
            at = cursor[stretch.members]
            ours = able[starts[index] : starts[index] + lengths[index]]
            low, high = (int(at[ours].min()), int(at[ours].max())) if left[index] else (0, 0)
        reached[index] = low
        if left[index] < 2:
            continue
        begin, parts = first[index], 1
        if low == high and latest[index] <= low:
            begin = low
        elif low < begin:
            parts = 2
        fewer = reads[index] - shared_reads[index]
        if saved_bytes(row_counts[index], fewer, last[index] - begin, parts, model) > 0:
            ours = stretch.members
            if left[index] < len(ours):
                ours = ours[able[starts[index] : starts[index] + lengths[index]]]
            chosen.append(SharedRange(begin, last[index], ours))
            cursor[ours] = reached[index] = last[index]
    return tuple(chosen)


def least_cost(plan: AttentionPlan, window: int | None, model: CostModel) -> float:
    """A lower bound, in bytes, of a schedule of this plan that shares nothing; 0 if none is known.

    It is known where all sequences decode without a window: each row reads all of its keys.
    """
    if window is not None or plan.num_rows != plan.num_sequences:
        return 0.0
    one = model.key_work(np.ones(1, np.int64)).item()
    keys = int(plan.context_len.sum(dtype=np.int64))
    return float(one * keys * model.key_bytes * model.programs)


def saved_bytes(rows: int, fewer: float, tokens: int, parts: int, model: CostModel) -> float:
    """Bytes saved where ``rows`` share ``tokens``, which are then read ``fewer`` times less.

    ``parts``: the partial results that sharing adds for each row.
    """
    return fewer * tokens * model.key_bytes * model.kv_heads - rows * parts * model.row_bytes


def best_split(
    length: np.ndarray,
    rows: np.ndarray,
    tile: Tile,
    model: CostModel,
    most: tuple[int, int] | None = None,
) -> tuple[int, float]:
    """The most keys that a program should walk, and what the walks then cost in bytes.

    ``length``, in keys, and ``rows`` are int64, one number a block. Programs run in waves of as
    many as the chip holds. Too few of them leave it idle, and so does the last wave: splitting
    evens that out, and costs starts, partial results and a merge. ``most``: the most items, and the
    most rows of all items together; blocks that are more already are not split.
    """
    held = model.multiprocessors * tile.resident
    longest = int(length.max())
    found = [longest, *(split for split in SPLITS if split <= longest)]
    if most is not None:
        # A block has at most one piece more than its part of all keys, so this split surely fits.
        least = 1
        for bound, each in zip(most, (np.ones_like(rows), rows), strict=True):
            left = bound - int(each.sum())
            least = max(least, -(-int((each * length).sum()) // left) if left > 0 else longest)
        found.append(min(least, longest))
    splits = np.array(found)
    work = length * model.key_work(rows)
    pieces = -(-length // splits[:, None])
    count = pieces.sum(1)
    programs = count * model.programs // tile.heads
    waves = programs / held
    waves = np.where(waves > _MANY_WAVES, waves + 0.5, -(-programs // held))
    mean = work.sum() / count + model.start_keys
    walk = np.maximum(waves * mean, (work / pieces).max(1) + model.start_keys)
    cost = walk * held * model.key_bytes * tile.heads
    partials = np.where(pieces > 1, rows * pieces, 0).sum(1)
    total = cost + np.where(partials > 0, model.launch_bytes + partials * model.row_bytes, 0.0)
    if most is not None:
        fits = (count <= most[0]) & ((rows * pieces).sum(1) <= most[1])
        fits[0] = True
        total = np.where(fits, total, np.inf)
    best = int(total.argmin())
    return int(splits[best]), float(cost[best])
