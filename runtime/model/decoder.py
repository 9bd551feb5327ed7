"""The decoder-only transformer of all families, for inference.

One implementation, which ``ModelConfig`` describes layer by layer. The tokens of a step, of all its
sequences, are one flat list: only rotary positions, cache slots and the attention plan distinguish
the sequences.

    token_ids [T] -> embed -> x [T, hidden] -> layer 0 -> ... -> layer L-1 -> norm -> logits [R, V]

    layer:   x += out(attend(rope(split(qkv(norm(x))))))        keys and values go to the cache
             x += down(silu(gate) * up),  gate | up = gate_up(norm(x))

Each addition is made by the norm that comes next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import nn

from coppice.kernels.attention.interface import AttentionBackend, LayerCache
from coppice.kernels.cpu.layer import float_products
from coppice.runtime.model.config import LayerSpec, ModelConfig
from coppice.runtime.model.layers import Linear, RMSNorm, SiluMul, frozen
from coppice.runtime.model.rope import RotaryEmbedding

if TYPE_CHECKING:
    from coppice.kernels.cpu.layer.float_panels import PackedFloat


class DecoderLayer(nn.Module):
    """Attention and feed-forward part of one layer; ``Decoder`` normalises and adds."""

    qk_norm: RMSNorm | None

    def __init__(
        self,
        config: ModelConfig,
        spec: LayerSpec,
        *,
        linear: type[Linear],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        self.scale = config.attention_scale
        self.sliding_window = spec.sliding_window
        hidden, inner = config.hidden_size, config.intermediate_size
        query_width = config.num_heads * config.head_dim
        qkv_width = query_width + 2 * config.num_kv_heads * config.head_dim
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        eps = config.rms_norm_eps
        self.attention_norm = RMSNorm(hidden, eps=eps, **place)
        self.qkv = linear(hidden, qkv_width, bias=spec.qkv_bias, **place)
        # Queries and keys lie side by side and are normalised at once, each head by its own row.
        qk_heads = config.num_heads + config.num_kv_heads
        self.qk_norm = (
            RMSNorm(qk_heads, config.head_dim, eps=eps, **place) if spec.qk_norm else None
        )
        self.output = linear(query_width, hidden, bias=spec.output_bias, **place)
        self.mlp_norm = RMSNorm(hidden, eps=eps, **place)
        self.gate_up = linear(hidden, 2 * inner, bias=spec.mlp_bias, **place)
        self.activation = SiluMul(**place)
        self.down = linear(inner, hidden, bias=spec.mlp_bias, **place)

    def attend(
        self,
        normed: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        cache: LayerCache,
        attention: AttentionBackend,
        prepared: Any,
    ) -> torch.Tensor:
        """The heads' results, ``[T, num_heads * head_dim]``; also writes keys and values."""
        heads = self.qkv(normed).view(normed.shape[0], -1, self.head_dim)
        qk_heads = self.num_heads + self.num_kv_heads
        qk, v = heads[:, :qk_heads], heads[:, qk_heads:]
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        q, k = attention.write_rotated(qk, v, *angles, cache, slots)
        gathered, _ = attention.attend(
            q, k, v, cache, prepared, scale=self.scale, sliding_window=self.sliding_window
        )
        return gathered.view(normed.shape[0], -1)

    def feed_forward(self, normed: torch.Tensor) -> torch.Tensor:
        """``down(silu(gate) * up)`` of ``normed [T, hidden]``."""
        down: torch.Tensor = self.down(self.activation(self.gate_up(normed)))
        return down


class CompiledLayers(Protocol):
    """All layers of a decoder as one call, for one attention backend."""

    def hidden_states(
        self,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        kv: Sequence[LayerCache],
        prepared: Any,
        logit_rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """What ``Decoder.hidden_states`` returns, of embedded tokens ``x [T, hidden]``.

        ``angles`` are those of the tokens' positions. ``x`` may be overwritten.
        """


class Decoder(nn.Module):
    """The model. Its weights are empty until ``weights.load_decoder`` has filled them.

    ``linear`` is the class of all projections, and of the language-model head if it can be one;
    ``embedding_dtype`` is the type of the embedding, if not ``dtype``. Tied embeddings are one
    tensor, unless the head has another type than the embedding. Once such a tensor is packed, its
    rows are read from the packed form and ``embedding`` is None.

    ``compiled`` runs the layers if it is given: the runner sets it, once the weights are packed.
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
    ) -> None:
        super().__init__()
        self.config = config
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = frozen(torch.empty(shape, dtype=embedding_dtype or dtype, device=device))
        self.layers = nn.ModuleList(
            DecoderLayer(config, spec, linear=linear, **place) for spec in config.layers
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, **place)
        head = linear if linear.serves_head else Linear
        self.head = head(config.hidden_size, config.vocab_size, bias=False, **place)
        if self.head_is_embedding:
            self.head.weight = self.embedding
        self.rope = RotaryEmbedding(config.rope, **place)
        self.compiled = None
        self._dtype = dtype

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
    ) -> torch.Tensor:
        """Logits, float32 ``[R, vocab_size]``, of the rows in ``logit_rows``.

        The arguments are those of ``hidden_states``.
        """
        hidden = self.hidden_states(
            token_ids, positions, slots, kv, attention, prepared, logit_rows
        )
        return self.logits(hidden)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``[T, hidden]`` in the type of the embedding."""
        if self.embedding is None:
            return float_products.rows_of(cast("PackedFloat", self.head.packed), token_ids)
        return F.embedding(token_ids, self.embedding)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, float32 ``[R, vocab_size]``, of hidden states ``[R, hidden]``."""
        logits: torch.Tensor = self.head(hidden)
        return logits.float()

    def hidden_states(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        kv: Sequence[LayerCache],
        attention: AttentionBackend,
        prepared: Any,
        logit_rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """The input of the head, ``[R, hidden]``, for the rows in ``logit_rows``; None: all rows.

        A step that needs logits of many rows calls this, and makes the logits a few rows at a time.

        ``token_ids``, ``positions`` (in the token's own sequence) and ``slots`` (of its KV,
        page * page_size + slot) are int64 ``[T]``; ``logit_rows`` is int64 ``[R]``, and R may be 0.
        ``kv`` has the cache of each layer; ``prepared`` is what ``attention.prepare`` returned for
        this step's plan. Without ``torch.inference_mode()`` it is slower, not wrong.
        """
        angles = self.rope.angles(positions)
        x = self._embed(token_ids).to(self._dtype)
        if self.compiled is not None:
            return self.compiled.hidden_states(x, angles, slots, kv, prepared, logit_rows)
        layers = cast("Sequence[DecoderLayer]", self.layers)
        normed: torch.Tensor = layers[0].attention_norm(x)
        for index, (layer, cache) in enumerate(zip(layers, kv, strict=True)):
            gathered = layer.attend(normed, angles, slots, cache, attention, prepared)
            last = index == len(layers) - 1
            if last and logit_rows is not None:
                # Nothing reads the other rows any more: the last layer has written their KV.
                x, gathered = x[logit_rows], gathered[logit_rows]
            normed = layer.mlp_norm(x, layer.output(gathered))
            following = self.norm if last else layers[index + 1].attention_norm
            normed = following(x, layer.feed_forward(normed))
        return normed
