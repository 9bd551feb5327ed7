"""What a program is: instructions as rows of numbers, and what a run of it takes.

An instruction has an operation, two sizes and up to four operands, all float32. It works on every
row of a step alike. Of a row it sees ``[N1, N2]`` numbers; an operand says where in a row they lie:

    space  SCRATCH: what other instructions of the run left; INPUT: an array of the step's;
           CONSTANT: numbers that are the same for every row
    base   SCRATCH: the numbers of a row before its own; INPUT: which; CONSTANT: an address
    width  the numbers from a row to the next one; 0 for a constant
    first  the place of the first number in a row
    s1, s2 from a number to the next one, in both directions
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

SCRATCH, INPUT, CONSTANT = range(3)

# Operations. ``a``, ``b`` and ``c`` are operands that are read, ``out`` is written; ``p`` and ``q``
# are the instruction's two float numbers.
#: ``out [T, N2]`` = ``a [T, N1]``, whole rows, times a weight; W0, W1, W2: weight, scale, bias.
PRODUCT = 0
#: Attention of queries ``a``, with keys ``b`` and values ``c``, whole rows of ``[heads, dim]``.
#: N1, N2: KV heads and dim; W0: address of sinks or 0, W1: which cache, W2: which kind of items.
ATTEND = 1
#: RMSNorm of ``a`` over N2 with weights ``b``, eps ``p``.
RMS_NORM = 2
#: LayerNorm of ``a`` over N2, eps ``p``, times ``b`` if W0, plus ``c`` if W1.
LAYER_NORM = 3
#: ``silu(gate) * up`` of ``gate | up = a``, whole rows of 2 N2 numbers.
GATE = 4
#: ``out [N1, 1]`` = the sum of ``a [N1, N2]`` over N2, times ``p``.
SUM = 5
#: Of ``a`` and ``b``, number by number.
ADD, SUB, MUL, DIV = 10, 11, 12, 13
#: Of ``a``, number by number. LINE: ``a * p + q``; POWER: ``a ** p``; CLAMP: from ``p`` to ``q``;
#: FILL: ``p`` itself.
COPY, SILU, GELU, GELU_TANH, RELU, SIGMOID, TANH, EXP, RSQRT, SQRT, ABS = range(20, 31)
LINE, POWER, CLAMP, FILL = 40, 41, 42, 43

# Columns.
OP, N1, N2, A, B, C, OUT = 0, 1, 2, 3, 9, 15, 21
W0, W1, W2 = 27, 28, 29
COLUMNS = 30
#: The columns of an operand, after its first.
SPACE, BASE, WIDTH, FIRST, S1, S2 = range(6)


class Program(NamedTuple):
    """``code`` int64 ``[n, COLUMNS]`` and ``numbers`` float32 ``[n, 2]``: p and q.

    ``width`` is the numbers of a row in scratch, ``heads`` those of queries, ``widths`` int64 the
    different numbers of a row that products read, ``attention`` the address of ``run_tasks``,
    ``half`` whether pages are bfloat16.
    """

    code: np.ndarray
    numbers: np.ndarray
    width: int
    heads: int
    widths: np.ndarray
    attention: int
    half: bool


class Run(NamedTuple):
    """``rows`` of a step; ``inputs`` int64: addresses of its arrays, the program's results among
    them; ``slots`` int64 ``[rows]``; ``caches`` int64 ``[calls of attention, 2]``: addresses of
    keys and values, of ``num_slots`` slots.
    """

    rows: int
    inputs: np.ndarray
    slots: np.ndarray
    caches: np.ndarray
    num_slots: int
