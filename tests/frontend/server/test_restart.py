"""Servers with a disk cache that end and start again: what SIGTERM leaves, and what is found."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from failing_disk import FailingDisk

from coppice.runtime.tiers.disk.contents import damages, totals
from coppice.runtime.tiers.disk.folder import content, owner
from tests.frontend.conftest import iter_until

COPPICE = Path(sys.executable).parent / "coppice"
SERVE = ("--port", "0", "--kv-cache-tokens", "4096", "--disk-cache-size", "64MiB")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(41)
    return [[rng.randrange(3, 250) for _ in range(200)] for _ in range(12)]


@contextmanager
def server(
    checkpoint: Path, folder: Path, *options: str, more: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """A `coppice serve` with a disk cache, and a client of it; it is killed at the end."""
    process = subprocess.Popen(
        [COPPICE, "serve", checkpoint, *SERVE, "--drain-grace", "0", "--disk-cache", folder,
         *options],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"} | dict(more or {}),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        lines = list(iter_until(process.stdout, "url "))
        assert lines and lines[-1].startswith("url "), lines
        with httpx.Client(base_url=lines[-1].split()[1], timeout=120) as client:
            yield process, client
    finally:
        process.kill()
        process.communicate()


def complete(client: httpx.Client, checkpoint: Path, prompt: list[int]) -> tuple[str, int]:
    """The text after a prompt, and how many of its tokens were cached."""
    body = {"model": str(checkpoint), "prompt": prompt, "max_tokens": 8, "temperature": 0,
            "ignore_eos": True}  # fmt: skip
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return answer.json()["choices"][0]["text"], usage["prompt_tokens_details"]["cached_tokens"]


def disk(client: httpx.Client) -> dict[str, Any]:
    [found] = client.get("/cache/report").json()["tiers"]["stores"]
    store: dict[str, Any] = found
    return store


def end(process: subprocess.Popen[str], signum: int = signal.SIGTERM) -> None:
    process.send_signal(signum)
    process.communicate(timeout=120)
    assert process.returncode == 0


def cache(*arguments: object, status: int = 0) -> tuple[str, str]:
    """What `coppice cache` prints: to its output, and as errors."""
    done = subprocess.run(
        [COPPICE, "cache", *map(str, arguments)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == status, (done.stdout, done.stderr)
    return done.stdout, done.stderr


@pytest.mark.slow
def test_sigterm_leaves_what_the_next_server_finds(
    checkpoint: Path, prompts: list[list[int]], tmp_path: Path
) -> None:
    """What nobody has evicted is written, and what was hit is back before anybody asks."""
    folder = tmp_path / "cache"
    with server(checkpoint, folder) as (process, client):
        texts = [complete(client, checkpoint, prompt)[0] for prompt in prompts[:4]]
        assert complete(client, checkpoint, prompts[0]) == (texts[0], 199)
        end(process)
    found = totals(folder)
    assert found.tokens >= 4 * 200
    assert found.hits > 0
    with server(checkpoint, folder) as (process, client):
        while disk(client)["warmed_tokens"] < 199:
            time.sleep(0.02)
        assert complete(client, checkpoint, prompts[0]) == (texts[0], 199)
        assert disk(client)["loaded_tokens"] == 0
        texts_again = [complete(client, checkpoint, prompt)[0] for prompt in prompts[:4]]
        assert texts_again == texts
        # A person looks at the folder meanwhile.
        has = owner(content(folder))
        assert has is not None
        said = json.loads(cache("stat", folder, "--json")[0])
        assert (said["owner"], said["pages"]) == (has, found.pages)
        listed = json.loads(cache("ls", folder, "--json")[0])["prefixes"]
        assert listed[0]["starts"] == prompts[0][:8] and listed[0]["hits"] > 0
        assert "0 damaged" in cache("verify", folder)[0]
        assert f"in use by process {has}" in cache("gc", folder, status=1)[1]
        end(process)
    assert owner(content(folder)) is None
    assert not any(damages(folder))


@pytest.mark.slow
def test_a_slow_disk_gets_the_time_to_drain_and_no_more(
    checkpoint: Path, prompts: list[list[int]], tmp_path: Path
) -> None:
    """Each prompt takes 1.5 s to be written: twelve longer than an engine's end takes otherwise."""
    slow = FailingDisk(tmp_path)
    slow.be_slow("sync", ".kv", 1.5)
    for folder, options, signals in (
        (tmp_path / "all", ("--drain-timeout", "90"), 1),
        (tmp_path / "some", ("--drain-timeout", "4"), 1),
        (tmp_path / "none", ("--drain-timeout", "90"), 2),
    ):
        with server(checkpoint, folder, *options, more=slow.environment) as (process, client):
            for prompt in prompts:
                complete(client, checkpoint, prompt)
            process.send_signal(signal.SIGTERM)
            if signals == 2:
                assert process.stdout is not None
                list(iter_until(process.stdout, "stopping"))
                process.send_signal(signal.SIGTERM)
            process.communicate(timeout=200)
            assert process.returncode == 0
    tokens = [totals(tmp_path / name).tokens for name in ("all", "some", "none")]
    assert tokens[0] >= 12 * 200
    assert 0 < tokens[1] < tokens[0] / 2
    assert tokens[2] < tokens[0] / 2


@pytest.mark.slow
def test_a_second_server_on_a_folder_says_who_has_it(checkpoint: Path, tmp_path: Path) -> None:
    with server(checkpoint, tmp_path):
        has = owner(content(tmp_path))
        second = subprocess.run(
            [COPPICE, "serve", checkpoint, *SERVE, "--disk-cache", tmp_path],
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert second.returncode not in (0, None)
        said = f"disk_cache: '{tmp_path}' is in use by process {has}"
        assert said in second.stderr
        assert "Traceback" not in second.stderr
