"""Operations on rows that a program consists of, number by number or over a line of numbers.

The result for a row depends on that row alone.
"""

from __future__ import annotations

import math

import numpy as np
from numba import carray

from coppice.kernels.cpu.code.calls import pointer
from coppice.kernels.cpu.code.kept import njit
from coppice.kernels.cpu.program.instructions import (
    ABS,
    ADD,
    BASE,
    CLAMP,
    CONSTANT,
    COPY,
    DIV,
    EXP,
    FILL,
    FIRST,
    GELU,
    GELU_TANH,
    INPUT,
    LAYER_NORM,
    LINE,
    MUL,
    N1,
    N2,
    OP,
    OUT,
    RELU,
    RMS_NORM,
    RSQRT,
    S1,
    S2,
    SIGMOID,
    SILU,
    SPACE,
    SQRT,
    SUB,
    SUM,
    TANH,
    W0,
    W1,
    WIDTH,
    A,
    B,
    C,
)

_FAST = {"contract", "reassoc", "arcp", "nsz"}
_ALL = 1 << 40
_HALF = np.float32(0.5)
_ONE = np.float32(1)
_ROOT = np.float32(math.sqrt(0.5))
_CUBIC = np.float32(0.044715)
_RATE = np.float32(math.sqrt(2 / math.pi))


@njit
def place(line: np.ndarray, column: int, rows: int, scratch: int, inputs: np.ndarray) -> int:
    """The address of an operand's first number in row 0."""
    space, base = line[column + SPACE], line[column + BASE]
    if space == CONSTANT:
        address = base
    elif space == INPUT:
        address = inputs[base]
    else:
        address = scratch + 4 * rows * base
    return address + 4 * line[column + FIRST]


@njit(fastmath=_FAST, error_model="numpy", inline="never")
def _two(op: int, count: int, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    if op == ADD:
        for d in range(count):
            out[d] = a[d] + b[d]
    elif op == SUB:
        for d in range(count):
            out[d] = a[d] - b[d]
    elif op == MUL:
        for d in range(count):
            out[d] = a[d] * b[d]
    else:
        for d in range(count):
            out[d] = a[d] / b[d]


@njit(fastmath=_FAST, error_model="numpy")
def _two_apart(
    op: int, count: int, a: np.ndarray, sa: int, b: np.ndarray, sb: int, out: np.ndarray, so: int
) -> None:
    for d in range(count):
        x, y = a[d * sa], b[d * sb]
        if op == ADD:
            x += y
        elif op == SUB:
            x -= y
        elif op == MUL:
            x *= y
        else:
            x /= y
        out[d * so] = x


@njit(fastmath=_FAST, error_model="numpy")
def _one(
    op: int,
    count: int,
    a: np.ndarray,
    sa: int,
    out: np.ndarray,
    so: int,
    p: np.float32,
    q: np.float32,
) -> None:
    """The operations on single numbers; those that are only moved or scaled come first."""
    if op == COPY:
        if sa == 1 and so == 1:
            for d in range(count):
                out[d] = a[d]
        else:
            for d in range(count):
                out[d * so] = a[d * sa]
    elif op == LINE:
        if sa == 1 and so == 1:
            for d in range(count):
                out[d] = a[d] * p + q
        else:
            for d in range(count):
                out[d * so] = a[d * sa] * p + q
    elif op == FILL:
        for d in range(count):
            out[d * so] = p
    elif op == SILU:
        for d in range(count):
            x = a[d * sa]
            out[d * so] = x / (_ONE + np.float32(math.exp(-x)))
    elif op == GELU:
        for d in range(count):
            x = a[d * sa]
            out[d * so] = _HALF * x * (_ONE + np.float32(math.erf(x * _ROOT)))
    elif op == GELU_TANH:
        for d in range(count):
            x = a[d * sa]
            t = np.float32(math.tanh(_RATE * (x + _CUBIC * x * x * x)))
            out[d * so] = _HALF * x * (_ONE + t)
    elif op == RELU:
        for d in range(count):
            out[d * so] = max(a[d * sa], np.float32(0))
    elif op == SIGMOID:
        for d in range(count):
            out[d * so] = _ONE / (_ONE + np.float32(math.exp(-a[d * sa])))
    elif op == TANH:
        for d in range(count):
            out[d * so] = np.float32(math.tanh(a[d * sa]))
    elif op == EXP:
        for d in range(count):
            out[d * so] = np.float32(math.exp(a[d * sa]))
    elif op == RSQRT:
        for d in range(count):
            out[d * so] = _ONE / np.float32(math.sqrt(a[d * sa]))
    elif op == SQRT:
        for d in range(count):
            out[d * so] = np.float32(math.sqrt(a[d * sa]))
    elif op == ABS:
        for d in range(count):
            out[d * so] = abs(a[d * sa])
    elif op == CLAMP:
        for d in range(count):
            out[d * so] = min(max(a[d * sa], p), q)
    else:
        for d in range(count):
            x = a[d * sa]
            out[d * so] = x * x if p == np.float32(2) else np.float32(x**p)


@njit(fastmath=_FAST, error_model="numpy")
def _rms_norm(
    count: int, a: np.ndarray, weight: np.ndarray, eps: np.float32, out: np.ndarray
) -> None:
    total = np.float32(0)
    for d in range(count):
        total += a[d] * a[d]
    inverse = _ONE / np.float32(math.sqrt(total / np.float32(count) + eps))
    for d in range(count):
        out[d] = a[d] * inverse * weight[d]


@njit(fastmath=_FAST, error_model="numpy")
def _layer_norm(count: int, a: np.ndarray, eps: np.float32, out: np.ndarray) -> None:
    total = np.float32(0)
    for d in range(count):
        total += a[d]
    mean = total / np.float32(count)
    total = np.float32(0)
    for d in range(count):
        apart = a[d] - mean
        total += apart * apart
    inverse = _ONE / np.float32(math.sqrt(total / np.float32(count) + eps))
    for d in range(count):
        out[d] = (a[d] - mean) * inverse


@njit(fastmath=_FAST)
def _sum(count: int, a: np.ndarray, stride: int) -> np.float32:
    total = np.float32(0)
    for d in range(count):
        total += a[d * stride]
    return total


@njit
def work_rows(
    line: np.ndarray,
    numbers: np.ndarray,
    begin: int,
    end: int,
    rows: int,
    scratch: int,
    inputs: np.ndarray,
) -> None:
    """One instruction, other than products, attention and gates, on the rows ``begin .. end``."""
    op, n1, n2 = line[OP], line[N1], line[N2]
    p, q = numbers[0], numbers[1]
    at_out = place(line, OUT, rows, scratch, inputs)
    out = carray(pointer(at_out), (_ALL,), np.float32)
    a = out
    if op != FILL:
        a = carray(pointer(place(line, A, rows, scratch, inputs)), (_ALL,), np.float32)
    b = c = a
    if ADD <= op <= DIV or op == RMS_NORM or (op == LAYER_NORM and line[W0]):
        b = carray(pointer(place(line, B, rows, scratch, inputs)), (_ALL,), np.float32)
    if op == LAYER_NORM and line[W1]:
        c = carray(pointer(place(line, C, rows, scratch, inputs)), (_ALL,), np.float32)
    sa, sb, so = line[A + S2], line[B + S2], line[OUT + S2]
    for row in range(begin, end):
        for i in range(n1):
            mine = a[row * line[A + WIDTH] + i * line[A + S1] :]
            other = b[row * line[B + WIDTH] + i * line[B + S1] :]
            result = out[row * line[OUT + WIDTH] + i * line[OUT + S1] :]
            if op >= COPY:
                _one(op, n2, mine, sa, result, so, p, q)
            elif op >= ADD:
                if sa == 1 and sb == 1 and so == 1:
                    _two(op, n2, mine, other, result)
                else:
                    _two_apart(op, n2, mine, sa, other, sb, result, so)
            elif op == RMS_NORM:
                _rms_norm(n2, mine, other, p, result)
            elif op == SUM:
                result[0] = _sum(n2, mine, sa) * p
            else:
                _layer_norm(n2, mine, p, result)
                if line[W0]:
                    _two(MUL, n2, result, other, result)
                if line[W1]:
                    _two(ADD, n2, result, c[i * line[C + S1] :], result)
