"""Pages of sequences, from the tree and its pool: hit, admit, grow, commit, leave. No tensors."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from coppice.radix import FromTiers, Hold, Match, OutOfPages, RadixTree
from coppice.runtime.metrics.prompt_accounts import PromptAccounts
from coppice.runtime.requests.request import Request, Sequence


@dataclass(frozen=True, slots=True)
class PageCopy:
    """A page whose KV must be copied before the step runs (copy-on-write on divergence)."""

    source: int
    target: int


def copy_batches(copies: Iterable[PageCopy]) -> Iterator[list[PageCopy]]:
    """Splits copies, in order, into few batches; the copies of a batch can be made in any order.

    A page that one copy reads may have a new owner already, and be the target of a later copy.
    """
    batch: list[PageCopy] = []
    read: set[int] = set()
    written: set[int] = set()
    for copy in copies:
        if copy.source in written or copy.target in written or copy.target in read:
            yield batch
            batch, read, written = [], set(), set()
        batch.append(copy)
        read.add(copy.source)
        written.add(copy.target)
    if batch:
        yield batch


def paired(copies: Iterable[PageCopy]) -> list[tuple[list[int], list[int]]]:
    """Sources and targets of the copies of each of `copy_batches`."""
    return [
        ([copy.source for copy in batch], [copy.target for copy in batch])
        for batch in copy_batches(copies)
    ]


class Paging:
    """Moves sequences in and out of the pages of one tree.

    In a running sequence's page table, the pages before `hold.length // page_size` are kept by its
    lock in the tree; those from there on are its own, and it alone writes to them.
    """

    def __init__(
        self,
        tree: RadixTree,
        *,
        enable_prefix_caching: bool,
        accounts: PromptAccounts | None = None,
    ) -> None:
        self.tree = tree
        self.page_size = tree.page_size
        self.caching = enable_prefix_caching
        #: Called after pages were allocated, before anything is written to them.
        self.allocated: Callable[[], None] | None = None
        self.accounts = accounts if enable_prefix_caching else None
        self._uncached = None if enable_prefix_caching else accounts

    def match(self, sequence: Sequence) -> Match:
        """The longest cached prefix of a sequence, at most `Sequence.hit_limit` tokens.

        A private sequence matches nothing, nor does any while caching is off. O(tokens at memory
        speed), as are `cached` and `leave`.
        """
        hidden = sequence.private or not self.caching
        tokens = b"" if hidden else sequence.keys()
        return self.tree.match(tokens, sequence.request.namespace, sequence.hit_limit)

    def cached(self, sequence: Sequence) -> int:
        """The number of a sequence's first tokens in the tree, even beyond its `hit_limit`."""
        if sequence.private or not self.caching:
            return 0
        return self.tree.match(sequence.keys(), sequence.request.namespace).length

    def pages_needed(self, length: int, match: Match) -> int:
        """Pages that a sequence of `length` tokens takes from the pool with this hit, at most.

        A hit that ends inside a page may cost a page for its copy.
        """
        return -(-length // self.page_size) - match.length // self.page_size

    def admit(
        self,
        sequence: Sequence,
        match: Match,
        count: int,
        in_flight: int = 0,
        tiers: FromTiers | None = None,
    ) -> PageCopy | None:
        """Locks the hit and takes pages for the next `count` tokens.

        For the accounts: `in_flight` are tokens after the hit that another sequence is computing,
        `tiers` is what other tiers have of it; then call `loaded` when no more will come.
        Returns the page to copy, if the hit ends inside a page that others may read or write.
        Raises OutOfPages, with nothing changed, if the pages can't be had.
        """
        tree, size = self.tree, self.page_size
        needed = self.pages_needed(match.length + count, match)
        if needed > (available := tree.available_pages(match)):
            raise OutOfPages(needed, available)
        sequence.hold, table = tree.start(match, draft=_drafts(sequence))
        hold = sequence.hold
        if self.accounts is not None:
            self.accounts.admitted(sequence, tree, match, in_flight, tiers)
        elif self._uncached is not None:
            self._uncached.uncached(sequence)
        copy = None
        if hold.length % size and not tree.claim_tail(hold):
            page = self._allocate(1)[0]
            copy = PageCopy(table[-1], page)
            table[-1] = page
        sequence.table, sequence.computed = table, hold.length
        self._grow(sequence, count)
        return copy

    def loaded(self, sequence: Sequence) -> None:
        """Nothing more of a running sequence will come from other tiers."""
        if self.accounts is not None:
            self.accounts.loaded(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> PageCopy | None:
        """Lets `child`, which has no pages, continue from all that `parent` has computed.

        Both share every full page. Of a partly filled last page the child gets its own copy: it is
        returned, and must be made before the next step. Raises OutOfPages, with nothing changed,
        if there is no page for it.
        """
        tree, size = self.tree, self.page_size
        self._insert(parent)
        full = parent.computed // size
        tail = self._allocate(1) if parent.computed % size else array("i")
        assert parent.hold is not None
        child.hold = tree.fork(parent.hold)
        shared = parent.table[:full]
        tree.pool.share(shared[child.hold.length // size :])
        child.private = parent.private
        child.table, child.computed = shared + tail, parent.computed
        if self.accounts is not None:
            self.accounts.forked(child)
        return PageCopy(parent.table[full], tail[0]) if tail else None

    def try_grow(self, sequence: Sequence, count: int) -> bool:
        """Takes pages for its next `count` tokens; returns False if there are too few."""
        try:
            self._grow(sequence, count)
        except OutOfPages:
            return False
        return True

    def room_for_drafts(self, sequence: Sequence) -> int:
        """Slots after a decoding sequence's next token, in its pages and in all that are free."""
        pages = len(sequence.table) + self.tree.pool.free_pages
        return pages * self.page_size - sequence.computed - 1

    def grow_for_draft(self, sequence: Sequence, count: int) -> int:
        """Takes free pages for `count` tokens of a draft after a sequence's next token.

        Evicts nothing: a draft may come to nothing. Returns how many tokens there is room for, at
        most `count`. `trim` gives back what is not needed.
        """
        have = len(sequence.table) * self.page_size - sequence.computed - 1
        pages = min(-(-(count - have) // self.page_size), self.tree.pool.free_pages)
        if pages > 0:
            sequence.table += self._allocate(pages, sequence.table[-1])
            have += pages * self.page_size
        return min(count, have)

    def trim(self, sequence: Sequence) -> None:
        """Gives back a sequence's pages after the one of its last computed token."""
        kept = -(-sequence.computed // self.page_size)
        if kept < len(sequence.table):
            self.tree.pool.release(sequence.table[kept:])
            del sequence.table[kept:]

    def _grow(self, sequence: Sequence, count: int) -> None:
        table = sequence.table
        missing = -(-(sequence.computed + count) // self.page_size) - len(table)
        if missing > 0:
            table += self._allocate(missing, table[-1] if table else -1)

    def _allocate(self, count: int, after: int = -1) -> array[int]:
        pages = self.tree.allocate(count, after)
        if self.allocated is not None:
            self.allocated()
        return pages

    def own_tokens(self, sequence: Sequence) -> int:
        """Computed tokens of a running sequence that no other one locks. O(nodes on its path)."""
        assert sequence.hold is not None
        node = sequence.hold.node
        while node is not None and node.locks == 1:
            node = node.parent
        return sequence.computed - (node.end if node is not None else 0)

    def commit(self, sequence: Sequence, count: int) -> None:
        """Counts the next `count` tokens of a sequence as computed: their KV is in its pages.

        Chunks of a prefill enter the tree at once, so that others can hit them; tokens that are
        decoded one by one enter when the sequence leaves.
        """
        sequence.computed += count
        if count > 1 or sequence.computed <= len(sequence.request.prompt_token_ids):
            self._insert(sequence)

    def enter(self, sequence: Sequence) -> None:
        """Enters all that a beam has computed as a draft that is wanted, since a result ends there.

        Other results may beat it: call `settle` when that is known.
        """
        if sequence.hold is not None:  # else it was preempted, which entered the draft
            self._insert(sequence)
        match = self.tree.match(sequence.keys(), sequence.request.namespace)
        if match.length == len(sequence.tokens):
            self.tree.want(match)

    def settle(self, line: array[int], request: Request, *, keep: bool) -> None:
        """Keeps a result that was entered with these tokens, or drops it since others beat it."""
        match = self.tree.match(request.keys(line), request.namespace)
        if match.length == len(line):  # else it was evicted
            self.tree.unwant(match)
        if keep:
            self.tree.unlock(self.tree.lock(match, use=False), use=False)
        else:
            self.tree.drop(match)

    def leave(self, sequence: Sequence, *, keep: bool = True, copied: bool = True) -> None:
        """Gives back a sequence's pages and its lock; what it computed stays in the tree.

        With `keep=False` (the step that wrote to its pages has failed, or no result continues the
        beam) only what was entered before stays, and of that no draft. `copied=False`: its last
        page is not copied yet from its parent's, and its parent has entered all of its tokens.
        """
        assert sequence.hold is not None
        # Forks of a private sequence share its pages: in the tree these would count as evictable,
        # and evicting them would free nothing. The last to leave enters what it has computed.
        refs = self.tree.pool.refs
        lone = not sequence.private or all(refs[page] == 1 for page in sequence.table)
        hold, table = sequence.hold, sequence.table
        entered = hold.length
        if entering := keep and copied and lone:
            entered = sequence.computed
        sequence.private = False
        if entering and self.caching and not sequence.request.beam_search:
            tokens = sequence.keys(hold.length, entered)
            self.tree.finish(hold, tokens, table, begin=hold.length)
        else:
            if entering:
                self._insert(sequence)
            self.tree.release(hold, table, drop=not keep)
        if self.accounts is not None:
            self.accounts.left(sequence, self.tree, entered)
        sequence.hold = None
        del sequence.table[:]
        sequence.computed = 0

    def forget(self, sequence: Sequence) -> None:
        """Drops the draft of a preempted beam that no result continues."""
        self.tree.drop(self.tree.match(sequence.keys(), sequence.request.namespace))

    def _insert(self, sequence: Sequence) -> None:
        if not self.caching or sequence.private:
            return
        hold = sequence.hold
        assert hold is not None
        draft = _drafts(sequence)
        prompt = len(sequence.request.prompt_token_ids)
        if draft and hold.length < prompt:
            # A beam whose prompt was evicted computes it again in chunks, maybe not all of it yet.
            self._enter_to(sequence, hold, min(prompt, sequence.computed), draft=False)
        self._enter_to(sequence, hold, sequence.computed, draft=draft)

    def _enter_to(self, sequence: Sequence, hold: Hold, end: int, *, draft: bool) -> None:
        begin = hold.length
        tokens = sequence.keys(begin, end)
        self.tree.insert(hold, tokens, sequence.table, begin=begin, draft=draft)


def _drafts(sequence: Sequence) -> bool:
    """Whether its next tokens enter the tree as a draft, which may be dropped: a beam's do."""
    return sequence.request.beam_search and sequence.num_generated > 0
