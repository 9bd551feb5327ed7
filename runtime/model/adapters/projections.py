"""The projections of a decoder that adapters can change, by the names that checkpoints give them.

A checkpoint's projection may be a part of one here: queries, keys and values are computed by one
product, and so are gate and up. An adapter's matrices for a part then add to its columns alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from coppice.runtime.model.config import ModelConfig
from coppice.runtime.model.places.tensors import rows_in_order

#: The projections of a layer, by the names that ``DecoderLayer`` gives them.
PROJECTIONS = ("qkv", "output", "gate_up", "down")


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A projection of a checkpoint as a part of one of a decoder.

    Attributes:
        layer: of the decoder.
        projection: of the layer, one of ``PROJECTIONS``.
        inputs: numbers that it reads.
        first, outputs: the columns of the projection's result that are its own.
        order: result i of the decoder is result ``order[i]`` of the checkpoint's, int64
            ``[outputs]``; None: in the same order.
    """

    layer: int
    projection: str
    inputs: int
    first: int
    outputs: int
    order: torch.Tensor | None = None


def parts_of(config: ModelConfig) -> dict[str, Part]:
    """All parts by their names, without the ending ``.weight``; none of layers' experts."""
    names, hidden, inner = config.names, config.hidden_size, config.intermediate_size
    dim, heads, kv_heads = config.head_dim, config.num_heads, config.num_kv_heads
    query_width, kv_width = heads * dim, kv_heads * dim
    found: dict[str, Part] = {}

    def add(
        layer: int,
        projection: str,
        inputs: int,
        named: Sequence[str],
        widths: Sequence[int],
        order: torch.Tensor | None = None,
    ) -> None:
        outputs = list(widths) if len(named) == len(widths) else [sum(widths)]
        first = 0
        for name, count in zip(named, outputs, strict=True):
            own = None if order is None else order[first : first + count] - first
            whole = names.layer.format(index=layer) + name
            found[whole] = Part(layer, projection, inputs, first, count, own)
            first += count

    order = None
    if config.head_order is not None:
        order = rows_in_order(config.head_order, heads + kv_heads, query_width + 2 * kv_width)
    for index, layer in enumerate(config.layers):
        widths = (query_width, kv_width, kv_width)
        add(index, "qkv", hidden, names.qkv, widths, order)
        add(index, "output", query_width, (names.output,), (hidden,))
        if layer.experts is None:
            add(index, "gate_up", hidden, names.gate_up, (inner, inner))
            add(index, "down", inner, (names.down,), (hidden,))
    return found


def why_not(config: ModelConfig, name: str) -> str:
    """Why an adapter can't change the module ``name`` of a model, for a message."""
    names = config.names
    if name in (names.head, names.embedding):
        return "the embedding and the language-model head can't be adapted here"
    if any(layer.experts is not None for layer in config.layers) and (
        "experts" in name or name.endswith((f".{names.router}", ".mlp.router"))
    ):
        return "experts and their router can't be adapted here"
    return (
        f"this model, {config.architecture} with {config.num_layers} layers, has no such projection"
    )
