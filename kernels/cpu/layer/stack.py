"""All layers of a decoder over one step, compiled into one call, on a CPU.

A layer is some ten operations. Called from Python one by one, each finds its code and arguments
evicted from the processor's caches, since a layer's weights have passed through them. In a decode
step of one sequence by a Llama of 135 million weights these calls took a third of the time. Here
Python makes one call for a step, and the threads start once: they go through the layers together
(``code.team``), and each computes its share of every operation.

Products are those of ``float_numba``, or of ``level_numba`` for weights of fewer bits;
``rows_numba`` works on rows, and ``numba_items`` computes attention.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray, types

from coppice.kernels.cpu.attention.arguments import Inputs, Items, Results
from coppice.kernels.cpu.attention.numba_items import tasks_address
from coppice.kernels.cpu.attention.tasks import attention_frame, merge_share
from coppice.kernels.cpu.code.calls import borrowed, held, lent, pointer, run_share, run_shares
from coppice.kernels.cpu.code.kept import cfunc, njit
from coppice.kernels.cpu.code.memory import lines, matrix
from coppice.kernels.cpu.code.team import (
    Member,
    came_together,
    gathered,
    meet,
    new_team,
)
from coppice.kernels.cpu.layer.arguments import COLUMNS, WORK, Model, Scratch, Step, Work
from coppice.kernels.cpu.layer.matmul import float_numba, level_numba
from coppice.kernels.cpu.layer.matmul.row_blocks import Panels
from coppice.kernels.cpu.layer.matmul.tiles import gate
from coppice.kernels.cpu.layer.mixture import (
    EXPERT_COLUMNS,
    PASSAGE,
    Mixture,
    Passage,
    new_room,
)
from coppice.kernels.cpu.layer.rows_numba import gate_share, norm_share, rotate_share
from coppice.kernels.cpu.ranks.meeting import (
    arrivals,
    brought,
    end_call,
    meet_ranks,
    rank_of,
    sum_share,
    widths_of,
)

__all__ = [
    "COLUMNS",
    "EXPERT_COLUMNS",
    "Mixture",
    "Model",
    "Step",
    "run_layers",
    "tasks_address",
]

_FAST = {"contract", "reassoc", "arcp", "nsz"}

# Rows that pass through the feed-forward part together. In a Llama of 135 million weights its
# activations then take 9 MB, where those of 2,048 rows at once take 38.
_TOGETHER = 512
# Columns of an activation that one thread takes at least, where there are fewer rows than threads.
_COLUMNS = 64

# A projection has three columns: its weight, the scale of one of levels, and its bias.
_NORM, _QKV, _QK_NORM, _OUTPUT, _MLP_NORM, _GATE_UP, _DOWN = 0, 1, 4, 5, 8, 9, 12
_POST_NORM, _MLP_POST_NORM, _QUERY_NORM, _KEY_NORM = 15, 16, 17, 18
_SINKS, _ROUTER, _EXPERTS = 19, 20, 23

_float_share, _level_share = float_numba.multiply_share, level_numba.multiply_share
_laid_numbers = float_numba.laid_numbers
_takes_levels, _peak_numbers = level_numba.takes_levels, level_numba.peak_numbers
_gates_by_rows, _gated_numbers = gate.gates_by_rows, gate.gated_numbers
_gated_share = gate.feed_forward_share


@njit
def _line(address: int, length: int) -> Any:
    return carray(pointer(address), (length,), np.float32)


@njit
def _multiply(
    team: Member,
    met: int,
    x: np.ndarray,
    projection: np.ndarray,
    panels: Panels,
    out: np.ndarray,
    scratch: Scratch,
) -> int:
    """``out [T, N] = x [T, K] @ weight.T + bias``; a projection is its three columns.

    ``x`` is complete when it is called, and ``out`` when it returns.
    """
    weight, scale, bias = projection[0], projection[1], projection[2]
    laid = scratch.laid
    if _takes_levels(panels):
        return _level_share(
            team, met, panels, x, weight, scale, bias, out, scratch.levels, laid.view(np.int8),
            scratch.peaks,
        )  # fmt: skip
    return _float_share(team, met, panels, x, weight, bias, out, laid)


@njit(fastmath=_FAST, error_model="numpy")
def _norm_heads(
    begin: int, end: int, qkv: np.ndarray, weight: int, width: int, dim: int, eps: np.float32
) -> None:
    """RMSNorm of each head of the first ``width`` columns, in place, by its own row of weights."""
    weights = _line(weight, width)
    for row in range(begin, end):
        for first in range(0, width, dim):
            head, scale = qkv[row, first : first + dim], weights[first : first + dim]
            total = np.float32(0)
            for d in range(dim):
                total += head[d] * head[d]
            inverse = np.float32(1) / np.float32(math.sqrt(total / np.float32(dim) + eps))
            for d in range(dim):
                head[d] *= inverse * scale[d]


@njit
def _join(
    begin: int,
    end: int,
    x: np.ndarray,
    delta: np.ndarray,
    post_norm: int,
    norm: int,
    model: Model,
    out: np.ndarray,
) -> None:
    """Adds what a part of a layer returned, ``delta``, to ``x``, and normalises for the next one.

    ``post_norm`` and ``norm`` are addresses of weights; 0: ``delta`` is added as it is, and ``out``
    is ``x`` as it is.
    """
    width = x.shape[1]
    if post_norm:
        nothing = np.empty((0, 0), np.float32)
        norm_share(begin, end, delta, nothing, _line(post_norm, width), model.eps, delta)
    if model.factor != np.float32(1):
        for row in range(begin, end):
            for d in range(width):
                delta[row, d] *= model.factor
    if norm:
        norm_share(begin, end, x, delta, _line(norm, width), model.eps, out)
        return
    for row in range(begin, end):
        for d in range(width):
            x[row, d] += delta[row, d]
            out[row, d] = x[row, d]


@njit(fastmath=_FAST, error_model="numpy")
def _sink(begin: int, end: int, sinks: np.ndarray, results: Results) -> None:
    """Scales each head's result by the keys' part of a softmax to which its sink belongs."""
    heads = len(sinks)
    dim = results.out.shape[1] // heads
    for row in range(begin, end):
        for head in range(heads):
            mine = results.out[row, head * dim : head * dim + dim]
            other = np.float32(math.exp(sinks[head] - results.lse[row, head]))
            share = np.float32(1) / (np.float32(1) + other)
            for d in range(dim):
                mine[d] *= share


@njit
def _feed_forward(
    team: Member,
    met: int,
    model: Model,
    panels: Panels,
    mine: np.ndarray,
    normed: np.ndarray,
    delta: np.ndarray,
    scratch: Scratch,
) -> int:
    """``delta`` = what the feed-forward part of a layer, whose weights are ``mine``, makes."""
    me, threads, inner, rows = team.me, team.threads, model.inner, len(normed)
    if _gates_by_rows(panels, rows, inner, mine[_GATE_UP + 2], threads):
        return _gated_share(
            team, met, panels, normed, mine[_GATE_UP], model.gelu, inner, mine[_DOWN],
            mine[_DOWN + 2], delta, scratch.laid,
        )  # fmt: skip
    parts = -(-rows // _TOGETHER)
    for part in range(parts):
        upper, lower = part * rows // parts, (part + 1) * rows // parts
        many = lower - upper
        both, product = scratch.gate_up[:many], scratch.active[:many]
        met = _multiply(
            team, met, normed[upper:lower], mine[_GATE_UP : _GATE_UP + 3], panels, both,
            scratch,
        )  # fmt: skip
        if many >= threads:
            first, last = many * me // threads, many * (me + 1) // threads
            gate_share(first, last, np.int64(0), inner, model.gelu, both, product)
        else:
            columns = -(-inner // _COLUMNS)
            first = columns * me // threads * _COLUMNS
            last = min(columns * (me + 1) // threads * _COLUMNS, inner)
            gate_share(np.int64(0), many, first, last, model.gelu, both, product)
        met = meet(team, met)
        met = _multiply(
            team, met, product, mine[_DOWN : _DOWN + 3], panels, delta[upper:lower], scratch
        )
    return met


@njit(fastmath=_FAST, error_model="numpy")
def _squares(begin: int, end: int, qkv: np.ndarray, width: int, kept: int, out: np.ndarray) -> None:
    """``out[row]`` = the sums of squares of a row's queries, ``width`` of them, and its keys."""
    for row in range(begin, end):
        total = np.float32(0)
        for d in range(width):
            total += qkv[row, d] * qkv[row, d]
        out[row, 0] = total
        total = np.float32(0)
        for d in range(width, width + kept):
            total += qkv[row, d] * qkv[row, d]
        out[row, 1] = total


@njit(fastmath=_FAST, error_model="numpy")
def _norm_all_heads(
    team: Member,
    met: int,
    came: int,
    model: Model,
    qkv: np.ndarray,
    mine: np.ndarray,
    width: int,
    kept: int,
) -> tuple[int, int]:
    """RMSNorm of a row's queries together, and of its keys, of which other ranks have others."""
    rows = len(qkv)
    begin, end = rows * team.me // team.threads, rows * (team.me + 1) // team.threads
    queries, keys, adds = widths_of(model.ranks)
    own = brought(model.ranks, rank_of(model.ranks), came, rows, 2)
    _squares(begin, end, qkv, width, kept, own)
    if not adds:
        own[begin:end, 1] = np.float32(0)
    met = meet(team, met)
    after = meet_ranks(team.me, model.ranks, came)
    sums = np.empty((rows, 2), np.float32)
    sum_share(begin, end, model.ranks, came, sums)
    scales, others = _line(mine[_QUERY_NORM], width), _line(mine[_KEY_NORM], kept)
    for row in range(begin, end):
        mean = sums[row, 0] / np.float32(queries)
        inverse = np.float32(1) / np.float32(math.sqrt(mean + model.eps))
        for d in range(width):
            qkv[row, d] *= inverse * scales[d]
        mean = sums[row, 1] / np.float32(keys)
        inverse = np.float32(1) / np.float32(math.sqrt(mean + model.eps))
        for d in range(kept):
            qkv[row, width + d] *= inverse * others[d]
    return met, after


@njit
def _half_rows(address: int, rows: int, width: int) -> Any:
    return carray(pointer(address), (rows, width), np.uint16)


@njit
def _layers_share(team: Member, work: Work) -> None:
    """A team member's share of ``run_layers``; all members share the arrays.

    Between two meetings no thread reads what another writes.
    """
    model, mixture, panels, step = work.model, work.mixture, work.panels, work.step
    results, scratch = work.results, work.scratch
    items, others = work.items, work.others
    me, threads, weights, eps = team.me, team.threads, model.weights, model.eps
    x, normed, delta, qkv = step.x, scratch.normed, scratch.delta, scratch.qkv
    layers, rows = len(step.caches), len(x)
    kept = items.kv_heads * items.dim
    qk_width, stride = scratch.rotated.shape[1], qkv.shape[1]
    flat = qkv.reshape(-1)
    begin, end = rows * me // threads, rows * (me + 1) // threads
    met, came, together = 0, np.int64(0), len(model.ranks) > 0
    if together:
        came = arrivals(model.ranks)
    if weights[0, _NORM]:
        nothing = np.empty((0, 0), np.float32)
        norm_share(begin, end, x, nothing, _line(weights[0, _NORM], x.shape[1]), eps, normed)
    else:
        normed[begin:end] = x[begin:end]
    met = meet(team, met)
    for layer in range(layers):
        mine, here = weights[layer], others if model.kinds[layer, 0] else items
        cos, signed_sin = step.cos[model.kinds[layer, 1]], step.signed_sin[model.kinds[layer, 1]]
        # Where there are too few tasks to share, the first thread does all of them.
        first_task, last_task = 0, len(here.tasks)
        if threads > 1 and len(here.shares) > 2:
            first_task, last_task = here.shares[me], here.shares[me + 1]
        elif me > 0:
            first_task = last_task
        merges = len(here.merges)
        met = _multiply(team, met, normed, mine[_QKV : _QKV + 3], panels, qkv, scratch)
        if mine[_QK_NORM]:
            _norm_heads(begin, end, qkv, mine[_QK_NORM], qk_width, here.dim, eps)
        if mine[_QUERY_NORM] and together:
            met, came = _norm_all_heads(team, met, came, model, qkv, mine, qk_width - kept, kept)
        elif mine[_QUERY_NORM]:
            width = qk_width - kept
            _norm_heads(begin, end, qkv, mine[_QUERY_NORM], width, width, eps)
            _norm_heads(begin, end, qkv[:, width:], mine[_KEY_NORM], kept, kept, eps)
        keys = _line(step.caches[layer, 0], step.num_slots * kept)
        values = _line(step.caches[layer, 1], step.num_slots * kept)
        if model.half:
            rotate_share(
                begin, end, flat, stride, flat[qk_width:], stride, cos, signed_sin,
                _half_rows(step.caches[layer, 0], step.num_slots, kept),
                _half_rows(step.caches[layer, 1], step.num_slots, kept), step.slots,
                scratch.rotated,
            )  # fmt: skip
        else:
            rotate_share(
                begin, end, flat, stride, flat[qk_width:], stride, cos, signed_sin,
                keys.reshape(step.num_slots, kept), values.reshape(step.num_slots, kept),
                step.slots, scratch.rotated,
            )  # fmt: skip
        met = meet(team, met)
        if first_task < last_task:
            # Of pages in bfloat16 only the addresses count here.
            inputs = Inputs(scratch.rotated.reshape(-1), qk_width, keys, values)
            given = attention_frame(here, inputs, results)
            run_share(model.attention, given.ctypes.data, first_task, last_task)
            given[0] = 0  # numba frees an array after its last use by name, not by address
        met = meet(team, met)
        if merges:
            merge_share(merges * me // threads, merges * (me + 1) // threads, here, results)
            met = meet(team, met)
        attended = results.out
        if mine[_SINKS]:
            _sink(begin, end, _line(mine[_SINKS], model.heads), results)
            met = meet(team, met)
        if layer == layers - 1:
            # Nothing reads the other rows after this: the layer has written their KV.
            rows = len(step.logit_rows)
            begin, end = rows * me // threads, rows * (me + 1) // threads
            for row in range(begin, end):
                scratch.last_x[row] = x[step.logit_rows[row]]
                scratch.last_attended[row] = attended[step.logit_rows[row]]
            x, attended = scratch.last_x, scratch.last_attended
            met = meet(team, met)
        made = delta[:rows]
        if together:
            made = brought(model.ranks, rank_of(model.ranks), came, rows, x.shape[1])
        met = _multiply(
            team, met, attended[:rows], mine[_OUTPUT : _OUTPUT + 3], panels, made, scratch
        )
        if together:
            after = meet_ranks(me, model.ranks, came)
            sum_share(begin, end, model.ranks, came, delta[:rows])
            came = after
            made = brought(model.ranks, rank_of(model.ranks), came, rows, x.shape[1])
        _join(begin, end, x, delta, mine[_POST_NORM], mine[_MLP_NORM], model, normed)
        met = meet(team, met)
        if mine[_EXPERTS]:
            passage = Passage(
                mixture, panels, normed[:rows], mine[_ROUTER], mine[_ROUTER + 2], mine[_EXPERTS],
                made, work.room,
            )  # fmt: skip
            frame = np.empty(3, np.int64)
            frame[0], frame[1], frame[2] = lent(PASSAGE, passage), team.address, met
            run_share(mixture.run, frame.ctypes.data, me, threads)
            met = frame[2]
            held(passage)
        else:
            met = _feed_forward(team, met, model, panels, mine, normed[:rows], made, scratch)
        if together:
            after = meet_ranks(me, model.ranks, came)
            sum_share(begin, end, model.ranks, came, delta[:rows])
            came = after
        following = step.out if layer == layers - 1 else normed
        _join(
            begin, end, x, delta, mine[_MLP_POST_NORM], weights[layer + 1, _NORM], model, following
        )
        met = meet(team, met)
    if together:
        end_call(me, model.ranks, came)


@cfunc(types.void(*[types.int64] * 3), error_model="numpy")
def run_members(frame: int, begin: int, end: int) -> None:
    """Members ``begin .. end`` of a team run the layers.

    The frame has the address of a ``Work``, the address of the team's state, and its size.
    """
    f = carray(pointer(frame), (3,), np.int64)
    for me in range(begin, end):
        if gathered(f[1], f[2]):
            _layers_share(Member(me, f[2], f[1]), borrowed(WORK, f[0]))


@njit(nogil=True)
def run_layers(
    run: int,
    model: Model,
    mixture: Mixture,
    panels: Panels,
    step: Step,
    items: Items,
    others: Items,
    num_partials: int,
    threads: int,
) -> tuple[bool, bool]:
    """All layers and the last norm, of the rows whose logits are wanted; see ``Step``.

    ``run`` is the address of ``run_members``.

    Returns whether all slots are in the cache (else nothing has been done), and whether the threads
    have worked together (else one has done all). All weights for products, except a router's, are
    of the kind of ``panels``. ``items`` are the step's for one kind of layers, ``others`` for a
    second one, if there is one; ``num_partials`` is the most partial results of either.
    """
    rows, hidden = step.x.shape
    heads, dim, inner, wanted = model.heads, items.dim, model.inner, len(step.logit_rows)
    for slot in step.slots:
        if not 0 <= slot < step.num_slots:
            return False, True
    query_width = heads * dim
    qk_width = query_width + items.kv_heads * dim
    together = min(rows, _TOGETHER)
    levels, peaks = np.empty(0, np.int8), np.empty(0, np.float32)
    if _takes_levels(panels):
        numbers = max(rows * hidden, rows * query_width, together * inner)
        levels = lines(-(-numbers // 4)).view(np.int8)
        peaks = np.empty(rows * _peak_numbers(panels, max(hidden, query_width, inner)), np.float32)
        numbers = -(-numbers // 4)
    else:
        numbers = max(_laid_numbers(rows, hidden), _laid_numbers(rows, query_width))
        numbers = max(numbers, _laid_numbers(together, max(inner, 1)))
        numbers = max(numbers, _gated_numbers(panels, rows, hidden, inner, threads))
    results = Results(
        matrix(rows, query_width),
        matrix(rows, heads),
        matrix(num_partials, query_width),
        matrix(num_partials, heads),
    )
    scratch = Scratch(
        matrix(rows, hidden),
        matrix(rows, hidden),
        matrix(rows, qk_width + items.kv_heads * dim),
        matrix(rows, qk_width),
        matrix(together, 2 * inner),
        matrix(together, inner),
        lines(numbers if rows > 1 else 0),
        levels,
        peaks,
        matrix(wanted, hidden),
        matrix(wanted, query_width),
    )
    room = new_room(mixture, panels, rows, hidden)
    work = Work(model, mixture, panels, step, items, others, results, scratch, room)
    state = new_team()
    frame = np.empty(3, np.int64)
    frame[0], frame[1], frame[2] = lent(WORK, work), state.ctypes.data, threads
    together = threads <= 1
    if threads > 1:
        one_each = np.empty(threads + 1, np.int64)
        for thread in range(threads + 1):
            one_each[thread] = thread
        run_shares(run, frame.ctypes.data, one_each)
        together = came_together(state)
    if threads <= 1 or not together:
        frame[2] = 1
        run_share(run, frame.ctypes.data, 0, 1)
    state[0] = frame[0] = 0  # numba frees an array after its last use by name, not by address
    held(work)
    return True, together
