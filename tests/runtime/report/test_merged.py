"""The snapshots of several replicas as one: what two engines did is the sum of what each did."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields, replace

import pytest

from coppice.radix.accounting.counts import Counts
from coppice.runtime.metrics.adapter_counts import AdapterReport
from coppice.runtime.metrics.histogram import Histogram
from coppice.runtime.metrics.prompt_accounts import RECENT_REQUESTS
from coppice.runtime.metrics.window_keys import WindowReport
from coppice.runtime.offline.replay import Replay, ReplayOptions, ReplayRequest
from coppice.runtime.report.merged import merged_report, merged_stats
from coppice.runtime.report.snapshot import (
    NOTHING,
    CacheReport,
    EngineStats,
    PinState,
    ReplicaReport,
)
from coppice.runtime.tiers.told import TierReport, TiersReport
from tests.runtime.offline.test_replay import random_trace

GAUGES = {"pages_total", "pages_free", "pages_cached", "pages_pinned", "pages_held",
          "requests_running", "requests_waiting", "cuda_graphs", "cuda_graph_seconds",
          "cuda_graph_bytes"}  # fmt: skip


def report_of(requests: Sequence[ReplayRequest], **options: int) -> CacheReport:
    replay = Replay(ReplayOptions(**({"pool_tokens": 300, "page_size": 4} | options)))
    list(replay.run(requests, len(requests)))
    made = replay.report()
    return CacheReport(**{each.name: getattr(made, each.name) for each in fields(CacheReport)})


def stats_of(report: CacheReport) -> EngineStats:
    return EngineStats(**{each.name: getattr(report, each.name) for each in fields(EngineStats)})


def tiers(factor: int, *names: str) -> TiersReport:
    """What tiers did, in which every field has a number of its own, times `factor`."""
    stores = []
    for name in names or ("disk", f"only {factor}"):
        counts = {each.name: number * factor for number, each in enumerate(fields(TierReport))}
        unknown = {"capacity_bytes": None} if name != "disk" else {}
        stores.append(TierReport(**(counts | {"name": name} | unknown)))  # type: ignore[arg-type]
    sums = {each.name: number * factor for number, each in enumerate(fields(TiersReport))}
    return TiersReport(**(sums | {"stores": tuple(stores)}))  # type: ignore[arg-type]


REPORT = report_of(random_trace(0, 20, 30))


def full(factor: int = 1) -> EngineStats:
    """Stats in which every field has a number of its own, times `factor`."""
    values: dict[str, object] = {}
    for number, each in enumerate(fields(EngineStats), 1):
        kind = str(each.type)
        values[each.name] = {
            "int": number * factor,
            "float": number * factor / 2,
            "int | None": number * factor,
            "Counts": Counts(*range(factor, factor + len(fields(Counts)))),
            "Histogram": Histogram((1.0, 2.0), (factor, 0, number), 0.5 * factor),
            "TiersReport | None": tiers(factor),
            "dict[str, float]": {"a": number * factor, "none": 0, f"only {factor}": 1},
            "dict[str, int]": {"a": number * factor, "none": 0, f"only {factor}": 1},
        }.get(kind, ())
    values["page_size"] = 16
    return EngineStats(**values)  # type: ignore[arg-type]


def test_every_field_is_a_sum_but_for_those_with_a_rule_of_their_own() -> None:
    one, two, gone = full(), full(2), full(5)
    merged = merged_stats({"1": one, "0": two}, [gone])
    for each in fields(EngineStats):
        name, kind = each.name, str(each.type)
        if name in ("page_size", "num_pins", "resident_bytes", "adapters", "tiers", "replicas"):
            continue
        parts = [getattr(part, name) for part in (one, two, gone)]
        if name in GAUGES:
            parts.pop()
        value = getattr(merged, name)
        if kind in ("int", "float"):
            assert value == sum(parts), name
        elif kind == "Counts":
            assert value == parts[0] + parts[1] + parts[2]
            assert sum(value.causes.values()) == sum(sum(p.causes.values()) for p in parts)
        elif kind == "Histogram":
            assert (value.counts[0], value.total, value.count) == (
                8, 4.0, sum(part.count for part in parts),
            )  # fmt: skip
        else:
            assert value["a"] == sum(part["a"] for part in parts)
            assert (value["none"], value["only 1"], value["only 5"]) == (0, 1, 1)
    assert merged.page_size == 16
    assert merged.num_pins == two.num_pins, "a pin is on every replica"
    assert merged.resident_bytes == one.resident_bytes + two.resident_bytes  # type: ignore[operator]


def test_tiers_are_told_together_and_what_they_keep_ends_with_an_engine() -> None:
    merged = merged_stats(
        {"1": full(), "0": full(2), "none": replace(full(), tiers=None)}, [full(5)]
    )
    assert merged.tiers is not None
    disk, two, one, five = merged.tiers.stores
    assert [each.name for each in (two, one, five)] == ["only 2", "only 1", "only 5"]
    now = ("used_bytes", "capacity_bytes")
    for number, each in enumerate(fields(TierReport)):
        if each.name != "name":
            assert getattr(disk, each.name) == number * (3 if each.name in now else 8), each.name
    assert (one.capacity_bytes, five.capacity_bytes, five.used_bytes) == (None, None, 0)
    assert five.loaded_tokens == 5
    for number, each in enumerate(fields(TiersReport)):
        if each.name != "stores":
            factor = 3 if each.name == "waiting_bytes" else 8
            assert getattr(merged.tiers, each.name) == number * factor, each.name
    assert merged_stats({"a": replace(full(), tiers=None)}).tiers is None


def test_what_each_replica_did_is_told() -> None:
    one, two = full(), full(2)
    merged = merged_stats({"b": one, "a": two}, [full(5)])
    assert [each.name for each in merged.replicas] == ["a", "b"]
    for each, stats in zip(merged.replicas, (two, one), strict=True):
        assert each.other_replica == stats.counts.other_replica
        for name in {field.name for field in fields(ReplicaReport)} - {"name", "other_replica"}:
            assert getattr(each, name) == getattr(stats, name), name
        assert each.hit_rate == stats.hit_rate
    assert replace(merged.replicas[0], prompt_tokens=0).hit_rate == 0


def test_no_count_falls_when_a_replica_leaves_but_its_pages_go() -> None:
    one, two = full(), full(2)
    before, after = merged_stats({"a": one, "b": two}), merged_stats({"a": one}, [two])
    assert (after.counts, after.ttft, after.finished) == (
        before.counts,
        before.ttft,
        before.finished,
    )
    assert after.generated_tokens == before.generated_tokens
    assert (after.pages_total, after.requests_running) == (one.pages_total, one.requests_running)
    assert [each.name for each in after.replicas] == ["a"]
    nobody = merged_stats({}, [one, two])
    assert merged_stats({"c": full(3)}, [nobody]) == merged_stats({"c": full(3)}, [one, two])
    assert nobody.counts == before.counts
    assert (nobody.pages_total, nobody.num_pins, nobody.resident_bytes) == (0, 0, None)
    with pytest.raises(ValueError, match="at least one replica"):
        merged_stats({})


def test_one_replica_is_as_it_is() -> None:
    stats = full()
    assert replace(merged_stats({"a": stats}), replicas=()) == stats
    merged = merged_report({"a": REPORT})
    assert replace(merged, replicas=()) == REPORT
    assert merged.replicas[0].prompt_tokens == REPORT.prompt_tokens


def test_pages_of_different_sizes_are_counted_in_pages_of_one() -> None:
    windows = WindowReport(2, ((11, 1),), 9, 1, 64, 1.5, 512)
    one = replace(REPORT, windows=windows)
    two = replace(one, page_size=6, eviction_policy="lfu")  # the other has pages of 4 tokens
    merged = merged_report({"a": one, "b": two}, [stats_of(REPORT)])
    assert (merged.page_size, merged.eviction_policy) == (2, "lfu and lru")
    for name in ("pages_total", "pages_free", "pages_cached", "pages_pinned", "pages_held"):
        assert getattr(merged, name) == 5 * getattr(one, name)
        parts = [getattr(each, name) for each in merged.replicas]
        assert parts == [2 * getattr(one, name), 3 * getattr(one, name)]
    assert merged.windows is not None
    assert merged.windows.pages_old == 5 * windows.pages_old
    found = zip(merged.top_prefixes, one.top_prefixes, strict=True)
    assert all(each.resident_pages == 5 * prefix.resident_pages for each, prefix in found)
    assert merged_stats({"a": one, "b": two}).pages_total == merged.pages_total


def test_pages_of_those_that_left_have_no_size() -> None:
    left = [full(), replace(full(2), page_size=32)]
    assert merged_stats({}, left).requests == 3 * full().requests
    for size in (16, 32):
        there = {"a": replace(full(), page_size=size)}
        assert merged_stats(there, left).page_size == size
        assert merged_stats(there, [merged_stats({}, left)]) == merged_stats(there, left)


def test_what_does_not_fit_together_is_refused() -> None:
    windows = WindowReport(2, ((11, 1),), 9, 1, 64, 1.0, 512)
    other = replace(windows, windows=((12, 1),))
    with pytest.raises(ValueError, match="same windows"):
        merged_report({"a": replace(REPORT, windows=windows), "b": replace(REPORT, windows=other)})
    with pytest.raises(ValueError, match="other buckets"):
        merged_stats({"a": full(), "b": replace(full(), ttft=Histogram((3.0,), (0, 0), 0.0))})
    with pytest.raises(ValueError, match="at least one replica"):
        merged_report({}, [full()])


def test_memory_is_known_only_if_all_know_theirs() -> None:
    assert (
        merged_stats({"a": full(), "b": replace(full(), resident_bytes=None)}).resident_bytes
        is None
    )


def test_a_histogram_that_was_not_measured_adds_nothing() -> None:
    measured = full().ttft
    assert NOTHING.plus(measured) == measured.plus(NOTHING) == measured
    assert NOTHING.plus(NOTHING) == NOTHING


def test_adapters_by_their_identity() -> None:
    judge = AdapterReport("judge", "judge@1", True, True, 3, 100, 90, 80, 70)
    other = replace(judge, unloading=False, requests=1)
    writer = AdapterReport("writer", "writer@2", False, False, 1, 10, 5)
    parts = {
        "a": replace(full(), adapters=(judge,)),
        "b": replace(full(), adapters=(writer, other)),
    }
    left = [
        replace(full(), adapters=(replace(judge, unloading=True), replace(writer, identity="gone")))
    ]
    merged = merged_stats(parts, left).adapters
    assert [(each.identity, each.requests, each.unloading) for each in merged] == [
        ("judge@1", 7, False), ("writer@2", 1, False),
    ]  # fmt: skip
    assert (merged[0].prompt_tokens, merged[0].base_hit_tokens) == (300, 210)
    assert merged_stats({"a": parts["a"]}, left).adapters[0].unloading
    folded = merged_stats({}, [parts["a"], parts["b"]])
    assert merged_stats({"c": parts["b"]}, [folded]).adapters[1].requests == 1 + 4


def test_a_pin_is_listed_once() -> None:
    pin = PinState("p", None, 100, 40, 20.0, 12.0)
    longer = replace(pin, cached_tokens=90, ttl=60.0, seconds_left=50.0)
    other = PinState("q", None, 9, 9, None, None)
    parts = {
        "a": replace(REPORT, pins=(pin,)),
        "b": replace(REPORT, pins=(other, longer)),
    }
    merged = merged_report(parts)
    assert merged.pins == (longer, other)
    assert merged.num_pins == 2


def test_windows_are_summed() -> None:
    windows = WindowReport(2, ((11, 1),), 9, 1, 64, 1.0, 512)
    parts = {"a": replace(REPORT, windows=windows), "b": replace(REPORT, windows=windows)}
    assert merged_report(parts).windows == WindowReport(2, ((11, 1),), 18, 2, 128, 2.0, 1024)
    assert merged_report({"a": REPORT}).windows is None


def test_the_tree_may_be_left_out() -> None:
    cheap = replace(REPORT, tree=None)
    assert merged_report({"a": cheap, "b": cheap}).tree is None
    assert merged_report({"a": cheap, "b": REPORT}).tree == REPORT.tree


@pytest.mark.parametrize("seed", range(6))
def test_two_replayed_engines_are_their_sums(seed: int) -> None:
    rng = random.Random(seed)
    trace = random_trace(seed, 120, 60)
    chosen = [rng.random() < 0.6 for _ in trace]
    halves = [
        [each for each, ours in zip(trace, chosen, strict=True) if ours is side]
        for side in (True, False)
    ]
    parts = {
        f"r{at}": report_of(half, pool_tokens=100 * (1 + seed)) for at, half in enumerate(halves)
    }
    one, two = parts.values()
    gone = stats_of(report_of(random_trace(seed + 50, 30, 40)))
    merged = merged_report(parts, [gone])
    whole = merged_report(parts)

    counts = merged.accounts.overall.since_start
    assert counts == merged.counts == one.counts + two.counts + gone.counts
    assert counts.prompt_tokens == counts.hit_tokens + sum(counts.causes.values())
    assert counts.prompt_tokens == merged.prompt_tokens
    assert whole.counts == one.counts + two.counts
    for window in ("last_minute", "last_ten_minutes", "since_start"):
        listed = [*merged.accounts.namespaces.values(), merged.accounts.other_namespaces]
        added = sum((getattr(each, window) for each in listed), Counts())
        assert added == getattr(merged.accounts.overall, window)
    assert merged.evicted_tokens == one.evicted_tokens + two.evicted_tokens + gone.evicted_tokens
    states = merged.pages_free + merged.pages_cached + merged.pages_pinned + merged.pages_held
    assert states == merged.pages_total == one.pages_total + two.pages_total

    rates = [point.hit_rate for point in merged.accounts.curve]
    assert rates == sorted(rates)
    for at, rate in enumerate(rates):
        both = sorted(part.accounts.curve[at].hit_rate for part in (one, two))
        assert both[0] - 1e-9 <= rate <= both[1] + 1e-9

    ages = [each.seconds_ago for each in merged.recent]
    assert ages == sorted(ages, reverse=True)
    assert len(ages) == min(RECENT_REQUESTS, len(one.recent) + len(two.recent))

    assert merged.tree is not None and one.tree is not None and two.tree is not None
    nodes = merged.tree.nodes
    for at, each in enumerate(nodes):
        assert each.parent < at
        if each.parent >= 0:
            above = nodes[each.parent]
            assert (above.end, above.namespace) == (each.start, each.namespace)
            assert above.subtree_saved >= each.subtree_saved
    saved = sum(each.tokens_saved for part in (one, two) for each in part.tree.nodes)  # type: ignore[union-attr]
    assert sum(each.tokens_saved for each in nodes) <= saved
    # Most first: of tokens that two namespaces have, the better one stays.
    best = {each.tokens: each.tokens_saved for each in reversed(merged.top_prefixes)}
    for part in (one, two):
        for each in part.top_prefixes:
            assert best.get(each.tokens, 10**9) >= each.tokens_saved


def test_two_replicas_with_the_same_requests_saved_twice_as_much() -> None:
    merged = merged_report({"a": REPORT, "b": REPORT})
    assert merged.tree is not None and REPORT.tree is not None
    assert [each.tokens_saved for each in merged.top_prefixes] == [
        2 * each.tokens_saved for each in REPORT.top_prefixes
    ]
    assert [(each.parent, each.token_ids, each.subtree_saved) for each in merged.tree.nodes] == [
        (each.parent, each.token_ids, 2 * each.subtree_saved) for each in REPORT.tree.nodes
    ]
    assert merged.hit_rate == REPORT.hit_rate
    assert merged.accounts.overall.since_start.ideal_hit_rate == pytest.approx(
        REPORT.accounts.overall.since_start.ideal_hit_rate
    )
