"""The size of the KV cache, with the arithmetic that leads to it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from coppice.kernels.schedule.items import DETERMINISTIC_SPLIT
from coppice.kernels.triton.plans import fixed_entries
from coppice.runtime.config import CPU_FRACTION, GPU_FRACTION, EngineConfig
from coppice.runtime.model.config import ModelConfig
from coppice.runtime.model.parallel.group import ALONE, RankGroup
from coppice.runtime.planning.cache import model_token_bytes, window_saving
from coppice.runtime.planning.steps import BYTES_A_LOGIT, token_bytes
from coppice.runtime.runner.graphs import mixed_sizes
from coppice.runtime.sampling.prompt_scores import SLICE_ROWS
from coppice.runtime.startup.room import (
    TooLittleMemory,
    available_memory,
    check_room,
    readable,
    room,
)

# An estimate of the driver's memory for CUDA graphs: their kernels' arguments.
_GRAPH_BYTES = 256 * 2**20


class Beside(NamedTuple):
    """What a draft model takes beside the weights: bytes of a page of its cache, and of a step."""

    page: int = 0
    step: int = 0


NOTHING_BESIDE = Beside()


def page_bytes(model: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page: keys and values of `page_size` tokens in every layer."""
    return model_token_bytes(model, dtype.itemsize) * page_size


def step_bytes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """An upper estimate of the bytes that a step takes beside weights and KV cache.

    For each token it counts the activations of a layer that exist at the same time, for each
    sequence the logits.
    """
    partials = 2
    if config.deterministic:
        partials = -(-(config.max_model_len or model.max_position) // DETERMINISTIC_SPLIT)
    token = token_bytes(
        model, dtype.itemsize, partials=partials, quantized=config.quantization is not None
    )
    if config.deterministic and config.tensor_parallel_size > 2:  # the parts of all ranks
        token += config.tensor_parallel_size * model.hidden_size * dtype.itemsize
    logits = (config.most_seqs + SLICE_ROWS) * model.vocab_size * BYTES_A_LOGIT
    graphs = 0
    if not config.enforce_eager:
        seqs, tokens = config.most_seqs, config.most_tokens
        rows = max(config.cuda_graph_sizes or (seqs, *mixed_sizes(seqs, tokens)))
        kept = rows * token + fixed_entries(rows) * model.num_heads * (model.head_dim + 1) * 4
        # Logits of all graphs have one place; their product is in the pool.
        head = min(rows, seqs) * model.vocab_size * (4 + dtype.itemsize)
        graphs = 2 * kept + head + _GRAPH_BYTES  # a pool is not filled without gaps
    return config.most_tokens * token + logits + graphs


def plan_cache(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    cache_dtype: torch.dtype | None = None,
    group: RankGroup = ALONE,
    beside: Beside = NOTHING_BESIDE,
) -> tuple[int, str]:
    """The number of pages of the KV cache, and the arithmetic in a sentence or two.

    `dtype` is that of the weights; `cache_dtype` that of the cache, None for the same. With a
    `group`, `model` is this rank's part, and the number the least of all ranks'. `beside` is what
    a draft model takes, whose cache has as many pages. Raises
    TooLittleMemory, a ValueError, if not even one sequence of `max_model_len` tokens fits, or if
    there is no room for `kv_cache_tokens`.
    """
    size = config.page_size
    stored = cache_dtype or dtype
    each = page_bytes(model, size, stored)
    arithmetic = (
        f"a page of {size} tokens takes 2 (K, V) x {model.num_layers} layers x {size} tokens x "
        f"{model.num_kv_heads} heads x {model.head_dim} x {stored.itemsize} bytes = "
        f"{readable(each)}"
    )
    if beside.page:
        each += beside.page
        arithmetic += f", and one of the draft model {readable(beside.page)}"
    on_gpu = device.type == "cuda"
    available = 0
    group.least(0)  # from here on all have their weights
    if on_gpu or config.kv_cache_tokens is None:
        available = available_memory(device) // group.local_size
    left = f"the {readable(available)} available"
    if group.local_size > 1:
        left += f" to each of {group.local_size} ranks"
    if on_gpu:
        step = step_bytes(config, model, dtype) + beside.step
        available = max(available - step, 0)
        left += f" on the GPU, less {readable(step)} for a step,"
    if config.kv_cache_tokens is not None:
        pages = config.kv_cache_tokens // size
        source = f"kv_cache_tokens={config.kv_cache_tokens} gives"
    else:
        fraction = config.kv_cache_memory_fraction or (GPU_FRACTION if on_gpu else CPU_FRACTION)
        pages = int(available * fraction) // each
        source = f"{fraction:g} of {left} (kv_cache_memory_fraction) gives"
    memory = (
        f"KV cache: {arithmetic}; {source} {pages:,} pages = {pages * size:,} tokens = "
        f"{readable(pages * each)}"
    )
    longest = max(1, min(config.max_model_len or model.max_position, pages * size))
    saving = window_saving(model.sliding_windows, longest)
    if on_gpu and pages * each > available:
        raise TooLittleMemory(
            f"kv_cache_tokens={config.kv_cache_tokens} does not fit: {memory}, of {left} "
            f"{readable(available)} remain: {readable(pages * each - available)} are missing. Give "
            "a smaller one, or a smaller max_num_batched_tokens"
        )
    if config.kv_cache_tokens is not None and not on_gpu:
        check_room(
            f"the {config.kv_cache_tokens:,} tokens of kv_cache_tokens",
            pages * each * group.local_size,
            device,
            "Give a kv_cache_tokens of at most "
            f"{room(device) // (each * group.local_size) * size:,}",
        )
    least = -(-max(2, config.max_model_len or 2) // size)
    if pages < least:
        missing = f"{readable((least - pages) * each)} are missing"
        if config.max_model_len is None:
            raise TooLittleMemory(f"{memory}; room for at least 2 tokens is needed: {missing}")
        raise TooLittleMemory(
            f"max_model_len={config.max_model_len} tokens do not fit: {memory}: {missing}. Give a "
            "larger kv_cache_tokens or kv_cache_memory_fraction, or a max_model_len of at most "
            f"{pages * size}"
        )
    least = group.least(pages)
    if least < pages:
        memory += f"; all ranks have as many as the one with the fewest, {least:,} pages"
    return least, f"{memory}; {saving}" if saving else memory
