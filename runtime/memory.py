"""How large the KV cache may be, with the arithmetic that led there."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from coppice.runtime.config import EngineConfig
from coppice.runtime.model_config import ModelConfig


def available_memory() -> int:
    """Bytes of main memory that can still be had, within the limit of the control group."""
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            limit = Path(limit_file).read_text().strip()
            usage = int(Path(usage_file).read_text())
        except (OSError, ValueError):
            continue
        if limit != "max":
            available = min(available, int(limit) - usage)
    return max(available, 0)


def page_bytes(model: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page: keys and values of `page_size` tokens in every layer."""
    per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * dtype.itemsize
    return per_token * page_size


def plan_cache(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> tuple[int, str]:
    """The number of pages of the KV cache, and the arithmetic in a sentence or two.

    Raises ValueError if not even one sequence of `max_model_len` tokens fits.
    """
    size = config.page_size
    each = page_bytes(model, size, dtype)
    arithmetic = (
        f"a page of {size} tokens takes 2 (K, V) x {model.num_layers} layers x {size} tokens x "
        f"{model.num_kv_heads} heads x {model.head_dim} x {dtype.itemsize} bytes = {_bytes(each)}"
    )
    if config.kv_cache_tokens is not None:
        pages = config.kv_cache_tokens // size
        source = f"kv_cache_tokens={config.kv_cache_tokens} gives"
    else:
        available = available_memory()
        pages = int(available * config.kv_cache_memory_fraction) // each
        source = (
            f"{config.kv_cache_memory_fraction:g} of the {_bytes(available)} available "
            f"(kv_cache_memory_fraction) gives"
        )
    memory = (
        f"KV cache: {arithmetic}; {source} {pages:,} pages = {pages * size:,} tokens = "
        f"{_bytes(pages * each)}"
    )
    if pages * size < 2:
        raise ValueError(f"{memory}; room for at least 2 tokens is needed")
    if config.max_model_len is not None and config.max_model_len > pages * size:
        raise ValueError(
            f"max_model_len={config.max_model_len} tokens do not fit: {memory}. Give a larger "
            "kv_cache_tokens or kv_cache_memory_fraction, or a max_model_len of at most "
            f"{pages * size}"
        )
    return pages, memory


def _bytes(count: int) -> str:
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    raise AssertionError


def zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of zeros, of which main memory is taken only for what is written to it.

    `torch.zeros` writes all of it at once; numpy asks the system for zeroed memory instead, so an
    idle cache costs neither memory nor the time to fill it.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)
