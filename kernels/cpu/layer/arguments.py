"""What the threads of the compiled layers share: a model, a step, and what operations leave."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from coppice.kernels.cpu.attention.arguments import Items, Results
from coppice.kernels.cpu.code.calls import tuple_type
from coppice.kernels.cpu.layer.matmul.row_blocks import PANELS, Panels
from coppice.kernels.cpu.layer.mixture import MIXTURE, ROOM, Mixture, Room

#: The columns of ``Model.weights``.
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
    "attention_post_norm",
    "mlp_post_norm",
    "query_norm",
    "key_norm",
    "sinks",
    "router",
    "router_scale",
    "router_bias",
    "experts",
)


class Model(NamedTuple):
    """What the layers of a model have in common in every step.

    ``weights`` int64 ``[layers + 1, columns]``: addresses as ``COLUMNS`` names them, of packed
    weights for products and of float32 for the rest, 0 for none; its last row has the last norm in
    its first column. ``kinds`` int64 ``[layers, 2]``: which of a step's two kinds of items a layer
    has, and which of its rotations. ``inner`` is the width of the feed-forward part, ``gelu``
    whether its gate is GELU instead of SiLU, ``factor`` that of what a layer's parts add,
    ``attention`` the address of ``run_tasks``, ``half`` whether pages are bfloat16. A layer with
    the address of a table of experts passes its rows through these. ``ranks``: what this process
    shares with others that have other parts of the model (``ranks.meeting``).
    """

    weights: np.ndarray
    kinds: np.ndarray
    heads: int
    inner: int
    gelu: bool
    eps: np.float32
    factor: np.float32
    attention: int
    half: bool
    ranks: np.ndarray


class Step(NamedTuple):
    """The rows of a step, T of them, and the cache.

    ``x`` float32 ``[T, hidden]`` is what the first layer reads, and is overwritten; ``cos`` and
    ``signed_sin`` ``[rotations, T, dim]``; ``slots`` int64 ``[T]``, those of their keys and values;
    ``logit_rows`` int64 ``[R]``. ``caches`` int64 ``[layers, 2]``: addresses of keys and values, of
    ``num_slots`` slots. The result goes to ``out`` float32 ``[R, hidden]``.
    """

    x: np.ndarray
    cos: np.ndarray
    signed_sin: np.ndarray
    slots: np.ndarray
    logit_rows: np.ndarray
    caches: np.ndarray
    num_slots: int
    out: np.ndarray


class Scratch(NamedTuple):
    """What operations leave for the next one, float32, of all rows.

    ``qkv`` has queries, keys and values, ``rotated`` the first two rotated; the next norm adds
    ``delta``. ``gate_up`` and ``active`` have the rows that pass through the feed-forward part
    together. Products use ``laid``, ``levels`` (int8) and ``peaks``. ``last_x`` and
    ``last_attended`` have the rows whose logits are wanted.
    """

    normed: np.ndarray
    delta: np.ndarray
    qkv: np.ndarray
    rotated: np.ndarray
    gate_up: np.ndarray
    active: np.ndarray
    laid: np.ndarray
    levels: np.ndarray
    peaks: np.ndarray
    last_x: np.ndarray
    last_attended: np.ndarray


class Work(NamedTuple):
    """A model, a step of it, and room for what operations leave for each other."""

    model: Model
    mixture: Mixture
    panels: Panels
    step: Step
    items: Items
    others: Items
    results: Results
    scratch: Scratch
    room: Room


_MODEL = tuple_type(Model, "i2 i2 i i b f f i b i1")
_STEP = tuple_type(Step, "f2 f3 f3 i1 i1 i2 i f2")
#: The types of ``Items`` and ``Results`` in compiled code.
ITEMS = tuple_type(Items, "n2 i1 n2 n2 n1 n1 n1 n1 i2 i i i f i f")
RESULTS = tuple_type(Results, "f2 f2 f2 f2")
_SCRATCH = tuple_type(Scratch, "f2 f2 f2 f2 f2 f2 f1 c1 f1 f2 f2")
WORK = tuple_type(
    Work, _MODEL, MIXTURE, PANELS, _STEP, ITEMS, ITEMS, RESULTS, _SCRATCH, ROOM
)  # fmt: skip
