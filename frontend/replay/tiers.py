"""The tiers of a replay: what their options mean, other sizes measured, and which one to buy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any

from coppice.frontend.report.words import duration, short_count
from coppice.runtime.offline.tiers import TierRates, TierSize
from coppice.runtime.tiers.sizes import parse_size, size_text

UNLIMITED = "unlimited"
READ = {"host": 20e9, "disk": 2e9, "shared": 1e9}
"""The tiers, the fastest first; bytes a second that each is assumed to read if none are given."""

_MOST = 16  # combinations of sizes, each of which replays the whole trace
_ENOUGH = 0.95  # of the best gain, which a smaller size may miss
_DEARER = 20  # times as much as a byte of disk costs one of memory, roughly
_GAIN = 0.005  # of hit rate, from which a tier is worth buying


@dataclass(frozen=True, slots=True)
class TierOptions:
    """The options of `coppice replay` that are about tiers, as they were given.

    Attributes:
        host, disk, shared: sizes, divided by commas: tokens, sizes in bytes such as 64GiB, or
            unlimited.
        model: whose KV is kept: a folder, a config.json or a hub id.
        token_bytes: of a token's KV; None: those of the model at 16 bits a number.
        prefill_rate: tokens of prompts computed a second.
        rates: bytes that tiers read a second, as sizes, by the name of the tier.
    """

    host: str | None = None
    disk: str | None = None
    shared: str | None = None
    model: str | None = None
    token_bytes: int | None = None
    prefill_rate: float | None = None
    rates: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TierPlan:
    """What is replayed: the sizes of each tier (none: it is left out), and what they take.

    `sizes` has the tiers in the order of `READ`.
    """

    sizes: tuple[tuple[TierSize, ...], ...]
    rates: TierRates

    @property
    def first(self) -> tuple[TierSize, ...]:
        """The tiers of the replay that is reported: the first size of each."""
        return tuple(each[0] for each in self.sizes if each)

    def combinations(self) -> list[tuple[TierSize, ...]]:
        """All of them, from no tier on."""
        found = product(*([None, *each] for each in self.sizes))
        return [tuple(each for each in chosen if each is not None) for chosen in found]


def plan_tiers(options: TierOptions) -> TierPlan | None:
    """What the options mean; None if they name no tier. Raises ValueError for a wrong one."""
    given_sizes = {tier: getattr(options, tier) for tier in READ}
    if all(each is None for each in given_sizes.values()):
        others = {
            "model": options.model,
            "kv-bytes-per-token": options.token_bytes,
            "prefill-rate": options.prefill_rate,
            **{f"{tier}-rate": rate for tier, rate in options.rates.items()},
        }
        if given := [name for name, value in others.items() if value is not None]:
            raise ValueError(
                f"{given[0]} needs host-cache, disk-cache or shared-cache, whose gain it is for"
            )
        return None
    width = _token_bytes(options)
    compute = options.prefill_rate
    for tier, rate in options.rates.items():
        if rate is not None and given_sizes[tier] is None:
            raise ValueError(f"{tier}-rate needs {tier}-cache, whose rate it is; got {rate!r}")
    read = {
        tier: float(parse_size(f"{tier}-rate", options.rates[tier]))
        if options.rates.get(tier) is not None
        else assumed
        for tier, assumed in READ.items()
        if given_sizes[tier] is not None
    }
    if compute is not None and not compute > 0:
        raise ValueError(f"prefill-rate must be above 0 tokens a second, got {compute!r}")
    plan = TierPlan(
        tuple(_sizes(tier, given, width) for tier, given in given_sizes.items()),
        TierRates(width, compute, read),
    )
    if (count := len(plan.combinations())) > _MOST:
        raise ValueError(
            f"host-cache, disk-cache and shared-cache: at most {_MOST} combinations of sizes are "
            f"replayed, none of each included, got {count}"
        )
    return plan


def _token_bytes(options: TierOptions) -> int | None:
    if options.token_bytes is not None:
        if options.token_bytes < 1:
            raise ValueError(f"kv-bytes-per-token must be at least 1, got {options.token_bytes}")
        if options.model is not None:
            raise ValueError("kv-bytes-per-token must not be given with model, which tells them")
        return options.token_bytes
    if options.model is None:
        return None
    from coppice.runtime.planning.cache import model_token_bytes
    from coppice.runtime.planning.source import find_config, read_model

    return model_token_bytes(read_model(find_config(options.model)), 2)


def _sizes(tier: str, given: str | None, width: int | None) -> tuple[TierSize, ...]:
    """The sizes of a tier, in tokens, in the order in which they were given."""
    if given is None:
        return ()
    name, found = f"{tier}-cache", dict[TierSize, None]()
    for part in given.split(","):
        text = part.strip()
        if text == UNLIMITED:
            found[TierSize(tier, None)] = None
            continue
        size = parse_size(name, text)
        if text.upper().endswith(("B", "I")):  # 64GiB, 64GB, 64Gi
            if width is None:
                raise ValueError(
                    f"{name} {text}: bytes need model or kv-bytes-per-token, to be tokens"
                )
            size //= width
        found[TierSize(tier, max(1, size))] = None
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Measured:
    """What the requests hit with some tiers.

    Attributes:
        tiers: the tiers.
        hit_rate: hit tokens over prompt tokens.
        kept: tokens that each tier had room for at the end, by its name.
        saved_seconds: of computing, less what loading took; None if the rates are unknown.
    """

    tiers: tuple[TierSize, ...]
    hit_rate: float
    kept: dict[str, int]
    saved_seconds: float | None


def encode_tier_sizes(plan: TierPlan, measured: Sequence[Measured], pool: int) -> dict[str, Any]:
    """The sizes that were measured, as the JSON of a replay has them; `pool`: its tokens."""
    rates = plan.rates
    rows = [
        {
            "tiers": [asdict(tier) | {"kept_tokens": each.kept[tier.name]} for tier in each.tiers],
            "chosen": each.tiers == plan.first,
            "hit_rate": each.hit_rate,
            "saved_seconds": each.saved_seconds,
        }
        for each in measured
    ]
    best = _best(measured, rates)
    return {
        "token_bytes": rates.token_bytes,
        "prefill_tokens_a_second": rates.compute,
        "read_bytes_a_second": rates.read,
        "rows": rows,
        "advice": _advice(best, measured, rates, pool),
        "note": _note(rates),
    }


def _best(measured: Sequence[Measured], rates: TierRates) -> Measured | None:
    """The cheapest tiers that gain nearly as much as any; None if none gains enough."""
    base = measured[0]
    gains = [each.hit_rate - base.hit_rate for each in measured]
    if max(gains) < _GAIN:
        return None

    def cost(each: Measured) -> int:
        return sum(
            (1 if tier.name == "disk" else _DEARER) * each.kept[tier.name] for tier in each.tiers
        )

    def gain(each: Measured) -> float:
        if rates.compute is None or each.saved_seconds is None:
            return each.hit_rate - base.hit_rate
        return each.saved_seconds

    most = max(map(gain, measured))
    return min((each for each in measured if gain(each) >= _ENOUGH * most), key=cost)


def _advice(
    best: Measured | None, measured: Sequence[Measured], rates: TierRates, pool: int
) -> str:
    base = measured[0]
    if best is None or not best.tiers:
        return (
            f"No tier is worth it: the pool of {short_count(pool)} tokens alone hits "
            f"{base.hit_rate:.1%}, with tiers at most {max(e.hit_rate for e in measured):.1%}."
        )
    parts = [f"{_name(tier.name)} of {size_words(tier, best, rates)}" for tier in best.tiers]
    said = (
        f"Buy {' and '.join(parts)}: the hit rate becomes {best.hit_rate:.1%} instead of "
        f"{base.hit_rate:.1%}"
    )
    if best.saved_seconds:
        said += f", which saves {duration(best.saved_seconds)} of computing"
    top = max(measured, key=lambda each: each.hit_rate)
    if top.hit_rate - best.hit_rate >= 0.0005:
        said += f". The largest of those measured reach {top.hit_rate:.1%}"
    return f"{said}."


def _name(tier: str) -> str:
    return {"host": "main memory", "shared": "a shared server"}.get(tier, f"a {tier}")


def size_words(tier: TierSize, measured: Measured, rates: TierRates) -> str:
    """The size of a tier: what was used of one without limit."""
    kept = measured.kept[tier.name]
    tokens = kept if tier.tokens is None else tier.tokens
    words = f"{short_count(tokens)} tokens"
    if rates.token_bytes is not None:
        words += f" ({size_text(tokens * rates.token_bytes)})"
    return words


def _note(rates: TierRates) -> str:
    """What the figures rest on."""
    if rates.token_bytes is None or rates.compute is None:
        return (
            "Whatever a tier has is loaded. With the bytes of a token (--model) and the rate of "
            "prefills (--prefill-rate or --machine), seconds are told, and what is faster computed "
            "is."
        )
    read = ", ".join(f"{tier} {rate / 1e9:g} GB/s" for tier, rate in rates.read.items())
    return (
        f"Seconds follow from {rates.token_bytes:,} bytes and {1000 / rates.compute:.3g} ms of "
        f"computing a token, and from reading at {read}; what is faster computed is."
    )
