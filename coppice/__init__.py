"""Coppice: an LLM inference engine in which a radix tree owns the KV cache.

The public names are defined in `coppice.radix`, `coppice.runtime` and `coppice.frontend`, and are
imported on first use, so that `import coppice` takes milliseconds and `coppice.radix` works where
torch is not installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coppice.frontend.python.async_llm import AsyncLLM
    from coppice.frontend.python.beam_outputs import BeamSearchOutput
    from coppice.frontend.python.llm import LLM
    from coppice.frontend.python.session import Session
    from coppice.frontend.text.outputs import CompletionOutput, RequestOutput
    from coppice.radix.pages.pool import PagePool
    from coppice.radix.tree import RadixTree
    from coppice.runtime.config import EngineConfig
    from coppice.runtime.engine.core import Engine
    from coppice.runtime.report.gather import make_report
    from coppice.runtime.report.snapshot import CacheReport, SharedPrefix
    from coppice.runtime.requests.beam_search_params import BeamSearchParams
    from coppice.runtime.requests.lora_request import LoRARequest
    from coppice.runtime.requests.sampling_params import SamplingParams
    from coppice.runtime.requests.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"

_HOME_OF = {
    "AsyncLLM": "coppice.frontend.python.async_llm",
    "LLM": "coppice.frontend.python.llm",
    "BeamSearchOutput": "coppice.frontend.python.beam_outputs",
    "BeamSearchParams": "coppice.runtime.requests.beam_search_params",
    "CompletionOutput": "coppice.frontend.text.outputs",
    "RequestOutput": "coppice.frontend.text.outputs",
    "PagePool": "coppice.radix.pages.pool",
    "RadixTree": "coppice.radix.tree",
    "EngineConfig": "coppice.runtime.config",
    "Engine": "coppice.runtime.engine.core",
    "CacheReport": "coppice.runtime.report.snapshot",
    "SharedPrefix": "coppice.runtime.report.snapshot",
    "make_report": "coppice.runtime.report.gather",
    "LoRARequest": "coppice.runtime.requests.lora_request",
    "SamplingParams": "coppice.runtime.requests.sampling_params",
    "StructuredOutputsParams": "coppice.runtime.requests.structured_outputs",
    "Session": "coppice.frontend.python.session",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "CacheReport",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "LoRARequest",
    "PagePool",
    "RadixTree",
    "RequestOutput",
    "SamplingParams",
    "Session",
    "SharedPrefix",
    "StructuredOutputsParams",
    "__version__",
    "make_report",
]


def __getattr__(name: str) -> Any:
    """Imports the module that defines `name`; later look-ups do not call this function."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if home.startswith("coppice.radix."):
        value = getattr(import_module(home), name)
    else:
        from coppice.runtime.startup.garbage import without_collecting

        with without_collecting():
            value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
