"""The Python API for coroutines: `async for` over the outputs of many requests at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from coppice.frontend.chat.budget import bounded_after
from coppice.frontend.chat.messages import Message
from coppice.frontend.chat.template import encode_chat
from coppice.frontend.client.engine import EngineClient
from coppice.frontend.client.process import EngineProcess
from coppice.frontend.python.batches import check_adapters
from coppice.frontend.python.forms import check_form
from coppice.frontend.python.growing import GrowingOutput
from coppice.frontend.python.options import Configured
from coppice.frontend.python.pooling import (
    EmbeddingRequestOutput,
    Scoring,
    ScoringRequestOutput,
    vectors,
)
from coppice.frontend.python.prompts import EncodedPrompt, Prompt, encoded, encoded_prompt
from coppice.frontend.text.model.loading import load_around
from coppice.frontend.text.model.options import TextOptions
from coppice.frontend.text.outputs import RequestOutput
from coppice.frontend.text.threads import TokenizerThreads
from coppice.runtime.config import EngineConfig
from coppice.runtime.report.snapshot import CacheReport
from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.requests.lora_request import LoRARequest
from coppice.runtime.requests.pooling_params import PoolingParams
from coppice.runtime.requests.request import StepOutput
from coppice.runtime.requests.sampling_params import SamplingParams


class AsyncLLM(Configured):
    """A model for the coroutines of one event loop; its engine has a process of its own.

    The process starts with the first request, with `start`, or with `async with`, at whose end it
    is shut down. If it dies, requests that run fail with EngineStopped, and another one starts, as
    in the server. A script needs `if __name__ == "__main__":` around its own start, since Python
    imports it again in the new process.

        async with AsyncLLM("demo") as llm:
            async for output in llm.generate("Hello", SamplingParams(max_tokens=32)):
                print(output.outputs[0].text)
    """

    def _load(self, config: EngineConfig, text: TextOptions) -> None:
        loaded = load_around(config, text)
        self._tokenizer = loaded.tokenizer
        self._engine = EngineClient(
            partial(EngineProcess, loaded.config, **loaded.engine_arguments),
            loaded.tokenizer,
            loaded.defaults,
        )
        self._threads = TokenizerThreads()
        self._starting: asyncio.Future[Any] | None = None
        self._closed = False

    # -- its life ----------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts the engine's process and waits until the model is loaded; once is enough.

        Raises what the engine raises while loading; RuntimeError after `shutdown`.
        """
        if self._closed:
            raise RuntimeError("this AsyncLLM was shut down; make a new one")
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._engine.start())
        await asyncio.shield(self._starting)

    async def shutdown(self) -> None:
        """Ends the engine's process; requests that still run fail. All further calls are refused.

        Without effect if it was shut down.
        """
        if self._closed:
            return
        self._closed = True
        self._threads.close()
        if self._starting is not None:
            self._starting.cancel()
            await self._engine.stop()

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.shutdown()

    # -- requests ----------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continues a prompt: yields what there is so far, again and again, until it is finished.

        Leaving the loop early ends the request and frees its pages: at once if nothing else holds
        the iterator, else with its `aclose`.

        Args:
            prompt: text, token ids, or `{"prompt": ...}` or `{"prompt_token_ids": ...}`, which may
                carry a `cache_salt`.
            sampling_params: `get_default_sampling_params()` if not given.
            lora_request: its adapter, which is loaded if it is not yet.
            priority: class under the scheduling policy "priority"; lower ones run first.

        Raises:
            ValueError: the prompt or the parameters are not acceptable.
            QueueFull: too much waits already. RequestFailed: a step failed, or the engine stopped.
        """
        encode = partial(encoded_prompt, "prompt", prompt, self._tokenizer)
        return self._run(encode, sampling_params, priority=priority, lora_request=lora_request)

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answers a conversation with the model's chat template.

        The rest is as for `generate`, and for `LLM.chat`.
        """

        def encode() -> EncodedPrompt:
            ids = encode_chat(
                self._tokenizer,
                messages,
                tools=tools,
                chat_template=chat_template,
                template_arguments=chat_template_kwargs,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
            return EncodedPrompt(None, ids)

        return self._run(encode, sampling_params, priority=priority, lora_request=lora_request)

    async def beam_search(
        self, prompt: Prompt, params: BeamSearchParams, *, lora_request: LoRARequest | None = None
    ) -> RequestOutput:
        """The most probable continuations of a prompt, the best first. Raises as `generate`."""
        if not isinstance(params, BeamSearchParams) or params.best_so_far:
            raise ValueError(f"params must be BeamSearchParams without best_so_far, got {params!r}")
        encode = partial(encoded_prompt, "prompt", prompt, self._tokenizer)
        last = None
        async for output in self._run(
            encode, params.sampling, beam=params, lora_request=lora_request
        ):
            last = output
        assert last is not None
        return last

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The vector of each prompt, as `LLM.embed`. Raises as `generate`."""
        check_adapters(lora_request)
        await self.start()
        parsed = await self._threads.run(encoded, prompts, self._tokenizer, long=True)
        outputs = await self._pool(parsed, pooling_params or PoolingParams(), lora_request)
        return vectors(parsed, outputs)

    async def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        use_activation: bool | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """The score of each pair of texts, as `LLM.score`. Raises as `generate`."""
        check_adapters(lora_request)
        await self.start()
        recipe, longest = self._engine.recipe, self._engine.max_model_len
        given = (self._tokenizer, recipe, longest, text_1, text_2, use_activation)
        asked = await self._threads.run(Scoring, *given, long=True)
        return asked.scores(await self._pool(asked.prompts, asked.params, lora_request))

    async def _pool(
        self,
        prompts: Sequence[EncodedPrompt],
        params: PoolingParams,
        lora_request: LoRARequest | None,
    ) -> list[StepOutput]:
        """What the engine makes of the prompts, in their order."""
        found: dict[int, StepOutput] = {}
        salts = dict.fromkeys(prompt.cache_salt for prompt in prompts)
        for salt in salts:
            places = [place for place, each in enumerate(prompts) if each.cache_salt == salt]
            ids = [prompts[place].token_ids for place in places]
            outputs = await self._engine.pool(
                ids, params, cache_salt=salt, lora_request=lora_request
            )
            found |= dict(zip(places, outputs, strict=True))
        return [found[place] for place in range(len(prompts))]

    async def _run(
        self,
        encode: Callable[[], EncodedPrompt],
        params: SamplingParams | None,
        *,
        priority: int = 0,
        beam: BeamSearchParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        check_adapters(lora_request)
        await self.start()
        if params is None:
            params = self.get_default_sampling_params()
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be a SamplingParams, got {params!r}")
        if params.structured_outputs is not None:
            await self._threads.run(check_form, params.structured_outputs, long=True)
        prompt = await self._threads.run(encode)
        params = bounded_after(prompt.token_ids, params, self._tokenizer)
        deltas = await self._engine.submit(
            [(prompt.text, prompt.token_ids)],
            params,
            beam=beam,
            cache_salt=prompt.cache_salt,
            priority=priority,
            lora_request=lora_request,
        )
        growing = GrowingOutput(prompt.text, prompt.token_ids, params.num_sequences)
        async with deltas:
            async for _, delta in deltas:
                output = growing.add(delta)
                # More has come already; or only the best of these sequences will be returned.
                if not output.finished and (deltas.ready or params.chooses):
                    continue
                yield output

    # -- the rest ----------------------------------------------------------------------------

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests without parameters take, as `LLM.get_default_sampling_params`."""
        return self._engine.defaults.params()

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, as transformers loads it."""
        return self._tokenizer.wrapped

    async def add_lora(self, lora_request: LoRARequest) -> None:
        """Loads an adapter, so that no request waits for it. Raises ValueError as `generate`."""
        check_adapters(lora_request)
        await self.start()
        await self._engine.ask("load_lora", lora_request)

    async def remove_lora(self, lora_name: str) -> None:
        """Unloads an adapter; what runs with it runs to its end. Raises ValueError if unknown."""
        await self.start()
        await self._engine.ask("unload_lora", lora_name)

    async def list_loras(self) -> list[LoRARequest]:
        """The adapters that are loaded."""
        await self.start()
        loras: list[LoRARequest] = await self._engine.ask("list_loras")
        return loras

    async def cache_report(self) -> CacheReport:
        """What the KV cache has saved so far, and which prefixes did it."""
        await self.start()
        report: CacheReport = await self._engine.ask("cache_report")
        return report

    async def reset_prefix_cache(self) -> None:
        """Empties the cache. Raises Unfinished while requests run or wait."""
        await self.start()
        await self._engine.ask("reset_cache")

    async def sleep(self, level: int = 1) -> None:
        """Frees memory until `wake_up`, as `LLM.sleep`. Raises Unfinished while requests run."""
        await self.start()
        await self._engine.ask("sleep", level)

    async def wake_up(self) -> None:
        """Undoes `sleep`."""
        await self.start()
        await self._engine.ask("wake_up")

    async def is_sleeping(self) -> bool:
        """Whether it sleeps."""
        await self.start()
        return bool(await self._engine.ask("is_sleeping"))
