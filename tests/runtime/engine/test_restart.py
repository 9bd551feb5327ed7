"""Engines that start again: what is hottest on the disk is in the cache before anybody asks."""

from __future__ import annotations

import random
import time
from functools import partial

import numpy as np
import pytest
from adapter_files import load, save_adapter
from fake_tiers import HandThreads, MemoryStore, add_tiers, written
from tiered_engine import GREEDY, engine, loading_pays, prompts_of, serve

from coppice.radix.mirror.names import chain
from coppice.runtime.engine.core import Engine
from coppice.runtime.requests.lora_request import LoRARequest
from coppice.runtime.tiers import exchange


@pytest.fixture(autouse=True)
def always_loading(monkeypatch):
    loading_pays(monkeypatch)


@pytest.fixture(scope="module")
def llama(tiny_checkpoint):
    return tiny_checkpoint("llama")


def be_idle(made: Engine) -> None:
    """No request comes until nothing is left to do for such times."""
    while (pause := made.between()) is not None:
        time.sleep(pause)
        made.check()


def filled(checkpoint, folder, prompts, **options):
    """Serves prompts twice, so that they are hot; returns the tokens."""
    made = engine(checkpoint, folder, **options)
    tokens, _ = serve(made, prompts)
    assert serve(made, prompts)[0] == tokens
    made.close()
    return tokens


def cached(made: Engine, prompt, namespace=None) -> int:
    namespace = made.intake.namespace(None) if namespace is None else namespace
    return made.tree.match(prompt, namespace).length


def warmed(made: Engine) -> int:
    return sum(each.warmed_tokens for each in made.tiers.told.tiers.values())


def test_the_hottest_prefixes_come_back_before_anybody_asks(llama, tmp_path):
    prompts = prompts_of(21)
    expected = filled(llama, tmp_path, prompts, kv_cache_tokens=2048)
    made = engine(llama, tmp_path, kv_cache_tokens=2048)
    assert made.tree.cached_pages == 0
    be_idle(made)
    assert all(cached(made, prompt) >= len(prompt) - 1 for prompt in prompts)
    assert warmed(made) == made.tiers.told.tiers["disk"].warmed_tokens > sum(map(len, prompts)) / 2
    tokens, hits = serve(made, prompts)
    assert tokens == expected and hits == [len(prompt) - 1 for prompt in prompts]
    assert made.tiers.told.tiers["disk"].loaded_tokens == 0, "nothing was left to be loaded"
    before = made.tiers.told.tiers["disk"].written_pages
    made.close()
    assert made.tiers is None
    with_store = engine(llama, tmp_path)
    assert with_store.tiers.report().stores[0].written_pages == 0 == before
    with_store.close()


def test_only_free_pages_are_filled_and_at_most_half(llama, tmp_path):
    """What requests have brought stays; the hottest is what there is room for."""
    rng = random.Random(22)
    prompts = [[rng.randrange(3, 250) for _ in range(120)] for _ in range(10)]
    filled(llama, tmp_path, prompts, kv_cache_tokens=4096)
    hottest = prompts[3]
    made = engine(llama, tmp_path, kv_cache_tokens=4096)
    for _ in range(5):
        serve(made, [hottest])
    made.close()
    made = engine(llama, tmp_path, kv_cache_tokens=512)
    be_idle(made)
    assert cached(made, hottest) >= 119
    assert 0.4 * made.num_pages <= made.tree.cached_pages <= 0.5 * made.num_pages + 1
    made.close()
    made = engine(llama, tmp_path, kv_cache_tokens=512)
    other = [[rng.randrange(3, 250) for _ in range(400)]]
    serve(made, other)
    pages = made.tree.cached_pages
    be_idle(made)
    assert cached(made, other[0]) == 400, "nothing was evicted for it"
    assert pages <= made.tree.cached_pages <= 0.9 * made.num_pages
    be_idle(made)
    made.close()


def test_no_namespace_gets_what_belongs_to_another(llama, tmp_path):
    """What salts and tenants have is brought back once somebody names them."""
    [plain, salted, tenants] = prompts_of(23)[:3]
    made = engine(llama, tmp_path, kv_cache_tokens=4096)
    asked = [(plain, {}), (salted, {"cache_salt": "s"}), (tenants, {"tenant": "t"})]
    expected = [serve(made, [prompt], **options)[0] for prompt, options in asked * 2][:3]
    made.close()
    made = engine(llama, tmp_path, kv_cache_tokens=4096)
    be_idle(made)
    spaces = [made.intake.namespace(*each) for each in [(None,), ("s",), (None, "t")]]
    everywhere = [(prompt, space) for prompt in (plain, salted, tenants) for space in spaces]
    assert [cached(made, *each) > 40 for each in everywhere] == [True] + 8 * [False]
    serve(made, [plain[:50]], cache_salt="s")
    be_idle(made)
    there = [cached(made, *each) > 52 for each in everywhere]
    assert there == [True, False, False, False, True, False, False, False, False]
    found = [serve(made, [prompt], **options) for prompt, options in asked]
    assert [tokens for tokens, _ in found] == expected
    assert found[1][1] == [len(salted) - 1]
    made.close()


@pytest.mark.slow
def test_requests_that_come_meanwhile_get_the_same_tokens(llama, tmp_path, monkeypatch):
    """The same prompts are loaded by requests, brought back, and both, a page at a time."""
    monkeypatch.setattr("coppice.runtime.tiers.loading.warming._PIECE_BYTES", 1)
    prompts = prompts_of(24, (90, 61, 17))
    expected = filled(llama, tmp_path, prompts, kv_cache_tokens=2048)
    for seed in range(2):
        rng = random.Random(seed)
        made = engine(llama, tmp_path, kv_cache_tokens=2048)
        for index in rng.sample(range(len(prompts)), len(prompts)):
            for _ in range(rng.randint(0, 30)):
                if made.between() is not None:
                    time.sleep(0.001)
            made.check()
            assert serve(made, [prompts[index]])[0] == [expected[index]]
        be_idle(made)
        assert warmed(made)
        assert serve(made, prompts)[0] == expected
        made.close()


def test_what_was_only_hit_in_the_cache_is_hot_as_well_after_a_kill(llama, tmp_path, monkeypatch):
    """A prefix that never left the cache was never loaded: the disk is told that it was hit."""
    monkeypatch.setattr(exchange, "_TELL_SECONDS", 0.0)
    prompts = prompts_of(25)
    made = engine(llama, tmp_path, kv_cache_tokens=4096)
    expected, _ = serve(made, prompts)
    for _ in range(3):
        serve(made, prompts[:1])
        written(made)
    made.tiers._writer.close()  # it is given no time to write anything else
    [disk] = made.tiers.stores
    disk._held.release()
    again = engine(llama, tmp_path, kv_cache_tokens=4096)
    be_idle(again)
    assert cached(again, prompts[0]) >= len(prompts[0]) - 1
    assert cached(again, prompts[1]) < 60, "it was not hit"
    assert serve(again, prompts)[0] == expected
    again.close()


def test_after_sleep_it_begins_anew_and_after_a_reset_it_does_not(llama, tmp_path):
    prompts = prompts_of(26)[:2]
    filled(llama, tmp_path, prompts, kv_cache_tokens=2048)
    made = engine(llama, tmp_path, kv_cache_tokens=2048)
    be_idle(made)
    made.reset_cache()
    be_idle(made)
    assert made.tree.cached_pages == 0
    made.sleep(1)
    assert made.between() is None
    made.wake_up()
    be_idle(made)
    assert cached(made, prompts[0]) >= len(prompts[0]) - 1
    made.close()


def warm_engine(checkpoint, store, **options) -> tuple[Engine, HandThreads]:
    """An engine whose tier is `store`, and the threads that read, which work when told so."""
    made = engine(checkpoint, kv_cache_tokens=1024, **options)
    return made, add_tiers(made, [store], random.Random(1))


def by_hand(made: Engine, threads: HandThreads) -> None:
    """No request comes until nothing is left to do for such times."""
    while made.tiers._warming.advance(made.tree):
        threads.work()
        made.check()


@pytest.mark.parametrize("far", range(4))
@pytest.mark.parametrize("work", [False, True])
def test_after_a_reset_nothing_comes_back_that_nobody_asks_for(llama, monkeypatch, far, work):
    """Wherever it was: asking, reading, with something read, or at another prefix."""
    monkeypatch.setattr("coppice.runtime.tiers.loading.warming._PIECE_BYTES", 2**13)
    prompts, store = prompts_of(29)[1:3], MemoryStore()
    made, _ = warm_engine(llama, store)
    expected, _ = serve(made, prompts)
    made.tiers.close(10)
    made, threads = warm_engine(llama, store)
    for _ in range(far):
        made.between()
        threads.work()
    made.between()
    if work:
        threads.work()
    made.reset_cache()
    by_hand(made, threads)
    assert made.tree.cached_pages == 0
    tokens, hits = serve(made, prompts[:1])
    assert tokens == expected[:1] and hits == [len(prompts[0]) - 1], "what is asked for does"
    by_hand(made, threads)
    assert cached(made, prompts[1]) <= 50
    made.tiers.close(1)


@pytest.mark.parametrize("far", range(5))
def test_nothing_comes_back_of_an_adapter_that_was_unloaded(llama, tmp_path, monkeypatch, far):
    """What belongs to others goes on coming, and the adapter's comes once it is named again."""
    monkeypatch.setattr("coppice.runtime.tiers.loading.warming._PIECE_BYTES", 2**13)
    save_adapter(tmp_path, load(llama))
    [prompt], store = prompts_of(30, (61,)), MemoryStore()
    adapter = LoRARequest("own", 1, str(tmp_path))
    made, _ = warm_engine(llama, store, enable_lora=True)
    serve(made, [prompt])
    expected, _ = serve(made, [prompt], lora_request=adapter)
    made.tiers.close(10)
    made, threads = warm_engine(llama, store, enable_lora=True)
    made.adapters.load(adapter)
    _, namespace = made.intake.place(prompt, None, None, adapter)
    made.tiers.know(namespace)
    for _ in range(far):
        made.between()
        threads.work()
    made.between()
    made.adapters.unload("own")
    by_hand(made, threads)
    assert not cached(made, prompt, namespace) and namespace not in made.tree.roots
    assert cached(made, prompt) >= len(prompt) - 1, "the base model's"
    made.sleep(1)
    made.wake_up()
    by_hand(made, threads)
    assert namespace not in made.tree.roots
    assert serve(made, [prompt], lora_request=adapter) == (expected, [len(prompt) - 1])
    made.tiers.close(1)


def test_a_damaged_page_ends_its_prefix(llama, tmp_path):
    prompts = prompts_of(27)[:1]
    expected = filled(llama, tmp_path, prompts, kv_cache_tokens=2048)
    rng = random.Random(27)
    files = sorted(tmp_path.rglob("*.kv"))
    for path in files:
        data = bytearray(path.read_bytes())
        for _ in range(2):
            data[rng.randrange(len(data))] ^= 8
        path.write_bytes(data)
    made = engine(llama, tmp_path, kv_cache_tokens=2048)
    be_idle(made)
    assert cached(made, prompts[0]) < len(prompts[0])
    assert made.tiers.report().stores[0].damaged >= 1
    assert serve(made, prompts)[0] == expected
    made.close()


def test_pages_with_an_adapters_mark_stay_where_they_are(llama):
    """Their names do not say which adapter's; nor does what follows them come back."""
    store = MemoryStore()
    made = engine(llama, kv_cache_tokens=1024)
    vocabulary = made.model_config.vocab_size
    add_tiers(made, [store], random.Random(1), hand=False)
    root = made.tiers._root(made.intake.namespace(None))
    for number, bad in enumerate((vocabulary, 2**30 + 5, -1)):
        tokens = [number + 3, *range(10, 21)]
        tokens[6] = bad
        for key in chain(root, np.array(tokens, np.int32).tobytes(), 4 * 4):
            store.pages[key] = np.zeros(made.tiers._page_bytes, np.uint8)
    be_idle(made)
    assert warmed(made) == 3 * 4, "of each the page before it"
    made.tiers.close(1)


def test_a_tier_that_fails_is_only_slower(llama):
    prompts = prompts_of(28)[:2]
    store = MemoryStore()
    made = engine(llama, kv_cache_tokens=2048)
    add_tiers(made, [store], random.Random(1), hand=False)
    expected, _ = serve(made, prompts)
    made.tiers.close(10)
    for seed in range(6):
        store._stumble = partial(fail, random.Random(seed))
        made = engine(llama, kv_cache_tokens=2048)
        add_tiers(made, [store], random.Random(1), hand=False)
        be_idle(made)
        assert serve(made, prompts)[0] == expected
        made.tiers.close(1)


def fail(rng: random.Random) -> None:
    if rng.random() < 0.5:
        raise OSError("of a kind that no store raises")


def test_an_engine_without_tiers_has_nothing_to_do(llama):
    made = engine(llama)
    assert made.between() is None
    made.add_request("a", [3, 4, 5], GREEDY)
    assert made.between() is None
    while made.has_unfinished():
        made.step()
    made.close()
