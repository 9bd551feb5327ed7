"""An engine in this process with text around it: pieces of text come out of each step.

The engine knows token ids only. Here each step's tokens become text, and a stop string that appears
ends its request before the next step. The Python API, `coppice chat` and the demo use it; like the
engine, from one thread. The server has its engine in another process: see `frontend/client`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coppice.frontend.text.model.generation_config import NO_DEFAULTS, GenerationDefaults
from coppice.frontend.text.model.loading import load_around
from coppice.frontend.text.model.options import TextOptions
from coppice.frontend.text.outputs import TextDelta
from coppice.frontend.text.params import for_engine
from coppice.frontend.text.streams import Texts
from coppice.frontend.text.tokenizer import Tokenizer
from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.requests.lora_request import LoRARequest
from coppice.runtime.requests.sampling_params import SamplingParams


class TextEngine:
    """An engine and the tokenizer of its model.

    Attributes:
        engine: the engine.
        tokenizer: the model's tokenizer.
        defaults: the sampling parameters of requests that do not set them.
        texts: what its running requests have generated so far.
    """

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, defaults: GenerationDefaults = NO_DEFAULTS
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.defaults = defaults
        self.texts = Texts(tokenizer)

    @classmethod
    def load(cls, config: EngineConfig, options: TextOptions | None = None) -> TextEngine:
        """Loads a model and its tokenizer.

        Args:
            config: the engine's options; the model is a directory, a hub id or "demo".
            options: of the tokenizer, and of what requests get that they do not set.

        Raises:
            ValueError: there is no such model, it is not supported, or its memory does not suffice.
        """
        loaded = load_around(config, options)
        engine = Engine(loaded.config, **loaded.engine_arguments)
        return cls(engine, loaded.tokenizer, loaded.defaults)

    def add(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        beam: BeamSearchParams | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Queues a request: sampling by `params`, or the beam search `beam` for `params.n` results.

        Raises:
            ValueError: the engine refuses it (see `Engine.add_request`); nothing was queued.
        """
        ids = list(prompt_token_ids)
        more: dict[str, Any] = {
            "cache_salt": cache_salt, "priority": priority, "lora_request": lora_request,
        }  # fmt: skip
        if beam is not None:
            self.engine.add_beam_search(request_id, ids, for_engine(beam, self.tokenizer), **more)
        else:
            self.engine.add_request(request_id, ids, for_engine(params, self.tokenizer), **more)
        self.texts.add(request_id, prompt, ids, params)

    def abort(self, request_id: str) -> bool:
        """Ends a request and frees its pages; False if it is unknown or has ended."""
        self.texts.drop(request_id)
        return self.engine.abort(request_id)

    def has_unfinished(self) -> bool:
        """Whether a step has anything to do."""
        return self.engine.has_unfinished()

    def step(self) -> list[TextDelta]:
        """Runs one step; returns what it added to each continuation in it."""
        deltas = []
        for output in self.engine.step():
            delta, stopped = self.texts.advance(output)
            if stopped:
                self.engine.abort(output.request_id, output.index)
            if delta is not None:
                deltas.append(delta)
        return deltas
