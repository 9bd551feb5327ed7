"""A token of each row of logits, as ``choose`` explains, in one Triton kernel: a program a row.

Bisection reads a row many times, from the second time on out of the GPU's L2 cache, which holds the
rows of all running programs. Only tokens are written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from coppice.kernels.sampling.columns import COLUMNS

_BLOCK = 4096
_WARPS = 8


def choose_rows(logits: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """A token of each row, int64 ``[R]``: see ``choose.choose``; ``columns`` are on the device."""
    rows, vocabulary = logits.shape
    if logits.stride(1) != 1 or not columns.is_contiguous():
        raise ValueError(
            f"logits have strides {logits.stride()}, columns {columns.stride()}; the numbers of a "
            "row must lie side by side"
        )
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        block = min(_BLOCK, max(16, triton.next_power_of_2(vocabulary)))
        choose_row[(rows,)](
            logits, columns, tokens, logits.stride(0), vocabulary,
            COLUMNS=COLUMNS, BLOCK=block, num_warps=_WARPS if block == _BLOCK else 4,
        )  # fmt: skip
    return tokens


@triton.jit
def _weights(
    logits: tl.tensor,
    start: tl.tensor,
    vocabulary: tl.tensor,
    top: tl.tensor,
    temperature: tl.tensor,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The weights of a block, 0 after the end, and their ids."""
    ids = start + tl.arange(0, BLOCK)
    x = tl.load(logits + ids, mask=ids < vocabulary, other=-float("inf"))
    return tl.exp((x - top) / temperature), ids


@triton.jit
def _above(
    logits: tl.tensor,
    vocabulary: tl.tensor,
    top: tl.tensor,
    temperature: tl.tensor,
    place: tl.tensor,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The weight, or with COUNT the number, of keys above a place; float64."""
    sums = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocabulary, BLOCK):
        weights, _ = _weights(logits, start, vocabulary, top, temperature, BLOCK)
        above = weights.to(tl.int32, bitcast=True) > place
        if COUNT:
            sums += tl.where(above, 1.0, 0.0)
        else:
            sums += tl.where(above, weights, 0.0)
    return tl.sum(sums)


@triton.jit
def _place(
    logits: tl.tensor,
    vocabulary: tl.tensor,
    top: tl.tensor,
    temperature: tl.tensor,
    target: tl.tensor,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The least key above which there is less than the target, and the amount above it."""
    low = tl.full((), 0, tl.int32)
    high = tl.full((), 0x3F800000, tl.int32)
    while low < high:
        middle = (low + high) // 2
        if _above(logits, vocabulary, top, temperature, middle, COUNT, BLOCK) < target:
            high = middle
        else:
            low = middle + 1
    return high, _above(logits, vocabulary, top, temperature, high, COUNT, BLOCK)


@triton.jit
def _kept(
    weights: tl.tensor, place: tl.tensor, equals: tl.tensor, min_p: tl.tensor, seen: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """What is kept of a block, and how many equals of the last key there were up to its end."""
    keys = weights.to(tl.int32, bitcast=True)
    same = (keys == place).to(tl.int32)
    rank = seen + tl.cumsum(same)
    keep = (keys > place) | ((same > 0) & (rank <= equals))
    kept = tl.where(keep & (weights >= min_p), weights, 0.0)
    return kept.to(tl.float64), seen + tl.sum(same)


@triton.jit
def choose_row(
    logits: tl.tensor,
    columns: tl.tensor,
    tokens: tl.tensor,
    stride: tl.tensor,
    vocabulary: tl.tensor,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row: grid ``(R,)``.

    ``logits`` are float32 ``[R, V]`` with ``stride`` between rows, V the ``vocabulary``;
    ``columns`` float64 ``[R, COLUMNS]``; ``tokens`` int64 ``[R]``.
    """
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    columns += row * COLUMNS
    temperature = tl.load(columns).to(tl.float32)
    top_k = tl.load(columns + 1)
    top_p = tl.load(columns + 2)
    min_p = tl.load(columns + 3)
    uniform = tl.load(columns + 4)

    best = tl.full([BLOCK], -float("inf"), tl.float32)
    where = tl.full([BLOCK], 0, tl.int32)
    for start in range(0, vocabulary, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(logits + ids, mask=ids < vocabulary, other=-float("inf"))
        where = tl.where(x > best, ids, where)
        best = tl.maximum(x, best)
    top = tl.max(best)
    chosen = tl.min(tl.where(best == top, where, vocabulary))
    if top_k != 1:
        place = tl.full((), 0, tl.int32)
        equals = tl.full((), float("inf"), tl.float64)
        if top_k < vocabulary:
            place, above = _place(logits, vocabulary, top, temperature, top_k, True, BLOCK)
            equals = top_k - above
        if top_p < 1:
            total = _above(logits, vocabulary, top, temperature, place, False, BLOCK)
            if top_k < vocabulary:
                total += equals * place.to(tl.float32, bitcast=True)
            target = top_p * total
            last, above = _place(logits, vocabulary, top, temperature, target, False, BLOCK)
            # How many equals are needed to reach the target.
            count = tl.ceil((target - above) / last.to(tl.float32, bitcast=True).to(tl.float64))
            count = tl.maximum(count, 1.0)
            equals = tl.where(last > place, count, tl.minimum(count, equals))
            place = tl.maximum(place, last)
        sums = tl.zeros([BLOCK], tl.float64)
        seen = tl.full((), 0, tl.int32)
        for start in range(0, vocabulary, BLOCK):
            weights, _ = _weights(logits, start, vocabulary, top, temperature, BLOCK)
            kept, seen = _kept(weights, place, equals, min_p, seen)
            sums += kept
        target = uniform * tl.sum(sums)
        chosen = tl.full((), 0, tl.int32)
        done = tl.full((), 0, tl.int32)
        running = tl.full((), 0.0, tl.float64)
        seen = tl.full((), 0, tl.int32)
        start = tl.full((), 0, tl.int32)
        while (start < vocabulary) & (done == 0):
            weights, ids = _weights(logits, start, vocabulary, top, temperature, BLOCK)
            kept, seen = _kept(weights, place, equals, min_p, seen)
            reached = running + tl.cumsum(kept)
            first = tl.min(tl.where((reached > target) & (kept > 0), ids, vocabulary))
            if first < vocabulary:
                chosen = first
                done = tl.full((), 1, tl.int32)
            else:
                # If rounding keeps the sums below the target, the last kept token is chosen.
                chosen = tl.maximum(chosen, tl.max(tl.where(kept > 0, ids, 0)))
            running += tl.sum(kept)
            start += BLOCK
    tl.store(tokens + row, chosen.to(tl.int64))
