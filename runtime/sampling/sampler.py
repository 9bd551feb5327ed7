"""Chooses the next token of each sequence from its logits."""

from __future__ import annotations

import struct
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from coppice.kernels.sampling.choose import choose, likeliest
from coppice.kernels.sampling.columns import COLUMNS, MIN_P, TEMPERATURE, TOP_K, TOP_P, UNIFORM
from coppice.kernels.transfer import Fetched, take
from coppice.runtime.requests.logprobs import Logprobs
from coppice.runtime.requests.request import Sequence
from coppice.runtime.sampling.logit_rules import (
    NO_CHOICE,
    apply_rules,
    leave_room,
    may_have_rules,
)
from coppice.runtime.sampling.logprob_rows import log_probabilities, looked_up, read


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was chosen for each row of a step."""

    tokens: list[int]
    logprobs: list[Logprobs | None]  # of the row's token, if asked for
    errors: dict[int, str]  # rows whose token is not valid, and why


class Sampling:
    """Tokens that are being chosen for a step's rows: on the device, then copied to the host."""

    def __init__(
        self,
        tokens: torch.Tensor,
        errors: dict[int, str],
        strict: Seq[int],
        choice: torch.Tensor,
        looked_up: Seq[tuple[Seq[int], Seq[torch.Tensor]]],
    ) -> None:
        """`choice` is bool [strict]; `looked_up` has rows and the logprobs found for them."""
        self.tokens = tokens  # int64 [R], on the device
        self._errors = errors
        self._strict = strict
        self._asked = [rows for rows, _ in looked_up]
        found = [tensor for _, tensors in looked_up for tensor in tensors]
        self._fetched = Fetched([tokens, choice, *found])

    def read(self) -> Sampled:
        """Waits until the tokens have arrived."""
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


class _Rows:
    """The parameters of a batch's sequences as arrays, kept while the batch stays the same.

    Attributes:
        sequences: one for each row of logits.
        alone: whether the tokens follow from logits and columns alone: no row has rules, stands for
            several samples, or is a beam.
        asked: rows with logprobs, by the number of alternatives.
        ruled: rows that may have rules (see `change_logits`).
        greedy: whether all rows are.
        columns, keys: parameters and random states of the rows.
    """

    __slots__ = ("alone", "asked", "columns", "greedy", "keys", "ruled", "sequences")

    def __init__(self, sequences: Seq[Sequence], vocabulary: int) -> None:
        self.sequences = list(sequences)
        params = [sequence.request.params for sequence in sequences]
        self.asked: dict[int, list[int]] = {}
        for row, each in enumerate(params):
            if each.logprobs is not None:
                self.asked.setdefault(each.logprobs, []).append(row)
        self.ruled = [row for row, sequence in enumerate(sequences) if may_have_rules(sequence)]
        self.alone = not self.ruled and not any(
            each.request.beam_search or (each.request.params.n > 1 and not each.forked)
            for each in sequences
        )
        self.greedy = all(each.greedy for each in params)
        self.columns = np.zeros((len(params), COLUMNS))
        self.columns[:, TEMPERATURE] = [1 if each.greedy else each.temperature for each in params]
        self.columns[:, TOP_K] = [
            1 if each.greedy else each.top_k if each.top_k > 0 else vocabulary for each in params
        ]
        self.columns[:, TOP_P] = [each.top_p for each in params]
        self.columns[:, MIN_P] = [each.min_p for each in params]
        self.keys = np.array([_key(sequence) for sequence in sequences], np.uint64)

    def with_numbers(self, ahead: Seq[int] | None) -> np.ndarray:
        """The columns, with a new uniform number in each row, unless all are greedy."""
        if self.greedy:
            return self.columns
        lengths = np.array([len(sequence.tokens) for sequence in self.sequences], np.uint64)
        if ahead is not None:
            lengths += np.array(ahead, np.uint64)
        self.columns[:, UNIFORM] = _uniform(self.keys, lengths)
        return self.columns


class Sampler:
    """Greedy and random sampling of a mixed batch, every row by its own parameters.

    A random choice takes one uniform number, which depends only on the request's seed, the index of
    the sequence and the position of the token: so a seeded request gives the same tokens in any
    batch, and after a preemption.
    """

    def __init__(self, eos_token_ids: Seq[int]) -> None:
        self._eos = tuple(eos_token_ids)
        self._rows = _Rows((), 0)

    def columns(
        self, sequences: Seq[Sequence], vocabulary: int, ahead: Seq[int] | None = None
    ) -> np.ndarray | None:
        """The parameters by which `choose` gives the tokens of rows as `sample` would.

        None if more is needed, rules for example. For `ahead` see there.
        """
        if self._rows.sequences != sequences:
            self._rows = _Rows(sequences, vocabulary)
        return self._rows.with_numbers(ahead) if self._rows.alone else None

    def sample(
        self,
        logits: torch.Tensor,
        sequences: Seq[Sequence],
        ahead: Seq[int] | None = None,
        chosen: torch.Tensor | None = None,
    ) -> Sampling:
        """One token a row. `logits` float32 [R, vocabulary], which may be changed in place.

        Logprobs are of the logits as they come. Then the rules of the rows are applied (see
        `apply_rules`), then temperature, top-k, top-p, min-p. Does not wait for the device, unless
        a logits processor does. While the sequences are those of the last call, little Python runs
        for each of them.

        A row may stand for a place in a draft, this many tokens `ahead` of the end of its sequence,
        if its sequence has no rules: these need the tokens before it.

        `chosen` are tokens int64 [R] that were chosen by the last `columns`. They are taken unless
        the rows are others now.
        """
        if self._rows.sequences != sequences:
            self._rows, chosen = _Rows(sequences, logits.shape[1]), None
        rows = self._rows
        raw = {top: log_probabilities(_rows(logits, each)) for top, each in rows.asked.items()}
        errors, strict, choice = apply_rules(logits, sequences, self._eos, rows.ruled)
        if chosen is not None:
            tokens = chosen
        elif rows.greedy:
            tokens = likeliest(logits)
        else:
            tokens = choose(logits, rows.with_numbers(ahead))
        if rows.ruled:

            def again(row: int) -> int:
                if sequences[row].request.params.greedy:
                    return int(logits[row].argmax())
                return int(choose(logits[row : row + 1], rows.columns[row : row + 1])[0])

            leave_room(logits, tokens, sequences, rows.ruled, again)
        found = [
            (each, looked_up(raw[top], _rows(tokens, each), top))
            for top, each in rows.asked.items()
        ]
        return Sampling(tokens, errors, strict, choice, found)


def _rows(tensor: torch.Tensor, rows: Seq[int]) -> torch.Tensor:
    """Some rows, ascending; the tensor itself where these are all."""
    return tensor if len(rows) == len(tensor) else take(tensor, rows)


def _key(sequence: Sequence) -> int:
    """The state with which the random numbers of a sequence begin, from its seed and index."""
    return xxhash.xxh3_64_intdigest(struct.pack("<qq", sequence.request.seed, sequence.index))


def _uniform(keys: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Float64 numbers in [0, 1) from uint64 keys and positions, elementwise.

    Each is the number that SplitMix64 (Steele, Lea and Flood, Fast splittable pseudorandom number
    generators, OOPSLA'14), begun from the key, gives after as many steps as the position: there is
    no state to keep, to copy on a fork, or to rewind.
    """
    mixed = keys + lengths * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(11)) * 2.0**-53
