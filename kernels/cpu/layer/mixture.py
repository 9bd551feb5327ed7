"""What a step's layers with experts are called with, and what their parts leave for each other."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import types

from coppice.kernels.cpu.code.calls import tuple_type
from coppice.kernels.cpu.code.kept import njit
from coppice.kernels.cpu.code.memory import lines
from coppice.kernels.cpu.code.simd import ROWS
from coppice.kernels.cpu.layer.matmul import float_numba, level_numba
from coppice.kernels.cpu.layer.matmul.row_blocks import PANELS, Panels
from coppice.kernels.cpu.layer.matmul.tiles import shares

#: Columns of a table of experts: weight, scale and bias of gate and up together, and of down.
EXPERT_COLUMNS = 6

# Bytes of the pairs' activations, and rows: what is above that comes later, and reads the weights
# again.
_PAIR_BYTES = 1 << 26
_MOST_ROWS = 1024

_laid_numbers, _whole_inputs = float_numba.laid_numbers, shares.whole_inputs
_takes_levels, _peak_numbers = level_numba.takes_levels, level_numba.peak_numbers


class Mixture(NamedTuple):
    """What all layers with experts have in common; ``experts`` 0: there are none.

    ``run`` is the address of ``experts_numba.run_experts``, ``router`` the product by which rows
    choose. ``chosen`` of ``experts`` compute for a row, each ``inner`` wide. ``normalised``:
    whether a row's weights sum to 1. ``alpha`` and ``limit`` are those of a bounded gate; an
    ``alpha`` of 0 is SiLU.
    """

    run: int
    router: Panels
    experts: int
    chosen: int
    inner: int
    normalised: bool
    alpha: np.float32
    limit: np.float32


MIXTURE = tuple_type(Mixture, types.int64, PANELS, "i i i b f f")


class Room(NamedTuple):
    """What the parts of the work leave for each other, of R rows and P pairs.

    ``logits`` float32 ``[R, experts]``; ``choices`` int64, ``shares`` float32 and ``places`` int64
    ``[R, chosen]``: a row's experts in the order of their numbers, their weights, and the places of
    these pairs in the sorted order; ``sources`` int64 ``[P]``: the row of each pair. ``groups``
    int64 ``[experts + 1, 3]``: expert, first pair, end of pairs; the last row has the number of
    groups. ``both``, ``active`` and ``made`` are float32 ``[P, width]``. Products use the others.
    """

    logits: np.ndarray
    choices: np.ndarray
    shares: np.ndarray
    places: np.ndarray
    sources: np.ndarray
    groups: np.ndarray
    both: np.ndarray
    active: np.ndarray
    made: np.ndarray
    laid: np.ndarray
    levels: np.ndarray
    peaks: np.ndarray
    pair_levels: np.ndarray
    pair_peaks: np.ndarray


ROOM = tuple_type(Room, "f2 i2 f2 i2 i1 i2 f2 f2 f2 f1 c2 f1 c2 f1")


class Passage(NamedTuple):
    """The rows of one layer on their way through its experts.

    ``x`` float32 ``[T, hidden]`` is complete when ``Mixture.run`` is called, and ``out``, of the
    same shape, when it returns. ``weight`` and ``bias`` are addresses, of the packed weight of the
    router and of its bias; ``table`` is that of int64 ``[experts, EXPERT_COLUMNS]``.
    """

    mixture: Mixture
    panels: Panels
    x: np.ndarray
    weight: int
    bias: int
    table: int
    out: np.ndarray
    room: Room


PASSAGE = tuple_type(Passage, MIXTURE, PANELS, "f2 i i i f2", ROOM)


@njit
def new_room(mixture: Mixture, panels: Panels, rows: int, hidden: int) -> Room:
    """Room for up to ``rows`` rows at a time, or for fewer, as many as ``Room.logits`` has."""
    inner, chosen = mixture.inner, mixture.chosen
    many = 0
    if mixture.experts:
        most = _PAIR_BYTES // (4 * (3 * inner + hidden) * chosen)
        many = min(rows, max(most // ROWS * ROWS, ROWS), _MOST_ROWS)
    pairs, widest = many * chosen, max(hidden, inner)
    laid, quantized = 0, 0
    if many:
        # Rows of 16 bits in whole tiles take less, unless they are very narrow.
        laid = max(pairs * max(widest, _whole_inputs(widest) // 2), _laid_numbers(many, hidden))
    if _takes_levels(panels):
        quantized = 1
    return Room(
        np.empty((many, mixture.experts), np.float32),
        np.empty((many, chosen), np.int64),
        np.empty((many, chosen), np.float32),
        np.empty((many, chosen), np.int64),
        np.empty(pairs, np.int64),
        np.empty((mixture.experts + 1, 3), np.int64),
        np.empty((pairs, 2 * inner), np.float32),
        np.empty((pairs, inner), np.float32),
        np.empty((pairs, hidden), np.float32),
        lines(laid),
        np.empty((many * quantized, hidden), np.int8),
        np.empty(many * quantized * _peak_numbers(panels, hidden), np.float32),
        np.empty((pairs * quantized, inner), np.int8),
        np.empty(pairs * quantized * _peak_numbers(panels, widest), np.float32),
    )
