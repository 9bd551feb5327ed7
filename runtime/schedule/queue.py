"""The queue of waiting sequences: which one is next, without starving anyone."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from sortedcontainers import SortedDict, SortedList

from coppice.radix import Node, RadixTree, TreeListener
from coppice.radix.node import Root
from coppice.runtime.requests.request import Sequence
from coppice.runtime.schedule.queue_tree import MIN_SHARED_TOKENS, Rank, WaitingTree

# What a sequence costs beside its uncached tokens, in tokens: it needs steps of its own.
_OWN_WORK = 32

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


@dataclass(slots=True, eq=False)
class _Place:
    """A waiting sequence's place in the queue."""

    sequence: Sequence
    tokens: bytes
    ticket: int  # its class and arrival in one number: less is earlier in a better class
    work: int  # what it costs, in tokens, by the hit it had when it came
    before: int  # work of all of its class that came before it, since the start
    ahead: int  # work of its class that it found waiting


@dataclass(slots=True)
class _Class:
    """The waiting sequences of one priority class, and the work of all that ever waited."""

    tickets: SortedList  # of those that wait
    came: int = 0  # work of all that came, since the start
    left: int = 0  # work of all that left the queue


class WaitingQueue(TreeListener):
    """Sequences that wait for admission.

    First come those that were preempted, in order of arrival (of the best class that waits). Next
    comes a sequence that has been overtaken by as much work as the bound allows. The others follow
    in the order of the policy:

    - "lpm": the longest hit first, first come first served among equals.
    - "dfs": where the waiting sequences branch, a cached branch before others, and of those the
      one on which most sequences wait.
    - "fcfs": in order of arrival.
    - "priority": by the requests' `priority`, the least number first; "lpm" within a class. A class
      gets what better classes leave, which may be nothing for as long as they bring work: no bound
      protects a class from a better one. Within a class the bound holds as in the other policies;
      work of other classes does not count.

    In every policy a sequence that shares tokens with one that is about to compute them waits to
    hit them instead. The queue listens to the tree and updates its order one path at a time, at a
    cost that does not depend on its length: every operation is O(tokens of the sequence at memory
    speed + branches on its path x log).
    """

    def __init__(
        self, tree: RadixTree, policy: str, *, slack: int, overtaking: float | None
    ) -> None:
        """An empty queue beside a tree.

        Args:
            tree: whose cached tokens decide.
            policy: one of `SCHEDULING_POLICIES`.
            slack: work, in tokens, that may overtake anyone; one step's is a good choice.
            overtaking: what may overtake a sequence beyond that, as a fraction of the work that it
                found before it: it waits at most about that much longer than with first come,
                first served. None: no bound.

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
        # others, which matters if all of them have to run for it to continue.
        self._resuming: SortedDict = SortedDict()
        self._parked: dict[int, Sequence] = {}  # by ticket
        self._classes: dict[int, _Class] = {}
        self._leading: dict[Sequence, tuple[Hashable, bytes]] = {}
        self._aside: list[_Place] = []
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
        """How many requests wait to begin: no sequence of them has run, so each has one."""
        return len(self._places)

    # -- coming and going --------------------------------------------------------------------

    def add(self, sequence: Sequence, hit: int, cached: int | None = None) -> None:
        """Adds a sequence that would hit `hit` tokens now.

        `cached` of its tokens are in the tree, more than `hit` if it may not hit them all; None:
        `hit`.
        """
        ticket = self._ticket(sequence)
        if sequence.preempted:
            self._resuming[self._resumption(sequence)] = sequence
            return
        self.tokens += len(sequence.tokens)
        group = self._class(ticket)
        work = len(sequence.tokens) - hit + _OWN_WORK
        place = _Place(
            sequence, sequence.tokens.tobytes(), ticket, work, group.came, group.came - group.left
        )
        group.came += work
        group.tickets.add(ticket)
        self._places[ticket] = place
        self._enter(place, hit if cached is None else cached)

    def park(self, sequence: Sequence) -> None:
        """Keeps a sequence that was preempted with nothing to compute, until it is added anew.

        Such a sequence is a beam that waits for the others of its search; it is not offered.
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
        if place in self._aside:
            self._aside.remove(place)
            return
        namespace = sequence.request.namespace
        self._trees[namespace].remove(place.tokens, ticket)
        self._list(namespace)

    def set_aside(self, sequence: Sequence) -> None:
        """Keeps a sequence that does not fit out of the order until `restore`."""
        place = self._places[self._ticket(sequence)]
        namespace = sequence.request.namespace
        self._trees[namespace].remove(place.tokens, place.ticket)
        self._list(namespace)
        self._aside.append(place)

    def restore(self, cached: Callable[[Sequence], int]) -> None:
        """Puts what was set aside back in the order; `cached` returns how much of one is cached."""
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

        None if no sequence waits, or if each is parked or waits for what a running one is about to
        compute.
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
        return self._places[ticket].sequence, False

    def _free(self, place: _Place) -> bool:
        """Whether it is in the order, and no leader computes what it could hit."""
        tree = self._trees.get(place.sequence.request.namespace)
        return (
            tree is not None
            and place not in self._aside
            and tree.shared_with_leader(place.tokens) < MIN_SHARED_TOKENS
        )

    # -- leaders -----------------------------------------------------------------------------

    def lead(self, sequence: Sequence, cached: int) -> None:
        """Notes that an admitted sequence is about to compute its tokens.

        The first `cached` of them are in the tree already.
        """
        namespace, tokens = sequence.request.namespace, sequence.tokens.tobytes()
        self._leading[sequence] = namespace, tokens
        self._tree(namespace).lead(tokens, cached)
        self._list(namespace)

    def stop_leading(self, sequence: Sequence) -> None:
        """Notes that it has computed them, or has left; does nothing if it did not lead."""
        led = self._leading.pop(sequence, None)
        if led is not None:
            self._trees[led[0]].stop_leading(led[1])
            self._list(led[0])

    @property
    def leaders(self) -> int:
        """How many sequences lead."""
        return len(self._leading)

    def in_flight(self, sequence: Sequence) -> int:
        """Tokens after a waiting sequence's hit that a leader is about to compute."""
        place = self._places.get(self._ticket(sequence))
        if place is None:
            return 0
        return self._trees[sequence.request.namespace].shared_with_leader(place.tokens)

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
