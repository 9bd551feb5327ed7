"""Checks each new request, makes its first sequence and queues it."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence as Seq
from dataclasses import replace

from coppice.radix import Namespace, Pins
from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.peek import Peek, peek
from coppice.runtime.engine.sequences import Sequences
from coppice.runtime.metrics.counters import EngineCounters
from coppice.runtime.metrics.prompt_accounts import PromptAccounts
from coppice.runtime.model.adapters.names import Adapters
from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.requests.lora_request import LoRARequest
from coppice.runtime.requests.pooled_prompt import PooledPrompt
from coppice.runtime.requests.pooling_params import PoolingParams
from coppice.runtime.requests.pooling_recipe import Recipe
from coppice.runtime.requests.request import (
    BESIDE_PINS,
    AdapterUse,
    QueueFull,
    Request,
    Sequence,
    too_long,
)
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.sampling.grammars import Grammars
from coppice.runtime.sampling.known_logprobs import KnownLogprobs
from coppice.runtime.schedule.paging import Paging
from coppice.runtime.schedule.queue import WaitingQueue

_LONGEST_SALT = 1024  # characters: caches keep the names of their namespaces, whoever sent them


class Intake:
    """Takes the requests of one engine; refuses by name what the engine can't serve.

    Attributes:
        known_logprobs: of earlier prompts, so that they need not be computed again.
    """

    def __init__(
        self,
        config: EngineConfig,
        grammars: Grammars,
        sequences: Sequences,
        pins: Pins,
        counters: EngineCounters,
        adapters: Adapters,
        *,
        vocabulary: int,
        max_model_len: int,
        recipe: Recipe,
    ) -> None:
        """`max_model_len` is the most tokens that a request may have while nothing is pinned."""
        self._grammars = grammars
        self._sequences = sequences
        self._pins = pins
        self._counters = counters
        self.known_logprobs = KnownLogprobs(vocabulary, enabled=config.enable_prefix_caching)
        self._adapters = adapters
        self._config = config
        self._recipe = recipe
        self._vocabulary = vocabulary
        self._max_model_len = max_model_len
        self._seeds = random.Random(config.seed)

    def add(
        self,
        request_id: str,
        prompt_token_ids: Seq[int],
        params: SamplingParams | BeamSearchParams,
        *,
        cache_salt: str | None,
        tenant: str | None,
        priority: int,
        lora_request: LoRARequest | None,
        held_elsewhere: int = 0,
    ) -> Sequence:
        """Queues a new request; returns its first sequence, which waits from now on.

        Raises ValueError if the request can't be served, and QueueFull if too much waits already;
        nothing is queued then.
        """
        if not self._recipe.generates:
            raise ValueError("model has no head for text: it only makes embeddings or scores")
        self._check_name(request_id)
        pages = self._free_pages()
        longest = self._longest(pages)
        self._check_prompt(prompt_token_ids, longest, pages)
        searching = isinstance(params, BeamSearchParams)
        if isinstance(params, BeamSearchParams):
            self._check_beams(params, prompt_token_ids, longest, pages)
            params = replace(params.sampling, n=1)  # a search forks its beams itself
        self._check_params(params)
        if params.thinking_token_budget is not None and params.thinking_marks is None:
            raise ValueError(
                f"thinking_token_budget needs thinking_marks here, "
                f"got {params.thinking_token_budget}"
            )
        if params.prompt_logprobs_start >= len(prompt_token_ids):
            raise ValueError(
                f"prompt_logprobs_start must be below {len(prompt_token_ids)}, the number of "
                f"prompt tokens, got {params.prompt_logprobs_start}"
            )
        self._check_priority(priority)
        held = _checked_held(held_elsewhere, prompt_token_ids)
        self._check_queue(len(prompt_token_ids))
        adapter, namespace = self.place(prompt_token_ids, cache_salt, tenant, lora_request)
        form = params.structured_outputs
        room = longest - len(prompt_token_ids)
        limit = room if params.max_tokens is None else min(room, params.max_tokens)
        request = Request(
            request_id=request_id,
            prompt_token_ids=array("i", prompt_token_ids),
            params=params,
            namespace=namespace,
            arrival=self._sequences.next_arrival(),
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            max_length=len(prompt_token_ids) + limit,
            priority=priority,
            beam_search=searching,
            grammar=None if form is None else self._grammars.compiled(form, tenant),
            adapter=adapter,
            held_elsewhere=held,
        )
        sequence = Sequence(request)
        sequence.reader = self.known_logprobs.begin(request)
        self._sequences.begin(sequence)
        return sequence

    def add_pooled(
        self,
        request_id: str,
        prompt_token_ids: Seq[int],
        params: PoolingParams,
        *,
        cache_salt: str | None,
        tenant: str | None,
        priority: int,
        lora_request: LoRARequest | None,
        held_elsewhere: int = 0,
    ) -> None:
        """Queues a request for a vector or a score; its prompt may fill the model's length.

        Raises as `add` does.
        """
        recipe = self._recipe.check(params)
        self._check_name(request_id)
        pages, count = self._free_pages(), len(prompt_token_ids)
        self._check_prompt(prompt_token_ids, self._longest(pages), pages, more=0)
        self._check_priority(priority)
        held = _checked_held(held_elsewhere, prompt_token_ids)
        self._check_queue(count)
        adapter, namespace = self.place(prompt_token_ids, cache_salt, tenant, lora_request)
        request = Request(
            request_id=request_id,
            prompt_token_ids=array("i", prompt_token_ids),
            params=SamplingParams(max_tokens=1),  # nothing is sampled
            namespace=namespace,
            arrival=self._sequences.next_arrival(),
            seed=0,
            max_length=count,
            priority=priority,
            adapter=adapter,
            held_elsewhere=held,
        )
        sequence = Sequence(request)
        sequence.reader = PooledPrompt(count, params, recipe)
        self._sequences.begin(sequence)

    def place(
        self,
        prompt_token_ids: Seq[int],
        cache_salt: str | None,
        tenant: str | None,
        lora_request: LoRARequest | None,
    ) -> tuple[AdapterUse | None, Namespace]:
        """How a prompt uses its adapter, and the namespace of its KV.

        Tokens of different salts, tenants or adapters never match; but an adapter that tokens
        invoke has the base model's namespace (see `AdapterUse`). Raises ValueError if there is no
        such adapter, and for a salt that is too long.
        """
        if cache_salt is not None and len(cache_salt) > _LONGEST_SALT:
            raise ValueError(
                f"cache_salt must have at most {_LONGEST_SALT} characters, got {len(cache_salt)}"
            )
        use, identity = None, None
        if lora_request is not None:
            adapter = self._adapters.find(lora_request)
            use = adapter.use(prompt_token_ids)
            identity = adapter.identity if adapter.invocation is None else None
        namespace = Namespace(
            model=self._config.model, adapter=identity, cache_salt=cache_salt, tenant=tenant
        )
        return use, namespace

    def close(self) -> None:
        """Ends what compiles grammars; take nothing after."""
        self._grammars.close()

    def namespace(self, cache_salt: str | None, tenant: str | None = None) -> Namespace:
        """The namespace of the base model's tokens of a salt and a tenant."""
        return self.place((), cache_salt, tenant, None)[1]

    def peek(
        self,
        prompt_token_ids: Seq[int],
        *,
        cache_salt: str | None,
        tenant: str | None,
        prompt_logprobs: int | None,
        prompt_logprobs_start: int,
        lora_request: LoRARequest | None,
        held_elsewhere: int,
        paging: Paging,
        waiting: WaitingQueue,
        accounts: PromptAccounts,
    ) -> Peek:
        """What a request would hit now; see `peek`. Raises ValueError as `add` for the prompt."""
        pages = self._free_pages()
        self._check_prompt(prompt_token_ids, self._longest(pages), pages)
        held = _checked_held(held_elsewhere, prompt_token_ids)
        params = SamplingParams(
            prompt_logprobs=prompt_logprobs, prompt_logprobs_start=prompt_logprobs_start
        )
        adapter, namespace = self.place(prompt_token_ids, cache_salt, tenant, lora_request)
        request = Request(
            request_id="",
            prompt_token_ids=array("i", prompt_token_ids),
            params=params,
            namespace=namespace,
            arrival=-1,
            seed=0,
            max_length=len(prompt_token_ids) + 1,
            adapter=adapter,
            held_elsewhere=held,
        )
        return peek(
            Sequence(request),
            self.known_logprobs.limit(request),
            paging=paging,
            waiting=waiting,
            pins=self._pins,
            accounts=accounts,
        )

    def would_fit(self, tokens: int) -> bool:
        """Whether a request of `tokens`, prompt and output together, could be served now."""
        return tokens <= self._longest(self._free_pages())

    def _free_pages(self) -> int:
        """Pages that no pin keeps now or will keep once its tokens are cached."""
        return self._pins.tree.pool.num_pages - self._pins.promised_pages()

    def _longest(self, pages: int) -> int:
        """Tokens, prompt and output together, that a request may have in `pages`."""
        return min(self._max_model_len, pages * self._config.page_size)

    def _check_beams(
        self, params: BeamSearchParams, prompt_token_ids: Seq[int], longest: int, pages: int
    ) -> None:
        """Raises ValueError if `beam_width` beams can't run together after this prompt."""
        if params.beam_width > self._config.most_seqs:
            raise ValueError(
                f"beam_width must be at most max_num_seqs, {self._config.most_seqs}, "
                f"got {params.beam_width}"
            )
        size = self._config.page_size
        # Each beam has pages of its own after the prompt, one for the copy of its last page, and
        # one more while it forks.
        tokens = min(params.max_tokens, longest - len(prompt_token_ids))
        own = -(-tokens // size) + 2
        needed = len(prompt_token_ids) // size + params.beam_width * own
        if needed > pages:
            raise ValueError(
                f"beam_width: {params.beam_width} beams of {tokens} tokens after this "
                f"prompt take up to {needed} pages, the KV cache has {pages} that no pin keeps"
            )

    def _check_name(self, request_id: str) -> None:
        self._pins.refresh()  # no step does that while the engine is idle
        if request_id in self._sequences:
            raise ValueError(
                f"request_id must be unique among running requests, got {request_id!r}"
            )

    def _check_prompt(
        self, prompt_token_ids: Seq[int], longest: int, pages: int, more: int = 1
    ) -> None:
        """Raises ValueError unless the prompt and `more` tokens, one or none, can be served."""
        count = len(prompt_token_ids)
        if not count:
            raise ValueError("prompt must have at least one token, got none")
        if count + more > longest:
            limit = "max_model_len"
            if longest < self._max_model_len:
                limit = BESIDE_PINS
            elif longest == pages * self._config.page_size:
                limit = "the KV cache"
            raise too_long("prompt", count, longest, limit, room=more > 0)
        self.check_tokens("prompt token ids", prompt_token_ids)

    def check_tokens(self, what: str, token_ids: Seq[int]) -> None:
        """Raises ValueError, naming `what`, for a token id that the vocabulary does not have."""
        # An array holds integers only: checking its least and its greatest is enough.
        plain = isinstance(token_ids, array) and len(token_ids) > 0
        vocabulary = self._vocabulary
        for token in (min(token_ids), max(token_ids)) if plain else token_ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary:
                raise ValueError(
                    f"{what} must be integers from 0 to {vocabulary - 1}, got {token!r}"
                )

    def _check_params(self, params: SamplingParams) -> None:
        params.check_vocabulary(self._vocabulary)
        if params.bad_words:
            raise ValueError(
                f"bad_words must be token ids here (bad_words_token_ids), since the engine knows "
                f"no text, got {params.bad_words!r}"
            )
        if params.prediction is not None:
            raise ValueError(
                f"prediction must be token ids here (prediction_token_ids), since the engine knows "
                f"no text, got {params.prediction!r:.100}"
            )
        if params.chooses:
            raise ValueError(
                f"best_of must not be above n here, since the caller, who has the texts, chooses "
                f"among them once all have ended; got {params.best_of}"
            )

    def _check_priority(self, priority: int) -> None:
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ValueError(f"priority must be an integer, got {priority!r}")
        if priority and self._config.scheduling_policy != "priority":
            raise ValueError(
                f"priority needs scheduling_policy 'priority', which is "
                f"{self._config.scheduling_policy!r}; got {priority}"
            )

    def _check_queue(self, tokens: int) -> None:
        requests, waiting = self._sequences.queued()
        for limit, waits, more in (
            ("max_queued_requests", requests, 1),
            ("max_queued_tokens", waiting, tokens),
        ):
            allowed = getattr(self._config, limit)
            if allowed is not None and waits + more > allowed:
                self._counters.refused[limit] += 1
                full = QueueFull(
                    f"the queue is full: {waits} of {limit} {allowed} wait, and this request "
                    f"brings {more} more; try again later"
                )
                full.limit = limit
                raise full


def _checked_held(held_elsewhere: int, prompt_token_ids: Seq[int]) -> int:
    """The prompt tokens that another replica holds, at most all. Raises ValueError if wrong."""
    whole = isinstance(held_elsewhere, int) and not isinstance(held_elsewhere, bool)
    if not whole or held_elsewhere < 0:
        raise ValueError(f"held_elsewhere must be an integer of at least 0, got {held_elsewhere!r}")
    return min(held_elsewhere, len(prompt_token_ids))
