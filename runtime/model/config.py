"""What the engine needs to know of a model, as data: its sizes, and the recipe of each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # importing it takes seconds, which commands that compute nothing don't need
    import torch

#: The types of weights that are supported, as configs and options name them.
DTYPE_NAMES = ("float32", "bfloat16", "float16")

#: Where a layer normalises: what its two parts read (Llama), what they return (OLMo 2), or both
#: (Gemma 2).
Norms = Literal["before", "after", "both"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One rotation of heads of ``head_dim`` elements, see ``model.rope``.

    ``parameters`` has what the variant needs, checked, under the names of a `config.json`. Of the
    variant "none" nothing is rotated.
    """

    rope_type: str
    head_dim: int
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a layer: ``chosen`` of ``count`` compute for a token, each ``inner`` wide.

    ``normalised``: whether the weights of a token's experts sum to 1; else they are the experts'
    shares of the softmax over all. ``biased``: whether router and experts have biases. ``gate``:
    None for SiLU; else alpha and limit of a bounded one, see ``model.experts.BoundedGate``.
    """

    count: int
    chosen: int
    inner: int
    normalised: bool
    biased: bool = False
    gate: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.chosen > self.count:
            raise ValueError(
                f"num_experts_per_tok is {self.chosen}; it must be at most the number of experts "
                f"(num_local_experts, num_experts), {self.count}"
            )


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer has beside its attention and its feed-forward part.

    Attributes:
        qkv_bias, output_bias, mlp_bias: whether the projections to queries, keys and values, the
            attention's output projection and those of the feed-forward part have biases.
        norms: where the layer normalises.
        qk_norm: whether queries and keys are normalised before they are rotated: each head by
            itself, or all heads of a token together; None: not at all.
        sliding_window: tokens that a token attends to, itself included; None for all.
        rope: place of its rotation in ``ModelConfig.ropes``.
        sinks: whether each head has a sink: a number that takes part in its softmax as the product
            of a key would, with a value of zeros (Xiao et al. 2023).
        experts: those of its feed-forward part; None: it has only one, for all tokens.
    """

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    norms: Norms = "before"
    qk_norm: Literal["head", "all"] | None = None
    sliding_window: int | None = None
    rope: int = 0
    sinks: bool = False
    experts: Experts | None = None


@dataclass(frozen=True, slots=True)
class TensorNames:
    """What a checkpoint calls its tensors, without the ending ``.weight`` or ``.bias``.

    The defaults are the names that most families share. ``layer`` stands before all names of a
    layer. A projection that is stored in parts has the names of its parts, in order; one name is
    that of the whole. Of norms those count that a layer has. ``expert`` stands before all
    names of an expert; ``experts`` are the names of two tensors that hold gate and up, and down, of
    all experts, if they are stored so.
    """

    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    score: str = "score"
    layer: str = "model.layers.{index}."
    attention_norm: str = "input_layernorm"
    attention_post_norm: str = "post_attention_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qk_norm: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    output: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm"
    mlp_post_norm: str = "post_feedforward_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    expert: str = "mlp.experts.{index}."
    expert_gate_up: tuple[str, str] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
    experts: tuple[str, str] | None = None
    sinks: str = "self_attn.sinks"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes, constants and layers of a decoder-only transformer.

    Attributes:
        architecture: the name of transformers' class for the model.
        attention_scale: the factor of queries times keys, before the softmax.
        attention_softcap: a bound c of these products: each becomes c * tanh(x / c); None: none.
        activation: of the feed-forward part's gate; ``gelu_tanh`` is GELU's approximation by tanh.
        ropes: the rotations that layers choose from.
        head_order: element i of a head of queries or keys, as the decoder computes it, is element
            ``head_order[i]`` of the checkpoint's; None: in the checkpoint's order. Products of
            queries and keys do not depend on it; rotations then pair the halves of a head.
        norm_offset: added to the weights of all norms.
        embedding_scale, residual_scale: factors of embedded tokens, and of what the parts of a
            layer add.
        stored: the method by which the checkpoint's experts are packed; None: they are plain.
        logit_scale, logit_softcap: the factor of logits, and the bound of the products.
        max_position: the longest sequence, in tokens.
        layers: the recipe of each layer, the first one first.
        names: what the checkpoint calls its tensors.
        eos_token_ids: tokens that end a sequence; may be empty.
        dtype: the type that the config declares for the checkpoint, one of ``DTYPE_NAMES``.
        head: what the last states are for: "text", the "labels" of a classifier, or "none" for a
            bare model. Without a head for text, logits of tokens mean nothing.
        num_labels: of a classifier.
        implementation: whose code computes it: ours, or transformers' (which reads neither
            constants nor names here).
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
    ropes: tuple[RopeConfig, ...]
    max_position: int
    tie_word_embeddings: bool
    layers: tuple[LayerSpec, ...]
    names: TensorNames
    eos_token_ids: tuple[int, ...]
    dtype: str
    activation: Literal["silu", "gelu_tanh"] = "silu"
    head_order: tuple[int, ...] | None = None
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    attention_softcap: float | None = None
    stored: str | None = None
    head: Literal["text", "labels", "none"] = "text"
    num_labels: int = 0
    implementation: Literal["coppice", "transformers"] = "coppice"

    @property
    def torch_dtype(self) -> torch.dtype:
        """``dtype`` as torch's type."""
        import torch

        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.layers)

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer."""
        return tuple(layer.sliding_window for layer in self.layers)

    @property
    def has_experts(self) -> bool:
        """Whether any layer has experts."""
        return any(layer.experts is not None for layer in self.layers)

    @property
    def fits_one_call(self) -> bool:
        """Whether a CPU can compute all layers in one compiled call.

        It takes attention of at most two kinds, and experts of one.
        """
        experts = {layer.experts for layer in self.layers} - {None}
        return len(set(self.sliding_windows)) <= 2 and len(experts) <= 1
