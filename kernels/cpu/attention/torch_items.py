"""Attention of items in plain torch, for a machine on which ``numba_items`` cannot be compiled.

It has the same arguments and, up to rounding, the same results. It is several times slower, since
it gathers the keys of each item before it reads them.
"""

from __future__ import annotations

import numpy as np
import torch

from coppice.kernels.cpu.attention.arguments import Inputs, Items, Results

# The shape of items, as ``full_lanes`` has it.
LANES, MOST_LANES, TILE = 16, 1024, 64
VECTORS = (1,)


def attend_items(work: Items, inputs: Inputs, results: Results) -> None:
    """See ``numba_items``. Tasks and shares make no difference."""
    out, lse, partial_out, partial_lse = results
    rows, slots, positions, kv_heads, dim = (
        work.rows, work.slots, work.positions, work.kv_heads, work.dim,
    )  # fmt: skip
    page_size, page_indices, window = work.page_size, work.page_indices, work.window
    caches = [_pages(cache).view(-1, kv_heads, dim) for cache in (inputs.keys, inputs.values)]
    group = lse.shape[1] // kv_heads
    shape, strides = (len(out), kv_heads, group, dim), (inputs.stride, group * dim, dim, 1)
    queries = torch.from_numpy(inputs.queries).as_strided(shape, strides)
    sums, weights = (
        [torch.from_numpy(each) for each in pair]
        for pair in ((out, partial_out), (lse, partial_lse))
    )
    for first, count, table, begin, end, _, _, slot in work.items.tolist():
        mine = rows[first : first + count].astype(np.int64)
        at = np.arange(begin, end)
        index = page_indices[table + at // page_size].astype(np.int64) * page_size + at % page_size
        k, v = (cache.index_select(0, torch.from_numpy(index)).float() for cache in caches)
        products = torch.einsum("rhgd,khd->rhgk", queries[mine], k) * float(work.scale)
        if work.softcap > 0:
            products.div_(float(work.softcap)).tanh_().mul_(float(work.softcap))
        hidden = at > positions[mine][:, None]
        if len(work.branches):
            begun, bits = (work.branches[mine, column][:, None] for column in (0, 1))
            inside = at >= begun
            hidden = np.where(inside, bits >> np.clip(at - begun, 0, 62) & 1 == 0, hidden)
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
            sums[partial][to] = result[picked]
            weights[partial][to] = total.flatten(1)[picked]
    heads = lse.shape[1]
    for row, start, parts in work.merges.tolist():
        part = weights[1][start : start + parts]
        both = part.logsumexp(0)
        share = (part - both).exp_().unsqueeze(-1)
        merged = (sums[1][start : start + parts].view(parts, heads, dim) * share).sum(0)
        sums[0][row] = merged.flatten()
        weights[0][row] = both


def _pages(numbers: np.ndarray) -> torch.Tensor:
    found = torch.from_numpy(numbers)
    return found.view(torch.bfloat16) if numbers.dtype == np.uint16 else found
