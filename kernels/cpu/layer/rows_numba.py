"""What a CPU does to each row of a batch between matrix products, fused and compiled.

A decoder layer's norms, residual additions, rotary embedding with the KV write, and activation are
some twenty torch operators. Each costs microseconds for any input, and reads and writes all rows
again. Here they are four functions, and two more quantize and rescale for int8 products. The result
of a row depends on that row alone: the same code computes it by itself or in a thread's share of
many.
"""

from __future__ import annotations

import math

import numpy as np
from numba import carray, prange

from coppice.kernels.cpu.attention.stored import put
from coppice.kernels.cpu.code.calls import pointer
from coppice.kernels.cpu.code.hadamard_numba import transform_row
from coppice.kernels.cpu.code.kept import njit
from coppice.kernels.cpu.code.threads import use_torch_threads

use_torch_threads()  # before compiled code is loaded; see ``code.calls``

_FAST = {"contract", "reassoc", "arcp", "nsz"}

# Numbers of all rows from which threads share the rows: below, waking them takes longer.
_SHARED_FROM = 1 << 15
# Elements at a time of what needs a buffer: it stays in the nearest cache.
_TILE = 64

_LOG2E = np.float32(1.4426950408889634)
_GELU_CUBIC = np.float32(0.044715)
_GELU_RATE = np.float32(-2 * math.sqrt(2 / math.pi) * math.log2(math.e))
# 2**f on [-1/2, 1/2], Taylor coefficients (ln 2)**n / n!
_C1, _C2, _C3, _C4, _C5, _C6 = (
    np.float32(math.log(2.0) ** n / math.factorial(n)) for n in range(1, 7)
)


def _shares(rows: np.ndarray, num_threads: int) -> int:
    """The number of threads among which these rows are shared."""
    return min(len(rows), num_threads) if rows.size >= _SHARED_FROM else 1


# -- norms and residuals -------------------------------------------------------------------------


@njit(fastmath=_FAST)
def norm_share(
    begin: int,
    end: int,
    x: np.ndarray,
    added: np.ndarray,
    weight: np.ndarray,
    eps: np.float32,
    out: np.ndarray,
) -> None:
    """``add_norm`` of the rows ``begin .. end``."""
    width = x.shape[1]
    adds = len(added) > 0
    for row in range(begin, end):
        mine, result = x[row], out[row]
        if adds:
            other = added[row]
            for d in range(width):
                mine[d] += other[d]
        total = np.float32(0)
        for d in range(width):
            total += mine[d] * mine[d]
        inverse = np.float32(1) / np.float32(math.sqrt(total / np.float32(width) + eps))
        for d in range(width):
            result[d] = mine[d] * inverse * weight[d]


@njit(parallel=True, fastmath=_FAST)
def _norm_shares(
    shares: int,
    x: np.ndarray,
    added: np.ndarray,
    weight: np.ndarray,
    eps: np.float32,
    out: np.ndarray,
) -> None:
    rows = len(x)
    for share in prange(shares):
        norm_share(share * rows // shares, (share + 1) * rows // shares, x, added, weight, eps, out)


def add_norm(
    x: np.ndarray,
    added: np.ndarray,
    weight: np.ndarray,
    eps: np.float32,
    out: np.ndarray,
    num_threads: int,
) -> None:
    """``x += added``, and ``out`` = RMSNorm of the sum; all float32 ``[T, W]``, ``weight [W]``.

    An ``added`` of no rows adds nothing.
    """
    shares = _shares(x, num_threads)
    if shares <= 1:
        norm_share(0, len(x), x, added, weight, eps, out)
    else:
        _norm_shares(shares, x, added, weight, eps, out)


# -- activation ----------------------------------------------------------------------------------


# numba's own error model checks each division for an error: then it does not vectorise.
@njit(fastmath=_FAST, error_model="numpy")
def gate_share(
    begin: int, end: int, first: int, last: int, gelu: bool, gate_up: np.ndarray, out: np.ndarray
) -> None:
    """``gate_mul`` of the rows ``begin .. end`` and the columns ``first .. last``."""
    width = out.shape[1]
    x = np.empty(_TILE, np.float32)
    bits = np.empty(_TILE, np.int32)
    powers = bits.view(np.float32)
    for row in range(begin, end):
        both, result = gate_up[row], out[row]
        for at in range(first, last, _TILE):
            count = min(_TILE, last - at)
            gate, up, mine = both[at : at + count], both[width + at :], result[at : at + count]
            if gelu:
                for t in range(count):
                    cubic = gate[t] * gate[t] * gate[t]
                    x[t] = (gate[t] + _GELU_CUBIC * cubic) * _GELU_RATE
            else:
                for t in range(count):
                    x[t] = -gate[t] * _LOG2E
            # 2**x as an exponent and a polynomial.
            for t in range(_TILE):
                y = min(max(x[t], np.float32(-126)), np.float32(126)) + np.float32(127)
                power = np.int32(y + np.float32(0.5))
                f = y - np.float32(power)
                bits[t] = power << np.int32(23)
                inner = _C3 + f * (_C4 + f * (_C5 + f * _C6))
                x[t] = np.float32(1) + f * (_C1 + f * (_C2 + f * inner))
            for t in range(count):
                mine[t] = gate[t] * up[t] / (np.float32(1) + x[t] * powers[t])


@njit(parallel=True, fastmath=_FAST, error_model="numpy")
def _gate_shares(shares: int, gelu: bool, gate_up: np.ndarray, out: np.ndarray) -> None:
    rows = len(out)
    for share in prange(shares):
        begin, end = share * rows // shares, (share + 1) * rows // shares
        gate_share(begin, end, np.int64(0), out.shape[1], gelu, gate_up, out)


def gate_mul(gelu: bool, gate_up: np.ndarray, out: np.ndarray, num_threads: int) -> None:
    """``out [T, W]`` = silu of the first half of ``gate_up [T, 2 W]`` times the second; float32.

    With ``gelu`` it is GELU by its approximation with tanh,
    g / (1 + exp(-2 sqrt(2 / pi) (g + 0.044715 g^3))).
    """
    shares = _shares(gate_up, num_threads)
    if shares <= 1:
        gate_share(0, len(out), 0, out.shape[1], gelu, gate_up, out)
    else:
        _gate_shares(shares, gelu, gate_up, out)


# -- rotary embedding with the KV write ----------------------------------------------------------


@njit(fastmath=_FAST)
def rotate_share(
    begin: int,
    end: int,
    qk: np.ndarray,
    qk_stride: int,
    v: np.ndarray,
    v_stride: int,
    cos: np.ndarray,
    signed_sin: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    slots: np.ndarray,
    out: np.ndarray,
) -> bool:
    """``rotate_write`` of the rows ``begin .. end``; False at a slot beyond the cache."""
    dim, kept = cos.shape[1], k_cache.shape[1]
    width, half = out.shape[1], dim // 2
    queries = width - kept
    for row in range(begin, end):
        slot = slots[row]
        if not 0 <= slot < len(k_cache):
            return False
        result, c, s = out[row], cos[row], signed_sin[row]
        for head in range(0, width, dim):
            first = qk[row * qk_stride + head :]
            second = qk[row * qk_stride + head + half :]
            low, high = result[head : head + half], result[head + half : head + dim]
            for d in range(half):
                a, b = first[d], second[d]
                low[d] = a * c[d] + b * s[d]
                high[d] = b * c[half + d] + a * s[half + d]
        own, keys, values = v[row * v_stride :], k_cache[slot], v_cache[slot]
        for d in range(kept):
            put(keys, d, result[queries + d])
            put(values, d, own[d])
    return True


@njit(parallel=True, fastmath=_FAST)
def _rotate_shares(
    shares: int,
    qk: np.ndarray,
    qk_stride: int,
    v: np.ndarray,
    v_stride: int,
    cos: np.ndarray,
    signed_sin: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    slots: np.ndarray,
    out: np.ndarray,
) -> bool:
    rows = len(out)
    good = np.ones(shares, np.bool_)
    for share in prange(shares):
        good[share] = rotate_share(
            share * rows // shares, (share + 1) * rows // shares, qk, qk_stride, v, v_stride,
            cos, signed_sin, k_cache, v_cache, slots, out,
        )  # fmt: skip
    return bool(good.all())


def rotate_write(
    qk: np.ndarray,
    qk_stride: int,
    v: np.ndarray,
    v_stride: int,
    cos: np.ndarray,
    signed_sin: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    slots: np.ndarray,
    out: np.ndarray,
    num_threads: int,
) -> None:
    """Rotates queries and keys into ``out [T, (Hq + Hkv) * D]``; writes keys and values to slots.

    ``qk`` and ``v`` are flat, a row's heads side by side and rows ``qk_stride`` and ``v_stride``
    apart; ``cos`` and ``signed_sin`` ``[T, D]`` as of ``interface.rotate``; the caches ``[slots,
    Hkv * D]``; ``slots`` int64 ``[T]``. All else is float32; the caches may be uint16, the bits of
    bfloat16. Raises ``IndexError`` for a slot that the cache does not have; rows before it may have
    been written.
    """
    args = (qk, qk_stride, v, v_stride, cos, signed_sin, k_cache, v_cache, slots, out)
    shares = _shares(out, num_threads)
    good = rotate_share(0, len(out), *args) if shares <= 1 else _rotate_shares(shares, *args)
    if not good:
        raise IndexError(f"slots must be from 0 to {len(k_cache) - 1}, got {slots.tolist()}")


# -- copies of pages -----------------------------------------------------------------------------


@njit(nogil=True)
def copy_pages(addresses: np.ndarray, src: np.ndarray, dst: np.ndarray, size: int) -> None:
    """Block ``src[i]`` to block ``dst[i]`` of ``size`` bytes, in order, at each address; int64."""
    for first in addresses:
        for i in range(len(src)):
            source = carray(pointer(first + src[i] * size), (size,), np.uint8)
            carray(pointer(first + dst[i] * size), (size,), np.uint8)[:] = source


# -- int8 ----------------------------------------------------------------------------------------


@njit(fastmath=_FAST)
def quantize_share(
    begin: int, end: int, x: np.ndarray, raised: int, levels: np.ndarray, peaks: np.ndarray
) -> None:
    """``quantize`` of some rows; ``raised`` is added to each level, 128 makes it unsigned."""
    width, less = x.shape[1], np.int32(np.int32(127) - np.int32(raised))
    top, mine = np.empty(1, np.int32), np.empty(width, np.float32)
    for row in range(begin, end):
        result = levels[row]
        if not transform_row(x[row].ctypes.data, width, mine.ctypes.data):
            mine[:] = x[row]
        # Without their sign, floats are in the order of their bits, and NaN is the largest; a
        # maximum of floats would not vectorise.
        bits, most = mine.view(np.int32), np.int32(0)
        for d in range(width):
            # Numba's & gives int64, of which a register holds half as many.
            most = max(most, np.int32(bits[d] & np.int32(0x7FFFFFFF)))
        top[0] = most
        peak = max(top.view(np.float32)[0], np.float32(1e-30))  # of zeros any scale will do
        peaks[row] = peak
        scale = np.float32(127) / peak
        for d in range(width):
            # To the nearest: what is cut off is positive.
            level = np.int32(mine[d] * scale + np.float32(127.5)) - less
            result[d] = np.int8(level)


@njit(parallel=True, fastmath=_FAST)
def _quantize_shares(
    shares: int, x: np.ndarray, raised: int, levels: np.ndarray, peaks: np.ndarray
) -> None:
    rows = len(x)
    for share in prange(shares):
        begin, end = share * rows // shares, (share + 1) * rows // shares
        quantize_share(begin, end, x, raised, levels, peaks)


def quantize(x: np.ndarray, levels: np.ndarray, peaks: np.ndarray, num_threads: int) -> None:
    """``levels`` int8 = ``x`` float32 ``[T, W]``, transformed, over ``peaks [T]``, by 127.

    A peak is the largest number of a transformed row (``hadamard``).
    """
    shares = _shares(x, num_threads)
    if shares <= 1:
        quantize_share(np.int64(0), len(x), x, np.int32(0), levels, peaks)
    else:
        _quantize_shares(shares, x, np.int32(0), levels, peaks)


@njit(fastmath=_FAST)
def _rescale_share(
    begin: int,
    end: int,
    product: np.ndarray,
    peaks: np.ndarray,
    scale: np.ndarray,
    bias: np.ndarray,
    out: np.ndarray,
) -> None:
    width = out.shape[1]
    biased = len(bias) > 0
    for row in range(begin, end):
        mine, result, peak = product[row], out[row], peaks[row]
        if biased:
            for d in range(width):
                result[d] = np.float32(mine[d]) * scale[d] * peak + bias[d]
        else:
            for d in range(width):
                result[d] = np.float32(mine[d]) * scale[d] * peak


@njit(parallel=True, fastmath=_FAST)
def _rescale_shares(
    shares: int,
    product: np.ndarray,
    peaks: np.ndarray,
    scale: np.ndarray,
    bias: np.ndarray,
    out: np.ndarray,
) -> None:
    rows = len(out)
    for share in prange(shares):
        _rescale_share(
            share * rows // shares, (share + 1) * rows // shares, product, peaks, scale, bias, out
        )


def rescale(
    product: np.ndarray,
    peaks: np.ndarray,
    scale: np.ndarray,
    bias: np.ndarray,
    out: np.ndarray,
    num_threads: int,
) -> None:
    """``out`` float32 ``[T, W]`` = ``product`` int32 times ``peaks [T]`` and ``scale [W]``.

    Plus ``bias [W]``; an empty one adds nothing.
    """
    shares = _shares(out, num_threads)
    if shares <= 1:
        _rescale_share(0, len(out), product, peaks, scale, bias, out)
    else:
        _rescale_shares(shares, product, peaks, scale, bias, out)
