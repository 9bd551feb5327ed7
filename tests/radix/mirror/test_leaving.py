"""Names of pages, and what leaves a tree under them."""

from __future__ import annotations

import random

import pytest

from coppice.radix import Namespace, PagePool, RadixTree
from coppice.radix.mirror.leaving import Known, LeavingPages, NamedPage
from coppice.radix.mirror.names import PageKey, chain, root_name
from coppice.radix.tokens import TOKEN_BYTES, token_bytes


def names_of(root: bytes, tokens: bytes, size: int) -> list[bytes]:
    return [key.name for key in chain(root, tokens, size * TOKEN_BYTES)]


def test_a_name_stands_for_all_tokens_before_it_and_for_what_they_are_of():
    tokens = token_bytes(range(10))
    root = root_name(b"model", None)
    keys = chain(root, tokens, 4 * TOKEN_BYTES)
    assert [key.length for key in keys] == [4, 4, 2]
    assert b"".join(key.tokens for key in keys) == tokens
    assert [key.parent for key in keys] == [root, keys[0].name, keys[1].name]
    assert chain(keys[0].name, tokens[16:], 4 * TOKEN_BYTES) == keys[1:]
    roots = {
        root_name(digest, namespace)
        for digest in (b"model", b"mode", b"")
        for namespace in (None, Namespace(), Namespace(cache_salt="a"), Namespace(tenant="a"),
                          Namespace(adapter="a"), Namespace(cache_salt=""))
    }  # fmt: skip
    assert len(roots) == 18
    other = chain(root_name(b"model", Namespace(tenant="a")), tokens, 4 * TOKEN_BYTES)
    assert not {key.name for key in keys} & {key.name for key in other}
    with pytest.raises(ValueError, match="namespace must be a Namespace or None"):
        root_name(b"model", 7)


def test_what_is_known_is_bounded():
    known = Known(3)
    for name in (b"a", b"b", b"c", b"a", b"d"):
        known.add(name)
    assert b"b" not in known
    assert all(each in known for each in (b"a", b"c", b"d"))
    known.discard(b"a")
    assert b"a" not in known and len(known) == 2
    known.clear()
    assert len(known) == 0


class Content:
    """What each page of a pool holds: the token of each slot, with all tokens before it."""

    def __init__(self, pages: int, size: int) -> None:
        self.size = size
        self.slots: list[list[tuple[int, ...] | None]] = [[None] * size for _ in range(pages)]

    def write(self, table: list[int], tokens: list[int], begin: int) -> None:
        for at in range(begin, len(tokens)):
            self.slots[table[at // self.size]][at % self.size] = tuple(tokens[: at + 1])

    def check(self, root: bytes, page: NamedPage) -> None:
        """The page holds the KV of just the tokens that its name says."""
        count = page.key.length
        last = self.slots[page.page][count - 1]
        assert last is not None
        begin = (len(last) - 1) // self.size * self.size
        for at in range(count):
            assert self.slots[page.page][at] == last[: begin + at + 1]
        assert page.key.tokens == token_bytes(last[begin:])
        assert page.name == names_of(root, token_bytes(last), self.size)[-1] == page.key.name


@pytest.mark.parametrize("seed", range(12))
def test_what_leaves_is_named_by_its_content(seed):
    """Sequences come, fork off, grow and go in a small pool; each page that is evicted is checked.

    All tokens that ever were in the tree and are not any more have left under their names.
    """
    rng = random.Random(seed)
    size = rng.choice([1, 2, 4, 5])
    pool = PagePool(rng.randint(12, 30), size)
    tree = RadixTree(pool, rng.choice(["lru", "slru", "density", "adaptive"]))
    root = root_name(b"x", None)
    asked: list[object] = []

    def root_of(namespace: object) -> bytes | None:
        asked.append(namespace)
        return None if namespace == "skipped" else root

    seen: set[bytes] = set()  # names that left
    leaving = LeavingPages(size, root_of, lambda name: True)
    tree.add_listener(leaving)
    content = Content(pool.num_pages, size)
    entered: set[tuple[int, ...]] = set()

    def flush() -> None:
        for page in leaving.take():
            content.check(root, page)
            seen.add(page.name)

    texts = [[rng.randrange(3) for _ in range(40)] for _ in range(3)]
    for _ in range(300):
        text = list(rng.choice(texts))
        tokens = text[: rng.randint(1, min(len(text), (pool.num_pages - 2) * size))]
        if rng.random() < 0.5:
            tokens[-1] = rng.randrange(3)
        namespace = "skipped" if rng.random() < 0.1 else None
        match = tree.match(tokens, namespace)
        hold, table = tree.start(match)
        if hold.length % size and not tree.claim_tail(hold):
            [page] = tree.allocate(1)
            flush()
            kept = hold.length % size
            content.slots[page][:kept] = content.slots[table[-1]][:kept]
            table[-1] = page
        missing = -(-len(tokens) // size) - len(table)
        if missing > 0:
            table += tree.allocate(missing)
            flush()
        content.write(list(table), tokens, hold.length)
        if rng.random() < 0.3:
            tree.insert(hold, tokens, table)
            tree.release(hold, table)
        else:
            tree.finish(hold, tokens, table)
        if namespace is None:
            entered.add(tuple(tokens))
        if rng.random() < 0.1:
            tree.evict(rng.randint(1, 8))
            flush()
    tree.evict(pool.num_pages)
    flush()
    assert not leaving._chains, "names of nodes that are gone are kept"
    assert entered and None in asked and "skipped" in asked
    for tokens in entered:
        full = len(tokens) // size * size
        for name in names_of(root, token_bytes(list(tokens[:full])), size):
            assert name in seen, "a page left without a name"


def test_pages_of_a_node_have_the_names_of_their_tokens():
    pool, root = PagePool(16, 4), root_name(b"x", None)
    tree = RadixTree(pool)
    leaving = LeavingPages(4, lambda namespace: root, lambda name: name not in unwanted)
    unwanted: set[bytes] = set()
    tree.add_listener(leaving)
    tokens = list(range(10))
    for line in (tokens, [*tokens[:6], 77, 78, 79]):
        hold, table = tree.start(tree.match(line))
        if hold.length % 4 and not tree.claim_tail(hold):
            [table[-1]] = tree.allocate(1)
        table += tree.allocate(-(-len(line) // 4) - len(table))
        tree.finish(hold, line, table)
    found = {page.key for node in tree.nodes() for page in leaving.pages(node)}
    wanted = set(chain(root, token_bytes(tokens), 16))
    wanted |= set(chain(root, token_bytes([*tokens[:6], 77, 78, 79]), 16))
    # The upper node ends inside a page, and has a name for its part of it, too.
    wanted.add(PageKey(chain(root, token_bytes(tokens[:4]), 16)[0].name, token_bytes([4, 5])))
    assert found == wanted
    unwanted |= {key.name for key in wanted if key.length == 4}
    tree.evict(16)
    assert {page.key.length for page in leaving.take()} <= {1, 2, 3}
