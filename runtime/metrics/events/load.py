"""How busy an engine is, and how fast it works: what a router needs to foresee a request's wait."""

from __future__ import annotations

from typing import NamedTuple


class Load(NamedTuple):
    """An engine as of now.

    Attributes:
        waiting_requests, waiting_tokens: that wait to begin, and the tokens of these sequences.
        running_requests, running_tokens: sequences that run, and their tokens that are not computed
            yet.
        prefill_tokens_a_second: measured lately; 0 before the first prompt.
        decode_step_seconds: what decoding took of a step, measured lately; 0 before the first.
    """

    waiting_requests: int
    waiting_tokens: int
    running_requests: int
    running_tokens: int
    prefill_tokens_a_second: float
    decode_step_seconds: float
