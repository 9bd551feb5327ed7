"""``numba_items`` in plain torch, for a machine on which that cannot be compiled.

Same arguments, same results to rounding; several times slower, since keys are gathered before they
are read, item by item.
"""

from __future__ import annotations

import numpy as np
import torch

# The shape of items, as ``vectors`` has it.
LANES, MOST_LANES, TILE = 16, 1024, 64
VECTORS = (1,)


def attend_items(
    tasks: np.ndarray,
    shares: np.ndarray,
    items: np.ndarray,
    merges: np.ndarray,
    q: np.ndarray,
    q_stride: int,
    keys: np.ndarray,
    values: np.ndarray,
    page_indices: np.ndarray,
    rows: np.ndarray,
    slots: np.ndarray,
    positions: np.ndarray,
    page_size: int,
    kv_heads: int,
    dim: int,
    scale: float,
    window: int,
    out: np.ndarray,
    lse: np.ndarray,
    partial_out: np.ndarray,
    partial_lse: np.ndarray,
) -> None:
    """See ``numba_items``. ``tasks`` and ``shares`` make no difference."""
    caches = [torch.from_numpy(cache).view(-1, kv_heads, dim) for cache in (keys, values)]
    group = lse.shape[1] // kv_heads
    shape, strides = (len(out), kv_heads, group, dim), (q_stride, group * dim, dim, 1)
    queries = torch.from_numpy(q).as_strided(shape, strides)
    results, weights = (
        [torch.from_numpy(each) for each in pair]
        for pair in ((out, partial_out), (lse, partial_lse))
    )
    for first, count, table, begin, end, _, _, slot in items.tolist():
        mine = rows[first : first + count].astype(np.int64)
        at = np.arange(begin, end)
        index = page_indices[table + at // page_size].astype(np.int64) * page_size + at % page_size
        k, v = (cache.index_select(0, torch.from_numpy(index)) for cache in caches)
        products = torch.einsum("rhgd,khd->rhgk", queries[mine], k) * float(scale)
        hidden = at > positions[mine][:, None]
        if window:
            hidden |= at <= positions[mine][:, None] - window
        products.masked_fill_(torch.from_numpy(hidden)[:, None, None], float("-inf"))
        total = products.logsumexp(-1, keepdim=True)
        shares_of = (products - total).exp_().nan_to_num_(0.0)
        result = torch.einsum("rhgk,khd->rhgd", shares_of, v).flatten(1)
        place = slots[slot : slot + count] if len(slots) else np.full(count, -1)
        for partial, chosen in enumerate((place < 0, place >= 0)):
            to = torch.from_numpy((mine if partial == 0 else place)[chosen].astype(np.int64))
            picked = torch.from_numpy(np.flatnonzero(chosen))
            results[partial][to] = result[picked]
            weights[partial][to] = total.flatten(1)[picked]
    heads = lse.shape[1]
    for row, start, parts in merges.tolist():
        part = weights[1][start : start + parts]
        both = part.logsumexp(0)
        share = (part - both).exp_().unsqueeze(-1)
        merged = (results[1][start : start + parts].view(parts, heads, dim) * share).sum(0)
        results[0][row] = merged.flatten()
        weights[0][row] = both
