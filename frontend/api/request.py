"""A checked request for text: what every API makes of a client's body."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from coppice.frontend.api.breakpoints import Breakpoint
from coppice.frontend.api.form import Form
from coppice.frontend.chat.template import Messages
from coppice.frontend.chat.tools.choice import Tools
from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.requests.sampling_params import SamplingParams

PromptInput: TypeAlias = str | list[int]


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A checked request of any API: `prompts` or `messages` is set, never both."""

    model: str | None  # as the request named it
    prompts: tuple[PromptInput, ...]
    messages: Messages
    params: SamplingParams
    beam: BeamSearchParams | None = None  # `params` has the rest of its parameters
    cache_salt: str | None = None
    priority: int = 0
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False  # whether every chunk of a stream has the counts so far
    form: Form | None = None
    echo: bool = False
    nothing_new: bool = False  # the answer is only the echo; the one generated token is left out
    return_token_ids: bool = False  # whether the answer has those of prompt and text
    prompt_logprobs: bool = False  # whether the answer has them, apart from the echo
    tools: Tools | None = None
    template: Mapping[str, Any] = field(default_factory=dict)  # arguments of `Dialect.encode`
    text_field: str = "prompt"  # the client's name for `prompts` or `messages`
    names: Mapping[str, str] = field(default_factory=dict)  # its names for others (see renaming.py)
    include_reasoning: bool = True  # whether the answer has what the model thought before it
    thinking_binds: bool = True  # whether a budget of reasoning that can't be held is refused
    breakpoints: tuple[Breakpoint, ...] = ()  # ends of prefixes of `messages` that are to be kept
    remembered_bytes: int = 0  # of earlier messages that the body names and the server has
    shortens: bool = False  # whether the oldest messages may be left out if there are too many

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar is to be compiled, which may take as long as a large prompt."""
        return self.form is not None or (self.tools is not None and self.tools.held)

    @property
    def is_long_work(self) -> bool:
        """Whether preparing it may take seconds, whatever its size."""
        return self.has_grammar or "chat_template" in self.template

    @property
    def needs_tokenizer(self) -> bool:
        """Whether preparing it needs the tokenizer or a grammar; False for plain token ids."""
        texts = any(isinstance(prompt, str) for prompt in self.prompts)
        words = bool(self.params.bad_words) or self.params.prediction is not None
        return texts or words or bool(self.messages) or self.echo or self.has_grammar
