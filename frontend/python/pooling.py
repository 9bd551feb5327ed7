"""Vectors and scores in Python: many prompts in, under vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coppice.frontend.python.batches import Adapters, adapter_of_each
from coppice.frontend.python.progress import Bar, UseTqdm
from coppice.frontend.python.prompts import EncodedPrompt
from coppice.frontend.text.engine import TextEngine
from coppice.frontend.text.pooling_prompts import cosine, pair_ids, pairs
from coppice.frontend.text.tokenizer import Tokenizer
from coppice.runtime.requests.lora_request import LoRARequest
from coppice.runtime.requests.pooling_params import PoolingParams
from coppice.runtime.requests.pooling_recipe import Recipe, ScoreRecipe
from coppice.runtime.requests.request import StepOutput


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A vector."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """A prompt with its vector; `cached_tokens` of its tokens were reused."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    cached_tokens: int
    finished: bool = True


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """A score."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """A pair's score; `prompt_token_ids` are of the pair, or of both texts of a cosine."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    cached_tokens: int
    finished: bool = True


def embed(
    engine: TextEngine,
    prompts: Sequence[EncodedPrompt],
    params: PoolingParams,
    use_tqdm: UseTqdm,
    lora_request: Adapters = None,
) -> list[EmbeddingRequestOutput]:
    """The vector of each prompt. Raises ValueError, and RuntimeError if a step failed."""
    return vectors(prompts, _run(engine, prompts, params, use_tqdm, lora_request))


def vectors(
    prompts: Sequence[EncodedPrompt], outputs: Sequence[StepOutput]
) -> list[EmbeddingRequestOutput]:
    """What the engine made of the prompts, in their order."""
    return [
        EmbeddingRequestOutput(
            output.request_id,
            EmbeddingOutput(_numbers(output)),
            prompt.token_ids,
            output.cached_tokens,
        )
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def score(
    engine: TextEngine,
    first: str | Sequence[str],
    second: str | Sequence[str],
    use_activation: bool | None,
    use_tqdm: UseTqdm,
    lora_request: LoRARequest | None = None,
) -> list[ScoringRequestOutput]:
    """The score of each pair. Raises ValueError, and RuntimeError if a step failed."""
    core = engine.engine
    asked = Scoring(
        engine.tokenizer, core.runner.recipe, core.max_model_len, first, second, use_activation
    )
    return asked.scores(_run(engine, asked.prompts, asked.params, use_tqdm, lora_request))


class Scoring:
    """Pairs of texts that are to be scored, by a classifier or by the cosine of their vectors.

    Attributes:
        prompts: what the engine is asked for: each pair, or each text.
        params: how it is asked.
    """

    prompts: list[EncodedPrompt]
    params: PoolingParams

    def __init__(
        self,
        tokenizer: Tokenizer,
        recipe: Recipe,
        longest: int,
        first: str | Sequence[str],
        second: str | Sequence[str],
        use_activation: bool | None,
    ) -> None:
        """`longest`: most tokens of a prompt. Raises ValueError if the pairs can't be scored."""
        pairing = recipe.score
        self._pairs = pairs(("text_1", "text_2"), first, second)
        self._texts: list[str] | None = None  # of vectors
        if isinstance(pairing, ScoreRecipe):
            if pairing.labels != 1:
                raise ValueError(
                    f"model: its classifier has {pairing.labels} labels; a score is one number"
                )
            self.params = PoolingParams("score", use_activation=use_activation)
            self.prompts = [
                EncodedPrompt(None, pair_ids(tokenizer, pairing, a, b, None, longest=longest))
                for a, b in self._pairs
            ]
            return
        if isinstance(recipe.embed, str):
            recipe.check(PoolingParams("score"))
        self.params = PoolingParams()
        self._texts = list(dict.fromkeys(text for pair in self._pairs for text in pair))
        self.prompts = [
            EncodedPrompt(text, tokenizer.encode(text, longest=longest)) for text in self._texts
        ]

    def scores(self, outputs: Sequence[StepOutput]) -> list[ScoringRequestOutput]:
        """The score of each pair, from what the engine made of the prompts."""
        if self._texts is None:
            return [
                ScoringRequestOutput(
                    output.request_id,
                    ScoringOutput(_numbers(output)[0]),
                    prompt.token_ids,
                    output.cached_tokens,
                )
                for prompt, output in zip(self.prompts, outputs, strict=True)
            ]
        made = dict(zip(self._texts, vectors(self.prompts, outputs), strict=True))
        return [
            ScoringRequestOutput(
                made[b].request_id,
                ScoringOutput(cosine(made[a].outputs.embedding, made[b].outputs.embedding)),
                made[a].prompt_token_ids + made[b].prompt_token_ids,
                made[a].cached_tokens + made[b].cached_tokens,
            )
            for a, b in self._pairs
        ]


def _run(
    engine: TextEngine,
    prompts: Sequence[EncodedPrompt],
    params: PoolingParams,
    use_tqdm: UseTqdm,
    lora_request: Adapters,
) -> list[StepOutput]:
    """The outputs of the prompts, in their order; nothing of them runs on after an error."""
    core, results = engine.engine, dict[str, StepOutput]()
    names = [f"pool-{index}" for index in range(len(prompts))]
    adapters = adapter_of_each(lora_request, len(prompts))
    try:
        for index, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
            try:
                core.add_pooling(
                    name,
                    prompt.token_ids,
                    params,
                    cache_salt=prompt.cache_salt,
                    lora_request=adapters[index],
                )
            except ValueError as error:
                raise ValueError(f"prompts[{index}]: {error}") from error
        with Bar(len(names), use_tqdm) as bar:
            while len(results) < len(names):
                if not core.has_unfinished():
                    raise RuntimeError("the engine lost requests for vectors or scores")
                results |= {output.request_id: output for output in core.step()}
                bar.update(len(results), 0)
    finally:
        for name in names:
            if name not in results:
                core.abort(name)
    for output in results.values():
        if output.error is not None:
            raise RuntimeError(output.error)
    return [results[name] for name in names]


def _numbers(output: StepOutput) -> list[float]:
    assert output.pooled is not None
    return [float(number) for number in output.pooled]
