"""The accounts of several trees as one, such as those of replicas between which requests go."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from coppice.radix.accounting.accounts import CacheAccounts
from coppice.radix.accounting.counts import MAX_NAMESPACES, Counts, Windows
from coppice.radix.accounting.miss_ratio import CurvePoint
from coppice.radix.accounting.near_misses import EXAMPLES, NearMiss
from coppice.radix.accounting.top_prefixes import PrefixNode, SharedPrefix

_NEAR_MISSES = 10


def merged_accounts(parts: Sequence[CacheAccounts], left: Counts | None = None) -> CacheAccounts:
    """The accounts of all trees together, as of one time.

    Counts are sums. The curve is for the trees' present shares of the requests, each tree with the
    same multiple of its pool: `pool_tokens` are those of all pools, and a hit rate is that of all
    prompts. A namespace that one tree counts among the others is counted separately as far as
    other trees do; the `MAX_NAMESPACES` with the most prompt tokens are.

    Args:
        parts: the accounts, at least one.
        left: counts since the start of trees that are gone, which join those since the start.

    Raises ValueError without a part, and for curves with different points.
    """
    if not parts:
        raise ValueError("parts: the accounts of at least one tree are needed, got none")
    gone = Windows(Counts(), Counts(), left or Counts())
    namespaces: defaultdict[Hashable, list[Windows]] = defaultdict(list)
    for part in parts:
        for name, windows in part.namespaces.items():
            namespaces[name].append(windows)
    merged = {name: _windows(found) for name, found in namespaces.items()}
    others = [part.other_namespaces for part in parts]
    most = sorted(merged, key=lambda name: -merged[name].since_start.prompt_tokens)
    others += [merged.pop(name) for name in most[MAX_NAMESPACES:]]
    return CacheAccounts(
        max(part.seconds for part in parts),
        sum(part.pool_tokens for part in parts),
        _windows([*(part.overall for part in parts), gone]),
        merged,
        _windows([*others, gone]),
        _curve(parts),
        _near_misses(miss for part in parts for miss in part.near_misses),
    )


def merged_prefixes(
    trees: Iterable[Sequence[SharedPrefix]], count: int
) -> tuple[SharedPrefix, ...]:
    """The up to `count` prefixes that saved the most tokens in all trees together, most first.

    Prefixes of the same tokens in several trees are one, with the sums of hits, savings and pages,
    and the idle time of the one that was used last. O(n log n) for n prefixes.
    """
    found: dict[tuple[bytes, int], SharedPrefix] = {}
    for prefixes in trees:
        times: Counter[bytes] = Counter()  # in one tree those of several namespaces stay apart
        for prefix in prefixes:
            key = prefix.tokens, times[prefix.tokens]
            times[prefix.tokens] += 1
            if (other := found.get(key)) is not None:
                idle = [each.idle_seconds for each in (prefix, other)]
                prefix = SharedPrefix(
                    prefix.tokens,
                    prefix.hits + other.hits,
                    prefix.tokens_saved + other.tokens_saved,
                    prefix.resident_pages + other.resident_pages,
                    min((each for each in idle if each is not None), default=None),
                )
            found[key] = prefix
    return tuple(sorted(found.values(), key=lambda each: -each.tokens_saved)[:count])


def merged_nodes(trees: Iterable[Sequence[PrefixNode]], count: int) -> tuple[PrefixNode, ...]:
    """The up to `count` nodes whose subtrees saved the most tokens, parents before children.

    Nodes of several trees are one if their parents are, and if their edges have the same length
    and, as far as they are shown, the same tokens. Each tree's parents come before their children.
    O(n log n) for n nodes.
    """
    places: dict[tuple[Hashable, ...], int] = {}
    found: list[PrefixNode] = []
    for nodes in trees:
        own: list[int] = []  # where each node of this tree is found
        for node in nodes:
            parent = own[node.parent] if node.parent >= 0 else -1
            key = parent, node.namespace, node.start, node.length, node.token_ids
            place = places.setdefault(key, len(found))
            own.append(place)
            if place == len(found):
                found.append(replace(node, parent=parent))
                continue
            other = found[place]
            found[place] = replace(
                other,
                hits=other.hits + node.hits,
                tokens_saved=other.tokens_saved + node.tokens_saved,
                subtree_saved=other.subtree_saved + node.subtree_saved,
            )
    # A subtree saved no less than one inside it, which begins later: each node's parent is kept.
    order = sorted(range(len(found)), key=lambda at: (-found[at].subtree_saved, found[at].start))
    new = {at: number for number, at in enumerate(order[:count])}
    return tuple(replace(found[at], parent=new.get(found[at].parent, -1)) for at in new)


def _windows(parts: Sequence[Windows]) -> Windows:
    return Windows(
        sum((part.last_minute for part in parts), Counts()),
        sum((part.last_ten_minutes for part in parts), Counts()),
        sum((part.since_start for part in parts), Counts()),
    )


def _curve(parts: Sequence[CacheAccounts]) -> tuple[CurvePoint, ...]:
    drawn = [part for part in parts if part.curve]
    if not drawn:
        return ()
    prompts = [part.overall.since_start.prompt_tokens for part in drawn]
    pool, total = sum(part.pool_tokens for part in parts), sum(prompts)
    points = []
    for same in zip(*(part.curve for part in drawn), strict=True):
        factor = same[0].factor
        if any(point.factor != factor for point in same):
            raise ValueError("parts: their curves have different points")
        hits = sum(point.hit_rate * tokens for point, tokens in zip(same, prompts, strict=True))
        points.append(CurvePoint(factor, round(factor * pool), hits / total if total else 0.0))
    return tuple(points)


def _near_misses(misses: Iterable[NearMiss]) -> tuple[NearMiss, ...]:
    """The costliest groups; those of a namespace that continue with the same tokens are one."""
    found: dict[tuple[Hashable, tuple[int, ...]], NearMiss] = {}
    for miss in misses:
        key = miss.namespace, miss.after
        if (other := found.get(key)) is not None:
            first = min(other, miss, key=lambda each: each.position)
            requests, cost = other.requests + miss.requests, other.tokens_cost + miss.tokens_cost
            differences = dict.fromkeys((*other.differences, *miss.differences))
            miss = replace(
                first,
                requests=requests,
                tokens_cost=cost,
                differences=tuple(differences)[:EXAMPLES],
                tokens_after=cost // requests,
            )
        found[key] = miss
    return tuple(sorted(found.values(), key=lambda each: -each.tokens_cost)[:_NEAR_MISSES])
