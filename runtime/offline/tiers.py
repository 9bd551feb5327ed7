"""Tiers without a model: which pages they would keep and bring back, and what that would save.

They listen to the same tree, name pages as the engine's tiers do, and are asked by the same
scheduler. Reading and writing happen at once; what they take is computed from given rates.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, NamedTuple

import xxhash

from coppice.radix import FromTiers, Node, RadixTree, TreeListener
from coppice.radix.mirror.leaving import LeavingPages
from coppice.radix.mirror.names import PageKey, root_name
from coppice.radix.tokens import TOKEN_BYTES, common_prefix
from coppice.runtime.requests.request import Sequence
from coppice.runtime.tiers.loading.rates import meeting, worth
from coppice.runtime.tiers.told import TierCounts, TierReport, TiersReport, TiersTold

UNLIMITED = None
"""The size of a tier that keeps all that it gets."""


@dataclass(frozen=True, slots=True)
class TierSize:
    """A tier that is simulated: its name, and the tokens that it keeps; None: without limit."""

    name: str
    tokens: int | None

    def __post_init__(self) -> None:
        if self.tokens is not None and self.tokens < 1:
            raise ValueError(f"{self.name}: its size must be at least a token, got {self.tokens}")


@dataclass(frozen=True, slots=True)
class TierRates:
    """What loading and computing take. Raises ValueError for what is not above 0.

    Attributes:
        token_bytes: of a token's KV; None: unknown, and all that is found is loaded.
        compute: prompt tokens computed a second; None: unknown, likewise.
        read: bytes that each tier reads a second, by its name.
    """

    token_bytes: int | None
    compute: float | None
    read: dict[str, float]

    def __post_init__(self) -> None:
        given = {"token_bytes": self.token_bytes, "compute": self.compute, **self.read}
        for name, value in given.items():
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, got {value!r}")

    def load_seconds(self, tier: str, tokens: int) -> float | None:
        """How long a tier takes to read some tokens; None: unknown."""
        return None if self.token_bytes is None else tokens * self.token_bytes / self.read[tier]

    def compute_seconds(self, tokens: int) -> float | None:
        """How long computing some tokens of a prompt takes; None: unknown."""
        return None if self.compute is None else tokens / self.compute


class Next(NamedTuple):
    """What a sequence does next: see `coppice.runtime.tiers.loading.load.Next`."""

    ready: int
    compute: int


class _Kept:
    """The pages of one tier, in the order in which they leave it: by their last use."""

    def __init__(self, size: TierSize, page_size: int) -> None:
        self.name = size.name
        self.counts = TierCounts()
        self._most = None if size.tokens is None else max(1, size.tokens // page_size)
        self.pages: dict[bytes, PageKey] = {}  # by name
        # The pages that follow a name: mostly one, else a list.
        self._following: dict[bytes, bytes | list[bytes]] = {}

    def keep(self, key: PageKey, name: bytes) -> None:
        """Keeps a page, the one that was used last; others may leave."""
        if name in self.pages:
            self.use(name)
            return
        self.pages[name] = key
        other = self._following.setdefault(key.parent, name)
        if isinstance(other, list):
            other.append(name)
        elif other is not name:
            self._following[key.parent] = [other, name]
        self.counts.written_pages += 1
        if self._most is not None and len(self.pages) > self._most:
            oldest = next(iter(self.pages))
            parent = self.pages.pop(oldest).parent
            others = self._following[parent]
            if isinstance(others, list) and len(others) > 1:
                others.remove(oldest)
            else:
                del self._following[parent]

    def use(self, name: bytes) -> None:
        """Notes that a page is used now."""
        if self._most is not None:
            self.pages[name] = self.pages.pop(name)

    def longest(self, key: PageKey) -> tuple[int, bytes]:
        """The page after the same ones that begins with most of these tokens; how many, its name.

        (0, b"") if not even the first token agrees.
        """
        found = 0, b""
        others = self._following.get(key.parent, [])
        for name in others if isinstance(others, list) else [others]:
            same = common_prefix(self.pages[name].tokens, 0, key.tokens) // TOKEN_BYTES
            found = max(found, (same, name))
        return found


class _Load:
    """What is loaded for one sequence: parts in order, each with its tier and page's name."""

    over = False  # what is left of it may come

    def __init__(self, sequence: Sequence) -> None:
        self.sequence, self.first = sequence, sequence.cached_tokens < 0
        self.parts: list[tuple[int, int, int, bytes]] = []
        self.account = FromTiers()


class _Loads:
    """The part of `SimulatedTiers` that a scheduler calls its loads."""

    about_to_come = False

    def __init__(self, tiers: SimulatedTiers) -> None:
        self._tiers = tiers
        self._of: dict[Sequence, _Load] = {}

    def begin(self, sequence: Sequence, cached: int) -> None:
        """Nothing: tiers answer at once, so that they are asked when a sequence may run."""

    def of(self, sequence: Sequence) -> _Load | None:
        return self._of.get(sequence)

    def waits(self, sequence: Sequence) -> bool:
        return False

    def asks_again(self, sequence: Sequence, cached: int) -> bool:
        return False

    def ask(self, sequence: Sequence, cached: int) -> None:
        self._of.pop(sequence, None)
        if (load := self._tiers.find(sequence, cached)) is not None:
            self._of[sequence] = load

    def next(self, load: _Load, count: int) -> Next:
        """What the sequence of a load, with `count` tokens to compute, does now."""
        computed, parts = load.sequence.computed, load.parts
        while parts and parts[0][1] <= computed:
            del parts[0]
        end = computed
        for begin, until, _, _ in parts:
            if begin > end:
                break
            end = until
        if end > computed:
            return Next(end - computed, 0)
        load.over = not parts
        return Next(0, parts[0][0] - computed if parts else count)

    def found(self) -> Seq[_Load]:
        """None: where tiers answer at once, what they have does not change the order."""
        return ()

    def drop(self, sequence: Sequence) -> None:
        self._of.pop(sequence, None)


class _Forgetting(TreeListener):
    """Forgets what was kept of nodes that change: their pages are looked at again."""

    def __init__(self, written: dict[Node, int]) -> None:
        self._written = written

    def split(self, upper: Node, lower: Node) -> None:
        self._written.pop(lower, None)

    def evicted(self, node: Node, length: int) -> None:
        self._written.pop(node, None)

    def cleared(self) -> None:
        self._written.clear()


class SimulatedTiers:
    """Stands for `coppice.runtime.tiers.exchange.Tiers` beside a scheduler that runs no model."""

    def __init__(
        self,
        sizes: Seq[TierSize],
        rates: TierRates,
        tree: RadixTree,
        may_run: Callable[[], bool],
    ) -> None:
        """Begins to listen to `tree`.

        Args:
            sizes: the tiers, the fastest first.
            rates: what reading and computing take.
            tree: whose pages they keep.
            may_run: whether there is a place for one more sequence, which asks only then.
        """
        self._may_run = may_run
        self._rates, self._size = rates, tree.page_size
        self._kept = [_Kept(size, self._size) for size in sizes]
        self._capacities = {size.name: size.tokens for size in sizes}
        self.told = TiersTold({each.name: each.counts for each in self._kept})
        self.names = [each.name for each in self._kept]
        self._roots: dict[Hashable, bytes] = {}
        self._leaving = LeavingPages(self._size, self._root, self._wanted)
        self._written: dict[Node, int] = {}  # how many of a node's pages were kept before
        tree.add_listener(self._leaving)
        tree.add_listener(_Forgetting(self._written))
        self.loads = _Loads(self)
        self.before_access = lambda: None

    def _root(self, namespace: Hashable) -> bytes:
        if (name := self._roots.get(namespace)) is None:
            name = self._roots[namespace] = root_name(repr(namespace).encode(), None)
        return name

    def _wanted(self, name: bytes) -> bool:
        for tier in self._kept:  # noqa: SIM110 (this runs for each page that leaves)
            if name not in tier.pages:
                return True
        return False

    # -- what a scheduler calls --------------------------------------------------------------

    def poll(self) -> None:
        """Nothing: there are no threads."""

    def copy(self, copies: Iterable[Any]) -> None:
        """Nothing: pages have no content."""

    def flush(self) -> None:
        """Keeps what was evicted."""
        for page in self._leaving.take():
            for tier in self._kept:
                tier.keep(page.key, page.name)

    def asks(self, sequence: Sequence, cached: int) -> bool:
        """Asks for what comes after a sequence's first `cached` tokens; nothing has to wait."""
        if self._may_run():
            self.loads.ask(sequence, cached)
        return False

    def admitted(self, sequence: Sequence) -> None:
        """Keeps the pages of a hit, as the engine's tiers do before they are evicted."""
        node: Node | None = None if sequence.hold is None else sequence.hold.node
        while node is not None and node.parent is not None and not sequence.private:
            if (done := self._written.get(node, 0)) < len(node.pages):
                for page in self._leaving.pages(node, done):
                    for tier in self._kept:
                        tier.keep(page.key, page.name)
                self._written[node] = len(node.pages)
            node = node.parent

    def take(self, sequence: Sequence, load: _Load, tokens: int) -> None:
        """Fills a sequence's pages with its next `tokens`, which `next` has offered."""
        if load.first and not load.account.loaded:
            self.told.requests += 1
        at, end = sequence.computed, sequence.computed + tokens
        while load.parts and load.parts[0][0] < end:
            _, until, tier, name = load.parts.pop(0)
            kept = self._kept[tier]
            load.account.came(at, until, kept.name)
            kept.counts.loaded_tokens += until - at
            kept.counts.loaded_pages += 1
            kept.counts.loaded_bytes += self._size * (self._rates.token_bytes or 0)
            if name in kept.pages:  # making room for it may have pushed it out
                kept.use(name)
            at = until

    # -- what they find ----------------------------------------------------------------------

    def find(self, sequence: Sequence, cached: int) -> _Load | None:
        """What is worth loading after a sequence's first `cached` tokens; None: nothing is kept."""
        limit = sequence.hit_limit
        if sequence.private or limit <= cached:
            return None
        size = self._size
        tokens = sequence.keys(0, limit)
        names = [self._root(sequence.request.namespace)]  # before each page
        width, digest = size * TOKEN_BYTES, xxhash.xxh3_128_digest
        for at in range(0, len(tokens), width):
            names.append(digest(names[-1] + tokens[at : at + width]))
        found: list[tuple[int, int, int, bytes]] = []
        first = cached // size
        after = first  # the page after the last one that is kept whole
        for index, name in enumerate(names[first + 1 :], first):
            for tier, kept in enumerate(self._kept):
                if name in kept.pages:
                    end = min((index + 1) * size, limit)
                    found.append((max(cached, index * size), end, tier, name))
                    after = index + 1
                    break
        if after + 1 < len(names):
            key = PageKey(names[after], tokens[after * width : (after + 1) * width])
            longest = [kept.longest(key) for kept in self._kept]
            same, name = max(longest)
            begin, end = max(cached, after * size), after * size + same
            if end > begin:
                found.append((begin, end, longest.index((same, name)), name))
        if not found:
            return None
        load = _Load(sequence)
        load.account.has((begin, end) for begin, end, _, _ in found)
        load.parts = self._chosen(found)
        load.over = not load.parts
        load.account.open = not load.over
        return load

    def _chosen(
        self, found: list[tuple[int, int, int, bytes]]
    ) -> list[tuple[int, int, int, bytes]]:
        """Those parts that are loaded, as the engine chooses them."""
        told = self.told
        tokens = sum(end - begin for begin, end, _, _ in found)
        told.found_tokens += tokens
        each = [self._rates.load_seconds(self.names[tier], self._size) for _, _, tier, _ in found]
        seconds = None if None in each else sum(one for one in each if one is not None)
        alone = self._rates.compute_seconds(tokens)
        if seconds is None or alone is None:
            return found
        gain = worth(seconds, alone)
        if not gain.loads:
            told.computed_instead += tokens
            return []
        chosen = found
        if gain.together:
            met = found[0][0] + meeting(tokens, tokens / seconds, tokens / alone)
            met = -(-met // self._size) * self._size
            chosen = [part for part in found if part[0] >= met]
        told.saved_seconds += gain.seconds
        for part, one in zip(found, each, strict=True):
            if part in chosen:
                self._kept[part[2]].counts.load_seconds += one or 0.0
        return chosen

    # -- reporting ---------------------------------------------------------------------------

    def kept_tokens(self) -> dict[str, int]:
        """The tokens that each tier has room for in the pages that it keeps now."""
        return {each.name: len(each.pages) * self._size for each in self._kept}

    def report(self) -> TiersReport:
        """What was done so far, and what is kept now."""
        width = self._rates.token_bytes
        stores = []
        for each in self._kept:
            counts = each.counts
            capacity = self._capacities[each.name]
            stores.append(
                TierReport(
                    each.name,
                    loaded_tokens=counts.loaded_tokens,
                    loaded_pages=counts.loaded_pages,
                    loaded_bytes=counts.loaded_bytes,
                    load_seconds=counts.load_seconds,
                    written_pages=counts.written_pages,
                    written_bytes=counts.written_pages * self._size * (width or 0),
                    write_seconds=0.0,
                    failures=0,
                    slow=0,
                    damaged=0,
                    warmed_tokens=0,
                    used_bytes=None if width is None else len(each.pages) * self._size * width,
                    capacity_bytes=None if width is None or capacity is None else capacity * width,
                )
            )
        told = self.told
        return TiersReport(
            tuple(stores),
            told.found_tokens,
            told.requests,
            told.computed_instead,
            told.saved_seconds,
            0,
            0,
        )
