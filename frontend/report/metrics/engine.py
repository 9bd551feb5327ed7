"""What an engine counts, as families of metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from coppice.runtime.report.snapshot import EngineStats, Histogram, ReplicaReport, TiersReport


def engine_families(stats: EngineStats) -> Iterator[Metric]:
    """All families of a snapshot; docs/metrics.md has the list."""
    yield from _requests(stats)
    yield from _tokens(stats)
    yield from _steps(stats)
    yield from _pool(stats)
    yield from _adapters(stats)
    yield from _replicas(stats.replicas)


def _requests(stats: EngineStats) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "coppice_requests_running",
        "Requests with at least one running sequence",
        stats.requests_running,
    )
    yield GaugeMetricFamily(
        "coppice_requests_waiting",
        "Requests that wait for a place, preempted ones included",
        stats.requests_waiting,
    )
    yield _counters(
        "coppice_requests_finished",
        "Requests that ended, by the reason for which their last sequence ended",
        "finish_reason",
        stats.finished,
    )
    yield _counters(
        "coppice_requests_refused",
        "Requests that found the queue full, by the limit they met",
        "limit",
        stats.refused,
    )
    yield CounterMetricFamily(
        "coppice_preemptions", "Sequences whose pages were taken for others", stats.preemptions
    )
    yield _histogram(
        "coppice_request_queue_seconds",
        "From a request's arrival to the step with its first tokens",
        stats.queue,
    )
    yield _histogram(
        "coppice_time_to_first_token_seconds",
        "From a request's arrival to its first token; beam searches are left out",
        stats.ttft,
    )
    yield _histogram("coppice_inter_token_seconds", "Between two tokens of a sequence", stats.itl)
    yield _histogram(
        "coppice_request_seconds", "From a request's arrival to its end", stats.request
    )


def _tokens(stats: EngineStats) -> Iterator[Metric]:
    counts = stats.counts
    yield CounterMetricFamily(
        "coppice_prompt_tokens", "Prompt tokens of admitted requests", stats.prompt_tokens
    )
    yield CounterMetricFamily(
        "coppice_generated_tokens", "Tokens that were generated", stats.generated_tokens
    )
    yield _counters(
        "coppice_hit_tokens",
        "Tokens whose KV was reused. cross: prompt tokens known from other requests (those of the "
        "hit rate); same: of a request's further sequences; preempted: of sequences that resumed "
        "after a preemption",
        "kind",
        {
            "cross": counts.hit_tokens,
            "same": counts.same_hit_tokens,
            "preempted": counts.preempted_hit_tokens,
        },
    )
    yield _counters(
        "coppice_computed_tokens",
        "Prompt tokens that were not hit, by cause; with the hit tokens of kind cross they make up "
        "all prompt tokens. other_replica: another replica holds them; not_loaded: a tier had "
        "them, and computing was faster; no_cache: prefix caching is off",
        "cause",
        counts.causes,
    )
    yield _counters(
        "coppice_loaded_hit_tokens",
        "Hit tokens of kind cross that came from a tier beyond the pool; all others were in it",
        "tier",
        counts.loaded,
    )
    yield CounterMetricFamily(
        "coppice_loaded_evicted_tokens",
        "Of the loaded hit tokens, those that the pool had evicted",
        counts.loaded_evicted,
    )
    yield CounterMetricFamily(
        "coppice_estimated_tokens",
        "Computed prompt tokens whose cause was estimated from a sample, since requests came fast",
        counts.estimated_tokens,
    )
    yield CounterMetricFamily(
        "coppice_ideal_hit_tokens",
        "Prompt tokens that an unlimited cache, one for all replicas, would have hit",
        counts.ideal_tokens,
    )
    yield CounterMetricFamily(
        "coppice_rounded_off_tokens",
        "Cached tokens after a hit that equal the prompt's and were not hit; more than 0 is a bug",
        stats.rounded_off_tokens,
    )


def _steps(stats: EngineStats) -> Iterator[Metric]:
    if stats.resident_bytes is not None:
        yield GaugeMetricFamily(
            "coppice_engine_memory_bytes",
            "Resident memory of the engine's process",
            stats.resident_bytes,
        )
    yield _histogram("coppice_step_seconds", "Duration of a step", stats.step)
    yield _histogram("coppice_step_tokens", "Tokens that a step computed", stats.step_tokens)
    yield _histogram(
        "coppice_step_sequences", "Sequences in a step: the batch size", stats.step_sequences
    )
    yield CounterMetricFamily(
        "coppice_failed_steps", "Steps that failed, with the requests in them", stats.failed_steps
    )
    yield _counters(
        "coppice_work_seconds",
        "Time of steps, divided by the shares of prompt tokens and of decoded tokens in each",
        "phase",
        {"prefill": stats.prefill_seconds, "decode": stats.decode_seconds},
    )
    yield _counters(
        "coppice_decode_steps",
        "Decoding steps of an engine with CUDA graphs. graph: replayed; too_many, too_much: run "
        "kernel by kernel, since no graph has as many sequences, or as much attention work",
        "how",
        dict(stats.decode_steps),
    )
    yield _counters(
        "coppice_mixed_steps",
        "Steps with prompt tokens of an engine with CUDA graphs for them. graph: replayed; eager: "
        "run kernel by kernel, since no graph has as many rows, or as much attention work",
        "how",
        dict(stats.mixed_steps),
    )
    yield GaugeMetricFamily(
        "coppice_cuda_graphs", "CUDA graphs that were captured at start", stats.cuda_graphs
    )
    yield GaugeMetricFamily(
        "coppice_cuda_graph_capture_seconds",
        "Time that capturing CUDA graphs took",
        stats.cuda_graph_seconds,
    )
    yield GaugeMetricFamily(
        "coppice_cuda_graph_bytes", "GPU memory that the CUDA graphs take", stats.cuda_graph_bytes
    )


def _pool(stats: EngineStats) -> Iterator[Metric]:
    pages = GaugeMetricFamily(
        "coppice_pool_pages",
        "Pages of the KV cache: free, cached (evicted when pages are needed), pinned (kept by "
        "pins alone), held (by running sequences)",
        labels=["state"],
    )
    for state in ("free", "cached", "pinned", "held"):
        pages.add_metric([state], getattr(stats, f"pages_{state}"))
    yield pages
    yield _counters(
        "coppice_window_keys",
        "Keys, each of a token in a layer, that layers with a sliding window read, and that "
        "they skipped since they are older",
        "kind",
        stats.window_keys,
    )
    yield from _drafts(stats)
    yield from _tiers(stats.tiers)
    yield GaugeMetricFamily("coppice_page_size_tokens", "Tokens that a page holds", stats.page_size)
    yield GaugeMetricFamily("coppice_pins", "Prefixes that are pinned", stats.num_pins)
    yield CounterMetricFamily(
        "coppice_evicted_tokens", "Tokens that were evicted from the cache", stats.evicted_tokens
    )
    yield _histogram(
        "coppice_eviction_age_seconds",
        "How long tokens had been unused when they were evicted",
        stats.eviction_age,
    )


def _drafts(stats: EngineStats) -> Iterator[Metric]:
    """By source of drafts; without speculation the families are empty."""
    yield _counters(
        "coppice_drafted_tokens",
        "Tokens of drafts that were computed. text: what followed earlier on the same tokens; "
        "prediction: the request's; grammar: what a form leaves no choice about; model: what the "
        "draft model expects",
        "source",
        stats.drafted_tokens,
    )
    yield _counters(
        "coppice_accepted_draft_tokens",
        "Tokens of drafts that texts went on with",
        "source",
        stats.accepted_tokens,
    )
    saved = GaugeMetricFamily(
        "coppice_draft_saved_seconds",
        "An estimate: time of the steps that accepted tokens would have taken, less what drafted "
        "ones added to steps, and the draft model's time",
        labels=["source"],
    )
    for source, seconds in stats.draft_seconds_saved.items():
        saved.add_metric([source], seconds)
    yield saved
    yield CounterMetricFamily(
        "coppice_draft_base_tokens",
        "Tokens of sequences, one a step, that could have had a draft; accepted tokens came beside",
        stats.draft_rows,
    )
    yield _counters(
        "coppice_draft_model_tokens",
        "Tokens of the draft model. hit: of texts that its own tree had; computed: of texts, and "
        "drafted ones",
        "kind",
        stats.draft_model_tokens,
    )
    yield CounterMetricFamily(
        "coppice_draft_model_seconds",
        "Time that passes of the draft model took",
        stats.draft_model_seconds,
    )


def _tiers(tiers: TiersReport | None) -> Iterator[Metric]:
    """By tier; without tiers the families are empty."""
    stores = () if tiers is None else tiers.stores
    counted = {
        "loaded_tokens": "Prompt tokens whose KV came back from a tier",
        "loaded_bytes": "Bytes that came back from it",
        "load_seconds": "Time that threads took to read them",
        "written_bytes": "Bytes that were stored in it",
        "write_seconds": "Time that its thread took to store them",
        "failures": "Calls that it could not serve",
        "slow": "Loads that were given up, since it took much longer than before",
        "damaged": "Pages that were found damaged, and were computed again",
        "warmed_tokens": "Tokens whose KV came back from it before anybody asked for them",
    }
    units = {
        "failures": "failed_calls",
        "slow": "slow_loads",
        "damaged": "damaged_pages",
        "computed_instead": "computed_instead_tokens",
    }
    for field, text in counted.items():
        by_name = {each.name: getattr(each, field) for each in stores}
        yield _counters(f"coppice_tier_{units.get(field, field)}", text, "tier", by_name)
    for field, text in {
        "used_bytes": "Bytes that it keeps",
        "capacity_bytes": "Bytes that it may keep",
    }.items():
        room = GaugeMetricFamily(f"coppice_tier_{field}", text, labels=["tier"])
        for each in stores:
            if (size := getattr(each, field)) is not None:
                room.add_metric([each.name], size)
        yield room
    kinds: dict[str, tuple[type[CounterMetricFamily | GaugeMetricFamily], str]] = {
        "found_tokens": (
            CounterMetricFamily,
            "Prompt tokens that a tier had when a request asked, loaded or computed",
        ),
        "computed_instead": (
            CounterMetricFamily,
            "Prompt tokens that a tier had and that were computed, which was faster",
        ),
        "saved_seconds": (
            CounterMetricFamily,
            "An estimate: time that computing what was loaded would have taken, less that of "
            "reading it",
        ),
        "unwritten_pages": (
            CounterMetricFamily,
            "Pages that left the KV cache and were not kept, since too many waited to be stored",
        ),
        "waiting_bytes": (GaugeMetricFamily, "Bytes that wait to be stored"),
    }
    for field, (kind, text) in kinds.items():
        family = kind(f"coppice_tiers_{units.get(field, field)}", text)
        if tiers is not None:
            family.add_metric([], getattr(tiers, field))
        yield family


def _adapters(stats: EngineStats) -> Iterator[Metric]:
    """By adapter, of those that are loaded."""
    for name, text, fields in (
        ("coppice_adapter_requests", "Requests on which an adapter acts", {"": "requests"}),
        (
            "coppice_adapter_prompt_tokens",
            "Their prompt tokens. base: those before an invocation, which are the base model's",
            {"adapter": "prompt_tokens", "base": "base_tokens"},
        ),
        (
            "coppice_adapter_hit_tokens",
            "Those of them whose KV was reused",
            {"adapter": "hit_tokens", "base": "base_hit_tokens"},
        ),
    ):
        labels = ["adapter"] if "" in fields else ["adapter", "part"]
        family = CounterMetricFamily(name, text, labels=labels)
        for each in stats.adapters:
            for part, field in fields.items():
                count = getattr(each, field)
                if part == "adapter":
                    count -= getattr(each, fields["base"])
                family.add_metric([each.identity, part][: len(labels)], count)
        yield family


def _replicas(replicas: Sequence[ReplicaReport]) -> Iterator[Metric]:
    """By replica, of those that there are; without replicas the families are empty."""
    prefix = "coppice_replica_"
    counted = {
        "requests": ("requests", "Requests that were admitted"),
        "prompt_tokens": ("prompt_tokens", "Their prompt tokens"),
        "hit_tokens": ("hit_tokens", "Those of them whose KV was reused"),
        "lost_tokens": ("other_replica", "Those that were computed though another replica held "
                                         "them"),
        "generated_tokens": ("generated_tokens", "Tokens that were generated"),
    }  # fmt: skip
    for name, (field, text) in counted.items():
        by_name = {each.name: getattr(each, field) for each in replicas}
        yield _counters(prefix + name, text, "replica", by_name)
    states = {
        "requests_running": "Requests with at least one running sequence",
        "requests_waiting": "Requests that wait for a place, preempted ones included",
    }
    for field, text in states.items():
        now = GaugeMetricFamily(prefix + field, text, labels=["replica"])
        for each in replicas:
            now.add_metric([each.name], getattr(each, field))
        yield now
    pages = GaugeMetricFamily(
        "coppice_replica_pool_pages", "Pages of its KV cache by state", labels=["replica", "state"]
    )
    memory = GaugeMetricFamily(
        "coppice_replica_memory_bytes", "Resident memory of its process", labels=["replica"]
    )
    for each in replicas:
        for state in ("free", "cached", "pinned", "held"):
            pages.add_metric([each.name, state], getattr(each, f"pages_{state}"))
        if each.resident_bytes is not None:
            memory.add_metric([each.name], each.resident_bytes)
    yield pages
    yield memory


def _counters(name: str, text: str, label: str, values: Mapping[str, float]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family


def _histogram(name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
    bounds = [*map(str, histogram.bounds), "+Inf"]
    buckets = list(zip(bounds, histogram.cumulative(), strict=True))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=histogram.total)
