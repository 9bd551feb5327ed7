"""Where each tensor of a checkpoint belongs in a decoder, and what copies it there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch

from coppice.kernels.cpu.layer.matmul.grouped import Grouped
from coppice.runtime.model.config import ModelConfig
from coppice.runtime.model.decoder import Decoder, DecoderLayer
from coppice.runtime.model.experts import Expert
from coppice.runtime.model.layers import Linear, RMSNorm
from coppice.runtime.model.parallel.cut import Cut
from coppice.runtime.model.parallel.cut import rows as rows_of
from coppice.runtime.model.parallel.division import Share
from coppice.runtime.model.places.experts import Place, experts_in_one


def places_of(decoder: Decoder) -> dict[str, Place]:
    """All tensors that a checkpoint must have, by their names in it."""
    share = decoder.share
    config, hidden = share.whole, share.whole.hidden_size
    names = config.names
    norm = decoder.norm.weight
    places = {f"{names.norm}.weight": Place((hidden,), _norm(norm, config))}
    embedding = decoder.embedding
    assert embedding is not None
    words = partial(
        Place, (config.vocab_size, hidden), cut=None if share.size == 1 else Cut(0, (share.words,))
    )
    if config.tie_word_embeddings and not decoder.head_is_embedding:
        # The head is of another type than the embedding and is made from the same tensor.
        def fill_both(tensor: torch.Tensor) -> None:
            embedding.copy_(tensor)
            decoder.head.fill_weight(0, tensor)

        places[f"{names.embedding}.weight"] = words(fill_both)
    else:
        places[f"{names.embedding}.weight"] = words(embedding.copy_)
    if not config.tie_word_embeddings:
        places[f"{names.head}.weight"] = words(partial(decoder.head.fill_weight, 0))
    if decoder.score is not None:
        shape = (config.num_labels, hidden)
        places[f"{names.score}.weight"] = Place(shape, decoder.score.copy_)
    for index, layer in enumerate(decoder.layers):
        prefix = names.layer.format(index=index)
        for name, place in _layer_places(cast(DecoderLayer, layer), share, index).items():
            places[prefix + name] = place
    return places


def _norm(weight: torch.Tensor, config: ModelConfig) -> Callable[[torch.Tensor], object]:
    """What copies a norm's weights; some families store how far they are from 1."""
    if not config.norm_offset:
        return weight.copy_
    return lambda part: weight.copy_(part.float() + config.norm_offset)


def _layer_places(layer: DecoderLayer, share: Share, index: int) -> dict[str, Place]:
    """The tensors of layer ``index``, by their names in it."""
    config, part = share.whole, share.part
    names, hidden, dim = config.names, config.hidden_size, config.head_dim
    queries, keys = _times(share.heads, dim), _times(share.kv_heads, dim)
    query_width, kv_width = config.num_heads * dim, config.num_kv_heads * dim
    places: dict[str, Place] = {}
    for name, norm in (
        (names.attention_norm, layer.attention_norm),
        (names.attention_post_norm, layer.attention_post_norm),
        (names.mlp_norm, layer.mlp_norm),
        (names.mlp_post_norm, layer.mlp_post_norm),
    ):
        if isinstance(norm, RMSNorm):
            places[f"{name}.weight"] = Place((hidden,), _norm(norm.weight, config))

    def pack(
        linear: Linear,
        names: Sequence[str],
        counts: Sequence[int],
        parts: Sequence[range] = (),
        columns: range | None = None,
    ) -> None:
        """A projection whose parts have these numbers of rows; one name: they are stored as one.

        Of those rows a rank has ``parts``, or all rows and of the inputs ``columns``.
        """
        kept = [range(count) for count in counts] if columns is not None else list(parts)
        order = None
        if linear is layer.qkv and config.head_order is not None:
            heads = part.num_heads + part.num_kv_heads
            order = rows_in_order(config.head_order, heads, sum(map(len, kept)))
        wide = hidden if linear is not layer.output else query_width
        if columns is not None and linear is not layer.output:
            wide = inner
        joined = len(names) < len(counts)
        first = 0
        for at, name in enumerate(names):
            rows, all_rows = (kept, counts) if joined else ([kept[at]], [counts[at]])
            count = sum(map(len, rows))
            own = None if order is None else order[first : first + count] - first
            cut = None
            if share.size > 1:
                cut = rows_of(rows, all_rows) if columns is None else Cut(1, (columns,))
            fill: Callable[[Any], object] = partial(_fill, linear.fill_weight, first, own)
            shape = (sum(all_rows), wide)
            places[f"{name}.weight"] = Place(shape, fill, takes_groups=linear.takes_groups, cut=cut)
            if linear.bias is not None:
                fill = partial(_fill, linear.fill_bias, first, own)
                if columns is not None and share.rank:
                    fill = _nothing(linear)  # the first rank adds it
                cut = None if columns is not None else cut
                places[f"{name}.bias"] = Place((sum(all_rows),), fill, cut=cut)
            first += count

    pack(layer.qkv, names.qkv, (query_width, kv_width, kv_width), (queries, keys, keys))
    pack(layer.output, (names.output,), (hidden,), columns=queries)
    experts = config.layers[index].experts
    inner = config.intermediate_size if experts is None else experts.inner
    mine = share.inner(inner)
    if layer.experts is None:
        pack(layer.gate_up, names.gate_up, (inner, inner), (mine, mine))
        pack(layer.down, (names.down,), (hidden,), columns=mine)
    else:
        router, count = layer.experts.router, layer.experts.spec.count
        places[f"{names.router}.weight"] = Place((count, hidden), partial(router.fill_weight, 0))
        if router.bias is not None:
            places[f"{names.router}.bias"] = Place((count,), partial(router.fill_bias, 0))
    if layer.experts is not None and names.experts is not None:
        places |= experts_in_one(
            layer.experts, names.experts, hidden, share, inner, stored=config.stored
        )
    elif layer.experts is not None:
        for number, module in enumerate(layer.experts.experts):
            prefix, expert = names.expert.format(index=number), cast(Expert, module)
            gate_up = [prefix + name for name in names.expert_gate_up]
            pack(expert.gate_up, gate_up, (inner, inner), (mine, mine))
            pack(expert.down, (prefix + names.expert_down,), (hidden,), columns=mine)
    alone = share.size == 1
    if layer.sinks is not None:
        cut = None if alone else Cut(0, (share.heads,))
        places[names.sinks] = Place((config.num_heads,), layer.sinks.copy_, cut=cut)
    order = None if config.head_order is None else torch.tensor(config.head_order)
    if layer.qk_norm is not None:
        # One row a head: copying a single row fills all heads of a kind.
        weight, heads = layer.qk_norm.weight, part.num_heads
        for name, rows in zip(names.qk_norm, (weight[:heads], weight[heads:]), strict=True):
            copy = _norm(rows, config)
            places[f"{name}.weight"] = Place((dim,), partial(_fill, _second(copy), 0, order))
    norms = (layer.query_norm, queries, query_width), (layer.key_norm, keys, kv_width)
    for name, (norm, own, width) in zip(names.qk_norm, norms, strict=True):
        if norm is not None:
            assert order is None, "norms over all heads of a token, with heads in another order"
            cut = None if alone else Cut(0, (own,))
            places[f"{name}.weight"] = Place((width,), _norm(norm.weight, config), cut=cut)
    return places


def _times(heads: range, dim: int) -> range:
    """The rows of some heads."""
    return range(heads.start * dim, heads.stop * dim)


def _nothing(linear: Linear) -> Callable[[Any], object]:
    """Fills a bias with zeros, whatever it is given."""
    return lambda part: linear.fill_bias(0, torch.zeros_like(part))


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
