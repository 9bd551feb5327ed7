"""Chooses the next token of each sequence from its logits."""

from __future__ import annotations

import struct
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
import xxhash

from coppice.runtime.logits import apply_rules
from coppice.runtime.logprobs import Logprobs, log_probabilities, of_tokens
from coppice.runtime.request import Sequence
from coppice.runtime.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was chosen for each row of a step."""

    tokens: list[int]
    logprobs: list[Logprobs | None]  # of the row's token, if asked for
    errors: dict[int, str]  # rows whose token means nothing, and why


class Sampler:
    """Greedy and random sampling of a mixed batch, every row by its own parameters.

    A random choice takes one uniform number, which depends only on the request's seed, the index of
    the sequence and the position of the token: so a seeded request gives the same tokens whatever
    else is in the batch, and after a preemption.
    """

    def __init__(self, eos_token_ids: Seq[int]) -> None:
        self._eos = tuple(eos_token_ids)

    def sample(self, logits: torch.Tensor, sequences: Seq[Sequence]) -> Sampled:
        """One token a row. `logits` float32 [R, vocabulary], which may be changed in place.

        Logprobs are of the logits as they come. Then the rules of the rows are applied (see
        `apply_rules`), then temperature, top-k, top-p, min-p.
        """
        asked: dict[int, list[int]] = {}  # rows by the number of alternatives
        for row, sequence in enumerate(sequences):
            top = sequence.request.params.logprobs
            if top is not None:
                asked.setdefault(top, []).append(row)
        raw = {
            top: log_probabilities(logits if len(rows) == len(sequences) else logits[rows])
            for top, rows in asked.items()
        }
        errors = apply_rules(logits, sequences, self._eos)
        tokens = self._choose(logits, sequences)
        logprobs: list[Logprobs | None] = [None] * len(sequences)
        for top, rows in asked.items():
            found = of_tokens(raw[top], [tokens[row] for row in rows], top)
            for place, row in enumerate(rows):
                logprobs[row] = found[place : place + 1]
        return Sampled(tokens, logprobs, errors)

    @staticmethod
    def _choose(logits: torch.Tensor, sequences: Seq[Sequence]) -> list[int]:
        tokens: list[int] = logits.argmax(dim=-1).tolist()
        # Each kind by itself: a row's token must not depend on what the others ask for.
        for kind, choose in ((_is_plain, _sample_plain), (_is_filtered, _sample_filtered)):
            rows = [row for row, sequence in enumerate(sequences) if kind(sequence.request.params)]
            if rows:
                chosen = choose(
                    logits if len(rows) == len(sequences) else logits[rows],
                    [sequences[row] for row in rows],
                )
                for row, token in zip(rows, chosen.tolist(), strict=True):
                    tokens[row] = token
        return tokens


def _is_plain(params: SamplingParams) -> bool:
    return not params.greedy and not _is_filtered(params)


def _is_filtered(params: SamplingParams) -> bool:
    return not params.greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)


def _sample_plain(logits: torch.Tensor, sequences: Seq[Sequence]) -> torch.Tensor:
    temperature = _column([s.request.params.temperature for s in sequences], logits)
    uniform = _column([uniform_number(s) for s in sequences], logits)
    return _invert((logits / temperature).softmax(dim=-1), uniform)


def _sample_filtered(logits: torch.Tensor, sequences: Seq[Sequence]) -> torch.Tensor:
    params = [sequence.request.params for sequence in sequences]
    uniform = _column([uniform_number(sequence) for sequence in sequences], logits)
    vocabulary = logits.shape[1]
    top_k = [p.top_k if 0 < p.top_k < vocabulary else vocabulary for p in params]
    # Sorted once, most probable first; with a small top-k everywhere only so many are sorted.
    logits = logits / _column([p.temperature for p in params], logits)
    logits, order = logits.topk(max(top_k), dim=-1)
    rank = torch.arange(logits.shape[1], device=logits.device)
    logits = logits.masked_fill(rank >= _column(top_k, logits), -torch.inf)
    probabilities = logits.softmax(dim=-1)
    # A token stays while those before it have not reached top_p yet: so the first always does.
    before = probabilities.cumsum(dim=-1) - probabilities
    keep = before < _column([p.top_p if p.top_p < 1 else torch.inf for p in params], logits)
    keep &= probabilities >= _column([p.min_p for p in params], logits) * probabilities[:, :1]
    chosen = _invert(probabilities * keep, uniform)
    return order.gather(1, chosen.unsqueeze(1)).squeeze(1)


def _column(values: Seq[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device).unsqueeze(1)


def uniform_number(sequence: Sequence) -> float:
    """A number in [0, 1) that depends on seed, sequence index and position alone.

    A counter-based generator (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC'11)
    with xxh3 as the mixing function: no state to keep, to copy on a fork, or to rewind.
    """
    key = struct.pack("<qqq", sequence.request.seed, sequence.index, len(sequence.tokens))
    return (xxhash.xxh3_64_intdigest(key) >> 11) * 2.0**-53


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first index at which the running sum of weights [R, V] exceeds uniform [R, 1] of it."""
    sums = weights.cumsum(dim=-1, dtype=torch.float64)
    index = torch.searchsorted(sums, uniform.double() * sums[:, -1:], right=True).squeeze(1)
    # Rounding may reach the very end; the last token of any weight is meant then.
    last = weights.shape[1] - 1 - (weights > 0).flip(-1).int().argmax(dim=-1)
    return torch.minimum(index, last)
