"""What every family of models has: the way from a `config.json` to a ``ModelConfig``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from coppice.runtime.model.config import LayerSpec, ModelConfig, TensorNames
from coppice.runtime.model.families.fields import Fields
from coppice.runtime.model.families.rotation import extended_length, rope_parameters
from coppice.runtime.model.rope import rope_config

_DEFAULTS: Mapping[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": None,
    "head_dim": None,
    "sliding_window": None,
}


class Family(ABC):
    """A family of models: one subclass each, which overrides what differs from the others.

    Class attributes:
        model_type, architecture: what a `config.json` calls it, and transformers' class.
        defaults: what transformers takes for the fields that a `config.json` leaves out.
        names: what its checkpoints call their tensors.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    defaults: ClassVar[Mapping[str, Any]]
    names: ClassVar[TensorNames] = TensorNames()

    def read(self, raw: Mapping[str, Any], *, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """The model that ``raw``, the content of a `config.json`, describes.

        Raises ``ValueError``, naming the field, its value and what is allowed, for what is
        malformed or not supported.
        """
        fields = Fields(raw, {**_DEFAULTS, **self.defaults})
        self.check(fields)
        num_heads = fields.size("num_attention_heads")
        num_kv_heads = fields.optional_size("num_key_value_heads") or num_heads
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_attention_heads is {num_heads}; it must be a multiple of "
                f"num_key_value_heads, {num_kv_heads}"
            )
        hidden_size = fields.size("hidden_size")
        head_dim = fields.optional_size("head_dim")
        if head_dim is None:
            head_dim = hidden_size // num_heads
        if head_dim % 2 or not head_dim:
            derived = "" if fields.get("head_dim") else " (hidden_size / num_attention_heads)"
            raise ValueError(f"head_dim{derived} is {head_dim}; it must be even and above 0")
        positions = fields.size("max_position_embeddings")
        rope = rope_parameters(raw, positions)
        layers = self.layers(fields)
        return ModelConfig(
            architecture=self.architecture,
            vocab_size=fields.size("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.size("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=fields.number("rms_norm_eps"),
            attention_scale=self.attention_scale(fields, head_dim),
            rope=rope_config(rope, head_dim),
            max_position=extended_length(rope, positions),
            tie_word_embeddings=fields.switch("tie_word_embeddings"),
            layers=layers,
            names=self.names,
            eos_token_ids=eos_token_ids,
            torch_dtype=fields.dtype(),
        )

    def check(self, fields: Fields) -> None:
        """Refuses what the family's models do not have."""
        if fields.get("hidden_act") != "silu":
            raise ValueError(f"hidden_act is {fields.get('hidden_act')!r}; supported is 'silu'")
        if fields.get("per_layer_config"):
            raise ValueError("per_layer_config: layers of different sizes are not supported")

    def attention_scale(self, fields: Fields, head_dim: int) -> float:
        """The factor of queries times keys: 1 / sqrt(head_dim) (Vaswani et al. 2017)."""
        return head_dim**-0.5

    @abstractmethod
    def layers(self, fields: Fields) -> tuple[LayerSpec, ...]:
        """The recipe of each layer, the first one first."""
