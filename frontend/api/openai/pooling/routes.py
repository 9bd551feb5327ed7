"""The routes of embeddings, score and rerank."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from aiohttp import web

from coppice.frontend.api.cached import cached_details, summed
from coppice.frontend.api.context import ContextExceeded
from coppice.frontend.api.openai.pooling.bodies import (
    EmbeddingAnswer,
    EmbeddingBody,
    Json,
    PoolingBody,
    RerankAnswer,
    RerankBody,
    ScoreAnswer,
    ScoreBody,
)
from coppice.frontend.api.served_model import ServedModel
from coppice.frontend.client.engine import EngineClient
from coppice.frontend.errors import BadRequest, bad_value
from coppice.frontend.http.ids import fresh_id
from coppice.frontend.http.json_answers import CHARACTERS, JsonAnswers
from coppice.frontend.http.json_bodies import JsonBodies
from coppice.frontend.http.middleware import NOTE
from coppice.frontend.http.routes import Route, json_answer
from coppice.frontend.strict import read
from coppice.frontend.text.pooling_prompts import cosine, pair_ids, pairs, text_ids
from coppice.frontend.text.threads import TokenizerThreads
from coppice.runtime.requests.pooling_params import PoolingParams
from coppice.runtime.requests.pooling_recipe import ScoreRecipe
from coppice.runtime.requests.request import PromptTooLong, QueueFull, StepOutput

Asked = TypeVar("Asked", bound=PoolingBody)
Prompts = list[list[int]]

_VALUES_OF_ITEM = 8  # of an answer's list, beside its numbers
_NUMBERS_OF_BASE64 = 32  # that take as long as one that is written as decimals


class PoolingRoutes:
    """The routes, over the engine of one model, which is made for some of them or for none.

    Args:
        engine: a started engine.
        model: whose names requests may give.
        bodies: reads the requests.
        writer: writes the answers.
        threads: run the tokenizer.
        timeout: seconds that a request may take; None: any time.
        check_open: raises EngineStopped once the server takes no more requests.
    """

    def __init__(
        self,
        engine: EngineClient,
        model: ServedModel,
        bodies: JsonBodies,
        writer: JsonAnswers,
        threads: TokenizerThreads,
        timeout: float | None,
        check_open: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._model = model
        self._bodies = bodies
        self._writer = writer
        self._threads = threads
        self._timeout = timeout
        self._check_open = check_open

    def routes(self) -> list[Route]:
        """For `add_routes`."""
        score = json_answer(ScoreAnswer.model_json_schema())
        rerank = json_answer(RerankAnswer.model_json_schema())
        of_score, of_rerank = ScoreBody.model_json_schema(), RerankBody.model_json_schema()
        best = "Sort documents by their relevance for a query"
        return [
            Route(
                "POST",
                "/v1/embeddings",
                self._embeddings,
                "Turn texts into vectors",
                json_answer(EmbeddingAnswer.model_json_schema()),
                body=EmbeddingBody.model_json_schema(),
            ),
            *(
                Route("POST", path, self._score, "Score pairs of texts", score, body=of_score)
                for path in ("/score", "/v1/score")
            ),
            *(
                Route("POST", path, self._rerank, best, rerank, body=of_rerank)
                for path in ("/rerank", "/v1/rerank", "/v2/rerank")
            ),
        ]

    async def _embeddings(self, request: web.Request) -> web.Response:
        body, asked = await self._read(request, EmbeddingBody)
        params = PoolingParams("embed", asked.dimensions, asked.normalize)
        self._check(params, "input", body)
        given = asked.input
        single = isinstance(given, str) or isinstance(given[0], int)
        items: Sequence[Any] = [given] if single else given
        most = self._most(asked)

        def prompts() -> Prompts:
            return [
                self._text(item, most)
                if isinstance(item, str)
                else item[-most:]
                if most is not None
                else item
                for item in items
            ]

        outputs = await self._run(request, body, asked, params, prompts, "input")
        encode: Callable[[StepOutput], Any] = _numbers
        values = _values(outputs)
        if asked.encoding_format == "base64":
            encode, values = _base64, values // _NUMBERS_OF_BASE64

        def answer() -> Json:
            data = [
                {"index": index, "object": "embedding", "embedding": encode(output)}
                for index, output in enumerate(outputs)
            ]
            return self._list("embd", asked, data, outputs)

        return await self._writer.write(answer, values)

    async def _score(self, request: web.Request) -> web.Response:
        body, asked = await self._read(request, ScoreBody)
        names = ("queries", "documents") if asked.queries is not None else ("text_1", "text_2")
        first, second = getattr(asked, names[0]), getattr(asked, names[1])
        for name, value in zip(names, (first, second), strict=True):
            if value is None:
                raise BadRequest(f"{name} is required", param=name)
        for name in ("text_1", "text_2", "queries", "documents"):
            if name not in names and getattr(asked, name) is not None:
                raise BadRequest(f"{name} can't be combined with {names[0]}", param=name)
        try:
            asked_pairs = pairs(names, first, second)
        except ValueError as error:
            raise bad_value(error, body) from error
        use = asked.use_activation
        scored, outputs = await self._scores(request, body, asked, asked_pairs, names[1], use)

        def answer() -> Json:
            data = [
                {"index": index, "object": "score", "score": score}
                for index, score in enumerate(scored())
            ]
            return self._list("score", asked, data, outputs)

        return await self._writer.write(answer, _values(outputs, asked_pairs))

    async def _rerank(self, request: web.Request) -> web.Response:
        body, asked = await self._read(request, RerankBody)
        found = [(asked.query, document) for document in asked.documents]
        use = asked.use_activation
        scored, outputs = await self._scores(request, body, asked, found, "documents", use)

        def answer() -> Json:
            scores = scored()
            order = sorted(range(len(scores)), key=lambda index: -scores[index])
            results: list[Json] = [
                {"index": index, "relevance_score": scores[index]}
                | ({"document": {"text": asked.documents[index]}} if asked.return_documents else {})
                for index in order[: asked.top_n or None]
            ]
            return {
                "id": f"rerank-{fresh_id()}",
                "model": self._model.as_asked(asked.model),
                "results": results,
                "usage": _usage(outputs),
            }

        values = _values(outputs, found)
        values += sum(len(document) // CHARACTERS for document in asked.documents)
        return await self._writer.write(answer, values)

    async def _scores(
        self,
        request: web.Request,
        body: Json,
        asked: PoolingBody,
        found: Sequence[tuple[str, str]],
        field: str,
        use_activation: bool | None,
    ) -> tuple[Callable[[], list[float]], list[StepOutput]]:
        """What returns the score of each pair, and the outputs that it is made of.

        A score is the cosine of a pair's vectors if the model makes only these.
        """
        most, recipe = self._most(asked), self._engine.recipe.score
        if isinstance(recipe, ScoreRecipe):
            if recipe.labels != 1:
                raise BadRequest(
                    f"model: its classifier has {recipe.labels} labels; a score is one number",
                    param="model",
                )

            def written() -> Prompts:
                tokenizer, longest = self._engine.tokenizer, self._engine.max_model_len
                return [pair_ids(tokenizer, recipe, *p, most, longest=longest) for p in found]

            params = PoolingParams("score", use_activation=use_activation)
            outputs = await self._run(request, body, asked, params, written, field)
            return lambda: [_numbers(output)[0] for output in outputs], outputs
        if isinstance(self._engine.recipe.embed, str):
            self._check(PoolingParams("score"), field, body)
        texts = list(dict.fromkeys(text for pair in found for text in pair))

        def each() -> Prompts:
            return [self._text(text, most) for text in texts]

        outputs = await self._run(request, body, asked, PoolingParams(), each, field)

        def cosines() -> list[float]:
            vectors = dict(zip(texts, map(_numbers, outputs), strict=True))
            return [cosine(vectors[a], vectors[b]) for a, b in found]

        return cosines, outputs

    async def _read(self, request: web.Request, model: type[Asked]) -> tuple[Json, Asked]:
        self._check_open()
        body, asked = await self._bodies.read(request, partial(read, model))
        self._model.check(asked.model)
        return body, asked

    def _check(self, params: PoolingParams, field: str, body: Json) -> None:
        """Raises BadRequest if the model is not made for this."""
        try:
            self._engine.recipe.check(params)
        except ValueError as error:
            raise bad_value(error, body) from error

    def _most(self, asked: PoolingBody) -> int | None:
        """The tokens to which a prompt is shortened; None: it is not."""
        most = asked.truncate_prompt_tokens
        if most == 0:
            raise BadRequest(
                "truncate_prompt_tokens must be at least 1, or -1 for the model's length, got 0",
                param="truncate_prompt_tokens",
            )
        return self._engine.max_model_len if most == -1 else most

    def _text(self, text: str, most: int | None) -> list[int]:
        return text_ids(self._engine.tokenizer, text, most, longest=self._engine.max_model_len)

    async def _run(
        self,
        request: web.Request,
        body: Json,
        asked: PoolingBody,
        params: PoolingParams,
        prompts: Callable[[], Prompts],
        field: str,
    ) -> list[StepOutput]:
        """The outputs of the prompts that `prompts` makes in a thread of the field `field`."""
        note = request[NOTE]
        size = len(await request.read())
        try:
            async with asyncio.timeout(self._timeout):
                outputs = await self._engine.pool(
                    await self._threads.run(prompts, size=size, long=True),
                    params,
                    cache_salt=asked.cache_salt,
                    tenant=note.tenant,
                    priority=asked.priority,
                    lora_request=self._model.adapter(asked.model),
                )
        except TimeoutError:
            text = f"the request took longer than request_timeout, {self._timeout:g} s"
            raise TimeoutError(text) from None
        except PromptTooLong as error:
            raise ContextExceeded(error, field) from error
        except ValueError as error:
            raise bad_value(error, body) from error
        except QueueFull as error:
            raise BadRequest(str(error), status=429, kind="rate_limit_error") from error
        usage = _usage(outputs)
        note.fields["prompt_tokens"] = usage["prompt_tokens"]
        note.fields["cached_tokens"] = usage["prompt_tokens_details"]["cached_tokens"]
        return outputs

    def _list(
        self, prefix: str, asked: PoolingBody, data: Sequence[Json], outputs: Sequence[StepOutput]
    ) -> Json:
        return {
            "id": f"{prefix}-{fresh_id()}",
            "object": "list",
            "created": int(time.time()),
            "model": self._model.as_asked(asked.model),
            "data": data,
            "usage": _usage(outputs),
        }


def _values(outputs: Sequence[StepOutput], found: Sequence[tuple[str, str]] = ()) -> int:
    """About how many JSON values all numbers of the outputs are, and at most.

    With the pairs that were `found`, what their cosines cost, too: each reads two vectors.
    """
    sizes = [output.pooled.size for output in outputs if output.pooled is not None]
    of_items = _VALUES_OF_ITEM * (len(outputs) + len(found))
    return sum(sizes) + len(found) * max(sizes, default=0) + of_items


def _numbers(output: StepOutput) -> list[float]:
    assert output.pooled is not None
    numbers: list[float] = output.pooled.tolist()
    return numbers


def _base64(output: StepOutput) -> str:
    assert output.pooled is not None
    return base64.b64encode(output.pooled.astype("<f4").tobytes()).decode()


def _usage(outputs: Sequence[StepOutput]) -> Json:
    total = sum(output.num_prompt_tokens for output in outputs)
    cached = sum(output.cached_tokens for output in outputs)
    by_tier = summed(output.cached_by_tier for output in outputs)
    return {
        "prompt_tokens": total,
        "total_tokens": total,
        "completion_tokens": 0,
        "prompt_tokens_details": cached_details(cached, by_tier),
    }
