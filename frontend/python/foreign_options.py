"""Options of vLLM and SGLang, and what each of them is here: one table for commands and Python.

An option of another server is either one of ours under another name, or asks for what holds here
anyway, or has no counterpart; then the answer says what to do instead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, TypeAlias


class Renamed(NamedTuple):
    """One of our options, with the same values."""

    ours: str


class Reversed(NamedTuple):
    """A switch that turns one of our options off."""

    ours: str


class Granted(NamedTuple):
    """Without effect for these values, since that is so here in any case; refused for others.

    Those of a switch are "True" and "False".
    """

    why: str
    values: tuple[str, ...] = ("True",)

    @property
    def is_switch(self) -> bool:
        """Whether the command line's option takes no value."""
        return set(self.values) <= {"True", "False"}


class Missing(NamedTuple):
    """There is no such option; what to do instead."""

    instead: str


Foreign: TypeAlias = Renamed | Reversed | Granted | Missing

_ONE_DEVICE = (
    "tensor_parallel_size divides a model among devices; for more requests, coppice serve starts "
    "several engines behind one address (see replicas in docs/scale.md)"
)
_CACHE_SIZE = (
    "use kv_cache_memory_fraction, the KV cache's part of the memory that is free when the weights "
    "are loaded (0.9 by default on a GPU, 0.4 on a CPU), or kv_cache_tokens, its size"
)
_NO_CODE = "no code of a checkpoint is ever run: supported models are built in"
_ADAPTERS = "adapters are held once, in the memory of the model; max_loras bounds their number"
_NO_DRAFTS = "use speculation, auto or off, max_draft_tokens, and draft_model"
_TEXT_ONLY = "models here take text only; leave it out"
_EVICTED = "there is no second place for KV: what does not fit is evicted and computed again"
_GRAPHS = "use enforce_eager to switch CUDA graphs off, cuda_graph_sizes to choose their sizes"
_PROXY = "put a proxy such as nginx in front of the server for this"
_METRICS = "metrics are always at /metrics, and what the cache saves at /cache"
_LLGUIDANCE = "llguidance follows schemas and grammars here; leave it out"
_FOLDER = "make a folder of the checkpoint with the files as you want them, and give that"
_STEP = "a step mixes prefill and decode, and max_num_batched_tokens bounds it"
_HUB = "set it for Hugging Face's own client: "

FOREIGN: Mapping[str, Foreign] = {
    # Several devices and processes
    "pipeline_parallel_size": Granted(_ONE_DEVICE, ("1",)),
    "data_parallel_size": Granted(_ONE_DEVICE, ("1",)),
    "tp": Renamed("tensor_parallel_size"),
    "tp_size": Renamed("tensor_parallel_size"),
    "dp": Granted(_ONE_DEVICE, ("1",)),
    "dp_size": Granted(_ONE_DEVICE, ("1",)),
    "pp_size": Granted(_ONE_DEVICE, ("1",)),
    "ep_size": Granted(_ONE_DEVICE, ("1",)),
    "nnodes": Granted(_ONE_DEVICE, ("1",)),
    "node_rank": Granted(_ONE_DEVICE, ("0",)),
    "dist_init_addr": Missing(_ONE_DEVICE),
    "enable_expert_parallel": Missing(_ONE_DEVICE),
    "distributed_executor_backend": Granted(_ONE_DEVICE, ("mp", "uni")),
    "disable_custom_all_reduce": Granted("on GPUs NCCL adds what ranks have computed"),
    "base_gpu_id": Missing("set CUDA_VISIBLE_DEVICES to the GPU that the server may use"),
    "api_server_count": Granted(
        "one process serves HTTP, the engine has another one; " + _PROXY, ("1",)
    ),
    "headless": Missing("each server has its own engine; leave it out"),
    "disable_frontend_multiprocessing": Missing("the engine always has a process of its own"),
    # Memory and cache
    "gpu_memory_utilization": Missing(_CACHE_SIZE),
    "mem_fraction_static": Missing(_CACHE_SIZE),
    "kv_cache_memory_bytes": Missing(_CACHE_SIZE),
    "num_gpu_blocks_override": Missing("use kv_cache_tokens, the number of pages times page_size"),
    "max_total_tokens": Renamed("kv_cache_tokens"),
    "block_size": Renamed("page_size"),
    "swap_space": Granted(_EVICTED, ("0",)),
    "cpu_offload_gb": Granted("weights stay on the device; leave it out", ("0",)),
    "kv_offloading_size": Missing(_EVICTED),
    "kv_transfer_config": Missing("a server shares its KV with no other; leave it out"),
    "kv_events_config": Missing(
        "use kv_events_endpoint, kv_events_replay_endpoint, kv_events_topic and "
        "kv_events_block_size, with the values that its JSON has"
    ),
    "enable_hierarchical_cache": Missing(_EVICTED),
    "disable_radix_cache": Reversed("enable_prefix_caching"),
    "radix_eviction_policy": Renamed("eviction_policy"),
    "prefix_caching_hash_algo": Missing("the tree compares tokens and uses no hashes"),
    "calculate_kv_scales": Granted("scales of an fp8 cache are always measured at start"),
    "enable_sleep_mode": Granted("LLM.sleep and wake_up are always there", ("True", "False")),
    # Model and tokenizer
    "model": Missing("the model stands first: coppice serve MODEL"),
    "model_path": Missing("the model stands first: coppice serve MODEL"),
    "tokenizer_path": Renamed("tokenizer"),
    "context_length": Renamed("max_model_len"),
    "trust_remote_code": Granted(_NO_CODE, ("True", "False")),
    "code_revision": Missing(_NO_CODE),
    "tokenizer_revision": Missing("use revision, which holds for a model with its tokenizer"),
    "tokenizer_mode": Granted("the checkpoint's own fast tokenizer is used", ("auto", "fast")),
    "skip_tokenizer_init": Missing("prompts may be token ids, but a tokenizer is always loaded"),
    "hf_config_path": Missing(_FOLDER),
    "hf_overrides": Missing(_FOLDER),
    "hf_token": Missing(_HUB + "HF_TOKEN=..."),
    "download_dir": Missing(_HUB + "HF_HOME=..."),
    "config_format": Granted("checkpoints are read in Hugging Face's form", ("auto", "hf")),
    "runner": Granted("the server offers what the checkpoint is made for", ("auto", "generate")),
    "task": Granted("the server offers what the checkpoint is made for", ("auto", "generate")),
    "convert": Granted("a checkpoint is served as what it is", ("auto", "none")),
    "is_embedding": Missing("the server offers what the checkpoint is made for; leave it out"),
    "override_pooler_config": Missing("the checkpoint's own pooling is used; leave it out"),
    "lora_paths": Renamed("lora_modules"),
    "max_loras_per_batch": Renamed("max_loras"),
    "max_loaded_loras": Renamed("max_loras"),
    "max_cpu_loras": Missing(_ADAPTERS),
    "lora_dtype": Granted("adapters are computed in the type of the model", ("auto",)),
    "fully_sharded_loras": Missing("adapters and tensor_parallel_size exclude each other so far"),
    "enable_activated_lora": Granted("an adapter's own config has the tokens that invoke it"),
    "lora_backend": Missing("there is one way for each device; leave it out"),
    "lora_target_modules": Missing("each adapter's own config has them; leave it out"),
    "speculative_config": Missing(_NO_DRAFTS),
    "speculative_model": Renamed("draft_model"),
    "speculative_draft_model_path": Renamed("draft_model"),
    "speculative_algorithm": Missing(_NO_DRAFTS),
    "limit_mm_per_prompt": Missing(_TEXT_ONLY),
    "mm_processor_kwargs": Missing(_TEXT_ONLY),
    "enable_multimodal": Missing(_TEXT_ONLY),
    "allowed_local_media_path": Missing(_TEXT_ONLY),
    "random_seed": Renamed("seed"),
    # Steps
    "max_running_requests": Renamed("max_num_seqs"),
    "chunked_prefill_size": Renamed("max_num_batched_tokens"),
    "max_prefill_tokens": Missing(_STEP),
    "enable_chunked_prefill": Granted("prompts are computed in chunks wherever they must be"),
    "no_enable_chunked_prefill": Missing(_STEP),
    "enable_mixed_chunk": Granted(_STEP),
    "max_num_partial_prefills": Missing(_STEP),
    "long_prefill_token_threshold": Missing("use max_step_stretch, which keeps decodes smooth"),
    "scheduler_delay_factor": Missing("use overtaking and max_step_stretch"),
    "num_scheduler_steps": Granted("each step is scheduled", ("1",)),
    "preemption_mode": Granted("a preempted request is computed again", ("recompute",)),
    "schedule_policy": Renamed("scheduling_policy"),
    "schedule_conservativeness": Missing("memory is planned exactly; leave it out"),
    "disable_overlap_schedule": Reversed("async_scheduling"),
    "disable_cuda_graph": Renamed("enforce_eager"),
    "cudagraph_capture_sizes": Renamed("cuda_graph_sizes"),
    "cuda_graph_max_bs": Missing("use cuda_graph_sizes"),
    "max_seq_len_to_capture": Missing(_GRAPHS),
    "compilation_config": Missing(_GRAPHS),
    "optimization_level": Missing(_GRAPHS),
    "enable_torch_compile": Missing(_GRAPHS),
    "enable_deterministic_inference": Renamed("deterministic"),
    "disable_sliding_window": Missing("a model's windows are part of it; leave it out"),
    "use_v2_block_manager": Granted("the radix tree manages pages"),
    "stream_interval": Missing("use max_stream_delay, the longest that a token waits"),
    # Requests and answers
    "max_logprobs": Granted("up to 20 logprobs are given for a token", ("20",)),
    "logprobs_mode": Granted("logprobs are of the model's own logits", ("raw_logprobs",)),
    "enable_auto_tool_choice": Granted("tools are always on where the model's template has them"),
    "tool_parser_plugin": Missing("choose one of tool_call_parser's"),
    "response_role": Granted("answers are the assistant's", ("assistant",)),
    "chat_template_content_format": Granted("parts of text are joined", ("auto", "string")),
    "exclude_tools_when_tool_choice_none": Granted("that is so", ("True",)),
    "guided_decoding_backend": Granted(_LLGUIDANCE, ("auto", "guidance")),
    "structured_outputs_config": Missing(_LLGUIDANCE),
    "grammar_backend": Granted(_LLGUIDANCE, ("llguidance",)),
    "enable_prompt_tokens_details": Granted("every usage has them"),
    "enable_cache_report": Granted("every usage has cached_tokens"),
    "enable_force_include_usage": Missing("ask for it with stream_options.include_usage"),
    "return_tokens_as_token_ids": Missing("ask for it with return_token_ids in the request"),
    "enable_request_id_headers": Granted("every answer has X-Request-Id"),
    # The server
    "uvicorn_log_level": Renamed("log_level"),
    "disable_uvicorn_access_log": Missing("use log_level warning"),
    "disable_log_requests": Granted("prompts are logged with log_prompts only"),
    "no_enable_log_requests": Granted("prompts are logged with log_prompts only"),
    "enable_log_requests": Missing("each request has a log line; log_prompts adds its prompt"),
    "log_requests": Missing("each request has a log line; log_prompts adds its prompt"),
    "log_requests_level": Missing("each request has a log line; log_prompts adds its prompt"),
    "watchdog_timeout": Renamed("engine_timeout"),
    "shutdown_timeout": Renamed("drain_timeout"),
    "max_log_len": Missing("prompts are logged with log_prompts only, as a whole"),
    "log_config_file": Missing("use log_format"),
    "disable_log_stats": Granted(_METRICS, ("True", "False")),
    "decode_log_interval": Missing(_METRICS),
    "enable_metrics": Granted(_METRICS),
    "enable_server_load_tracking": Granted("it is always at /load"),
    "allowed_origins": Missing("use cors_origin, once for each origin"),
    "allow_credentials": Missing("keys come in a header, not in cookies; leave it out"),
    "allowed_methods": Missing("use cors_origin, which allows the methods that there are"),
    "allowed_headers": Missing("use cors_origin, which allows what the page asks for"),
    "disable_fastapi_docs": Missing("/openapi.json is a list of routes and shows no data"),
    "enable_ssl_refresh": Missing("restart the server for new certificates"),
    "middleware": Missing(_PROXY),
    "uds": Missing(_PROXY),
    "config": Missing("write the options into a shell script or a unit of systemd"),
    "skip_server_warmup": Granted("there is no warm-up"),
    "warmups": Missing("there is no warm-up; leave it out"),
}  # fmt: skip
"""By the names of the options, as Python writes them."""

_RARE_GROUPS: Mapping[str, str] = {
    "an engine runs on one device; for more, start a server on each and share the requests out by "
    "their prefixes": """
        master_addr master_port prefill_context_parallel_size decode_context_parallel_size
        dcp_kv_cache_interleave_size cp_kv_cache_interleave_size data_parallel_rank
        data_parallel_start_rank data_parallel_size_local data_parallel_address
        data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb
        data_parallel_backend data_parallel_supervisor_port all2all_backend enable_dbo ubatch_size
        dbo_decode_token_threshold dbo_prefill_token_threshold disable_nccl_for_dp_synchronization
        eplb_config enable_eplb expert_placement_strategy num_redundant_experts
        eplb_window_size eplb_step_interval eplb_log_balancedness enable_elastic_ep
        max_parallel_loading_workers ray_workers_use_nsight ec_transfer_config
        weight_transfer_config""",
    "models here take text only; leave it out": """
        language_model_only enable_mm_embeds interleave_mm_strings media_io_kwargs
        allowed_media_domains mm_processor_cache_gb mm_processor_cache_type
        mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend
        skip_mm_profiling video_pruning_rate disable_chunked_mm_input enable_mm_processor_stats
        disable_mm_preprocessor_cache default_mm_loras enable_tower_connector_lora
        enable_prompt_embeds""",
    "weights stay on the device; leave it out": """
        cpu_offload_params offload_backend offload_group_size""",
    "there is no second place for KV: what does not fit is evicted and computed again": """
        kv_offloading_backend""",
    "there are no layers with a state of their own here; leave it out": """
        mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode""",
    "kernels are chosen by the device, and attention's by attention_backend; leave it out": """
        attention_config kernel_config moe_backend linear_backend enable_flashinfer_autotune
        disable_cascade_attn override_attention_dtype performance_mode kv_sharing_fast_prefill
        override_neuron_config""",
    "keys that are older than a window are kept, since prompts that begin alike hit them": """
        disable_hybrid_kv_cache_manager""",
    "a KV cache has one type for all layers, kv_cache_dtype": """
        kv_cache_dtype_skip_layers""",
    "each adapter's own config has it; leave it out": """
        enable_lora_bias long_lora_scaling_factors""",
    "adapters do not change the vocabulary here; leave it out": """
        lora_extra_vocab_size""",
    "an activated adapter hits what the base model has cached anyway; leave it out": """
        specialize_active_lora""",
    "use enable_lora for LoRA adapters; there are no others": """
        enable_prompt_adapter max_prompt_adapters max_prompt_adapter_token
        qlora_adapter_name_or_path""",
    "weights are read one tensor at a time, and progress is shown; leave it out": """
        safetensors_load_strategy model_loader_extra_config ignore_patterns use_tqdm_on_load
        pt_load_map_location""",
    "the model's folder has its weights and its config.json: change them there": """
        model_weights rope_scaling rope_theta allow_deprecated_quantization""",
    "no code of others runs in the engine; leave it out": """
        scheduler_cls worker_cls worker_extension_cls logits_processors logits_processor_pattern
        io_processor_plugin reasoning_parser_plugin external_parameters additional_config""",
    "metrics are always at /metrics, and what the cache saves at /cache": """
        show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces
        kv_cache_metrics kv_cache_metrics_sample cudagraph_metrics enable_layerwise_nvtx_tracing
        enable_mfu_metrics enable_logging_iteration_details aggregate_engine_logging
        profiler_config enable_per_request_metrics""",
    "a request's chat_template_kwargs have them; or change the template, chat_template": """
        default_chat_template_kwargs""",
    "tools are called by the client, which sends their results": """
        tool_server""",
    "use log_level and log_format; log_prompts adds prompts": """
        enable_log_outputs enable_log_deltas log_error_stack disable_access_log_for_endpoints""",
    "put a proxy such as nginx in front of the server for this": """
        ssl_ciphers h11_max_header_count grpc""",
    "use max_body_bytes": """
        h11_max_incomplete_event_size""",
    "/openapi.json lists the routes, and needs no network": """
        enable_offline_docs""",
    "prompts may be token ids, with return_token_ids answers have theirs; leave it out": """
        tokens_only enable_tokenizer_info_endpoint""",
    "answers have no system_fingerprint; leave it out": """
        fingerprint_mode fingerprint_value""",
    "the server offers what the checkpoint is made for; leave it out": """
        pooler_config""",
    "it is not reported; leave it out": """
        enable_return_routed_experts""",
    "a step mixes prefill and decode, and max_num_batched_tokens bounds it": """
        max_long_partial_prefills multi_step_stream_outputs disable_async_output_proc""",
    "use cuda_graph_sizes": """
        max_cudagraph_capture_size""",
    _NO_DRAFTS: """
        num_lookahead_slots spec_method spec_model spec_tokens""",
    "llguidance follows schemas and grammars here; leave it out": """
        guided_decoding_disable_fallback guided_decoding_disable_any_whitespace
        guided_decoding_disable_additional_properties""",
    "use reasoning_parser": """
        enable_reasoning""",
    "texts are tokenized in threads; leave it out": """
        tokenizer_pool_size tokenizer_pool_type tokenizer_pool_extra_config""",
}

RARE: Mapping[str, str] = {
    name: instead for instead, names in _RARE_GROUPS.items() for name in names.split()
}
"""Options of vLLM that few people set and that are not here: what to do instead, by their names."""

SHORT: Mapping[str, str] = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-asc": "api_server_count",
    "-O": "optimization_level",
    "-cc": "compilation_config",
    "-sc": "speculative_config",
}
"""vLLM's short forms."""

VALUES: Mapping[str, Mapping[str, str]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    "load_format": {"safetensors": "auto", "hf": "auto"},
    "model_impl": {"vllm": "coppice", "sglang": "coppice"},
}
"""Values of options that have our name, under which the same is known elsewhere."""


def translate(options: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """The options of a call in Python under our names; those without effect are left out.

    Names of `own` are ours, those that nobody knows are left as they are. Raises ValueError for one
    that has no counterpart, with what to do instead, and for one that is given under two names.
    """
    found: dict[str, Any] = {}
    for name, value in options.items():
        foreign = None if name in own else FOREIGN.get(name)
        if foreign is None and name in RARE and name not in own:
            foreign = Missing(RARE[name])
        match foreign:
            case Renamed(ours):
                name = ours
            case Reversed(ours):
                name, value = ours, not value
            case Granted(why, values):
                if str(value) not in values:
                    raise ValueError(f"{name} may be {' or '.join(values)}, got {value!r}: {why}")
                continue
            case Missing(instead):
                raise ValueError(f"{name} is not an option here: {instead}")
        if name in found:
            raise ValueError(f"{name} is given twice, under two names")
        found[name] = same_value(name, value)
    return found


def same_value(name: str, value: Any) -> Any:
    """The value as we call it."""
    same = VALUES.get(name, {})
    return same.get(value, value) if isinstance(value, str) else value
