"""Events: what a tree stored and removed, page by page, for a consumer that mirrors it."""

from __future__ import annotations

from coppice.radix.mirror.blocks import Blocks, Event
from coppice.radix.mirror.changes import Translator, attached
from coppice.radix.mirror.log import TreeLog
from coppice.radix.tree import RadixTree


class PageEvents:
    """A bounded stream of a tree's events; hashes are computed when they are drained.

    The stream begins with what the tree holds, so a consumer that applies all events mirrors it. A
    full page is stored once, with the node in which its last token lies, and removed once; splits
    emit nothing. A consumer that is too slow loses nothing silently: when more than `limit` changes
    of the tree wait they are dropped, and the next drain gives a `PagesCleared` and all that the
    tree holds. The stream keeps a copy of the tree's tokens.

        events = PageEvents(tree, limit=10_000)
        for event in events.drain(): ...
        events.close()

    Attributes:
        limit, seed: as given; `seed` is that of the hashes.

    Raises ValueError if the tree has a stream already, if `limit` is less than 1, or if there is a
    namespace in the tree that `page_hashes` refuses. While a stream is attached, the tree refuses
    locks in such a namespace.
    """

    def __init__(self, tree: RadixTree, *, limit: int = 10_000, seed: int = 0) -> None:
        if any(isinstance(listener, TreeLog) for listener in tree.listeners):
            raise ValueError("tree: it has a stream of events already; close that one first")
        self.limit = limit
        self.seed = seed
        self._tree, self._log = tree, attached(tree, limit)
        self._translator, self._blocks = Translator(), Blocks(tree.page_size, seed=seed)

    @property
    def restarts(self) -> int:
        """Times that changes were dropped, as the consumer was too slow."""
        return self._log.restarts

    def __len__(self) -> int:
        """Changes of the tree that wait to be drained."""
        return len(self._log)

    def drain(self) -> list[Event]:
        """All events since the last call, in order. O(the tokens that they have)."""
        changes = self._translator.translate(self._log.drain())
        events = [self._blocks.take(change) for change in changes]
        return [event for event in events if event is not None]

    def close(self) -> None:
        """Ends the stream."""
        self._tree.remove_listener(self._log)
