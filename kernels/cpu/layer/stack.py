"""All layers of a decoder over one step, compiled into one call, on a CPU.

A layer is some ten operations. Called from Python one by one, each finds its code and arguments
gone from the caches, which a layer's weights have just passed through: of a decode step of one
sequence by a Llama of 135 million weights the calls were a third. Here Python is entered once a
step, and so are the threads: they go through the layers together (``code.team``), each working its
share of every operation.

Products are ``float_numba``'s, or ``int8_numba``'s of int8 weights; rows are worked by
``rows_numba``, attention is ``numba_items``'s.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray, prange

from coppice.kernels.cpu.attention.numba_items import attention_frame, merge_share, run_tasks
from coppice.kernels.cpu.code.calls import pointer, run_share
from coppice.kernels.cpu.code.kept import njit
from coppice.kernels.cpu.code.team import came_together, gathered, meet, new_team
from coppice.kernels.cpu.layer import float_numba, int8_numba
from coppice.kernels.cpu.layer.rows_numba import norm_share, rotate_share, silu_share

__all__ = ["COLUMNS", "INT8", "run_layers", "run_tasks"]

_FAST = {"contract", "reassoc", "arcp", "nsz"}

# Rows that pass the feed-forward part together: what lies between its products takes 9 MB of a
# Llama of 135 million weights then, where 2,048 rows at once take 38.
_TOGETHER = 512
# Columns of a row that one thread alone takes of an activation.
_COLUMNS = 64

#: The columns of ``weights`` of ``run_layers``.
COLUMNS = (
    "attention_norm",
    "qkv",
    "qkv_scale",
    "qkv_bias",
    "qk_norm",
    "output",
    "output_scale",
    "output_bias",
    "mlp_norm",
    "gate_up",
    "gate_up_scale",
    "gate_up_bias",
    "down",
    "down_scale",
    "down_bias",
)
# A projection's columns are its weight, the scale of an int8 one, and its bias.
_NORM, _QKV, _QK_NORM, _OUTPUT, _MLP_NORM, _GATE_UP, _DOWN = 0, 1, 4, 5, 8, 9, 12

#: The kind of int8 weights; the others' are ``float_panels``'s.
INT8 = -1

_float_share, _int8_share = float_numba.multiply_share, int8_numba.multiply_share
_laid_numbers = float_numba.laid_numbers


@njit
def _line(address: int, length: int) -> Any:
    return carray(pointer(address), (length,), np.float32)


@njit
def _multiply(
    me: int,
    threads: int,
    team: int,
    met: int,
    x: np.ndarray,
    projection: np.ndarray,
    kind: int,
    panels: int,
    panel: int,
    out: np.ndarray,
    laid: np.ndarray,
    levels: np.ndarray,
    peaks: np.ndarray,
) -> int:
    """``out [T, N] = x [T, K] @ weight.T + bias``; a projection is its three columns.

    ``x`` is complete when it is called, and ``out`` when it returns.
    """
    if kind == INT8:
        return _int8_share(
            me, threads, team, met, panels, panel, x, projection[0], projection[1], projection[2],
            out, levels, laid.view(np.int8), peaks,
        )  # fmt: skip
    return _float_share(
        me, threads, team, met, panels, panel, kind, x, projection[0], projection[2], out, laid
    )


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
def _layers_share(
    me: int,
    threads: int,
    team: int,
    weights: np.ndarray,
    caches: np.ndarray,
    x: np.ndarray,
    cos: np.ndarray,
    signed_sin: np.ndarray,
    slots: np.ndarray,
    logit_rows: np.ndarray,
    num_slots: int,
    heads: int,
    eps: np.float32,
    kind: int,
    panels: int,
    panel: int,
    tasks: np.ndarray,
    shares: np.ndarray,
    items: np.ndarray,
    merges: np.ndarray,
    page_indices: np.ndarray,
    item_rows: np.ndarray,
    item_slots: np.ndarray,
    positions: np.ndarray,
    page_size: int,
    kv_heads: int,
    scale: np.float32,
    window: int,
    attention: int,
    normed: np.ndarray,
    delta: np.ndarray,
    qkv: np.ndarray,
    rotated: np.ndarray,
    gathered_heads: np.ndarray,
    lse: np.ndarray,
    partial_out: np.ndarray,
    partial_lse: np.ndarray,
    gate_up: np.ndarray,
    active: np.ndarray,
    laid: np.ndarray,
    levels: np.ndarray,
    peaks: np.ndarray,
    last_x: np.ndarray,
    last_gathered: np.ndarray,
    out: np.ndarray,
) -> None:
    """What thread ``me`` of a team does of ``run_layers``; the arrays are theirs in common.

    Between two meetings no thread reads what another writes.
    """
    layers, rows = len(caches), len(x)
    inner, dim, kept = active.shape[1], cos.shape[1], kv_heads * cos.shape[1]
    qk_width = rotated.shape[1]
    flat, stride = qkv.reshape(-1), qkv.shape[1]
    nothing = np.empty((0, 0), np.float32)
    begin, end = rows * me // threads, rows * (me + 1) // threads
    # Tasks may be too few to be shared; and who is alone does all of them.
    first_task, last_task = 0, len(tasks)
    if threads > 1 and len(shares) > 2:
        first_task, last_task = shares[me], shares[me + 1]
    elif me > 0:
        first_task = last_task
    first_merge, last_merge = len(merges) * me // threads, len(merges) * (me + 1) // threads
    met = 0
    norm_share(
        begin, end, x, nothing, _line(weights[0, _NORM], x.shape[1]), eps, normed
    )  # fmt: skip
    met = meet(team, threads, met)
    for layer in range(layers):
        mine = weights[layer]
        met = _multiply(
            me, threads, team, met, normed, mine[_QKV : _QKV + 3], kind, panels, panel, qkv, laid,
            levels, peaks,
        )  # fmt: skip
        if mine[_QK_NORM]:
            _norm_heads(begin, end, qkv, mine[_QK_NORM], qk_width, dim, eps)
        keys = _line(caches[layer, 0], num_slots * kept)
        values = _line(caches[layer, 1], num_slots * kept)
        rotate_share(
            begin, end, flat, stride, flat[qk_width:], stride, cos, signed_sin,
            keys.reshape(num_slots, kept), values.reshape(num_slots, kept), slots, rotated,
        )  # fmt: skip
        met = meet(team, threads, met)
        if first_task < last_task:
            frame = attention_frame(
                tasks, items, rotated.reshape(-1), qk_width, keys, values, page_indices, item_rows,
                item_slots, positions, page_size, kv_heads, dim, scale, window, gathered_heads,
                lse, partial_out, partial_lse,
            )  # fmt: skip
            run_share(attention, frame.ctypes.data, first_task, last_task)
            frame[0] = 0  # numba frees what is not named any more, and addresses are no names
        met = meet(team, threads, met)
        if len(merges):
            merge_share(
                first_merge, last_merge, merges, dim, gathered_heads, lse, partial_out, partial_lse
            )
            met = meet(team, threads, met)
        attended = gathered_heads
        if layer == layers - 1:
            # Nothing reads the other rows any more: this layer has written their KV.
            rows = len(logit_rows)
            begin, end = rows * me // threads, rows * (me + 1) // threads
            for row in range(begin, end):
                last_x[row] = x[logit_rows[row]]
                last_gathered[row] = gathered_heads[logit_rows[row]]
            x, attended = last_x, last_gathered
            met = meet(team, threads, met)
        met = _multiply(
            me, threads, team, met, attended[:rows], mine[_OUTPUT : _OUTPUT + 3], kind, panels,
            panel, delta[:rows], laid, levels, peaks,
        )  # fmt: skip
        norm_share(begin, end, x, delta, _line(mine[_MLP_NORM], x.shape[1]), eps, normed)
        met = meet(team, threads, met)
        parts = -(-rows // _TOGETHER)
        for part in range(parts):
            upper, lower = part * rows // parts, (part + 1) * rows // parts
            many = lower - upper
            both, product = gate_up[:many], active[:many]
            met = _multiply(
                me, threads, team, met, normed[upper:lower], mine[_GATE_UP : _GATE_UP + 3], kind,
                panels, panel, both, laid, levels, peaks,
            )  # fmt: skip
            if many >= threads:
                first, last = many * me // threads, many * (me + 1) // threads
                silu_share(first, last, np.int64(0), inner, both, product)
            else:
                columns = -(-inner // _COLUMNS)
                first = columns * me // threads * _COLUMNS
                last = min(columns * (me + 1) // threads * _COLUMNS, inner)
                silu_share(np.int64(0), many, first, last, both, product)
            met = meet(team, threads, met)
            met = _multiply(
                me, threads, team, met, product, mine[_DOWN : _DOWN + 3], kind, panels, panel,
                delta[upper:lower], laid, levels, peaks,
            )  # fmt: skip
        following = out if layer == layers - 1 else normed
        norm_share(
            begin, end, x, delta, _line(weights[layer + 1, _NORM], x.shape[1]), eps, following
        )  # fmt: skip
        met = meet(team, threads, met)


@njit(parallel=True)
def _layers_shares(
    threads: int,
    team: int,
    weights: np.ndarray,
    caches: np.ndarray,
    x: np.ndarray,
    cos: np.ndarray,
    signed_sin: np.ndarray,
    slots: np.ndarray,
    logit_rows: np.ndarray,
    num_slots: int,
    heads: int,
    eps: np.float32,
    kind: int,
    panels: int,
    panel: int,
    tasks: np.ndarray,
    shares: np.ndarray,
    items: np.ndarray,
    merges: np.ndarray,
    page_indices: np.ndarray,
    item_rows: np.ndarray,
    item_slots: np.ndarray,
    positions: np.ndarray,
    page_size: int,
    kv_heads: int,
    scale: np.float32,
    window: int,
    attention: int,
    normed: np.ndarray,
    delta: np.ndarray,
    qkv: np.ndarray,
    rotated: np.ndarray,
    gathered_heads: np.ndarray,
    lse: np.ndarray,
    partial_out: np.ndarray,
    partial_lse: np.ndarray,
    gate_up: np.ndarray,
    active: np.ndarray,
    laid: np.ndarray,
    levels: np.ndarray,
    peaks: np.ndarray,
    last_x: np.ndarray,
    last_gathered: np.ndarray,
    out: np.ndarray,
) -> None:
    for me in prange(threads):
        if gathered(team, threads):
            _layers_share(
                me, threads, team, weights, caches, x, cos, signed_sin, slots, logit_rows,
                num_slots, heads, eps, kind, panels, panel, tasks, shares, items, merges,
                page_indices, item_rows, item_slots, positions, page_size, kv_heads, scale, window,
                attention, normed, delta, qkv, rotated, gathered_heads, lse, partial_out,
                partial_lse, gate_up, active, laid, levels, peaks, last_x, last_gathered, out,
            )  # fmt: skip


@njit(nogil=True)
def run_layers(
    weights: np.ndarray,
    caches: np.ndarray,
    x: np.ndarray,
    cos: np.ndarray,
    signed_sin: np.ndarray,
    slots: np.ndarray,
    logit_rows: np.ndarray,
    num_slots: int,
    inner: int,
    heads: int,
    eps: np.float32,
    threads: int,
    kind: int,
    panels: int,
    panel: int,
    tasks: np.ndarray,
    shares: np.ndarray,
    items: np.ndarray,
    merges: np.ndarray,
    page_indices: np.ndarray,
    item_rows: np.ndarray,
    item_slots: np.ndarray,
    positions: np.ndarray,
    page_size: int,
    kv_heads: int,
    scale: np.float32,
    window: int,
    attention: int,
    num_partials: int,
    out: np.ndarray,
) -> tuple[bool, bool]:
    """The last norm's output of the rows that logits are wanted of.

    Whether all slots are some, else nothing has been done; and whether the threads worked together,
    else one has done all.

    ``weights`` int64 ``[layers + 1, 15]``: addresses as ``COLUMNS`` names them, of packed weights
    for products and of float32 for the rest, 0 for none; its last row has the last norm in its
    first column. Weights are of a ``kind``; ``panels`` is the address of their ``run_panels``,
    ``panel`` the outputs of one. ``caches`` int64 ``[layers, 2]``: addresses of keys and values, of
    ``num_slots`` slots. ``x`` float32 ``[T, hidden]`` is what the first layer reads, and is
    overwritten; ``cos`` and ``signed_sin`` ``[T, dim]``; ``slots`` int64 ``[T]``, ``logit_rows``
    int64 ``[R]``; ``out`` float32 ``[R, hidden]``. ``attention`` is the address of
    ``numba_items.run_tasks``, and the rest is as ``attend_items`` there has it.
    """
    rows, hidden = x.shape
    dim, wanted = cos.shape[1], len(logit_rows)
    for slot in slots:
        if not 0 <= slot < num_slots:
            return False, True
    query_width = heads * dim
    qk_width = query_width + kv_heads * dim
    normed = np.empty((rows, hidden), np.float32)
    delta = np.empty((rows, hidden), np.float32)
    qkv = np.empty((rows, qk_width + kv_heads * dim), np.float32)
    rotated = np.empty((rows, qk_width), np.float32)
    gathered_heads = np.empty((rows, query_width), np.float32)
    lse = np.empty((rows, heads), np.float32)
    partial_out = np.empty((num_partials, query_width), np.float32)
    partial_lse = np.empty((num_partials, heads), np.float32)
    together = min(rows, _TOGETHER)
    gate_up = np.empty((together, 2 * inner), np.float32)
    active = np.empty((together, inner), np.float32)
    last_x = np.empty((wanted, hidden), np.float32)
    last_gathered = np.empty((wanted, query_width), np.float32)
    levels, peaks = np.empty(0, np.int8), np.empty(0, np.float32)
    if kind == INT8:
        numbers = max(rows * hidden, rows * query_width, together * inner)
        levels, peaks = np.empty(numbers, np.int8), np.empty(rows, np.float32)
        laid = np.empty(-(-numbers // 4) if rows > 1 else 0, np.float32)
    else:
        numbers = max(_laid_numbers(rows, hidden), _laid_numbers(rows, query_width))
        numbers = max(numbers, _laid_numbers(together, inner))
        laid = np.empty(numbers if rows > 1 else 0, np.float32)
    team = new_team()
    address = team.ctypes.data
    if threads > 1:
        _layers_shares(
            threads, address, weights, caches, x, cos, signed_sin, slots, logit_rows, num_slots,
            heads, eps, kind, panels, panel, tasks, shares, items, merges, page_indices, item_rows,
            item_slots, positions, page_size, kv_heads, scale, window, attention, normed, delta,
            qkv, rotated, gathered_heads, lse, partial_out, partial_lse, gate_up, active, laid,
            levels, peaks, last_x, last_gathered, out,
        )  # fmt: skip
        if came_together(team):
            return True, True
    _layers_share(
        0, 1, address, weights, caches, x, cos, signed_sin, slots, logit_rows, num_slots, heads,
        eps, kind, panels, panel, tasks, shares, items, merges, page_indices, item_rows,
        item_slots, positions, page_size, kv_heads, scale, window, attention, normed, delta, qkv,
        rotated, gathered_heads, lse, partial_out, partial_lse, gate_up, active, laid, levels,
        peaks, last_x, last_gathered, out,
    )  # fmt: skip
    return True, threads <= 1
