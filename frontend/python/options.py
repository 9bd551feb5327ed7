"""The constructor that `LLM` and `AsyncLLM` share: every option, with its type and its default."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, ParamSpec

from coppice.frontend.python.foreign_options import translate
from coppice.frontend.text.model.options import TextOptions
from coppice.runtime.config import EngineConfig

P = ParamSpec("P")


def _takes_foreign_names(constructor: Callable[P, None]) -> Callable[P, None]:
    """Lets it be called with options as vLLM and SGLang name them, where they have a meaning."""
    parameters = inspect.signature(constructor).parameters

    @functools.wraps(constructor)
    def init(*args: P.args, **kwargs: P.kwargs) -> None:
        given: dict[str, Any] = translate(kwargs, parameters)
        for name in given:
            if name not in parameters:
                near = get_close_matches(name, parameters, 3) or list(parameters)[1:]
                raise ValueError(f"{name}: no such option; there is {', '.join(near)}")
        return constructor(*args, **given)

    return init


class Configured(ABC):
    """A model with its options."""

    @_takes_foreign_names
    def __init__(
        self,
        model: str,
        tokenizer: str | None = None,
        *,
        generation_config: str = "auto",
        override_generation_config: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        revision: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        model_impl: str = "auto",
        load_format: str = "auto",
        quantization: str | None = None,
        tensor_parallel_size: int = 1,
        page_size: int = 16,
        kv_cache_tokens: int | None = None,
        kv_cache_memory_fraction: float | None = None,
        kv_cache_dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        enable_prefix_caching: bool = True,
        scheduling_policy: str = "lpm",
        overtaking: float | None = None,
        max_step_stretch: float | None = None,
        max_queued_requests: int | None = None,
        max_queued_tokens: int | None = None,
        eviction_policy: str = "lru",
        pin_budget: float = 0.25,
        host_cache: str | None = None,
        disk_cache: str | None = None,
        disk_cache_size: str = "16GiB",
        disk_cache_dtype: str = "auto",
        shared_cache: str | None = None,
        shared_cache_dtype: str = "auto",
        speculation: str | None = None,
        max_draft_tokens: int = 48,
        draft_model: str | None = None,
        attention_backend: str = "auto",
        flashinfer_kernels: str = "auto",
        deterministic: bool = False,
        async_scheduling: bool | None = None,
        enforce_eager: bool = False,
        cuda_graph_sizes: tuple[int, ...] | None = None,
        enable_lora: bool = False,
        max_loras: int = 16,
        max_lora_rank: int = 64,
        kv_events_endpoint: str | None = None,
        kv_events_replay_endpoint: str | None = None,
        kv_events_topic: str = "",
        kv_events_block_size: int = 16,
        kv_events_encoding: str = "arrays",
        kv_events_exact_topic: str | None = None,
        seed: int = 0,
    ) -> None:
        """Loads the model. Options of vLLM are taken under its names where they mean the same.

        Args:
            model: a Hugging Face directory, a hub id, or "demo" for the shipped checkpoint.
            tokenizer: directory or hub id of the tokenizer, if it is not with the model.
            generation_config: where the sampling parameters come from that a request does not set:
                auto: the model's generation_config.json; none: no file; or the path of such a file
                or its folder.
            override_generation_config: values in place of that file's, as JSON, such as
                '{"temperature": 0.7}'.
            chat_template: chat template in place of the model's: a file, or the template itself.
            revision: branch, tag or commit of a model that is a hub id; default: its main branch.
            dtype: type of weights and KV: auto, float32, bfloat16, float16; auto is the
                checkpoint's own on a GPU, on a CPU float32, or bfloat16 for a checkpoint of it and
                a processor with AVX512-BF16; with bfloat16 a CPU rounds weights and rows of
                products and the KV cache, all else is float32.
            device: device that runs the model: auto, cpu, cuda; auto is cuda where torch finds a
                GPU.
            model_impl: whose code computes the model: auto, coppice, transformers; auto is our own
                family where there is one, else transformers' model.
            load_format: auto: the checkpoint's weights; dummy: random ones.
            quantization: 8-bit weights and activations: int8 on a CPU, fp8 (e4m3) on a GPU; int4:
                4-bit weights and 8-bit activations on a CPU.
            tensor_parallel_size: ranks among which the model is divided, each with its part of
                weights and KV: GPUs, or processes that share the cores of a CPU.
            page_size: tokens that a page of the KV cache holds.
            kv_cache_tokens: size of the KV cache in tokens.
            kv_cache_memory_fraction: size of the KV cache as a fraction of the memory that is
                available after the weights are loaded (on a GPU, less what a step takes); default:
                0.4 on a CPU, 0.9 on a GPU.
            kv_cache_dtype: type of the KV cache: auto, float32, bfloat16, fp8; auto is that of
                dtype, bfloat16 halves a float32 cache on a CPU, fp8 (e4m3, one byte a number) needs
                a GPU.
            max_model_len: longest prompt and output together, in tokens.
            max_num_seqs: most sequences in one step; default: 64 on a CPU, on a GPU by its memory
                and rates (the log tells).
            max_num_batched_tokens: most tokens in one step; default: 1024 on a CPU, on a GPU
                likewise.
            enable_prefix_caching: reuse the KV of prefixes seen before.
            scheduling_policy: order in which waiting requests are admitted: lpm, dfs, fcfs,
                priority.
            overtaking: work that later requests may do before a waiting one, as a fraction of the
                work that was there before it came; default: no bound, as with inf.
            max_step_stretch: time that a step with prefills may take, as a multiple of what its
                decodes take alone, counting sequences that wait to begin among them, and more
                where more wait than decode; default: no limit, as with inf.
            max_queued_requests: most requests that wait to begin; further ones are refused.
            max_queued_tokens: most tokens of the requests that wait to begin; further requests are
                refused.
            eviction_policy: what is evicted first when pages run out: lru, lfu, slru, density,
                adaptive.
            pin_budget: largest fraction of the KV cache that pins may keep.
            host_cache: main memory for pages that leave the KV cache, such as 64GiB, of use beside
                a GPU; default: none.
            disk_cache: folder that keeps pages beyond the end of the process, for one server at a
                time; default: none.
            disk_cache_size: most bytes of that folder, such as 200GiB.
            disk_cache_dtype: type of the KV on the disk: auto, int8, fp8; auto is as in the KV
                cache; int8 and fp8 take a byte a number, and answers after a hit there are no
                longer those without.
            shared_cache: address of a Redis or Valkey server that keeps pages for several servers,
                such as redis://host:6379; default: none.
            shared_cache_dtype: type of the KV in that server, as of disk_cache_dtype.
            speculation: whether steps verify drafts of several tokens: auto, off; auto makes as
                many as pay, from earlier text, predictions of requests and grammars, and changes
                no text; default: auto with a draft model, and on a CPU without async_scheduling,
                else off.
            max_draft_tokens: most drafted tokens of a sequence in one step; at most 62.
            draft_model: small model of the same vocabulary that proposes drafts, too: a folder or a
                hub id; it takes a part of the KV cache's memory; default: none.
            attention_backend: attention kernels: auto, cpu, triton, flashinfer or reference; auto
                is cpu on a CPU, on a GPU flashinfer where it covers the model, else triton.
            flashinfer_kernels: FlashInfer's kernels for prompts and shared levels: auto, fa2 or
                fa3; auto is fa3 where that is built and takes less time, else fa2; fa3 is built if
                it is not, for minutes.
            deterministic: answers that depend neither on the rest of the batch nor on cache hits,
                bit for bit; with the triton backend only, slower: attention shares no reads,
                products have one tile size.
            async_scheduling: schedule a step and queue it on the device before the tokens of the
                previous one have come back (see docs/gpu-steps.md); default: on a GPU only.
            enforce_eager: no CUDA graphs: every step launches its kernels one by one.
            cuda_graph_sizes: numbers of sequences for which decoding steps are captured as CUDA
                graphs, on a GPU; default: a choice of sizes up to max_num_seqs.
            enable_lora: let requests ask for adapters of low rank (LoRA).
            max_loras: most adapters that are loaded at the same time.
            max_lora_rank: greatest rank that an adapter may have.
            kv_events_endpoint: address at which events of the cache are published by ZeroMQ, such
                as tcp://*:5557, in the format of vLLM's, so that routers can follow it; default:
                none are.
            kv_events_replay_endpoint: address at which events that were missed can be asked for
                again.
            kv_events_topic: topic of these events.
            kv_events_block_size: tokens of a block in these events.
            kv_events_encoding: how events are written: arrays, maps; arrays are what most routers
                read, maps what newer versions of vLLM write.
            kv_events_exact_topic: topic, on the same address, of events with exact lengths and of
                the load, in our own format; default: none are sent.
            seed: seed of dummy weights, and of requests without a seed of their own.

        Raises:
            ValueError: an option is unknown or out of range, or the model cannot be loaded.
        """
        given = dict(locals())
        self._load(
            EngineConfig(**{each.name: given[each.name] for each in fields(EngineConfig)}),
            TextOptions(**{each.name: given[each.name] for each in fields(TextOptions)}),
        )

    @abstractmethod
    def _load(self, config: EngineConfig, text: TextOptions) -> None:
        """Loads the model, or prepares that."""
