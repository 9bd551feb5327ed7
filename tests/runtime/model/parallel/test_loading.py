"""What a rank reads of a checkpoint, and what of one can't be divided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors import safe_open

from coppice.runtime.model.config import ModelConfig
from coppice.runtime.model.config_file import load_model_config
from coppice.runtime.model.files import safetensor
from coppice.runtime.model.files.safetensor import SafetensorsSource
from coppice.runtime.model.parallel.group import RankGroup
from coppice.runtime.model.weights import load_decoder

Checkpoint = Callable[..., Path]


def load(path: Path, config: ModelConfig, rank: int, size: int, load_format: str = "auto") -> None:
    """Loads a rank's part of a model. No other rank is needed for that."""
    group = cast(RankGroup, SimpleNamespace(rank=rank, size=size))
    load_decoder(
        path,
        config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        load_format=load_format,
        group=group,
    )


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes of each tensor that are copied from safetensors files, from now on."""
    read: Counter[str] = Counter()

    class Slice:
        def __init__(self, name: str, real: Any) -> None:
            self.name, self.real = name, real
            self.get_shape, self.get_dtype = real.get_shape, real.get_dtype

        def __getitem__(self, where: Any) -> torch.Tensor:
            found: torch.Tensor = self.real[where]
            read[self.name] += found.nbytes
            return found

    class File:
        def __init__(self, *args: Any, **options: Any) -> None:
            self.real = safe_open(*args, **options)
            self.keys = self.real.keys

        def get_tensor(self, name: str) -> torch.Tensor:
            found = self.real.get_tensor(name)
            read[name] += found.nbytes
            return found

        def get_slice(self, name: str) -> Slice:
            return Slice(name, self.real.get_slice(name))

    monkeypatch.setattr(safetensor, "safe_open", File)
    return read


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt_oss"])
def test_each_rank_reads_only_its_slices(
    tiny_checkpoint: Checkpoint, bytes_read: Counter[str], family: str
) -> None:
    """Also of projections in one tensor (phi3), and of all experts in one (gpt-oss).

    Else as many ranks would read a model as many times: minutes of a large one.
    """
    path = tiny_checkpoint(family)
    config, headers = load_model_config(path), SafetensorsSource(path).headers
    undivided = {
        name
        for name, header in headers.items()
        if not header.is_matrix or name.endswith((".router.weight", ".down_proj_bias"))
    }
    sizes = {name: header.size for name, header in headers.items()}
    together: Counter[str] = Counter()
    for rank in range(2):
        bytes_read.clear()
        load(path, config, rank, 2)
        own = {name: bytes_read[name] for name in sizes}
        assert all(0 < own[name] <= sizes[name] for name in undivided)
        assert all(0 < own[name] < sizes[name] for name in sizes.keys() - undivided)
        together.update(own)
    matrices = sizes.keys() - undivided
    assert {name: together[name] for name in matrices} == {name: sizes[name] for name in matrices}
    assert sum(sizes[name] for name in matrices) > 0.9 * sum(sizes.values())


@pytest.mark.parametrize(("width", "size"), [(96, 2), (64, 4)])
def test_experts_in_blocks_of_mxfp4_must_be_divided_between_blocks(
    tiny_checkpoint: Checkpoint, width: int, size: int
) -> None:
    """A rank can't take a part of 32 numbers that share a scale, as they are packed."""
    path = tiny_checkpoint("gpt_oss", intermediate_size=width)
    config = replace(load_model_config(path), stored="mxfp4")
    message = (
        f"tensor_parallel_size is {size}; the experts' inner width of {width} can't be divided by "
        "it into multiples of 32, the blocks of MXFP4"
    )
    for rank in range(size):
        with pytest.raises(ValueError, match=message):
            load(path, config, rank, size, "dummy")
