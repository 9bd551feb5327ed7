"""The engine: requests of token ids in, tokens out, one mixed batch a step."""

from __future__ import annotations

import logging
import random
import time
from array import array
from collections.abc import Sequence as Seq
from dataclasses import replace

import torch

from coppice.kernels.interface import select_backend
from coppice.radix import (
    Namespace,
    PagePool,
    Pin,
    PinRefused,
    Pins,
    RadixTree,
    check,
)
from coppice.runtime.accounts import PromptAccounts
from coppice.runtime.batch import Batch, build_batch
from coppice.runtime.beam_search import BeamSearch, BeamSearchParams
from coppice.runtime.beams import BeamGroup
from coppice.runtime.config import EngineConfig
from coppice.runtime.logprobs import Logprobs
from coppice.runtime.memory import plan_cache, zeroed
from coppice.runtime.model_config import load_model_config
from coppice.runtime.paging import Paging
from coppice.runtime.prompt_logprobs import KnownLogprobs, score_prompts
from coppice.runtime.report import CacheReport, Counters
from coppice.runtime.request import QueueFull, Request, Sequence, Status, StepOutput
from coppice.runtime.sampler import Sampled, Sampler
from coppice.runtime.sampling_params import SamplingParams
from coppice.runtime.scheduler import Schedule, Scheduler
from coppice.runtime.weights import load_decoder, resolve_dtype, resolve_model

logger = logging.getLogger(__name__)

TOP_PREFIXES = 8


class Engine:
    """Serves one model from one KV cache. Token ids only: no text, no HTTP.

    Not thread-safe: one thread calls it. A step that fails ends the requests in it with an error,
    and the engine goes on.

        engine = Engine(EngineConfig(model="path"))
        engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=8))
        while engine.has_unfinished():
            for output in engine.step(): ...
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.device = torch.device("cpu" if config.device == "auto" else config.device)
        path = resolve_model(config.model)
        self.model_config = load_model_config(path)
        model_length = self.model_config.max_position
        if config.max_model_len is not None and config.max_model_len > model_length:
            raise ValueError(
                f"max_model_len must be at most {model_length}, the model's own, "
                f"got {config.max_model_len}"
            )
        dtype = resolve_dtype(config.dtype, self.model_config, self.device)
        self.attention = select_backend(config.attention_backend, self.device)
        if dtype not in self.attention.dtypes:
            allowed = ", ".join(str(each).removeprefix("torch.") for each in self.attention.dtypes)
            raise ValueError(
                f"dtype: the {self.attention.name} attention backend computes in {allowed}, got "
                f"{str(dtype).removeprefix('torch.')}"
            )
        self.decoder = load_decoder(
            path,
            self.model_config,
            dtype=dtype,
            device=self.device,
            load_format=config.load_format,
            quantization=config.quantization,
            seed=config.seed,
        )
        pages, self.memory = plan_cache(config, self.model_config, dtype)
        self.max_model_len = min(config.max_model_len or model_length, pages * config.page_size)
        shape = (
            pages,
            config.page_size,
            self.model_config.num_kv_heads,
            self.model_config.head_dim,
        )
        self.kv_cache = [
            (zeroed(shape, dtype, self.device), zeroed(shape, dtype, self.device))
            for _ in range(self.model_config.num_layers)
        ]
        self.num_pages = pages
        self.counters = Counters()
        self._sampler = Sampler(self.model_config.eos_token_ids)
        self._seeds = random.Random(config.seed)
        self._known_logprobs = KnownLogprobs(
            self.model_config.vocab_size, enabled=config.enable_prefix_caching
        )
        self._requests: dict[str, list[Sequence]] = {}  # their unfinished sequences
        self._beams: dict[str, BeamGroup] = {}  # of the requests that are beam searches
        self._arrivals = 0
        self.accounts = PromptAccounts(pages * config.page_size)
        self._new_pages()

    def _new_pages(self) -> None:
        tree = RadixTree(
            PagePool(self.num_pages, self.config.page_size), self.config.eviction_policy
        )
        self.pins = Pins(tree, self.config.pin_budget)
        self.paging = Paging(
            tree, enable_prefix_caching=self.config.enable_prefix_caching, accounts=self.accounts
        )
        self.scheduler = Scheduler(
            self.paging,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            policy=self.config.scheduling_policy,
            overtaking=self.config.overtaking,
            max_step_stretch=self.config.max_step_stretch,
        )

    @property
    def tree(self) -> RadixTree:
        return self.paging.tree

    # -- requests ----------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Seq[int],
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> None:
        """Queues a request.

        Requests reuse each other's KV only if their `cache_salt` is equal. `priority` is the
        request's class under the scheduling policy "priority": the least number first.

        Raises ValueError if it can't be served, and QueueFull if too much waits already; nothing is
        queued then.
        """
        self._add(request_id, prompt_token_ids, params, cache_salt, priority)

    def add_beam_search(
        self,
        request_id: str,
        prompt_token_ids: Seq[int],
        params: BeamSearchParams,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> None:
        """Queues a beam search; its results all come in the step in which it ends, best first.

        Raises as `add_request` does; ValueError also if `beam_width` beams can't run together.
        """
        if params.beam_width > self.config.max_num_seqs:
            raise ValueError(
                f"beam_width must be at most max_num_seqs, {self.config.max_num_seqs}, "
                f"got {params.beam_width}"
            )
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            stop_token_ids=params.stop_token_ids,
            ignore_eos=params.ignore_eos,
        )
        size = self.config.page_size
        # Each beam has pages of its own behind the prompt, one for the copy of its last page, and
        # one more while it forks.
        own = -(-params.max_tokens // size) + 2
        needed = len(prompt_token_ids) // size + params.beam_width * own
        if needed > (there := self.num_pages - self.pins.promised_pages()):
            raise ValueError(
                f"beam_width: {params.beam_width} beams of {params.max_tokens} tokens behind this "
                f"prompt take up to {needed} pages, the KV cache has {there} that no pin keeps"
            )
        first = self._add(
            request_id, prompt_token_ids, sampling, cache_salt, priority, beam_search=True
        )
        stop_ids = set(sampling.stop_ids)
        if not params.ignore_eos:
            stop_ids.update(self.model_config.eos_token_ids)
        room = first.request.max_length - len(first.request.prompt_token_ids)
        search = BeamSearch(params, stop_ids=stop_ids, max_tokens=room)
        self._beams[request_id] = BeamGroup(search, first)

    def _add(
        self,
        request_id: str,
        prompt_token_ids: Seq[int],
        params: SamplingParams,
        cache_salt: str | None,
        priority: int,
        *,
        beam_search: bool = False,
    ) -> Sequence:
        if request_id in self._requests:
            raise ValueError(
                f"request_id must be unique among running requests, got {request_id!r}"
            )
        self.check_prompt(prompt_token_ids, params)
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ValueError(f"priority must be an integer, got {priority!r}")
        if priority and self.config.scheduling_policy != "priority":
            raise ValueError(
                f"priority needs scheduling_policy 'priority', which is "
                f"{self.config.scheduling_policy!r}; got {priority}"
            )
        self._check_queue(len(prompt_token_ids))
        room = self.longest_request - len(prompt_token_ids)
        limit = room if params.max_tokens is None else min(room, params.max_tokens)
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        request = Request(
            request_id=request_id,
            prompt_token_ids=array("i", prompt_token_ids),
            params=params,
            namespace=self._namespace(cache_salt),
            arrival=self._arrivals,
            seed=seed,
            max_length=len(prompt_token_ids) + limit,
            priority=priority,
            beam_search=beam_search,
        )
        self._arrivals += 1
        sequence = Sequence(request)
        sequence.prompt_logprobs = self._known_logprobs.begin(request)
        self._requests[request_id] = [sequence]
        self.scheduler.add(sequence)
        return sequence

    def _check_queue(self, tokens: int) -> None:
        """Raises QueueFull if a request of so many prompt tokens may not wait as well."""
        queue, config = self.scheduler.waiting, self.config
        for limit, waits, more in (
            ("max_queued_requests", len(queue), 1),
            ("max_queued_tokens", queue.tokens, tokens),
        ):
            allowed = getattr(config, limit)
            if allowed is not None and waits + more > allowed:
                raise QueueFull(
                    f"the queue is full: {waits} of {limit} {allowed} wait, and this request "
                    f"brings {more} more; try again later"
                )

    def check_prompt(self, prompt_token_ids: Seq[int], params: SamplingParams) -> None:
        """Raises ValueError if the prompt can't be served."""
        count = len(prompt_token_ids)
        if not count:
            raise ValueError("prompt must have at least one token, got none")
        vocabulary = self.model_config.vocab_size
        for token in prompt_token_ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary:
                raise ValueError(
                    f"prompt token ids must be integers from 0 to {vocabulary - 1}, got {token!r}"
                )
        if count >= (longest := self.longest_request):
            pool = self.num_pages * self.config.page_size
            limit = "the KV cache" if longest == pool else "max_model_len"
            if longest < self.max_model_len:
                limit = "the part of the KV cache that no pin keeps"
            raise ValueError(
                f"prompt must be shorter than {longest} tokens ({limit}), so that "
                f"there is room for at least one more, got {count}"
            )
        params.check_vocabulary(vocabulary)
        if params.bad_words:
            raise ValueError(
                f"bad_words must be token ids here (bad_words_token_ids), since the engine knows "
                f"no text, got {params.bad_words!r}"
            )

    @property
    def longest_request(self) -> int:
        """Tokens, prompt and output together, that a request may have beside the present pins."""
        free_of_pins = self.num_pages - self.pins.promised_pages()
        return min(self.max_model_len, free_of_pins * self.config.page_size)

    def _namespace(self, cache_salt: str | None) -> Namespace:
        return Namespace(model=self.config.model, cache_salt=cache_salt)

    def abort(self, request_id: str, index: int | None = None) -> bool:
        """Ends a request, or only its sequence `index`: its pages are given back.

        What it computed stays in the tree. False if it is unknown or has finished already.
        """
        sequences = self._requests.get(request_id, [])
        ended = [each for each in sequences if index is None or each.index == index]
        for sequence in ended:
            self._end(sequence)
        self._check_when_idle()
        return bool(ended)

    def _end(self, sequence: Sequence, *, keep: bool = True) -> None:
        """A sequence has ended; so has its request, if it was the last one."""
        self.scheduler.finish(sequence, keep=keep)
        request_id = sequence.request.request_id
        sequences = self._requests[request_id]
        sequences.remove(sequence)
        if not sequences:
            del self._requests[request_id]
            self._beams.pop(request_id, None)

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    # -- the step ----------------------------------------------------------------------------

    def step(self) -> list[StepOutput]:
        """Schedules, runs and commits one mixed batch; [] when there is nothing to do."""
        start = time.perf_counter()
        schedule = self.scheduler.schedule()
        if not schedule.chunks:
            return []
        try:
            batch, sampled = self._run(schedule)
        except BaseException as error:
            # Copies that were to be made may be missing: nothing of this step can be resumed.
            outputs = self._fail(schedule, error)
            if not isinstance(error, Exception):
                raise
            logger.exception("a step failed; the %d requests in it end", len(schedule.chunks))
            return outputs
        seconds = time.perf_counter() - start
        self.scheduler.observe(schedule, seconds)
        self._count(schedule, seconds)
        outputs = self._commit(schedule, batch, sampled)
        self.pins.refresh()
        self._check_when_idle()
        return outputs

    @torch.inference_mode()
    def _run(self, schedule: Schedule) -> tuple[Batch, Sampled]:
        if schedule.copies:
            self.attention.copy_pages(
                self.kv_cache,
                [copy.source for copy in schedule.copies],
                [copy.target for copy in schedule.copies],
            )
        batch = build_batch(schedule, self.config.page_size, self.device)
        prepared = self.attention.prepare(batch.plan, num_pages=self.num_pages)
        inputs = (
            batch.token_ids,
            batch.positions,
            batch.slots,
            self.kv_cache,
            self.attention,
            prepared,
        )
        if batch.scored:
            rows = torch.cat((batch.logit_rows, batch.prompt_rows))
            hidden = self.decoder.hidden_states(*inputs, rows)
            logits = self.decoder.logits(hidden[: len(batch.sampled)])
            score_prompts(hidden[len(batch.sampled) :], batch.scored, self.decoder.logits)
        else:
            logits = self.decoder.forward(*inputs, batch.logit_rows)
        shared = self._with_siblings(batch)
        if len(shared) > len(logits):
            logits = logits[shared]
        beams = [row for row, each in enumerate(batch.sampled) if each.request.beam_search]
        if beams:
            self._score_beams(logits[beams], [batch.sampled[row] for row in beams])
            others = [row for row, each in enumerate(batch.sampled) if not each.request.beam_search]
            logits = logits[others]
            batch.sampled[:] = [batch.sampled[row] for row in others]
        return batch, self._sampler.sample(logits, batch.sampled)

    def _score_beams(self, logits: torch.Tensor, sequences: list[Sequence]) -> None:
        """Hands each beam's best continuations to its search. `logits` float32 [R, vocabulary]."""
        searches = [self._beams[each.request.request_id] for each in sequences]
        temperatures = [group.search.params.temperature or 1.0 for group in searches]
        scale = torch.tensor(temperatures, device=logits.device).unsqueeze(1)
        logprobs = (logits / scale).log_softmax(dim=-1)
        most = min(logits.shape[1], max(group.search.continuations for group in searches))
        values, tokens = (found.tolist() for found in logprobs.topk(most, dim=-1))
        for row, (group, sequence) in enumerate(zip(searches, sequences, strict=True)):
            count = group.search.continuations
            best = zip(tokens[row][:count], values[row][:count], strict=True)
            group.take(sequence, list(best))

    def _advance_beams(self) -> list[StepOutput]:
        """Takes a step of each search whose beams are all computed; results of those that end."""
        outputs = []
        for request_id, group in list(self._beams.items()):
            if not group.complete:
                continue
            first = group.lines[0]
            moves = group.advance()
            for sequence in moves.ended:
                if sequence.status is Status.RUNNING:  # results stay in the tree
                    self.paging.enter(sequence)
            for sequence in moves.dropped:
                self._end(sequence, keep=False)
            if group.search.done:
                self.counters.generated_tokens += sum(
                    len(each.tokens) for each in group.search.results()
                )
                outputs += [
                    replace(
                        self._output(first, result.tokens, result.finish_reason),
                        index=index,
                        score=result.score,
                        cumulative_logprob=result.cumulative_logprob,
                    )
                    for index, result in enumerate(group.search.results())
                ]
                continue
            forked = [self._fork_beam(parent, token) for parent, token in moves.forks]
            self._requests[request_id] += forked
            for sequence, token in moves.tokens:
                waits = sequence.status is Status.WAITING  # it was preempted meanwhile
                if waits:
                    self.scheduler.waiting.remove(sequence)
                sequence.tokens.append(token)
                if waits:
                    self.scheduler.add(sequence)
            group.adopt(forked)
        return outputs

    def _fork_beam(self, parent: Sequence, token: int) -> Sequence:
        child = Sequence(parent.request, parent.index, self._arrivals)
        self._arrivals += 1
        child.forked = True
        child.tokens = parent.tokens[:]
        placed = parent.status is Status.RUNNING and self.scheduler.fork(parent, child)
        child.tokens.append(token)
        if not placed:
            child.cached_tokens, child.counted = parent.cached_tokens, True
            child.preempted = True
            self.scheduler.add(child)
        return child

    def _with_siblings(self, batch: Batch) -> list[int]:
        """Lets the siblings of a request for several sequences be sampled from its prompt's logits.

        Makes them, puts them behind the first one in `batch.sampled`, and returns the row of the
        logits of each of these.
        """
        rows, sampled = [], []
        for row, first in enumerate(batch.sampled):
            request = first.request
            count = 1 if first.forked else request.params.n
            first.forked = True
            sampled.append(first)
            for index in range(1, count):
                sibling = Sequence(request, index, self._arrivals)
                sibling.forked = True
                self._arrivals += 1
                sampled.append(sibling)
            rows += [row] * count
        batch.sampled[:] = sampled
        return rows

    def _commit(self, schedule: Schedule, batch: Batch, sampled: Sampled) -> list[StepOutput]:
        for chunk in schedule.chunks:
            self.scheduler.computed(chunk)
        for sequence in batch.sampled:
            if sequence.index and sequence.status is Status.WAITING:
                siblings = self._requests[sequence.request.request_id]
                self.scheduler.fork(siblings[0], sequence)
                siblings.append(sequence)
        outputs = []
        for row, (sequence, token) in enumerate(zip(batch.sampled, sampled.tokens, strict=True)):
            if row not in sampled.errors:
                sequence.tokens.append(token)
            if sequence.preempted:  # a fork that found no place
                self.scheduler.add(sequence)
            if row in sampled.errors:
                self._end(sequence)
                outputs.append(self._output(sequence, (), "error", None, sampled.errors[row]))
                continue
            self.counters.generated_tokens += 1
            reason, stop = self._finish_reason(sequence, token)
            if reason is not None:
                self._end(sequence)
            logprobs = sampled.logprobs[row]
            outputs.append(self._output(sequence, (token,), reason, stop, logprobs=logprobs))
        return outputs + self._advance_beams()

    def _finish_reason(self, sequence: Sequence, token: int) -> tuple[str | None, int | None]:
        params = sequence.request.params
        if sequence.num_generated >= params.min_tokens:
            if not params.ignore_eos and token in self.model_config.eos_token_ids:
                return "stop", None
            if token in params.stop_ids:
                return "stop", token
        if len(sequence.tokens) >= sequence.request.max_length:
            return "length", None
        return None, None

    def _fail(self, schedule: Schedule, error: BaseException) -> list[StepOutput]:
        """Ends the requests of a step that failed; only what was committed before stays cached."""
        self.counters.failed_steps += 1
        message = f"the step failed: {type(error).__name__}: {error}"
        outputs = []
        failed = {chunk.sequence.request.request_id for chunk in schedule.chunks}
        for request_id in failed:
            for sequence in list(self._requests.get(request_id, ())):
                self._end(sequence, keep=False)
                outputs.append(self._output(sequence, (), "error", None, message))
        self._check_when_idle()
        return outputs

    @staticmethod
    def _output(
        sequence: Sequence,
        tokens: tuple[int, ...],
        reason: str | None,
        stop: int | None = None,
        error: str | None = None,
        logprobs: Logprobs | None = None,
    ) -> StepOutput:
        first = bool(tokens) and sequence.num_generated == len(tokens)
        prompt = sequence.prompt_logprobs
        return StepOutput(
            request_id=sequence.request.request_id,
            index=sequence.index,
            new_token_ids=tokens,
            finish_reason=reason,
            stop_reason=stop,
            error=error,
            num_prompt_tokens=len(sequence.request.prompt_token_ids),
            cached_tokens=max(sequence.cached_tokens, 0),
            logprobs=logprobs,
            prompt_logprobs=prompt.result() if first and prompt is not None else None,
        )

    # -- pins --------------------------------------------------------------------------------

    def pin(
        self,
        name: str,
        token_ids: Seq[int],
        *,
        cache_salt: str | None = None,
        ttl: float | None = None,
    ) -> Pin:
        """Keeps a prefix in the cache until `unpin`, or until it was unused for `ttl` seconds.

        What of it is cached already is kept from now on, the rest once a request has computed it.
        Raises PinRefused, a ValueError, if the name is taken, if `pin_budget` does not allow it, or
        if a request that was accepted could no longer be served beside it; ValueError for bad
        arguments.
        """
        if not self.config.enable_prefix_caching:
            raise PinRefused(f"pin {name!r}: there is no cache, enable_prefix_caching is off")
        pin = self.pins.pin(name, token_ids, self._namespace(cache_salt), ttl=ttl)
        most = max((s[0].request.max_length for s in self._requests.values()), default=0)
        if most > self.longest_request:
            self.pins.unpin(name)
            raise PinRefused(
                f"pin {name!r}: a request that may grow to {most} tokens could not be served "
                f"beside it; try again when it has ended"
            )
        return pin

    def try_pin(self, name: str, token_ids: Seq[int], *, cache_salt: str | None = None) -> bool:
        """Like `pin`, but False instead of PinRefused."""
        try:
            self.pin(name, token_ids, cache_salt=cache_salt)
        except PinRefused:
            return False
        return True

    def unpin(self, name: str) -> bool:
        """Ends a pin; False if there is none of that name."""
        return self.pins.unpin(name)

    # -- counts ------------------------------------------------------------------------------

    def _count(self, schedule: Schedule, seconds: float) -> None:
        """Books a step that ran, before its chunks are committed."""
        counters = self.counters
        counters.steps += 1
        rows = decodes = 0
        for chunk in schedule.chunks:
            sequence = chunk.sequence
            rows += chunk.count
            decodes += chunk.decode
            if not sequence.counted:
                sequence.counted = True
                counters.requests += 1
                counters.prompt_tokens += len(sequence.request.prompt_token_ids)
                counters.hit_tokens += sequence.cached_tokens
        counters.computed_tokens += rows - decodes
        counters.prefill_seconds += seconds * (rows - decodes) / rows
        counters.decode_seconds += seconds * decodes / rows

    def cache_report(self) -> CacheReport:
        """The prefix-hit report as of now. O(nodes of the tree)."""
        counters, tree = self.counters, self.tree
        free, cached = tree.pool.free_pages, tree.evictable_pages
        pinned = self.pins.locked_pages()
        return CacheReport(
            requests=counters.requests,
            prompt_tokens=counters.prompt_tokens,
            hit_tokens=counters.hit_tokens,
            computed_tokens=counters.computed_tokens,
            generated_tokens=counters.generated_tokens,
            preemptions=self.scheduler.preemptions,
            evicted_tokens=tree.evicted_tokens,
            eviction_policy=self.config.eviction_policy,
            prefill_seconds=counters.prefill_seconds,
            decode_seconds=counters.decode_seconds,
            page_size=self.config.page_size,
            pages_total=self.num_pages,
            pages_free=free,
            pages_cached=cached,
            pages_pinned=pinned,
            pages_held=self.num_pages - free - cached - pinned,
            top_prefixes=self.accounts.top_prefixes(tree, TOP_PREFIXES),
            accounts=self.accounts.snapshot(),
        )

    def reset_cache(self) -> None:
        """Empties the cache and ends all pins. Raises RuntimeError while requests run or wait."""
        if self._requests:
            raise RuntimeError(
                f"reset_cache: refused while {len(self._requests)} requests are unfinished"
            )
        self.pins.clear()
        self.tree.reset()
        self._known_logprobs.clear()
        self.accounts.cleared()

    def check(self) -> None:
        """Recounts every page and lock; raises AssertionError on a mismatch. For tests."""
        running = self.scheduler.running
        held = [(s.hold, s.table) for s in running if s.hold is not None]
        assert len(held) == len(running), "a running sequence without a lock"
        pinned = [(pin.hold, array("i")) for pin in self.pins if pin.hold is not None]
        check(self.tree, held + pinned)
        assert {id(s) for sequences in self._requests.values() for s in sequences} == {
            id(s) for s in (*running, *self.scheduler.waiting)
        }, "a request is lost"
        assert all(s.status is Status.RUNNING for s in running)

    def _check_when_idle(self) -> None:
        """With nothing running every page is free or cached; if not, say so and start afresh."""
        tree = self.tree
        if self.scheduler.running or (
            tree.pool.free_pages + tree.cached_pages == self.num_pages
            and tree.locked_pages == self.pins.locked_pages()
        ):
            return
        logger.error(
            "page accounting is off: %d free + %d cached of %d pages, %d locked while nothing "
            "runs; the cache is emptied",
            tree.pool.free_pages,
            tree.cached_pages,
            self.num_pages,
            tree.locked_pages,
        )
        waiting, preemptions = list(self.scheduler.waiting), self.scheduler.preemptions
        pins = list(self.pins)
        self._new_pages()
        self.accounts.cleared()
        for pin in pins:
            self.pins.pin(pin.name, pin.tokens, pin.namespace, ttl=pin.ttl)
        self.scheduler.preemptions = preemptions
        for sequence in waiting:
            self.scheduler.add(sequence)
