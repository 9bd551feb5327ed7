"""The texts as token ids of the benchmark's tokenizer, and random tokens, which are no text."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpu.checkpoints import VOCABULARY
from drafts.texts import WORKLOADS
from drafts.tokenizer import trained

NAMES = (*WORKLOADS, "random")
LONGEST = 512  # tokens of an answer that are followed, if not said otherwise
RANDOM = 200, 128  # tokens of prompts and answers


@dataclass(frozen=True, slots=True)
class Text:
    """Token ids of a prompt and of the answer that is followed; its JSON schema, if it has one."""

    prompt: array[int]
    answer: array[int]
    schema: dict[str, Any] | None = None


def texts_of(
    workload: str, count: int, cache: Path, longest: int = LONGEST, *, uneven: bool = False
) -> list[Text]:
    """The first `count` texts of a workload, answers of at most `longest` tokens.

    With `uneven` each is cut at another length, of at least half as many tokens. Raises ValueError
    if it has fewer.
    """
    rng = random.Random(7)
    cuts = [rng.randint(longest // 2, longest) if uneven else longest for _ in range(count)]
    if workload == "random":
        rng = random.Random(5)
        drawn = [
            [array("i", (rng.randrange(3, VOCABULARY) for _ in range(length))) for length in RANDOM]
            for _ in range(count)
        ]
        return [
            Text(prompt, answer[:cut]) for (prompt, answer), cut in zip(drawn, cuts, strict=True)
        ]
    tokenizer = trained(cache)
    return [
        Text(
            array("i", tokenizer.encode(turn.prompt).ids),
            array("i", tokenizer.encode(turn.answer).ids[:cut]),
            turn.schema,
        )
        for turn, cut in zip(WORKLOADS[workload](count), cuts, strict=True)
    ]
