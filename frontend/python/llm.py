"""The Python API: many prompts in, all results out, under vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from coppice.frontend.chat.messages import Message
from coppice.frontend.chat.template import encode_chat
from coppice.frontend.python.batches import Adapters, Batches, check_adapters
from coppice.frontend.python.beam_outputs import BeamSearchOutput, beam_search_output
from coppice.frontend.python.options import Configured
from coppice.frontend.python.pooling import (
    EmbeddingRequestOutput,
    ScoringRequestOutput,
    embed,
    score,
)
from coppice.frontend.python.progress import UseTqdm
from coppice.frontend.python.prompts import EncodedPrompt, Prompt, encoded, encoded_prompt
from coppice.frontend.python.session import Session
from coppice.frontend.text.engine import TextEngine
from coppice.frontend.text.model.options import TextOptions
from coppice.frontend.text.outputs import RequestOutput
from coppice.runtime.config import EngineConfig
from coppice.runtime.report.gather import make_report
from coppice.runtime.report.snapshot import CacheReport
from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.requests.lora_request import LoRARequest
from coppice.runtime.requests.pooling_params import PoolingParams
from coppice.runtime.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LLM(Configured):
    """A model, its KV cache and its tokenizer, for use from one thread.

    As a context manager it shuts down at the end.
    """

    def _load(self, config: EngineConfig, text: TextOptions) -> None:
        self._batches = Batches(TextEngine.load(config, text))

    @property
    def _text_engine(self) -> TextEngine:
        return self._batches.text_engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        *,
        lora_request: Adapters = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continues each prompt; all of them run together and share their common prefixes.

        Args:
            prompts: one prompt or several: text, token ids, or `{"prompt": ...}` or
                `{"prompt_token_ids": ...}`, which may carry a `cache_salt`.
            sampling_params: one for all, or one for each prompt; `get_default_sampling_params()`
                if not given.
            use_tqdm: whether to show a progress bar, in a terminal or a notebook; or a class that
                makes it, as `tqdm.tqdm` does.
            lora_request: the adapter of all prompts, or of each; it is loaded if it is not yet.
            priority: class of each prompt under the scheduling policy "priority"; lower ones run
                first.

        Returns:
            One output per prompt, in the order of the prompts.

        Raises:
            ValueError: a prompt or the parameters are not acceptable; nothing has run.
            GenerationError: requests failed inside a step; it carries all outputs.
        """
        parsed = encoded(prompts, self._text_engine.tokenizer)
        classes = [0] * len(parsed) if priority is None else list(priority)
        if len(classes) != len(parsed):
            raise ValueError(
                f"priority must have one number for each of the {len(parsed)} prompts, "
                f"got {len(classes)}"
            )
        return self._batches.run(
            parsed,
            sampling_params,
            use_tqdm=use_tqdm,
            priority=classes,
            lora_request=lora_request,
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        *,
        lora_request: Adapters = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers a conversation, or several, with the model's chat template.

        Result and errors are those of `generate`.

        Args:
            messages: one conversation or several; a message is a mapping with `role` ("system",
                "user", "assistant" or "tool") and `content`, as in the OpenAI API.
            sampling_params: one for all, or one for each conversation.
            use_tqdm, lora_request: as for `generate`.
            chat_template: used in place of the model's.
            add_generation_prompt: whether the beginning of an answer is added at the end.
            continue_final_message: leave the last message open, so that the answer continues it.
            tools: the tools that the model may call, as the OpenAI API describes them; its calls
                are part of the text.
            chat_template_kwargs: more variables for the template, such as `enable_thinking`.
        """
        if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
            raise ValueError(
                f"messages must be a conversation or a list of conversations, got {messages!r}"
            )
        single = isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if single else messages
        encode = partial(
            encode_chat,
            self._text_engine.tokenizer,
            tools=tools,
            chat_template=chat_template,
            template_arguments=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        parsed = [EncodedPrompt(None, encode(turns)) for turns in conversations]
        return self._batches.run(
            parsed, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request
        )

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        use_tqdm: UseTqdm = True,
        *,
        lora_request: Adapters = None,
    ) -> list[BeamSearchOutput]:
        """Finds the most probable continuations of each prompt; all prompts are searched together.

        Arguments and errors are those of `generate`, except that all prompts share `params`.

        Returns:
            One output per prompt, in the order of the prompts, with the best sequence first.
        """
        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"params must be a BeamSearchParams, got {params!r}")
        if params.best_so_far:
            raise ValueError("best_so_far must be False where only the results are returned")
        parsed = encoded(prompts, self._text_engine.tokenizer)
        outputs = self._batches.run(
            parsed, params.sampling, use_tqdm=use_tqdm, beam=params, lora_request=lora_request
        )
        return [beam_search_output(output) for output in outputs]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: UseTqdm = True,
        *,
        pooling_params: PoolingParams | None = None,
        lora_request: Adapters = None,
    ) -> list[EmbeddingRequestOutput]:
        """The vector of each prompt, in their order: `output.outputs.embedding`.

        Prompts that begin alike share what the cache has of them. `lora_request` is as for
        `generate`. Raises ValueError if the model is not made for vectors, or if a prompt or the
        parameters are not acceptable.
        """
        parsed = encoded(prompts, self._text_engine.tokenizer)
        params = pooling_params or PoolingParams()
        return embed(self._text_engine, parsed, params, use_tqdm, lora_request)

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        use_tqdm: UseTqdm = True,
        *,
        use_activation: bool | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """The score of each pair of texts, or of one text with each of several.

        It is `output.outputs.score`: what the model's classifier says, or for a model of vectors
        the cosine of both; with the adapter `lora_request` if there is one. Raises ValueError if
        the model is made for neither.
        """
        check_adapters(lora_request)
        return score(self._text_engine, text_1, text_2, use_activation, use_tqdm, lora_request)

    def session(self, prompt: Prompt = "", *, lora_request: LoRARequest | None = None) -> Session:
        """Opens a text that can be forked, extended, scored and closed (see `Session`).

        Each of its results is the adapter's, if `lora_request` names one. Raises ValueError if the
        prompt or the adapter is not acceptable; the prompt may be an empty text.
        """
        check_adapters(lora_request)
        if lora_request is not None:  # before a pin needs it
            self._text_engine.engine.adapters.named.find(lora_request)
        if prompt == "":
            return Session(self._batches, [], None, lora_request)
        parsed = encoded_prompt("prompt", prompt, self._text_engine.tokenizer)
        return Session(self._batches, parsed.token_ids, parsed.cache_salt, lora_request)

    def add_lora(self, lora_request: LoRARequest) -> None:
        """Loads an adapter, so that no request waits for it. Raises ValueError as `generate`."""
        check_adapters(lora_request)
        self._text_engine.engine.adapters.load(lora_request)

    def remove_lora(self, lora_name: str) -> None:
        """Unloads an adapter and frees its part of the cache. Raises ValueError if unknown."""
        self._text_engine.engine.adapters.unload(lora_name)

    def list_loras(self) -> list[LoRARequest]:
        """The adapters that are loaded."""
        return self._text_engine.engine.adapters.listed()

    def cache_report(self) -> CacheReport:
        """What the KV cache has saved so far, and which prefixes did it.

        Printed, and in a notebook, it is the table of `coppice generate --report`.
        """
        from coppice.frontend.report.shown import shown  # takes a while to import
        from coppice.frontend.report.words import token_text

        report = make_report(self._text_engine.engine)
        return shown(report, token_text(self._text_engine.tokenizer))

    def reset_prefix_cache(self) -> None:
        """Empties the cache."""
        self._text_engine.engine.reset_cache()

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` and `chat` take if no parameters are given.

        These are the values of the model's generation_config.json, or what the option
        `generation_config` names instead, and those of `SamplingParams` for the others.
        """
        return self._text_engine.defaults.params()

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, as transformers loaded it."""
        return self._text_engine.tokenizer.wrapped

    @property
    def memory(self) -> str:
        """How the size of the KV cache follows from the memory, as text."""
        return self._text_engine.engine.memory

    def sleep(self, level: int = 1) -> None:
        """Frees memory until `wake_up`: the KV cache, and at level 2 the weights.

        At level 1 the weights stay in main memory: on a GPU they leave it, on a CPU that is where
        they are. At level 2 `wake_up` reads them from the checkpoint again. The cache is empty
        afterwards; sessions keep their text. The process, its libraries and compiled kernels stay.
        Without effect while it sleeps.

        Raises ValueError for another level.
        """
        self._text_engine.engine.sleep(level)

    def wake_up(self) -> None:
        """Undoes `sleep`. Raises ValueError if the weights can't be read any more."""
        self._text_engine.engine.wake_up()

    def is_sleeping(self) -> bool:
        """Whether it sleeps; then it refuses prompts."""
        return self._text_engine.engine.asleep

    def shutdown(self) -> None:
        """Gives the memory back, of weights, too; all further calls raise RuntimeError.

        Without effect if it was shut down.
        """
        self._batches.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
