"""Where each tensor of a checkpoint belongs in a decoder, and what copies it there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch

from coppice.kernels.cpu.layer.matmul.grouped import Grouped
from coppice.runtime.model.config import ModelConfig
from coppice.runtime.model.decoder import Decoder, DecoderLayer
from coppice.runtime.model.expert_places import Place, experts_in_one
from coppice.runtime.model.experts import Expert
from coppice.runtime.model.layers import Linear, RMSNorm


def places_of(decoder: Decoder) -> dict[str, Place]:
    """All tensors that a checkpoint must have, by their names in it."""
    config = decoder.config
    hidden = config.hidden_size
    names = config.names
    norm = decoder.norm.weight
    places = {f"{names.norm}.weight": Place((hidden,), _norm(norm, config))}
    embedding_shape = (config.vocab_size, hidden)
    embedding = decoder.embedding
    assert embedding is not None
    if config.tie_word_embeddings and not decoder.head_is_embedding:
        # The head is of another type than the embedding and is made from the same tensor.
        def fill_both(tensor: torch.Tensor) -> None:
            embedding.copy_(tensor)
            decoder.head.fill_weight(0, tensor)

        places[f"{names.embedding}.weight"] = Place(embedding_shape, fill_both)
    else:
        places[f"{names.embedding}.weight"] = Place(embedding_shape, embedding.copy_)
    if not config.tie_word_embeddings:
        places[f"{names.head}.weight"] = Place(
            embedding_shape, partial(decoder.head.fill_weight, 0)
        )
    if decoder.score is not None:
        shape = (config.num_labels, hidden)
        places[f"{names.score}.weight"] = Place(shape, decoder.score.copy_)
    for index, layer in enumerate(decoder.layers):
        prefix = names.layer.format(index=index)
        for name, place in _layer_places(cast(DecoderLayer, layer), config).items():
            places[prefix + name] = place
    return places


def _norm(weight: torch.Tensor, config: ModelConfig) -> Callable[[torch.Tensor], object]:
    """What copies a norm's weights; some families store how far they are from 1."""
    if not config.norm_offset:
        return weight.copy_
    return lambda part: weight.copy_(part.float() + config.norm_offset)


def _layer_places(layer: DecoderLayer, config: ModelConfig) -> dict[str, Place]:
    """The tensors of one layer, by their names in it."""
    names, hidden, inner = config.names, config.hidden_size, config.intermediate_size
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    query_width, kv_width = heads * dim, kv_heads * dim
    places: dict[str, Place] = {}
    for name, norm in (
        (names.attention_norm, layer.attention_norm),
        (names.attention_post_norm, layer.attention_post_norm),
        (names.mlp_norm, layer.mlp_norm),
        (names.mlp_post_norm, layer.mlp_post_norm),
    ):
        if isinstance(norm, RMSNorm):
            places[f"{name}.weight"] = Place((hidden,), _norm(norm.weight, config))

    def pack(linear: Linear, in_features: int, names: Sequence[str], parts: Sequence[int]) -> None:
        """A projection whose parts have these numbers of rows; one name: they are stored as one."""
        rows = list(parts) if len(names) == len(parts) else [sum(parts)]
        order = None
        if linear is layer.qkv and config.head_order is not None:
            order = rows_in_order(config.head_order, heads + kv_heads, sum(parts))
        first = 0
        for name, count in zip(names, rows, strict=True):
            own = None if order is None else order[first : first + count] - first
            fill = partial(_fill, linear.fill_weight, first, own)
            shape = (count, in_features)
            places[f"{name}.weight"] = Place(shape, fill, takes_groups=linear.takes_groups)
            if linear.bias is not None:
                fill = partial(_fill, linear.fill_bias, first, own)
                places[f"{name}.bias"] = Place((count,), fill)
            first += count

    pack(layer.qkv, hidden, names.qkv, (query_width, kv_width, kv_width))
    pack(layer.output, query_width, (names.output,), (hidden,))
    if layer.experts is None:
        pack(layer.gate_up, hidden, names.gate_up, (inner, inner))
        pack(layer.down, inner, (names.down,), (hidden,))
    else:
        pack(layer.experts.router, hidden, (names.router,), (layer.experts.spec.count,))
    if layer.experts is not None and names.experts is not None:
        places |= experts_in_one(layer.experts, names.experts, hidden, stored=config.stored)
    elif layer.experts is not None:
        inner = layer.experts.spec.inner
        for index, module in enumerate(layer.experts.experts):
            prefix, expert = names.expert.format(index=index), cast(Expert, module)
            gate_up = [prefix + name for name in names.expert_gate_up]
            pack(expert.gate_up, hidden, gate_up, (inner, inner))
            pack(expert.down, inner, (prefix + names.expert_down,), (hidden,))
    if layer.sinks is not None:
        places[names.sinks] = Place((heads,), layer.sinks.copy_)
    order = None if config.head_order is None else torch.tensor(config.head_order)
    if layer.qk_norm is not None:
        # One row a head: copying a single row fills all heads of a kind.
        weight = layer.qk_norm.weight
        for name, rows in zip(names.qk_norm, (weight[:heads], weight[heads:]), strict=True):
            copy = _norm(rows, config)
            places[f"{name}.weight"] = Place((dim,), partial(_fill, _second(copy), 0, order))
    for name, norm in zip(names.qk_norm, (layer.query_norm, layer.key_norm), strict=True):
        if norm is not None:
            assert order is None, "norms over all heads of a token, with heads in another order"
            width = len(norm.weight)
            places[f"{name}.weight"] = Place((width,), _norm(norm.weight, config))
    return places


def rows_in_order(head_order: Sequence[int], heads: int, rows: int) -> torch.Tensor:
    """Rows of a packed projection of which the first ``heads`` heads are in that order."""
    order = torch.tensor(head_order)
    moved = (torch.arange(heads)[:, None] * len(order) + order).flatten()
    return torch.cat((moved, torch.arange(len(moved), rows)))


def _fill(
    fill: Callable[[int, Any], object],
    first: int,
    order: torch.Tensor | None,
    part: torch.Tensor | Grouped,
) -> None:
    """Fills rows from ``first`` on with ``part``, whose rows are taken in ``order``."""
    fill(first, part if order is None else part[order])


def _second(copy: Callable[[torch.Tensor], object]) -> Callable[[int, torch.Tensor], object]:
    return lambda _, part: copy(part)
