"""Coppice: an LLM inference engine in which a radix tree owns the KV cache.

The public names live in the rooms (`coppice.radix`, `coppice.kernels`, `coppice.runtime`,
`coppice.frontend`) and are fetched on first use, so that `import coppice` takes milliseconds and
`coppice.radix` works where torch is not installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coppice.frontend.beam_outputs import BeamSearchOutput
    from coppice.frontend.llm import LLM
    from coppice.frontend.outputs import CompletionOutput, RequestOutput
    from coppice.frontend.session import Session
    from coppice.radix.pool import PagePool
    from coppice.radix.tree import RadixTree
    from coppice.runtime.beam_search import BeamSearchParams
    from coppice.runtime.config import EngineConfig
    from coppice.runtime.engine import Engine
    from coppice.runtime.report import CacheReport, SharedPrefix
    from coppice.runtime.sampling_params import SamplingParams
    from coppice.runtime.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"

_HOME_OF = {
    "LLM": "coppice.frontend.llm",
    "BeamSearchOutput": "coppice.frontend.beam_outputs",
    "BeamSearchParams": "coppice.runtime.beam_search",
    "CompletionOutput": "coppice.frontend.outputs",
    "RequestOutput": "coppice.frontend.outputs",
    "PagePool": "coppice.radix.pool",
    "RadixTree": "coppice.radix.tree",
    "EngineConfig": "coppice.runtime.config",
    "Engine": "coppice.runtime.engine",
    "CacheReport": "coppice.runtime.report",
    "SharedPrefix": "coppice.runtime.report",
    "SamplingParams": "coppice.runtime.sampling_params",
    "StructuredOutputsParams": "coppice.runtime.structured_outputs",
    "Session": "coppice.frontend.session",
}

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "CacheReport",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "PagePool",
    "RadixTree",
    "RequestOutput",
    "SamplingParams",
    "Session",
    "SharedPrefix",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import the room that `name` lives in; later look-ups find it without coming here."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if home.startswith("coppice.radix."):
        value = getattr(import_module(home), name)
    else:
        from coppice.runtime.collector import without_collecting

        with without_collecting():
            value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
