"""Runs a program over the rows of a step: one call, in which the threads work together.

Called from Python one by one, some twenty operations a layer find their code and arguments evicted
from the processor's caches, since a layer's weights have passed through them: some 40 microseconds
each, where the operation itself takes one or two. ``layer.stack`` is such a call for our own
layers, whose order it knows; here the order is data. A thread works the same rows in each
instruction, so the threads meet at products and attention alone.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import carray, types

from coppice.kernels.cpu.attention.arguments import Inputs, Items, Results
from coppice.kernels.cpu.attention.numba_items import tasks_address
from coppice.kernels.cpu.attention.stored import put
from coppice.kernels.cpu.attention.tasks import attention_frame, merge_share
from coppice.kernels.cpu.code.calls import (
    borrowed,
    held,
    lent,
    pointer,
    run_share,
    run_shares,
    tuple_type,
)
from coppice.kernels.cpu.code.kept import cfunc, njit
from coppice.kernels.cpu.code.memory import lines
from coppice.kernels.cpu.code.team import (
    Member,
    came_together,
    gathered,
    meet,
    new_team,
)
from coppice.kernels.cpu.layer.arguments import ITEMS, RESULTS
from coppice.kernels.cpu.layer.matmul import float_numba, level_numba
from coppice.kernels.cpu.layer.matmul.row_blocks import PANELS, Panels
from coppice.kernels.cpu.layer.rows_numba import gate_share
from coppice.kernels.cpu.program.instructions import (
    ATTEND,
    GATE,
    N1,
    N2,
    OP,
    OUT,
    PRODUCT,
    W0,
    W1,
    W2,
    A,
    B,
    C,
    Program,
    Run,
)
from coppice.kernels.cpu.program.lines import place, work_rows

__all__ = ["run_members", "run_program", "tasks_address"]

_FAST = {"contract", "reassoc", "arcp", "nsz"}

_float_share, _level_share = float_numba.multiply_share, level_numba.multiply_share
_takes_levels, _peak_numbers = level_numba.takes_levels, level_numba.peak_numbers
_laid_numbers = float_numba.laid_numbers


@njit
def _rows_at(address: int, rows: int, width: int) -> Any:
    return carray(pointer(address), (rows, width), np.float32)


@njit
def _half_rows_at(address: int, rows: int, width: int) -> Any:
    return carray(pointer(address), (rows, width), np.uint16)


@njit(fastmath=_FAST, error_model="numpy")
def _sink(begin: int, end: int, sinks: np.ndarray, out: np.ndarray, lse: np.ndarray) -> None:
    """Scales each head's result by the keys' part of a softmax to which its sink belongs."""
    heads = len(sinks)
    dim = out.shape[1] // heads
    for row in range(begin, end):
        for head in range(heads):
            mine = out[row, head * dim : head * dim + dim]
            other = np.float32(math.exp(sinks[head] - lse[row, head]))
            share = np.float32(1) / (np.float32(1) + other)
            for d in range(dim):
                mine[d] *= share


@njit
def _attend(
    team: Member,
    met: int,
    line: np.ndarray,
    program: Program,
    run: Run,
    scratch: int,
    work: Items,
    results: Results,
) -> int:
    """Writes keys and values of a step, and attends; all rows are complete when it returns."""
    me, threads, rows = team.me, team.threads, run.rows
    begin, end = rows * me // threads, rows * (me + 1) // threads
    kept, dim = line[N1] * line[N2], line[N2]
    width = program.heads * dim
    queries = _rows_at(place(line, A, rows, scratch, run.inputs), rows, width)
    k = _rows_at(place(line, B, rows, scratch, run.inputs), rows, kept)
    v = _rows_at(place(line, C, rows, scratch, run.inputs), rows, kept)
    out = _rows_at(place(line, OUT, rows, scratch, run.inputs), rows, width)
    keys = _rows_at(run.caches[line[W1], 0], run.num_slots, kept)
    values = _rows_at(run.caches[line[W1], 1], run.num_slots, kept)
    if program.half:
        half_keys = _half_rows_at(run.caches[line[W1], 0], run.num_slots, kept)
        half_values = _half_rows_at(run.caches[line[W1], 1], run.num_slots, kept)
        for row in range(begin, end):
            to_keys, to_values = half_keys[run.slots[row]], half_values[run.slots[row]]
            for d in range(kept):
                put(to_keys, d, k[row, d])
                put(to_values, d, v[row, d])
    else:
        for row in range(begin, end):
            slot = run.slots[row]
            keys[slot, :] = k[row]
            values[slot, :] = v[row]
    met = meet(team, met)
    mine = Results(out, results.lse, results.partial_out, results.partial_lse)
    # Where there are too few tasks to share, the first thread does all of them.
    first, last = 0, len(work.tasks)
    if threads > 1 and len(work.shares) > 2:
        first, last = work.shares[me], work.shares[me + 1]
    elif me > 0:
        first = last
    if first < last:
        # Of pages in bfloat16 only the addresses count here.
        inputs = Inputs(queries.reshape(-1), width, keys.reshape(-1), values.reshape(-1))
        frame = attention_frame(work, inputs, mine)
        run_share(program.attention, frame.ctypes.data, first, last)
        frame[0] = 0  # numba frees an array after its last use by name, not by address
    met = meet(team, met)
    merges = len(work.merges)
    if merges:
        merge_share(merges * me // threads, merges * (me + 1) // threads, work, mine)
        met = meet(team, met)
    if line[W0]:
        sinks = carray(pointer(line[W0]), (program.heads,), np.float32)
        _sink(begin, end, sinks, out, results.lse)
    return met


class Work(NamedTuple):
    """A program, a run of it, and room for what instructions leave for each other.

    ``scratch`` is float32 of ``program.width`` numbers a row; products use the last three.
    """

    program: Program
    panels: Panels
    run: Run
    items: Items
    others: Items
    results: Results
    scratch: np.ndarray
    laid: np.ndarray
    levels: np.ndarray
    peaks: np.ndarray


_PROGRAM = tuple_type(Program, "i2 f2 i i i1 i b")
_RUN = tuple_type(Run, "i i1 i1 i2 i")
WORK = tuple_type(
    Work, _PROGRAM, PANELS, _RUN, ITEMS, ITEMS, RESULTS, "f1 f1 c1 f1"
)  # fmt: skip


@njit
def _program_share(team: Member, work: Work) -> None:
    """A team member's share of ``run_program``; all members share the arrays."""
    program, panels, run = work.program, work.panels, work.run
    me, threads, rows, inputs = team.me, team.threads, run.rows, run.inputs
    begin, end = rows * me // threads, rows * (me + 1) // threads
    scratch = work.scratch.ctypes.data
    met = 0
    apart = False  # whether threads have written rows since they met
    for at in range(len(program.code)):
        line = program.code[at]
        op = line[OP]
        if op == ATTEND:
            items = work.others if line[W2] else work.items
            met = _attend(team, met, line, program, run, scratch, items, work.results)
            apart = line[W0] != 0
        elif op == PRODUCT:
            if apart:
                met = meet(team, met)
                apart = False
            x = _rows_at(place(line, A, rows, scratch, inputs), rows, line[N1])
            out = _rows_at(place(line, OUT, rows, scratch, inputs), rows, line[N2])
            if _takes_levels(panels):
                met = _level_share(
                    team, met, panels, x, line[W0], line[W1], line[W2], out, work.levels,
                    work.laid.view(np.int8), work.peaks,
                )  # fmt: skip
            else:
                met = _float_share(team, met, panels, x, line[W0], line[W2], out, work.laid)
        elif op == GATE:
            apart = True
            both = _rows_at(place(line, A, rows, scratch, inputs), rows, 2 * line[N2])
            mine = _rows_at(place(line, OUT, rows, scratch, inputs), rows, line[N2])
            gate_share(begin, end, np.int64(0), line[N2], False, both, mine)
        else:
            apart = True
            work_rows(line, program.numbers[at], begin, end, rows, scratch, inputs)


@cfunc(types.void(*[types.int64] * 3))
def run_members(frame: int, begin: int, end: int) -> None:
    """What members ``begin .. end`` of a team do, called by each of the threads.

    The frame has the address of a ``Work``, the address of the team's state, and its size.
    """
    f = carray(pointer(frame), (3,), np.int64)
    for me in range(begin, end):
        if gathered(f[1], f[2]):
            _program_share(Member(me, f[2], f[1]), borrowed(WORK, f[0]))


@njit(nogil=True)
def run_program(
    members: int,
    program: Program,
    panels: Panels,
    run: Run,
    scratch: np.ndarray,
    items: Items,
    others: Items,
    num_partials: int,
    threads: int,
) -> tuple[bool, bool]:
    """All instructions, in order, for all rows of a step.

    ``members`` is the address of ``run_members``; ``scratch`` is float32 of at least
    ``program.width * run.rows``. All weights of products are of the kind of ``panels``. ``items``
    are the step's for one kind of layers, ``others`` for a second one, if there is one;
    ``num_partials`` is the most partial results of either.

    Returns whether all slots are in the cache (else nothing has been done), and whether the threads
    have worked together (else one has done all).
    """
    rows, heads = run.rows, program.heads
    for slot in run.slots:
        if not 0 <= slot < run.num_slots:
            return False, True
    levels, peaks = np.empty(0, np.int8), np.empty(0, np.float32)
    numbers = 0
    if _takes_levels(panels):
        widest = 0
        for width in program.widths:
            widest = max(widest, width)
        numbers = rows * widest
        levels = lines(-(-numbers // 4)).view(np.int8)
        peaks = np.empty(rows * _peak_numbers(panels, widest), np.float32)
        numbers = -(-numbers // 4)
    else:
        for width in program.widths:
            numbers = max(numbers, _laid_numbers(rows, width))
    results = Results(
        np.empty((0, 0), np.float32),
        np.empty((rows, heads), np.float32),
        np.empty((num_partials, heads * items.dim), np.float32),
        np.empty((num_partials, heads), np.float32),
    )
    laid = lines(numbers if rows > 1 else 0)
    work = Work(program, panels, run, items, others, results, scratch, laid, levels, peaks)
    state = new_team()
    frame = np.empty(3, np.int64)
    frame[0], frame[1], frame[2] = lent(WORK, work), state.ctypes.data, threads
    together = threads <= 1
    if threads > 1:
        one_each = np.empty(threads + 1, np.int64)
        for thread in range(threads + 1):
            one_each[thread] = thread
        run_shares(members, frame.ctypes.data, one_each)
        together = came_together(state)
    if threads <= 1 or not together:
        frame[2] = 1
        run_share(members, frame.ctypes.data, 0, 1)
    state[0] = frame[0] = 0  # numba frees an array after its last use by name, not by address
    held(work)
    return True, together
