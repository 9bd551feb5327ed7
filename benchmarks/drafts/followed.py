"""Makes an engine's sequences follow given texts: all is computed, then the given token wins."""

from __future__ import annotations

import math
import random
import time
from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch

from coppice import Engine, SamplingParams, StructuredOutputsParams
from coppice.runtime.requests.request import Sequence
from coppice.runtime.sampling.sampler import Sampler, Sampling
from drafts.encoded import Text

# Tokens of an answer in JSON: near its last ones the form allows only what ends it in time.
_ROOM = 4096


class _GivenTokens(Sampler):
    """Raises the logit of the token that a text has next, and chooses as ever."""

    def __init__(self, eos_token_ids: Seq[int], answers: Mapping[str, array[int]]) -> None:
        super().__init__(eos_token_ids)
        self._answers = answers

    def sample(
        self,
        logits: torch.Tensor,
        sequences: Seq[Sequence],
        ahead: Seq[int] | None = None,
        chosen: torch.Tensor | None = None,  # by a graph, from logits that do not follow a text
    ) -> Sampling:
        tokens = []
        for row, sequence in enumerate(sequences):
            answer = self._answers[sequence.request.request_id]
            place = sequence.num_generated + (0 if ahead is None else ahead[row])
            tokens.append(answer[min(place, len(answer) - 1)])
        rows = torch.arange(len(tokens), device=logits.device)
        logits[rows, torch.tensor(tokens, dtype=torch.long, device=logits.device)] = 1e30
        return super().sample(logits, sequences, ahead)


class _GivenGuesses(Sampler):
    """Raises the logit of the true next token with a chance, else that of another token.

    It gets that chance as its probability, so the draft model is as sure as it is right. What is
    guessed at a place of a text is the same in each pass.
    """

    def __init__(
        self, eos_token_ids: Seq[int], answers: Mapping[str, array[int]], right: float
    ) -> None:
        super().__init__(eos_token_ids)
        self._answers, self._right = answers, right

    def sample(
        self,
        logits: torch.Tensor,
        sequences: Seq[Sequence],
        ahead: Seq[int] | None = None,
        chosen: torch.Tensor | None = None,  # by a graph, from logits that do not follow a text
    ) -> Sampling:
        for row, sequence in enumerate(sequences):
            name = sequence.request.request_id
            answer, place = self._answers[name], sequence.num_generated
            token = answer[min(place, len(answer) - 1)]
            rng = random.Random(f"{name} {place}")
            if rng.random() >= self._right:
                token = rng.randrange(logits.shape[1])
            others = logits[row].logsumexp(dim=-1)
            logits[row, token] = others + math.log(self._right / (1 - self._right))
        return super().sample(logits, sequences, ahead)


def guess(engine: Engine, texts: Seq[Text], right: float) -> None:
    """Has the engine's draft model foretell these texts, each token with the chance `right`."""
    model = engine.drafting.model
    assert model is not None
    answers = {str(number): text.answer for number, text in enumerate(texts)}
    model._sampler = _GivenGuesses(engine.model_config.eos_token_ids, answers, right)


class Followed:
    """One engine on its way through texts, at most `batch` at a time.

    Attributes:
        seconds: what its steps have taken so far.
        decoding: what those of them took that computed no prompt.
    """

    def __init__(self, engine: Engine, texts: Seq[Text], batch: int) -> None:
        self.seconds = self.decoding = 0.0
        self._engine = engine
        self._batch = batch
        answers = {str(number): text.answer for number, text in enumerate(texts)}
        # A logits processor would do the same by rules, which drafts verify row by row.
        steps, eos = engine._steps, engine.model_config.eos_token_ids
        steps._sampler = _GivenTokens(eos, answers)
        steps._path_sampler = _GivenTokens(eos, answers)  # of drafts whose rules need each token
        self._waiting = list(enumerate(texts))[::-1]
        self._running: dict[str, int] = {}  # tokens that are left of each
        self._unbegun: set[str] = set()  # those without a token
        self._left = self._tokens = sum(map(len, answers.values()))

    @property
    def left(self) -> float:
        """The share of the texts' tokens that are not generated yet; 0: it is at the end."""
        return self._left / self._tokens

    def step(self) -> None:
        """Makes one step, and times it. Raises RuntimeError if a text fails, or ends too early."""
        while self._waiting and len(self._running) < self._batch:
            number, text = self._waiting.pop()
            self._engine.add_request(str(number), text.prompt, _params(text))
            self._running[str(number)] = len(text.answer)
            self._unbegun.add(str(number))
        begun = time.perf_counter()
        outputs = self._engine.step()
        seconds = time.perf_counter() - begun
        self.seconds += seconds
        if not self._unbegun:
            self.decoding += seconds
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
            name = output.request_id
            self._unbegun.discard(name)
            new = min(len(output.new_token_ids), self._running[name])
            self._left -= new
            self._running[name] -= new
            if not self._running[name]:
                del self._running[name]
                self._engine.abort(name)
            elif output.finish_reason is not None:
                raise RuntimeError(f"text {name} ended before its end: {output.finish_reason}")


def _params(text: Text) -> SamplingParams:
    """Of a request that follows a text; one with a schema is ended by its reader."""
    if text.schema is None:
        return SamplingParams(temperature=0.0, max_tokens=len(text.answer), ignore_eos=True)
    form = StructuredOutputsParams(json=text.schema)
    return SamplingParams(temperature=0.0, max_tokens=_ROOM, structured_outputs=form)


def follow_in_turn(engines: Seq[Engine], texts: Seq[Text], batch: int) -> list[Followed]:
    """Has each engine follow all texts.

    They take turns step by step, the one next that is least far, so what else the machine does
    slows all of them alike.
    """
    sides = [Followed(engine, texts, batch) for engine in engines]
    while (side := max(sides, key=lambda each: each.left)).left:
        side.step()
    return sides
