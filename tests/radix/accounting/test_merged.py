"""The accounts of several trees as one: sums, one curve, and what is the same listed once."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import numpy as np
import pytest

from coppice.radix import CacheAccounts, PrefixNode, SharedPrefix
from coppice.radix.accounting.counts import MAX_NAMESPACES, Counts, Windows
from coppice.radix.accounting.ledger import Accounting
from coppice.radix.accounting.merged import merged_accounts, merged_nodes, merged_prefixes
from coppice.radix.accounting.miss_ratio import FACTORS, CurvePoint
from coppice.radix.accounting.near_misses import EXAMPLES, Difference, NearMiss

NONE = Windows(Counts(), Counts(), Counts())


def windows(tokens: int, hit: int = 0) -> Windows:
    counts = Counts(1, tokens, hit, cold=tokens - hit)
    return Windows(Counts(), counts, counts + counts)


def accounts(overall: Windows = NONE, pool: int = 100, **fields: object) -> CacheAccounts:
    whole = CacheAccounts(1.0, pool, overall, {}, NONE, (), ())
    return replace(whole, **fields)  # type: ignore[arg-type]


def text(number: int, count: int) -> bytes:
    return np.random.default_rng(number).integers(0, 32_000, count, np.int32).tobytes()


def test_counts_add_up() -> None:
    parts = [
        accounts(windows(100, 60), 300, namespaces={None: windows(90, 60), "a": windows(10)}),
        accounts(windows(40), 500, seconds=9.0, namespaces={"a": windows(30), "b": windows(10)}),
    ]
    gone = Counts(7, 70, 20, last_token=1, other_replica=9, cold=40)
    merged = merged_accounts(parts, gone)
    assert (merged.seconds, merged.pool_tokens) == (9.0, 800)
    assert merged.overall.last_ten_minutes == Counts(2, 140, 60, cold=80), "of those that are there"
    assert merged.overall.since_start == Counts(11, 350, 140, 1, 0, 9, cold=200)
    assert set(merged.namespaces) == {None, "a", "b"}
    assert merged.namespaces["a"].since_start == Counts(4, 80, cold=80)
    assert merged.other_namespaces == Windows(Counts(), Counts(), gone)
    assert merged_accounts(parts[:1]) == parts[0]
    with pytest.raises(ValueError, match="at least one"):
        merged_accounts([])


def test_namespaces_are_bounded_and_still_add_up() -> None:
    parts = [
        accounts(
            namespaces={(part, number): windows(1 + number) for number in range(MAX_NAMESPACES)},
            other_namespaces=windows(1000),
        )
        for part in range(3)
    ]
    merged = merged_accounts(parts)
    assert len(merged.namespaces) == MAX_NAMESPACES
    assert min(each.since_start.prompt_tokens for each in merged.namespaces.values()) > 80

    def tokens(each: CacheAccounts) -> int:
        listed = [*each.namespaces.values(), each.other_namespaces]
        return sum(windows.since_start.prompt_tokens for windows in listed)

    assert tokens(merged) == sum(map(tokens, parts))


def test_a_curve_of_all_pools_and_all_prompts() -> None:
    def curve(*rates: float, pool: int = 100) -> tuple[CurvePoint, ...]:
        return tuple(CurvePoint(2.0**at, 2**at * pool, rate) for at, rate in enumerate(rates))

    parts = [
        accounts(windows(100), 100, curve=curve(0.2, 0.4)),
        accounts(windows(300), 300, curve=curve(0.6, 0.8)),
        accounts(pool=200),  # no prompt has come there
    ]
    merged = merged_accounts(parts).curve
    assert [(point.factor, point.pool_tokens) for point in merged] == [(1.0, 600), (2.0, 1200)]
    assert [point.hit_rate for point in merged] == pytest.approx([0.5, 0.7])
    assert merged_accounts([accounts(), accounts()]).curve == ()
    other = accounts(windows(1), curve=(CurvePoint(3.0, 300, 0.1), CurvePoint(4.0, 400, 0.1)))
    with pytest.raises(ValueError, match="different points"):
        merged_accounts([parts[0], other])


def test_replicas_with_the_same_requests_have_the_same_curve() -> None:
    parts = []
    for _ in range(2):
        ledger = Accounting(3000, now=0.0)
        for number in range(60):
            shared = text(number % 7, 400)
            hit = 300 if number >= 7 and number % 3 else 0
            ledger.request(shared + text(number, 40), None, hit, now=float(number))
        parts.append(ledger.snapshot(now=60.0))
    merged = merged_accounts(parts)
    (one, _) = parts
    assert len(merged.curve) == len(FACTORS)
    assert [point.pool_tokens for point in merged.curve] == [
        round(2 * 3000 * factor) for factor in FACTORS
    ]
    assert [point.hit_rate for point in merged.curve] == pytest.approx(
        [point.hit_rate for point in one.curve]
    )
    assert merged.overall.since_start == one.overall.since_start + one.overall.since_start


def near(cost: int, position: int, ours: int, after: int, space: Hashable = None) -> NearMiss:
    sides = (Difference((ours,), ()),)
    return NearMiss(space, 2, cost, position, (position,), sides, cost // 2, (after,))


def test_near_misses_of_the_same_text_are_one() -> None:
    first = accounts(near_misses=(near(100, 9, 1, 7), near(30, 2, 1, 8)))
    second = accounts(near_misses=(near(90, 4, 2, 8), near(50, 5, 3, 7, "b"), near(3, 1, 1, 7)))
    merged = merged_accounts([first, second]).near_misses
    assert [(each.tokens_cost, each.requests, each.namespace) for each in merged] == [
        (120, 4, None), (103, 4, None), (50, 2, "b"),
    ]  # fmt: skip
    assert (merged[0].position, merged[0].before, merged[0].tokens_after) == (2, (2,), 30)
    assert merged[0].differences == (Difference((1,), ()), Difference((2,), ()))
    assert merged[1].differences == (Difference((1,), ()),)
    many = [accounts(near_misses=(near(10, 1, number, 7),)) for number in range(9)]
    assert len(merged_accounts(many).near_misses[0].differences) == EXAMPLES
    apart = [accounts(near_misses=(near(number, 1, 1, number),)) for number in range(1, 30)]
    kept = merged_accounts(apart).near_misses
    assert [each.tokens_cost for each in kept] == list(range(29, 19, -1))


def test_prefixes_of_the_same_tokens_are_one() -> None:
    a, b, c = text(1, 9), text(2, 9), text(3, 9)
    first = [SharedPrefix(a, 5, 45, 2, 1.0), SharedPrefix(b, 2, 18, 2)]
    second = [
        SharedPrefix(c, 4, 36, 2, 7.0),
        SharedPrefix(b, 3, 27, 2, 3.0),
        SharedPrefix(a, 1, 9, 2, 4.0),
    ]
    merged = merged_prefixes([first, second], 10)
    assert merged == (
        SharedPrefix(a, 6, 54, 4, 1.0),
        SharedPrefix(b, 5, 45, 4, 3.0),
        SharedPrefix(c, 4, 36, 2, 7.0),
    )
    assert merged_prefixes([first, second], 1) == merged[:1]
    # In one tree the same tokens twice are of two namespaces.
    assert merged_prefixes([[first[0], SharedPrefix(a, 1, 9)]], 10)[1].hits == 1


def node(
    parent: int, start: int, length: int, saved: int, first: int, space: Hashable = None
) -> PrefixNode:
    return PrefixNode(parent, space, start, length, saved, saved, saved, (first,))


def test_nodes_of_the_same_path_are_one() -> None:
    first = [node(-1, 0, 10, 100, 1), node(0, 10, 5, 40, 2), node(-1, 0, 10, 30, 1, "b")]
    second = [
        node(-1, 0, 10, 30, 1, "b"),
        node(-1, 0, 10, 20, 1),
        node(1, 10, 5, 7, 3),
        node(1, 10, 5, 3, 2),
    ]
    merged = merged_nodes([first, second], 10)
    saved = [(each.parent, each.namespace, *each.token_ids, each.subtree_saved) for each in merged]
    assert saved == [(-1, None, 1, 120), (-1, "b", 1, 60), (0, None, 2, 43), (0, None, 3, 7)]
    assert [each.hits for each in merged] == [120, 60, 43, 7]
    assert merged_nodes([first, second], 2) == merged[:2]
    # The same tokens below another parent, or on an edge of another length, are others.
    third = [node(-1, 0, 12, 9, 1), node(0, 12, 5, 8, 2)]
    assert len(merged_nodes([first, third], 10)) == 5
    assert merged_nodes([first], 10) == (first[0], first[1], first[2])
    assert merged_nodes([], 10) == ()
