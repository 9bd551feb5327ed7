"""Rotary position embedding: the frequencies that a model's config asks for, and their angles.

Su et al. 2021. The rotation itself is ``kernels.attention.interface.rotate``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from coppice.runtime.model.config import RopeConfig
from coppice.runtime.model.reading.rotated import rotated_width


def frequencies(config: RopeConfig) -> tuple[float, ...]:
    """Radians a position of ``head_dim / 2`` pairs of elements, to the bit transformers'.

    Elements that are not rotated have frequency 0, see ``reading.rotated.head_order``.
    """
    if config.rope_type == "none":
        return (0.0,) * (config.head_dim // 2)
    parameters, theta = config.parameters, config.parameters["rope_theta"]
    width = rotated_width(parameters, config.head_dim)
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    inv_freq = 1.0 / theta**exponents
    if config.rope_type == "linear":
        inv_freq /= parameters["factor"]
    elif config.rope_type == "llama3":
        inv_freq = _llama3(inv_freq, parameters)
    elif config.rope_type == "yarn":
        inv_freq = _yarn(theta**exponents, parameters, width)
    elif config.rope_type == "longrope":
        inv_freq = 1.0 / (torch.tensor(parameters["short_factor"]) * theta**exponents)
    still = (0.0,) * ((config.head_dim - width) // 2)
    return (*inv_freq.tolist(), *still)


def attention_factor(config: RopeConfig) -> float:
    """What multiplies cosine and sine of rotated elements: 1.0 except for yarn and longrope."""
    if config.rope_type == "yarn":
        return _yarn_attention_factor(config.parameters)
    if config.rope_type == "longrope":
        return _longrope_attention_factor(config.parameters)
    return 1.0


def _llama3(inv_freq: torch.Tensor, parameters: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1: long waves are stretched, short ones kept, and those between are a mixture."""
    factor = parameters["factor"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    original = parameters["original_max_position_embeddings"]
    length = 2 * math.pi / inv_freq  # of a wave, in positions
    longest_kept, shortest_stretched = original / high, original / low
    stretched = torch.where(length > shortest_stretched, inv_freq / factor, inv_freq)
    kept = (original / length - low) / (high - low)
    between = (1 - kept) * stretched / factor + kept * stretched
    is_between = (length >= longest_kept) & (length <= shortest_stretched)
    return torch.where(is_between, between, stretched)


def _yarn(wave_lengths: torch.Tensor, parameters: Mapping[str, Any], head_dim: int) -> torch.Tensor:
    """Peng et al. 2023: from stretched to kept on a ramp over the dimensions of a head."""
    theta, factor = parameters["rope_theta"], parameters["factor"]
    original = parameters["original_max_position_embeddings"]

    def dimension(rotations: float) -> float:
        """The dimension whose wave turns ``rotations`` times within the original length."""
        turns = math.log(original / (rotations * 2 * math.pi))
        return (head_dim * turns) / (2 * math.log(theta))

    low = dimension(parameters.get("beta_fast") or 32)
    high = dimension(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (factor * wave_lengths) * (1 - kept) + 1.0 / wave_lengths * kept


def _yarn_attention_factor(parameters: Mapping[str, Any]) -> float:
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    factor = parameters["factor"]
    scale, scale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return magnitude(scale) / magnitude(scale_all) if scale and scale_all else magnitude(1)


def _longrope_attention_factor(parameters: Mapping[str, Any]) -> float:
    """Ding et al. 2024 (LongRoPE)."""
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    original, factor = parameters["original_max_position_embeddings"], parameters["factor"]
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


class RotaryEmbedding:
    """Cosines and sines for the positions of a step.

    They are computed in each step and shared by all layers. A table up to the model's length would
    save about ten microseconds a step and take up to 134 MB (131,072 positions, 128 wide).
    """

    def __init__(self, config: RopeConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self._inv_freq = torch.tensor(frequencies(config), dtype=torch.float32, device=device)
        self._factor: torch.Tensor | None = None
        factor = attention_factor(config)
        if factor != 1.0:  # of what is rotated
            self._factor = torch.where(self._inv_freq > 0, factor, 1.0)
        self._dtype = dtype

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and signed sine for ``rotate``, each ``[T, 1, head_dim]``, from int64 ``[T]``.

        Computed in float32 as transformers does, then cast to the model's type.
        """
        angles = positions.float()[:, None, None] * self._inv_freq
        cos, sin = angles.cos(), angles.sin()
        if self._factor is not None:
            cos.mul_(self._factor)
            sin.mul_(self._factor)
        return (
            torch.cat((cos, cos), dim=-1).to(self._dtype),
            torch.cat((-sin, sin), dim=-1).to(self._dtype),
        )
