"""What attention on a CPU is called with: the items of a step, what they read, what they write."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:  # compiled code depends on this module, and not on those
    from coppice.kernels.attention.interface import AttentionPlan
    from coppice.kernels.schedule.cpu import CpuSchedule


class Items(NamedTuple):
    """The items of a step and their distribution among threads, for layers of one kind.

    ``tasks`` int32 ``[n, 3]``: item, first KV head, end of KV heads. ``shares`` int64
    ``[threads + 1]``: thread i works tasks ``shares[i]:shares[i + 1]``. ``items``, ``rows``,
    ``slots``, ``positions``, ``branches`` and ``merges`` are as ``TreeSchedule`` has them. ``dim``
    is that of a head, even; a ``window`` or a ``softcap`` of 0 is none.
    """

    tasks: np.ndarray
    shares: np.ndarray
    items: np.ndarray
    merges: np.ndarray
    page_indices: np.ndarray
    rows: np.ndarray
    slots: np.ndarray
    positions: np.ndarray
    branches: np.ndarray
    page_size: int
    kv_heads: int
    dim: int
    scale: np.float32
    window: int
    softcap: np.float32


class Inputs(NamedTuple):
    """Queries, float32, and a layer's cache, all flat; rows of queries are a ``stride`` apart.

    Keys and values are float32, or uint16: the bits of bfloat16.
    """

    queries: np.ndarray
    stride: int
    keys: np.ndarray
    values: np.ndarray


class Results(NamedTuple):
    """Float32 ``out [T, heads * dim]`` and ``lse [T, heads]``, and the same of partial results."""

    out: np.ndarray
    lse: np.ndarray
    partial_out: np.ndarray
    partial_lse: np.ndarray


def items_of(
    schedule: CpuSchedule,
    plan: AttentionPlan,
    *,
    kv_heads: int,
    dim: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Items:
    """The items of a plan's schedule for layers with that window, cap, and heads of that shape."""
    tree = schedule.tree
    return Items(
        schedule.tasks,
        schedule.shares,
        schedule.items,
        tree.merges,
        plan.page_indices,
        tree.rows,
        tree.slots,
        tree.positions,
        tree.branches,
        plan.page_size,
        kv_heads,
        dim,
        np.float32(scale),
        window or 0,
        np.float32(softcap or 0),
    )
