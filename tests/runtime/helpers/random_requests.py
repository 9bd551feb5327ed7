"""Random requests of every kind, what they got, and whether that is what they get alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import pytest
from fake_adapters import install
from fake_grammars import FORMS, follows
from fake_model import VOCABULARY

from coppice.runtime.engine.core import Engine
from coppice.runtime.model.adapters.names import Adapter
from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.requests.logprobs import Logprobs
from coppice.runtime.requests.lora_request import LoRARequest
from coppice.runtime.requests.pooling_params import PoolingParams
from coppice.runtime.requests.pooling_recipe import EmbedRecipe, Recipe, ScoreRecipe
from coppice.runtime.requests.request import StepOutput
from coppice.runtime.requests.sampling_params import SamplingParams

Params: TypeAlias = SamplingParams | BeamSearchParams | PoolingParams

RECIPES = tuple(
    Recipe(True, EmbedRecipe(pooling, False, 1, None), ScoreRecipe(3, "softmax"))
    for pooling in ("last", "mean")
)
"""The fake model can be taken for any checkpoint."""


class Broken:
    """A logits processor that fails once `after` tokens were generated."""

    def __init__(self, after: int) -> None:
        self.after = after

    def __call__(self, generated: list[int], logits: Any) -> Any:
        if len(generated) >= self.after:
            raise ArithmeticError("on purpose")
        return logits


@dataclass(slots=True)
class Asked:
    """A request, and its outputs."""

    name: str
    prompt: list[int]
    params: Params
    salt: str | None
    tenant: str | None
    adapter: Adapter | None = None
    longest: int = 0  # tokens, as the engine allowed
    outputs: dict[int, list[StepOutput]] = field(default_factory=dict)  # by sequence
    cut: set[int] = field(default_factory=set)  # sequences that were aborted or failed
    formless: bool = False  # whether its form failed to compile
    alone: Asked | None = None  # itself, as it is served alone

    @property
    def beams(self) -> bool:
        return isinstance(self.params, BeamSearchParams)

    @property
    def pooled(self) -> bool:
        return isinstance(self.params, PoolingParams)

    @property
    def sequences(self) -> int:
        return self.params.n if isinstance(self.params, SamplingParams) else 1

    @property
    def form(self) -> Any:
        return None if isinstance(self.params, PoolingParams) else self.params.structured_outputs

    @property
    def lora_request(self) -> LoRARequest | None:
        return None if self.adapter is None else self.adapter.asked

    def tokens(self, index: int) -> list[int]:
        return [t for output in self.outputs.get(index, ()) for t in output.new_token_ids]

    def ended(self, index: int) -> bool:
        if index in self.cut:
            return True
        if self.beams:
            return bool(self.outputs)
        outputs = self.outputs.get(index)
        return bool(outputs) and outputs[-1].finish_reason is not None

    def add(self, engine: Engine, **more: Any) -> None:
        """Queues it in an engine."""
        add = engine.add_beam_search if self.beams else engine.add_request
        if self.pooled:
            add = engine.add_pooling
        add(
            self.name, self.prompt, self.params, cache_salt=self.salt, tenant=self.tenant,
            lora_request=self.lora_request, **more,
        )  # fmt: skip

    def check_form(self) -> None:
        """The texts have the form as far as they reach, and are whole where they end."""
        if self.form is None:
            return
        for index, outputs in self.outputs.items():
            last, where = outputs[-1], f"request {self.name}, sequence {index}"
            tokens = self.tokens(index)
            if last.finish_reason == "stop" and last.stop_reason is not None:
                tokens.pop()
            follow, whole = follows(self.form, tokens)
            assert follow, f"{where}: tokens {tokens} leave the form {self.form}"
            if last.finish_reason == "stop" and last.stop_reason is None and index not in self.cut:
                assert whole, f"{where}: tokens {tokens} end too early for {self.form}"

    def served_alone(self, engine: Engine) -> Asked:
        """Itself with the outputs that it gets alone in `engine`; served once."""
        if self.alone is not None:
            return self.alone
        params = self.params
        if not isinstance(params, PoolingParams):
            most = self.longest - len(self.prompt)
            params = replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))
        alone = self.alone = replace(self, params=params, outputs={}, cut=set())
        if self.adapter is not None:
            install(engine, self.adapter)
        alone.add(engine)
        while engine.has_unfinished():
            for output in engine.step():
                alone.outputs.setdefault(output.index, []).append(output)
        return alone

    def compare_with_alone(self, engine: Engine) -> None:
        """Serves it again, alone in `engine`, and compares all that came."""
        alone = self.served_alone(engine)
        for index, outputs in self.outputs.items():
            theirs = alone.outputs[index]
            if not self.beams:
                outputs, theirs = _singly(outputs), _singly(theirs)
            if index not in self.cut:
                assert len(outputs) == len(theirs), f"request {self.name}, sequence {index}"
            for mine, other in zip(outputs, theirs, strict=False):
                _compare(mine, other, f"request {self.name}, sequence {index}")
        if self.beams:
            assert len(self.outputs) == len(alone.outputs)


def random_tokens(rng: random.Random, count: int) -> list[int]:
    few = rng.choice([2, VOCABULARY])  # with two, prompts diverge and agree in many places
    return [rng.randrange(few) for _ in range(count)]


def random_params(rng: random.Random) -> Params:
    """Parameters of a request of any kind."""
    if rng.random() < 0.1:
        return PoolingParams(task=rng.choice(["embed", "score"]), use_activation=False)
    most = rng.choice([1, 2, 5, 9, 16])
    rules: dict[str, Any] = {
        "stop_token_ids": tuple(random_tokens(rng, rng.choice([0, 0, 1, 2]))),
        "logprobs": rng.choice([None, None, 0, 3, -1]),
    }
    if rng.random() < 0.25:
        rules["structured_outputs"] = rng.choice(FORMS)
        most = rng.choice([1, 2, 5, 9, 16, 24])
    else:
        rules["min_tokens"] = rng.choice([0, 0, min(3, most)])
        rules["ignore_eos"] = rng.random() < 0.5
    if rng.random() < 0.15:
        rules["logit_bias"] = {t: rng.choice([-100, -3, 4]) for t in random_tokens(rng, 3)}
    if rng.random() < 0.2:
        rules |= {"frequency_penalty": 1.5, "repetition_penalty": 1.3}
    if rng.random() < 0.25:
        width = rng.randint(1, 4)
        return BeamSearchParams(
            width, most, n=rng.choice([None, rng.randint(1, width)]),
            length_penalty=rng.choice([0.0, 0.5, 1.0, 2.0]),
            early_stopping=rng.choice([True, False, "never"]),
            temperature=rng.choice([0.0, 0.7]), **rules,
        )  # fmt: skip
    params = SamplingParams(
        n=rng.choice([1, 1, 1, 2, 3, 4]), temperature=rng.choice([0.0, 0.0, 1.0]),
        top_k=rng.choice([0, 0, 5]), seed=rng.randrange(1000), max_tokens=most, **rules,
    )  # fmt: skip
    if rng.random() < 0.2:
        params = replace(params, prompt_logprobs=rng.choice([0, 2, 30]))
    if rng.random() < 0.05:
        params = replace(params, logits_processors=(Broken(rng.randrange(4)),))
    return params


def _singly(outputs: list[StepOutput]) -> list[StepOutput]:
    """Outputs of a token each, which may have come several at a time."""
    single = []
    for output in outputs:
        tokens, logprobs = output.new_token_ids, output.logprobs
        last = len(tokens) - 1
        for place, token in enumerate(tokens):
            one = replace(
                output, new_token_ids=(token,),
                logprobs=None if logprobs is None else logprobs[place : place + 1],
            )  # fmt: skip
            if place < last:
                one.finish_reason = one.stop_reason = None
            single.append(one)
        if not tokens:
            single.append(output)
    return single


def _compare(mine: StepOutput, other: StepOutput, where: str) -> None:
    assert mine.new_token_ids == other.new_token_ids, where
    assert mine.finish_reason == other.finish_reason, where
    assert mine.stop_reason == other.stop_reason, where
    assert mine.score == pytest.approx(other.score, abs=1e-5), where
    assert mine.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-5), where
    _same_logprobs(mine.logprobs, other.logprobs, where)
    _same_logprobs(mine.prompt_logprobs, other.prompt_logprobs, where)
    assert (mine.pooled is None) == (other.pooled is None), where
    if mine.pooled is not None:
        np.testing.assert_allclose(mine.pooled, other.pooled, rtol=1e-3, atol=1e13, err_msg=where)


def _same_logprobs(mine: Logprobs | None, other: Logprobs | None, where: str) -> None:
    assert (mine is None) == (other is None), where
    if mine is None or other is None:
        return
    # The first token of a prompt has none.
    begin = 1 if len(mine) > 1 else 0
    for name in ("logprobs", "top_logprobs"):
        np.testing.assert_allclose(
            getattr(mine, name)[begin:], getattr(other, name)[begin:], atol=1e-5, err_msg=where
        )
    for name in ("ranks", "top_ids"):
        assert (getattr(mine, name)[begin:] == getattr(other, name)[begin:]).all(), where
