"""The Triton kernels that write the cache: K and V to slots, with rotation or not, and whole pages.

Keys are normalised and rotated where they are written (Su et al. 2021), so that they do not go to
memory and back for it. Into a cache of 8-bit floats they go divided by their head's scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

from coppice.kernels.triton.dependent import begin

#: The greatest finite number of float8 e4m3: what is larger is written as this, not as NaN.
E4M3_MAX = tl.constexpr(448.0)


@triton.jit
def round_to_e4m3(values: tl.tensor, INTERPRETED: tl.constexpr) -> tl.tensor:
    """Float32 as e4m3, to even."""
    if INTERPRETED:
        # Triton's interpreter loses the carry when rounding makes the next power of two: here the
        # bits are rounded to even beforehand, so that its conversion has nothing left to round.
        bits = values.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        values = bits.to(tl.float32, bitcast=True)
    return values.to(tl.float8e4nv)


@triton.jit
def _to_e4m3(values: tl.tensor, scale: tl.tensor, INTERPRETED: tl.constexpr) -> tl.tensor:
    values = tl.clamp(values.to(tl.float32) / scale, -E4M3_MAX, E4M3_MAX)
    return round_to_e4m3(values, INTERPRETED)


@triton.jit
def write_rows(
    k: tl.tensor,
    v: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    slots: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SCALED: tl.constexpr,
    INTERPRETED: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """One row's keys and values to its slot: grid ``(T,)``; WIDTH is all heads together."""
    begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    at = tl.arange(0, BLOCK)
    mask = at < WIDTH
    head = at // HEAD_DIM
    keys = tl.load(k + row * k_stride + at, mask=mask, other=0.0)
    values = tl.load(v + row * v_stride + at, mask=mask, other=0.0)
    to = slot * WIDTH + at
    if SCALED:
        k_scale = tl.load(k_scales + head, mask=mask, other=1.0)
        v_scale = tl.load(v_scales + head, mask=mask, other=1.0)
        tl.store(k_cache + to, _to_e4m3(keys, k_scale, INTERPRETED), mask=mask)
        tl.store(v_cache + to, _to_e4m3(values, v_scale, INTERPRETED), mask=mask)
    else:
        tl.store(k_cache + to, keys, mask=mask)
        tl.store(v_cache + to, values, mask=mask)


@triton.jit
def rotate_rows(
    heads: tl.tensor,
    v: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    weight: tl.tensor,
    rotated: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    slots: tl.tensor,
    heads_stride: tl.tensor,
    v_stride: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NORMED: tl.constexpr,
    SCALED: tl.constexpr,
    INTERPRETED: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """BLOCK_H heads of one row, grid ``(T, (HEADS + KV_HEADS) / BLOCK_H)``: queries, then keys.

    ``heads`` and ``rotated`` hold both, ``[T, HEADS + KV_HEADS, HEAD_DIM]``; values go with the
    keys. ``cos`` and ``sin`` are ``[T, HEAD_DIM]``, the sine signed: ``x[d] cos[d] + x[d +-
    HEAD_DIM / 2] sin[d]``. NORMED: of ``x / sqrt(mean(x^2) + eps) * weight[head]``, rounded.
    """
    begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK_H
    head = first + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    inside = d < HEAD_DIM
    mask = (head < HEADS + KV_HEADS)[:, None] & inside[None, :]
    half: tl.constexpr = HEAD_DIM // 2
    partner = tl.where(d < half, d + half, d - half)
    cosine = tl.load(cos + row * HEAD_DIM + d, mask=inside, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sin + row * HEAD_DIM + d, mask=inside, other=0.0).to(tl.float32)[None, :]
    at = head[:, None] * HEAD_DIM + d[None, :]
    at_partner = head[:, None] * HEAD_DIM + partner[None, :]
    source = heads + row * heads_stride
    x = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(source + at_partner, mask=mask, other=0.0).to(tl.float32)
    if NORMED:
        inverse = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        by = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
        x = (x * inverse * by).to(rotated.dtype.element_ty).to(tl.float32)
        by = tl.load(weight + at_partner, mask=mask, other=0.0).to(tl.float32)
        y = (y * inverse * by).to(rotated.dtype.element_ty).to(tl.float32)
    turned = (x * cosine + y * sine).to(rotated.dtype.element_ty)
    tl.store(rotated + row * ((HEADS + KV_HEADS) * HEAD_DIM) + at, turned, mask=mask)
    if first + BLOCK_H > HEADS:
        kv_head = head - HEADS
        new = mask & (kv_head >= 0)[:, None]
        slot = tl.load(slots + row)
        place = kv_head[:, None] * HEAD_DIM + d[None, :]
        values = tl.load(v + row * v_stride + place, mask=new, other=0.0)
        to = slot * (KV_HEADS * HEAD_DIM) + place
        if SCALED:
            real = (kv_head >= 0) & (kv_head < KV_HEADS)
            k_scale = tl.load(k_scales + kv_head, mask=real, other=1.0)[:, None]
            v_scale = tl.load(v_scales + kv_head, mask=real, other=1.0)[:, None]
            tl.store(k_cache + to, _to_e4m3(turned, k_scale, INTERPRETED), mask=new)
            tl.store(v_cache + to, _to_e4m3(values, v_scale, INTERPRETED), mask=new)
        else:
            tl.store(k_cache + to, turned, mask=new)
            tl.store(v_cache + to, values, mask=new)


@triton.jit(do_not_specialize=["num_copies"])
def copy_page_words(
    caches: tl.tensor,
    pages: tl.tensor,
    num_copies: tl.tensor,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Pages of many tensors, as 32-bit words: grid ``(copies, tensors, WORDS / BLOCK)``.

    ``caches`` int64 are addresses; ``pages`` int64 ``[2, copies]`` are sources and destinations.
    One launch serves all layers.
    """
    copy = tl.program_id(0)
    base = tl.load(caches + tl.program_id(1)).to(tl.pointer_type(tl.int32))
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = at < WORDS
    source, target = tl.load(pages + copy), tl.load(pages + num_copies + copy)
    tl.store(base + target * WORDS + at, tl.load(base + source * WORDS + at, mask=mask), mask=mask)
