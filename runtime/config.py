"""The engine's options: one flat dataclass, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from coppice.radix import POLICIES
from coppice.runtime.metrics.events.options import ENCODINGS, check_endpoint
from coppice.runtime.planning.steps import CPU_SEQS, CPU_TOKENS
from coppice.runtime.sampling.drafts.draft import MOST_DRAFTED
from coppice.runtime.schedule.queue import SCHEDULING_POLICIES
from coppice.runtime.tiers.address import check_address
from coppice.runtime.tiers.sizes import parse_size

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
FLASHINFER_KERNELS = ("auto", "fa2", "fa3")
KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "fp8")
#: Of KV that is kept beyond the cache.
TIER_DTYPES = ("auto", "int8", "fp8")
LOAD_FORMATS = ("auto", "dummy")
MODEL_IMPLS = ("auto", "coppice", "transformers")
#: Fraction of the available memory that the KV cache gets by default. Other programs need main
#: memory, too; a GPU belongs to the engine, but allocators and libraries need some of its memory.
CPU_FRACTION, GPU_FRACTION = 0.4, 0.9
_DISK_CACHE_SIZE = "16GiB"
SPECULATIONS = ("auto", "off")
QUANTIZATIONS = (None, "int8", "int4", "fp8")


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All options of an engine.

    The `metadata["help"]` of each field describes it, for the command line. Raises ValueError that
    names the option, its value and what is allowed.
    """

    model: str
    revision: str | None = _option(
        None, "branch, tag or commit of a model that is a hub id; default: its main branch"
    )
    dtype: str = _option(
        "auto",
        f"type of weights and KV: {', '.join(DTYPES)}; auto is the checkpoint's own on a GPU, "
        "on a CPU float32, or bfloat16 for a checkpoint of it and a processor with AVX512-BF16; "
        "with bfloat16 a CPU rounds weights and rows of products and the KV cache, all else is "
        "float32",
    )
    device: str = _option(
        "auto",
        f"device that runs the model: {', '.join(DEVICES)}; auto is cuda where torch finds a GPU",
    )
    model_impl: str = _option(
        "auto",
        f"whose code computes the model: {', '.join(MODEL_IMPLS)}; auto is our own family where "
        "there is one, else transformers' model",
    )
    load_format: str = _option("auto", "auto: the checkpoint's weights; dummy: random ones")
    quantization: str | None = _option(
        None,
        "8-bit weights and activations: int8 on a CPU, fp8 (e4m3) on a GPU; int4: 4-bit weights "
        "and 8-bit activations on a CPU",
    )
    tensor_parallel_size: int = _option(
        1,
        "ranks among which the model is divided, each with its part of weights and KV: GPUs, or "
        "processes that share the cores of a CPU",
    )
    page_size: int = _option(16, "tokens that a page of the KV cache holds")
    kv_cache_tokens: int | None = _option(None, "size of the KV cache in tokens")
    kv_cache_memory_fraction: float | None = _option(
        None,
        "size of the KV cache as a fraction of the memory that is available after the weights are "
        "loaded (on a GPU, less what a step takes); default: 0.4 on a CPU, 0.9 on a GPU",
    )
    kv_cache_dtype: str = _option(
        "auto",
        f"type of the KV cache: {', '.join(KV_CACHE_DTYPES)}; auto is that of dtype, "
        "bfloat16 halves a float32 cache on a CPU, fp8 (e4m3, one byte a number) needs a GPU",
    )
    max_model_len: int | None = _option(None, "longest prompt and output together, in tokens")
    max_num_seqs: int | None = _option(
        None,
        f"most sequences in one step; default: {CPU_SEQS} on a CPU, on a GPU by its memory and "
        "rates (the log tells)",
    )
    max_num_batched_tokens: int | None = _option(
        None, f"most tokens in one step; default: {CPU_TOKENS} on a CPU, on a GPU likewise"
    )
    enable_prefix_caching: bool = _option(True, "reuse the KV of prefixes seen before")
    scheduling_policy: str = _option(
        "lpm", f"order in which waiting requests are admitted: {', '.join(SCHEDULING_POLICIES)}"
    )
    overtaking: float | None = _option(
        None,
        "work that later requests may do before a waiting one, as a fraction of the work that was "
        "there before it came; default: no bound, as with inf",
    )
    max_step_stretch: float | None = _option(
        None,
        "time that a step with prefills may take, as a multiple of what its decodes take alone, "
        "counting sequences that wait to begin among them, and more where more wait than decode; "
        "default: no limit, as with inf",
    )
    max_queued_requests: int | None = _option(
        None, "most requests that wait to begin; further ones are refused"
    )
    max_queued_tokens: int | None = _option(
        None, "most tokens of the requests that wait to begin; further requests are refused"
    )
    eviction_policy: str = _option(
        "lru", f"what is evicted first when pages run out: {', '.join(POLICIES)}"
    )
    pin_budget: float = _option(0.25, "largest fraction of the KV cache that pins may keep")
    host_cache: str | None = _option(
        None,
        "main memory for pages that leave the KV cache, such as 64GiB, of use beside a GPU; "
        "default: none",
    )
    disk_cache: str | None = _option(
        None,
        "folder that keeps pages beyond the end of the process, for one server at a time; "
        "default: none",
    )
    disk_cache_size: str = _option(_DISK_CACHE_SIZE, "most bytes of that folder, such as 200GiB")
    disk_cache_dtype: str = _option(
        "auto",
        f"type of the KV on the disk: {', '.join(TIER_DTYPES)}; auto is as in the KV cache; int8 "
        "and fp8 take a byte a number, and answers after a hit there are no longer those without",
    )
    shared_cache: str | None = _option(
        None,
        "address of a Redis or Valkey server that keeps pages for several servers, such as "
        "redis://host:6379; default: none",
    )
    shared_cache_dtype: str = _option(
        "auto", "type of the KV in that server, as of disk_cache_dtype"
    )
    speculation: str | None = _option(
        None,
        f"whether steps verify drafts of several tokens: {', '.join(SPECULATIONS)}; auto makes as "
        "many as pay, from earlier text, predictions of requests and grammars, and changes no "
        "text; default: auto with a draft model, and on a CPU without async_scheduling, else off",
    )
    max_draft_tokens: int = _option(
        48, f"most drafted tokens of a sequence in one step; at most {MOST_DRAFTED}"
    )
    draft_model: str | None = _option(
        None,
        "small model of the same vocabulary that proposes drafts, too: a folder or a hub id; it "
        "takes a part of the KV cache's memory; default: none",
    )
    attention_backend: str = _option(
        "auto",
        "attention kernels: auto, cpu, triton, flashinfer or reference; auto is cpu on a CPU, on a "
        "GPU flashinfer where it covers the model, else triton",
    )
    flashinfer_kernels: str = _option(
        "auto",
        "FlashInfer's kernels for prompts and shared levels: auto, fa2 or fa3; auto is fa3 where "
        "that is built and takes less time, else fa2; fa3 is built if it is not, for minutes",
    )
    deterministic: bool = _option(
        False,
        "answers that depend neither on the rest of the batch nor on cache hits, bit for bit; with "
        "the triton backend only, slower: attention shares no reads, products have one tile size",
    )
    async_scheduling: bool | None = _option(
        None,
        "schedule a step and queue it on the device before the tokens of the previous one have "
        "come back (see docs/gpu-steps.md); default: on a GPU only",
    )
    enforce_eager: bool = _option(
        False, "no CUDA graphs: every step launches its kernels one by one"
    )
    cuda_graph_sizes: tuple[int, ...] | None = _option(
        None,
        "numbers of sequences for which decoding steps are captured as CUDA graphs, on a GPU; "
        "default: a choice of sizes up to max_num_seqs",
    )
    enable_lora: bool = _option(False, "let requests ask for adapters of low rank (LoRA)")
    max_loras: int = _option(16, "most adapters that are loaded at the same time")
    max_lora_rank: int = _option(64, "greatest rank that an adapter may have")
    kv_events_endpoint: str | None = _option(
        None,
        "address at which events of the cache are published by ZeroMQ, such as tcp://*:5557, in "
        "the format of vLLM's, so that routers can follow it; default: none are",
    )
    kv_events_replay_endpoint: str | None = _option(
        None, "address at which events that were missed can be asked for again"
    )
    kv_events_topic: str = _option("", "topic of these events")
    kv_events_block_size: int = _option(16, "tokens of a block in these events")
    kv_events_encoding: str = _option(
        "arrays",
        f"how events are written: {', '.join(ENCODINGS)}; arrays are what most routers read, maps "
        "what newer versions of vLLM write",
    )
    kv_events_exact_topic: str | None = _option(
        None,
        "topic, on the same address, of events with exact lengths and of the load, in our own "
        "format; default: none are sent",
    )
    seed: int = _option(0, "seed of dummy weights, and of requests without a seed of their own")

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ValueError(f"model must be a directory or a hub id, got {self.model!r}")
        if self.revision is not None and not (isinstance(self.revision, str) and self.revision):
            raise ValueError(
                f"revision must be a branch, tag or commit, or None, got {self.revision!r}"
            )
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("device", self.device, DEVICES)
        _one_of("model_impl", self.model_impl, MODEL_IMPLS)
        _one_of("load_format", self.load_format, LOAD_FORMATS)
        _one_of("quantization", self.quantization, QUANTIZATIONS)
        _at_least("tensor_parallel_size", self.tensor_parallel_size, 1)
        if self.tensor_parallel_size > 1 and self.enable_lora:
            raise ValueError(
                f"tensor_parallel_size is {self.tensor_parallel_size}; with enable_lora it must be "
                "1: adapters are not divided among ranks"
            )
        _at_least("page_size", self.page_size, 1)
        if self.kv_cache_tokens is not None:
            _at_least("kv_cache_tokens", self.kv_cache_tokens, 1)
        fraction = self.kv_cache_memory_fraction
        if fraction is not None and (
            not isinstance(fraction, (int, float)) or not 0 < fraction <= 1
        ):
            raise ValueError(
                f"kv_cache_memory_fraction must be above 0 and at most 1, got {fraction!r}"
            )
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _one_of("flashinfer_kernels", self.flashinfer_kernels, FLASHINFER_KERNELS)
        if self.max_model_len is not None:
            _at_least("max_model_len", self.max_model_len, 2)
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        if self.most_tokens < self.most_seqs:
            raise ValueError(
                f"max_num_batched_tokens must be at least max_num_seqs ({self.most_seqs}), so "
                f"that every sequence gets its token in a step, got {self.max_num_batched_tokens}"
            )
        _one_of("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        if self.overtaking is not None and not self.overtaking >= 0:
            raise ValueError(f"overtaking must be at least 0, got {self.overtaking!r}")
        if self.max_step_stretch is not None and not self.max_step_stretch > 1:
            raise ValueError(f"max_step_stretch must be more than 1, got {self.max_step_stretch!r}")
        if self.max_queued_requests is not None:
            _at_least("max_queued_requests", self.max_queued_requests, 1)
        if self.max_queued_tokens is not None:
            _at_least("max_queued_tokens", self.max_queued_tokens, 1)
        if self.speculation is not None:
            _one_of("speculation", self.speculation, SPECULATIONS)
        _at_least("max_draft_tokens", self.max_draft_tokens, 1)
        if self.max_draft_tokens > MOST_DRAFTED:
            raise ValueError(
                f"max_draft_tokens must be at most {MOST_DRAFTED}, got {self.max_draft_tokens}"
            )
        self._check_draft_model()
        _one_of("eviction_policy", self.eviction_policy, tuple(POLICIES))
        if not isinstance(self.pin_budget, (int, float)) or not 0 <= self.pin_budget <= 1:
            raise ValueError(f"pin_budget must be from 0 to 1, got {self.pin_budget!r}")
        if (sizes := self.cuda_graph_sizes) is not None:
            # Without max_num_seqs a GPU's default grows with these.
            allowed = range(1, (self.max_num_seqs or 2**20) + 1)
            if (
                not isinstance(sizes, tuple)
                or not sizes
                or any(each not in allowed for each in sizes)
            ):
                raise ValueError(
                    "cuda_graph_sizes must be a tuple of integers from 1 to max_num_seqs "
                    f"({allowed[-1]}), or None, got {sizes!r}"
                )
            if len(set(sizes)) != len(sizes):
                raise ValueError(f"cuda_graph_sizes must differ from each other, got {sizes!r}")
            if self.enforce_eager:
                raise ValueError(f"cuda_graph_sizes must be None with enforce_eager, got {sizes!r}")
        if self.async_scheduling not in (None, True, False):
            raise ValueError(
                f"async_scheduling must be True, False or None, got {self.async_scheduling!r}"
            )
        self._check_events()
        self._check_tiers()
        _at_least("max_loras", self.max_loras, 1)
        _at_least("max_lora_rank", self.max_lora_rank, 1)
        for name in ("enable_prefix_caching", "deterministic", "enforce_eager", "enable_lora"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.enable_lora and self.deterministic:
            raise ValueError(
                "enable_lora must be False with deterministic: the adapters' products of a step "
                "have shapes that depend on all of its requests"
            )

    def makes_drafts(self, *, on_gpu: bool) -> bool:
        """Whether steps verify drafts of several tokens, by the device that the model is on.

        Where steps overlap, drafts cost the time of the host's work: there they are asked for.
        """
        if self.speculation is None:
            return self.draft_model is not None or not (on_gpu or self.async_scheduling)
        return self.speculation != "off"

    def _check_draft_model(self) -> None:
        """Raises ValueError for a draft model beside options that leave nothing for it to do."""
        name = self.draft_model
        if name is None:
            return
        if not isinstance(name, str) or not name:
            raise ValueError(f"draft_model must be a folder or a hub id, or None, got {name!r}")
        if self.speculation == "off":
            raise ValueError(
                f"draft_model is {name!r}; with speculation 'off' it must be None: leave "
                "speculation out, or give 'auto', which makes drafts"
            )
        if self.tensor_parallel_size > 1:
            raise ValueError(
                f"draft_model is {name!r}; with tensor_parallel_size {self.tensor_parallel_size} "
                "it must be None: a draft model is not divided among ranks"
            )

    @property
    def most_seqs(self) -> int:
        """`max_num_seqs`, or a CPU's default."""
        if self.max_num_seqs is not None:
            return self.max_num_seqs
        return CPU_SEQS

    @property
    def most_tokens(self) -> int:
        """`max_num_batched_tokens`, or a CPU's default, which has a token for each sequence."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(CPU_TOKENS, self.most_seqs)

    def _check_tiers(self) -> None:
        """Raises ValueError for options of tiers that do not fit."""
        if self.host_cache is not None:
            parse_size("host_cache", self.host_cache)
        parse_size("disk_cache_size", self.disk_cache_size)
        if self.disk_cache is None and self.disk_cache_size != _DISK_CACHE_SIZE:
            raise ValueError(
                f"disk_cache_size must be {_DISK_CACHE_SIZE!r} without disk_cache, got "
                f"{self.disk_cache_size!r}"
            )
        for name in ("host_cache", "disk_cache", "shared_cache"):
            value = getattr(self, name)
            if value is None:
                continue
            if name != "host_cache" and not (isinstance(value, str) and value):
                raise ValueError(f"{name} must be a text that is not empty, or None, got {value!r}")
            if not self.enable_prefix_caching:
                raise ValueError(
                    f"{name} must be None without enable_prefix_caching, got {value!r}"
                )
        if self.shared_cache is not None:
            check_address(self.shared_cache)

        for name in ("disk_cache", "shared_cache"):
            kind, value = f"{name}_dtype", getattr(self, f"{name}_dtype")
            _one_of(kind, value, TIER_DTYPES)
            if value == "auto":
                continue
            if getattr(self, name) is None:
                raise ValueError(f"{kind} must be 'auto' without {name}, got {value!r}")
            if self.deterministic:
                raise ValueError(
                    f"{kind} must be 'auto' with deterministic, since answers depend on hits "
                    f"otherwise; got {value!r}"
                )
            if self.kv_cache_dtype == "fp8":
                raise ValueError(
                    f"{kind} must be 'auto' with kv_cache_dtype 'fp8', which takes a byte a "
                    f"number already; got {value!r}"
                )

    def _check_events(self) -> None:
        """Raises ValueError for options of events that do not fit."""
        endpoint, replay = self.kv_events_endpoint, self.kv_events_replay_endpoint
        check_endpoint("kv_events_endpoint", endpoint)
        check_endpoint("kv_events_replay_endpoint", replay)
        if endpoint is None:
            for name in ("kv_events_replay_endpoint", "kv_events_exact_topic"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name} is {getattr(self, name)!r}; without kv_events_endpoint it must "
                        "be None"
                    )
        elif endpoint == replay:
            raise ValueError(
                f"kv_events_replay_endpoint must differ from kv_events_endpoint, got {replay!r}"
            )
        _at_least("kv_events_block_size", self.kv_events_block_size, 1)
        _one_of("kv_events_encoding", self.kv_events_encoding, ENCODINGS)
        if not isinstance(self.kv_events_topic, str):
            raise ValueError(f"kv_events_topic must be a text, got {self.kv_events_topic!r}")
        exact = self.kv_events_exact_topic
        if exact is not None and (not exact or exact == self.kv_events_topic):
            raise ValueError(
                "kv_events_exact_topic must be a text that is neither empty nor kv_events_topic, "
                f"or None, got {exact!r}"
            )


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}")


def _at_least(name: str, value: Any, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name} must be an integer of at least {low}, got {value!r}")
