"""Batches whose sequences share pages in many ways, for tests of backends and schedules.

A batch is (new rows, cached pages or tokens) of each sequence, and the stretches of pages that some
of them share: (their numbers, pages).
"""

from __future__ import annotations

MIXED = [(1, 0), (5, 0), (1, 7), (9, 8), (1, 8), (12, 3), (2, 1)]
DECODES = [(1, 3), (1, 0), (1, 5), (1, 2), (1, 9), (1, 1)]
TREES = {
    "private": (MIXED, ()),
    "decode": (DECODES, ()),
    "prefill": ([(5, 0), (9, 8), (12, 3)], [(range(3), 2)]),
    "mixed": (MIXED, [(range(7), 3)]),
    "three levels": (
        MIXED,
        [(range(7), 3), ([0, 1, 2, 3], 2), ([4, 5], 1), ([0, 2, 3], 2)],
    ),
    "beams": ([(1, 2)] * 8, [(range(8), 5), (range(4), 1), (range(4, 8), 2)]),
    "interleaved": (DECODES, [([0, 2, 4], 3), ([1, 5], 2), ([0, 4], 1)]),
    "gaps": (DECODES, [([0, 1], 3), ([4, 5], 2)]),
}
