"""What disks, servers, clocks and ends do to engines with tiers: never another token.

What can't be had is computed again, and counted.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from failing_disk import FailingDisk
from fake_tiers import written
from redis_server import PROGRAM, RedisServer
from tiered_engine import engine, loading_pays, serve

from coppice.radix.mirror.names import chain
from coppice.runtime.engine.core import Engine
from coppice.runtime.tiers import writer
from coppice.runtime.tiers.disk.folder import content
from coppice.runtime.tiers.disk.record import VERSION
from coppice.runtime.tiers.loading import loads

HELPERS = Path(__file__).parents[1] / "helpers"


@pytest.fixture(autouse=True)
def always_loading(monkeypatch):
    loading_pays(monkeypatch)
    for module in (loads, writer):  # a tier that failed is tried again at once
        monkeypatch.setattr(module, "_REST_SECONDS", 0.0)


@pytest.fixture(scope="module")
def llama(tiny_checkpoint):
    return tiny_checkpoint("llama")


@pytest.fixture(scope="module")
def many() -> list[list[int]]:
    """Prompts of which a cache of 512 tokens holds three."""
    rng = random.Random(31)
    stem = [rng.randrange(3, 250) for _ in range(40)]
    return [stem + [rng.randrange(3, 250) for _ in range(110)] for _ in range(8)]


@pytest.fixture(scope="module")
def expected(llama, many) -> list[list[int]]:
    """What an engine without tiers generates."""
    made = engine(llama, kv_cache_tokens=4096)
    tokens, _ = serve(made, many)
    made.close()
    return tokens


def told(made: Engine, name: str = "disk"):
    assert made.tiers is not None
    [found] = [each for each in made.tiers.report().stores if each.name == name]
    return found


def be_idle(made: Engine, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while (pause := made.between()) is not None and time.monotonic() < end:
        time.sleep(pause)
    made.check()


def filled(llama, folder, many, expected) -> None:
    made = engine(llama, folder)
    assert serve(made, many)[0] == expected
    assert serve(made, many)[0] == expected
    made.close()


# -- the disk --------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["segments", "index", "both", "cut segments", "cut index"])
def test_damage_anywhere_costs_time_and_no_token(llama, many, expected, tmp_path, what):
    """Flipped bits, and files that end early, in segments, index and its log."""
    filled(llama, tmp_path / "whole", many, expected)
    damaged = 0
    for seed in range(3):
        draw = random.Random(seed)
        folder = tmp_path / str(seed)
        shutil.copytree(tmp_path / "whole", folder)
        patterns = ["*.kv"] * ("index" not in what) + ["index*"] * ("segments" not in what)
        for path in [each for pattern in patterns for each in content(folder).glob(pattern)]:
            data = bytearray(path.read_bytes())
            cut = what.startswith("cut")
            if cut:
                data = data[: draw.randrange(len(data) + 1)]
            for _ in range(draw.choice([1, 10, 100]) if data and not cut else 0):
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            path.write_bytes(data)
        made = engine(llama, folder)
        if draw.random() < 0.5:
            be_idle(made)
        assert serve(made, many)[0] == expected
        written(made)
        assert serve(made, many)[0] == expected
        damaged += told(made).damaged
        made.close()
        shutil.rmtree(folder)
    assert damaged or what.endswith("index"), "what is damaged is counted"


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """A file system of its own, with so many bytes."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_costs_time_and_no_token(llama, many, expected, tmp_path):
    """A disk that is smaller than the folder may get, and one that others have filled."""
    with small_disk(tmp_path / "disk", 2**20) as disk:
        made = engine(llama, disk)
        for _ in range(2):
            assert serve(made, many)[0] == expected
            written(made)
        (disk / "others").write_bytes(b"x" * os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize)
        for _ in range(2):
            assert serve(made, many)[0] == expected
            written(made)
        made.close()
        (disk / "others").unlink()
        made = engine(llama, disk)
        assert serve(made, many)[0] == expected
        made.close()


CHILD = """
import json, os, sys
from pathlib import Path
import pytest
from fake_tiers import written
from tiered_engine import engine, loading_pays, serve
from coppice.runtime.tiers import writer
from coppice.runtime.tiers.loading import loads

patch = pytest.MonkeyPatch()
loading_pays(patch)
for module in (loads, writer):
    patch.setattr(module, "_REST_SECONDS", 0.0)
checkpoint, folder, prompts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
rules = Path(os.environ["FAILING_DISK"])
forward, turned = prompts, [[*prompt[:5], *reversed(prompt[5:])] for prompt in prompts]
made = engine(checkpoint, folder)

def twice():
    found = []
    for _ in range(2):
        tokens, cached = serve(made, prompts)
        written(made)
        made.reset_cache()
        disk = made.tiers.report().stores[0]
        found.append([tokens, sum(cached), disk.damaged, disk.failures, disk.written_pages])
    return found

said = {"works": twice()}
for name, rule in (
    ("reading", "read .kv 5 0"), ("works again", ""), ("writing", "write .kv 5 0"),
    ("sync", "sync .kv 5 0"), ("reading the index", "read index.sqlite 5 0"),
    ("writing the index", "write index.sqlite-wal 5 0"), ("works at last", ""),
):
    rules.write_text(rule + "\\n")
    prompts = turned if "writing" in name or name == "sync" else forward  # some are not stored yet
    said[name] = twice()
made.close()
print("said", json.dumps(said))
"""


@pytest.mark.slow
def test_a_disk_with_errors_costs_time_and_no_token(llama, many, expected, tmp_path):
    """Reads, writes and syncs of segments and index fail with EIO, in a process of its own."""
    disk = FailingDisk(tmp_path)
    child = subprocess.run(
        [sys.executable, "-c", CHILD, llama, tmp_path / "cache", json.dumps(many)],
        env=os.environ | disk.environment | {"PYTHONPATH": path_of(HELPERS)},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert child.returncode == 0, child.stderr
    [line] = [line for line in child.stdout.splitlines() if line.startswith("said ")]
    said = json.loads(line[5:])
    turned = [[*prompt[:5], *reversed(prompt[5:])] for prompt in many]
    made = engine(llama, kv_cache_tokens=4096)
    others, _ = serve(made, turned)
    made.close()
    for name, rounds in said.items():
        new = "writing" in name or name == "sync"
        assert [each[0] for each in rounds] == [others if new else expected] * 2, name
    stem_hits = said["works"][0][1]
    assert said["works"][1][1] > stem_hits, "it came back"
    assert said["reading"][1][2] > 0, "pages that can't be read count as damaged"
    assert said["works again"][1][1] > stem_hits
    # SQLite may have all of a small index in its memory: that it can't be read need not be noticed.
    before = {"writing": "works again", "sync": "writing", "writing the index": "reading the index"}
    for name, earlier in before.items():
        assert said[name][1][3] > said[earlier][1][3], f"{name}: failures are counted"
    assert said["works at last"][1][1] > stem_hits


def path_of(*folders: Path) -> str:
    return os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])


# -- ends ------------------------------------------------------------------------------------

SERVE = """
import json, sys
import pytest
from tiered_engine import GREEDY, engine, loading_pays

loading_pays(pytest.MonkeyPatch())
checkpoint, folder, prompts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
made = engine(checkpoint, folder)
number = 0
while True:
    while made._sequences.num_requests < 3:
        made.add_request(str(number), prompts[number % len(prompts)], GREEDY)
        number += 1
    for output in made.step():
        if output.finish_reason:
            print("done", flush=True)
"""


def durable(made: Engine, prompt: list[int]) -> int:
    """How many of a prompt's first tokens the disk has."""
    assert made.tiers is not None
    root = made.tiers._root(made.intake.namespace(None))
    assert root is not None
    keys = chain(root, np.array(prompt, np.int32).tobytes(), made.tree.page_size * 4)
    [disk] = made.tiers.stores
    there = [each is not None for each in disk.find(keys)]
    first = there.index(False) if False in there else len(there)
    found = sum(key.length for key in keys[:first])
    if first < len(keys) and (part := disk.find_longest(keys[first])) is not None:
        found += part.tokens
    return found


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_what_was_durable_is_hit_after_a_kill(llama, many, expected, tmp_path, seed):
    """Killed with -9 under load, in the middle of whatever it does."""
    child = subprocess.Popen(
        [sys.executable, "-c", SERVE, llama, tmp_path, json.dumps(many)],
        env=os.environ | {"PYTHONPATH": path_of(HELPERS)},
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        for _ in range(12):
            assert child.stdout.readline() == b"done\n"
        time.sleep(random.Random(seed).random() / 10)
    finally:
        child.kill()
        child.communicate()
    assert child.returncode == -signal.SIGKILL
    made = engine(llama, tmp_path, kv_cache_tokens=4096)
    there = [min(durable(made, prompt), len(prompt) - 1) for prompt in many]
    assert sum(there) > 300, "it was killed too early"
    found = [serve(made, [prompt]) for prompt in many]
    assert [tokens for [tokens], _ in found] == expected
    hits = [cached for _, [cached] in found]
    assert all(hit >= have for hit, have in zip(hits, there, strict=True))
    assert told(made).damaged == 0
    made.close()


def test_an_older_format_is_left_alone(llama, many, expected, tmp_path):
    filled(llama, tmp_path, many[:2], expected[:2])
    old = tmp_path / f"v{VERSION - 1}"
    content(tmp_path).rename(old)
    sizes = {path: path.stat().st_size for path in old.iterdir()}
    made = engine(llama, tmp_path, kv_cache_tokens=4096)
    be_idle(made)
    assert serve(made, many[:2]) == (expected[:2], [0, 40])
    made.close()
    assert {path: path.stat().st_size for path in old.iterdir()} == sizes


@pytest.mark.slow
def test_a_clock_that_jumps_changes_nothing(llama, many, expected, tmp_path, monkeypatch):
    """Years ahead and back, while pages are written, dropped, loaded, and at restarts."""
    rng, real = random.Random(32), time.time_ns
    jump = [0]
    monkeypatch.setattr(time, "time_ns", lambda: max(0, real() + jump[0] * 10**9))
    monkeypatch.setattr(time, "time", lambda: max(0.0, real() / 1e9 + jump[0]))
    for _ in range(4):
        made = engine(llama, tmp_path, disk_cache_size="512KiB")
        for _ in range(2):
            jump[0] = rng.choice([0, -1, 1]) * rng.randrange(10**9)
            be_idle(made)
            assert serve(made, many)[0] == expected
            written(made)
        assert told(made).used_bytes <= 2**19 * 33 / 32
        made.close()
    made = engine(llama, tmp_path, disk_cache_size="64MiB")
    serve(made, many)
    made.close()
    made = engine(llama, tmp_path, kv_cache_tokens=4096, disk_cache_size="64MiB")
    tokens, hits = serve(made, many)
    assert tokens == expected and sum(hits) > 6 * 140
    made.close()


# -- a server of several engines -------------------------------------------------------------


@pytest.fixture
def redis_server(tmp_path_factory) -> Iterator[RedisServer]:
    pytest.importorskip("redis")
    if PROGRAM is None:
        pytest.skip("redis-server is not installed")
    server = RedisServer(tmp_path_factory.mktemp("r"))
    yield server
    server.end()


def test_a_server_that_dies_hangs_forgets_or_lies_costs_time_and_no_token(
    llama, many, expected, redis_server, monkeypatch
):
    import redis

    monkeypatch.setattr("coppice.runtime.tiers.loading.rates._LEAST_PATIENCE", 0.3)
    made = engine(llama, shared_cache=redis_server.url)
    client = redis.Redis(port=redis_server.port)
    rng = random.Random(33)

    def rounds(count: int = 2) -> int:
        hits = 0
        for _ in range(count):
            tokens, cached = serve(made, many)
            assert tokens == expected
            hits += sum(cached)
        return hits

    rounds()
    written(made)
    assert told(made, "shared").written_pages > 100
    for key in rng.sample(client.keys("coppice:*:page:*"), 60):
        value = bytearray(client.get(key))
        value[rng.randrange(len(value))] ^= 1
        client.set(key, bytes(value))
    for key in rng.sample(client.keys("coppice:*:page:*"), 10):
        client.delete(key)
        client.lpush(key, "what others have put there")
    rounds()
    assert told(made, "shared").damaged > 0
    client.flushall()
    before = told(made, "shared").written_pages
    rounds()
    written(made)
    assert told(made, "shared").written_pages > before + 50, "what it has forgotten is stored again"
    redis_server.pause()
    rounds(1)
    redis_server.go_on()
    rounds()
    redis_server.end()
    rounds()
    failures, loaded = told(made, "shared").failures, told(made, "shared").loaded_tokens
    assert failures > 0
    redis_server.start()
    made.tiers._writer._rested = [0.0]
    made.tiers.loads._rested = [0.0]
    rounds(1)
    written(made)
    rounds()
    assert told(made, "shared").loaded_tokens > loaded
    made.close()
