"""Ranks that torchrun starts: what each process is told, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch import cuda

from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.runner import member
from coppice.runtime.runner.member import run_launched


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """torchrun has started this process, the second one of two."""
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RUN_ID": "none",
    }.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


class Told:
    """In the place of a group: what the first rank sends is received by the others."""

    sent: ClassVar[list[bytes]] = []

    def __init__(self, *given: Any, **options: Any) -> None:
        self.options = options

    def send(self, message: bytes) -> None:
        self.sent.append(message)

    def receive(self) -> bytes:
        return self.sent.pop()


@pytest.mark.usefixtures("launched")
def test_only_the_first_process_has_an_engine(tiny_checkpoint: Any) -> None:
    config = EngineConfig(str(tiny_checkpoint("llama")), tensor_parallel_size=2)
    with pytest.raises(ValueError, match="as rank 1: only rank 0 has an engine"):
        Engine(config)


def test_tiers_need_ranks_of_one_machine(
    launched: pytest.MonkeyPatch, tiny_checkpoint: Any
) -> None:
    launched.setenv("LOCAL_WORLD_SIZE", "1")
    config = EngineConfig(
        str(tiny_checkpoint("llama")), tensor_parallel_size=2, shared_cache="redis://127.0.0.1:1"
    )
    with pytest.raises(ValueError, match=r"shared_cache must be None where torchrun .* machines"):
        run_launched(config)


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("size", [1, 3])
def test_the_size_is_that_of_torchrun(tiny_checkpoint: Any, size: int) -> None:
    """With a size of 1 each process would serve the whole model."""
    config = EngineConfig(str(tiny_checkpoint("llama")), tensor_parallel_size=size)
    with pytest.raises(ValueError, match=f"is {size}; torchrun has started 2 processes"):
        run_launched(config)


def test_more_processes_than_gpus_are_refused(launched: pytest.MonkeyPatch) -> None:
    launched.setattr(cuda, "device_count", lambda: 1)
    config = EngineConfig("model", tensor_parallel_size=2)
    with pytest.raises(ValueError, match="--nproc-per-node must be at most their number, 1"):
        member._joined(config, member.torch.device("cuda"))


def test_all_ranks_have_the_sizes_of_the_first(launched: pytest.MonkeyPatch) -> None:
    """Those that are left open follow from a GPU, and GPUs may differ."""
    launched.setattr(member, "TorchGroup", Told)
    cpu = member.torch.device("cpu")
    config = EngineConfig("model", tensor_parallel_size=2, deterministic=False)
    launched.setenv("RANK", "0")
    member._joined(
        EngineConfig("model", tensor_parallel_size=2, max_num_seqs=24, max_num_batched_tokens=3000),
        cpu,
    )
    launched.setenv("RANK", "1")
    told, _ = member._joined(config, cpu)
    assert (told.max_num_seqs, told.max_num_batched_tokens) == (24, 3000)
    assert Path(told.model) == Path(config.model)
