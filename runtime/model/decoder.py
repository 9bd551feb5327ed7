"""The decoder-only transformer of all families, for inference.

One implementation, which ``ModelConfig`` describes layer by layer. The tokens of a step, of all its
sequences, are one flat list: only rotary positions, cache slots and the attention plan distinguish
the sequences.

    token_ids [T] -> embed -> x [T, hidden] -> layer 0 -> ... -> layer L-1 -> norm -> logits [R, V]

    layer:   x += out(attend(rope(split(qkv(norm(x))))))        keys and values go to the cache
             x += down(silu(gate) * up),  gate | up = gate_up(norm(x))

Each addition is made by the norm that comes next. Layers may also normalise what a part returns,
and then not what it reads (``LayerSpec.norms``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import nn

from coppice.kernels.attention.interface import AttentionBackend, HeadNorm, LayerCache
from coppice.kernels.cpu.layer.matmul import float_products
from coppice.runtime.model.config import LayerSpec, ModelConfig
from coppice.runtime.model.experts import ExpertMixture
from coppice.runtime.model.layers import (
    GeluMul,
    Linear,
    RMSNorm,
    RowLevels,
    SiluMul,
    Sum,
    frozen,
)
from coppice.runtime.model.parallel.division import Share, share_of
from coppice.runtime.model.parallel.group import ALONE, RankGroup
from coppice.runtime.model.parallel.heads import norm_all_heads
from coppice.runtime.model.rope import RotaryEmbedding

if TYPE_CHECKING:
    from coppice.kernels.cpu.layer.matmul.float_panels import PackedFloat


Change: TypeAlias = Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]
"""What changes the result of a layer's projection, named first: of ``x`` and ``y``, a new ``y``.

``y`` may be overwritten.
"""


class Changes(Protocol):
    """What adapters change in a step."""

    def of_layer(self, layer: int, *, chosen: bool = False) -> Change:
        """What changes the projections of one layer; of the ``logit_rows`` alone if ``chosen``."""


def unchanged(projection: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The ``Change`` of a step without adapters: none."""
    return y


class DecoderLayer(nn.Module):
    """Attention and feed-forward part of one layer; ``Decoder`` normalises and adds."""

    qk_norm: RMSNorm | None
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    attention_post_norm: RMSNorm | None
    mlp_post_norm: RMSNorm | None
    experts: ExpertMixture | None
    sinks: nn.Parameter | None

    def __init__(
        self,
        share: Share,
        spec: LayerSpec,
        *,
        linear: type[Linear],
        dtype: torch.dtype,
        device: torch.device,
        group: RankGroup,
    ) -> None:
        super().__init__()
        config = share.part
        self._share, self._group = share, group
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        self.scale, self.softcap = config.attention_scale, config.attention_softcap
        self.sliding_window, self.rope = spec.sliding_window, spec.rope
        hidden, inner = config.hidden_size, config.intermediate_size
        query_width = config.num_heads * config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        norm = partial(RMSNorm, eps=config.rms_norm_eps, **place)
        before, after = spec.norms != "after", spec.norms != "before"
        self.attention_norm = norm(hidden) if before else Sum()
        self.qkv = linear(hidden, query_width + 2 * kv_width, bias=spec.qkv_bias, **place)
        # Queries and keys lie side by side and are normalised at once, each head by its own row;
        # or all queries of a token together, and all its keys.
        heads = config.num_heads + config.num_kv_heads
        self.qk_norm = norm(heads, config.head_dim) if spec.qk_norm == "head" else None
        self.query_norm = norm(query_width) if spec.qk_norm == "all" else None
        self.key_norm = norm(kv_width) if spec.qk_norm == "all" else None
        self.sinks = None
        if spec.sinks:
            self.sinks = frozen(torch.empty(config.num_heads, dtype=dtype, device=device))
        self.output = linear(query_width, hidden, bias=spec.output_bias, **place)
        self.attention_post_norm = norm(hidden) if after else None
        self.mlp_norm = norm(hidden) if before else Sum()
        self.experts = None
        if spec.experts is not None:
            self.experts = ExpertMixture(hidden, spec.experts, linear=linear, **place)
        else:
            self.gate_up = linear(hidden, 2 * inner, bias=spec.mlp_bias, **place)
            activation = SiluMul if config.activation == "silu" else GeluMul
            self.activation = activation(**place)
            self.down = linear(inner, hidden, bias=spec.mlp_bias, **place)
        self.mlp_post_norm = norm(hidden) if after else None
        self._residual_scale = config.residual_scale

    def attend(
        self,
        normed: torch.Tensor | RowLevels,
        angles: Sequence[tuple[torch.Tensor, torch.Tensor]],
        slots: torch.Tensor,
        cache: LayerCache,
        attention: AttentionBackend,
        prepared: Any,
        change: Change = unchanged,
    ) -> torch.Tensor:
        """The heads' results, ``[T, num_heads * head_dim]``; also writes keys and values.

        With a ``change``, ``normed`` is a tensor.
        """
        projected = change("qkv", cast("torch.Tensor", normed), self.qkv(normed))
        heads = projected.view(len(projected), -1, self.head_dim)
        qk_heads = self.num_heads + self.num_kv_heads
        qk, v = heads[:, :qk_heads], heads[:, qk_heads:]
        norm = None
        if self.qk_norm is not None and attention.norms_heads:
            norm = HeadNorm(self.qk_norm.weight, self.qk_norm.eps)
        elif self.qk_norm is not None:
            qk = self.qk_norm(qk)
        elif self.query_norm is not None and self.key_norm is not None:
            queries, keys = qk[:, : self.num_heads].flatten(1), qk[:, self.num_heads :].flatten(1)
            if self._group.size > 1:
                weights, eps = (self.query_norm.weight, self.key_norm.weight), self.query_norm.eps
                both = norm_all_heads(queries, keys, weights, eps, self._share, self._group)
            else:
                both = torch.cat((self.query_norm(queries), self.key_norm(keys)), dim=1)
            qk = both.view(qk.shape)
        if norm is None:
            q, k = attention.write_rotated(qk, v, *angles[self.rope], cache, slots)
        else:
            q, k = attention.write_normed(qk, v, norm, *angles[self.rope], cache, slots)
        gathered, lse = attention.attend(
            q,
            k,
            v,
            cache,
            prepared,
            scale=self.scale,
            sliding_window=self.sliding_window,
            logit_softcap=self.softcap,
            lse_read=self.sinks is not None,
        )
        if self.sinks is not None:
            # The keys' part of the softmax's sum, which the sink makes larger.
            share = torch.sigmoid(lse - self.sinks.float())
            gathered = gathered * share[..., None].to(gathered.dtype)
        return gathered.view(len(projected), -1)

    def mix(self, gathered: torch.Tensor, change: Change = unchanged) -> torch.Tensor:
        """What attention adds, ``[T, hidden]``, of the heads' results."""
        made = self._group.sum(change("output", gathered, self.output(gathered)))
        return self._result(made, self.attention_post_norm)

    def feed_forward(
        self, normed: torch.Tensor | RowLevels, change: Change = unchanged
    ) -> torch.Tensor:
        """What the feed-forward part adds: ``down(act(gate) * up)`` of ``normed [T, hidden]``.

        With a ``change``, ``normed`` is a tensor.
        """
        if self.experts is not None:
            made = self.experts(normed)
        elif change is unchanged:
            made = self.down(self.activation.rows_for(self.down, self.gate_up(normed)))
        else:
            rows = cast("torch.Tensor", normed)
            active = self.activation(change("gate_up", rows, self.gate_up(rows)))
            made = change("down", active, self.down(active))
        return self._result(self._group.sum(made), self.mlp_post_norm)

    def _result(self, made: torch.Tensor, norm: RMSNorm | None) -> torch.Tensor:
        if norm is not None:
            made = norm(made)
        return made if self._residual_scale == 1.0 else made.mul_(self._residual_scale)


class CompiledLayers(Protocol):
    """All layers of a decoder as one call, for one attention backend."""

    def hidden_states(
        self,
        x: torch.Tensor,
        angles: Sequence[tuple[torch.Tensor, torch.Tensor]],
        slots: torch.Tensor,
        kv: Sequence[LayerCache],
        prepared: Any,
        logit_rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """What ``Decoder.hidden_states`` returns, of embedded tokens ``x [T, hidden]``.

        ``angles`` are those of the tokens' positions, by each rotation of the model. ``x`` may be
        overwritten.
        """


class Decoder(nn.Module):
    """The model. Its weights are empty until ``weights.load_decoder`` has filled them.

    ``linear`` is the class of all projections, and of the language-model head if it can be one;
    ``embedding_dtype`` is the type of the embedding, if not ``dtype``. Tied embeddings are one
    tensor, unless the head has another type than the embedding. Once such a tensor is packed, its
    rows are read from the packed form and ``embedding`` is None.

    ``compiled`` runs the layers if it is given: the runner sets it, once the weights are packed.

    A model may be divided among the ranks of ``group``. ``share`` is this rank's, and ``config``
    then has the sizes of its part; hidden states are the same on all ranks.
    """

    embedding: nn.Parameter | None
    compiled: CompiledLayers | None

    def __init__(
        self,
        config: ModelConfig,
        *,
        linear: type[Linear] = Linear,
        dtype: torch.dtype,
        device: torch.device,
        embedding_dtype: torch.dtype | None = None,
        share: Share | None = None,
        group: RankGroup = ALONE,
    ) -> None:
        super().__init__()
        self.config = config
        self.share = share_of(config, 0, 1) if share is None else share
        self.group = group
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = frozen(torch.empty(shape, dtype=embedding_dtype or dtype, device=device))
        self.layers = nn.ModuleList(
            DecoderLayer(self.share, spec, linear=linear, group=group, **place)
            for spec in config.layers
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, **place)
        self.head = linear.for_head()(config.hidden_size, config.vocab_size, bias=False, **place)
        if self.head_is_embedding:
            self.head.weight = self.embedding
        self.score: nn.Parameter | None = None
        if config.head == "labels":
            self.score = frozen(torch.empty((config.num_labels, config.hidden_size), **place))
        self.ropes = [RotaryEmbedding(rope, **place) for rope in config.ropes]
        self.compiled = None
        self._dtype = dtype
        self._embedding_scale: torch.Tensor | None = None
        if config.embedding_scale != 1.0:  # rounded to the type, as transformers does
            self._embedding_scale = torch.tensor(config.embedding_scale, **place)

    @property
    def head_is_embedding(self) -> bool:
        """Whether the head reads the embedding's own tensor."""
        return self.config.tie_word_embeddings and self.head.shares_embedding

    def pack(self) -> None:
        """Packs the weights of projections for the products on this device, where it has such."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()
        if self.head_is_embedding and self.head.packed is not None:
            self.embedding = None

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        kv: Sequence[LayerCache],
        attention: AttentionBackend,
        prepared: Any,
        logit_rows: torch.Tensor,
        changes: Changes | None = None,
    ) -> torch.Tensor:
        """Logits, float32 ``[R, vocab_size]``, of the rows in ``logit_rows``.

        The arguments are those of ``hidden_states``.
        """
        hidden = self.hidden_states(
            token_ids, positions, slots, kv, attention, prepared, logit_rows, changes
        )
        return self.logits(hidden)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``[T, hidden]`` in the type of the embedding."""
        if self.group.size == 1:
            return self._rows(token_ids)
        words = self.share.words
        own = token_ids - words.start
        missing = (own < 0) | (own >= len(words))
        rows = self._rows(own.masked_fill(missing, 0))
        return self.group.sum(rows.masked_fill_(missing[:, None], 0))

    def _rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The embeddings of tokens that this rank has."""
        if self.embedding is None:
            return float_products.rows_of(cast("PackedFloat", self.head.packed), token_ids)
        return F.embedding(token_ids, self.embedding)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits, float32 ``[R, vocab_size]``, of hidden states ``[R, hidden]``; in ``out`` if any.

        Of a model that is divided the first rank has them, and the others those of their words.
        """
        logits: torch.Tensor = self.head(hidden)
        if out is None:
            logits = self.group.gather(logits.float(), self.share.word_counts)
        else:
            assert self.group.size == 1
            logits = out.copy_(logits)
        scale, softcap = self.config.logit_scale, self.config.logit_softcap
        if scale != 1.0:
            logits = logits.mul_(scale)
        if softcap is not None:
            logits = logits.div_(softcap).tanh_().mul_(softcap)
        return logits

    def scores(
        self,
        hidden: torch.Tensor,
        tokens: tuple[int, int | None] | None,
        head: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Float32 scores of states ``[R, hidden]``: ``[R, labels]`` of the classifier's head.

        With ``tokens`` ``[R, 1]``: the first one's logit, less that of the second if there is one.
        ``head`` gives the logits; None: ``logits``.
        """
        if tokens is None:
            assert self.score is not None, "the checkpoint has no classifier's head"
            return F.linear(hidden, self.score).float()
        logits = (head or self.logits)(hidden)
        first, second = tokens
        found = logits[:, first : first + 1]
        return found if second is None else found - logits[:, second : second + 1]

    def hidden_states(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        kv: Sequence[LayerCache],
        attention: AttentionBackend,
        prepared: Any,
        logit_rows: torch.Tensor | None,
        changes: Changes | None = None,
    ) -> torch.Tensor:
        """The input of the head, ``[R, hidden]``, for the rows in ``logit_rows``; None: all rows.

        A step that needs logits of many rows calls this, and makes the logits a few rows at a time.

        ``token_ids``, ``positions`` (in the token's own sequence) and ``slots`` (of its KV,
        page * page_size + slot) are int64 ``[T]``; ``logit_rows`` is int64 ``[R]``, and R may be 0.
        ``kv`` has the cache of each layer; ``prepared`` is what ``attention.prepare`` returned for
        this step's plan; ``changes`` are those of its adapters. Without ``torch.inference_mode()``
        it is slower, not wrong.
        """
        angles = [rope.angles(positions) for rope in self.ropes]
        x = self._embed(token_ids).to(self._dtype)
        if self._embedding_scale is not None:
            x = x * self._embedding_scale
        if self.compiled is not None and changes is None:
            return self.compiled.hidden_states(x, angles, slots, kv, prepared, logit_rows)
        layers = cast("Sequence[DecoderLayer]", self.layers)
        # A projection that an adapter changes, and the head, need the rows themselves.
        whole = changes is not None
        first = layers[0]
        normed = first.attention_norm.rows_for(None if whole else first.qkv, x)
        for index, (layer, cache) in enumerate(zip(layers, kv, strict=True)):
            change = unchanged if changes is None else changes.of_layer(index)
            gathered = layer.attend(normed, angles, slots, cache, attention, prepared, change)
            last = index == len(layers) - 1
            if last and logit_rows is not None:
                # Nothing reads the other rows any more: the last layer has written their KV.
                x, gathered = x[logit_rows], gathered[logit_rows]
                if changes is not None:
                    change = changes.of_layer(index, chosen=True)
            reader = None if whole or layer.experts is not None else layer.gate_up
            normed = layer.mlp_norm.rows_for(reader, x, layer.mix(gathered, change))
            made = layer.feed_forward(normed, change)
            if last:
                break
            following = layers[index + 1]
            reader = None if whole else following.qkv
            normed = following.attention_norm.rows_for(reader, x, made)
        return cast("torch.Tensor", self.norm(x, made))
