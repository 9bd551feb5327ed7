"""Engines whose results are compared with those of transformers: on the CPU, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine


def reference_engine(path: Path, **options: Any) -> Engine:
    """A small engine with the reference attention and these options of `EngineConfig`."""
    small: dict[str, Any] = {
        "kv_cache_tokens": 2048,
        "max_num_seqs": 8,
        "attention_backend": "reference",
    }
    return Engine(EngineConfig(model=str(path), dtype="float32", **(small | options)))
