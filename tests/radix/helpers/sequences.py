"""Sequences on a tree as a scheduler runs them: hit, pages of their own, inserts, release."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from coppice.radix import Hold, Inserted, RadixTree


class Run:
    """A sequence that has hit what it could and has pages of its own for the rest."""

    def __init__(self, tree: RadixTree, tokens: Sequence[int], namespace: Hashable = None) -> None:
        self.tree = tree
        self.tokens = list(tokens)
        match = tree.match(self.tokens, namespace)
        self.hit = match.length
        self.hold: Hold = tree.lock(match)
        self.table = tree.page_table(self.hold)
        if self.hit % tree.page_size and not tree.claim_tail(self.hold):
            self.table[-1] = tree.allocate(1)[0]
        self.grow()

    def grow(self, tokens: Sequence[int] = ()) -> Run:
        self.tokens += tokens
        missing = -(-len(self.tokens) // self.tree.page_size) - len(self.table)
        self.table += self.tree.allocate(missing, self.table[-1] if self.table else -1)
        return self

    def insert(self, count: int | None = None) -> Inserted:
        return self.tree.insert(self.hold, self.tokens[:count], self.table)

    def release(self) -> None:
        self.tree.release(self.hold, self.table)

    def finish(self) -> None:
        self.insert()
        self.release()


def serve(tree: RadixTree, tokens: Sequence[int], namespace: Hashable = None) -> int:
    """Runs a sequence from beginning to end; returns the number of tokens it has hit."""
    run = Run(tree, tokens, namespace)
    run.finish()
    return run.hit
