"""A plan as JSON. Sizes are in bytes, rates in tokens a second."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from coppice.runtime.planning.formats import FORMATS, SEEN_ON
from coppice.runtime.planning.plan import Plan


def encode_plan(plan: Plan, name: str) -> dict[str, Any]:
    """The plan's figures, by name."""
    options = plan.options
    formats = [{"weight_bytes": plan.cpu_formats[each.name], **asdict(each)} for each in FORMATS]
    return {
        "model": name,
        "architecture": plan.model.architecture,
        "dtype": plan.dtype,
        "quantization": options.quantization,
        "kv_cache_dtype": options.kv_cache_dtype,
        "tensor_parallel_size": options.tensor_parallel_size,
        "page_size": options.page_size,
        "users": options.users,
        "context": plan.context,
        "shared": options.shared,
        "max_model_len": plan.longest,
        "device_memory_bytes": options.device_memory,
        "kv_cache_memory_fraction": options.fraction,
        "memory_bandwidth_bytes_a_second": options.memory_bandwidth,
        "product_rate_flop_a_second": options.product_rate,
        "max_num_seqs": None if plan.step is None else plan.step.seqs,
        "max_num_batched_tokens": None if plan.step is None else plan.step.tokens,
        "parameters": plan.numbers.total,
        "active_parameters": plan.numbers.used,
        "stored_as": plan.stored.name,
        "stored_bytes": plan.stored.bytes,
        "weight_bytes": plan.weights.total,
        "weight_bytes_on_cpu": (plan.cpu_weights or plan.weights).total,
        "cpu_formats": {"costs_seen_on": SEEN_ON, "formats": formats},
        "weight_bytes_read_a_token": plan.weights.read,
        "kv_bytes_a_token": plan.token_bytes,
        "page_bytes": plan.page_bytes,
        "draft_model_weight_bytes": 0 if plan.draft_weights is None else plan.draft_weights.total,
        "draft_model_kv_bytes_a_token": plan.draft_token_bytes,
        "kv_cache_bytes": plan.cache_bytes,
        "pages": plan.pages,
        "reserved": asdict(plan.reserved),
        "paged": asdict(plan.paged),
        "paged_shared": asdict(plan.shared),
        "windows": list(plan.model.sliding_windows),
        "window_bytes_kept": plan.window_bytes,
        "window_pages_kept": plan.window_bytes / plan.page_bytes,
        "kv_bytes_read_a_step": plan.context * plan.token_bytes - plan.window_bytes,
        "decode_tokens_a_second_one_sequence": plan.alone,
        "decode_tokens_a_second_all_users": plan.together,
    }
