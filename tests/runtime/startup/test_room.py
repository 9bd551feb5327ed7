"""Too little memory at start: how much is missing, and what to change, in one sentence."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.model.config_file import load_model_config
from coppice.runtime.model.decoder import Decoder
from coppice.runtime.model.layers import Linear
from coppice.runtime.model.linear.eight_bit import Int8Linear
from coppice.runtime.model.linear.sixteen_bit import HalfLinear
from coppice.runtime.model.weight_size import weight_bytes
from coppice.runtime.runner.cache import pages
from coppice.runtime.startup import room
from coppice.runtime.startup.room import TooLittleMemory, available_memory, check_room, explained

CPU = torch.device("cpu")
KIB, MIB, GIB = 2**10, 2**20, 2**30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes what the system reports: 8 GiB available, 1 GiB of swap, no limits."""
    groups = tmp_path / "cgroup"
    groups.mkdir()
    meminfo, statm = tmp_path / "meminfo", tmp_path / "statm"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable: 8388608 kB\nSwapFree: 1048576 kB\n")
    statm.write_text("25 20 10 1 0 1 0\n")
    made = SimpleNamespace(groups=groups, limit=resource.RLIM_INFINITY)
    monkeypatch.setattr(room, "_GROUPS", groups)
    monkeypatch.setattr(room, "_MEMINFO", meminfo)
    monkeypatch.setattr(room, "_STATM", statm)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (made.limit, made.limit))
    return made


def write_group(folder: Path, limit: str, usage: int, files: int) -> None:
    (folder / "memory.max").write_text(limit + "\n")
    (folder / "memory.current").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 1\nactive_file {files}\ninactive_file {files}\n")


def test_the_least_of_all_limits_counts(machine) -> None:
    assert available_memory(CPU) == 8 * GIB
    assert room.room(CPU) == 9 * GIB
    write_group(machine.groups, "max", GIB, MIB)
    assert available_memory(CPU) == 8 * GIB
    # Files that were read are dropped when memory is needed: they do not take it.
    write_group(machine.groups, str(4 * GIB), 3 * GIB, GIB)
    assert available_memory(CPU) == 3 * GIB
    assert room.room(CPU) == 4 * GIB
    machine.limit = 2 * GIB
    assert available_memory(CPU) == 2 * GIB - 25 * resource.getpagesize()
    write_group(machine.groups, str(GIB), 3 * GIB, 0)
    assert available_memory(CPU) == 0


def test_what_is_missing_is_said_with_what_to_change(machine) -> None:
    check_room("the weights", 9 * GIB, CPU, "Take less")
    with pytest.raises(TooLittleMemory) as refused:
        check_room("the weights", 10 * GIB, CPU, "Take less")
    assert str(refused.value) == (
        "too little memory: the weights take 10.0 GiB, and 9.0 GiB are available here: 1.0 GiB are "
        "missing. Take less, or end other programs, or raise the limit of the container or of the "
        "process (ulimit -v)"
    )


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 3 TiB"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        OSError(12, "Cannot allocate memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_failure_to_get_memory_is_explained(machine, error: Exception) -> None:
    with (
        pytest.raises(TooLittleMemory, match=r"the weights take 1.0 GiB, .* 8.0 GiB are available"),
        explained("the weights", GIB, CPU, "Take less"),
    ):
        raise error


@pytest.mark.parametrize("error", [RuntimeError("else"), OSError(2, "No such file"), KeyError("a")])
def test_other_failures_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, explained("the weights", GIB, CPU, "Take less"):
        raise error
    assert raised.value is error


@pytest.mark.parametrize("linear", [Linear, HalfLinear, Int8Linear])
def test_the_size_of_weights_is_known_before_they_are_made(
    tiny_checkpoint, family: str, linear: type[Linear]
) -> None:
    config = load_model_config(tiny_checkpoint(family))
    embedding = torch.bfloat16 if linear is HalfLinear else torch.float32
    decoder = Decoder(
        config, linear=linear, dtype=torch.float32, device=CPU, embedding_dtype=embedding
    )
    matrices = {
        id(each): each.nbytes
        for name, each in decoder.named_parameters()
        if each.dim() > 1 and "norm" not in name
    }
    assert weight_bytes(config, linear, torch.float32, CPU, embedding) == sum(matrices.values())


def test_weights_that_do_not_fit_are_refused_before_they_are_loaded(
    machine, tiny_checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_group(machine.groups, str(GIB), GIB - 10 * KIB, 0)
    (Path(room._MEMINFO)).write_text("MemAvailable: 8388608 kB\nSwapFree: 0 kB\n")
    monkeypatch.setattr(Decoder, "__init__", lambda *_: pytest.fail("it was made"))
    with pytest.raises(
        TooLittleMemory,
        match=r"the weights take [\d.]+ KiB, and 10.0 KiB are available here: [\d.]+ KiB are "
        r"missing. Take a smaller model, or quantization 'int8'",
    ):
        Engine(EngineConfig(model=str(tiny_checkpoint("llama"))))


def test_a_cache_that_does_not_fit_is_refused(machine, tiny_checkpoint) -> None:
    path = str(tiny_checkpoint("llama"))
    with pytest.raises(
        TooLittleMemory,
        match=r"the 100,000,000,000 tokens of kv_cache_tokens take .* are missing. Give a "
        r"kv_cache_tokens of at most [\d,]+, or",
    ):
        Engine(EngineConfig(model=path, kv_cache_tokens=100_000_000_000))
    with pytest.raises(TooLittleMemory, match=r"max_model_len=512 tokens do not fit: .* missing"):
        Engine(EngineConfig(model=path, kv_cache_tokens=256, max_model_len=512))


def test_pages_that_the_system_refuses_are_explained(
    tiny_checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise MemoryError("Unable to allocate 1. GiB")

    monkeypatch.setattr(pages, "_zeroed", refuse)
    with pytest.raises(TooLittleMemory, match=r"the pages of the KV cache take [\d.]+ .* smaller"):
        Engine(EngineConfig(model=str(tiny_checkpoint("llama")), kv_cache_tokens=256))
