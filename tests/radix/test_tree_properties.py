"""The tree against a naive model and a simulated KV memory, under random interleavings.

The model is a set of every cached prefix of every namespace; the memory has for each slot of each
page which prefix's KV was last written there. After each operation everything is compared: what
matches, how long, what a reader would find in the pages, what is locked, what was evicted before
what, and every count.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from coppice.radix import (
    Hold,
    Inserted,
    Node,
    OutOfPages,
    PagePool,
    PrefixSavings,
    RadixTree,
    check,
    edges,
)

NAMESPACES: tuple[Hashable, ...] = (None, "a", ("a", 1))


@dataclass(eq=False)
class Line:
    """A sequence: `tokens[:computed]` have their KV in the pages of `table`.

    While the hit's partly filled last page is neither claimed nor copied, `table` ends before it.
    """

    namespace: Hashable
    tokens: list[int]
    hold: Hold
    table: array[int]
    computed: int
    owns_tail: bool  # may write after `computed` in its last page; else it must copy that first
    names: list[int] = field(default_factory=list)


class World:
    """A tree, the sequences that use it, the memory of its pages, and the naive model.

    A prefix is known by a number, its *name*: equal names, equal namespace and tokens.
    With `tidy_forks` a sequence is forked as `RadixTree.fork` asks: everything computed is
    inserted first, and a partly filled tail is copied for the child at once.
    """

    def __init__(self, page_size: int, num_pages: int, *, tidy_forks: bool) -> None:
        self.size = page_size
        self.tidy_forks = tidy_forks
        self.tree = RadixTree(PagePool(num_pages, page_size))
        self.pool = self.tree.pool
        self.lines: list[Line] = []
        self.seen: list[list[int]] = []  # what was ever asked for
        self.memory: list[list[int | None]] = [[None] * page_size for _ in range(num_pages)]
        self._names: dict[tuple[int, int], int] = {}
        self._spelled: list[tuple[Hashable, tuple[int, ...]]] = []
        self._roots: dict[Hashable, int] = {}
        self.cached: set[int] = set()
        self.used: dict[int, int] = {}  # tick of the last use, of cached prefixes and roots
        self.hits: dict[int, int] = {}  # locks since it was inserted
        self.ticks = 0

    # -- the naive model ---------------------------------------------------------------------

    def root(self, namespace: Hashable) -> int:
        if namespace not in self._roots:
            self._roots[namespace] = len(self._spelled)
            self._spelled.append((namespace, ()))
        return self._roots[namespace]

    def names(self, namespace: Hashable, tokens: Iterable[int]) -> list[int]:
        """The names of all prefixes of the tokens, shortest (one token) first."""
        name, names = self.root(namespace), []
        for token in tokens:
            key = name, token
            if key not in self._names:
                self._names[key] = len(self._spelled)
                space, prefix = self._spelled[name]
                self._spelled.append((space, (*prefix, token)))
            name = self._names[key]
            names.append(name)
        return names

    def longest(self, names: list[int]) -> int:
        return next((i for i, name in enumerate(names) if name not in self.cached), len(names))

    def locked(self) -> set[int]:
        return {name for line in self.lines for name in line.names[: line.hold.length]}

    def _touch(self, line: Line) -> None:
        self.ticks += 1
        for name in (self.root(line.namespace), *line.names[: line.hold.length]):
            self.used[name] = self.ticks

    def _settle(self, pages_asked: int) -> None:
        """Updates the model after an eviction, and checks that it took the right prefixes."""
        evicted = set()
        for name in self.cached:
            namespace, prefix = self._spelled[name]
            length = self.tree.match(prefix, namespace).length
            if length < len(prefix):
                evicted.add(name)
        locked = self.locked()
        assert not evicted & locked, "a locked prefix was evicted"
        left = self.cached - evicted
        assert pages_asked or not evicted, "something was evicted without need"
        parents = {self._parent(name) for name in left}
        leaves = left - parents - locked
        if evicted and leaves:
            latest = max(self.used[name] for name in evicted)
            assert latest <= min(self.used[name] for name in leaves), "not the least recently used"
        self.cached = left
        for name in evicted:
            del self.used[name], self.hits[name]

    def _parent(self, name: int) -> int:
        namespace, prefix = self._spelled[name]
        names = self.names(namespace, prefix[:-1])
        return names[-1] if names else self.root(namespace)

    # -- the operations ----------------------------------------------------------------------

    def look(self, namespace: Hashable, tokens: list[int]) -> None:
        """A match changes nothing."""
        before = self.snapshot()
        longest = self.longest(self.names(namespace, tokens))
        assert self.tree.match(tokens, namespace).length == longest
        for limit in range(len(tokens) + 1):
            match = self.tree.match(tokens, namespace, limit)
            cut = self.tree.match(tokens[:limit], namespace)
            assert match.length == cut.length == min(limit, longest)
            assert self.tree.available_pages(match) == self.tree.available_pages(cut)
        assert self.snapshot() == before

    def start(self, namespace: Hashable, tokens: list[int]) -> Line:
        self.seen.append(tokens)
        names = self.names(namespace, tokens)
        match = self.tree.match(tokens, namespace)
        assert match.length == self.longest(names)
        available = self.tree.available_pages(match)
        hold = self.tree.lock(match)
        assert available == self.pool.free_pages + self.tree.evictable_pages
        table = self.tree.page_table(hold)
        assert len(table) == -(-hold.length // self.size)
        owns_tail = True
        if hold.length % self.size:
            owns_tail = self.tree.claim_tail(hold)
            if not owns_tail:
                table.pop()
        line = Line(namespace, tokens, hold, table, hold.length, owns_tail, names)
        self.lines.append(line)
        self._touch(line)
        for name in names[: hold.length]:
            self.hits[name] += 1
        return line

    def allocate(self, count: int, after: int = -1) -> array[int]:
        free, evictable = self.pool.free_pages, self.tree.evictable_pages
        before = self.snapshot()
        try:
            pages = self.tree.allocate(count, after)
        except OutOfPages:
            if count > free + evictable:
                assert self.snapshot() == before, "a failed allocation changed something"
            else:
                assert not self.tidy_forks, "pages that were counted as evictable are not"
                self._settle(count)
            raise
        assert len(pages) == count == len(set(pages))
        assert all(self.pool.refs[page] == 1 for page in pages)
        self._settle(max(0, count - free))
        for page in pages:
            self.memory[page] = [None] * self.size
        return pages

    def own_tail(self, line: Line) -> None:
        """Copies a partly filled last page that it must not write to. May raise OutOfPages."""
        filled = line.computed % self.size
        if not filled or line.owns_tail:
            return
        index = line.computed // self.size
        page = self.allocate(1)[0]
        if len(line.table) > index:  # shared with a fork
            source = line.table[index]
            line.table[index] = page
            self.pool.release((source,))
        else:  # the tree's
            source = self.tree.page_table(line.hold)[index]
            line.table.append(page)
        self.memory[page][:filled] = self.memory[source][:filled]
        line.owns_tail = True

    def compute(self, line: Line, count: int) -> None:
        """Writes the KV of the next tokens to the sequence's own pages, if it can have them."""
        count = min(count, len(line.tokens) - line.computed)
        if not count:
            return
        end = line.computed + count
        try:
            self.own_tail(line)
            missing = -(-end // self.size) - len(line.table)
            if missing > 0:
                line.table += self.allocate(missing, line.table[-1] if line.table else -1)
        except OutOfPages:
            return
        for position in range(line.computed, end):
            page = line.table[position // self.size]
            self.memory[page][position % self.size] = line.names[position]
        line.computed = end
        line.owns_tail = True

    def insert(self, line: Line, count: int) -> None:
        """Enters the first `count` tokens; every one of them was computed."""
        held, known = line.hold.length, self.longest(line.names[:count])
        assert known >= held, "a locked prefix was lost"
        table = line.table
        if count == held and count > len(table) * self.size:
            table = self.tree.page_table(line.hold)  # its tail is not copied yet
        begin = held // 2 if count % 2 else 0
        done = self.tree.insert(line.hold, line.tokens[begin:count], table, begin=begin)
        assert done == Inserted(new_tokens=count - known, duplicate_tokens=known - held)
        assert line.hold.length == count
        above = line.names[known - 1] if known else self.root(line.namespace)
        for name in line.names[known:count]:
            self.cached.add(name)
            self.used[name] = self.used[above]
            self.hits[name] = 0

    def extend(self, line: Line, tokens: list[int]) -> None:
        line.tokens = line.tokens + tokens
        line.names = self.names(line.namespace, line.tokens)

    def fork(self, line: Line, tokens: list[int], *, child_writes: bool) -> None:
        """A child with the parent's computed tokens and other ones after them.

        Unless forks are tidy, one of the two continues to write in the unfinished page that they
        share, and the other copies it only when it writes.
        """
        if self.tidy_forks:
            self.insert(line, line.computed)
        hold = self.tree.fork(line.hold)
        assert hold.length == line.hold.length
        table = line.table[:]
        self.pool.share(table[hold.length // self.size :])
        tokens = line.tokens[: line.computed] + tokens
        names = self.names(line.namespace, tokens)
        child = Line(line.namespace, tokens, hold, table, line.computed, False, names)
        self.lines.append(child)
        if self.tidy_forks:
            try:
                self.own_tail(child)
            except OutOfPages:
                self.finish(child, insert=False)
        elif child_writes and line.owns_tail:
            line.owns_tail, child.owns_tail = False, True

    def finish(self, line: Line, *, insert: bool) -> None:
        if insert:
            self.insert(line, line.computed)
        self.tree.release(line.hold, line.table)
        self._touch(line)
        self.lines.remove(line)
        with pytest.raises(ValueError, match="hold"):
            self.tree.unlock(line.hold)

    def evict(self, count: int) -> None:
        evictable, free = self.tree.evictable_pages, self.pool.free_pages
        freed = self.tree.evict(count)
        assert self.pool.free_pages == free + freed
        assert freed <= count
        if self.tidy_forks:
            assert freed == min(count, evictable), "evictable_pages is wrong"
        self._settle(count)

    def starve(self, excess: int) -> None:
        """Asks for more pages than can be had; and, with `excess` 0, for all that can."""
        count = self.pool.free_pages + self.tree.evictable_pages + excess
        try:
            pages = self.allocate(count)
        except OutOfPages:
            return
        assert not excess
        assert not self.pool.free_pages and not self.tree.evictable_pages
        self.pool.release(pages)

    def reset(self) -> None:
        before = self.snapshot()
        if self.lines:
            with pytest.raises(RuntimeError, match="reset"):
                self.tree.reset()
            assert self.snapshot() == before
            return
        self.tree.reset()
        self.cached, self.used, self.hits = set(), {}, {}
        assert self.pool.free_pages == self.pool.num_pages
        assert self.pool.free_runs() == [(0, self.pool.num_pages)]
        assert self.tree.cached_tokens == self.tree.num_nodes == 0
        for namespace, prefix in self._spelled:
            assert self.tree.match(prefix, namespace).length == 0

    # -- comparing ---------------------------------------------------------------------------

    def snapshot(self) -> object:
        """All that an operation which changes nothing must leave as it was."""
        tree, pool = self.tree, self.pool
        return (
            pool.refs.tobytes(),
            pool.free_pages,
            pool.free_runs(),
            tree.cached_pages,
            tree.locked_pages,
            tree.cached_tokens,
            tree.evicted_tokens,
            tree.num_nodes,
            [
                (node.prefix(), node.start, node.pages.tobytes(), node.locks, node.stamp, node.hits)
                for node in tree.nodes()
            ],
        )

    def verify(self) -> None:
        tree = self.tree
        check(tree, [(line.hold, line.table) for line in self.lines])
        # Every cached prefix is found in full, and nothing else is there: the counts agree.
        assert tree.cached_tokens == len(self.cached)
        nodes: dict[int, tuple[Node, int]] = {}
        for name in self.cached:
            namespace, prefix = self._spelled[name]
            match = tree.match(prefix, namespace)
            assert match.length == len(prefix), "a cached prefix is not matched"
            assert match.node is not None
            if match.node.end == len(prefix):
                nodes[id(match.node)] = match.node, name
                assert match.node.hits == self.hits[name], "hits"
        assert len(nodes) == tree.num_nodes
        for node, name in nodes.values():
            namespace, prefix = self._spelled[name]
            self._read(
                tree.page_table(Hold(namespace, node, node.end)), self.names(namespace, prefix)
            )
        for line in self.lines:
            theirs = tree.page_table(line.hold)
            self._read(theirs, line.names[: line.hold.length])
            table = line.table if len(line.table) >= len(theirs) else line.table + theirs[-1:]
            self._read(table, line.names[: line.computed])
        if self.tidy_forks:
            held = {page for line in self.lines for page in line.table}
            for line in self.lines:
                assert line.hold.node is not None
                held.update(page for node in line.hold.node.path() for page in node.pages)
            used = self.pool.num_pages - self.pool.free_pages
            assert used == tree.evictable_pages + len(held), (
                "free + cached only + held != pool size"
            )
        prefixes = PrefixSavings(tree).prefixes(tree.num_nodes)
        assert all(0 < p.tokens_saved <= p.hits * p.num_tokens for p in prefixes)
        saved = sum(node.hits * node.length for node in tree.nodes())
        assert sum(prefix.tokens_saved for prefix in prefixes) == saved

    def _read(self, table: array[int], names: list[int]) -> None:
        """Reading these positions through the table gives the KV of these tokens."""
        for position, name in enumerate(names):
            found = self.memory[table[position // self.size]][position % self.size]
            assert found == name, (
                f"position {position} of {self._spelled[names[-1]]}: its page holds "
                f"{None if found is None else self._spelled[found]}"
            )


# Runs of few different tokens: nearly everything collides.
TOKENS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=4).map(
    lambda runs: [token for token, count in runs for _ in range(count)]
)
# Where in what was seen before a new line begins (which one, and how many quarters of it).
LIKE = st.tuples(st.integers(0, 1000), st.sampled_from([4, 3, 4, 2, 1, 0]))
WHICH = st.integers(0, 15)
SPACE = st.sampled_from([NAMESPACES[0], *NAMESPACES])


class TreeMachine(RuleBasedStateMachine):
    """Random interleavings of everything that the tree is asked to do."""

    def __init__(self, page_size: int, tidy_forks: bool) -> None:
        super().__init__()
        self.page_size = page_size
        self.tidy_forks = tidy_forks

    @initialize(num_pages=st.integers(2, 24))
    def begin(self, num_pages: int) -> None:
        pages = num_pages * (6 if self.page_size == 1 else 1)
        self.world = World(self.page_size, pages, tidy_forks=self.tidy_forks)

    def line(self, which: int) -> Line:
        return self.world.lines[which % len(self.world.lines)]

    def like(self, like: tuple[int, int]) -> list[int]:
        which, quarters = like
        seen = self.world.seen
        tokens = seen[which % len(seen)] if seen else []
        return tokens[: len(tokens) * quarters // 4]

    @rule(namespace=SPACE, like=LIKE, tokens=TOKENS, count=st.integers(0, 20))
    def start(
        self, namespace: Hashable, like: tuple[int, int], tokens: list[int], count: int
    ) -> None:
        if len(self.world.lines) < 6:
            line = self.world.start(namespace, self.like(like) + tokens)
            self.world.compute(line, count)

    @precondition(lambda self: self.world.lines)
    @rule(which=WHICH, quarters=st.integers(0, 4), tokens=TOKENS)
    def rival(self, which: int, quarters: int, tokens: list[int]) -> None:
        """Begins like a running one, and computes what that one may not have inserted yet."""
        if len(self.world.lines) < 6:
            other = self.line(which)
            keep = len(other.tokens) * quarters // 4
            line = self.world.start(other.namespace, other.tokens[:keep] + tokens)
            self.world.compute(line, len(line.tokens))

    @rule(namespace=SPACE, like=LIKE, tokens=TOKENS)
    def serve(self, namespace: Hashable, like: tuple[int, int], tokens: list[int]) -> None:
        """From beginning to end at once, so that many idle leaves come together."""
        line = self.world.start(namespace, self.like(like) + tokens)
        self.world.compute(line, len(line.tokens))
        self.world.finish(line, insert=True)

    @precondition(lambda self: self.world.lines)
    @rule(which=WHICH, count=st.integers(1, 40), insert=st.booleans(), tokens=TOKENS)
    def advance(self, which: int, count: int, insert: bool, tokens: list[int]) -> None:
        line = self.line(which)
        if line.computed == len(line.tokens):
            self.world.extend(line, tokens)
        self.world.compute(line, count)
        if insert:
            self.world.insert(line, line.computed)

    @precondition(lambda self: self.world.lines)
    @rule(which=WHICH, percent=st.integers(0, 100))
    def insert_a_part(self, which: int, percent: int) -> None:
        line = self.line(which)
        held = line.hold.length
        self.world.insert(line, held + (line.computed - held) * percent // 100)

    @precondition(lambda self: self.world.lines)
    @rule(which=WHICH, tokens=TOKENS, child_writes=st.booleans())
    def fork(self, which: int, tokens: list[int], child_writes: bool) -> None:
        if len(self.world.lines) < 6:
            self.world.fork(self.line(which), tokens, child_writes=child_writes)

    @precondition(lambda self: self.world.lines)
    @rule(which=WHICH, insert=st.booleans())
    def finish(self, which: int, insert: bool) -> None:
        self.world.finish(self.line(which), insert=insert)

    @rule(count=st.sampled_from([1, 1, 2, 0, 3, 6]))
    def evict(self, count: int) -> None:
        self.world.evict(count)

    @rule(
        what=st.sampled_from(["look", "look", "starve", "starve", "take all", "reset"]),
        like=LIKE,
        tokens=TOKENS,
    )
    def disturb(self, what: str, like: tuple[int, int], tokens: list[int]) -> None:
        if what == "look":
            self.world.look(NAMESPACES[like[0] % 3], self.like(like) + tokens)
        elif what == "starve":
            self.world.starve(excess=len(tokens))
        elif what == "take all":
            self.world.starve(excess=0)
        else:
            self.world.reset()

    @invariant()
    def verify(self) -> None:
        self.world.verify()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for line in list(self.world.lines):
            self.world.finish(line, insert=True)
            self.world.verify()
        self.world.reset()
        self.world.verify()


@pytest.mark.parametrize("tidy_forks", [True, False], ids=["tidy_forks", "loose_forks"])
@pytest.mark.parametrize(
    "page_size", [*(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4)), 16]
)
def test_interleavings_agree_with_the_naive_model(page_size: int, tidy_forks: bool) -> None:
    run_state_machine_as_test(
        lambda: TreeMachine(page_size, tidy_forks),
        settings=settings(
            max_examples=30,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )


def some_tokens(rng: random.Random) -> list[int]:
    return [t for _ in range(rng.randrange(5)) for t in [rng.randrange(3)] * rng.randint(1, 7)]


def random_step(world: World, rng: random.Random, max_lines: int) -> None:
    """One operation, drawn so that the tree stays full and its sequences meet."""
    start = list(rng.choice(world.seen)) if world.seen and rng.random() < 0.7 else []
    if rng.random() < 0.5:
        del start[rng.randint(0, len(start)) :]
    line = rng.choice(world.lines) if world.lines else None
    dice = rng.random()
    if line is None or dice < 0.2:
        if len(world.lines) < max_lines:
            world.start(rng.choice(NAMESPACES), start + some_tokens(rng))
    elif dice < 0.3:
        if len(world.lines) < max_lines:
            keep = rng.randint(0, len(line.tokens))
            world.start(line.namespace, line.tokens[:keep] + some_tokens(rng))
    elif dice < 0.55:
        world.compute(line, rng.randint(1, 40))
    elif dice < 0.60:
        world.extend(line, some_tokens(rng))
    elif dice < 0.70:
        world.insert(
            line, rng.choice([line.computed, rng.randint(line.hold.length, line.computed)])
        )
    elif dice < 0.77:
        if len(world.lines) < max_lines:
            world.fork(line, some_tokens(rng), child_writes=rng.random() < 0.5)
    elif dice < 0.89:
        world.finish(line, insert=rng.random() < 0.8)
    elif dice < 0.94:
        world.evict(rng.randint(0, 3))
    elif dice < 0.97:
        world.starve(rng.randint(1, 3))
    elif dice < 0.98:
        world.starve(0)
    elif dice < 0.99:
        world.reset()
    else:
        world.look(rng.choice(NAMESPACES), start + some_tokens(rng))


@pytest.mark.parametrize("tidy_forks", [True, False], ids=["tidy_forks", "loose_forks"])
@pytest.mark.parametrize(
    "page_size", [*(pytest.param(size, marks=pytest.mark.slow) for size in (1, 3, 4)), 16]
)
def test_long_random_runs_agree_with_the_naive_model(
    page_size: int, tidy_forks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer and denser than what hypothesis draws, though it can't shrink what it finds.

    Edges are long, or have few tokens at most, so that one insert enters several nodes.
    """
    rng = random.Random(page_size)
    for longest in (edges.EDGE_TOKENS, 1, 3, 5) * 2:
        monkeypatch.setattr(edges, "EDGE_TOKENS", longest)
        pages = rng.randint(3, 24) * (4 if page_size == 1 else 1)
        world = World(page_size, pages, tidy_forks=tidy_forks)
        max_lines = rng.choice([2, 4, 8])
        for _ in range(400):
            random_step(world, rng, max_lines)
            world.verify()
        for line in list(world.lines):
            world.finish(line, insert=True)
            world.verify()
        world.reset()
        world.verify()
