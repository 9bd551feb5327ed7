"""The attention backend of a model, and the type in which pages keep keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from coppice.kernels.attention.interface import AttentionBackend, AttentionCase
from coppice.kernels.backends import select_backend
from coppice.runtime.config import EngineConfig
from coppice.runtime.model.config import ModelConfig

_CACHE_TYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class ChosenAttention:
    """A backend, the type of its pages, and whether numbers of this type need scales."""

    backend: AttentionBackend
    cache_dtype: torch.dtype
    scaled: bool


def choose_attention(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    cache_dtype: torch.dtype,
) -> ChosenAttention:
    """The backend that the options, the model, its type and the device call for.

    ``cache_dtype`` is that of ``kv_cache_dtype='auto'``.

    Raises ValueError that names the option that does not fit.
    """
    cache_dtype = _CACHE_TYPES.get(config.kv_cache_dtype, cache_dtype)
    case = AttentionCase(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        page_size=config.page_size,
        dtype=dtype,
        cache_dtype=cache_dtype,
        scale=model.attention_scale,
        sliding_windows=tuple(dict.fromkeys(model.sliding_windows)),
    )
    backend = select_backend(
        config.attention_backend,
        device,
        deterministic=config.deterministic,
        case=case,
        flashinfer_kernels=config.flashinfer_kernels,
    )
    if dtype not in backend.dtypes:
        raise ValueError(_wrong_dtype(config, backend, dtype, device))
    scaled = cache_dtype in backend.scaled_dtypes
    rounded = cache_dtype in backend.rounded_dtypes and dtype == torch.float32
    if not (cache_dtype == dtype or scaled or rounded):
        raise ValueError(
            f"kv_cache_dtype is {config.kv_cache_dtype!r}; with the {backend.name} "
            f"attention backend and dtype {_name(dtype)} on this device it must be "
            f"{_cache_types(backend, dtype)}"
        )
    return ChosenAttention(backend, cache_dtype, scaled)


def _wrong_dtype(
    config: EngineConfig, backend: AttentionBackend, dtype: torch.dtype, device: torch.device
) -> str:
    """What is wrong with a type that the attention backend does not have."""
    allowed = ["'auto'", *(repr(_name(each)) for each in backend.dtypes)]
    beside = f"the {backend.name} attention backend"
    if device.type == "cpu" and torch.bfloat16 not in backend.dtypes:
        # There it is a type of products alone, which these options choose otherwise.
        if config.quantization is not None:
            beside = f"quantization {config.quantization!r}"
        elif config.deterministic:
            beside = "deterministic True"
        else:
            allowed.append("'bfloat16'")
    return (
        f"dtype is {_name(dtype)!r}; with {beside} on this device it must be {' or '.join(allowed)}"
    )


def _cache_types(backend: AttentionBackend, dtype: torch.dtype) -> str:
    """The values of `kv_cache_dtype` that the attention backend has beside this type."""
    kept = {dtype, *backend.scaled_dtypes}
    if dtype == torch.float32:
        kept.update(backend.rounded_dtypes)
    names = ["'auto'", *(repr(name) for name, each in _CACHE_TYPES.items() if each in kept)]
    return " or ".join(names)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
