"""Batches whose sequences share pages in many ways, for tests of backends and schedules.

A batch is (new rows, cached pages or tokens) of each sequence, and the stretches of pages that some
of them share: (their numbers, pages).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coppice.kernels.attention.interface import AttentionPlan, SharedStretch

MIXED = [(1, 0), (5, 0), (1, 7), (9, 8), (1, 8), (12, 3), (2, 1)]
LEVELS = [(range(7), 3), ([0, 1, 2, 3], 2), ([4, 5], 1), ([0, 2, 3], 2)]
DECODES = [(1, 3), (1, 0), (1, 5), (1, 2), (1, 9), (1, 1)]
TREES = {
    "private": (MIXED, ()),
    "decode": (DECODES, ()),
    "prefill": ([(5, 0), (9, 8), (12, 3)], [(range(3), 2)]),
    "mixed": (MIXED, [(range(7), 3)]),
    "three levels": (MIXED, LEVELS),
    "beams": ([(1, 2)] * 8, [(range(8), 5), (range(4), 1), (range(4, 8), 2)]),
    "interleaved": (DECODES, [([0, 2, 4], 3), ([1, 5], 2), ([0, 4], 1)]),
    "gaps": (DECODES, [([0, 1], 3), ([4, 5], 2)]),
}


def tree(
    stretches: Sequence[tuple[range, int]], own: int, batch: int, rows: int = 1
) -> AttentionPlan:
    """A plan of ``batch`` sequences of ``rows`` rows each, with ``own`` tokens that none shares.

    ``stretches`` are (members, tokens), parents first. Pages have 16 tokens.
    """
    size = 16
    tables: list[list[int]] = [[] for _ in range(batch)]
    made, used = [], 0
    for members, tokens in stretches:
        pages = tokens // size
        made.append(SharedStretch(len(tables[members[0]]), pages, np.array(members, np.int32)))
        for i in members:
            tables[i] += range(used, used + pages)
        used += pages
    context = np.array([len(table) * size + own for table in tables], np.int32)
    for table in tables:
        table += range(used, used + -(-own // size))
        used += -(-own // size)
    plan = AttentionPlan(
        page_size=size,
        query_start=np.arange(batch + 1, dtype=np.int32) * rows,
        context_len=context,
        page_indptr=np.cumsum([0, *map(len, tables)]).astype(np.int32),
        page_indices=np.concatenate(tables).astype(np.int32),
        stretches=tuple(made),
    )
    plan.check()
    return plan
