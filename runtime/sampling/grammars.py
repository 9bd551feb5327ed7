"""Grammars, compiled with llguidance, and the masks of tokens that they allow.

A grammar is compiled once, in a thread of its own, since that may take seconds. Every sequence has
a copy of the compiled matcher, which takes the sequence's tokens and gives those that may follow.

References: Moskal et al., llguidance; Koo et al. 2024, Automata-based constraints for language
model decoding.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from threading import Lock
from typing import TypeAlias

import numpy as np
import torch

from coppice.kernels.transfer import send
from coppice.runtime.requests.request import Sequence
from coppice.runtime.requests.structured_outputs import StructuredOutputsParams
from coppice.runtime.sampling.endings import Ending
from coppice.runtime.sampling.forms.trial import LIMITS
from coppice.runtime.sampling.forms.trial_worker import Bytes
from coppice.runtime.sampling.grammar_library import (
    LLExecutor,
    LLMatcher,
    LLParserLimits,
    LLTokenizer,
    TokenizerWrapper,
    allocate_token_bitmask,
    fill_next_token_bitmask_par,
)
from coppice.runtime.sampling.grammar_source import source
from coppice.runtime.startup.light_transformers import load_tokenizer

_Kept: TypeAlias = OrderedDict[StructuredOutputsParams, Future["CompiledGrammar"]]
_IMPORTING = Lock()

MAX_COMPILED = 128  # grammars of a tenant that are kept for requests to come


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar that is ready for use.

    Attributes:
        matcher: at its beginning; sequences use copies.
        vocabulary: tokens that its masks cover, those beyond the model's included.
        tokenizer: of the model.
        of_bytes: the form for a tokenizer of 256 bytes; None unless it is JSON.
        lead: what comes before the form, for the model's tokens; None: nothing does.
    """

    matcher: LLMatcher
    vocabulary: int
    tokenizer: LLTokenizer
    of_bytes: LLMatcher | None = None
    lead: LLMatcher | None = None


class Grammars:
    """Compiles grammars for one tokenizer; the last `MAX_COMPILED` of each tenant are kept.

    Args:
        tokenizer: a directory with the tokenizer's files; it is read when first needed.
        vocabulary: size of the model's vocabulary.
        eos_token_ids: the tokens that may end a text.
    """

    def __init__(self, tokenizer: str | Path, vocabulary: int, eos_token_ids: Seq[int]) -> None:
        self._path = str(tokenizer)
        self._vocabulary = vocabulary
        self._eos = list(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._compiled: dict[str | None, _Kept] = {}
        # One thread: it also keeps the tokenizer from being read twice.
        self._thread = ThreadPoolExecutor(1, "coppice-grammars")

    def compiled(
        self, params: StructuredOutputsParams, tenant: str | None = None
    ) -> Future[CompiledGrammar]:
        """The grammar, ready now or later; it fails with ValueError if it can't be followed.

        Tenants share no grammars, and none takes the place of another's: the time to the first
        token would tell what others ask for. They share the thread, as they share steps: one waits
        while another's grammar is compiled, which tells that there is one, and not which.
        One that failed is compiled anew when it is next asked for, since some failures pass.
        """
        kept = self._compiled.setdefault(tenant, OrderedDict())
        found = kept.get(params)
        if found is None or (found.done() and found.exception() is not None):
            found = kept[params] = self._thread.submit(self._compile, params)
            if len(kept) > MAX_COMPILED:
                kept.popitem(last=False)
        kept.move_to_end(params)
        return found

    def close(self) -> None:
        """Ends the thread, after the grammar that it is compiling."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        if self._tokenizer is None:
            self._tokenizer = self._load()
        limits = LLParserLimits(**LIMITS)  # type: ignore[arg-type]
        grammar = source(params)
        matcher = LLMatcher(self._tokenizer, grammar.text, log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(f"{params.kind}: it cannot be followed: {matcher.get_error():.400}")
        made = CompiledGrammar(matcher, self._tokenizer.vocab_size, self._tokenizer)
        if params.kind not in ("json", "json_object"):
            return made
        if params.prefix is not None:  # its marks may be tokens, which bytes can't write
            grammar = source(replace(params, prefix=None))
            lead = f"start: prefix\n{params.prefix}"
            made = replace(made, lead=LLMatcher(self._tokenizer, lead, log_level=0, limits=limits))
        of_bytes = LLMatcher(_bytes(), grammar.text, log_level=0, limits=limits)
        return replace(made, of_bytes=of_bytes)

    def _load(self) -> LLTokenizer:
        if not self._eos:
            raise ValueError("structured_outputs needs a model with an end-of-text token")
        # Engines without grammars need none of this. Two threads that import transformers at the
        # same time may each find it half imported.
        with _IMPORTING:
            wrapped = load_tokenizer(self._path)
            from llguidance.hf import from_tokenizer
            from transformers import PreTrainedTokenizerFast

        if not isinstance(wrapped, PreTrainedTokenizerFast):
            raise ValueError(
                "structured_outputs needs a fast tokenizer, which this model does not have"
            )
        size = max(self._vocabulary, len(wrapped))
        return from_tokenizer(wrapped, n_vocab=size, eos_token=self._eos)


class GrammarState:
    """The position of one sequence in its grammar, and how its text may end."""

    __slots__ = ("ending", "matcher", "vocabulary", "_consumed")

    def __init__(self, grammar: CompiledGrammar) -> None:
        self.matcher = grammar.matcher.deep_copy()
        start = grammar.of_bytes
        self.ending = None if start is None else Ending(start, grammar.tokenizer, grammar.lead)
        self.vocabulary = grammar.vocabulary
        self._consumed = 0

    def forked(self) -> GrammarState:
        """The state of a sequence that continues from the same tokens."""
        other = copy(self)
        other.matcher = self.matcher.deep_copy()
        other.ending = None if self.ending is None else self.ending.forked()
        return other

    def update(self, sequence: Sequence) -> None:
        """Advances by the tokens that the sequence has generated since the last call."""
        begin = len(sequence.request.prompt_token_ids) + self._consumed
        if begin < len(sequence.tokens):
            self.matcher.consume_tokens(sequence.tokens[begin:].tolist())
            self._consumed = sequence.num_generated


def forbid_other_tokens(logits: torch.Tensor, states: Seq[tuple[int, GrammarState]]) -> None:
    """Sets to -inf, in the row of each state, the tokens that its grammar does not allow next.

    `logits` float32 [R, vocabulary] is changed in place. Masks of several rows are computed in
    parallel; if one failed, its `matcher.is_error()` is true afterwards. All states are of one
    vocabulary, which may have more tokens than the model.
    """
    masks = allocate_token_bitmask(len(states), states[0][1].vocabulary)
    matchers = [(state.matcher, place) for place, (_, state) in enumerate(states)]
    fill_next_token_bitmask_par(_executor(), matchers, masks)
    index = np.array([row for row, _ in states], np.int64)
    packed, rows = send([masks.view(np.uint8), index], logits.device)
    bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
    allowed = ((packed.unsqueeze(-1) >> bits) & 1).flatten(1)[:, : logits.shape[1]].bool()
    logits[rows] = logits[rows].masked_fill_(~allowed, -torch.inf)


@cache
def _bytes() -> LLTokenizer:
    """The tokenizer of 256 bytes."""
    return LLTokenizer(TokenizerWrapper(Bytes()), slices=[])


@cache
def _executor() -> LLExecutor:
    return LLExecutor()
