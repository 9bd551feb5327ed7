"""The log-probabilities of prompts' tokens, computed from the rows of a step that give them."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch

from coppice.runtime.requests.prompt_logprobs import PromptLogprobs
from coppice.runtime.sampling.logprob_rows import log_probabilities, of_tokens

# Logits are computed for this many rows at a time: for 4,096 rows of 150,000 they take 2.4 GB.
SLICE_ROWS = 256


class PromptRows(NamedTuple):
    """Rows of a step that give the next of a prompt's missing logprobs, in order."""

    prompt: PromptLogprobs
    tokens: array[int]  # those that follow the rows' own tokens


def score_prompts(
    hidden: torch.Tensor, wanted: Seq[PromptRows], head: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Extends the logprobs of each prompt by its rows of `hidden` [S, hidden size], in order.

    `head` gives the logits of some rows; it is called for at most `SLICE_ROWS` at a time.
    """
    begin = 0  # row of the slice's first
    logits = hidden[:0]
    row = 0
    for prompt, tokens in wanted:
        done = 0
        while done < len(tokens):
            if row == begin + len(logits):
                begin = row
                logits = head(hidden[begin : begin + SLICE_ROWS])
            count = min(len(tokens) - done, begin + len(logits) - row)
            part = log_probabilities(logits[row - begin : row - begin + count])
            prompt.extend(of_tokens(part, tokens[done : done + count], prompt.width))
            done += count
            row += count
        prompt.keep()
