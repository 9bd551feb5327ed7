"""Namespaces: structured keys that do not alias, and requests that show nothing of other ones.

The cost of a request is measured without a clock: as the number of lines of Python that run for it,
in a process of its own that runs the sources of the tree even where they are compiled.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sequences import serve

from coppice.radix import POLICIES, Namespace, PagePool, RadixTree, check, compiled, page_hashes
from coppice.radix.namespace import encode_namespace

ROOT = Path(__file__).resolve().parent.parent.parent

# One namespace has cached some tokens; then another one's first request has the same tokens or not.
# Prints, for each case, the number of lines that ran for that request and what it changed.
RUN = """
import sys
from array import array
from coppice.radix import Accounting, Namespace, PagePool, RadixTree, compiled
from coppice.radix.tokens import token_bytes

policy, page_size = sys.argv[1], int(sys.argv[2])
assert not compiled.in_use("coppice.radix")
THEIRS, OURS = Namespace("m", cache_salt="a"), Namespace("m", cache_salt="b")
TOKENS = [7 * i % 1000 for i in range(200)]
OTHERS = [token + 1000 for token in TOKENS]


class World:
    def __init__(self, pages):
        self.tree = RadixTree(PagePool(pages, page_size), policy)
        self.accounting = Accounting(pages * page_size, now=0.0, seed=0)
        self.now = 0.0

    def request(self, tokens, namespace):
        tree, size = self.tree, page_size
        self.now += 1.0
        match = tree.match(tokens, namespace, len(tokens) - 1)
        available = tree.available_pages(match)
        hold, table = tree.start(match)
        account = self.accounting.request(
            token_bytes(tokens), namespace, match.length, node=hold.node, now=self.now
        )
        if hold.length % size and not tree.claim_tail(hold):
            table[-1] = tree.allocate(1)[0]
        table += tree.allocate(-(-len(tokens) // size) - len(table), table[-1] if table else -1)
        tree.insert(hold, tokens[: len(tokens) // 2], table)
        tree.insert(hold, tokens, table)
        table += tree.allocate(-(-(len(tokens) + 9) // size) - len(table), table[-1])
        tree.finish(hold, [*tokens, *range(5000, 5009)], table)
        self.accounting.finish(account, token_bytes(range(5000, 5009)), now=self.now)
        return match.length, available, account


def count(tokens, pages):
    world = World(pages)
    for theirs in (tokens, OTHERS[::-1]):
        world.request(theirs, THEIRS)
    world.accounting.settle()
    lines = 0

    def tracer(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return tracer

    sys.settrace(tracer)
    try:
        hit, available, _ = world.request(TOKENS, OURS)
        world.accounting.settle()
    finally:
        sys.settrace(None)
    tree = world.tree
    print(lines, hit, available, tree.num_nodes, tree.cached_pages, tree.cached_tokens,
          tree.evicted_tokens, tree.epoch, sorted((n.stamp, n.hits) for n in tree.nodes()))


for pages in (2000 // page_size, 500 // page_size):  # with room for all, and with evictions
    count(TOKENS, pages)
    count(OTHERS, pages)
"""


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_others_have_cached_changes_no_cost(policy: str, page_size: int) -> None:
    """Its hits, pages, evictions and place in the order of eviction are the same, too."""
    ran = subprocess.run(
        [sys.executable, "-P", "-c", RUN, policy, str(page_size)],
        env=os.environ | {"PYTHONPATH": str(ROOT), compiled.SWITCH: "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    same, other, same_when_full, other_when_full = ran.stdout.splitlines()
    assert same == other
    assert same_when_full == other_when_full
    assert int(same.split()[0]) > 100
    assert int(same_when_full.split()[6]) > int(same.split()[6]) == 0, "nothing was evicted"
    assert same.split()[1] == "0"


def test_a_use_does_not_renew_what_another_namespace_has() -> None:
    tree = RadixTree(PagePool(12, 4))
    left, right = Namespace("m", cache_salt="left"), Namespace("m", cache_salt="right")
    serve(tree, range(16), left)
    serve(tree, range(16), right)
    before = {(node.stamp, node.hits) for node in tree.roots[left].subtree()}
    tree.unlock(tree.lock(tree.match(range(16), right)))
    assert {(node.stamp, node.hits) for node in tree.roots[left].subtree()} == before
    tree.evict(4)
    assert tree.match(range(16), left).length == 0, "used least recently"
    assert tree.match(range(16), right).length == 16
    check(tree)


def test_different_namespaces_have_different_keys() -> None:
    """As keys of the tree, as bytes in hashes, and as page hashes."""
    texts = ("", "a", "b", "ab", "None", "a\0b", "0", "\ud800", "é")
    keys = [
        Namespace(model, *others)
        for model, *others in itertools.product(texts[:4], *[(None, *texts)] * 3)
    ]
    assert len(set(keys)) == len({encode_namespace(key) for key in keys}) == len(keys)
    assert len({page_hashes([1, 2], 2, key)[0] for key in keys}) == len(keys)
    tree = RadixTree(PagePool(4 * len(keys), 1))
    for number, key in enumerate(keys):
        serve(tree, range(number, number + 2), key)
    for number, key in enumerate(keys[::97]):
        for other in (0, 1, 96, 97, 98):
            length = tree.match(range(other, other + 2), key).length
            assert length == (2 if other == 97 * number else 0)


@pytest.mark.parametrize("field", ["model", "adapter", "cache_salt", "tenant"])
def test_a_field_that_is_no_text_has_no_bytes(field: str) -> None:
    with pytest.raises(ValueError, match=f"namespace: {field} must be a string or None, got 5"):
        encode_namespace(Namespace()._replace(**{field: 5}))
