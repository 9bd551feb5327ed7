"""llguidance, which holds texts to a form; without it all but structured outputs works.

A machine that only tests kernels may lack it. Whatever asks for a form is refused there by name.
"""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = [
    "LLExecutor",
    "LLMatcher",
    "LLParserLimits",
    "LLTokenizer",
    "TokenizerWrapper",
    "allocate_token_bitmask",
    "fill_next_token_bitmask_par",
    "grammar_from",
    "regex_to_lark",
]


class _Absent:
    """Stands for anything of llguidance; refuses every use."""

    def __call__(self, *arguments: Any, **options: Any) -> NoReturn:
        raise ValueError(
            "structured outputs need the package llguidance, which is not installed: "
            "pip install llguidance"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


try:
    from llguidance import (
        LLExecutor,
        LLMatcher,
        LLParserLimits,
        LLTokenizer,
        TokenizerWrapper,
        grammar_from,
        regex_to_lark,
    )
    from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par
except ModuleNotFoundError as absent:
    if absent.name is None or absent.name.partition(".")[0] != "llguidance":
        raise
    for _name in __all__:
        globals()[_name] = _Absent()
