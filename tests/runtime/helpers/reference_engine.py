"""Engines whose results are compared with those of transformers: on the CPU, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.requests.sampling_params import SamplingParams


def reference_engine(path: Path, **options: Any) -> Engine:
    """A small engine with the reference attention and these options of `EngineConfig`."""
    small: dict[str, Any] = {
        "kv_cache_tokens": 2048,
        "max_num_seqs": 8,
        "attention_backend": "reference",
    }
    return Engine(EngineConfig(model=str(path), dtype="float32", **(small | options)))


def greedy(engine: Engine, prompt: Sequence[int], count: int) -> list[int]:
    """The tokens that the engine chooses after a prompt."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    engine.add_request("greedy", list(prompt), params)
    found: list[int] = []
    while engine.has_unfinished():
        found += [token for out in engine.step() for token in out.new_token_ids]
    return found
