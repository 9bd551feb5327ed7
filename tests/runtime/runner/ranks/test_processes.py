"""Ranks as processes: they start, compute, die and end with the engine."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path

import pytest
from torch import cuda, device

from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.requests.request import DeviceLost
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.runner.ranks.starting import start_ranks
from tests.runtime.engine.test_families import GREEDY, prompts, run, start

Checkpoint = Callable[..., Path]
FAILING = """
from coppice.runtime.runner import loaded, member

def fail(*_):
    raise OSError("its disk is gone")

def in_loading(descriptor):
    member.ModelRunner = fail
    member.member_main(descriptor)

def in_making_pages(descriptor):
    loaded.make_pages = fail
    member.member_main(descriptor)

def at_once(descriptor):
    raise SystemExit(3)

def with_its_device(descriptor):
    member.Assignment.take_device = fail
    member.member_main(descriptor)
"""
# What torchrun starts; the first rank's process computes until it is ended.
LAUNCHED = """
import os
from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.runner.member import run_launched

print(os.environ["RANK"], os.getpid(), flush=True)
config = EngineConfig({path!r}, kv_cache_tokens=512, tensor_parallel_size=2)
if not run_launched(config):
    engine, number = Engine(config), 0
    while True:
        number += 1
        engine.add_request(str(number), [5, 6, 7], SamplingParams(max_tokens=200, ignore_eos=True))
        while engine.has_unfinished():
            engine.step()
        if number == 1:
            print("computing", flush=True)
"""
# The same: nothing is asked for longer than torch waits by default, which is cut to two seconds.
IDLE = """
import time
from datetime import timedelta
from torch.distributed import distributed_c10d
from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.runner.member import run_launched

distributed_c10d.default_pg_timeout = timedelta(seconds=2)
config = EngineConfig({path!r}, kv_cache_tokens=512, tensor_parallel_size=2)
if not run_launched(config):
    engine = Engine(config)
    for number in range(2):
        time.sleep(5)
        engine.add_request(str(number), [5, 6, 7], SamplingParams(max_tokens=5, ignore_eos=True))
        while engine.has_unfinished():
            engine.step()
    print("answered", flush=True)
    engine.close()
"""
# Each rank adds rows that it has alone and together with others.
SUMS = """
import os
from contextlib import ExitStack
import torch
from coppice.runtime.runner.ranks.torch_group import TorchGroup

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
group = TorchGroup(rank, size, torch.device("cpu"), ExitStack(), in_order=True)
every = [torch.randn(50, 300, generator=torch.Generator().manual_seed(n)) for n in range(size)]
expected = every[0].clone()
for each in every[1:]:
    expected += each
assert torch.equal(group.sum(every[rank].clone()), expected)
assert torch.equal(group.sum(every[rank][7:8].clone()), expected[7:8])
assert torch.equal(group.sum(every[rank].clone()[:, 100:200]), expected[:, 100:200])
group.close()
"""
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


def children() -> set[int]:
    """The processes that this one has started."""
    task = Path(f"/proc/{os.getpid()}/task")
    found = [each / "children" for each in task.iterdir()]
    return {int(pid) for each in found for pid in each.read_text().split()}


def running(pid: int) -> bool:
    """Whether a process has not ended; one that nobody has waited for yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def step_to_the_end(engine: Engine) -> None:
    while engine.has_unfinished():
        engine.step()


@pytest.mark.timeout(180)
def test_processes_compute_together_and_end(tiny_checkpoint: Checkpoint) -> None:
    path = tiny_checkpoint("llama")
    expected = run(start(path))
    before, cores, threads = children(), os.sched_getaffinity(0), len(os.sched_getaffinity(0))
    engine = start(path, tensor_parallel_size=2)
    if threads >= 2:
        assert len(os.sched_getaffinity(0)) == threads // 2, "each has cores of its own"
    ranks = children() - before
    assert len(ranks) == 1
    assert run(engine) == expected
    assert run(engine) == expected
    engine.close()
    assert os.sched_getaffinity(0) == cores
    assert not ranks & children()


@pytest.mark.timeout(180)
def test_a_rank_that_dies_ends_the_engine_with_its_reason(tiny_checkpoint: Checkpoint) -> None:
    before = children()
    engine = start(tiny_checkpoint("llama"), tensor_parallel_size=3)
    ranks = sorted(children() - before)
    assert len(ranks) == 2
    for number, prompt in enumerate(prompts()):
        engine.add_request(str(number), prompt, LONG)
    for _ in range(5):
        engine.step()
    os.kill(ranks[0], signal.SIGKILL)
    reason = r"rank [12] of the model: its process was killed by SIGKILL"
    with pytest.raises(DeviceLost, match=reason):
        step_to_the_end(engine)
    with pytest.raises(DeviceLost):
        engine.add_request("more", prompts()[0], GREEDY)
    engine.close()
    assert not set(ranks) & children()


@pytest.mark.timeout(180)
def test_a_rank_that_dies_while_nothing_runs_is_noticed(tiny_checkpoint: Checkpoint) -> None:
    before = children()
    engine = start(tiny_checkpoint("llama"), tensor_parallel_size=2)
    heard: list[bool] = []
    later: list[bool] = []
    engine.when_lost(lambda: heard.append(True))
    os.kill(*(children() - before), signal.SIGKILL)
    end = time.monotonic() + 60
    while not heard and time.monotonic() < end:
        time.sleep(0.01)
    assert heard
    engine.when_lost(lambda: later.append(True))
    assert later, "it has ended before"
    with pytest.raises(DeviceLost, match="killed by SIGKILL"):
        engine.check_device()
    engine.close()


@pytest.mark.timeout(180)
@pytest.mark.slow
def test_ranks_end_with_a_process_that_is_killed(tiny_checkpoint: Checkpoint) -> None:
    code = textwrap.dedent(f"""
        import os, time
        from coppice.runtime.config import EngineConfig
        from coppice.runtime.engine.core import Engine
        engine = Engine(EngineConfig({str(tiny_checkpoint("llama"))!r}, kv_cache_tokens=512,
                                     tensor_parallel_size=2))
        task = f"/proc/{{os.getpid()}}/task"
        found = [open(f"{{task}}/{{each}}/children").read() for each in os.listdir(task)]
        print(*found, flush=True)
        time.sleep(600)
    """)
    with subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        ranks = [int(pid) for pid in process.stdout.readline().split()]
        process.kill()
    assert len(ranks) == 1
    end = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in ranks) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


@pytest.fixture
def failing_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ranks can start with the functions of ``FAILING``."""
    (tmp_path / "failing_rank.py").write_text(FAILING, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("when", ["in_loading", "in_making_pages"])
@pytest.mark.usefixtures("failing_rank")
def test_a_rank_that_cannot_load_says_why(
    tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    before = children()
    monkeypatch.setattr("coppice.runtime.runner.member._MAIN", f"failing_rank:{when}")
    with pytest.raises(RuntimeError, match="rank 1 of the model: OSError: its disk is gone"):
        start(tiny_checkpoint("llama"), tensor_parallel_size=2)
    assert children() == before


@pytest.mark.timeout(180)
@pytest.mark.skipif(cuda.is_available(), reason="takes a device's place")
@pytest.mark.parametrize(
    ("when", "reason"),
    [("at_once", "its process ended with status 3"), ("with_its_device", "OSError: its disk")],
)
@pytest.mark.usefixtures("failing_rank")
def test_a_rank_whose_gpu_fails_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, when: str, reason: str
) -> None:
    before = children()
    monkeypatch.setattr(cuda, "device_count", lambda: 2)
    config = EngineConfig("model", tensor_parallel_size=2)
    with pytest.raises(RuntimeError, match=f"rank 1 of the model: {reason}"):
        start_ranks(config, device("cuda"), 1, f"failing_rank:{when}")
    assert children() == before


@pytest.mark.timeout(180)
def test_an_engine_that_fails_later_leaves_no_rank(tiny_checkpoint: Checkpoint) -> None:
    before, cores = children(), os.sched_getaffinity(0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ValueError, match="kv_events_endpoint"):
            start(tiny_checkpoint("llama"), tensor_parallel_size=2, kv_events_endpoint=endpoint)
    assert children() == before
    assert os.sched_getaffinity(0) == cores


@pytest.mark.timeout(180)
def test_ranks_end_with_an_engine_that_nobody_closes(tiny_checkpoint: Checkpoint) -> None:
    before = children()
    engine = start(tiny_checkpoint("llama"), tensor_parallel_size=2)
    assert len(children() - before) == 1
    del engine
    gc.collect()
    assert children() == before


@pytest.mark.slow
def test_torchrun_starts_the_ranks() -> None:
    folder = Path(sys.executable).parent
    words = ["generate", "demo", "--prompt", "Where is", "--temperature", "0", "--max-tokens", "8"]
    alone = subprocess.run([folder / "coppice", *words], capture_output=True, timeout=180)
    launch = [folder / "torchrun", "--no-python", "--nproc-per-node", "2", folder / "coppice"]
    ranks = subprocess.run(
        [*launch, *words, "--tensor-parallel-size", "2"], capture_output=True, timeout=180
    )
    assert ranks.returncode == 0, ranks.stderr
    assert ranks.stdout == alone.stdout and alone.stdout
    wrong = subprocess.run(
        [*launch, *words, "--tensor-parallel-size", "3"], capture_output=True, timeout=180
    )
    assert wrong.returncode != 0
    assert b"tensor_parallel_size is 3; torchrun has started 2 processes" in wrong.stderr


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("dies", ["0", "1"])
def test_a_rank_that_dies_under_torchrun_ends_the_others(
    tiny_checkpoint: Checkpoint, tmp_path: Path, dies: str
) -> None:
    """None waits for ever for what another one would send."""
    script = tmp_path / "launched.py"
    script.write_text(LAUNCHED.format(path=str(tiny_checkpoint("llama"))), encoding="utf-8")
    command = [Path(sys.executable).parent / "torchrun", "--nproc-per-node", "2", script]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as launcher:
        try:
            assert launcher.stdout is not None
            lines = [launcher.stdout.readline().split() for _ in range(3)]
            assert lines.pop() == ["computing"], lines
            pids = {rank: int(pid) for rank, pid in lines}
            assert all(map(running, pids.values()))
            os.kill(pids[dies], signal.SIGKILL)
            _, errors = launcher.communicate(timeout=90)
        finally:
            launcher.terminate()
    assert launcher.returncode != 0
    assert "Signal 9 (SIGKILL)" in errors
    assert not any(map(running, pids.values()))


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("script", "ranks"), [(IDLE, 2), (SUMS, 3)], ids=["idle", "sums"])
def test_scripts_under_torchrun(
    tiny_checkpoint: Checkpoint, tmp_path: Path, script: str, ranks: int
) -> None:
    """A rank waits for a message as long as it takes; sums can have one order at all sizes."""
    file = tmp_path / "script.py"
    file.write_text(script.replace("{path!r}", repr(str(tiny_checkpoint("llama")))), "utf-8")
    command = [Path(sys.executable).parent / "torchrun", "--nproc-per-node", str(ranks), file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    assert ("answered" in done.stdout) == (script == IDLE)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_under_torchrun_ends_what_has_begun(tiny_checkpoint: Checkpoint) -> None:
    """torchrun hands its signal to all processes at once; none may go before the first."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = Path(sys.executable).parent
    launch = [folder / "torchrun", "--no-python", "--nproc-per-node", "2", folder / "coppice"]
    words = ["serve", "demo", "--tensor-parallel-size", "2", "--port", str(port)]
    body = json.dumps({"model": "demo", "prompt": "Where is", "max_tokens": 400, "stream": True,
                       "ignore_eos": True, "temperature": 0})  # fmt: skip
    with subprocess.Popen([*launch, *words], stderr=subprocess.PIPE, text=True) as launcher:
        try:
            until_healthy(port)
            asked = HTTPConnection("127.0.0.1", port, timeout=60)
            asked.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = asked.getresponse()
            assert answer.status == 200
            answer.readline()
            launcher.send_signal(signal.SIGTERM)
            lines = [line for line in answer.read().decode().splitlines() if line]
            _, errors = launcher.communicate(timeout=60)
        finally:
            launcher.terminate()
    assert lines[-1] == "data: [DONE]"
    last = [json.loads(line[6:]) for line in lines[:-1]]
    assert last[-1].get("choices", [{}])[0].get("finish_reason") == "length", lines[-3:]
    assert errors.count("Traceback") <= 1, errors  # torchrun's own, about the signal


def until_healthy(port: int) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        asked = HTTPConnection("127.0.0.1", port, timeout=5)
        with suppress(OSError):
            asked.request("GET", "/health")
            if asked.getresponse().status == 200:
                return
        time.sleep(0.5)
    raise AssertionError("the server did not start")


@pytest.mark.skipif(cuda.is_available(), reason="counts GPUs")
def test_more_ranks_than_gpus_are_refused(
    tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coppice.runtime.runner import member

    monkeypatch.setattr(member, "resolve_device", lambda name: member.torch.device("cuda"))
    config = EngineConfig(str(tiny_checkpoint("llama")), tensor_parallel_size=2)
    with pytest.raises(ValueError, match="on GPUs it must be at most their number, 0"):
        Engine(config)
