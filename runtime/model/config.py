"""What the engine needs to know of a model, as data: its sizes, and the recipe of each layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from coppice.runtime.model.rope import RopeConfig

#: The types of weights that are supported, by their names in configs and options.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer has beside its norms, its attention and its feed-forward part.

    Attributes:
        qkv_bias, output_bias, mlp_bias: whether the projections to queries, keys and values, the
            attention's output projection and those of the feed-forward part have biases.
        qk_norm: whether queries and keys are normalised head by head before they are rotated.
        sliding_window: tokens that a token attends to, itself included; None for all.
    """

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None


@dataclass(frozen=True, slots=True)
class TensorNames:
    """What a checkpoint calls its tensors, without the ending ``.weight`` or ``.bias``.

    The defaults are the names that most families share. ``layer`` stands before all names of a
    layer; a projection that is stored in parts has the names of its parts, in order.
    """

    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers.{index}."
    attention_norm: str = "input_layernorm"
    qkv: tuple[str, str, str] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qk_norm: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    output: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, str] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes, constants and layers of a decoder-only transformer.

    Attributes:
        architecture: the name of transformers' class for the model.
        attention_scale: the factor of queries times keys, before the softmax.
        max_position: the longest sequence, in tokens.
        layers: the recipe of each layer, the first one first.
        names: what the checkpoint calls its tensors.
        eos_token_ids: tokens that end a sequence; may be empty.
        torch_dtype: the type that the config declares for the checkpoint.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    attention_scale: float
    rope: RopeConfig
    max_position: int
    tie_word_embeddings: bool
    layers: tuple[LayerSpec, ...]
    names: TensorNames
    eos_token_ids: tuple[int, ...]
    torch_dtype: torch.dtype

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.layers)

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer."""
        return tuple(layer.sliding_window for layer in self.layers)
