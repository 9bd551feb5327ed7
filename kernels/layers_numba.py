"""All layers of a decoder over one step, compiled into one call, on a CPU.

A layer is some ten operations. Called from Python one by one, each finds its code and arguments
gone from the caches, which a layer's weights have just passed through: of a decode step of one
sequence by a Llama of 135 million weights the calls were a third. Here Python is entered once a
step.

Products of float32 weights are MKL's (``mkl``), those of 16 bits ``half_numba``'s, those of int8
weights ``int8_numba``'s; rows are worked by ``rows_numba``, attention is ``items_numba``'s.
"""

from __future__ import annotations

import math
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from numba import carray, njit, types

from coppice.kernels import half_numba, int8_numba, mkl
from coppice.kernels.items_numba import attend_compiled, run_tasks
from coppice.kernels.rows_numba import (
    SHARED_FROM,
    norm_share,
    norm_shares,
    rotate_share,
    rotate_shares,
    silu_share,
    silu_shares,
)
from coppice.kernels.tasks_numba import pointer

__all__ = ["COLUMNS", "run_layers", "run_tasks"]

#: A digest of the files whose compiled functions are called here; see ``items_numba``.
SOURCES = "eacb4fdd4c5e"

_FAST = {"contract", "reassoc", "arcp", "nsz"}

# Rows that pass the feed-forward part together: what lies between its products takes 9 MB of a
# Llama of 135 million weights then, where 2,048 rows at once take 38.
_TOGETHER = 512

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

#: Kinds of weights: float32 that MKL has laid out, ``half_panels``'s two and ``int8_panels``'s.
FLOAT, BFLOAT16, FLOAT16, INT8 = 0, 1, 2, 3

_multiply_half, _multiply_int8 = half_numba.multiply_rows, int8_numba.multiply_rows

if (_library := mkl.library()) is None:
    raise ImportError("this build of torch brings no MKL")
llvm.add_symbol("cblas_sgemm_compute", mkl.address_of(_library.cblas_sgemm_compute))
_sgemm = types.ExternalFunction(
    "cblas_sgemm_compute",
    types.void(
        *[types.int32] * 6, types.intp, types.int32, types.intp, types.int32, types.float32,
        types.intp, types.int32,
    ),
)  # fmt: skip


@njit(cache=True)
def _line(address: int, length: int) -> Any:
    return carray(pointer(address), (length,), np.float32)


@njit(cache=True)
def _multiply(
    x: np.ndarray,
    projection: np.ndarray,
    kind: int,
    panels: int,
    panel: int,
    out: np.ndarray,
    threads: int,
) -> None:
    """``out [T, N] = x [T, K] @ weight.T + bias``; a projection is its three columns."""
    rows, inner = x.shape
    width = out.shape[1]
    if kind == INT8:
        _multiply_int8(
            panels, panel, x, projection[0], projection[1], projection[2], out, threads
        )  # fmt: skip
        return
    if kind != FLOAT:
        float16 = np.int64(kind == FLOAT16)
        _multiply_half(panels, panel, float16, x, projection[0], projection[2], out, threads)
        return
    _sgemm(
        101, 111, 151, rows, width, inner, x.ctypes.data, inner, projection[0], inner,
        np.float32(0), out.ctypes.data, width,
    )  # fmt: skip
    if projection[2]:
        added = _line(projection[2], width)
        for row in range(rows):
            mine = out[row]
            for i in range(width):
                mine[i] += added[i]


@njit(cache=True)
def _shares(rows: np.ndarray, threads: int) -> int:
    return min(len(rows), threads) if rows.size >= SHARED_FROM else 1


@njit(cache=True)
def _add_norm(
    x: np.ndarray, added: np.ndarray, weight: int, eps: np.float32, out: np.ndarray, threads: int
) -> None:
    shares, weights = _shares(x, threads), _line(weight, x.shape[1])
    if shares <= 1:
        # Not a literal 0, which would be compiled once more.
        norm_share(np.int64(0), len(x), x, added, weights, eps, out)
    else:
        norm_shares(shares, x, added, weights, eps, out)


@njit(fastmath=_FAST, error_model="numpy", cache=True)
def _norm_heads(qkv: np.ndarray, weight: int, width: int, dim: int, eps: np.float32) -> None:
    """RMSNorm of each head of the first ``width`` columns, in place, by its own row of weights."""
    weights = _line(weight, width)
    for row in range(len(qkv)):
        for first in range(0, width, dim):
            head, scale = qkv[row, first : first + dim], weights[first : first + dim]
            total = np.float32(0)
            for d in range(dim):
                total += head[d] * head[d]
            inverse = np.float32(1) / np.float32(math.sqrt(total / np.float32(dim) + eps))
            for d in range(dim):
                head[d] *= inverse * scale[d]


@njit(cache=True, nogil=True)
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
) -> bool:
    """The last norm's output of the rows that logits are wanted of; False if a slot is none.

    ``weights`` int64 ``[layers + 1, 15]``: addresses as ``COLUMNS`` names them, of packed weights
    for products and of float32 for the rest, 0 for none; its last row has the last norm in its
    first column. Weights are of a ``kind``; ``panels`` is the address of ``run_panels`` of those in
    panels, ``panel`` the outputs of one. ``caches`` int64 ``[layers, 2]``: addresses of keys and
    values, of ``num_slots`` slots. ``x`` float32 ``[T, hidden]`` is what the
    first layer reads, and is overwritten; ``cos`` and ``signed_sin`` ``[T, dim]``; ``slots`` int64
    ``[T]``, ``logit_rows`` int64 ``[R]``; ``out`` float32 ``[R, hidden]``. ``attention`` is the
    address of ``items_numba.run_tasks``, and the rest is as ``attend_items`` there has it.
    """
    layers, rows, hidden = len(caches), len(x), x.shape[1]
    dim = cos.shape[1]
    query_width, kept = heads * dim, kv_heads * dim
    qk_width = query_width + kept
    nothing = np.empty((0, 0), np.float32)
    normed = np.empty((rows, hidden), np.float32)
    delta = np.empty((rows, hidden), np.float32)
    qkv = np.empty((rows, qk_width + kept), np.float32)
    rotated = np.empty((rows, qk_width), np.float32)
    gathered = np.empty((rows, query_width), np.float32)
    lse = np.empty((rows, heads), np.float32)
    partial_out = np.empty((num_partials, query_width), np.float32)
    partial_lse = np.empty((num_partials, heads), np.float32)
    gate_up = np.empty((min(rows, _TOGETHER), 2 * inner), np.float32)
    active = np.empty((len(gate_up), inner), np.float32)

    _add_norm(x, nothing, weights[0, _NORM], eps, normed, threads)
    for layer in range(layers):
        mine = weights[layer]
        _multiply(normed, mine[_QKV : _QKV + 3], kind, panels, panel, qkv, threads)
        if mine[_QK_NORM]:
            _norm_heads(qkv, mine[_QK_NORM], qk_width, dim, eps)
        keys = _line(caches[layer, 0], num_slots * kept)
        values = _line(caches[layer, 1], num_slots * kept)
        k_slots, v_slots = keys.reshape(num_slots, kept), values.reshape(num_slots, kept)
        flat, stride = qkv.reshape(-1), qkv.shape[1]
        many = _shares(rotated, threads)
        if many <= 1:
            good = rotate_share(
                np.int64(0), rows, flat, stride, flat[qk_width:], stride, cos, signed_sin, k_slots,
                v_slots, slots, rotated,
            )  # fmt: skip
        else:
            good = rotate_shares(
                many, flat, stride, flat[qk_width:], stride, cos, signed_sin, k_slots, v_slots,
                slots, rotated,
            )  # fmt: skip
        if not good:
            return False
        attend_compiled(
            attention, tasks, shares, items, merges, rotated.reshape(-1), qk_width, keys, values,
            page_indices, item_rows, item_slots, positions, page_size, kv_heads, dim, scale,
            window, gathered, lse, partial_out, partial_lse,
        )  # fmt: skip
        if layer == layers - 1:
            # Nothing reads the other rows any more: this layer has written their KV.
            rows = len(logit_rows)
            if rows == 0:
                return True
            x, gathered = x[logit_rows], gathered[logit_rows]
            normed, delta = normed[:rows], delta[:rows]
        _multiply(
            gathered, mine[_OUTPUT : _OUTPUT + 3], kind, panels, panel, delta, threads
        )  # fmt: skip
        _add_norm(x, delta, mine[_MLP_NORM], eps, normed, threads)
        parts = -(-rows // _TOGETHER)
        for part in range(parts):
            begin, end = part * rows // parts, (part + 1) * rows // parts
            both, product = gate_up[: end - begin], active[: end - begin]
            _multiply(
                normed[begin:end], mine[_GATE_UP : _GATE_UP + 3], kind, panels, panel, both,
                threads,
            )  # fmt: skip
            many = _shares(both, threads)
            if many <= 1:
                silu_share(np.int64(0), end - begin, both, product)
            else:
                silu_shares(many, both, product)
            _multiply(
                product, mine[_DOWN : _DOWN + 3], kind, panels, panel, delta[begin:end], threads
            )  # fmt: skip
        following = out if layer == layers - 1 else normed
        _add_norm(x, delta, weights[layer + 1, _NORM], eps, following, threads)
    return True
