"""The process that compiles grammars on trial: a line of JSON in, a line of JSON out.

It imports llguidance only. Grammars are compiled for a tokenizer of 256 bytes, which takes far less
time than one of 100,000 tokens and finds the same faults.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
from contextlib import suppress
from typing import Any

with suppress(ModuleNotFoundError):  # without it nobody starts this process; see grammar_library
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

# Less than the threads that compile grammars to serve have, so that those have some to spare.
_STACK_BYTES = 4 * 2**20
_MEMORY_BYTES = 4 * 2**30
_STEPS = 24  # bytes of a text that are tried, so that what is too complex later shows too


class Bytes:
    """A tokenizer whose tokens are the 256 bytes."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([each]) for each in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def tried(tokenizer: LLTokenizer, grammar: str) -> dict[str, Any]:
    """Why a grammar can't be followed ("" if it can), and the warnings about it."""
    limits = LLParserLimits(**json.loads(sys.argv[1]))
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    error = matcher.get_error()
    warnings = [] if error else list(matcher.get_grammar_warnings())
    for _ in range(_STEPS):
        allowed = [] if error else _allowed(matcher)
        error = error or matcher.get_error()
        if not allowed:
            if not error and not matcher.is_accepting():
                error = "no text can follow it"
            break
        matcher.consume_token(allowed[0])
        error = matcher.get_error()
    if "NoExtension" in error:
        error = "no text can follow it"
    return {"error": error.replace("<non-verbose/>", "").strip(), "warnings": warnings}


def _allowed(matcher: LLMatcher) -> list[int]:
    """The bytes that may follow, from the greatest."""
    bits = int.from_bytes(matcher.compute_bitmask()[:32], "little")
    return [each for each in reversed(range(256)) if bits >> each & 1]


def _serve() -> None:
    tokenizer = LLTokenizer(TokenizerWrapper(Bytes()), slices=[])
    answer(tried(tokenizer, LLMatcher.grammar_from_regex("a")))
    for line in sys.stdin.buffer:
        answer(tried(tokenizer, json.loads(line)))


def answer(result: dict[str, Any]) -> None:
    """Writes one line."""
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()
