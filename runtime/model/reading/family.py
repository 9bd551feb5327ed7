"""What every family of models has: the way from a `config.json` to a ``ModelConfig``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from coppice.runtime.model.config import LayerSpec, ModelConfig, RopeConfig, TensorNames
from coppice.runtime.model.reading.fields import Fields
from coppice.runtime.model.reading.rotated import head_order, rotated_width
from coppice.runtime.model.reading.rotation import (
    check_long,
    extended_length,
    rope_parameters,
)

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
        theta, rotated_share: the base of the rotation, and the share of a head's elements that is
            rotated, where a `config.json` leaves them out; None: its models rotate whole heads.
        default_rope: the parameters of the rotation where a `config.json` has none.
        interleaved: whether neighbours are rotated together, instead of halves.
        stored_quantized: methods of quantization in which its checkpoints are stored and read.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    defaults: ClassVar[Mapping[str, Any]]
    names: ClassVar[TensorNames] = TensorNames()
    theta: ClassVar[float] = 10000.0
    rotated_share: ClassVar[float | None] = None
    default_rope: ClassVar[Mapping[str, Any] | None] = None
    interleaved: ClassVar[bool] = False
    stored_quantized: ClassVar[tuple[str, ...]] = ()

    def read(self, raw: Mapping[str, Any], *, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """The model that ``raw``, the content of a `config.json`, describes.

        Raises ``ValueError``, naming the field, its value and what is allowed, for what is
        malformed or not supported.
        """
        fields = Fields(raw, {**_DEFAULTS, **self.defaults})
        if raw.get("is_causal") is False or raw.get("use_bidirectional_attention"):
            name = "is_causal" if raw.get("is_causal") is False else "use_bidirectional_attention"
            raise ValueError(
                f"{name} is {raw[name]}; supported are models whose tokens attend to earlier ones "
                f"alone, since the keys of a prefix must not depend on what comes after it"
            )
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
        ropes, longest, rotated = self.ropes(fields, head_dim)
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
            ropes=ropes,
            max_position=longest,
            tie_word_embeddings=fields.switch("tie_word_embeddings"),
            layers=self.layers(fields),
            names=self.names,
            eos_token_ids=eos_token_ids,
            dtype=fields.dtype(),
            head_order=head_order(rotated, head_dim, interleaved=self.interleaved),
            stored=(fields.raw.get("quantization_config") or {}).get("quant_method"),
            **self.more(fields),
        )

    def ropes(self, fields: Fields, head_dim: int) -> tuple[tuple[RopeConfig, ...], int, int]:
        """The rotations of layers, the longest sequence in tokens, and the elements rotated."""
        rope, longest, rotated = self.rope(fields, head_dim)
        return (rope,), longest, rotated

    def rope(
        self, fields: Fields, head_dim: int, *, kind: str | None = None, theta: float | None = None
    ) -> tuple[RopeConfig, int, int]:
        """One rotation, of a kind of layer if they differ, and the rest that ``ropes`` returns."""
        positions, raw = fields.size("max_position_embeddings"), fields.raw
        if self.default_rope is not None and not (
            raw.get("rope_scaling") or raw.get("rope_parameters")
        ):
            raw = {**raw, "rope_scaling": dict(self.default_rope)}
        parameters = rope_parameters(
            raw,
            positions,
            default_theta=self.theta if theta is None else theta,
            default_partial=self.rotated_share,
            kind=kind,
        )
        rotated = rotated_width(parameters, head_dim)
        if rotated % 2 or not rotated:
            raise ValueError(
                f"partial_rotary_factor is {parameters['partial_rotary_factor']}; of a head_dim of "
                f"{head_dim} (hidden_size / num_attention_heads if it is left out) it must leave "
                f"an even number of elements, at least 2, to be rotated"
            )
        check_long(parameters, positions, rotated)
        config = RopeConfig(parameters["rope_type"], head_dim, parameters)
        return config, extended_length(parameters, positions), rotated

    def more(self, fields: Fields) -> dict[str, Any]:
        """Fields of ``ModelConfig`` that few families have, by name."""
        return {}

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
