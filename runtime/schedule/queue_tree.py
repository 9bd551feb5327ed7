"""A tree of the waiting sequences of a namespace, in which the next one is always known.

Sequences that begin alike share a path here, whether or not the cache has it. Each branch knows how
much of its edge is cached and whether a running sequence is about to compute it, so a change of the
cache touches the branches on one path, however many sequences wait below them.

    branch     cached                 waiting below
    root       -
      system   all of it              900
        doc A  none, a leader runs    400    they wait, and will hit what the leader computes
        doc B  half of it             500    they all hit the same tokens: system + half of B
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sortedcontainers import SortedList

from coppice.radix.tokens import TOKEN_BYTES, common_prefix

# A sequence that would save fewer tokens than this does not wait for a leader: a step of the whole
# batch costs more than computing them.
MIN_SHARED_TOKENS = 16

NEVER = float("inf")

Rank = tuple[Any, ...]
"""What branches and sequences are ordered by, least first; in one tree all have one length."""


class Branch:
    """A stretch of tokens that the same sequences have in common."""

    __slots__ = ("parent", "children", "edge", "start", "length", "cached", "leaders", "waiting",
                 "ending", "rank", "pick", "oldest", "ranks", "ages")  # fmt: skip

    def __init__(self, parent: Branch | None, edge: bytes, start: int) -> None:
        self.parent = parent
        self.children: dict[bytes, Branch] = {}
        self.edge = edge
        self.start = start
        self.length = len(edge) // TOKEN_BYTES
        self.cached = 0  # tokens of the edge whose KV can be hit; more than 0 only below full ones
        self.leaders = 0  # running sequences at or below it that are about to compute their tokens
        self.waiting = 0  # sequences that wait at or below it
        self.ending: SortedList | None = None  # arrivals of those that wait exactly at its end
        # Rank and arrival of the best sequence at or below that may be admitted. None: all of them
        # wait for leaders.
        self.rank: Rank | None = None
        self.pick = -1
        self.oldest: float = NEVER  # least arrival that waits at or below, leaders or not
        self.ranks: SortedList | None = None  # (rank, first token of the edge) of children
        self.ages: SortedList | None = None  # (oldest, first token of the edge) of children

    @property
    def end(self) -> int:
        return self.start + self.length


class WaitingTree:
    """The waiting sequences of one namespace, by their tokens.

    `rank(hit, arrival, waiting)` gives a sequence's place in the order: its hit in tokens, its
    arrival, and the number of sequences that wait on the branch. Of all sequences the one of least
    rank is next; or, `by_weight`, the order descends into the branch of least rank at every level,
    and `hit` is whether that branch is cached.

    Arrivals are unique. All operations cost O(tokens at memory speed), and O(log branches) for each
    branch on the path.
    """

    def __init__(self, rank: Callable[[int, int, int], Rank], *, by_weight: bool = False) -> None:
        self._rank = rank
        self._by_weight = by_weight
        self.root = Branch(None, b"", 0)

    @property
    def empty(self) -> bool:
        """Whether neither waiting nor leading sequences are left."""
        return not self.root.waiting and not self.root.leaders

    def best(self) -> int | None:
        """Arrival of the sequence that should be admitted next; None if there is none."""
        return self.root.pick if self.root.rank is not None else None

    def rank(self) -> Rank | None:
        """The rank of `best()`."""
        return self.root.rank

    # -- sequences ---------------------------------------------------------------------------

    def add(self, tokens: bytes, arrival: int, cached: int) -> None:
        """Enters a waiting sequence; of its tokens (int32 bytes) the first `cached` can be hit."""
        branch = self._at(tokens, cached)
        if branch.ending is None:
            branch.ending = SortedList()
        branch.ending.add(arrival)
        self._count(branch, waiting=1)

    def remove(self, tokens: bytes, arrival: int) -> None:
        """Takes a waiting sequence out."""
        branch = self._find(tokens)
        assert branch.ending is not None
        branch.ending.remove(arrival)
        self._count(branch, waiting=-1)

    def lead(self, tokens: bytes, cached: int) -> None:
        """Notes a leader: a running sequence that is about to compute its tokens."""
        self._count(self._at(tokens, cached), leaders=1)

    def stop_leading(self, tokens: bytes) -> None:
        """Notes that a leader has computed its tokens, or has left."""
        self._count(self._find(tokens), leaders=-1)

    def cached(self, tokens: bytes) -> int:
        """Tokens of a sequence in the tree that can be hit. O(branches on its path)."""
        hit = 0
        for branch in self._path(tokens):
            if hit == branch.start:
                hit += branch.cached
        return hit

    def shared_with_leader(self, tokens: bytes) -> int:
        """Tokens of a waiting sequence that a leader computes, after those that can be hit."""
        shared = 0
        for branch in self._path(tokens):
            if branch.leaders:
                shared = branch.end
        return max(0, shared - self.cached(tokens))

    # -- the cache ---------------------------------------------------------------------------

    def stored(self, tokens: bytes) -> bool:
        """Notes that all of these tokens can be hit. Returns whether anything changed here."""
        changed = None
        for branch in self._path(tokens):
            if branch.cached < branch.length:
                common = self._common(tokens, branch)
                if branch.cached < common:
                    branch.cached, changed = common, branch
        if changed is not None:
            self._refresh(changed)
        return changed is not None

    def evicted(self, tokens: bytes, length: int) -> bool:
        """Notes that of these tokens only the first `length` can still be hit.

        Returns whether anything changed here.
        """
        changed = None
        for branch in self._path(tokens):
            kept = max(0, length - branch.start)
            # Where the edge differs from the tokens before that, other cached tokens may follow.
            if branch.cached > kept and self._common(tokens, branch) > kept:
                branch.cached, changed = kept, branch
        if changed is not None:
            self._refresh(changed)
        return changed is not None

    @staticmethod
    def _common(tokens: bytes, branch: Branch) -> int:
        """The number of tokens of a branch's edge that `tokens` share."""
        return common_prefix(tokens, branch.start * TOKEN_BYTES, branch.edge) // TOKEN_BYTES

    # -- the tree ----------------------------------------------------------------------------

    def _path(self, tokens: bytes) -> list[Branch]:
        """The branches below the root that `tokens` enter, from the top."""
        path: list[Branch] = []
        at, branch = 0, self.root
        while True:
            child = branch.children.get(tokens[at : at + TOKEN_BYTES])
            if child is None:
                return path
            path.append(child)
            at += len(child.edge)
            if at >= len(tokens) or not tokens.startswith(child.edge, at - len(child.edge)):
                return path
            branch = child

    def _find(self, tokens: bytes) -> Branch:
        """The branch that ends with `tokens`, which were entered."""
        path = self._path(tokens)
        assert path and path[-1].end * TOKEN_BYTES == len(tokens), "an unknown sequence"
        return path[-1]

    def _at(self, tokens: bytes, cached: int) -> Branch:
        """The branch that ends with `tokens`, made if there is none; `cached` as in `add`."""
        path = self._path(tokens)
        branch = path[-1] if path else self.root
        at = branch.start * TOKEN_BYTES
        same = common_prefix(tokens, at, branch.edge)
        if same < len(branch.edge):
            branch = self._split(branch, same // TOKEN_BYTES)
        at += same
        if at == len(tokens):
            return branch
        child = Branch(branch, tokens[at:], at // TOKEN_BYTES)
        child.cached = min(child.length, max(0, cached - child.start))
        branch.children[child.edge[:TOKEN_BYTES]] = child
        return child

    def _split(self, branch: Branch, tokens: int) -> Branch:
        """Cuts an edge after `tokens` tokens; returns the new upper part."""
        parent, cut = branch.parent, tokens * TOKEN_BYTES
        assert parent is not None
        upper = Branch(parent, branch.edge[:cut], branch.start)
        upper.cached = min(branch.cached, tokens)
        upper.leaders, upper.waiting = branch.leaders, branch.waiting
        first = branch.edge[:TOKEN_BYTES]
        self._unlist(branch, parent, first)
        branch.edge = branch.edge[cut:]
        branch.start += tokens
        branch.length -= tokens
        branch.cached = max(0, branch.cached - tokens)
        branch.parent = upper
        upper.children[branch.edge[:TOKEN_BYTES]] = branch
        parent.children[first] = upper
        self._refresh(branch)
        return upper

    def _count(self, branch: Branch, *, waiting: int = 0, leaders: int = 0) -> None:
        """Changes the counts on a path, drops branches without sequences, and orders anew."""
        walk: Branch | None = branch
        while walk is not None:
            walk.waiting += waiting
            walk.leaders += leaders
            walk = walk.parent
        while not branch.waiting and not branch.leaders and branch.parent is not None:
            parent, first = branch.parent, branch.edge[:TOKEN_BYTES]
            self._unlist(branch, parent, first)
            del parent.children[first]
            branch = parent
        self._refresh(branch, only_waiting=not leaders)

    # -- the order ---------------------------------------------------------------------------

    def _refresh(self, branch: Branch, *, only_waiting: bool = False) -> None:
        """Updates the place of a branch that has changed, and of those above it.

        If only waiting sequences have changed, this stops at a branch whose best and oldest are the
        same, but not on a leader's path, where branches above look further down (`_oldest_free`).
        """
        while True:
            parent, first = branch.parent, branch.edge[:TOKEN_BYTES]
            rank, oldest = branch.rank, branch.oldest
            self._order(branch)
            if parent is None:
                return
            same = rank == branch.rank and oldest == branch.oldest
            if same and only_waiting and not branch.leaders and not self._by_weight:
                return
            if parent.ages is None or parent.ranks is None:
                parent.ages, parent.ranks = SortedList(), SortedList()
            if oldest != branch.oldest:
                if oldest != NEVER:
                    parent.ages.remove((oldest, first))
                if branch.oldest != NEVER:
                    parent.ages.add((branch.oldest, first))
            if rank != branch.rank:
                if rank is not None:
                    parent.ranks.remove((rank, first))
                if branch.rank is not None:
                    parent.ranks.add((branch.rank, first))
            branch = parent

    def _unlist(self, branch: Branch, parent: Branch, first: bytes) -> None:
        """Takes a branch out of its parent's lists."""
        if parent.ages is not None and branch.oldest != NEVER:
            parent.ages.remove((branch.oldest, first))
        if parent.ranks is not None and branch.rank is not None:
            parent.ranks.remove((branch.rank, first))
        branch.rank, branch.oldest = None, NEVER

    def _order(self, branch: Branch) -> None:
        """Finds the best and the oldest sequence of a branch from those of its children."""
        ending = branch.ending[0] if branch.ending else NEVER
        branch.oldest = min(ending, branch.ages[0][0] if branch.ages else NEVER)
        branch.rank, branch.pick = None, -1
        if branch.oldest == NEVER:
            return
        if branch.cached < branch.length:
            hit = branch.start + branch.cached
            arrival = self._oldest_free(branch, hit)
            if arrival != NEVER:
                branch.pick = int(arrival)
                branch.rank = self._rank_of(branch, hit)
            return
        # All of it is cached: its own sequences hit that much, those of children maybe more.
        if ending != NEVER:
            branch.pick = int(ending)
            branch.rank = self._rank_of(branch, branch.end)
        if branch.ranks:
            rank, first = branch.ranks[0]
            if branch.rank is None or self._by_weight or rank < branch.rank:
                branch.pick = branch.children[first].pick
                branch.rank = self._rank_of(branch, 0) if self._by_weight else rank

    def _rank_of(self, branch: Branch, hit: int) -> Rank:
        """The rank of a branch's pick; by weight, of the branch: whether it is cached counts."""
        if self._by_weight:
            hit = int(branch.cached > 0)
        return self._rank(hit, branch.pick, branch.waiting)

    def _oldest_free(self, branch: Branch, hit: int) -> float:
        """Least arrival at or below a branch that waits for no leader; all have that hit."""
        if not branch.leaders:
            return branch.oldest
        if branch.end - hit >= MIN_SHARED_TOKENS:
            return NEVER
        # A leader runs below, but leaves this path early: few children are on leaders' paths.
        free = branch.ending[0] if branch.ending else NEVER
        for oldest, first in branch.ages or ():
            if oldest >= free:
                break
            free = min(free, self._oldest_free(branch.children[first], hit))
        return free
