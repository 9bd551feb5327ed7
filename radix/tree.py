"""The token radix tree: which prefixes have their KV in which pages."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator

from coppice.radix import drafts, edges, leaves
from coppice.radix.eviction.recency import make_order
from coppice.radix.node import Hold, Inserted, Match, Node, Root, new_tuple
from coppice.radix.pages.errors import OutOfPages
from coppice.radix.pages.pool import PagePool
from coppice.radix.state import TreeListener, TreeState
from coppice.radix.tokens import TOKEN_BYTES, Tokens, token_bytes


class RadixTree(TreeState):
    """Longest-prefix matching, locking, inserting and evicting over the pages of one pool.

    Matching is token by token at any page size. A namespace is any hashable key; tokens of
    different namespaces never match.

    The life of a sequence:

        match = tree.match(tokens)           # changes nothing
        hold, table = tree.start(match)      # locks the path, and gives the pages of the hit
        tree.claim_tail(hold)                # may it write after the hit, or copy the page?
        table += tree.allocate(n)            # evicts if need be
        ... KV of more tokens is written to the sequence's own pages ...
        tree.insert(hold, tokens, table)     # as often as wanted
        tree.finish(hold, tokens, table)     # once more, and gives back its pages and its lock

    A page is referenced by each node that covers it, and by each sequence that may write to it or
    has not inserted it yet. The hit's pages, and those that a sequence has inserted, are kept for
    it by its lock, with one count for each node instead of one for each page: so taking and leaving
    a prefix of 100,000 tokens costs the depth of the path, not its pages. In other words: of a
    sequence's page table, the pages before index `hold.length // page_size` belong to the lock, and
    the later ones carry a reference of the sequence.

    A sequence that may be discarded, such as a beam, inserts *drafts*. When the last sequence that
    shares them gives its lock back with `drop`, they leave the tree, and their pages are free at
    once, unless `want` was called for one. A draft that another sequence hits or inserts, or that a
    pin keeps, becomes an ordinary node.

    Costs: match O(tokens / memcmp speed + nodes on the path), lock and unlock O(nodes on the
    path), insert O(new tokens, and the edge of a leaf that grows), evict O(log nodes) for each leaf
    touched, amortised.
    """

    def __init__(self, pool: PagePool, policy: str = "lru") -> None:
        """An empty tree. Raises ValueError if there is no such eviction policy (`POLICIES`)."""
        super().__init__(pool, make_order(policy, pool.num_pages * pool.page_size))

    def add_listener(self, listener: TreeListener) -> None:
        """Reports to `listener` all changes from now on."""
        self.listeners.append(listener)

    def remove_listener(self, listener: TreeListener) -> None:
        """Ends the reports to `listener`. Raises ValueError if it was not added."""
        self.listeners.remove(listener)

    # -- matching ----------------------------------------------------------------------------

    def match(self, tokens: Tokens, namespace: Hashable = None, limit: int | None = None) -> Match:
        """The longest cached prefix of `tokens`, or of the first `limit` of them.

        Changes nothing, nor the order of eviction. A limit spares a copy of the tokens.
        """
        if limit is not None and limit < 0:
            raise ValueError(f"limit must be at least 0, got {limit}")
        query = token_bytes(tokens)
        node: Node | None = self.roots.get(namespace)
        length = 0
        if node is not None:
            node, at = edges.descend(node, query, 0)
            length = at // TOKEN_BYTES
            if limit is not None and length > limit:
                node, length = node.ending(limit), limit
        return new_tuple(Match, (namespace, node, length, self.epoch))

    # -- locking -----------------------------------------------------------------------------

    def lock(self, match: Match, *, use: bool = True, draft: bool = False) -> Hold:
        """Locks the path of a match for a sequence, and marks it as just used.

        A match that ends inside an edge splits it there: what follows the hit is not locked,
        and the hit is counted where it ends. With `use=False` the lock counts neither as a hit nor
        as a use (a pin's). Drafts on the path stay drafts only with `draft`. Raises ValueError if
        the tree has changed since the match was made, or if a listener refuses the namespace.
        """
        node = self._end_of(match, draft)
        if use:
            self.clock = clock = self.clock + 1
            self.order.used(node, clock)
        walk: Node | None = node
        while walk is not None:
            if not walk.locks:
                self.locked_pages += walk.own_pages
            walk.locks += 1
            if use:
                walk.stamp = clock
                walk.hits += 1
            walk = walk.parent
        return Hold(match.namespace, node, match.length)

    def start(self, match: Match, *, draft: bool = False) -> tuple[Hold, array[int]]:
        """`lock`, and the `page_table` of what it holds, for a sequence that begins."""
        hold = self.lock(match, draft=draft)
        return hold, self.page_table(hold)

    def _end_of(self, match: Match, draft: bool) -> Node:
        """The node that ends with a match, which is about to be locked."""
        namespace, node, length, epoch = match
        if epoch != self.epoch:
            raise ValueError("match: the tree has changed since this match was made; match again")
        if node is None:
            node = self.roots.get(namespace) or self._open(namespace)
        if length <= node.start:
            node = node.ending(length)
        if length < node.start + node.length:
            node = edges.split(self, node, length - node.start)
        if node.draft and not draft:
            drafts.keep(node)
        return node

    def _open(self, namespace: Hashable) -> Root:
        """A root for a namespace that has none."""
        root = Root(namespace)
        for listener in self.listeners:
            listener.opened(root)  # may refuse it, while nothing has changed
        self.roots[namespace] = root
        return root

    def fork(self, hold: Hold) -> Hold:
        """A second lock on the same path, for a sequence that continues from the same tokens.

        The new sequence takes a copy of the page table and, by `PagePool.share`, a reference on its
        pages from `hold.length // page_size` on. Insert all computed tokens first, so that at most
        a partly filled tail is among those, and copy that tail for one of the two at once: a page
        that one sequence enters in the tree while another has a reference on it counts as
        evictable once the first has left, but evicting it frees nothing.
        """
        node = self._held(hold)
        walk: Node | None = node
        while walk is not None:
            walk.locks += 1
            walk = walk.parent
        return Hold(hold.namespace, node, hold.length)

    def unlock(self, hold: Hold, *, use: bool = True, drop: bool = False) -> None:
        """Gives the lock back; the path counts as just used, unless `use` is False.

        With `drop`, drafts at its end that nothing else needs leave the tree. O(nodes on the path).
        """
        node = self._held(hold)
        hold.node = None
        if use:
            self.clock += 1
        clock = self.clock
        walk: Node | None = node
        while walk is not None:
            walk.locks = locks = walk.locks - 1
            if not locks:
                self.locked_pages -= walk.own_pages
            if use:
                walk.stamp = clock
            walk = walk.parent
        if drop and node.draft:
            drafts.drop(self, node)
        elif not node.children and not node.locks:
            leaves.offer(self, node)

    def release(self, hold: Hold, table: array[int], *, drop: bool = False) -> None:
        """Ends a sequence: gives back its own pages, then its lock (`drop` as in `unlock`)."""
        self._held(hold)
        if own := table[hold.length // self.page_size :]:
            self.pool.release(own)
        self.unlock(hold, drop=drop)

    def finish(self, hold: Hold, tokens: Tokens, table: array[int], *, begin: int = 0) -> None:
        """`insert` and `release` in one, for a sequence that ends with these tokens.

        The table is not to be used afterwards. Raises ValueError as `insert` does.
        """
        # The two calls would take a reference on the tail and locks on new nodes only to give them
        # back: 4 to 14 % more instructions a request (workloads A to D of `benchmarks/tree.py`).
        query = token_bytes(tokens)
        bottom = self._held(hold)
        node, matched = edges.enter(self, hold, bottom, query, table, begin, draft=False, ends=True)
        total = begin + len(query) // TOKEN_BYTES
        kept = -(-total // self.page_size) if matched < total else total // self.page_size
        if kept < len(table):
            self.pool.release(table[kept:])
        self.unlock(hold)
        walk = node
        while walk is not bottom:
            walk.stamp = self.clock
            assert walk.parent is not None
            walk = walk.parent
        if not (node is bottom or node.children or node.locks):
            leaves.offer(self, node)

    @staticmethod
    def _held(hold: Hold) -> Node:
        if hold.node is None:
            raise ValueError("hold: it was unlocked already")
        return hold.node

    # -- pages -------------------------------------------------------------------------------

    def page_table(self, hold: Hold) -> array[int]:
        """The `ceil(hold.length / page_size)` pages of the held tokens, in order (a new array)."""
        size = self.page_size
        path = self._held(hold).path()
        table = path[0].pages[:] if path else array("i")
        for node in path[1:]:
            if node.start % size:
                # Its first page is its parent's last one or a copy of it that holds more.
                table.pop()
            table += node.pages
        return table

    def available_pages(self, match: Match) -> int:
        """Pages that `allocate` could give if this match were locked. O(nodes on the path).

        Raises ValueError if the tree has changed since the match was made.
        """
        return leaves.available(self, match)

    def claim_tail(self, hold: Hold) -> bool:
        """Whether the sequence may write after its hit, in the hit's partly filled last page.

        True takes a reference on that page for the sequence: it is the tail's sole writer from now
        on, and others that hit the same tokens later have to copy. False: the page has more tokens,
        or another writer; copy it (its first `hold.length % page_size` slots are shared) to a page
        of the sequence's own. Only for holds that end inside a page (ValueError otherwise).
        """
        if not hold.length % self.page_size:
            raise ValueError(
                f"hold: its {hold.length} tokens end at a page border, there is no tail"
            )
        node: Node | None = self._held(hold)
        assert node is not None
        page = node.pages[-1]
        covering = 0
        while node is not None and node.pages and node.pages[-1] == page:
            covering += 1
            node = node.parent
        # Any reference beyond the nodes of this path is another writer, or a node further down.
        refs = self.pool.refs
        if refs[page] != covering:
            return False
        refs[page] += 1
        return True

    def allocate(self, count: int, after: int = -1) -> array[int]:
        """`count` pages from the pool (see `PagePool.allocate`), evicting as many as it takes.

        Raises OutOfPages, with nothing evicted and no count changed, if that can't be enough.
        """
        missing = count - self.pool.free_pages
        if missing <= 0:
            return self.pool.allocate(count, after)
        if missing > self.cached_pages - self.locked_pages:
            raise OutOfPages(count, self.pool.free_pages + self.evictable_pages)
        # Evicted pages are handed on as they are: in a full pool they would be given back in
        # pieces only to be taken again.
        reclaimed = leaves.reclaim(self, missing)
        if len(reclaimed) == count:
            return reclaimed
        try:
            return self.pool.allocate(count - len(reclaimed), after) + reclaimed
        except OutOfPages:
            self.pool.release(reclaimed)
            raise

    # -- inserting ---------------------------------------------------------------------------

    def insert(
        self,
        hold: Hold,
        tokens: Tokens,
        table: array[int],
        *,
        begin: int = 0,
        draft: bool = False,
    ) -> Inserted:
        """Enters the tokens of a sequence whose KV is computed; continues from its hold.

        `tokens` are the tokens of the sequence from position `begin` on, which is at most
        `hold.length`; `table` is its whole page table, with at least `ceil(end / page_size)`
        pages. What another sequence has inserted meanwhile is not entered twice: the table is
        changed in place to the tree's pages there, and the duplicates return to the pool.
        Afterwards the hold covers all tokens, and the references of the pages that it covers in
        full have passed to the tree. With `draft`, new nodes are drafts; without, no node on the
        path remains one.

        O(new tokens + new nodes). Raises ValueError if a size does not fit.
        """
        query = token_bytes(tokens)
        bottom, held = self._held(hold), hold.length
        node, matched = edges.enter(self, hold, bottom, query, table, begin, draft, ends=False)
        total = begin + len(query) // TOKEN_BYTES
        hold.node, hold.length = node, total
        while node is not bottom:
            if not node.locks:
                self.locked_pages += node.own_pages
            node.locks += 1
            assert node.parent is not None
            node = node.parent
        if draft and total > held:
            drafts.share_copies(self, bottom)
        return new_tuple(Inserted, (total - matched, matched - held))

    # -- drafts ------------------------------------------------------------------------------

    def want(self, match: Match) -> None:
        """Keeps a draft that ends with a match when the last sequence that shares it ends.

        It is not dropped until `unwant` was called as often as `want`. It may be evicted while no
        lock holds it; this takes back every `want` of it. O(nodes on the path).
        """
        hold = self.lock(match, use=False, draft=True)
        assert hold.node is not None
        hold.node.wanted += 1
        self.unlock(hold, use=False)

    def unwant(self, match: Match) -> None:
        """Takes one `want` back, if it is still in force; then `drop` or `lock` the match. O(1)."""
        if (node := match.exact()) is not None and node.wanted:
            node.wanted -= 1

    def drop(self, match: Match) -> None:
        """Drops the drafts that end with a match, as far as nothing needs them. O(their pages).

        For a sequence that gave its lock back without `drop` to continue later, and will not.
        """
        if (node := match.exact()) is not None:  # else another sequence may still continue it
            drafts.drop(self, node)

    # -- evicting ----------------------------------------------------------------------------

    def evict(self, count: int) -> int:
        """Frees up to `count` pages, in the order of the policy, each leaf from its tail.

        Returns the number of pages freed: less than `count` only if all else is locked. Raises
        ValueError for a negative count. O(log nodes) for each leaf touched, amortised.
        """
        return self.pool.release(leaves.reclaim(self, count))

    def reset(self) -> None:
        """Empties the tree. Raises RuntimeError while any lock is held."""
        leaves.empty(self)

    # -- reading -----------------------------------------------------------------------------

    def hit_nodes(self) -> Iterator[Node]:
        """All nodes that were hit, parents first. O(those, and their children).

        A hit counts for the whole path, so no node that was hit lies below one that was not.
        """
        waiting: list[Node] = list(self.roots.values())
        while waiting:
            node = waiting.pop()
            if node.parent is not None:
                yield node
            waiting += [child for child in node.children.values() if child.hits]

    def nodes(self) -> Iterator[Node]:
        """All nodes below the roots, parents first."""
        for root in self.roots.values():
            yield from (node for node in root.subtree() if node.parent is not None)
