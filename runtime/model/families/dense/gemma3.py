"""Gemma 3, its models of text: Gemma team 2025."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from coppice.runtime.model.config import LayerSpec, RopeConfig
from coppice.runtime.model.families.dense.gemma2 import Gemma2
from coppice.runtime.model.reading.fields import Fields
from coppice.runtime.model.reading.windows import layer_kinds


class Gemma3(Gemma2):
    """Gemma 2 with norms on queries and keys, and another rotation where layers have a window."""

    model_type = "gemma3_text"
    architecture = "Gemma3ForCausalLM"
    defaults: ClassVar = {
        **Gemma2.defaults,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10000.0,
    }
    theta = 1000000.0

    def kinds(self, fields: Fields) -> tuple[str, ...]:
        return layer_kinds(fields, full_every=fields.size("sliding_window_pattern"))

    def layers(self, fields: Fields) -> tuple[LayerSpec, ...]:
        specs = super().layers(fields)
        return tuple(
            replace(spec, qk_norm="head", rope=int(kind == "sliding_attention"))
            for spec, kind in zip(specs, self.kinds(fields), strict=True)
        )

    def ropes(self, fields: Fields, head_dim: int) -> tuple[tuple[RopeConfig, ...], int, int]:
        everywhere, longest, rotated = self.rope(fields, head_dim, kind="full_attention")
        local = {key: value for key, value in fields.raw.items() if not key.startswith("rope_")}
        local["rope_theta"] = fields.number("rope_local_base_freq")
        given = fields.raw.get("rope_parameters")
        if isinstance(given, dict) and not fields.raw.get("rope_scaling"):
            local["rope_parameters"] = given
        within, _, _ = self.rope(Fields(local, self.defaults), head_dim, kind="sliding_attention")
        return (everywhere, within), longest, rotated
