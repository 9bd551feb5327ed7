"""The work list that the CPU backend makes of a plan: who reads which keys, and by which kernel.

Each row's keys are covered exactly once, by these kinds of work, whose results are merged::

    piece   one row over a range of its keys, read from the pages in place (decode, private keys)
    chunk   a sequence's own new tokens against each other, causal, from k and v
    read    a set of rows over a range of cached keys that they all see: a shared stretch for all
            rows below it, or one sequence's private prefix for its chunk
    band    a block of a chunk's rows over all keys that its sliding window lets it see, masked

Nothing here knows values: a schedule hangs on the plan and the window only, and serves all
layers of a step that have the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from coppice.kernels.interface import AttentionPlan

# What a call of the flash kernel costs beside its arithmetic (Python, copies, the merge), in keys
# that one row could have read from pages meanwhile: 0.15 to 0.25 ms, on one thread, against 60 ns
# a key and query head (8 KV heads of 128) to 25 (2 of 64), which comes to 500 to 1,000. The call's
# own cost is not shared among threads while the reading is, hence it counts once for each thread.
# The rows "stretch rule" of benchmarks/kernels.py put the break-even a little higher: there sharing
# loses up to 1,984 keys saved with two threads and wins from 7,000 on.
CALL_KEYS = 1280

# Rows of a block of a windowed chunk: its products cover window + BAND_ROWS keys, so the waste is
# BAND_ROWS / window, while every block costs a call.
BAND_ROWS = 128

# The least keys that a thread's share is cut to: below, starting a row costs more than it saves.
_LEAST_CUT = 32


@dataclass(frozen=True, slots=True, eq=False)
class KeyRange:
    """``count`` cached tokens, from slot ``first`` of the first page of ``pages`` on.

    ``runs`` are the same tokens as ``(flat slot, tokens)`` of neighbouring pages, in order.
    """

    pages: np.ndarray
    first: int
    count: int
    runs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """Rows (int64, ascending) that all see all of ``keys``."""

    rows: np.ndarray
    keys: KeyRange


@dataclass(frozen=True, slots=True, eq=False)
class Band:
    """Rows ``start:stop`` over ``keys``, which hold all that they see; mask ``[rows, keys]``."""

    start: int
    stop: int
    keys: KeyRange
    mask: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """One step's work. The arrays are as ``paged_numba.attend_rows`` documents them."""

    pieces: np.ndarray
    shares: np.ndarray
    merges: np.ndarray
    num_extra: int
    chunks: tuple[tuple[int, int], ...]
    reads: tuple[Read, ...]
    bands: tuple[Band, ...]


def build_schedule(plan: AttentionPlan, window: int | None, threads: int) -> Schedule:
    """The schedule of a checked plan, for layers with that sliding window.

    O(rows + pages) in numpy, with a Python loop over stretches and over sequences that prefill.
    """
    size = plan.page_size
    counts = np.diff(plan.query_start)
    cached = plan.context_len - counts
    # The first key that all of a sequence's rows see: its last row is the one that limits.
    seen_from = (
        np.zeros_like(cached) if window is None else np.maximum(plan.context_len - window, 0)
    )
    call = CALL_KEYS * threads
    # Row by row, every row reads the keys again; as a chunk they are read once, by two calls.
    few = (counts - 1) * (plan.context_len - seen_from).astype(np.int64) <= 2 * call
    banded = ~few & (seen_from > 0)

    # Sequences of few rows are followed row by row; `cursor` is the first key not yet covered.
    row_seq = np.repeat(np.arange(plan.num_sequences), np.where(few, counts, 0))
    row = plan.rows_of(np.flatnonzero(few))
    position = plan.context_len[row_seq] - plan.query_start[row_seq + 1] + row
    cursor = np.zeros_like(position)
    if window is not None:
        cursor = np.maximum(position + 1 - window, 0)
    chunk_cursor = np.zeros(plan.num_sequences, dtype=np.int64)

    pieces: list[np.ndarray] = []
    reads: list[Read] = []

    def cover_rows(which: np.ndarray, stop: np.ndarray) -> None:
        which = which & (cursor < stop)
        table = plan.page_indptr[row_seq[which]]
        pieces.append(np.stack([row[which], table, cursor[which], stop[which]], axis=1))

    def cover_chunk(i: int, stop: int) -> None:
        start = int(chunk_cursor[i])
        if start < stop:
            rows = np.arange(plan.query_start[i], plan.query_start[i + 1], dtype=np.int64)
            reads.append(Read(rows, _keys(plan, i, start, stop)))

    for stretch in sorted(plan.stretches, key=lambda s: s.first_page):
        start, stop = stretch.first_page * size, (stretch.first_page + stretch.num_pages) * size
        able = (seen_from[stretch.members] <= start) & ~banded[stretch.members]
        members = stretch.members[able]
        is_few = few[members]
        rows_alone = int(counts[members][is_few].sum())
        if not stretch_pays(rows_alone, int((~is_few).sum()), stop - start, call):
            continue
        rows = plan.rows_of(members)
        reads.append(Read(rows, _keys(plan, int(members[0]), start, stop)))
        is_member = np.zeros(plan.num_sequences, dtype=bool)
        is_member[members] = True
        below = is_member[row_seq]
        cover_rows(below, np.full_like(cursor, start))
        cursor[below] = stop
        for i in members[~is_few].tolist():
            cover_chunk(i, start)
            chunk_cursor[i] = stop

    cover_rows(np.ones(len(row), dtype=bool), position + 1)
    chunks = []
    bands: list[Band] = []
    masks: dict[tuple[int, int, int], torch.Tensor] = {}
    for i in np.flatnonzero(~few).tolist():
        if banded[i]:
            assert window is not None
            bands += _bands(plan, i, window, masks)
        else:
            chunks.append((int(plan.query_start[i]), int(plan.query_start[i + 1])))
            cover_chunk(i, int(cached[i]))
    cut, shares, merges = _share(np.concatenate(pieces).astype(np.int64), threads)
    num_extra = int((cut[:, 4] >= 0).sum())
    return Schedule(cut, shares, merges, num_extra, tuple(chunks), tuple(reads), tuple(bands))


def stretch_pays(rows: int, chunks: int, tokens: int, call: int) -> bool:
    """Whether reading a stretch once for all its members costs less than each reading it.

    ``rows`` would read it one by one, and each of the ``chunks`` by a call of its own. Costs are in
    keys that one row reads, as is ``call``; the products themselves cost the same either way.
    """
    return tokens + call < rows * tokens + chunks * (tokens + call)


def _keys(plan: AttentionPlan, i: int, start: int, stop: int) -> KeyRange:
    """Tokens ``start <= t < stop`` of sequence i, with the runs that its page table has there."""
    size = plan.page_size
    first_page, end_page = start // size, -(-stop // size)
    table = int(plan.page_indptr[i])
    pages = plan.page_indices[table + first_page : table + end_page]
    breaks = np.flatnonzero(np.diff(pages) != 1) + 1
    runs = []
    for a, b in zip([0, *breaks.tolist()], [*breaks.tolist(), len(pages)], strict=True):
        begin = max((first_page + a) * size, start)
        end = min((first_page + b) * size, stop)
        runs.append((int(pages[a]) * size + begin - (first_page + a) * size, end - begin))
    return KeyRange(pages, start % size, stop - start, tuple(runs))


def _bands(
    plan: AttentionPlan, i: int, window: int, masks: dict[tuple[int, int, int], torch.Tensor]
) -> list[Band]:
    begin, end = int(plan.query_start[i]), int(plan.query_start[i + 1])
    to_position = int(plan.context_len[i]) - end
    bands = []
    for start in range(begin, end, BAND_ROWS):
        stop = min(start + BAND_ROWS, end)
        low = max(0, start + to_position - window + 1)
        keys = _keys(plan, i, low, stop + to_position)
        # The mask hangs on shapes and on where the first row lies among the keys: blocks share it.
        shape = (stop - start, keys.count, start + to_position - low)
        if shape not in masks:
            row_at = torch.arange(shape[0])[:, None] + shape[2]
            key_at = torch.arange(shape[1])
            hidden = (key_at > row_at) | (key_at <= row_at - window)
            masks[shape] = torch.zeros(shape[:2]).masked_fill_(hidden, float("-inf"))
        bands.append(Band(start, stop, keys, masks[shape]))
    return bands


def _share(pieces: np.ndarray, threads: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Order pieces by row and cut them into equal shares of keys, a piece in two where needed.

    ``pieces`` ``[n, 4]``: row, table, first key, end. Returns them as ``[n', 5]`` with the place of
    the result, the shares, and the merges.
    """
    pieces = pieces[np.argsort(pieces[:, 0], kind="stable")]
    length = pieces[:, 3] - pieces[:, 2]
    ends = np.cumsum(length)
    total = int(ends[-1]) if len(ends) else 0
    threads = max(1, min(threads, total // _LEAST_CUT))
    cut_at = []
    for share in range(1, threads):
        target = total * share // threads
        n = int(np.searchsorted(ends, target))
        into = target - int(ends[n] - length[n])
        if into >= _LEAST_CUT and length[n] - into >= _LEAST_CUT:
            cut_at.append((n, into))
        else:
            cut_at.append((n + (2 * into > length[n]), 0))
    shares = [0]
    parts, done = [], 0
    rest = pieces
    taken = 0
    for n, into in cut_at:
        parts.append(rest[: n - taken])
        done += n - taken
        rest, taken = rest[n - taken :], n
        if into:
            boundary = int(pieces[n, 2]) + into
            head = rest[:1].copy()
            head[0, 3] = boundary
            rest = rest.copy()
            rest[0, 2] = boundary
            parts.append(head)
            done += 1
        shares.append(done)
    parts.append(rest)
    cut = np.concatenate(parts)
    shares.append(len(cut))

    again = np.zeros(len(cut), dtype=bool)
    again[1:] = cut[1:, 0] == cut[:-1, 0]
    number = np.cumsum(again) - 1
    goes = np.where(again, number, -1)
    merged, first = np.unique(cut[again, 0], return_index=True)
    last = np.append(first[1:], again.sum())[: len(first)]
    merges = np.stack([merged, first, last], axis=1).astype(np.int64)
    return np.column_stack([cut, goes]).astype(np.int64), np.array(shares, dtype=np.int64), merges
