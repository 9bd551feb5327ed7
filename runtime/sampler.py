"""Chooses the next token of each sequence from its logits."""

from __future__ import annotations

import struct
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from coppice.kernels.transfer import Fetched, send, take
from coppice.runtime.logits import NO_CHOICE, apply_rules
from coppice.runtime.logprobs import Logprobs, log_probabilities, looked_up, read
from coppice.runtime.request import Sequence
from coppice.runtime.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was chosen for each row of a step."""

    tokens: list[int]
    logprobs: list[Logprobs | None]  # of the row's token, if asked for
    errors: dict[int, str]  # rows whose token means nothing, and why


class Sampling:
    """Tokens that are being chosen for the rows of a step: on the device, and on their way here."""

    def __init__(
        self,
        tokens: torch.Tensor,
        errors: dict[int, str],
        strict: Seq[int],
        choice: torch.Tensor,
        looked_up: Seq[tuple[Seq[int], Seq[torch.Tensor]]],
    ) -> None:
        """`choice` is bool [strict]; `looked_up` has rows and what was found of their tokens."""
        self.tokens = tokens  # int64 [R], on the device
        self._errors = errors
        self._strict = strict
        self._asked = [rows for rows, _ in looked_up]
        found = [tensor for _, tensors in looked_up for tensor in tensors]
        self._fetched = Fetched([tokens, choice, *found])

    def read(self) -> Sampled:
        """Waits until they are here."""
        tokens, choice, *found = self._fetched.wait()
        errors = dict(self._errors)
        for row, there_is_one in zip(self._strict, choice.tolist(), strict=True):
            if not there_is_one:
                errors.setdefault(row, NO_CHOICE)
        logprobs: list[Logprobs | None] = [None] * len(tokens)
        each = len(found) // max(len(self._asked), 1)
        for place, rows in enumerate(self._asked):
            entries = read(found[place * each : (place + 1) * each])
            for entry, row in enumerate(rows):
                logprobs[row] = entries[entry : entry + 1]
        return Sampled(tokens.tolist(), logprobs, errors)


class Sampler:
    """Greedy and random sampling of a mixed batch, every row by its own parameters.

    A random choice takes one uniform number, which depends only on the request's seed, the index of
    the sequence and the position of the token: so a seeded request gives the same tokens whatever
    else is in the batch, and after a preemption.

    FlashInfer's sampling kernels do not serve that: they draw their own numbers, by seed and by the
    row's place in the batch. Its kernels that only cut off and renormalise keep every token as
    probable as the last one that top-k or top-p leave, more than were asked for, and leave them in
    the vocabulary's order, in which the same number means another token.
    """

    def __init__(self, eos_token_ids: Seq[int]) -> None:
        self._eos = tuple(eos_token_ids)

    def sample(self, logits: torch.Tensor, sequences: Seq[Sequence]) -> Sampling:
        """One token a row. `logits` float32 [R, vocabulary], which may be changed in place.

        Logprobs are of the logits as they come. Then the rules of the rows are applied (see
        `apply_rules`), then temperature, top-k, top-p, min-p. Does not wait for the device, unless
        a logits processor does.
        """
        asked: dict[int, list[int]] = {}  # rows by the number of alternatives
        for row, sequence in enumerate(sequences):
            top = sequence.request.params.logprobs
            if top is not None:
                asked.setdefault(top, []).append(row)
        raw = {top: log_probabilities(_rows(logits, rows)) for top, rows in asked.items()}
        errors, strict, choice = apply_rules(logits, sequences, self._eos)
        tokens = choose_tokens(logits, sequences)
        found = [
            (rows, looked_up(raw[top], _rows(tokens, rows), top)) for top, rows in asked.items()
        ]
        return Sampling(tokens, errors, strict, choice, found)


def choose_tokens(logits: torch.Tensor, sequences: Seq[Sequence]) -> torch.Tensor:
    """A token of each row by its temperature, top-k, top-p and min-p, int64 [R].

    Stays on the device of the logits and does not wait for it.
    """
    tokens = logits.argmax(dim=-1)
    # Each kind by itself: a row's token must not depend on what the others ask for.
    for kind, choose in ((_is_plain, _sample_plain), (_is_filtered, _sample_filtered)):
        rows = [row for row, sequence in enumerate(sequences) if kind(sequence.request.params)]
        if rows and len(rows) == len(sequences):
            return choose(logits, sequences)
        if rows:
            (index,) = send([np.array(rows, np.int64)], logits.device)
            chosen = choose(logits.index_select(0, index), [sequences[row] for row in rows])
            tokens.index_copy_(0, index, chosen)
    return tokens


def _rows(tensor: torch.Tensor, rows: Seq[int]) -> torch.Tensor:
    """Some rows, ascending; the tensor itself where these are all."""
    return tensor if len(rows) == len(tensor) else take(tensor, rows)


def _is_plain(params: SamplingParams) -> bool:
    return not params.greedy and not _is_filtered(params)


def _is_filtered(params: SamplingParams) -> bool:
    return not params.greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)


def _sample_plain(logits: torch.Tensor, sequences: Seq[Sequence]) -> torch.Tensor:
    temperature, uniform = _columns(
        logits.device,
        [s.request.params.temperature for s in sequences],
        [uniform_number(s) for s in sequences],
    )
    return _invert((logits / temperature).softmax(dim=-1), uniform)


def _sample_filtered(logits: torch.Tensor, sequences: Seq[Sequence]) -> torch.Tensor:
    params = [sequence.request.params for sequence in sequences]
    vocabulary = logits.shape[1]
    top_ks = [p.top_k if 0 < p.top_k < vocabulary else vocabulary for p in params]
    temperature, top_k, top_p, min_p, uniform = _columns(
        logits.device,
        [p.temperature for p in params],
        top_ks,
        [p.top_p if p.top_p < 1 else torch.inf for p in params],
        [p.min_p for p in params],
        [uniform_number(sequence) for sequence in sequences],
    )
    # Sorted once, most probable first; with a small top-k everywhere only so many are sorted.
    logits, order = (logits / temperature).topk(max(top_ks), dim=-1)
    rank = torch.arange(logits.shape[1], device=logits.device)
    logits = logits.masked_fill(rank >= top_k, -torch.inf)
    probabilities = logits.softmax(dim=-1)
    # A token stays while those before it have not reached top_p yet: so the first always does.
    before = probabilities.cumsum(dim=-1) - probabilities
    keep = before < top_p
    keep &= probabilities >= min_p * probabilities[:, :1]
    chosen = _invert(probabilities * keep, uniform)
    return order.gather(1, chosen.unsqueeze(1)).squeeze(1)


def _columns(device: torch.device, *columns: Seq[float]) -> list[torch.Tensor]:
    """Numbers of each row as columns, float32 [R, 1], in one transfer."""
    return send([np.array(each, np.float32)[:, None] for each in columns], device)


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
