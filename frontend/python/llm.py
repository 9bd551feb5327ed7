"""The Python API: many prompts in, all results out, under vLLM's names."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from coppice.frontend.python.beam_outputs import BeamSearchOutput, beam_search_output
from coppice.frontend.python.session import Session
from coppice.frontend.text.engine import TextEngine
from coppice.frontend.text.outputs import GenerationError, RequestOutput
from coppice.frontend.text.tokenizer import Message
from coppice.runtime.config import EngineConfig
from coppice.runtime.report.cache import CacheReport
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.sampling.beam_search import BeamSearchParams
from coppice.runtime.sampling.grammar_source import check

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with either `prompt` or `prompt_token_ids`, and `cache_salt`."""


class LLM:
    """A model, its KV cache and its tokenizer, for use from one thread.

    Args:
        model: a Hugging Face directory, a hub id, or "demo" for the shipped checkpoint.
        tokenizer: where the tokenizer is, if not with the model.
        engine_options: fields of `EngineConfig`.

    Raises:
        ValueError: an option is unknown or out of range, or the model cannot be loaded.
    """

    def __init__(self, model: str, tokenizer: str | None = None, **engine_options: Any) -> None:
        known = [option.name for option in fields(EngineConfig) if option.name != "model"]
        unknown = sorted(set(engine_options) - set(known))
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: no such option, use {', '.join(known)}")
        self._text_engine = TextEngine.load(EngineConfig(model=model, **engine_options), tokenizer)
        self._served = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continues each prompt; all of them run together and share their common beginnings.

        Args:
            prompts: one prompt or several: text, token ids, or `{"prompt": ...}` or
                `{"prompt_token_ids": ...}`, which may carry a `cache_salt`.
            sampling_params: one for all, or one for each prompt; `SamplingParams()` if not given.
            use_tqdm: whether to show a progress bar, where there is a terminal to show it in.
            priority: class of each prompt under the scheduling policy "priority", least first.

        Returns:
            One output a prompt, in the order of the prompts.

        Raises:
            ValueError: a prompt or the parameters are not acceptable; nothing has run.
            GenerationError: requests failed inside a step; it carries all outputs.
        """
        parsed = [self._parse(index, prompt) for index, prompt in enumerate(_listed(prompts))]
        classes = [0] * len(parsed) if priority is None else list(priority)
        if len(classes) != len(parsed):
            raise ValueError(
                f"priority must have one number for each of the {len(parsed)} prompts, "
                f"got {len(classes)}"
            )
        return self._run(parsed, sampling_params, use_tqdm, classes)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers a conversation, or several, through the model's chat template.

        Arguments, result and errors are those of `generate`; a message is a mapping with `role`
        ("system", "user" or "assistant") and `content`.
        """
        if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
            raise ValueError(
                f"messages must be a conversation or a list of conversations, got {messages!r}"
            )
        single = isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if single else messages
        encode = self._text_engine.tokenizer.encode_chat
        parsed: list[_Parsed] = [(None, encode(turns), None) for turns in conversations]
        return self._run(parsed, sampling_params, use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool = True,
    ) -> list[BeamSearchOutput]:
        """Finds the most probable continuations of each prompt; all prompts are searched together.

        Arguments and errors are those of `generate`, but that `params` are one for all.

        Returns:
            One output a prompt, in the order of the prompts, its sequences best first.
        """
        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"params must be a BeamSearchParams, got {params!r}")
        if params.best_so_far:
            raise ValueError("best_so_far must be False where only the results are returned")
        parsed = [self._parse(index, prompt) for index, prompt in enumerate(_listed(prompts))]
        outputs = self._run(parsed, params.sampling, use_tqdm, beam=params)
        return [beam_search_output(output) for output in outputs]

    def session(self, prompt: Prompt = "") -> Session:
        """Opens a line of text that can be forked, extended, scored and dropped (see `Session`).

        Raises ValueError if the prompt is not acceptable; an empty text gives an empty line.
        """
        if prompt == "":
            return Session(self, [], None)
        _, token_ids, salt = self._parse(0, prompt)
        return Session(self, token_ids, salt)

    def cache_report(self) -> CacheReport:
        """What the KV cache has saved so far, and which prefixes did it."""
        return self._text_engine.engine.cache_report()

    def reset_prefix_cache(self) -> None:
        """Forgets everything that is cached."""
        self._text_engine.engine.reset_cache()

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, as transformers loaded it."""
        return self._text_engine.tokenizer.wrapped

    @property
    def memory(self) -> str:
        """How the size of the KV cache follows from the memory, as text."""
        return self._text_engine.engine.memory

    def _parse(self, index: int, prompt: Any) -> _Parsed:
        salt = None
        where = f"prompts[{index}]"
        if isinstance(prompt, Mapping):
            unknown = sorted(set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"})
            if unknown or len({"prompt", "prompt_token_ids"} & set(prompt)) != 1:
                raise ValueError(
                    f"{where} must have either prompt or prompt_token_ids, and may have "
                    f"cache_salt; got {sorted(prompt)}"
                )
            salt = prompt.get("cache_salt")
            if "prompt" in prompt and not isinstance(prompt["prompt"], str):
                raise ValueError(f"{where}: prompt must be text, got {prompt['prompt']!r}")
            prompt = prompt["prompt"] if "prompt" in prompt else prompt["prompt_token_ids"]
            if salt is not None and not isinstance(salt, str):
                raise ValueError(f"{where}: cache_salt must be a string, got {salt!r}")
        if isinstance(prompt, str):
            return prompt, self._text_engine.tokenizer.encode(prompt), salt
        if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
            return None, list(prompt), salt
        raise ValueError(f"{where} must be text or token ids, got {prompt!r}")

    def _run(
        self,
        parsed: Sequence[_Parsed],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        show_progress: bool,
        priority: Sequence[int] | None = None,
        *,
        beam: BeamSearchParams | None = None,
    ) -> list[RequestOutput]:
        params = _params_for_each(sampling_params, len(parsed))
        for form in {each.structured_outputs for each in params}:
            if form is not None:
                check(form)
        ids: list[str] = []
        results: dict[str, RequestOutput] = {}
        try:
            for index, (prompt, token_ids, salt) in enumerate(parsed):
                request_id = str(self._served + index)
                try:
                    self._text_engine.add(
                        request_id,
                        prompt,
                        token_ids,
                        params[index],
                        beam=beam,
                        cache_salt=salt,
                        priority=priority[index] if priority else 0,
                    )
                except ValueError as error:
                    raise ValueError(f"prompts[{index}]: {error}") from error
                ids.append(request_id)
            with _Bar(len(ids), show_progress) as bar:
                while len(results) < len(ids):
                    if not self._text_engine.has_unfinished():
                        lost = [request_id for request_id in ids if request_id not in results]
                        raise RuntimeError(f"the engine lost the requests {', '.join(lost)}")
                    deltas = self._text_engine.step()
                    for delta in deltas:
                        if delta.output is not None:
                            results[delta.request_id] = delta.output
                    tokens = sum(len(delta.new_token_ids) for delta in deltas)
                    bar.update(len(results), tokens)
        finally:
            # An interrupt or a refused prompt leaves nothing behind in the engine.
            self._served += len(parsed)
            for request_id in ids:
                if request_id not in results:
                    self._text_engine.abort(request_id)
        outputs = [results[request_id] for request_id in ids]
        made = [completion for output in outputs for completion in output.outputs]
        if any(completion.finish_reason == "error" for completion in made):
            raise GenerationError(outputs)
        return outputs


_Parsed: TypeAlias = tuple[str | None, list[int], str | None]  # text, token ids, cache salt


def _listed(prompts: Any) -> list[Any]:
    """The prompts as a list: one prompt, given as text, ids or a mapping, makes a list of one."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise ValueError(f"prompts must be a prompt or a list of prompts, got {prompts!r}")
    if not prompts:
        raise ValueError("prompts must not be empty, got an empty list")
    ints = sum(isinstance(item, int) for item in prompts)
    if ints not in (0, len(prompts)):
        raise ValueError("prompts must be all token ids or all prompts, got a mixture")
    return [list(prompts)] if ints else list(prompts)


def _params_for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(
        isinstance(item, SamplingParams) for item in params
    ):
        raise ValueError(
            f"sampling_params must be a SamplingParams or a list of them, got {params!r}"
        )
    if len(params) != count:
        raise ValueError(
            f"sampling_params must be one for all prompts or one for each of the {count}, "
            f"got {len(params)}"
        )
    return list(params)


class _Bar:
    """A progress bar on standard error: prompts done, and generated tokens a second."""

    def __init__(self, total: int, show: bool) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("prompts"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[rate]:.0f} tokens/s"),
            console=console,
            disable=not (show and (console.is_terminal or console.is_jupyter)),
        )
        self._task = self._progress.add_task("prompts", total=total, rate=0.0)
        self._tokens = 0
        self._start = time.perf_counter()

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def update(self, done: int, new_tokens: int) -> None:
        self._tokens += new_tokens
        elapsed = time.perf_counter() - self._start
        rate = self._tokens / elapsed if elapsed > 0 else 0.0
        self._progress.update(self._task, completed=done, rate=rate)
