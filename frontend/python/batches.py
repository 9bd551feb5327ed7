"""Runs a batch of prompts to its end, with a progress bar: what `LLM` and `Session` share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from coppice.frontend.chat.budget import bounded_after
from coppice.frontend.python.forms import check_form
from coppice.frontend.python.progress import Bar, UseTqdm
from coppice.frontend.python.prompts import EncodedPrompt
from coppice.frontend.text.engine import TextEngine
from coppice.frontend.text.outputs import GenerationError, RequestOutput
from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.requests.lora_request import LoRARequest
from coppice.runtime.requests.sampling_params import SamplingParams

Adapters: TypeAlias = LoRARequest | Sequence[LoRARequest | None] | None
"""The adapter of all prompts of a batch, or of each; None stands for the base model."""


class Batches:
    """Runs batches of prompts, one after the other, on an engine of this process."""

    def __init__(self, text_engine: TextEngine) -> None:
        self._text_engine: TextEngine | None = text_engine
        self._served = 0

    @property
    def text_engine(self) -> TextEngine:
        """The engine and its tokenizer. Raises RuntimeError after `close`."""
        if self._text_engine is None:
            raise RuntimeError("this LLM was shut down; make a new one")
        return self._text_engine

    @property
    def closed(self) -> bool:
        return self._text_engine is None

    def close(self) -> None:
        """Drops the engine, whose memory is given back."""
        if self._text_engine is not None:
            self._text_engine.engine.close()
            self._text_engine = None

    def run(
        self,
        prompts: Sequence[EncodedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        use_tqdm: UseTqdm = False,
        priority: Sequence[int] | None = None,
        beam: BeamSearchParams | None = None,
        lora_request: Adapters = None,
    ) -> list[RequestOutput]:
        """Runs the prompts together to their ends; returns outputs in the order of the prompts.

        Args:
            prompts: of the batch.
            sampling_params: one for all, or one for each prompt; None: the model's defaults.
            use_tqdm: whether a progress bar is shown, or what makes it.
            priority: class of each prompt, least first; None: 0 for all.
            beam: a beam search for all; `sampling_params` are then `beam.sampling`.
            lora_request: the adapter of all, or of each prompt; None: the base model.

        Raises:
            ValueError: a prompt or the parameters are not acceptable; nothing has run.
            GenerationError: requests failed inside a step; it carries all outputs.
        """
        if sampling_params is None:
            sampling_params = self.text_engine.defaults.params()
        params = params_for_each(sampling_params, len(prompts))
        adapters = adapter_of_each(lora_request, len(prompts))
        for form in {each.structured_outputs for each in params}:
            if form is not None:
                check_form(form)
        params = [
            bounded_after(prompt.token_ids, each, self.text_engine.tokenizer)
            for prompt, each in zip(prompts, params, strict=True)
        ]
        ids: list[str] = []
        results: dict[str, RequestOutput] = {}
        try:
            for index, prompt in enumerate(prompts):
                request_id = str(self._served + index)
                try:
                    self.text_engine.add(
                        request_id,
                        prompt.text,
                        prompt.token_ids,
                        params[index],
                        beam=beam,
                        cache_salt=prompt.cache_salt,
                        priority=priority[index] if priority else 0,
                        lora_request=adapters[index],
                    )
                except ValueError as error:
                    raise ValueError(f"prompts[{index}]: {error}") from error
                ids.append(request_id)
            with Bar(len(ids), use_tqdm) as bar:
                while len(results) < len(ids):
                    if not self.text_engine.has_unfinished():
                        lost = [request_id for request_id in ids if request_id not in results]
                        raise RuntimeError(f"the engine lost the requests {', '.join(lost)}")
                    deltas = self.text_engine.step()
                    for delta in deltas:
                        if delta.output is not None:
                            results[delta.request_id] = delta.output
                    tokens = sum(len(delta.new_token_ids) for delta in deltas)
                    bar.update(len(results), tokens)
        finally:
            # After an interrupt or a refused prompt, nothing of the batch runs on.
            self._served += len(prompts)
            for request_id in ids:
                if request_id not in results:
                    self.text_engine.abort(request_id)
        outputs = [results[request_id] for request_id in ids]
        made = [completion for output in outputs for completion in output.outputs]
        if any(completion.finish_reason == "error" for completion in made):
            raise GenerationError(outputs)
        return outputs


def adapter_of_each(given: Adapters, count: int) -> Sequence[LoRARequest | None]:
    """The adapter of each of `count` prompts. Raises ValueError for any other number."""
    each = [given] * count if given is None or isinstance(given, LoRARequest) else given
    if isinstance(each, (str, bytes)) or not isinstance(each, Sequence) or len(each) != count:
        raise ValueError(
            f"lora_request must be a LoRARequest, or one for each of the {count} prompts, "
            f"got {given!r}"
        )
    check_adapters(*each)
    return each


def check_adapters(*given: object) -> None:
    """Raises ValueError for what is neither a LoRARequest nor None."""
    for each in given:
        if each is not None and not isinstance(each, LoRARequest):
            raise ValueError(f"lora_request must be a LoRARequest or None, got {each!r}")


def params_for_each(
    params: SamplingParams | Sequence[SamplingParams], count: int
) -> list[SamplingParams]:
    """The parameters of each of `count` prompts. Raises ValueError for any other number."""
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
