"""Rotary position embedding: the frequencies that a model's config asks for, and their angles.

Frequencies and the attention factor of scaled variants come from transformers' own functions, so
that they are the ones its models were evaluated with. ``kernels.interface.rotate`` is the rotation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

#: Variants whose rotation of a token depends on its position alone. `dynamic` and `longrope` are
#: not among them: there a key's rotation depends on how long its sequence has become, so that keys
#: computed for one request would be wrong for another that shares its prefix.
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Frequencies of one model: ``inv_freq`` has ``head_dim / 2`` entries, radians a position.

    ``attention_factor`` multiplies cosine and sine (1.0 but for yarn).
    """

    rope_type: str
    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0


def read_rope_config(hf_config: Any) -> RopeConfig:
    """The frequencies for a transformers config, whose ``rope_parameters`` are standardised.

    Or for any other object that has what of a config is asked for.

    Raises ``ValueError`` that names the variant if it is not one of ``SUPPORTED_ROPE_TYPES``, and
    for a rotation of only a part of each head or one that differs from layer to layer.
    """
    parameters = hf_config.rope_parameters
    if any(isinstance(value, dict) for value in parameters.values()):
        raise ValueError(
            f"rope_parameters is {parameters}; parameters that differ by layer are not supported"
        )
    rope_type = parameters.get("rope_type", "default")
    if rope_type not in SUPPORTED_ROPE_TYPES:
        allowed = ", ".join(SUPPORTED_ROPE_TYPES)
        raise ValueError(f"rope_type is {rope_type!r}; supported are {allowed}")
    partial = parameters.get("partial_rotary_factor")
    if partial not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor is {partial}; only 1.0 is supported")
    theta = parameters.get("rope_theta")
    if not (isinstance(theta, int | float) and theta > 0):
        raise ValueError(f"rope_theta is {theta!r}; it must be a number above 0")
    factor = parameters.get("factor")
    if rope_type != "default" and not (isinstance(factor, int | float) and factor >= 1):
        raise ValueError(f"factor of rope_type {rope_type!r} is {factor!r}; it must be at least 1")
    if rope_type == "default":
        head_dim = getattr(hf_config, "head_dim", None)
        head_dim = head_dim or hf_config.hidden_size // hf_config.num_attention_heads
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        inv_freq, attention_factor = 1.0 / theta**exponents, 1.0
    else:
        # Here, since the import takes a second and most models do without.
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[rope_type](hf_config)
    return RopeConfig(rope_type, tuple(inv_freq.tolist()), float(attention_factor))


class RotaryEmbedding:
    """Cosines and sines for the positions of a step.

    They are computed anew each step and shared by all layers. A table up to the model's length
    would save some ten microseconds a step and cost up to 134 MB (131,072 positions, 128 wide).
    """

    def __init__(self, config: RopeConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self._inv_freq = torch.tensor(config.inv_freq, dtype=torch.float32, device=device)
        self._factor = config.attention_factor
        self._dtype = dtype

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and signed sine for ``rotate``, each ``[T, 1, head_dim]``, from int64 ``[T]``.

        Computed in float32 as transformers does, then cast to the model's type.
        """
        angles = positions.float()[:, None, None] * self._inv_freq
        cos, sin = angles.cos(), angles.sin()
        if self._factor != 1.0:
            cos.mul_(self._factor)
            sin.mul_(self._factor)
        return (
            torch.cat((cos, cos), dim=-1).to(self._dtype),
            torch.cat((-sin, sin), dim=-1).to(self._dtype),
        )
