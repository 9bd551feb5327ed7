"""The engine: requests of token ids in, tokens out, one mixed batch a step."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from pathlib import Path

from coppice.radix import PagePool, Pin, PinRefused, Pins, RadixTree
from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.adapting import EngineAdapters
from coppice.runtime.engine.beams import BeamSearches
from coppice.runtime.engine.drafting import Drafting
from coppice.runtime.engine.intake import Intake
from coppice.runtime.engine.peek import Peek
from coppice.runtime.engine.publishing import Publishing
from coppice.runtime.engine.recount import is_balanced, recount
from coppice.runtime.engine.sequences import Sequences
from coppice.runtime.engine.step import Steps
from coppice.runtime.engine.tiering import CLOSING_SECONDS, digest_anew, open_tiers
from coppice.runtime.metrics.counters import EngineCounters
from coppice.runtime.metrics.prompt_accounts import PromptAccounts
from coppice.runtime.model.adapters.names import Adapter
from coppice.runtime.model.files.path import resolve_model
from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.requests.lora_request import LoRARequest
from coppice.runtime.requests.pooling_params import PoolingParams
from coppice.runtime.requests.request import StepOutput, Unfinished
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.runner.member import open_runner
from coppice.runtime.runner.ranks.ending import EndingGroup
from coppice.runtime.runner.step_sizes import sized
from coppice.runtime.sampling.beam_search import WatchLines
from coppice.runtime.sampling.drafts.draft import Speculation
from coppice.runtime.sampling.drafts.policy import TreeSpeculation
from coppice.runtime.sampling.grammars import Grammars
from coppice.runtime.schedule.paging import Paging
from coppice.runtime.schedule.scheduler import Scheduler
from coppice.runtime.startup.build import log_build
from coppice.runtime.startup.garbage import without_collecting
from coppice.runtime.startup.memory import give_back_memory


class Engine:
    """Serves one model from one KV cache. Token ids only: no text, no HTTP.

    Not thread-safe: one thread calls it. A step that fails ends the requests in it with an error,
    and the engine continues; but if the device does not compute any more, that step and all later
    calls that need it raise DeviceLost.

        engine = Engine(EngineConfig(model="path"))
        engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=8))
        while engine.has_unfinished():
            for output in engine.step(): ...
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        tokenizer: str | Path | None = None,
        watch_lines: WatchLines | None = None,
    ) -> None:
        """Loads the model.

        Args:
            config: the engine's options.
            tokenizer: path or name of the tokenizer, which grammars need; None: the model's.
            watch_lines: finds stop strings for beam searches; without it they are refused.
        """
        log_build()
        self.config = config = sized(config)
        source = resolve_model(config.model, config.revision) if tokenizer is None else tokenizer
        with without_collecting():
            self.drafting = Drafting(config, Path(source))
            self.runner = open_runner(config, self.drafting.beside)
        with ExitStack() as undo:  # where something fails, nothing that was started runs on
            undo.callback(self.drafting.close)
            undo.callback(self.runner.close)
            self._assemble(source, watch_lines, undo)
            undo.pop_all()
        if self.runner.device.type == "cpu":
            give_back_memory()

    def _assemble(
        self, source: str | Path, watch_lines: WatchLines | None, undo: ExitStack
    ) -> None:
        """Makes all that the engine has beside the model; `undo` ends what was started."""
        config = self.config
        self.model_config = self.runner.model_config
        self.max_model_len = self.runner.max_model_len
        self.num_pages, self.memory = self.runner.num_pages, self.runner.memory
        self.counters = EngineCounters()
        self.accounts = PromptAccounts(self.num_pages * config.page_size, self.counters)
        self.pins = Pins(self._new_tree(), config.pin_budget)
        paging = Paging(
            self.pins.tree,
            enable_prefix_caching=config.enable_prefix_caching,
            accounts=self.accounts,
        )
        self.scheduler = Scheduler(
            paging,
            max_num_seqs=config.most_seqs,
            max_num_batched_tokens=config.most_tokens,
            policy=config.scheduling_policy,
            overtaking=config.overtaking,
            max_step_stretch=config.max_step_stretch,
            counters=self.counters,
        )
        vocabulary, eos = self.model_config.vocab_size, self.model_config.eos_token_ids
        self._sequences = Sequences(self.scheduler, self.counters)
        self._searches = BeamSearches(self._sequences, paging, eos, watch_lines)
        self.adapters = EngineAdapters(
            config, self.runner, self._sequences, self.pins, lambda: self.tree, self.counters
        )
        self.intake = Intake(
            config,
            Grammars(source, vocabulary, eos),
            self._sequences,
            self.pins,
            self.counters,
            self.adapters.named,
            vocabulary=vocabulary,
            max_model_len=self.max_model_len,
            recipe=self.runner.recipe,
        )
        undo.callback(self.intake.close)
        self.adapters.cleared = self._adapter_cleared
        self._steps = Steps(
            self.runner,
            self.scheduler,
            self._sequences,
            self._searches,
            counters=self.counters,
            accounts=self.accounts,
            overlap=self.runner.device.type == "cuda"
            if config.async_scheduling is None
            else config.async_scheduling,
        )
        self.tiers = self._steps.tiers = open_tiers(config, self.runner, self.scheduler)
        if self.tiers is not None:
            undo.callback(self.end_tiers, 0.0)
            self.tiers.marks = self.adapters.named.marks
            self.tiers.know(self.intake.namespace(None))
        self.drafting.start(self.runner)
        if self.drafts is not None:
            self.speculate(self.drafts)
        self.events = Publishing(config, self.scheduler, self.counters)

    def _new_tree(self) -> RadixTree:
        pool = PagePool(self.num_pages, self.config.page_size)
        return RadixTree(pool, self.config.eviction_policy)

    @property
    def tree(self) -> RadixTree:
        return self.scheduler.paging.tree

    @property
    def drafts(self) -> TreeSpeculation | None:
        """What the options have steps compute beside a token of each sequence."""
        return self.drafting.speculation

    # -- requests ----------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Seq[int],
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        tenant: str | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        held_elsewhere: int = 0,
    ) -> None:
        """Queues a request.

        Requests reuse each other's KV only if `cache_salt` and `tenant` are equal. `priority` is
        the request's class under the scheduling policy "priority": the least number is served
        first. `lora_request` names its adapter, which is loaded if it is not yet. `held_elsewhere`
        says how many tokens of the prompt, from its beginning, another replica holds: those of them
        that are computed here have the cause `other_replica`.

        Raises ValueError if the request can't be served, QueueFull if too much waits already, and
        DeviceLost if the device has failed for good; nothing is queued then.
        """
        self._check_ready()
        self.intake.add(
            request_id,
            prompt_token_ids,
            params,
            cache_salt=cache_salt,
            tenant=tenant,
            priority=priority,
            lora_request=lora_request,
            held_elsewhere=held_elsewhere,
        )

    def add_pooling(
        self,
        request_id: str,
        prompt_token_ids: Seq[int],
        params: PoolingParams,
        *,
        cache_salt: str | None = None,
        tenant: str | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        held_elsewhere: int = 0,
    ) -> None:
        """Queues a request for a vector or a score, which comes as `StepOutput.pooled` at its end.

        Raises as `add_request` does; ValueError also if the checkpoint is not made for it.
        """
        self._check_ready()
        self.intake.add_pooled(
            request_id,
            prompt_token_ids,
            params,
            cache_salt=cache_salt,
            tenant=tenant,
            priority=priority,
            lora_request=lora_request,
            held_elsewhere=held_elsewhere,
        )

    def add_beam_search(
        self,
        request_id: str,
        prompt_token_ids: Seq[int],
        params: BeamSearchParams,
        *,
        cache_salt: str | None = None,
        tenant: str | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        held_elsewhere: int = 0,
    ) -> None:
        """Queues a beam search; its results all come in the step in which it ends, best first.

        Raises as `add_request` does; ValueError also if `beam_width` beams can't run together.
        """
        self._check_ready()
        self._searches.check(params)
        first = self.intake.add(
            request_id,
            prompt_token_ids,
            params,
            cache_salt=cache_salt,
            tenant=tenant,
            priority=priority,
            lora_request=lora_request,
            held_elsewhere=held_elsewhere,
        )
        self._searches.begin(first, params)

    def check_device(self) -> None:
        """Raises DeviceLost if the device, or a rank of the model, has failed for good."""
        self._steps.check_device()

    def when_lost(self, tell: Callable[[], None]) -> None:
        """Has `tell` called, in any thread, when a rank of the model ends by itself."""
        group = self.runner.group
        if isinstance(group, EndingGroup):
            group.when_ended = tell
            if group.ended is not None:  # it may have ended before
                tell()

    def _check_ready(self) -> None:
        self.check_device()
        if self.asleep:
            raise ValueError("request: refused while the engine sleeps; wake_up comes first")

    def abort(self, request_id: str, index: int | None = None) -> bool:
        """Ends a request, or only its sequence `index`, which counts as stopped by its reader.

        Its pages are given back. What it computed stays in the tree; of a beam search, its prompt
        and the results that it had. Returns False for an unknown request or one that has finished.
        """
        sequences = self._sequences.of(request_id)
        ended = [each for each in sequences if index is None or each.index == index]
        for sequence in ended:
            keep = not (sequence.request.beam_search and sequence.num_generated)
            self._steps.end(sequence, "abort" if index is None else "stop", keep=keep)
        self._check_when_idle()
        self.adapters.refresh()
        return bool(ended)

    def has_unfinished(self) -> bool:
        return self._sequences.num_requests > 0

    @property
    def num_unfinished(self) -> int:
        """Requests that run or wait."""
        return self._sequences.num_requests

    @property
    def unfinished(self) -> list[str]:
        """Their names."""
        return self._sequences.names()

    # -- the step ----------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Runs every kind of step once, so that no request waits for code that is compiled.

        On a GPU the start has done so. On a CPU the first steps compile what is not kept on disk,
        and what drafts add to the time of a step is measured.
        """
        if not self.runner.warmed:
            self.runner.followers.tell("warm_up")
            self.runner.warm_up()
            if self.drafts is not None:
                self.drafts.costs.expect(self.runner.draft_seconds)

    def speculate(self, speculation: Speculation | None) -> None:
        """Has steps compute what `speculation` proposes; None: a token a step. Texts are the same.

        Call it while no step is under way, which it is between two calls of `step` with overlap.
        """
        self._steps.speculate(speculation)

    def step(self) -> list[StepOutput]:
        """Schedules, runs and commits one mixed batch; [] when there is nothing to do.

        With async_scheduling the outputs are those of the batch before. Raises DeviceLost if the
        device has failed for good; all requests have ended then, and the process should.
        """
        try:
            outputs = self._steps.make()
        finally:
            self._check_when_idle()
        self.accounts.evictions(self.tree)
        self.pins.refresh()
        self.adapters.refresh()
        if self.tiers is not None:
            self.tiers.beside(idle=not self.has_unfinished())
        self.events.flush()
        return outputs

    def between(self) -> float | None:
        """Does a little of what is left for times without requests; call it while none runs.

        Returns after how many seconds to call it again, if none has come; None: nothing is left.
        """
        if self.tiers is None or self.asleep or self.has_unfinished():
            return None
        pause = self.tiers.between()
        self.events.flush()
        return pause

    def peek(
        self,
        prompt_token_ids: Seq[int],
        *,
        cache_salt: str | None = None,
        tenant: str | None = None,
        prompt_logprobs: int | None = None,
        prompt_logprobs_start: int = 0,
        lora_request: LoRARequest | None = None,
        held_elsewhere: int = 0,
    ) -> Peek:
        """What a request would hit if it began now, and why the rest would miss.

        Changes neither the cache, nor the order of its use, nor any account. Raises ValueError for
        a prompt that can't be served.
        """
        return self.intake.peek(
            prompt_token_ids,
            cache_salt=cache_salt,
            tenant=tenant,
            prompt_logprobs=prompt_logprobs,
            prompt_logprobs_start=prompt_logprobs_start,
            lora_request=lora_request,
            held_elsewhere=held_elsewhere,
            paging=self.scheduler.paging,
            waiting=self.scheduler.waiting,
            accounts=self.accounts,
        )

    # -- pins --------------------------------------------------------------------------------

    def pin(
        self,
        name: str,
        token_ids: Seq[int],
        *,
        cache_salt: str | None = None,
        tenant: str | None = None,
        ttl: float | None = None,
        lora_request: LoRARequest | None = None,
        prompt_token_ids: Seq[int] | None = None,
    ) -> Pin:
        """Keeps a prefix in the cache until `unpin`, or until it was unused for `ttl` seconds.

        The part that is cached already is kept from now on, the rest once a request has computed
        it. A pin of this name with the same prefix is renewed. Raises PinRefused, a ValueError, if
        the name stands for another prefix, if `pin_budget` does not allow it, or if a request that
        was accepted could no longer be served beside it; ValueError for bad arguments.

        With `lora_request` it is the prefix as that adapter computes it, in a prompt that is
        `prompt_token_ids` if it does not end with the prefix.
        """
        if not self.config.enable_prefix_caching:
            raise PinRefused(f"pin {name!r}: there is no cache, enable_prefix_caching is off")
        prompt = token_ids if prompt_token_ids is None else prompt_token_ids
        use, namespace = self.intake.place(prompt, cache_salt, tenant, lora_request)
        prefix: Seq[int] | bytes = token_ids
        if use is not None:
            prefix = use.keys(array("i", token_ids))
        pin = self.pins.pin(name, prefix, namespace, ttl=ttl)
        most = self._sequences.longest()
        if not self.intake.would_fit(most):
            self.unpin(name)
            raise PinRefused(
                f"pin {name!r}: a request that may grow to {most} tokens could not be served "
                f"beside it; try again when it has ended"
            )
        return pin

    def unpin(self, name: str) -> bool:
        """Ends a pin; what it kept may be evicted from now on. Returns False if there is none."""
        return self.pins.unpin(name)

    # -- the cache ---------------------------------------------------------------------------

    def reset_cache(self) -> None:
        """Empties the cache and ends all pins. Raises Unfinished while requests run or wait."""
        if unfinished := self._sequences.num_requests:
            raise Unfinished(f"reset_cache: refused while {unfinished} requests are unfinished")
        self.pins.clear()
        self.tree.reset()
        if self.tiers is not None:
            self.tiers.emptied()
        self.intake.known_logprobs.clear()
        self.drafting.forget()
        self.accounts.cleared(self.tree)

    # -- sleep -------------------------------------------------------------------------------

    def sleep(self, level: int = 1) -> None:
        """Frees memory while nothing is asked of it; the calls are `wake_up` and reports then.

        The KV cache is emptied and freed; pins keep their prefixes, to be computed again. At level
        1 the weights stay in main memory: on a CPU that is where they are. At level 2 they are
        freed, and `wake_up` reads them from the checkpoint. Without effect on a sleeping engine.

        Raises ValueError for another level, Unfinished while requests run or wait.
        """
        if isinstance(level, bool) or level not in (1, 2):
            raise ValueError(f"level must be 1 or 2, got {level!r}")
        if unfinished := self._sequences.num_requests:
            raise Unfinished(f"sleep: refused while {unfinished} requests are unfinished")
        if not self.asleep:
            self._empty()
            self.intake.known_logprobs.clear()
            self.drafting.sleep(level)
            self.runner.sleep(level)

    def wake_up(self) -> None:
        """Undoes `sleep`; without effect on an engine that is awake.

        Raises ValueError if the weights can't be read any more; it sleeps on then.
        """
        if self.asleep:
            read_again = self.runner.asleep == 2
            self.drafting.wake_up()
            self.runner.wake_up()
            if self.tiers is not None and read_again:
                self.tiers.renew(digest_anew(self.config, self.runner))

    def close(self) -> None:
        """Frees cache and weights for good; requests that run end with it. Call nothing after.

        Grammars that wait to be compiled are not; the thread ends that compiles them.
        """
        self.events.close()
        self.intake.close()
        self.end_tiers()
        self.drafting.close()
        self.runner.close()

    def end_tiers(self, seconds: float | None = None) -> None:
        """Stores in tiers what there is time for, and closes them; no step may run after that.

        `seconds`: for which it may store; None: `CLOSING_SECONDS`.
        """
        if self.tiers is not None:
            self.tiers.close(CLOSING_SECONDS if seconds is None else seconds)
            self.tiers = None

    def end_ranks(self) -> None:
        """Has the model's other ranks end in good order; no step may run after that."""
        if self.runner.group.ended is None:
            self.runner.followers.leave()

    @property
    def asleep(self) -> bool:
        """Whether it sleeps, and takes no requests."""
        return self.runner.asleep > 0

    def check(self) -> None:
        """Recounts every page and lock; raises AssertionError on a mismatch. For tests."""
        recount(self.scheduler, self.pins, self._sequences)
        if self.drafting.model is not None:
            self.drafting.model.check()

    def _check_when_idle(self) -> None:
        """With nothing running every page is free or cached; if not, report it and start anew."""
        if not is_balanced(self.tree, self.scheduler.running, self.pins):
            self._empty()

    def _adapter_cleared(self, adapter: Adapter) -> None:
        """Forgets what is kept of an adapter's requests beside its pages."""
        self.intake.known_logprobs.clear()
        self.drafting.forget_adapter(adapter)
        if self.tiers is not None:
            self.tiers.forget_adapter(adapter.identity)

    def _empty(self) -> None:
        """Begins a new tree; pins keep their prefixes, of which nothing is cached."""
        tree = self._new_tree()
        self.pins.move_to(tree)
        self.scheduler.move_to(tree)
        self.accounts.cleared(tree)
        self.events.move_to(tree)
        if self.tiers is not None:
            self.tiers.move_to(tree)
