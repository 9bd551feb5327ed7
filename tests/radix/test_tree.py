"""The promises of the tree, each with a test."""

from __future__ import annotations

import gc
import random
import tracemalloc
from array import array
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import pytest
from sequences import Run, serve

from coppice.radix import (
    Hold,
    Inserted,
    Node,
    OutOfPages,
    PagePool,
    Pins,
    RadixTree,
    check,
)
from coppice.radix.edges import EDGE_TOKENS
from coppice.radix.tokens import token_bytes


def make_tree(num_pages: int = 64, page_size: int = 4) -> RadixTree:
    return RadixTree(PagePool(num_pages, page_size))


def use(tree: RadixTree, tokens: Sequence[int]) -> None:
    tree.unlock(tree.lock(tree.match(tokens)))


def matched(tree: RadixTree, tokens: Sequence[int], namespace: Hashable = None) -> int:
    return tree.match(tokens, namespace).length


def checked(tree: RadixTree, *runs: Run) -> None:
    check(tree, [(run.hold, run.table) for run in runs])


def counts(tree: RadixTree) -> object:
    return (
        tree.pool.refs.tobytes(),
        tree.pool.free_pages,
        tree.pool.free_runs(),
        tree.cached_pages,
        tree.locked_pages,
        tree.evictable_pages,
        tree.cached_tokens,
        tree.evicted_tokens,
        tree.num_nodes,
        [(node.prefix(), node.pages.tobytes(), node.locks, node.hits) for node in tree.nodes()],
    )


# -- matching ------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_matches_are_exact_to_the_token_at_any_page_size(page_size: int) -> None:
    tree = make_tree(64, page_size)
    tokens = list(range(100, 150))
    serve(tree, tokens)
    for length in range(len(tokens) + 1):
        assert matched(tree, tokens[:length]) == length
        assert matched(tree, [*tokens[:length], 7, 8, 9]) == length


def test_a_match_inside_an_edge_changes_no_sizes() -> None:
    tree = make_tree()
    serve(tree, range(20))
    before, epoch = counts(tree), tree.epoch
    for length in (1, 4, 7, 19):
        assert matched(tree, [*range(length), 99]) == length
    assert counts(tree) == before
    assert tree.epoch == epoch


def test_a_limited_match_is_that_of_the_tokens_up_to_the_limit() -> None:
    tree = make_tree()
    serve(tree, range(10))
    serve(tree, [*range(6), 50, 51, 52])
    for limit in range(14):
        assert tree.match(range(12), limit=limit) == tree.match(range(min(12, limit)))
    with pytest.raises(ValueError, match="limit must be at least 0, got -1"):
        tree.match(range(12), limit=-1)
    assert tree.match(range(12)).length == tree.match(range(12), limit=12).length == 10


def test_an_insert_may_leave_out_what_the_hold_covers() -> None:
    tree = make_tree()
    run = Run(tree, range(10))
    run.insert(7)
    for begin in (-1, 8):
        with pytest.raises(ValueError, match=f"begin must be in 0 .. 7, .*got {begin}"):
            tree.insert(run.hold, [7, 8, 9], run.table, begin=begin)
    assert tree.insert(run.hold, [5, 6, 7, 8], run.table, begin=5) == Inserted(2, 0)
    assert tree.insert(run.hold, [9], run.table, begin=9) == Inserted(1, 0)
    checked(tree, run)
    run.release()
    assert matched(tree, range(12)) == 10


def test_nothing_matches_in_an_empty_tree_or_of_no_tokens() -> None:
    tree = make_tree()
    assert matched(tree, [1, 2, 3]) == 0
    serve(tree, [1, 2, 3])
    assert matched(tree, []) == 0
    assert matched(tree, [2, 3]) == 0


def test_all_kinds_of_tokens_match_alike() -> None:
    tree = make_tree()
    serve(tree, [5, 6, 7])
    kinds = [5, 6, 7], (5, 6, 7), np.array([5, 6, 7]), array("i", [5, 6, 7]), token_bytes([5, 6, 7])
    assert [tree.match(tokens).length for tokens in kinds] == [3] * len(kinds)
    with pytest.raises(ValueError, match="tokens"):
        tree.match([5, -6])


def test_tokens_of_different_namespaces_never_match() -> None:
    tree = make_tree()
    tokens = list(range(10))
    # Keys that would be one and the same if they were written one part after the other.
    spaces: list[Hashable] = [None, "", "ab", ("a", "b"), ("ab", ""), ("", "ab"), b"ab", 0, "0"]
    for number, space in enumerate(spaces):
        assert [matched(tree, tokens, other) for other in spaces[number:]] == [0] * (
            len(spaces) - number
        )
        serve(tree, tokens, space)
        checked(tree)
    assert tree.cached_tokens == 10 * len(spaces)
    pages = [tree.page_table(Run(tree, tokens, space).hold).tobytes() for space in spaces]
    assert len(set(pages)) == len(spaces), "namespaces share no pages"


def test_a_namespace_without_tokens_is_forgotten() -> None:
    tree = make_tree()
    for number in range(100):
        use(tree, [1]) if number % 2 else tree.unlock(tree.lock(tree.match([1], namespace=number)))
    assert not tree.roots
    serve(tree, range(8), "a")
    tree.evict(2)
    assert not tree.roots
    checked(tree)


# -- stale matches -------------------------------------------------------------------------------


def _evict(tree: RadixTree) -> None:
    tree.evict(1)


def _insert(tree: RadixTree) -> None:
    serve(tree, [1, 2, 3])


def _grow(tree: RadixTree) -> None:
    run = Run(tree, [7, 7, 7])
    run.insert(1)
    run.insert()
    run.release()


@pytest.mark.parametrize("change", [_evict, _insert, _grow, RadixTree.reset])
def test_a_stale_match_is_refused(change: Callable[[RadixTree], None]) -> None:
    tree = make_tree()
    serve(tree, range(20))
    found, missed = tree.match(range(20)), tree.match([50])
    change(tree)
    before = counts(tree)
    for stale in (found, missed):
        with pytest.raises(ValueError, match="match: the tree has changed"):
            tree.lock(stale)
        with pytest.raises(ValueError, match="match: the tree has changed"):
            tree.available_pages(stale)
    assert counts(tree) == before


def test_matches_survive_each_others_locks_and_splits() -> None:
    """Several requests are matched first and locked afterwards, all inside one edge."""
    tree = make_tree()
    serve(tree, range(20))
    lengths = [20, 13, 5, 5, 12, 1, 19, 0]
    matches = [tree.match([*range(length), 99]) for length in lengths]
    holds = []
    for match, length in zip(matches, lengths, strict=True):
        available = tree.available_pages(match)
        hold = tree.lock(match)
        assert (hold.length, available) == (
            length,
            tree.pool.free_pages + tree.evictable_pages,
        )
        assert list(tree.page_table(hold)) == list(range(-(-length // 4)))
        holds.append((hold, array("i")))
        check(tree, holds)
    assert tree.num_nodes == 6
    for hold, _ in holds:
        tree.unlock(hold)
    checked(tree)


# -- locking -------------------------------------------------------------------------------------


def test_a_hit_locks_what_was_hit_and_no_more() -> None:
    """Else a request that shares its first token with a long idle one could find no pages."""
    tree = make_tree(num_pages=8)
    serve(tree, range(32))
    match = tree.match([0, 50, 51])
    assert tree.available_pages(match) == 7
    hold = tree.lock(match)
    assert (tree.locked_pages, tree.evictable_pages) == (1, 7)
    check(tree, [(hold, array("i"))])
    assert len(tree.allocate(7)) == 7
    assert matched(tree, range(32)) == 1


def test_a_sequence_that_finds_its_tokens_inserted_locks_only_its_own() -> None:
    tree = make_tree()
    slow = Run(tree, range(10))
    serve(tree, range(40))
    slow.insert()
    assert tree.locked_pages == 3
    checked(tree, slow)
    tree.evict(64)
    assert matched(tree, range(40)) == 10
    slow.release()


def test_locks_nest() -> None:
    tree = make_tree()
    serve(tree, range(8))
    serve(tree, range(16))
    inner, outer = tree.lock(tree.match(range(16))), tree.lock(tree.match(range(8)))
    again = tree.lock(tree.match(range(16)))
    assert tree.locked_pages == 4
    tree.unlock(inner)
    assert tree.locked_pages == 4
    tree.unlock(again)
    assert tree.locked_pages == 2
    tree.evict(64)
    assert matched(tree, range(16)) == 8
    tree.unlock(outer)
    assert tree.locked_pages == 0
    assert tree.evict(64) == 2
    checked(tree)


def test_locks_survive_splits() -> None:
    tree = make_tree()
    owner = Run(tree, range(20))
    owner.insert()
    others = [Run(tree, [*range(cut), 90 + cut]) for cut in (17, 3, 8, 4)]
    for other in others:
        other.insert()
        checked(tree, owner, *others)
    assert tree.num_nodes == 9
    for other in others:
        other.release()
    assert tree.evict(64) > 0
    checked(tree, owner)
    assert matched(tree, range(20)) == 20, "the owner still holds all of its path"
    assert list(tree.page_table(owner.hold)) == list(owner.table)
    owner.release()
    assert tree.locked_pages == 0
    checked(tree)


@pytest.mark.parametrize(
    "act",
    [
        lambda tree, hold: tree.unlock(hold),
        lambda tree, hold: tree.release(hold, array("i")),
        lambda tree, hold: tree.fork(hold),
        lambda tree, hold: tree.page_table(hold),
        lambda tree, hold: tree.claim_tail(hold),
        lambda tree, hold: tree.insert(hold, range(8), array("i", [0, 1])),
    ],
    ids=["unlock", "release", "fork", "page_table", "claim_tail", "insert"],
)
def test_a_hold_that_was_given_back_is_refused(act: Callable[[RadixTree, Hold], object]) -> None:
    tree = make_tree()
    serve(tree, range(6))
    hold = tree.lock(tree.match(range(6)))
    tree.unlock(hold)
    before = counts(tree)
    with pytest.raises(ValueError, match="hold: it was unlocked already"):
        act(tree, hold)
    assert counts(tree) == before


def test_reset_is_refused_while_locks_are_held() -> None:
    tree = make_tree()
    serve(tree, range(20), "other")
    empty = tree.lock(tree.match([]))
    held = tree.lock(tree.match(range(7), "other"))
    for hold in (empty, held):
        before = counts(tree)
        with pytest.raises(RuntimeError, match="reset: refused"):
            tree.reset()
        assert counts(tree) == before
        tree.unlock(hold)
    tree.reset()
    assert (tree.cached_tokens, tree.cached_pages, tree.num_nodes) == (0, 0, 0)
    assert tree.pool.free_runs() == [(0, 64)]
    assert matched(tree, range(20), "other") == 0
    checked(tree)


# -- inserting -----------------------------------------------------------------------------------


def test_a_second_insert_of_the_same_tokens_gives_the_duplicates_back() -> None:
    tree = make_tree()
    first, second = Run(tree, range(18)), Run(tree, range(18))
    assert first.insert() == Inserted(new_tokens=18, duplicate_tokens=0)
    own = list(second.table)
    free = tree.pool.free_pages
    assert second.insert() == Inserted(new_tokens=0, duplicate_tokens=18)
    assert tree.pool.free_pages == free + 4, "all full pages; the tail is written on"
    assert list(second.table) == [*first.table[:4], own[4]]
    checked(tree, first, second)
    first.release()
    second.release()
    assert tree.pool.free_pages == 64 - 5
    assert (tree.cached_tokens, tree.cached_pages) == (18, 5)
    checked(tree)


def test_inserting_again_what_is_inserted_changes_nothing() -> None:
    tree = make_tree()
    run = Run(tree, range(18))
    run.insert()
    before = counts(tree)
    assert run.insert() == Inserted(0, 0)
    assert counts(tree) == before


@pytest.mark.parametrize("chunk", [1, 3, 4, 5])
def test_chunks_and_decoded_tokens_make_no_chain_of_nodes(chunk: int) -> None:
    tree = make_tree()
    run = Run(tree, range(50))
    for end in (*range(chunk, 50, chunk), 50):
        new = end - run.hold.length
        assert run.insert(end) == Inserted(new_tokens=new, duplicate_tokens=0)
        checked(tree, run)
    assert (tree.num_nodes, tree.cached_tokens, tree.cached_pages) == (1, 50, 13)
    run.release()
    assert tree.pool.free_pages == 64 - 13
    checked(tree)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] * (seed >= 3)) for seed in range(8)]
)
def test_start_and_finish_do_what_their_parts_do(seed: int, page_size: int) -> None:
    rng = random.Random(seed)
    trees = [make_tree(64 // page_size * 4, page_size) for _ in range(2)]
    running: list[list[tuple[Hold, array[int]]]] = []
    lines: list[list[int]] = []
    segments = [[rng.randrange(9) for _ in range(rng.choice((1, 3, 7, 12)))] for _ in range(6)]
    for _ in range(300):
        if len(running) < 4 and rng.random() < 0.6:
            tokens = [token for _ in range(rng.randint(1, 5)) for token in rng.choice(segments)]
            pair = []
            for tree, fused in zip(trees, (True, False), strict=True):
                match = tree.match(tokens, limit=len(tokens) - 1)
                if fused:
                    hold, table = tree.start(match)
                else:
                    hold = tree.lock(match)
                    table = tree.page_table(hold)
                if hold.length % page_size and not tree.claim_tail(hold):
                    table[-1] = tree.allocate(1)[0]
                table += tree.allocate(-(-len(tokens) // page_size) - len(table))
                pair.append((hold, table))
            running.append(pair)
            lines.append(tokens)
        elif running:
            at = rng.randrange(len(running))
            count = rng.randint(running[at][0][0].length, len(lines[at]))
            ends = rng.random() < 0.7
            for tree, fused, (hold, table) in zip(trees, (True, False), running[at], strict=True):
                if ends and fused:
                    tree.finish(hold, lines[at][:count], table)
                else:
                    tree.insert(hold, lines[at][:count], table)
                    if ends:
                        tree.release(hold, table)
            if ends:
                del running[at], lines[at]
        assert trees[0].pool.refs == trees[1].pool.refs
        assert counts(trees[0]) == counts(trees[1])
        assert [node.prefix() for node in trees[0].nodes()] == [
            node.prefix() for node in trees[1].nodes()
        ]
        for tree, pairs in zip(trees, zip(*running, strict=True), strict=False):
            check(tree, list(pairs))


def test_two_that_compute_the_same_in_turns_end_with_the_same_full_pages() -> None:
    tree = make_tree()
    first, second = Run(tree, range(30)), Run(tree, range(30))
    for end in (3, 7, 8, 13, 22, 30):
        new = end - first.hold.length
        assert first.insert(end) == Inserted(new, 0)
        assert second.insert(end) == Inserted(0, new)
        checked(tree, first, second)
        first, second = second, first
    assert list(first.table[:7]) == list(second.table[:7])
    assert tree.cached_tokens == 30
    first.release()
    second.release()
    checked(tree)


def test_a_branch_may_end_in_the_tail_page_of_its_grandparent() -> None:
    """One continues in place; another has meanwhile entered the same tokens with a copy."""
    tree = make_tree()
    serve(tree, range(5))
    writer = Run(tree, [0, 1, 2, 3, 4, 5, 6])
    tail = writer.table[1]
    copier = Run(tree, [0, 1, 2, 3, 4, 5])
    assert copier.table[1] != tail
    copier.insert()
    checked(tree, writer, copier)
    assert writer.insert() == Inserted(new_tokens=1, duplicate_tokens=1)
    assert writer.table[1] == tail
    checked(tree, writer, copier)
    assert tree.page_table(writer.hold)[1] == tail
    assert tree.page_table(copier.hold)[1] == copier.table[1]
    writer.release()
    copier.release()
    checked(tree)
    assert tree.cached_pages == 3
    assert tree.evict(1) == 1
    checked(tree)


def test_an_insert_of_the_wrong_size_is_refused_and_changes_nothing() -> None:
    tree = make_tree()
    run = Run(tree, range(9))
    run.insert()
    before = counts(tree)
    with pytest.raises(ValueError, match="tokens: 8 of them, but the hold covers 9 already"):
        run.insert(8)
    run.tokens += range(9, 13)
    with pytest.raises(ValueError, match="table: 3 pages of 4 can't hold 13 tokens"):
        run.insert()
    with pytest.raises(ValueError, match="tokens"):
        tree.insert(run.hold, [*range(9), -1], run.table)
    assert counts(tree) == before
    checked(tree, run)


# -- pages: claims, copies, forks ----------------------------------------------------------------


def test_the_sole_owner_of_a_tail_writes_in_place() -> None:
    tree = make_tree()
    serve(tree, range(6))
    hold = tree.lock(tree.match([*range(6), 50]))
    assert tree.claim_tail(hold)
    table = tree.page_table(hold)
    assert tree.insert(hold, [*range(6), 50, 51], table) == Inserted(2, 0)
    assert tree.cached_pages == 2, "no page more than before"
    tree.release(hold, table)
    assert matched(tree, [*range(6), 50, 51]) == 8
    checked(tree)


def test_a_tail_that_others_have_continued_must_be_copied() -> None:
    tree = make_tree()
    serve(tree, range(6))
    serve(tree, [*range(6), 50])
    hold = tree.lock(tree.match([*range(6), 60]))
    assert not tree.claim_tail(hold)
    # Not so after the one that has continued.
    other = tree.lock(tree.match([*range(6), 50, 61]))
    assert tree.claim_tail(other)
    check(tree, [(hold, array("i")), (other, tree.page_table(other))])


def test_a_hit_inside_an_edge_must_be_copied() -> None:
    tree = make_tree()
    serve(tree, range(8))
    assert not tree.claim_tail(tree.lock(tree.match([*range(6), 60])))


def test_a_tail_has_one_writer_at_a_time() -> None:
    tree = make_tree()
    serve(tree, range(6))
    first, second = (tree.lock(tree.match([*range(6), 50 + i])) for i in range(2))
    assert tree.claim_tail(first)
    assert not tree.claim_tail(second)
    assert not tree.claim_tail(first), "it has it already"
    tree.release(first, tree.page_table(first))
    assert tree.claim_tail(second), "the first has left without a trace"
    tree.release(second, tree.page_table(second))
    checked(tree)


def test_the_tail_of_a_running_sequence_is_not_for_others() -> None:
    tree = make_tree()
    owner = Run(tree, range(6))
    owner.insert()
    assert not tree.claim_tail(tree.lock(tree.match(range(6))))


def test_a_tail_may_be_claimed_through_several_nodes_in_one_page() -> None:
    tree = make_tree(page_size=16)
    serve(tree, range(12))
    for cut in (3, 6, 9):
        tree.unlock(tree.lock(tree.match(range(cut))))
    assert tree.num_nodes == 4
    hold = tree.lock(tree.match(range(12)))
    assert tree.claim_tail(hold)
    check(tree, [(hold, tree.page_table(hold))])


def test_there_is_no_tail_to_claim_at_a_page_border() -> None:
    tree = make_tree()
    serve(tree, range(8))
    for length in (0, 4, 8):
        hold = tree.lock(tree.match(range(length)))
        with pytest.raises(ValueError, match=f"hold: its {length} tokens end at a page border"):
            tree.claim_tail(hold)


def test_a_fork_holds_the_path_and_its_parents_pages() -> None:
    tree = make_tree()
    parent = Run(tree, range(18))
    parent.insert()
    hold, table = tree.fork(parent.hold), parent.table[:]
    tree.pool.share(table[hold.length // 4 :])
    check(tree, [(parent.hold, parent.table), (hold, table)])
    parent.release()
    tree.evict(64)
    assert matched(tree, range(18)) == 18
    copy = tree.allocate(1)
    tree.pool.release(table[4:])
    table[4:] = copy
    assert tree.insert(hold, [*range(18), 50, 51, 52], table + tree.allocate(1)) == Inserted(3, 0)
    assert tree.cached_pages == 7
    tree.unlock(hold)


def test_forks_of_inserted_tokens_leave_evictable_pages_exact() -> None:
    tree = make_tree(num_pages=12)
    parent = Run(tree, range(18))
    parent.insert()
    children = []
    for number in range(3):
        hold, table = tree.fork(parent.hold), parent.table[:4] + tree.allocate(1)
        tokens = [*range(18), 50 + number]
        tree.insert(hold, tokens, table)
        children.append((hold, table))
    check(tree, [(parent.hold, parent.table), *children])
    parent.release()
    for hold, table in children[1:]:
        tree.release(hold, table)
    assert tree.evictable_pages == 2
    assert len(tree.allocate(tree.pool.free_pages + 2)) == 6
    check_free = counts(tree)
    with pytest.raises(OutOfPages):
        tree.allocate(1)
    assert counts(tree) == check_free


def test_a_page_that_a_fork_still_needs_outlives_its_eviction() -> None:
    """A fork of tokens that were not inserted: its sibling enters them, leaves, and is evicted."""
    tree = make_tree(num_pages=4)
    parent = Run(tree, range(16))
    hold, table = tree.fork(parent.hold), parent.table[:]
    tree.pool.share(table)
    parent.finish()
    check(tree, [(hold, table)])
    with pytest.raises(OutOfPages):
        tree.allocate(1)
    assert tree.cached_pages == 0
    assert [tree.pool.refs[page] for page in table] == [1, 1, 1, 1]
    check(tree, [(hold, table)])
    assert tree.insert(hold, range(16), table) == Inserted(16, 0)
    tree.release(hold, table)
    checked(tree)


# -- drafts -----------------------------------------------------------------------------------


def fork(run: Run, tokens: Sequence[int]) -> Run:
    """A sequence that continues from a draft of all that `run` has, with more tokens."""
    tree, size = run.tree, run.tree.page_size
    tree.insert(run.hold, run.tokens, run.table, draft=True)
    child = Run.__new__(Run)
    child.tree, child.tokens, child.hit = tree, list(run.tokens), run.hit
    child.hold = tree.fork(run.hold)
    full = len(run.tokens) // size
    child.table = run.table[:full] + tree.allocate(len(run.table) - full)
    return child.grow(tokens)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_drafts_leave_with_the_last_that_shares_them(page_size: int) -> None:
    tree = make_tree(64, page_size)
    first = Run(tree, range(21))
    first.insert()
    prompt = tree.pool.free_pages
    first.grow([50, 51, 52])
    second = fork(first, [60] * 9)
    first.grow([70] * 5)
    third = fork(first, [80])
    checked(tree, first, second, third)
    second.tree.insert(second.hold, second.tokens, second.table, draft=True)
    evicted = tree.evicted_tokens
    tree.release(second.hold, second.table, drop=True)
    checked(tree, first, third)
    assert matched(tree, second.tokens) == 24, "the fork that is left shares these"
    assert tree.evictable_pages == 0, "what it alone had is free"
    tree.release(first.hold, first.table, drop=True)
    assert matched(tree, first.tokens) == 29
    tree.release(third.hold, third.table, drop=True)
    checked(tree)
    assert matched(tree, first.tokens) == 21, "the prompt was no draft"
    assert tree.pool.free_pages == prompt
    assert tree.evicted_tokens == evicted, "nothing was short of pages"


@pytest.mark.parametrize("how", ["hit", "pin", "insert"])
def test_what_others_use_is_a_draft_no_more(how: str) -> None:
    tree = make_tree()
    run = Run(tree, range(10))
    run.insert()
    run.grow(range(50, 60))
    tree.insert(run.hold, run.tokens, run.table, draft=True)
    wanted = run.tokens[:16]
    if how == "hit":
        use(tree, wanted)
    elif how == "pin":
        Pins(tree, 1.0).pin("a", wanted)
    else:
        other = Run(tree, run.tokens[:10])
        other.grow(run.tokens[10:16]).finish()
    tree.release(run.hold, run.table, drop=True)
    assert matched(tree, run.tokens) == len(wanted)
    assert [node.draft for node in tree.nodes()] == [False] * tree.num_nodes


def test_a_draft_may_wait_and_be_dropped_later() -> None:
    tree = make_tree()
    run = Run(tree, range(10))
    run.insert()
    run.grow(range(50, 60))
    tree.insert(run.hold, run.tokens, run.table, draft=True)
    tree.release(run.hold, run.table)
    match = tree.match(run.tokens)
    assert match.length == 20, "it stays for the one that comes again"
    hold = tree.lock(match, draft=True)
    table = tree.page_table(hold)
    tree.release(hold, table[: hold.length // 4])
    tree.drop(tree.match(run.tokens[:15]))
    assert matched(tree, run.tokens) == 20, "another one ends further down"
    tree.drop(tree.match(run.tokens))
    assert matched(tree, run.tokens) == 10
    checked(tree)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_draft_stays_while_it_is_wanted(page_size: int) -> None:
    """Even if no lock is left on it, and the sequence that entered it has continued and ended."""
    tree = make_tree(64, page_size)
    run = Run(tree, range(10))
    run.insert()
    run.grow(range(50, 57))
    tree.insert(run.hold, run.tokens, run.table, draft=True)
    wanted = list(run.tokens)
    tree.want(tree.match(wanted))
    tree.want(tree.match(wanted[:13]))  # inside the edge
    run.grow(range(60, 75))
    tree.insert(run.hold, run.tokens, run.table, draft=True)
    tree.release(run.hold, run.table, drop=True)
    checked(tree)
    assert matched(tree, run.tokens) == tree.cached_tokens == 17
    assert tree.evictable_pages == tree.cached_pages == -(-17 // page_size)
    for length, left in ((17, 13), (13, 10)):
        tree.unwant(tree.match(wanted[:length]))
        tree.unwant(tree.match(wanted[: length - 1]))  # there is none
        tree.drop(tree.match(wanted[:length]))
        checked(tree)
        assert tree.cached_tokens == matched(tree, run.tokens) == left
        assert tree.cached_pages == -(-left // page_size)
    assert tree.evicted_tokens == 0


def test_what_was_evicted_is_no_longer_wanted() -> None:
    tree = make_tree()
    run = Run(tree, range(10))
    run.insert()
    run.grow(range(50, 60))
    tree.insert(run.hold, run.tokens, run.table, draft=True)
    tree.want(tree.match(run.tokens))
    tree.release(run.hold, run.table, drop=True)
    assert matched(tree, run.tokens) == 20, "wanted"
    tree.evict(1)
    assert matched(tree, run.tokens) == 16
    tree.drop(tree.match(run.tokens))
    checked(tree)
    assert matched(tree, run.tokens) == 10


def two_in_one_page() -> tuple[RadixTree, Run, Run, Run]:
    """Drafts of forks that take the same token, and then continue in pages of their own.

        page          tokens
        p             0 .. 7, and 50 51 | 60 70    the parent's
        copy of p     50 51 60                     the fork's, and the first to enter 60

    `waits` holds what both have after the prompt.
    """
    tree = make_tree(page_size=8)
    parent = Run(tree, range(8))
    parent.insert()
    parent.grow([50, 51])
    waits = fork(parent, [])
    child = fork(parent, [60])
    tree.insert(child.hold, child.tokens, child.table, draft=True)
    parent.grow([60, 70])
    return tree, parent, child, waits


def test_a_copy_is_not_shared_where_a_node_below_continues_in_the_page() -> None:
    tree, parent, child, waits = two_in_one_page()
    waits.tree.release(waits.hold, waits.table, drop=True)  # both pass through the fork's node now
    tree.insert(parent.hold, parent.tokens, parent.table, draft=True)
    checked(tree, parent, child)
    free = tree.pool.free_pages
    tree.release(child.hold, child.table, drop=True)
    checked(tree, parent)
    assert tree.pool.free_pages == free + 1, "the fork's copy"
    assert tree.page_table(parent.hold) == parent.table, "the parent has kept its own page"
    tree.release(parent.hold, parent.table, drop=True)
    checked(tree)
    assert (tree.cached_tokens, tree.cached_pages) == (8, 1)


def test_a_page_from_above_counts_once_when_a_copy_leaves() -> None:
    tree, parent, child, waits = two_in_one_page()
    tree.insert(parent.hold, parent.tokens, parent.table, draft=True)  # `waits` keeps all as it is
    checked(tree, parent, child, waits)
    locked = tree.locked_pages
    tree.release(child.hold, child.table, drop=True)
    checked(tree, parent, waits)
    assert tree.locked_pages == locked - 1, "the parent's page does for the fork's tokens too"
    tree.release(waits.hold, waits.table, drop=True)
    tree.release(parent.hold, parent.table, drop=True)
    checked(tree)
    assert (tree.cached_tokens, tree.cached_pages) == (8, 1)


# -- evicting ------------------------------------------------------------------------------------


def test_a_shared_prefix_stays_until_its_leaves_are_evicted() -> None:
    tree = make_tree(page_size=4)
    shared = list(range(8))
    owner = Run(tree, [*shared, 50, 51, 52, 53])
    owner.insert()
    assert matched(tree, shared) == 8, "while its owner runs"
    serve(tree, [*shared, 60, 61, 62, 63])
    assert tree.evict(64) == 1, "the idle leaf"
    assert matched(tree, [*shared, 50, 51, 52, 53]) == 12
    owner.release()
    assert matched(tree, shared) == 8, "after it has ended"
    serve(tree, [*shared, 60, 61, 62, 63])
    left = []
    while tree.evict(1):
        left.append([matched(tree, [*shared, t, t + 1, t + 2, t + 3]) for t in (50, 60)])
        checked(tree)
    assert left == [[8, 12], [8, 8], [4, 4], [0, 0]]


def test_the_least_recently_used_leaf_is_evicted_first() -> None:
    tree = make_tree()
    lines = [[start + i for i in range(4)] for start in range(0, 50, 10)]
    for line in lines:
        serve(tree, line)
    use(tree, lines[0])
    tree.match(lines[1])  # a match is no use
    use(tree, lines[3][:2])  # splits the line: its front is newer than its back
    order = []
    while tree.cached_pages:
        before = [matched(tree, line) for line in lines]
        tree.evict(1)
        after = [matched(tree, line) for line in lines]
        order += [number for number, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        checked(tree)
    # The back of line 3 has no page of its own: it is evicted with the next one that has.
    assert order == [1, 2, 3, 4, 0, 3]


def test_the_end_of_a_sequence_counts_as_use() -> None:
    tree = make_tree()
    long = Run(tree, range(4))
    long.insert()
    serve(tree, range(50, 54))
    long.release()
    assert tree.evict(1) == 1
    assert [matched(tree, range(4)), matched(tree, range(50, 54))] == [4, 0]


def test_a_parent_follows_its_last_child() -> None:
    tree = make_tree()
    serve(tree, range(4))
    serve(tree, [*range(4), 10, 11, 12, 13])
    serve(tree, [*range(4), 20, 21, 22, 23])
    serve(tree, [90, 91, 92, 93])
    use(tree, [*range(4), 20, 21, 22, 23])  # so the parent is newer than the other line
    left = []
    while tree.cached_pages:
        tree.evict(1)
        left.append(
            [
                matched(tree, [*range(4), 10, 11, 12, 13]),
                matched(tree, [*range(4), 20, 21, 22, 23]),
                matched(tree, [90, 91, 92, 93]),
            ]
        )
    assert left == [[4, 8, 4], [4, 8, 0], [4, 4, 0], [0, 0, 0]]


def test_eviction_takes_no_more_than_was_asked_for() -> None:
    tree = make_tree()
    for start in (0, 100, 200):
        serve(tree, range(start, start + 18))
    for count in (0, 1, 2, 3, 1):
        free = tree.pool.free_pages
        assert tree.evict(count) == count
        assert tree.pool.free_pages == free + count
        checked(tree)
    assert tree.evicted_tokens == 54 - tree.cached_tokens
    assert tree.evict(64) == 8
    assert tree.evict(64) == 0
    assert (tree.cached_tokens, tree.evicted_tokens) == (0, 54)
    with pytest.raises(ValueError, match="count must be at least 0, got -1"):
        tree.evict(-1)


def test_a_leaf_of_100_000_tokens_gives_up_only_its_last_pages() -> None:
    tree = make_tree(num_pages=7000, page_size=16)
    tokens = np.arange(100_000, dtype=np.int32)
    run = Run(tree, tokens.tolist())
    run.insert()
    table = run.table[:]
    run.release()
    assert tree.evict(3) == 3
    assert tree.match(tokens).length == 100_000 - 48
    assert [tree.pool.refs[page] > 0 for page in table[-4:]] == [True, False, False, False]
    assert tree.evict(5_000) == 5_000
    assert tree.match(tokens).length == 100_000 - 48 - 80_000
    edges = [len(node.edge) - 4 * node.length for node in tree.nodes()]
    assert 0 <= sum(edges) <= 4 * EDGE_TOKENS, "evicted tokens do not stay in memory"
    assert tree.evict(1) == 1
    for node in tree.nodes():
        assert len(node.edge) <= 2 * 4 * node.length
    checked(tree)


@pytest.mark.parametrize("page_size", [16, 48])
def test_long_edges_are_entered_as_several_nodes(page_size: int) -> None:
    """At once or in chunks; both sides of a border share the page in which it lies."""
    tokens = list(range(3 * EDGE_TOKENS + 100))
    for chunk in (len(tokens), 1000, EDGE_TOKENS):
        tree = make_tree(num_pages=4 * EDGE_TOKENS // page_size, page_size=page_size)
        run = Run(tree, tokens)
        entered = 0
        while entered < len(tokens):
            entered = min(entered + chunk, len(tokens))
            run.insert(entered)
            checked(tree, run)
        assert [node.length for node in tree.nodes()] == [EDGE_TOKENS] * 3 + [100]
        run.grow(range(40)).finish()
        checked(tree)
        assert tree.num_nodes == 4 and tree.cached_tokens == len(tokens) + 40
        assert tree.cached_pages == -(-tree.cached_tokens // page_size)
        assert matched(tree, tokens) == len(tokens)
        other = Run(tree, [*tokens[: 2 * EDGE_TOKENS + 7], 1])
        other.finish()
        checked(tree)
        assert matched(tree, [*tokens[: 2 * EDGE_TOKENS + 7], 1]) == 2 * EDGE_TOKENS + 8
        tree.evict(tree.pool.num_pages)
        assert tree.num_nodes == 0 and tree.pool.free_pages == tree.pool.num_pages


def test_what_is_left_of_a_cut_leaf_can_be_continued() -> None:
    tree = make_tree()
    serve(tree, range(18))
    tree.evict(2)
    assert matched(tree, range(18)) == 12
    again = Run(tree, [*range(14), 70])
    assert again.hit == 12
    assert again.insert() == Inserted(3, 0)
    checked(tree, again)
    assert matched(tree, range(18)) == 14, "not what the cut edge once held"
    assert matched(tree, [*range(14), 70]) == 15
    again.release()
    serve(tree, range(18))
    assert matched(tree, range(18)) == 18
    checked(tree)


def test_a_cut_leaf_is_split_where_it_is_left() -> None:
    tree = make_tree()
    serve(tree, range(18))
    tree.evict(1)
    serve(tree, [*range(10), 70])
    checked(tree)
    assert [matched(tree, line) for line in (range(18), [*range(10), 70, 71])] == [16, 11]


def test_a_page_that_is_reused_loses_its_old_identity_even_if_partly_filled() -> None:
    tree = make_tree(num_pages=2)
    serve(tree, range(6))
    run = Run(tree, [50, 51])
    assert matched(tree, range(6)) == 4, "the page of tokens 4 and 5 is the new sequence's"
    run.finish()
    assert [matched(tree, line) for line in (range(6), [50, 51])] == [4, 2]
    other = Run(tree, [60, 61, 62, 63, 64])
    assert [matched(tree, line) for line in (range(6), [50, 51])] == [0, 0]
    other.finish()
    checked(tree)


def test_a_child_without_pages_of_its_own_is_evicted_before_its_parents_tail() -> None:
    tree = make_tree()
    serve(tree, range(6))
    serve(tree, [*range(6), 7, 8])  # in place
    assert tree.cached_pages == 2
    use(tree, range(6))
    tree.evict(1)
    assert matched(tree, [*range(6), 7, 8]) == 4, "the child had no page of its own to give"
    checked(tree)


def test_a_failed_allocation_leaves_every_count_as_it_was() -> None:
    tree = make_tree(num_pages=16)
    serve(tree, range(20))
    run = Run(tree, [*range(9), 50, 51])
    run.insert()
    before = counts(tree)
    possible = tree.pool.free_pages + tree.evictable_pages
    with pytest.raises(OutOfPages) as caught:
        tree.allocate(possible + 1)
    assert (caught.value.needed, caught.value.available) == (possible + 1, possible)
    assert counts(tree) == before
    with pytest.raises(ValueError, match="count must be at least 0, got -1"):
        tree.allocate(-1)
    assert counts(tree) == before
    assert len(tree.allocate(possible)) == possible


def test_allocation_evicts_others_and_never_a_pending_hit() -> None:
    tree = make_tree(num_pages=10)
    serve(tree, range(20))  # the least recently used, five pages
    serve(tree, range(100, 120))
    match = tree.match([*range(18), 50])
    assert tree.available_pages(match) == 5
    hold = tree.lock(match)
    with pytest.raises(OutOfPages):
        tree.allocate(6)
    assert len(tree.allocate(5)) == 5
    assert matched(tree, range(18)) == 18
    assert matched(tree, range(100, 120)) == 0
    assert list(tree.page_table(hold)) == [0, 1, 2, 3, 4]


def test_using_one_leaf_again_and_again_does_not_grow_the_order_of_eviction() -> None:
    tree = make_tree()
    serve(tree, range(8))
    serve(tree, range(50, 58))
    for _ in range(1000):
        use(tree, range(8))
    assert len(tree.order._leaves) <= 64 + 4 * tree.num_nodes
    assert tree.evict(2) == 2
    assert [matched(tree, range(8)), matched(tree, range(50, 58))] == [8, 0]
    checked(tree)


# -- memory --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ten_thousand_sequences_on_a_long_prefix_stay_within_twice_their_bytes() -> None:
    """The live bytes are tokens and page ids, each once; nodes and locks may take as much again."""
    prefix, own, size = 10_000, 256, 16
    tree = make_tree(num_pages=prefix // size + 10_000 * own // size, page_size=size)
    shared = np.arange(prefix, dtype=np.int32)
    serve(tree, shared.tolist())
    gc.collect()
    tracemalloc.start()
    try:
        holds = []
        for number in range(10_000):
            tokens = np.append(shared, np.full(own, prefix + number, np.int32)).tobytes()
            hold = tree.lock(tree.match(tokens))
            table = tree.page_table(hold)
            table += tree.allocate(own // size)
            assert tree.insert(hold, tokens, table) == Inserted(own, 0)
            holds.append(hold)
            del table, tokens
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert tree.cached_tokens == prefix + 10_000 * own
    assert tree.pool.free_pages == 0
    live = 10_000 * (own * 4 + own // size * 4)
    assert taken <= 2 * live, f"{taken} bytes for {live} live ones"
    for hold in holds:
        tree.unlock(hold)
    assert tree.evictable_pages == tree.pool.num_pages


# -- reading -------------------------------------------------------------------------------------


def test_nodes_come_parents_first_with_their_prefixes() -> None:
    tree = make_tree()
    serve(tree, range(10))
    serve(tree, [*range(6), 50])
    serve(tree, range(4), "b")
    seen: set[int] = set()
    prefixes = []
    for node in tree.nodes():
        assert isinstance(node, Node)
        assert node.parent is not None
        assert node.parent.parent is None or id(node.parent) in seen
        seen.add(id(node))
        prefixes.append(tuple(np.frombuffer(node.prefix(), np.int32).tolist()))
    expected = [tuple(range(4)), tuple(range(6)), tuple(range(10)), (*range(6), 50)]
    assert sorted(prefixes) == sorted(expected)
    assert tree.num_nodes == 4


def test_nodes_that_were_hit_come_parents_first() -> None:
    tree = RadixTree(PagePool(64, 4))
    for tokens in ([*range(10), 90], [*range(10), 91], [*range(10), 91, 92], [50, 51]):
        serve(tree, tokens)
    hit = list(tree.hit_nodes())
    assert [(node.start, node.end, node.hits) for node in hit] == [(0, 10, 2), (10, 11, 1)]
    assert {id(node) for node in hit} == {id(node) for node in tree.nodes() if node.hits}
