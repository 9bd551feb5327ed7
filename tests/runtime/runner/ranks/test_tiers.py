"""Tiers of a divided model: its pages go there in parts, and come back to all ranks."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiered_engine import engine, loading_pays, prompts_of, serve

from coppice.runtime.engine.core import Engine
from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.requests.request import DeviceLost
from coppice.runtime.requests.sampling_params import SamplingParams
from tests.runtime.runner.ranks.conftest import StartRanks
from tests.runtime.runner.ranks.test_processes import LONG, children

Checkpoint = Callable[..., Path]


@pytest.fixture(autouse=True)
def always_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    loading_pays(monkeypatch)


@pytest.fixture
def start_tiered(start_threads: StartRanks) -> StartRanks:
    """As `start_threads`, with the smaller limits of `tiered_engine` and a folder."""

    def start(path: Path, ranks: int, folder: Path | None = None, **options: Any) -> Engine:
        limits: dict[str, Any] = {"kv_cache_tokens": 512, "page_size": 4}
        if folder is not None:
            limits |= {"disk_cache": str(folder), "disk_cache_size": "64MiB"}
        return start_threads(path, ranks, **(limits | {"max_num_batched_tokens": 64} | options))

    return start


def rest(made: Engine) -> None:
    """Does what a server does while nothing is asked, for a moment."""
    until = time.monotonic() + 0.03
    while (pause := made.between()) is not None and time.monotonic() < until:
        time.sleep(min(pause, 0.01))


@pytest.mark.parametrize(
    ("family", "ranks", "page_size"),
    [("llama", 2, 4), ("llama", 3, 7), ("gpt_oss", 2, 1), ("gemma3_text", 4, 16)],
)
def test_after_a_restart_all_ranks_find_their_parts(
    tiny_checkpoint: Checkpoint,
    start_tiered: StartRanks,
    tmp_path: Path,
    family: str,
    ranks: int,
    page_size: int,
) -> None:
    path, prompts = tiny_checkpoint(family), prompts_of(1)
    options = {"page_size": page_size, "kv_cache_tokens": 64 * page_size + 256}
    expected, _ = serve(start_tiered(path, ranks, **options), prompts)
    first = start_tiered(path, ranks, tmp_path, **options)
    assert serve(first, prompts)[0] == expected
    first.close()
    second = start_tiered(path, ranks, tmp_path, **options)
    tokens, cached = serve(second, prompts)
    assert tokens == expected
    assert cached == [len(prompt) - 1 for prompt in prompts]
    assert second.tiers is not None
    assert second.tiers.told.tiers["disk"].loaded_tokens >= len(prompts[0]) - 1


def test_what_was_evicted_comes_back_to_all_ranks(
    tiny_checkpoint: Checkpoint, start_tiered: StartRanks
) -> None:
    """Main memory as the tier; and copies on divergence, of samples and beams, in between."""
    rng = random.Random(2)
    path = tiny_checkpoint("llama")
    prompts = [[rng.randrange(3, 250) for _ in range(61)] for _ in range(8)]
    kinds: list[Any] = [
        SamplingParams(n=3, temperature=1, seed=5, max_tokens=5),
        BeamSearchParams(3, 5),
        SamplingParams(temperature=0, max_tokens=5, ignore_eos=True),
    ]

    def texts(made: Engine) -> dict[tuple[str, int], list[int]]:
        found: dict[tuple[str, int], list[int]] = {}
        for turn, params in enumerate(3 * kinds):
            for index, prompt in enumerate(prompts):
                name = f"{turn}-{index}"
                if isinstance(params, BeamSearchParams):
                    made.add_beam_search(name, prompt, params)
                else:
                    made.add_request(name, prompt, params)
                while made.has_unfinished():
                    for output in made.step():
                        line = found.setdefault((output.request_id, output.index), [])
                        line += output.new_token_ids
                    made.check()
                rest(made)
        return found

    expected = texts(start_tiered(path, 2, kv_cache_tokens=4096))
    made = start_tiered(path, 2, kv_cache_tokens=256, host_cache="8MiB")
    assert texts(made) == expected
    assert made.tiers is not None
    assert made.tiers.told.tiers["host"].loaded_tokens > 1000
    assert made.tiers.told.tiers["host"].failures == 0


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_parts_may_be_rounded(
    tiny_checkpoint: Checkpoint, start_tiered: StartRanks, tmp_path: Path, dtype: str
) -> None:
    path, prompts = tiny_checkpoint("llama"), prompts_of(3)
    first = start_tiered(path, 3, tmp_path, disk_cache_dtype=dtype)
    serve(first, prompts)
    first.close()
    one = engine(path, tmp_path / "one", disk_cache_dtype=dtype)
    whole = one.runner.transfers
    second = start_tiered(path, 3, tmp_path, disk_cache_dtype=dtype)
    assert second.runner.transfers is not None and whole is not None
    # Two of three ranks have the same head of keys and values.
    assert second.runner.transfers.page_bytes == whole.page_bytes * 3 // 2
    one.close()
    before = [each.k.clone() for each in second.runner.kv_cache]
    assert serve(second, prompts)[1] == [len(prompt) - 1 for prompt in prompts]
    assert any((a != b.k).any() for a, b in zip(before, second.runner.kv_cache, strict=True))


def test_pages_of_another_division_are_not_found(
    tiny_checkpoint: Checkpoint, start_tiered: StartRanks, tmp_path: Path
) -> None:
    path, prompts = tiny_checkpoint("llama"), prompts_of(4)
    for ranks in (1, 2, 4):
        made = start_tiered(path, ranks, tmp_path / "pages")
        assert serve(made, prompts[:1])[1] == [0]
        made.close()


def test_a_sleep_forgets_what_is_on_its_way(
    tiny_checkpoint: Checkpoint, start_tiered: StartRanks, tmp_path: Path
) -> None:
    path, prompts = tiny_checkpoint("llama"), prompts_of(5)
    made = start_tiered(path, 2, tmp_path, host_cache="4MiB")
    expected, _ = serve(made, prompts)
    serve(made, prompts)
    for level in (1, 2):
        rest(made)
        made.sleep(level)
        made.wake_up()
        tokens, cached = serve(made, prompts)
        assert tokens == expected and min(cached) > 0


def step_until_lost(made: Engine) -> None:
    while made.has_unfinished():
        made.check_device()
        made.step()


@pytest.mark.timeout(180)
def test_processes_bring_their_parts_together(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    path, prompts = tiny_checkpoint("llama"), prompts_of(6)
    made = engine(path, tmp_path, tensor_parallel_size=2)
    expected, _ = serve(made, prompts)
    made.close()
    before = children()
    made = engine(path, tmp_path, tensor_parallel_size=2)
    tokens, cached = serve(made, prompts)
    assert tokens == expected and cached == [len(prompt) - 1 for prompt in prompts]
    # A rank that dies takes the engine with it, and not the folder.
    [rank] = children() - before
    made.add_request("long", prompts[0], LONG)
    for _ in range(20):
        made.step()
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(DeviceLost, match="rank 1 of the model: its process was killed by SIGKILL"):
        step_until_lost(made)
    made.close()
    made = engine(path, tmp_path, tensor_parallel_size=2)
    assert serve(made, prompts)[0] == expected
    made.close()
