"""SmolLM3: Hugging Face 2025."""

from __future__ import annotations

from typing import ClassVar

from coppice.runtime.model.config import LayerSpec, RopeConfig
from coppice.runtime.model.reading.family import Family
from coppice.runtime.model.reading.fields import Fields
from coppice.runtime.model.reading.rotated import no_rope
from coppice.runtime.model.reading.windows import layer_kinds


class SmolLM3(Family):
    """Llama in which every fourth layer rotates nothing (Yang et al. 2025, "RoPE to NoPE")."""

    model_type = "smollm3"
    architecture = "SmolLM3ForCausalLM"
    defaults: ClassVar = {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
    }
    theta = 2000000.0

    def layers(self, fields: Fields) -> tuple[LayerSpec, ...]:
        bias, rotates = fields.switch("attention_bias"), self._rotates(fields)
        window = None
        if fields.switch("use_sliding_window"):
            window = fields.optional_size("sliding_window")
        if fields.get("layer_types") is None:
            kinds = ["full_attention" if each else "sliding_attention" for each in rotates]
        else:
            kinds = list(layer_kinds(fields))
        return tuple(
            LayerSpec(
                qkv_bias=bias,
                output_bias=bias,
                mlp_bias=fields.switch("mlp_bias"),
                sliding_window=window if kind == "sliding_attention" else None,
                rope=int(not rotated),
            )
            for kind, rotated in zip(kinds, rotates, strict=True)
        )

    def ropes(self, fields: Fields, head_dim: int) -> tuple[tuple[RopeConfig, ...], int, int]:
        rope, longest, rotated = self.rope(fields, head_dim)
        return (rope, no_rope(head_dim)), longest, rotated

    def _rotates(self, fields: Fields) -> list[bool]:
        """Whether each layer rotates: ``no_rope_layers`` has 1 for those that do."""
        count, given = fields.size("num_hidden_layers"), fields.get("no_rope_layers")
        if given is None:
            every = fields.size("no_rope_layer_interval")
            return [(index + 1) % every != 0 for index in range(count)]
        if not isinstance(given, list) or len(given) < count or not set(given) <= {0, 1}:
            raise ValueError(
                f"no_rope_layers is {given!r:.80}; it must have {count} entries "
                f"(num_hidden_layers), each 0 or 1"
            )
        return [bool(each) for each in given[:count]]
