"""Sessions: texts that a program forks, extends, scores and closes itself."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence

from coppice.frontend.python.batches import Batches, params_for_each
from coppice.frontend.python.prompts import EncodedPrompt
from coppice.frontend.text.continuation import is_silent
from coppice.frontend.text.engine import TextEngine
from coppice.frontend.text.outputs import RequestOutput
from coppice.runtime.report.snapshot import PinRefused
from coppice.runtime.requests.lora_request import LoRARequest
from coppice.runtime.requests.sampling_params import SamplingParams

_numbers = itertools.count()


class Session:
    """A sequence of tokens whose KV stays cached while it is open; made by `LLM.session`.

    Forks share the pages of all tokens that they have in common: a branch costs pages only for what
    it adds. Open sessions are pinned as far as the engine's `pin_budget` allows; beyond it they are
    cached like everything else, and computed again if they were evicted. For use from one thread,
    like the LLM.

        with llm.session("Question: ... Thoughts:") as root:
            branches = root.fork(4)
            Session.generate_all(branches, SamplingParams(max_tokens=32))
            best = max(branches, key=lambda branch: branch.score(" So it is right."))
    """

    def __init__(
        self,
        batches: Batches,
        token_ids: Sequence[int],
        cache_salt: str | None,
        lora_request: LoRARequest | None = None,
    ) -> None:
        self._batches = batches
        self._salt, self._lora_request = cache_salt, lora_request
        self._name = f"session {next(_numbers)}"
        self._open = True
        self._token_ids = list(token_ids)
        self._keep()

    @property
    def _text_engine(self) -> TextEngine:
        return self._batches.text_engine

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All of its tokens."""
        return tuple(self._token_ids)

    @property
    def text(self) -> str:
        """All of its text, special tokens included."""
        return self._text_engine.tokenizer.decode(self._token_ids, skip_special_tokens=False)

    def append(self, text: str) -> Session:
        """Adds text at the end, whose KV is computed when it is needed. Returns the session."""
        self._check_open()
        tokenizer = self._text_engine.tokenizer
        begins = not self._token_ids
        self._token_ids += tokenizer.encode(text) if begins else tokenizer.encode_more(text)
        self._keep()
        return self

    def fork(self, count: int = 1) -> list[Session]:
        """`count` new sessions that begin with all of this one's tokens."""
        self._check_open()
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"count must be an integer of at least 1, got {count!r}")
        given = self._batches, self._token_ids, self._salt, self._lora_request
        return [Session(*given) for _ in range(count)]

    def generate(self, params: SamplingParams | None = None) -> RequestOutput:
        """Continues the text: the tokens that are generated become part of the session."""
        (output,) = Session.generate_all([self], params)
        return output

    @staticmethod
    def generate_all(
        sessions: Sequence[Session], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Continues several sessions of one LLM together, each by its own parameters if given.

        Raises ValueError for closed sessions, sessions of different LLMs, a session that is given
        twice, and an `n` other than 1 (fork first, and continue the forks); then nothing has run.
        """
        if not sessions:
            raise ValueError("sessions must not be empty, got none")
        batches = sessions[0]._batches
        for session in sessions:
            session._check_open()
            if session._batches is not batches:
                raise ValueError("sessions must all be of one LLM")
        for place, session in enumerate(sessions):
            if session in sessions[:place]:
                raise ValueError(
                    f"sessions must differ, fork them instead; sessions[{place}] came before"
                )
        if params is None:
            params = batches.text_engine.defaults.params()
        params = params_for_each(params, len(sessions))
        for each in params:
            if each.n != 1:
                raise ValueError(f"n must be 1 in a session, fork it instead; got {each.n}")
        with _room_for(sessions, params):
            outputs = batches.run(
                [session._prompt() for session in sessions],
                params,
                lora_request=[session._lora_request for session in sessions],
            )
        for session, one, output in zip(sessions, params, outputs, strict=True):
            made = output.outputs[0]
            # A token that only marks the end of the text is not part of a text that continues.
            silent = is_silent(made, one)
            session._token_ids += made.token_ids[:-1] if silent else made.token_ids
            session._keep()
        return outputs

    def score(self, text: str) -> float:
        """The log-probability of `text` as the continuation, summed over its tokens.

        The session does not change; of its tokens, only those that are not cached are computed.
        Raises ValueError if the session or the text is empty.
        """
        self._check_open()
        more = self._text_engine.tokenizer.encode_more(text)
        if not self._token_ids or not more:
            raise ValueError("text: a session and its continuation need a token each")
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=0,
            prompt_logprobs_start=len(self._token_ids),
        )
        with _room_for([self], [params], len(more)):
            (output,) = self._batches.run(
                [self._prompt(more)], params, lora_request=self._lora_request
            )
        assert output.prompt_logprobs is not None
        places = zip(more, output.prompt_logprobs[-len(more) :], strict=True)
        return sum(place[token].logprob for token, place in places if place is not None)

    def close(self) -> None:
        """Unpins its tokens, which may be evicted from now on.

        Without effect if it is closed, or if its LLM was shut down.
        """
        if self._open and not self._batches.closed:
            self._text_engine.engine.unpin(self._name)
        self._open = False

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _prompt(self, more: Sequence[int] = ()) -> EncodedPrompt:
        return EncodedPrompt(None, [*self._token_ids, *more], self._salt)

    def _check_open(self) -> None:
        if not self._open:
            raise ValueError("session: it was closed")

    def _keep(self) -> None:
        """Pins all of its tokens, if the budget allows it."""
        engine = self._text_engine.engine
        engine.unpin(self._name)
        if self._token_ids:
            with contextlib.suppress(PinRefused):
                engine.pin(
                    self._name,
                    self._token_ids,
                    cache_salt=self._salt,
                    lora_request=self._lora_request,
                )


@contextlib.contextmanager
def _room_for(
    sessions: Sequence[Session], params: Sequence[SamplingParams], more: int = 0
) -> Iterator[None]:
    """Ends the pins of these sessions while they run, if they would leave too few pages for that.

    What is pinned counts as taken, also for a request that would share it. `more`: tokens of the
    prompts after those of the sessions.
    """
    engine = sessions[0]._text_engine.engine
    longest = max(
        (
            len(session._token_ids) + more + one.max_tokens
            if one.max_tokens is not None
            else engine.max_model_len
            for session, one in zip(sessions, params, strict=True)
        ),
        default=0,
    )
    if engine.intake.would_fit(min(longest, engine.max_model_len)):
        yield
        return
    for session in sessions:
        engine.unpin(session._name)
    try:
        yield
    finally:
        for session in sessions:
            session._keep()
