"""The past of a tree's tokens: their uses, cached or evicted, and what shadow caches would hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence

from coppice.radix.eviction.records import Record
from coppice.radix.eviction.shadows import Shadow
from coppice.radix.node import Node, Root
from coppice.radix.tokens import TOKEN_BYTES, common_prefix

# A ghost knows every 128th of its tokens and its first 8, to find how far new tokens repeat it.
STRIDE = 128
_HEAD = 8
# Tokens of capacity for each ghost: so ghosts cost about 3 bytes a token of the capacity.
_TOKENS_A_GHOST = 256


Ended = Callable[[Record, int, bool], None]


class History:
    """The records of a tree: of what is cached, and of a bounded number that were evicted.

    `ended(record, age, hit)` is called before each use of a record, `age` requests after its last
    one, and when a ghost is forgotten without another use. `shadows` follow the records.
    """

    def __init__(self, capacity_tokens: int, ended: Ended, shadows: Sequence[Shadow] = ()) -> None:
        self.now = 0  # requests
        self.hit_tokens = self.entered_tokens = 0
        self._ended = ended
        self._shadows = list(shadows)
        self._max_ghosts = 256 + capacity_tokens // _TOKENS_A_GHOST
        self._records: list[Record] = []
        self._roots: dict[Hashable, Record] = {}
        self._ghosts: deque[Record] = deque()  # by the time of their eviction, revived ones among
        self._num_ghosts = 0
        self._limit = 1024  # entries of records and ghosts until they are compacted

    def sample(self, size: int) -> tuple[list[Record], int]:
        """Every n-th record, and n: `size` to twice `size` records, or all if there are fewer."""
        step = max(1, len(self._records) // size)
        return [record for record in self._records[::step] if record.parent is not None], step

    def _compact(self) -> None:
        """Drops dead entries. O(1) for each entry added since the last time."""
        self._records = [record for record in self._records if record.parent is not None]
        ghosts = (ghost for ghost in self._ghosts if not ghost.live and ghost.parent is not None)
        self._ghosts = deque(dict.fromkeys(ghosts))
        self._limit = 1024 + (len(self._records) + len(self._ghosts)) * 3 // 2
        self._roots = {name: top for name, top in self._roots.items() if top.children}

    # -- uses --------------------------------------------------------------------------------

    def use_path(self, node: Node) -> None:
        """A request has hit the tokens up to the end of `node`. O(records on the path)."""
        for shadow in self._shadows:
            shadow.fit(self.now)
        self.now += 1
        bottom = self._record_of(node)
        record: Record | None = bottom
        while record is not None and record.parent is not None:
            self.hit_tokens += record.length
            self._use(record)
            record = record.parent
        if bottom.parent is not None:
            self._offer(bottom)
        if len(self._records) + len(self._ghosts) > self._limit:
            self._compact()

    def _use(self, record: Record) -> None:
        self._ended(record, self.now - record.last, True)
        for shadow in self._shadows:
            shadow.use(record, self.now)
        record.uses += 1
        record.last = self.now

    def _offer(self, record: Record) -> None:
        """`record` is the end of a path that was used."""
        for shadow in self._shadows:
            shadow.offer(record)

    def _record_of(self, node: Node) -> Record:
        record: Record | None = node.policy_data
        if record is None:
            assert isinstance(node, Root)
            record = self._roots.setdefault(node.namespace, Record(None, 0, 0, 0))
            node.policy_data = record
        return record

    # -- changes of the tree -----------------------------------------------------------------

    def insert(self, node: Node, tokens: int) -> None:
        """`tokens` tokens have been entered at the end of `node`; ghosts among them revive."""
        edge, base, end = node.edge, node.start, node.end
        at = end - tokens
        self.entered_tokens += tokens
        grown = node.policy_data is not None
        assert node.parent is not None
        above = node.policy_data if grown else self._record_of(node.parent)
        while at < end:
            ghost = above.children.get(_first(edge, at - base)) or above.children.get(b"")
            if ghost is None or ghost.live:
                break
            same = _repeated(ghost, edge, at, base, end)
            if not same:
                self._forget(ghost)
                break
            if same < ghost.length:
                self._shorten(ghost, same, forget=same < end - at)
            self._use(ghost)
            above.children[_first(edge, at - base)] = above.children.pop(ghost.head[:TOKEN_BYTES])
            ghost.live = True
            ghost.head = ghost.samples = b""
            self._num_ghosts -= 1
            above, at = ghost, at + same
        if at == end:
            self._offer(above)
        elif grown and above is node.policy_data and above.uses == 1 and not above.children:
            above.length += end - at  # a prompt in chunks, or its output: one stretch
            for shadow in self._shadows:
                shadow.grow(above, end - at)
        else:
            fresh = Record(above, at, end - at, self.now)
            above.children[_first(edge, at - base)] = fresh
            above = fresh
            self._records.append(above)
            for shadow in self._shadows:
                shadow.enter(above)
            self._offer(above)
        node.policy_data = above

    def split(self, upper: Node, lower: Node) -> None:
        """`upper` has taken the first tokens of `lower`. O(records on the edge)."""
        cut = lower.start
        record: Record = lower.policy_data
        while record.start >= cut:
            assert record.parent is not None
            record = record.parent
        if record.start + record.length > cut:
            key = _first(upper.edge, record.start - upper.start)
            record = self._cut(record, cut, key, _first(lower.edge, 0))
        upper.policy_data = record

    def _cut(self, lower: Record, cut: int, key: bytes, lower_key: bytes) -> Record:
        """Cuts a live record in two; returns the new upper one."""
        above = lower.parent
        assert above is not None
        upper = Record(above, lower.start, cut - lower.start, lower.last)
        upper.uses, upper.held, upper.returned = lower.uses, lower.held, lower.returned
        above.children[key] = upper
        upper.children[lower_key] = lower
        lower.parent, lower.start, lower.length = upper, cut, lower.length - upper.length
        self._records.append(upper)
        for shadow in self._shadows:
            shadow.split(upper, lower)
        return upper

    def evict(self, node: Node, tokens: int) -> None:
        """The last `tokens` tokens of `node` are about to be evicted; they become ghosts."""
        edge, base, end = node.edge, node.start, node.end
        at = end - tokens
        record: Record = node.policy_data
        while record.parent is not None and record.start >= at:
            self._bury(record, edge, base)
            record = record.parent
        if record.start + record.length > at:
            record = self._evict_tail(record, at, edge, base)
        if at > base:
            node.policy_data = record
        while self._num_ghosts > self._max_ghosts:
            ghost = self._ghosts.popleft()
            if ghost.parent is not None and not ghost.live:
                self._forget(ghost)

    def _evict_tail(self, record: Record, at: int, edge: bytes, base: int) -> Record:
        """Cuts a live record at `at` and makes a ghost of the rest; returns what stays."""
        tail = next(iter(record.children.values())) if len(record.children) == 1 else None
        key = _first(edge, at - base)
        kind = (False, record.last, record.uses, record.held, record.returned)
        if tail is None or (tail.live, tail.last, tail.uses, tail.held, tail.returned) != kind:
            above = self._cut(record, at, _first(edge, record.start - base), key)
            self._bury(record, edge, base)
            return above
        # Page after page is evicted from the same stretch: one ghost that grows.
        end = record.start + record.length
        record.children = {key: tail}
        record.length -= end - at
        tail.start, tail.length = at, tail.length + end - at
        tail.head = (_head(edge, at - base, end - base) + tail.head)[: _HEAD * TOKEN_BYTES]
        tail.samples = _samples(edge, at, end, base) + tail.samples
        return record

    def _bury(self, record: Record, edge: bytes, base: int) -> None:
        record.live = False
        record.head = _head(edge, record.start - base, record.start + record.length - base)
        record.samples = _samples(edge, record.start, record.start + record.length, base)
        self._ghosts.append(record)
        self._num_ghosts += 1

    def clear(self) -> None:
        """The tree was emptied on purpose: nothing of it is remembered."""
        self._records, self._roots = [], {}
        self._ghosts.clear()
        self._num_ghosts = 0
        for shadow in self._shadows:
            shadow.clear()

    # -- ghosts ------------------------------------------------------------------------------

    def _shorten(self, ghost: Record, length: int, forget: bool) -> None:
        """Cuts a ghost; the rest becomes one whose first token is not known, or is forgotten."""
        rest = Record(ghost, ghost.start + length, ghost.length - length, ghost.last)
        rest.uses, rest.live = ghost.uses, False
        rest.held, rest.held_children = ghost.held, ghost.held_children
        rest.returned = ghost.returned
        samples = (-(-rest.start // STRIDE) + (-ghost.start // STRIDE)) * TOKEN_BYTES
        ghost.samples, rest.samples = ghost.samples[:samples], ghost.samples[samples:]
        ghost.length = length
        ghost.children, rest.children = {b"": rest}, ghost.children
        for child in rest.children.values():
            child.parent = rest
        self._records.append(rest)
        self._ghosts.append(rest)
        self._num_ghosts += 1
        for shadow in self._shadows:
            shadow.split(ghost, rest)
            shadow.offer(rest)
        if forget or not rest.samples:
            self._forget(rest)

    def _forget(self, ghost: Record) -> None:
        """Takes out a ghost and all below it (ghosts as well)."""
        above = ghost.parent
        assert above is not None
        del above.children[ghost.head[:TOKEN_BYTES]]
        stack = [ghost]
        while stack:
            record = stack.pop()
            stack.extend(record.children.values())
            self._ended(record, self.now - record.last, False)
            for shadow in self._shadows:
                if record.held & shadow.bit:
                    shadow.leave(record)
            record.parent, record.children, record.samples = None, {}, b""
            self._num_ghosts -= 1


def _first(edge: bytes, at: int) -> bytes:
    return edge[at * TOKEN_BYTES : (at + 1) * TOKEN_BYTES]


def _head(edge: bytes, at: int, end: int) -> bytes:
    return edge[at * TOKEN_BYTES : min(at + _HEAD, end) * TOKEN_BYTES]


def _samples(edge: bytes, start: int, end: int, base: int) -> bytes:
    """The tokens at the positions in start .. end - 1 that STRIDE divides; `base` is the edge's."""
    first = start + -start % STRIDE - base
    return memoryview(edge).cast("i")[first : end - base : STRIDE].tobytes()


def _repeated(ghost: Record, edge: bytes, at: int, base: int, end: int) -> int:
    """The number of the ghost's tokens that the edge repeats from `at` on, within a STRIDE."""
    end = min(end, at + ghost.length)
    head = _head(edge, at - base, end - base)
    if not head.startswith(ghost.head[: len(head)]):
        return 0
    mine, its = _samples(edge, at, end, base), ghost.samples
    if its.startswith(mine):
        return end - at
    agree = common_prefix(its, 0, mine) // TOKEN_BYTES
    if not agree:
        return min(len(head), len(ghost.head)) // TOKEN_BYTES
    return (-(-at // STRIDE) + agree - 1) * STRIDE + 1 - at  # to the last sample that agrees
