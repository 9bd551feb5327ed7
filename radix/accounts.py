"""The nouns of the cache's accounts: of one request, and of the cache as a whole."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, get_args

from coppice.radix.curve import CurvePoint
from coppice.radix.near_misses import SHOWN_TOKENS, NearMiss
from coppice.radix.tokens import TOKEN_BYTES
from coppice.radix.windows import CAUSES, FIELDS, Counts, Windows

Kind = Literal["cross", "same", "preempted"]
"""Where a hit comes from: other requests, the request's own sequences, or before a preemption."""


class Divergence(NamedTuple):
    """Where a prompt leaves what is cached, and the tokens around (int32 bytes, a few dozen)."""

    position: int
    before: bytes
    ours: bytes
    theirs: bytes

    @classmethod
    def at(cls, tokens: bytes, position: int, theirs: bytes) -> Divergence:
        """The divergence of the prompt `tokens`, where the tree goes on with `theirs`. O(1)."""
        middle, shown = position * TOKEN_BYTES, SHOWN_TOKENS * TOKEN_BYTES
        return cls(
            position,
            tokens[max(0, middle - shown) : middle],
            tokens[middle : middle + shown],
            theirs[:shown],
        )


Numbers = tuple[int, int, int, bool, int, int, int]
"""A piece of tokens among those that are processed together: its prompt's tokens, those of the hit
and those in flight, and whether it counts in rates (all 0 for what is no prompt); the position from
which its content is new; the first block of its tokens; and the piece that it continues, or -1.
"""


class RequestAccount:
    """What became of a prompt's tokens. Asking for a cause settles what is still pending."""

    __slots__ = ("namespace", "kind", "divergence", "time", "finished", "numbers", "tokens",
                 "name", "place", "chain", "row", "evicted", "_settle")  # fmt: skip

    # What the accounting sets when it settles the request:
    chain: int  # the hash of the prefix that `tokens` continue
    row: list[int]  # counts in the order of `FIELDS`
    evicted: tuple[float, float | None] | None  # if any were: idle for how long, and gone when

    def __init__(
        self,
        namespace: Hashable,
        kind: Kind,
        numbers: Numbers,
        divergence: Divergence | None,
        time: float,
        settle: Callable[[], None],
        tokens: bytes,
        name: int,
        place: int,
    ) -> None:
        self.namespace = namespace
        self.kind = kind
        self.divergence = divergence
        self.time = time  # of the admission
        self.finished = False
        self.numbers = numbers
        # Until it is settled, the prompt; then its last tokens, behind its last whole block.
        self.tokens = tokens
        self.name = name  # of the hit, if it is long, else 0
        self.place = place  # among the pending ones; -1 when settled
        self._settle = settle

    @property
    def prompt_tokens(self) -> int:
        return self.numbers[0]

    @property
    def hit_tokens(self) -> int:
        return self.numbers[1]

    @property
    def in_flight_tokens(self) -> int:
        return self.numbers[2]

    def _count(self, name: str) -> int:
        if self.place >= 0:
            self._settle()
        return self.row[FIELDS.index(name)]

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.hit_tokens

    @property
    def causes(self) -> dict[str, int]:
        """The computed tokens by cause; their sum is `computed_tokens`."""
        return {cause: self._count(cause) for cause in CAUSES}

    @property
    def ideal_tokens(self) -> int:
        """What an unlimited cache would have hit."""
        return self._count("ideal_tokens")

    @property
    def evicted_idle_seconds(self) -> float | None:
        """How long before the request its evicted tokens were last used; None if none were."""
        self._count("evicted")
        return self.evicted[0] if self.evicted else None

    @property
    def evicted_at(self) -> float | None:
        """When its evicted tokens went; None if none were, or the accounting was not told."""
        self._count("evicted")
        return self.evicted[1] if self.evicted else None


def refuse_impossible(
    length: int,
    hit_tokens: int,
    in_flight_tokens: int,
    kind: Kind,
    divergence: Divergence | None,
) -> None:
    """Raises ValueError if no request of `length` bytes of tokens can have these numbers."""
    prompt = length // TOKEN_BYTES
    if not prompt or length % TOKEN_BYTES:
        raise ValueError(f"tokens: at least one int32 token is needed, got {length} bytes")
    if kind not in get_args(Kind):
        raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}, got {kind!r}")
    most = prompt if kind == "same" else prompt - 1
    if not 0 <= hit_tokens <= most:
        raise ValueError(f"hit_tokens must be in 0 .. {most}, got {hit_tokens}")
    if not 0 <= in_flight_tokens <= prompt - hit_tokens:
        raise ValueError(
            f"in_flight_tokens must be in 0 .. {prompt - hit_tokens}, got {in_flight_tokens}"
        )
    if divergence is not None and divergence.position != hit_tokens:
        raise ValueError(
            f"divergence: its position must be the hit's end, {hit_tokens}, "
            f"got {divergence.position}"
        )


@dataclass(frozen=True, slots=True)
class CacheAccounts:
    """What the cache did, and what it could have done."""

    seconds: float  # since the start
    pool_tokens: int
    overall: Windows
    namespaces: dict[Hashable, Windows]
    other_namespaces: Windows  # those beyond the number that is counted one by one, together
    curve: tuple[CurvePoint, ...]  # LRU's, since the start; what was achieved is in `overall`
    near_misses: tuple[NearMiss, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it; a namespace is named by its `str`, or null for None."""
        return {
            "seconds": self.seconds,
            "pool_tokens": self.pool_tokens,
            "overall": _windows(self.overall),
            "namespaces": [
                {"namespace": _name(namespace), **_windows(windows)}
                for namespace, windows in self.namespaces.items()
            ],
            "other_namespaces": _windows(self.other_namespaces),
            "curve": [asdict(point) for point in self.curve],
            "near_misses": [
                asdict(near_miss) | {"namespace": _name(near_miss.namespace)}
                for near_miss in self.near_misses
            ],
        }


def _name(namespace: Hashable) -> str | None:
    return None if namespace is None else str(namespace)


def _windows(windows: Windows) -> dict[str, Any]:
    return {
        "last_minute": _counts(windows.last_minute),
        "last_ten_minutes": _counts(windows.last_ten_minutes),
        "since_start": _counts(windows.since_start),
    }


def _counts(counts: Counts) -> dict[str, Any]:
    rest = {name: value for name, value in asdict(counts).items() if name not in CAUSES}
    del rest["evicted_idle"]
    return rest | {
        "computed_tokens": counts.computed_tokens,
        "causes": counts.causes,
        "hit_rate": counts.hit_rate,
        "ideal_hit_rate": counts.ideal_hit_rate,
        "evicted_idle_seconds": counts.evicted_idle_seconds,
    }
