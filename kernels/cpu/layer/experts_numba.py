"""The feed-forward part of a layer with experts, called by its address.

Each row has chosen a few experts. The pairs of a row and an expert are sorted by expert, so that an
expert's weights are read once for all of its rows, and experts that no row has chosen not at all.
Threads share the panels of all chosen experts at once. A row adds its experts' results in the order
of their numbers; its result depends on no other row.
"""

from __future__ import annotations

import math

import numpy as np
from numba import carray, types

from coppice.kernels.cpu.code.calls import borrowed, pointer, run_share
from coppice.kernels.cpu.code.kept import cfunc, njit
from coppice.kernels.cpu.code.pairs import round_row
from coppice.kernels.cpu.code.simd import ROWS
from coppice.kernels.cpu.code.team import Member, meet
from coppice.kernels.cpu.layer.matmul import float_numba, level_numba
from coppice.kernels.cpu.layer.matmul.row_blocks import PAIRS, TILES, Panels, lay_share
from coppice.kernels.cpu.layer.matmul.tiles import shares
from coppice.kernels.cpu.layer.mixture import EXPERT_COLUMNS, PASSAGE, Mixture, Passage, Room
from coppice.kernels.cpu.layer.rows_numba import gate_share

# The first column of the last product in a table of experts.
_DOWN = 3

# Bytes of rows that go through the panels of an expert together, as in ``float_numba``.
_TOGETHER = 600_000
# To read a panel takes the time of multiplying so many rows by it.
_READING = 6

_float_share, _round_share = float_numba.multiply_share, level_numba.round_share
_takes_levels, _chunk_of = level_numba.takes_levels, level_numba.chunk_of
_round_row, _whole_inputs = shares.round_tile_row, shares.whole_inputs


@njit(error_model="numpy")
def _choose(begin: int, end: int, mixture: Mixture, room: Room) -> None:
    """The experts of the rows ``begin .. end`` and their weights, from ``room.logits``."""
    count, chosen = mixture.experts, mixture.chosen
    taken = np.empty(count, np.bool_)
    for row in range(begin, end):
        logits, choices, shares = room.logits[row], room.choices[row], room.shares[row]
        taken[:] = False
        high, kept = np.float32(0), np.float32(0)
        for k in range(chosen):
            best = -1
            for expert in range(count):
                # A logit that is no number is taken last: every choice is an expert.
                if not taken[expert] and (best < 0 or logits[expert] > logits[best]):
                    best = expert
            taken[best] = True
            if k == 0:
                high = logits[best]
            share = np.float32(math.exp(logits[best] - high))
            kept += share
            # Into the order of numbers.
            at = k
            while at > 0 and choices[at - 1] > best:
                choices[at], shares[at] = choices[at - 1], shares[at - 1]
                at -= 1
            choices[at], shares[at] = best, share
        total = kept
        if not mixture.normalised:
            total = np.float32(0)
            for expert in range(count):
                total += np.float32(math.exp(logits[expert] - high))
        for k in range(chosen):
            shares[k] /= total


@njit
def _group(rows: int, mixture: Mixture, room: Room) -> None:
    """Sorts the pairs of ``rows`` rows by expert."""
    count, chosen, groups = mixture.experts, mixture.chosen, room.groups
    starts = np.zeros(count + 1, np.int64)
    for row in range(rows):
        for k in range(chosen):
            starts[room.choices[row, k] + 1] += 1
    found = 0
    for expert in range(count):
        many = starts[expert + 1]
        starts[expert + 1] += starts[expert]
        if many:
            groups[found, 0] = expert
            groups[found, 1], groups[found, 2] = starts[expert], starts[expert + 1]
            found += 1
    groups[count, 0] = found
    for row in range(rows):
        for k in range(chosen):
            expert = room.choices[row, k]
            place = starts[expert]
            starts[expert] += 1
            room.places[row, k] = place
            room.sources[place] = row


@njit
def _lay_rows(
    team: Member, panels: Panels, chunk: int, count: int, x: np.ndarray, room: Room
) -> None:
    """Copies the row of each pair, or its levels, to where the experts' products read it."""
    hidden, turn = x.shape[1], 0
    laid = room.laid.ctypes.data
    quantized, each = _takes_levels(panels), 2 * (hidden // chunk) if chunk else 1
    levels, rows = np.empty((ROWS, hidden), np.int8), np.empty((ROWS, hidden), np.float32)
    for group in range(room.groups[count, 0]):
        first, end = room.groups[group, 1], room.groups[group, 2]
        for pair in range(first, end, ROWS):
            turn += 1
            if turn % team.threads != team.me:
                continue
            many = min(ROWS, end - pair)
            if quantized:
                for i in range(many):
                    source = room.sources[pair + i]
                    levels[i] = room.levels[source]
                    for part in range(each):
                        room.pair_peaks[(pair + i) * each + part] = room.peaks[source * each + part]
                lay_share(0, many, levels.ctypes.data, hidden // 4, laid + pair * hidden)
            elif panels.kind == TILES:
                whole = _whole_inputs(hidden)
                for i in range(many):
                    _round_row(x[room.sources[pair + i]], laid + 2 * (pair + i) * whole)
            elif panels.kind == PAIRS:
                for i in range(many):
                    source = x[room.sources[pair + i]]
                    round_row(source.ctypes.data, hidden, rows.ctypes.data + 2 * i * hidden)
                lay_share(0, many, rows.ctypes.data, hidden // 2, laid + 2 * pair * hidden)
            else:
                for i in range(many):
                    rows[i] = x[room.sources[pair + i]]
                lay_share(0, many, rows.ctypes.data, hidden, laid + 4 * pair * hidden)
    levels[0, 0] = rows[0, 0] = 0  # numba frees an array after its last use by name


@njit
def _activate(team: Member, mixture: Mixture, panels: Panels, chunk: int, room: Room) -> None:
    """The gates of all pairs, and where the experts' last products read the results."""
    inner, turn = mixture.inner, 0
    laid = room.laid.ctypes.data
    pairs = panels.kind == PAIRS
    rounded = np.empty(ROWS * inner // 2 if pairs else 0, np.float32)
    limit = mixture.limit
    for group in range(room.groups[mixture.experts, 0]):
        first, end = room.groups[group, 1], room.groups[group, 2]
        for pair in range(first, end, ROWS):
            turn += 1
            if turn % team.threads != team.me:
                continue
            stop = min(pair + ROWS, end)
            if mixture.alpha:
                # (up + 1) gate sigmoid(alpha gate) is SiLU of alpha gate times (up + 1) / alpha.
                for row in range(pair, stop):
                    both = room.both[row]
                    for d in range(inner):
                        both[d] = min(both[d], limit) * mixture.alpha
                    for d in range(inner, 2 * inner):
                        up = min(max(both[d], -limit), limit)
                        both[d] = (up + np.float32(1)) / mixture.alpha
            gate_share(pair, stop, np.int64(0), inner, False, room.both, room.active)
            if _takes_levels(panels):
                _round_share(pair, stop, chunk, room.active, room.pair_levels, room.pair_peaks)
                source = room.pair_levels[pair:].ctypes.data
                lay_share(0, stop - pair, source, inner // 4, laid + pair * inner)
            elif panels.kind == TILES:
                for row in range(pair, stop):
                    _round_row(room.active[row], laid + 2 * row * _whole_inputs(inner))
            elif pairs:
                for row in range(pair, stop):
                    to = rounded.ctypes.data + 2 * (row - pair) * inner
                    round_row(room.active[row].ctypes.data, inner, to)
                lay_share(0, stop - pair, rounded.ctypes.data, inner // 2, laid + 2 * pair * inner)
            else:
                source = room.active[pair:].ctypes.data
                lay_share(0, stop - pair, source, inner, laid + 4 * pair * inner)
    if pairs:
        rounded[0] = 0  # numba frees an array after its last use by name


@njit
def _multiply(
    team: Member,
    panels: Panels,
    experts: np.ndarray,
    column: int,
    inner: int,
    room: Room,
    out: np.ndarray,
) -> None:
    """``out [P, N]``: the laid rows times their experts' weights of that column, plus bias."""
    width = out.shape[1]
    each = -(-width // panels.width)
    count = len(experts)
    found = room.groups[count, 0]
    most = max(_TOGETHER // (4 * inner) // ROWS * ROWS, ROWS)
    total = 0
    for group in range(found):
        rows = room.groups[group, 2] - room.groups[group, 1]
        total += each * (rows + -(-rows // most) * _READING)
    mine, others = total * team.me // team.threads, total * (team.me + 1) // team.threads
    frame = np.empty(10, np.int64)
    chunk = _chunk_of(panels, experts[0, column])
    each_peaks = 2 * (inner // chunk) if chunk else 1
    whole = _whole_inputs(inner) if panels.kind == TILES else inner
    frame[1], frame[2], frame[9] = whole, width, chunk
    start = 0
    for group in range(found):
        expert, end = room.groups[group, 0], room.groups[group, 2]
        for first in range(room.groups[group, 1], end, most):
            rows = min(most, end - first)
            cost = rows + _READING
            begin = min(max(-((start - mine) // cost), 0), each)
            stop = min(max(-((start - others) // cost), 0), each)
            start += each * cost
            if begin >= stop:
                continue
            frame[0] = rows
            weight, scale, bias = (
                experts[expert, column], experts[expert, column + 1], experts[expert, column + 2],
            )  # fmt: skip
            to = out[first:].ctypes.data
            if _takes_levels(panels):
                frame[3] = room.laid.ctypes.data + first * inner
                frame[4] = room.pair_peaks[first * each_peaks :].ctypes.data
                frame[5], frame[6], frame[7], frame[8] = weight, scale, bias, to
            else:
                size = 4 if panels.kind != PAIRS and panels.kind != TILES else 2
                frame[3] = room.laid.ctypes.data + size * first * whole
                frame[4], frame[5], frame[6], frame[7] = weight, bias, to, panels.kind
                frame[8] = width
            run_share(panels.run, frame.ctypes.data, begin, stop)
    frame[0] = 0  # numba frees an array after its last use by name, not by address


@njit
def _passed(team: Member, met: int, passage: Passage) -> int:
    """A team member's share of ``passage.out`` = the experts' weighted results of ``passage.x``.

    ``met`` and the result are those of ``team.meet``.
    """
    me, threads = team.me, team.threads
    mixture, panels, room, x = passage.mixture, passage.panels, passage.room, passage.x
    hidden, inner, together = x.shape[1], mixture.inner, len(room.logits)
    table = carray(pointer(passage.table), (mixture.experts, EXPERT_COLUMNS), np.int64)
    parts = -(-len(x) // together)
    chunk = _chunk_of(panels, table[0, 0])
    for part in range(parts):
        upper, lower = part * len(x) // parts, (part + 1) * len(x) // parts
        many, mine = lower - upper, x[upper:lower]
        met = _float_share(
            team, met, mixture.router, mine, passage.weight, passage.bias, room.logits[:many],
            room.laid,
        )  # fmt: skip
        begin, end = many * me // threads, many * (me + 1) // threads
        _choose(begin, end, mixture, room)
        if _takes_levels(panels):
            _round_share(begin, end, chunk, mine, room.levels, room.peaks)
        met = meet(team, met)
        if me == 0:
            _group(many, mixture, room)
        met = meet(team, met)
        _lay_rows(team, panels, chunk, mixture.experts, mine, room)
        met = meet(team, met)
        _multiply(team, panels, table, 0, hidden, room, room.both)
        met = meet(team, met)
        _activate(team, mixture, panels, _chunk_of(panels, table[0, _DOWN]), room)
        met = meet(team, met)
        _multiply(team, panels, table, _DOWN, inner, room, room.made)
        met = meet(team, met)
        for row in range(begin, end):
            to = passage.out[upper + row]
            to[:] = np.float32(0)
            for k in range(mixture.chosen):
                share, made = room.shares[row, k], room.made[room.places[row, k]]
                for d in range(hidden):
                    to[d] += share * made[d]
        met = meet(team, met)
    return met


@cfunc(types.void(*[types.int64] * 3), error_model="numpy")
def run_experts(frame: int, me: int, threads: int) -> None:
    """Member ``me`` of a team of ``threads`` takes a ``Passage``.

    The frame has its address, the address of the team's state, and ``met``, which becomes the new
    one (``team.meet``).
    """
    f = carray(pointer(frame), (3,), np.int64)
    f[2] = _passed(Member(me, threads, f[1]), f[2], borrowed(PASSAGE, f[0]))
