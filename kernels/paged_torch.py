"""The kernels of ``paged_numba`` in plain torch, for a machine on which those cannot be compiled.

Same names, same arguments, same results to rounding; slower, since keys are gathered before they
are read.
"""

from __future__ import annotations

import numpy as np
import torch


def attend_rows(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    page_indices: np.ndarray,
    pieces: np.ndarray,
    shares: np.ndarray,
    merges: np.ndarray,
    page_size: int,
    kv_heads: int,
    dim: int,
    scale: float,
    out: np.ndarray,
    lse: np.ndarray,
    extra_out: np.ndarray,
    extra_lse: np.ndarray,
) -> None:
    """Attend rows to ranges of their keys; see ``paged_numba``. ``shares`` makes no difference."""
    caches = [torch.from_numpy(cache).view(-1, kv_heads, dim) for cache in (keys, values)]
    for row, table, start, stop, goes in pieces.tolist():
        position = np.arange(start, stop)
        slots = page_indices[table + position // page_size].astype(np.int64) * page_size
        index = torch.from_numpy(slots + position % page_size)
        k, v = (cache.index_select(0, index).transpose(0, 1) for cache in caches)
        query = torch.from_numpy(q[row]).view(kv_heads, -1, dim)
        scores = torch.matmul(query, k.transpose(1, 2)) * float(scale)
        result = torch.matmul(scores.softmax(-1), v)
        to_out, to_lse = (out, lse) if goes < 0 else (extra_out, extra_lse)
        place = row if goes < 0 else goes
        to_out[place] = result.reshape(-1).numpy()
        to_lse[place] = scores.logsumexp(-1).reshape(-1).numpy()
    heads = lse.shape[1]
    for row, begin, end in merges.tolist():
        for extra in range(begin, end):
            _merge(
                torch.from_numpy(out[row]).view(heads, dim),
                torch.from_numpy(lse[row]),
                torch.from_numpy(extra_out[extra]).view(heads, dim),
                torch.from_numpy(extra_lse[extra]),
            )


def merge_rows(
    out: np.ndarray,
    lse: np.ndarray,
    rows: np.ndarray,
    other: np.ndarray,
    other_lse: np.ndarray,
    threads: int,
) -> None:
    """Merge results over further keys into rows; see ``paged_numba``."""
    index = torch.from_numpy(rows)
    whole, whole_lse = torch.from_numpy(out), torch.from_numpy(lse)
    mine, mine_lse = whole.index_select(0, index), whole_lse.index_select(0, index)
    theirs = torch.from_numpy(other).transpose(0, 1).reshape(mine.shape)
    theirs_lse = torch.from_numpy(other_lse).transpose(0, 1).reshape(mine_lse.shape)
    _merge(mine, mine_lse, theirs, theirs_lse)
    whole.index_copy_(0, index, mine)
    whole_lse.index_copy_(0, index, mine_lse)


def gather_heads(
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    pages: np.ndarray,
    first: int,
    count: int,
    out: np.ndarray,
    threads: int,
) -> None:
    """Copy a range of tokens, head by head, into ``out``; see ``paged_numba``."""
    index = torch.from_numpy(pages.astype(np.int64))
    for cache, part in zip((k_cache, v_cache), torch.from_numpy(out), strict=True):
        tokens = torch.from_numpy(cache).index_select(0, index).flatten(0, 1)
        part.copy_(tokens[first : first + count].transpose(0, 1))


def _merge(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> None:
    """Merge ``other`` into ``out`` ``[..., dim]`` and ``lse`` ``[...]``, in place."""
    both = torch.logaddexp(lse, other_lse)
    out.mul_((lse - both).exp_().unsqueeze(-1))
    out.add_(other * (other_lse - both).exp_().unsqueeze(-1))
    lse.copy_(both)
