"""The queue of waiting sequences: which one is next, and which may overtake it by how much."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from sortedcontainers import SortedDict, SortedList

from coppice.radix import Node, RadixTree, TreeListener
from coppice.radix.node import Root
from coppice.radix.tokens import TOKEN_BYTES, common_prefix
from coppice.runtime.requests.request import Sequence
from coppice.runtime.schedule.queue_tree import MIN_SHARED_TOKENS, Rank, WaitingTree

# The cost of a sequence beside its uncached tokens, in tokens: it needs decoding steps too.
_OWN_WORK = 32

# Sequences with a bonus that are looked at, of those that may wait for a leader or be set aside.
_LOOK_PAST = 8

_CLASS_BITS = 48


def _longest_hit(hit: int, ticket: int, waiting: int) -> Rank:
    return -hit, ticket


def _heaviest(hit: int, ticket: int, waiting: int) -> Rank:
    return -hit, -waiting, ticket


def _first_come(hit: int, ticket: int, waiting: int) -> Rank:
    return (ticket,)


def _by_class(hit: int, ticket: int, waiting: int) -> Rank:
    return ticket >> _CLASS_BITS, -hit, ticket


_RANKS: dict[str, Callable[[int, int, int], Rank]] = {
    "lpm": _longest_hit,
    "dfs": _heaviest,
    "fcfs": _first_come,
    "priority": _by_class,
}

SCHEDULING_POLICIES = tuple(_RANKS)
_BY_HIT = ("lpm", "priority")


@dataclass(slots=True, eq=False)
class _Place:
    """A waiting sequence's place in the queue."""

    sequence: Sequence
    tokens: bytes
    ticket: int  # its class and arrival in one number: less is earlier, or in a better class
    work: int  # its cost in tokens, by the hit that it had when it was added
    before: int  # work of all of its class that were added before it, since the start
    ahead: int  # the part of `before` that was waiting then


@dataclass(slots=True)
class _Class:
    """The waiting sequences of one priority class, and the work of all that were ever added."""

    tickets: SortedList  # of those that wait
    came: int = 0  # work of all that were added, since the start
    left: int = 0  # work of all that were removed


class WaitingQueue(TreeListener):
    """Sequences that wait for admission.

    Preempted sequences (of the best class that waits) come first, in order of arrival. Next comes a
    sequence that has been overtaken by as much work as the bound allows. The others follow in the
    order of the policy:

    - "lpm": the longest hit first, first come first served among equals.
    - "dfs": where the waiting sequences branch, a cached branch before others, and of those the
      one on which most sequences wait.
    - "fcfs": in order of arrival.
    - "priority": by the requests' `priority`, the least number first; "lpm" within a class. No
      bound protects a class from better ones: it waits as long as those bring enough work. Within a
      class the bound holds as in the other policies; work of other classes does not count.

    A hit counts as the tokens that need not be computed. What other tiers have counts as a bonus of
    as many tokens as take as long to compute as loading saves, under "lpm" and "priority".

    In every policy a sequence that shares tokens with a *leader*, a running sequence that is about
    to compute them, waits to hit them instead. The queue listens to the tree and updates its order
    one path at a time, at a cost that does not depend on its length: every operation is O(tokens of
    the sequence at memory speed + branches on its path x log).
    """

    def __init__(
        self, tree: RadixTree, policy: str, *, slack: int, overtaking: float | None
    ) -> None:
        """An empty queue beside a tree.

        Args:
            tree: its cached tokens decide the order.
            policy: one of `SCHEDULING_POLICIES`.
            slack: work, in tokens, that may always overtake a sequence; a step's most tokens are a
                good choice.
            overtaking: work that may overtake a sequence beyond that, as a fraction of the work
                that waited when it was added: it waits at most about that fraction longer than with
                first come, first served. None: no bound.

        Raises ValueError if the policy is unknown.
        """
        if policy not in _RANKS:
            raise ValueError(
                f"scheduling_policy must be one of {', '.join(_RANKS)}, got {policy!r}"
            )
        self.policy = policy
        self.tokens = 0  # of the requests that wait to begin
        self._slack = slack
        self._overtaking = overtaking
        self._places: dict[int, _Place] = {}  # by ticket
        self._trees: dict[Hashable, WaitingTree] = {}  # by namespace
        self._ranks: dict[Hashable, Rank] = {}  # of the trees, as listed
        self._order: SortedList = SortedList(key=lambda entry: entry[0])  # (rank, namespace)
        # Preempted ones by class, request and sequence: those of the first request come before
        # others, since a beam search continues only once all of its beams have run.
        self._resuming: SortedDict = SortedDict()
        self._parked: dict[int, Sequence] = {}  # by ticket
        self._classes: dict[int, _Class] = {}
        self._leading: dict[Sequence, tuple[Hashable, bytes]] = {}
        self._aside: list[_Place] = []
        self._bonuses: dict[int, Rank] = {}  # ranks that count a bonus, by ticket
        self._by_bonus: SortedList = SortedList()  # (rank, ticket) of these
        tree.add_listener(self)

    def __len__(self) -> int:
        return len(self._places) + len(self._resuming) + len(self._parked)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._resuming.values()
        yield from self._parked.values()
        for place in self._places.values():
            yield place.sequence

    @property
    def requests(self) -> int:
        """The number of requests that wait to begin; each of these has one sequence."""
        return len(self._places)

    # -- adding and removing -----------------------------------------------------------------

    def add(self, sequence: Sequence, hit: int, cached: int | None = None) -> None:
        """Adds a sequence that would hit `hit` tokens now.

        `cached`: its tokens that are in the tree, more than `hit` if it may not hit them all; None
        stands for `hit`.
        """
        ticket = self._ticket(sequence)
        if sequence.preempted:
            self._resuming[self._resumption(sequence)] = sequence
            return
        self.tokens += len(sequence.tokens)
        group = self._class(ticket)
        work = len(sequence.tokens) - hit + _OWN_WORK
        place = _Place(sequence, sequence.keys(), ticket, work, group.came, group.came - group.left)
        group.came += work
        group.tickets.add(ticket)
        self._places[ticket] = place
        self._enter(place, hit if cached is None else cached)

    def park(self, sequence: Sequence) -> None:
        """Keeps a preempted sequence that has nothing to compute, until it is added anew.

        It is a beam that waits for the others of its search; `next` does not return it.
        """
        self._parked[self._ticket(sequence)] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out: it was admitted, has ended, or will be added anew."""
        ticket = self._ticket(sequence)
        if self._resuming.pop(self._resumption(sequence), None) is not None:
            return
        if self._parked.pop(ticket, None) is not None:
            return
        place = self._places.pop(ticket)
        self.tokens -= len(sequence.tokens)
        group = self._class(ticket)
        group.tickets.remove(ticket)
        group.left += place.work
        if (rank := self._bonuses.pop(ticket, None)) is not None:
            self._by_bonus.remove((rank, ticket))
        if not group.tickets:  # else there would be one for every priority that ever was
            del self._classes[ticket >> _CLASS_BITS]
        if place in self._aside:
            self._aside.remove(place)
            return
        namespace = sequence.request.namespace
        self._trees[namespace].remove(place.tokens, ticket)
        self._list(namespace)

    def prefer(self, sequence: Sequence, hit: int) -> None:
        """Has a waiting sequence, unless it resumes, count as if it would hit `hit` tokens.

        It does so until it is removed, or hits more. O(log sequences that do so).
        """
        ticket = self._ticket(sequence)
        if self.policy not in _BY_HIT or ticket not in self._places:
            return
        if (rank := self._bonuses.get(ticket)) is not None:
            self._by_bonus.remove((rank, ticket))
        self._bonuses[ticket] = rank = _RANKS[self.policy](hit, ticket, 0)
        self._by_bonus.add((rank, ticket))

    def set_aside(self, sequence: Sequence) -> None:
        """Takes a sequence that does not fit out of the order until `restore`."""
        place = self._places[self._ticket(sequence)]
        namespace = sequence.request.namespace
        self._trees[namespace].remove(place.tokens, place.ticket)
        self._list(namespace)
        self._aside.append(place)

    def restore(self, cached: Callable[[Sequence], int]) -> None:
        """Puts back what was set aside; `cached` returns the cached tokens of a sequence."""
        for place in self._aside:
            self._enter(place, cached(place.sequence))
        self._aside.clear()

    def _enter(self, place: _Place, cached: int) -> None:
        namespace = place.sequence.request.namespace
        self._tree(namespace).add(place.tokens, place.ticket, cached)
        self._list(namespace)

    # -- the next one ------------------------------------------------------------------------

    def next(self) -> tuple[Sequence, bool] | None:
        """The sequence to admit next, which stays in the queue, and whether none may pass it.

        None if no sequence waits, or if each is parked, set aside or waits for a leader.
        """
        ticket = self._trees[self._order[0][1]].best() if self._order else None
        if self._resuming:
            resuming, sequence = self._resuming.peekitem(0)
            if ticket is None or resuming[0] <= ticket >> _CLASS_BITS:
                return sequence, True
        if ticket is None:
            return None
        group = self._class(ticket)
        first = self._places[group.tickets[0]]
        if self._overtaking is not None:
            overtaken = group.left - first.before
            if overtaken > self._slack + self._overtaking * first.ahead and self._free(first):
                return first.sequence, True
        if self._by_bonus:
            best = self._order[0][0]
            for rank, preferred in self._by_bonus[:_LOOK_PAST]:
                if not rank < best:
                    break
                if self._free(self._places[preferred]):
                    return self._places[preferred].sequence, False
        return self._places[ticket].sequence, False

    def _free(self, place: _Place) -> bool:
        """Whether a sequence is in the order, and waits for no leader."""
        tree = self._trees.get(place.sequence.request.namespace)
        return (
            tree is not None
            and place not in self._aside
            and tree.shared_with_leader(place.tokens) < MIN_SHARED_TOKENS
        )

    # -- leaders -----------------------------------------------------------------------------

    def lead(self, sequence: Sequence, cached: int) -> None:
        """Notes that an admitted sequence leads: it is about to compute its tokens.

        The first `cached` of them are in the tree already.
        """
        namespace, tokens = sequence.request.namespace, sequence.keys()
        self._leading[sequence] = namespace, tokens
        self._tree(namespace).lead(tokens, cached)
        self._list(namespace)

    def stop_leading(self, sequence: Sequence) -> None:
        """Notes that a sequence has computed them, or has left; does nothing if it did not lead."""
        led = self._leading.pop(sequence, None)
        if led is not None:
            self._trees[led[0]].stop_leading(led[1])
            self._list(led[0])

    @property
    def leaders(self) -> int:
        """The number of sequences that lead."""
        return len(self._leading)

    def in_flight(self, sequence: Sequence) -> int:
        """Tokens after a waiting sequence's hit that a leader is about to compute."""
        place = self._places.get(self._ticket(sequence))
        if place is None:
            return 0
        return self._trees[sequence.request.namespace].shared_with_leader(place.tokens)

    def led(self, tokens: bytes, namespace: Hashable, hit: int) -> int:
        """Tokens of a prompt, after its first `hit`, that a leader is about to compute.

        For a prompt that is not in the queue. O(leaders x tokens at memory speed).
        """
        common = [
            common_prefix(led, 0, tokens) // TOKEN_BYTES
            for other, led in self._leading.values()
            if other == namespace
        ]
        return max(0, max(common, default=0) - hit)

    # -- what the tree reports ---------------------------------------------------------------

    def stored(self, node: Node) -> None:
        namespace, tree = self._of(node)
        if tree is not None and tree.stored(node.prefix()):
            self._list(namespace)

    def evicted(self, node: Node, length: int) -> None:
        namespace, tree = self._of(node)
        if tree is not None and tree.evicted(node.prefix(), node.start + length):
            self._list(namespace)

    def cleared(self) -> None:
        for place in self._places.values():
            namespace = place.sequence.request.namespace
            tree = self._trees.get(namespace)  # None if all that wait in it are set aside
            if tree is not None and tree.evicted(place.tokens, 0):
                self._list(namespace)

    def _of(self, node: Node) -> tuple[Hashable, WaitingTree | None]:
        if not self._trees:
            return None, None
        while node.parent is not None:
            node = node.parent
        assert isinstance(node, Root)
        return node.namespace, self._trees.get(node.namespace)

    # -- tickets and classes -----------------------------------------------------------------

    def _ticket(self, sequence: Sequence) -> int:
        request = sequence.request
        group = request.priority if self.policy == "priority" else 0
        return (group << _CLASS_BITS) + sequence.arrival

    def _resumption(self, sequence: Sequence) -> tuple[int, int, int]:
        ticket = self._ticket(sequence)
        return ticket >> _CLASS_BITS, sequence.request.arrival, sequence.arrival

    def _class(self, ticket: int) -> _Class:
        number = ticket >> _CLASS_BITS
        if number not in self._classes:
            self._classes[number] = _Class(SortedList())
        return self._classes[number]

    def _tree(self, namespace: Hashable) -> WaitingTree:
        if namespace not in self._trees:
            self._trees[namespace] = WaitingTree(
                _RANKS[self.policy], by_weight=self.policy == "dfs"
            )
        return self._trees[namespace]

    def _list(self, namespace: Hashable) -> None:
        """Moves a namespace's tree to its place among the others; drops it when it is empty."""
        tree = self._trees[namespace]
        before, rank = self._ranks.get(namespace), tree.rank()
        if before != rank:
            if before is not None:
                self._order.remove((before, namespace))
            if rank is not None:
                self._order.add((rank, namespace))
                self._ranks[namespace] = rank
            else:
                del self._ranks[namespace]
        if tree.empty:
            del self._trees[namespace]
