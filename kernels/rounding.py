"""Packed pages with numbers of 8 bits, and back: a quarter or half of the bytes, less exact.

A rounded page holds the 8 bits of each number in the order of the packed page, and then the scales:
a bfloat16 for each block of numbers that follow each other in one head of one token. So a token's
numbers depend on nothing beside it, whatever else its page holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from coppice.kernels.attention.interface import LayerCache
from coppice.kernels.cpu.code.kept import njit

#: Most numbers of a block. Smaller blocks are more exact; the scales of 32 take 1/16 of the codes.
MOST_BLOCK = 32

_TYPES = (torch.float32, torch.bfloat16, torch.float16)

# Constants of 32 bits: with Python's, numba would compute in 64, in half as many lanes.
_INT, _FLOAT = np.int32, np.float32
_SIZE, _SIGN, _LEFT = _INT(0x7FFFFFFF), _INT(0x80), _INT(1)
_INFINITE = 0x7F800000  # bits of float32's infinity; those of "no number" are greater
_LEAST = 27 << 23  # bits of the least scale, 2 ** -100, with which codes of tiny numbers are right
# fp8 (e4m3): bits of its least normal number, 2 ** -6, as float32; steps below it are 2 ** -9.
_E4M3_LEAST = _INT(121 << 23)
# Turns float32's exponent to e4m3's, and rounds up by half of the last of three bits, less one.
_E4M3_SHIFT = _INT(0x7FFFF - (120 << 23))
_E4M3_STEPS = _FLOAT(2.0**9)
# Codes' bits, moved to their places in a float32, stand for numbers smaller by this.
_E4M3_RAISE = _FLOAT(2.0**120)


class Rounding:
    """Rounds the packed pages of a KV cache, and restores them. Any thread may call it.

    Attributes:
        page_bytes: of a rounded page.
    """

    def __init__(
        self, caches: Sequence[LayerCache], kind: str, packed_bytes: int | None = None
    ) -> None:
        """`kind` is "int8", 255 equal steps a block, or "fp8", e4m3 with a power of two as scale.

        `packed_bytes`: of a page, if it has more than these caches' part of it.

        Raises ValueError if the cache's numbers are not of 16 or 32 bits.
        """
        tensors = [each for cache in caches for each in (cache.k, cache.v)]
        dtypes = {each.dtype for each in tensors}
        if len(dtypes) > 1 or not dtypes <= set(_TYPES):
            names = ", ".join(sorted(str(each).removeprefix("torch.") for each in dtypes))
            raise ValueError(f"{kind} needs a KV cache of 16 or 32 bits a number, got {names}")
        [self._dtype] = dtypes
        block = math.gcd(*(each.shape[-1] for each in tensors))
        while block > MOST_BLOCK and not block % 2:
            block //= 2
        self._block, self._fp8 = block, kind == "fp8"
        self._numbers = sum(each[0].numel() for each in tensors)
        if packed_bytes is not None:
            self._numbers = packed_bytes // self._dtype.itemsize
        self.page_bytes = self._numbers + self._numbers // block * 2

    def encode(self, pages: np.ndarray) -> np.ndarray:
        """Rounds packed pages, uint8 ``[N, packed_bytes]``: uint8 ``[N, page_bytes]``. O(bytes)."""
        rounded = np.empty((len(pages), self.page_bytes), np.uint8)
        cell = np.empty(1, np.int32)
        for page, row in zip(pages, rounded, strict=True):
            codes, scales = row[: self._numbers], row[self._numbers :].view(np.uint16)
            x = self._widened(page)
            _encode(x, x.view(_INT), codes, scales, cell, cell.view(_FLOAT), self._fp8)
        return rounded

    def decode(self, rounded: np.ndarray, out: np.ndarray) -> None:
        """Restores rounded pages to `out`, uint8 ``[N, packed_bytes]``. O(bytes)."""
        cell = np.empty(1, np.int32)
        room = np.empty(self._numbers if self._dtype != torch.float32 else 0, _FLOAT)
        for row, page in zip(rounded, out, strict=True):
            codes, scales = row[: self._numbers], row[self._numbers :].view(np.uint16)
            x = page.view(_FLOAT) if self._dtype == torch.float32 else room
            if self._fp8:
                _decode_e4m3(codes, scales, x, x.view(_INT), cell, cell.view(_FLOAT))
            else:
                _decode_int8(codes.view(np.int8), scales, x, cell, cell.view(_FLOAT))
            if x is room:
                self._narrow(room, page)

    def _widened(self, page: np.ndarray) -> np.ndarray:
        """The numbers of a packed page, float32."""
        if self._dtype == torch.float32:
            return page.view(_FLOAT)
        if self._dtype == torch.float16:
            return page.view(np.float16).astype(_FLOAT)
        return (page.view(np.uint16).astype(np.uint32) << 16).view(_FLOAT)

    def _narrow(self, numbers: np.ndarray, page: np.ndarray) -> None:
        """Writes float32 numbers to a page, in its type."""
        if self._dtype == torch.float16:  # a rounded number may exceed the greatest by half a step
            most = np.finfo(np.float16).max
            page.view(np.float16)[:] = np.clip(numbers, -most, most)
            return
        bits = numbers.view(np.uint32)
        page.view(np.uint16)[:] = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16


@njit(nogil=True, error_model="numpy")
def _encode(
    x: Any, bits: Any, codes: Any, scales: Any, cell: Any, number: Any, fp8: bool
) -> None:  # pragma: no cover
    """Rounds float32 numbers, a block for each of `scales`; `bits` are theirs.

    `cell` has place for one number, which `number` is as float32.
    """
    block = len(codes) // len(scales)
    for i in range(len(scales)):
        begin = i * block
        most = _INT(0)
        for j in range(begin, begin + block):
            most = max(most, _INT(bits[j] & _SIZE))
        if most == 0 or most >= _INFINITE:  # then restored as no numbers, all of the block
            scales[i] = 0 if most == 0 else 0x7FC0
            codes[begin : begin + block] = 0
            continue
        cell[0] = most
        if fp8:
            # A power of two, so that numbers are rounded once only: the least one that leaves at
            # most 448, which is 1.75 * 2 ** 8.
            scale: Any = ((most >> 23) - 8 + (1 if most & 0x7FFFFF > 0x600000 else 0)) << 23
        else:
            number[0] = number[0] / _FLOAT(127.0)
            scale = (cell[0] + 0xFFFF) & 0x7FFF0000  # rounded up
        scale = max(scale, _LEAST)
        scales[i] = scale >> 16
        cell[0] = scale
        inverse = _FLOAT(1.0) / number[0]
        if not fp8:
            for j in range(begin, begin + block):
                codes[j] = np.uint8(_INT(np.rint(x[j] * inverse)))
            continue
        down = _INT(scale - (127 << 23))
        fine = _FLOAT(inverse * _E4M3_STEPS)
        for j in range(begin, begin + block):
            size = _INT(_INT(bits[j] & _SIZE) - down)
            normal = _INT(_INT(size + _E4M3_SHIFT) + _INT(_INT(size >> 20) & _LEFT)) >> 20
            small = _INT(np.rint(abs(x[j]) * fine))
            code = small if size < _E4M3_LEAST else normal
            codes[j] = np.uint8(code | _INT((bits[j] >> 24) & _SIGN))


@njit(nogil=True, error_model="numpy")
def _decode_int8(
    codes: Any, scales: Any, x: Any, cell: Any, number: Any
) -> None:  # pragma: no cover
    block = len(codes) // len(scales)
    for i in range(len(scales)):
        begin = i * block
        cell[0] = _INT(scales[i]) << 16
        scale = number[0]
        for j in range(begin, begin + block):
            x[j] = _FLOAT(codes[j]) * scale


@njit(nogil=True, error_model="numpy")
def _decode_e4m3(
    codes: Any, scales: Any, x: Any, bits: Any, cell: Any, number: Any
) -> None:  # pragma: no cover
    block = len(codes) // len(scales)
    for i in range(len(scales)):
        begin = i * block
        cell[0] = _INT(scales[i]) << 16
        scale = number[0]
        for j in range(begin, begin + block):
            code = _INT(codes[j])
            bits[j] = _INT(_INT(code & _INT(0x7F)) << 20) | _INT(_INT(code & _SIGN) << 24)
        for j in range(begin, begin + block):
            x[j] = x[j] * _E4M3_RAISE * scale
