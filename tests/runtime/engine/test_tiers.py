"""Engines that keep pages in other tiers: the same tokens, whatever comes back, or does not."""

from __future__ import annotations

import os
import random
import re
import shutil
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_model import WrongKV, fake_checkpoint, fake_engine
from fake_tiers import MemoryStore, add_tiers, written
from random_schedules import RandomSchedule
from safetensors.torch import load_file, save_file
from tiered_engine import GREEDY, engine, loading_pays, prompts_of, serve

from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.engine.tiering import numbers_digest
from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.runner.forward import ModelRunner
from coppice.runtime.schedule.queue import SCHEDULING_POLICIES
from coppice.runtime.tiers import exchange
from coppice.runtime.tiers.host import HostStore


@pytest.fixture(autouse=True)
def always_loading(monkeypatch):
    loading_pays(monkeypatch)


@pytest.fixture(scope="module")
def llama(tiny_checkpoint):
    return tiny_checkpoint("llama")


def test_after_a_restart_everything_is_there(llama, tmp_path):
    prompts = prompts_of(1)
    cold = engine(llama, kv_cache_tokens=4096)
    expected, _ = serve(cold, prompts)
    cold.close()
    first = engine(llama, tmp_path)
    assert serve(first, prompts)[0] == expected
    first.close()
    second = engine(llama, tmp_path)
    tokens, cached = serve(second, prompts)
    assert tokens == expected
    assert cached == [len(prompt) - 1 for prompt in prompts], "token-exact, partial pages too"
    told, counts = second.tiers.told, second.accounts.counts()
    assert told.tiers["disk"].loaded_tokens >= len(prompts[0]) - 1
    assert counts.hit_tokens == sum(cached) and counts.loaded_evicted == 0
    assert counts.loaded_disk == told.tiers["disk"].loaded_tokens
    assert counts.computed_tokens == counts.last_token == len(prompts)
    assert sum(sum(each.loaded.values()) for each in second.accounts.recent()) == counts.loaded_disk
    assert second.counters.computed_tokens <= len(prompts) + 3
    second.close()


def test_what_was_evicted_comes_back(llama, tmp_path):
    rng = random.Random(2)
    prompts = [[rng.randrange(3, 250) for _ in range(120)] for _ in range(8)]
    plain = engine(llama, kv_cache_tokens=256, max_num_seqs=2)
    expected, _ = serve(plain, prompts)
    again, cached = serve(plain, prompts)
    assert again == expected and sum(cached) < 300
    made = engine(llama, tmp_path, kv_cache_tokens=256, max_num_seqs=2)
    assert serve(made, prompts)[0] == expected
    written(made)
    again, cached = serve(made, prompts)
    assert again == expected
    # What is evicted after tiers were asked for it, and not stored yet, is computed.
    assert sum(cached) >= 119 * 4 and max(cached) == 119
    assert made.tiers.told.unwritten_pages == 0
    counts = made.accounts.counts()
    assert counts.prompt_tokens == counts.hit_tokens + sum(counts.causes.values())
    assert counts.hit_tokens == made.counters.hit_tokens >= sum(cached)
    assert counts.loaded_disk == counts.loaded_tokens == made.tiers.told.tiers["disk"].loaded_tokens
    assert counts.loaded_evicted == counts.loaded_disk
    assert counts.evicted < 119 * 5, "what came back is not evicted"
    made.close()
    plain.close()


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("page_size", [1, 7, 16])
def test_any_page_size_and_type(llama, tmp_path, page_size, dtype):
    prompts = prompts_of(3, (50, 33))
    options = {
        "page_size": page_size,
        "kv_cache_tokens": page_size * -(-200 // page_size),
        "kv_cache_dtype": "auto",
    }
    if dtype == "bfloat16":
        options["kv_cache_dtype"] = "bfloat16"
    made = engine(llama, tmp_path, **options)
    expected, _ = serve(made, prompts)
    made.close()
    made = engine(llama, tmp_path, **options)
    tokens, cached = serve(made, prompts)
    assert tokens == expected and cached == [len(prompt) - 1 for prompt in prompts]
    made.close()


def test_samples_beams_logprobs_and_pins_are_as_without(llama, tmp_path):
    prompt = prompts_of(4)[0]

    def all_kinds(made: Engine):
        found = []
        params = SamplingParams(n=3, temperature=1, seed=5, max_tokens=5, logprobs=2)
        made.add_request("n", prompt, params)
        made.add_beam_search("beam", prompt[:-3], BeamSearchParams(3, 5))
        made.add_request("scored", prompt[:70], SamplingParams(max_tokens=2, prompt_logprobs=1,
                                                              temperature=0))  # fmt: skip
        made.pin("kept", prompt[:50])
        while made.has_unfinished():
            for output in made.step():
                text = repr((output.logprobs, output.prompt_logprobs, output.score))
                scores = [float(each) for each in re.findall(r"-?\d+\.\d+", text)]
                name = output.request_id, output.index, output.new_token_ids
                found.append((name, scores))
            made.check()
        return sorted(found, key=lambda each: each[0])

    plain = engine(llama)
    expected = all_kinds(plain)
    plain.close()
    for _ in range(3):
        made = engine(llama, tmp_path)
        found = all_kinds(made)
        assert [name for name, _ in found] == [name for name, _ in expected]
        for (_, scores), (_, others) in zip(found, expected, strict=True):
            assert scores == pytest.approx(others, abs=1e-3)
        told = made.tiers.told
        made.close()
    # One computes all of its 70 tokens for their logprobs; the others take these from it where they
    # are there before the disk's.
    assert told.tiers["disk"].loaded_tokens >= len(prompt) - 1 - 70


def test_salts_tenants_and_other_weights_share_nothing(llama, tmp_path):
    prompts = prompts_of(5)[:1]
    made = engine(llama, tmp_path / "cache")
    serve(made, prompts, cache_salt="a")
    made.close()
    for options, hit in (
        ({}, 0), ({"cache_salt": "b"}, 0), ({"tenant": "a"}, 0), ({"cache_salt": "a"}, 149 + 10),
    ):  # fmt: skip
        made = engine(llama, tmp_path / "cache")
        assert serve(made, prompts, **options)[1] == [hit]
        made.close()
        shutil.rmtree(tmp_path / "cache") if not hit else None
        if not hit:
            made = engine(llama, tmp_path / "cache")
            serve(made, prompts, cache_salt="a")
            made.close()


def test_weights_count_by_what_they_contain(llama, tmp_path):
    """A copy elsewhere hits; the same place with other weights does not, though times are equal."""
    prompts = prompts_of(6)[:1]
    place = tmp_path / "model"
    shutil.copytree(llama, place)
    made = engine(place, tmp_path / "cache")
    expected, _ = serve(made, prompts)
    made.close()
    made = engine(llama, tmp_path / "cache")
    assert serve(made, prompts) == (expected, [159])
    made.close()
    [file] = place.glob("*.safetensors")
    times = file.stat()
    weights = load_file(file)
    name = next(name for name in weights if "k_proj" in name)
    weights[name] = weights[name] + 0.01
    save_file(weights, file, metadata={"format": "pt"})
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    made = engine(place, tmp_path / "cache")
    tokens, cached = serve(made, prompts)
    assert cached == [0]
    made.close()
    plain = engine(place)
    assert serve(plain, prompts)[0] == tokens
    plain.close()


@pytest.mark.parametrize(
    "options",
    [{"page_size": 8}, {"kv_cache_dtype": "bfloat16"}, {"quantization": "int8"},
     {"attention_backend": "reference"}],
)  # fmt: skip
def test_what_changes_numbers_or_layout_never_hits(llama, tmp_path, options):
    prompts = prompts_of(7)[:1]
    made = engine(llama, tmp_path)
    serve(made, prompts)
    made.close()
    made = engine(llama, tmp_path, **options)
    assert serve(made, prompts)[1] == [0]
    made.close()


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "shrink"),
    [("int8", "auto", 18 / 64), ("fp8", "bfloat16", 18 / 32)],
)
def test_a_tier_may_keep_a_byte_a_number(llama, tmp_path, dtype, kv_cache_dtype, shrink):
    """Hits are as exact in tokens; logprobs are near; no other type ever hits it."""
    prompts = prompts_of(17)[:2]
    scored = SamplingParams(temperature=0, max_tokens=1, logprobs=5)

    def answer(disk_cache_dtype: str) -> tuple[int, np.ndarray]:
        """The cached tokens, and the logprobs of the token after the first prompt."""
        options = {"kv_cache_dtype": kv_cache_dtype, "disk_cache_dtype": disk_cache_dtype}
        made = engine(llama, tmp_path, **options)
        made.add_request("a", prompts[0], scored)
        while made.has_unfinished():
            for output in made.step():
                found = output.cached_tokens, output.logprobs.top_logprobs
        serve(made, prompts[1:])
        told.append(made.tiers.report().stores[0])
        made.close()
        return found

    told = []
    cached, exact = answer("auto")
    assert cached == 0
    assert answer(dtype)[0] == 0, "KV as in the cache is not hit"
    cached, near = answer(dtype)
    assert cached == len(prompts[0]) - 1
    assert near == pytest.approx(exact, abs=0.1 if dtype == "int8" else 1.0)
    assert not np.array_equal(near, exact), "nothing was rounded"
    cached, same = answer("auto")
    assert cached == len(prompts[0]) - 1
    assert same == pytest.approx(exact, abs=1e-4), "KV that was rounded is not hit"
    *_, rounded, plain = told
    assert rounded.loaded_pages == plain.loaded_pages > 0
    assert rounded.loaded_bytes == pytest.approx(plain.loaded_bytes * shrink)


class SlowStore(MemoryStore):
    """Takes `seconds` for each page that it reads; for ever while `stuck` is set."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.stuck = threading.Event()
        self.free = threading.Event()

    def load(self, keys, places, out):
        if self.stuck.is_set():
            assert self.free.wait(30)
        time.sleep(self.seconds * len(places))
        return super().load(keys, places, out)


def with_store(checkpoint, store, **options) -> Engine:
    """An engine whose tier is `store`, with real threads."""
    made = engine(checkpoint, **options)
    add_tiers(made, [store], random.Random(1), hand=False)
    return made


def test_the_beginning_is_computed_while_the_end_is_loaded(llama):
    """Where both take as long each does a part, and the tokens are the same."""
    prompts = prompts_of(8, (400,))
    store = SlowStore(0.004)
    made = with_store(llama, store, kv_cache_tokens=1024)
    expected, _ = serve(made, prompts)
    made.tiers.close(10)
    made = with_store(llama, store, kv_cache_tokens=1024, max_num_batched_tokens=32, max_num_seqs=8)
    loads = made.tiers.loads
    loads._rates[0].observe(loads._page_bytes, 0.004)
    loads._compute_seconds = lambda tokens, context: 0.001 * tokens
    loads._piece_pages = 2
    tokens, [cached] = serve(made, prompts)
    assert tokens == expected
    assert 0 < cached < 409
    assert made.counters.computed_tokens == 410 - cached
    assert made.accounts.counts().not_loaded == 409 - cached, "what it computed meanwhile"
    assert made.tiers.told.tiers["host"].loaded_tokens == cached
    assert 0 <= made.tiers.told.saved_seconds < 0.001 * cached, "less what reading takes"
    made.tiers.close(1)


@pytest.mark.slow
def test_a_tier_that_hangs_is_given_up_and_the_rest_is_computed(llama):
    prompts = prompts_of(9, (300,))
    store = SlowStore(0.0)
    made = with_store(llama, store, kv_cache_tokens=1024)
    expected, _ = serve(made, prompts)
    made.tiers.close(10)
    made = with_store(llama, store, kv_cache_tokens=1024)
    store.stuck.set()
    assert serve(made, prompts) == (expected, [0])
    assert made.tiers.told.tiers["host"].slow == 1
    store.stuck.clear()
    store.free.set()
    assert serve(made, prompts) == (expected, [309]), "from memory now"
    made.tiers.close(1)


def test_what_is_slower_than_computing_is_not_loaded(llama):
    prompts = prompts_of(10, (300,))
    store = MemoryStore()
    made = with_store(llama, store)
    expected, _ = serve(made, prompts)
    made.tiers.close(10)
    made = with_store(llama, store)
    made.tiers.loads._compute_seconds = lambda tokens, context: 1e-12 * tokens
    assert serve(made, prompts) == (expected, [0])
    assert store.loaded == 0
    assert made.tiers.told.computed_instead == 309 == made.accounts.counts().not_loaded
    made.tiers.close(1)


def test_what_is_evicted_while_a_request_waits_comes_back_for_it(llama):
    """Tiers were asked for what the tree did not have then."""
    [prompt, other], store = prompts_of(18, (110, 190)), MemoryStore()
    longer = [*prompt, *range(3, 33)]
    plain = engine(llama, kv_cache_tokens=1024)
    expected, _ = serve(plain, [other, longer])
    plain.close()
    options = {"kv_cache_tokens": 256, "max_num_seqs": 1, "scheduling_policy": "fcfs"}
    made = with_store(llama, store, **options)
    for _ in range(2):
        serve(made, [prompt])
    written(made)
    made.add_request("begins", other, GREEDY)
    made.step()
    assert made.tree.match(longer, made.intake.namespace(None)).length == len(prompt)
    made.abort("begins")
    tokens, cached = serve(made, [other, longer])
    assert tokens == expected
    assert cached[0] == 40 and cached[1] >= len(prompt) - 1
    assert made.tiers.told.tiers["host"].loaded_tokens > 0
    made.tiers.close(1)


def test_requests_of_one_prompt_load_it_once(llama):
    prompt = prompts_of(11, (200,))[0]
    store = MemoryStore()
    made = with_store(llama, store)
    expected, _ = serve(made, [prompt])
    made.tiers.close(10)
    made = with_store(llama, store)
    tokens, cached = serve(made, [prompt] * 5)
    assert tokens == expected * 5 and cached == [209] * 5
    assert store.loaded == -(-209 // 4)
    made.tiers.close(1)


def test_what_was_hit_again_is_stored_before_it_is_evicted(llama):
    prompts = prompts_of(12)
    store = MemoryStore()
    made = with_store(llama, store)
    serve(made, prompts[:1])
    written(made)
    assert not store.pages, "nothing was evicted, nothing was hit twice"
    serve(made, prompts[:1])
    written(made)
    tokens = sum(key.length for key in store.pages)
    assert tokens >= len(prompts[0]) - 1
    count = made.tiers.told.tiers["host"].written_pages
    serve(made, prompts[:1])
    written(made)
    assert made.tiers.told.tiers["host"].written_pages == count, "nothing is written twice"
    made.tiers.close(1)


def test_an_abort_forgets_what_was_on_its_way(llama):
    prompt = prompts_of(13, (200,))[0]
    store = SlowStore(0.001)
    made = with_store(llama, store)
    expected, _ = serve(made, [prompt])
    made.tiers.close(10)
    made = with_store(llama, store)
    for _ in range(6):
        made.add_request("a", prompt, GREEDY)
        made.step()
        made.abort("a")
        made.check()
        assert not made.tiers.loads._loads and not made.tiers.loads._coming
    assert serve(made, [prompt])[0] == expected
    made.tiers.close(1)


@pytest.mark.parametrize("seconds", [0.0, 30.0])
def test_an_end_stores_what_there_is_time_for(llama, seconds):
    store = MemoryStore()
    made = with_store(llama, store)
    serve(made, prompts_of(14)[:1])
    made.tiers.close(seconds)
    assert store.closed
    assert bool(store.pages) == bool(seconds)


def test_sleep_and_reset_leave_tiers_as_they_are(llama, tmp_path):
    prompts = prompts_of(15)[:2]
    made = engine(llama, tmp_path, kv_cache_tokens=256)
    expected, _ = serve(made, prompts)
    serve(made, prompts)
    written(made)
    for forget in (made.reset_cache, lambda: (made.sleep(1), made.wake_up())):
        forget()
        assert serve(made, prompts)[0] == expected
        assert made.tiers.told.tiers["disk"].loaded_tokens > 100
    made.close()


def test_after_a_deep_sleep_pages_of_other_weights_never_hit(llama, tmp_path, monkeypatch):
    """The files may have been replaced; what is stored from then on has another name, too."""
    prompts = prompts_of(15)[:2]
    place = tmp_path / "model"
    shutil.copytree(llama, place)
    made = engine(place, tmp_path / "cache", kv_cache_tokens=256)
    before, _ = serve(made, prompts)
    made.sleep(2)
    made.wake_up()
    assert serve(made, prompts)[0] == before
    assert made.tiers.told.tiers["disk"].loaded_tokens > 0, "the same weights"
    made.sleep(2)
    [file] = place.glob("*.safetensors")
    weights = load_file(file)
    name = next(name for name in weights if "v_proj" in name)
    weights[name] = -weights[name]
    save_file(weights, file, metadata={"format": "pt"})
    made.wake_up()
    tokens, cached = serve(made, prompts[:1])
    assert cached == [0]
    plain = engine(place)
    assert serve(plain, prompts[:1])[0] == tokens != before[:1]
    plain.close()

    def unreadable(*given):
        raise OSError("the disk has gone")

    with monkeypatch.context() as patch:
        patch.setattr("coppice.runtime.engine.tiering.numbers_digest", unreadable)
        made.sleep(2)
        made.wake_up()
    assert serve(made, prompts[:1]) == (tokens, [0])
    made.close()
    old = engine(llama, tmp_path / "cache")
    assert serve(old, prompts[:1])[0] == before[:1]
    old.close()


@pytest.mark.parametrize("deep", [False, True])
def test_files_that_are_replaced_while_they_are_loaded_give_no_name_to_pages(
    llama, tmp_path, monkeypatch, caplog, deep
):
    """Else pages of the old weights would be kept under the name of the new ones: at the start, and
    after a deep sleep.
    """
    prompts, place = prompts_of(19)[:1], tmp_path / "model"
    shutil.copytree(llama, place)
    load_weights, made = ModelRunner._load_weights, None

    def replaced(runner):
        load_weights(runner)
        [file] = place.glob("*.safetensors")
        weights = load_file(file)
        name = next(name for name in weights if "v_proj" in name)
        save_file(weights | {name: -weights[name]}, tmp_path / "new", metadata={"format": "pt"})
        (tmp_path / "new").replace(file)

    if deep:
        made = engine(place, tmp_path / "cache")
        made.sleep(2)
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "_load_weights", replaced)
        if made is None:
            made = engine(place, tmp_path / "cache")
        else:
            made.wake_up()
    old, _ = serve(made, prompts)
    assert serve(made, prompts)[0] == old
    made.close()
    plain = engine(place)
    new, _ = serve(plain, prompts)
    plain.close()
    assert new != old
    for path, expected in ((place, new), (llama, old)):
        made = engine(path, tmp_path / "cache")
        assert serve(made, prompts) == (expected, [0])
        made.close()
    assert "were changed while their weights were loaded" in caplog.text


def test_names_are_of_the_weights_that_were_loaded(llama):
    """What a hub id names may have become another snapshot since."""
    made = with_store(llama, MemoryStore())
    moved = replace(made.config, model="is/elsewhere/now")
    assert numbers_digest(moved, made.runner) == numbers_digest(made.config, made.runner)


@pytest.mark.parametrize("there", [0, 100, 102])
def test_pages_that_cannot_be_filled_are_computed_and_counted_so(llama, monkeypatch, there):
    """What the tree had stays where it was: nothing, whole pages, or a part of a page."""
    prompt = prompts_of(16, (150,))[0]
    store = MemoryStore()
    made = with_store(llama, store)
    expected, _ = serve(made, [prompt])
    made.tiers.close(10)
    made = with_store(llama, store)
    if there:
        serve(made, [prompt[:there]], SamplingParams(max_tokens=1, temperature=0))
    before, loaded = made.accounts.counts(), made.tiers.told.tiers["host"].loaded_tokens
    failed = []

    def fails(pages, runs):
        failed.append(list(pages))
        raise RuntimeError("no memory for a copy")

    with monkeypatch.context() as patch:
        patch.setattr(made.tiers._transfers, "fill", fails)
        assert serve(made, [prompt]) == (expected, [there])
    assert len(failed) == 1, "it is not tried again"
    counts = made.accounts.counts()
    assert made.tiers.told.tiers["host"].loaded_tokens == loaded
    assert counts.hit_tokens - before.hit_tokens == there
    assert counts.not_loaded - before.not_loaded == len(prompt) - 1 - there
    assert counts.prompt_tokens == counts.hit_tokens + sum(counts.causes.values())
    assert serve(made, [prompt]) == (expected, [len(prompt) - 1]), "from the pool"
    made.tiers.close(1)


def test_pages_that_cannot_be_copied_to_memory_are_counted_and_kept_later(llama, monkeypatch):
    """The steps that had them copied go on."""
    prompts, store = prompts_of(20)[:2], MemoryStore()
    made = with_store(llama, store)
    failed = []

    def fails(pages):
        failed.extend(pages)
        raise RuntimeError("no memory for a copy")

    with monkeypatch.context() as patch:
        patch.setattr(made.tiers._transfers, "out", fails)
        expected, _ = serve(made, prompts)
        assert serve(made, prompts)[0] == expected
        written(made)
        assert failed and made.tiers.told.unwritten_pages == len(failed)
    assert not store.pages and made.tiers.told.tiers["host"].failures == 0
    made.tiers.close(10)
    made = with_store(llama, store)
    assert serve(made, prompts) == (expected, [len(prompt) - 1 for prompt in prompts])
    made.tiers.close(1)


def test_no_time_copies_more_pages_than_its_bound(llama, monkeypatch):
    """Between two steps of a request, and after the last one, when another request may come."""
    prompts, store = prompts_of(22), MemoryStore()
    made = with_store(llama, store, kv_cache_tokens=1024)
    page_bytes = made.tiers._page_bytes
    monkeypatch.setattr(exchange, "_BESIDE_STEP", page_bytes)
    monkeypatch.setattr(exchange, "_IDLE", 3 * page_bytes + page_bytes // 2)
    copied, out, beside = {False: [], True: []}, made.tiers._transfers.out, made.tiers.beside

    def counted(*, idle):
        before = len(pages)
        beside(idle=idle)
        copied[idle].append(len(pages) - before)

    pages = []
    made.tiers._transfers.out = lambda these: pages.extend(these) or out(these)
    made.tiers.beside = counted
    for _ in range(2):
        serve(made, prompts)
    while made.tiers._again:
        made.between()
    assert max(copied[False]) == 1 and max(copied[True]) == 3
    written(made)
    assert len(store.pages) == len(pages) > 20
    made.tiers.close(1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"disk_cache": ""}, "disk_cache must be a text that is not empty"),
        ({"disk_cache": 7}, "disk_cache must be a text"),
        ({"disk_cache": "x", "enable_prefix_caching": False}, "without enable_prefix_caching"),
        ({"disk_cache_size": "many"}, "disk_cache_size must be a size such as 64GiB"),
        ({"disk_cache_size": "1GiB"}, "disk_cache_size must be '16GiB' without disk_cache"),
        ({"host_cache": "0"}, "host_cache must be a size"),
        ({"shared_cache": "http://user:secret@x"}, r"shared_cache must be .* 'http://\*\*\*@x'"),
        ({"shared_cache": ""}, "shared_cache must be a text"),
        (
            {"disk_cache": "x", "disk_cache_dtype": "int4"},
            "disk_cache_dtype must be one of auto, int8",
        ),
        ({"disk_cache_dtype": "int8"}, "disk_cache_dtype must be 'auto' without disk_cache"),
        ({"shared_cache_dtype": "fp8"}, "shared_cache_dtype must be 'auto' without shared_cache"),
        (
            {"disk_cache": "x", "disk_cache_dtype": "fp8", "kv_cache_dtype": "fp8"},
            "'auto' with kv_",
        ),
        ({"disk_cache": "x", "disk_cache_dtype": "fp8", "deterministic": True}, "'auto' with det"),
    ],
)
def test_bad_options_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        EngineConfig(model="x", **options)


def test_a_folder_that_is_in_use_or_unusable_is_refused(llama, tmp_path):
    made = engine(llama, tmp_path)
    with pytest.raises(ValueError, match="is in use by process"):
        engine(llama, tmp_path)
    made.close()
    engine(llama, tmp_path).close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"disk_cache: .*file.* can't be used"):
        engine(llama, tmp_path / "file")


@pytest.mark.parametrize(
    "where",
    [
        "runtime.engine.tiering.DiskStore",
        "runtime.engine.tiering.numbers_digest",
        "runtime.tiers.exchange.Loads",
        "runtime.tiers.exchange.Warming",
        "runtime.schedule.scheduler.Scheduler.use",
    ],
)
@pytest.mark.parametrize("error", [OSError("the disk has gone"), KeyboardInterrupt()])
def test_a_start_that_fails_leaves_nothing_open(llama, tmp_path, monkeypatch, where, error):
    """Neither folders that are held, nor stores, nor threads."""
    before = set(threading.enumerate())
    closed = []
    monkeypatch.setattr(HostStore, "close", lambda self: closed.append(self))

    def fails(*given, **named):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(f"coppice.{where}", fails)
        with pytest.raises(type(error)):
            engine(llama, tmp_path, host_cache="1MiB")
    left = {each.name for each in set(threading.enumerate()) - before}
    assert closed and not [name for name in left if name.startswith("coppice-")]
    engine(llama, tmp_path).close()


def test_more_main_memory_than_there_is_is_refused(llama):
    with pytest.raises(ValueError, match="host_cache is '999TiB'; it must be at most the main mem"):
        engine(llama, host_cache="999TiB")


def test_a_folder_may_be_below_the_users_own(llama, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    engine(llama, "~/cache").close()
    assert (tmp_path / "cache").is_dir()


def test_main_memory_is_a_tier_as_well(llama):
    rng = random.Random(16)
    prompts = [[rng.randrange(3, 250) for _ in range(120)] for _ in range(6)]
    plain = engine(llama, kv_cache_tokens=256)
    expected, _ = serve(plain, prompts)
    plain.close()
    made = engine(llama, kv_cache_tokens=256, host_cache="1MiB")
    for _ in range(2):
        assert serve(made, prompts)[0] == expected
        written(made)
    cached = serve(made, prompts)[1]
    # What is evicted after tiers were asked for it, and not stored yet, is computed.
    assert sum(cached) >= 119 * 3 and max(cached) == 119
    made.close()
    with pytest.raises(ValueError, match="host_cache must be at least a page"):
        engine(llama, host_cache="100")


# -- any schedule ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return fake_checkpoint(tmp_path_factory.mktemp("fake"))


@pytest.mark.parametrize(
    "policy",
    [pytest.param(each, marks=[pytest.mark.slow][: each != "lpm"]) for each in SCHEDULING_POLICIES],
)
@pytest.mark.parametrize(
    ("begin", "end"),
    [(0, 12), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((12, 24), (1000, 1200)))],
)
def test_random_schedules_give_what_each_request_gives_alone(checkpoint, policy, begin, end):
    """With two tiers that fail, forget and find pages damaged, each twice: then as a restart.

    The second engine gets drafts, too.
    """
    alone = RandomSchedule.alone_engine(checkpoint)
    compared = loaded = failures = warmed = accepted = 0
    for seed in range(begin + SCHEDULING_POLICIES.index(policy), end, len(SCHEDULING_POLICIES)):
        stores = [MemoryStore(random.Random(seed)), MemoryStore(random.Random(-seed), "disk")]
        for known in (None, alone):
            try:
                schedule = RandomSchedule(seed, checkpoint, policy, stores, known=known)
                schedule.run()
                compared += schedule.compare_with_each_alone(alone)
            except (Exception, WrongKV) as error:
                error.add_note(f"RandomSchedule({seed}, checkpoint, {policy!r}) with stores")
                raise
            if schedule.drafts is not None:
                accepted += schedule.drafts.accepted
            told = schedule.engine.tiers.told
            loaded += sum(each.loaded_tokens for each in told.tiers.values())
            failures += sum(each.failures for each in told.tiers.values())
            warmed += sum(each.warmed_tokens for each in told.tiers.values())
            schedule.engine.close()
    assert compared and loaded and failures and accepted, "the schedules were too easy"
    assert warmed or end - begin < 100, "few engines are idle for long"


def test_a_copy_is_made_before_its_source_is_given_away(checkpoint):
    """Forks share a page that is copied with the next step; before it, pages come from a tier."""
    rng = random.Random(1)
    store = MemoryStore()
    for _ in range(2):
        made, model = fake_engine(checkpoint, page_size=4, kv_cache_tokens=48, max_num_seqs=4)
        threads = add_tiers(made, [store], rng)
        for number in range(12):
            prompt = [rng.randrange(3, 9) for _ in range(rng.randint(5, 22))]
            prompt = [5, 6, 7, 8, 9, 5, 6][: rng.randint(1, 7)] + prompt
            made.add_request(str(number), prompt[:24], SamplingParams(n=2, max_tokens=6, seed=1))
            for _ in range(rng.randint(1, 6)):
                made.step()
                threads.work(1)
                made.check()
        while made.has_unfinished():
            made.step()
            made.check()
            model.check_cache()
        written(made)
        made.close()
    assert torch.is_tensor(model.cache[0].k)
