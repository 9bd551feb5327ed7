"""OLMo 3: OLMo team 2025."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from coppice.runtime.model.config import LayerSpec, RopeConfig
from coppice.runtime.model.families.dense.olmo2 import Olmo2
from coppice.runtime.model.reading.fields import Fields
from coppice.runtime.model.reading.windows import layer_kinds


class Olmo3(Olmo2):
    """OLMo 2 with a window in three layers of four; the others may have another rotation."""

    model_type = "olmo3"
    architecture = "Olmo3ForCausalLM"
    defaults: ClassVar = {**Olmo2.defaults, "sliding_window": 4096}
    theta = 500000.0

    def layers(self, fields: Fields) -> tuple[LayerSpec, ...]:
        window = fields.optional_size("sliding_window")
        specs = super().layers(fields)
        return tuple(
            replace(spec, sliding_window=window, rope=1) if kind == "sliding_attention" else spec
            for spec, kind in zip(specs, layer_kinds(fields, full_every=4), strict=True)
        )

    def ropes(self, fields: Fields, head_dim: int) -> tuple[tuple[RopeConfig, ...], int, int]:
        everywhere, longest, rotated = self.rope(fields, head_dim, kind="full_attention")
        # As in transformers, what old files say of the rotation is not for layers with a window.
        old = ("rope_scaling", "rope_theta")
        plain = {key: value for key, value in fields.raw.items() if key not in old}
        within, _, _ = self.rope(Fields(plain, self.defaults), head_dim, kind="sliding_attention")
        return (everywhere, within), longest, rotated
