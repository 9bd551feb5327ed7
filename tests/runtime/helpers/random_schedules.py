"""Random schedules: requests of all kinds, aborts, pins, failures and sleep, with a fake model.

`RandomSchedule(seed, checkpoint, policy).run()` does one. The seed determines everything random.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fake_adapters import FakeAdapters
from fake_grammars import LateGrammars
from fake_model import Interrupted, fake_engine
from fake_tiers import HandThreads, add_tiers, written
from free_costs import make_free
from random_requests import RECIPES, Asked, random_params, random_tokens
from scripted_drafts import ScriptedDrafts

from coppice.kernels.pages.transfers import DeviceTransfers, PageTransfers
from coppice.radix import POLICIES, FromTiers, Match, PinRefused
from coppice.radix.accounting.counts import Counts
from coppice.runtime.engine.core import Engine
from coppice.runtime.metrics.prompt_accounts import RECENT_REQUESTS
from coppice.runtime.requests.pooling_params import PoolingParams
from coppice.runtime.requests.request import QueueFull, Sequence, StepOutput, Unfinished
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.schedule.paging import Paging
from coppice.runtime.tiers.store import Store

_FAILURES = ("prepare", "copy", "begin", "layer 0", "layer 1", "logits")
_MOST_STEPS = 3000  # of one schedule: far more than any needs that makes progress


@dataclass
class Admission:
    """One admission, and the tokens that came from tiers after it; more may come while `open`."""

    kind: str  # "", "same" or "preempted"
    tokens: int
    hit: int
    tiers: FromTiers | None = None

    @property
    def open(self) -> bool:
        return self.tiers is not None and self.tiers.open


class Admissions:
    """What is admitted and forked, counted apart from the engine's own counts."""

    def __init__(self, paging: Paging) -> None:
        self.all: list[Admission] = []
        self.requests: list[str] = []  # in order of admission
        self.hits: dict[str, int] = {}  # tokens hit at a request's first admission
        self._last: dict[Sequence, Admission] = {}  # of each that had pages at some time
        self._admit, self._fork = paging.admit, paging.fork
        paging.admit, paging.fork = self.admit, self.fork  # type: ignore[method-assign]

    def admit(
        self,
        sequence: Sequence,
        match: Match,
        count: int,
        in_flight: int = 0,
        tiers: FromTiers | None = None,
    ) -> Any:
        copy = self._admit(sequence, match, count, in_flight, tiers)
        request = sequence.request.request_id
        if request not in self.hits:
            self.requests.append(request)
            self.hits[request] = match.length
            kind = ""
        else:
            kind = "preempted" if sequence in self._last else "same"
        self._add(sequence, Admission(kind, len(sequence.tokens), match.length, tiers))
        return copy

    def _add(self, sequence: Sequence, admission: Admission) -> None:
        self.all.append(admission)
        self._last[sequence] = admission

    def loaded(self, sequence: Sequence, tokens: int) -> None:
        """Tokens came from a tier."""
        admission = self._last[sequence]
        assert admission.open
        admission.hit += tokens

    def counts(self, *, open: bool) -> dict[str, int]:
        """What was admitted; `open`: with those for which more may come from tiers."""
        counts = dict.fromkeys(
            ("requests", "prompt_tokens", "hit_tokens", "same_tokens", "same_hit_tokens",
             "preempted_tokens", "preempted_hit_tokens"), 0,
        )  # fmt: skip
        for each in self.all:
            if open or not each.open:
                counts["requests"] += not each.kind
                counts[f"{each.kind}_tokens" if each.kind else "prompt_tokens"] += each.tokens
                counts[f"{each.kind}_hit_tokens" if each.kind else "hit_tokens"] += each.hit
        return counts

    def fork(self, parent: Sequence, child: Sequence) -> Any:
        copy = self._fork(parent, child)
        self._add(child, Admission("same", parent.computed, parent.computed))
        return copy


class RandomSchedule:
    """One random schedule: an engine, and the requests and calls that it gets."""

    def __init__(
        self,
        seed: int,
        checkpoint: Path,
        policy: str,
        stores: Seq[Store] | Callable[[Engine], Seq[Store]] = (),
        *,
        known: Engine | None = None,
        own_drafts: bool = False,
        transfers: Callable[[Engine], PageTransfers] | None = None,
    ) -> None:
        """With `stores` its engine has these tiers, whose reads come late.

        `transfers` makes those that copy its pages; None: those of its device.

        With `known`, an `alone_engine`, it gets drafts, of which many are what follows; with
        `own_drafts` those of the engine's own sources, as if rows and asking cost nothing.
        """
        self.rng = rng = random.Random(seed)
        self.now = 0.0
        size = rng.choice([1, 4, 7, 16])
        least = -(-24 // size)
        seqs = rng.randint(1, 6)
        self.options: dict[str, Any] = {
            "page_size": size,
            "kv_cache_tokens": size * int(least * rng.choice([1, 1.3, 2, 3, 5])),
            "max_num_seqs": seqs,
            "max_num_batched_tokens": seqs + rng.choice([0, 1, 3, 8, 30, 100]),
            "scheduling_policy": policy,
            "enable_prefix_caching": rng.random() < 0.9,
            "overtaking": rng.choice([None, 0.0, 0.15]),
            "max_step_stretch": rng.choice([None, None, 1.2, 2.5]),
            "max_queued_requests": rng.choice([None, None, None, 3]),
            "max_queued_tokens": rng.choice([None, None, None, 80]),
            "eviction_policy": rng.choice(sorted(POLICIES)),
            "pin_budget": rng.choice([0.0, 0.25, 0.5, 1.0]),
            "async_scheduling": rng.random() < 0.5,
            "max_model_len": rng.choice([None, None, None, 20]),
        }
        if own_drafts:
            self.options["speculation"] = "auto"
        self.graphs = rng.choice([None, (1, 2, 4, 6), (1, 3), (6,)])
        if self.graphs is not None:
            self.graphs = [size for size in self.graphs if size <= seqs] or None
        self.engine, self.model = fake_engine(checkpoint, graphs=self.graphs, **self.options)
        self._use_own_clocks()
        self.threads: HandThreads | None = None
        self.loaded: dict[str, int] = {}  # tokens that came back from tiers, by request
        if callable(stores):
            stores = stores(self.engine)
        if stores:
            seconds = rng.choice([None, None, 0.0, 1e-8, 1e-7, 1.0])
            each = (lambda tokens, context: tokens * seconds) if seconds is not None else None
            moved = None if transfers is None else transfers(self.engine)
            if isinstance(moved, DeviceTransfers):
                self.model.coming = moved.coming
            self.threads = add_tiers(
                self.engine, stores, rng, each or (lambda *_: None), transfers=moved
            )
            self._count_loaded()
        self.engine.intake._recipe = rng.choice(RECIPES)
        self.grammars = self.engine.intake._grammars = LateGrammars()
        self.adapters = FakeAdapters(self.engine, rng)
        self.drafts: ScriptedDrafts | None = None
        if known is not None:
            draw = random.Random(f"drafts {seed}")

            def following(sequence: Sequence) -> list[int]:
                request = self.asked[sequence.request.request_id]
                tokens = request.served_alone(known).tokens(sequence.index)
                return tokens[sequence.num_generated :]

            self.drafts = ScriptedDrafts(draw, following, right=draw.choice([0.3, 0.8, 1.0]))
            self.engine.speculate(self.drafts)
        make_free(self.engine)
        self.speculates = own_drafts or known is not None
        self.tree = self.engine.tree
        self.generated = 0  # tokens that came
        self.lost = False  # whether outputs were, in an interrupted step
        self.admissions = Admissions(self.engine.scheduler.paging)
        self.asked: dict[str, Asked] = {}
        self.live: list[Asked] = []
        self.pins: list[str] = []
        system = random_tokens(self.rng, 9)
        self.stems = [[], system, system + random_tokens(self.rng, 14), random_tokens(self.rng, 20)]

    def _use_own_clocks(self) -> None:
        """Replaces clocks, so that the seed determines what the engine does by time."""
        engine, observe = self.engine, self.engine.scheduler.observe
        engine.pins.clock = lambda: self.now

        def timed(schedule: Any, seconds: float) -> None:
            rows = sum(chunk.count for chunk in schedule.chunks)
            observe(schedule, 0.01 + 0.001 * rows)

        engine.scheduler.observe = timed  # type: ignore[method-assign]

    def _count_loaded(self) -> None:
        tiers = self.engine.tiers
        assert tiers is not None
        take = tiers.take

        def taken(sequence: Any, load: Any, tokens: int) -> Any:
            replaced = take(sequence, load, tokens)  # or there is no page for it
            request = sequence.request.request_id
            self.admissions.loaded(sequence, tokens)
            if load.first:
                self.loaded[request] = self.loaded.get(request, 0) + tokens
            return replaced

        tiers.take = taken  # type: ignore[method-assign]

    # -- events ------------------------------------------------------------------------------

    def run(self) -> None:
        rng = self.rng
        for _ in range(rng.randint(10, 60)):
            chance = rng.random()
            if chance < 0.35:
                for _ in range(rng.choice([1, 1, 1, 2, 5])):
                    self.ask()
            elif chance < 0.40:
                self.abort()
            elif chance < 0.45:
                self.pin()
            elif chance < 0.47 and self.pins:
                self.engine.unpin(self.pins.pop(rng.randrange(len(self.pins))))
            elif chance < 0.49:
                self.reset()
            elif chance < 0.50:
                self.sleep()
            elif chance < 0.52 and rng.random() < 0.5:
                self.adapters.change()
                self.check()
            elif chance < 0.51 and self.grammars.late:
                self.compile()
            elif chance < 0.54:
                error = Interrupted() if rng.random() < 0.2 else RuntimeError("on purpose")
                self.model.failure = rng.choice(_FAILURES), error
            else:
                for _ in range(rng.choice([1, 1, 2, 6])):
                    self.step()
        self.finish()

    def finish(self) -> None:
        """Serves the remaining requests, and checks that no page is lost."""
        self.model.failure = None
        steps = 0
        while self.engine.has_unfinished():
            while self.grammars.late:
                self.grammars.arrive()
            self.step()
            steps += 1
            assert steps < _MOST_STEPS, "no progress"
        assert not self.live, "requests whose end was not reported"
        assert not self.engine.scheduler.running
        assert not len(self.engine.scheduler.waiting)
        assert self.engine.step() == []
        self.check()
        self.adapters.check()
        pool, tree = self.engine.tree.pool, self.engine.tree
        assert pool.free_pages + tree.cached_pages == pool.num_pages
        assert tree.locked_pages == self.engine.pins.locked_pages()
        self.engine.pins.clear()
        assert tree.locked_pages == 0
        self.engine.reset_cache()
        assert pool.free_pages == pool.num_pages, "pages are lost"

    def ask(self) -> None:
        """Adds a request; often one that begins like others, or continues one that has ended."""
        rng, engine = self.rng, self.engine
        prompt = list(rng.choice(self.stems))
        if self.asked and rng.random() < 0.4:
            other = rng.choice(list(self.asked.values()))
            prompt = other.prompt + other.tokens(0)
            prompt = prompt[: rng.randint(0, len(prompt))] if rng.random() < 0.5 else prompt
        prompt = prompt + random_tokens(self.rng, rng.choice([0, 1, 1, 3, 8]))
        salt, tenant = rng.choice([None, None, None, "a", "b"]), rng.choice([None, None, "a"])
        adapter = rng.choice([None, None, None, *self.adapters.now.values()])
        request = Asked(str(len(self.asked)), prompt, random_params(rng), salt, tenant, adapter)
        priority = rng.randint(-1, 2) if engine.config.scheduling_policy == "priority" else 0
        waiting, late = len(self._sequences()), len(self.grammars.late)
        idle = not engine.has_unfinished()
        try:
            request.add(engine, priority=priority)
        except (ValueError, QueueFull):
            assert len(self._sequences()) == waiting
            assert len(self.grammars.late) == late
            assert request.name not in {each.request.request_id for each in self._sequences()}
            return
        (mine,) = (s for s in self._sequences() if s.request.request_id == request.name)
        request.longest = mine.request.max_length
        self.asked[request.name] = request
        self.live.append(request)
        if request.form is not None and rng.random() < 0.5:
            self.grammars.arrive(-1)
        if self.threads is not None:
            return
        if idle and not (request.pooled or self.grammars.late) and self.model.failure is None:
            self._peek(request)

    def _peek(self, request: Asked) -> None:
        """What a look at the cache promises to the only request comes true in the next step."""
        params = request.params
        assert not isinstance(params, PoolingParams)
        more = {"prompt_logprobs": getattr(params, "prompt_logprobs", None)}
        try:
            found = self.engine.peek(
                request.prompt, cache_salt=request.salt, tenant=request.tenant,
                lora_request=request.lora_request, **more,
            )  # fmt: skip
        except ValueError:
            return  # no room for a token after the prompt
        self.step()
        admitted = request.name in self.admissions.hits
        if self.engine.config.enable_prefix_caching and admitted:
            account = self.engine.accounts.recent()[-1]
            assert account.request_id == request.name
            assert account.hit_tokens == found.cached_tokens
            assert account.causes == dict(found.causes)

    def _sequences(self) -> list[Any]:
        scheduler = self.engine.scheduler
        return [*scheduler.running, *scheduler.waiting, *self.engine._sequences.compiling]

    def abort(self) -> None:
        if not self.live:
            return
        request = self.rng.choice(self.live)
        index = None
        if not (request.beams or request.pooled) and self.rng.random() < 0.5:
            index = self.rng.randrange(request.sequences)
        present = {s.index for s in self._sequences() if s.request.request_id == request.name}
        ended = present if index is None else present & {index}
        assert self.engine.abort(request.name, index) == bool(ended)
        if index is None or ended == present:
            # This ends the siblings that the first sequence has not forked yet, too.
            ended = set(range(request.sequences))
        request.cut |= {each for each in ended if not request.ended(each)}
        self._forget_ended()
        self.check()

    def pin(self) -> None:
        """Pins the beginning of a prompt."""
        rng = self.rng
        stem = rng.choice([*self.stems, *(each.prompt for each in self.asked.values())])
        tokens = stem[: rng.randint(1, len(stem))] if stem else [3]
        name = f"pin {len(self.pins)} {rng.random()}"
        try:
            self.engine.pin(
                name, tokens, cache_salt=rng.choice([None, "a"]),
                tenant=rng.choice([None, None, "a"]), ttl=rng.choice([None, 3.0, 20.0]),
                lora_request=rng.choice([None, None, *self.adapters.asked()]),
            )  # fmt: skip
        except PinRefused:
            return
        self.pins.append(name)
        self.check()

    def compile(self) -> None:
        """A form arrives, or can't be followed."""
        late = self.grammars.late
        future, _ = late[place := self.rng.randrange(len(late))]
        error = ValueError("on purpose") if self.rng.random() < 0.2 else None
        if error is not None:
            for each in self.engine._sequences.compiling:
                if each.request.grammar is future:
                    self.asked[each.request.request_id].formless = True
        self.grammars.arrive(place, error)

    def sleep(self) -> None:
        """Frees what can be freed, if nothing runs."""
        engine, level = self.engine, self.rng.choice([1, 2])
        if engine.has_unfinished():
            with pytest.raises(Unfinished, match="sleep: refused while"):
                engine.sleep(level)
            return
        engine.sleep(level)
        self.tree = engine.tree
        with pytest.raises(ValueError, match="refused while the engine sleeps"):
            engine.add_request("asleep", [3], SamplingParams())
        if self.rng.random() < 0.5:
            self.pin()
        engine.wake_up()
        assert engine.tree.pool.free_pages == engine.num_pages
        self.check()

    def reset(self) -> None:
        if self.engine.has_unfinished():
            with pytest.raises(RuntimeError, match="reset_cache: refused while"):
                self.engine.reset_cache()
            return
        self.engine.reset_cache()
        assert self.engine.tree.pool.free_pages == self.engine.num_pages
        self.check()

    def step(self) -> None:
        engine, model = self.engine, self.model
        self.now += 1.0
        if self.threads is not None:
            self.threads.work(self.rng.choice([0, 0, 1, 2, None]))
            if self.rng.random() < 0.3:
                written(engine)
            if not engine.has_unfinished():
                self.be_idle()
        armed, before = model.failure, model.steps
        # With tiers copies may be made between steps, and fail there.
        failed_before = engine.scheduler._schedule.failure is not None
        # A step with late tokens before it may have nothing to do but to wait for them.
        scheduled = len(engine.scheduler.running) + len(engine.scheduler.waiting)
        refused = [each for each in self.live if each.formless]
        busy = scheduled and engine._steps._before is None and not refused
        try:
            outputs = engine.step()
        except Interrupted:
            outputs, self.lost = [], True
        failed = failed_before or (armed is not None and model.failure is None)
        if busy and not failed and self.threads is None:
            assert model.steps == before + 1, "unfinished requests, but an empty step"
        for output in outputs:
            self._take(output, failed)
        if failed:
            # The outputs may be lost, and some siblings were never forked.
            names = {each.request.request_id for each in self._sequences()}
            for request in self.live:
                if request.name not in names:
                    request.cut |= {i for i in range(request.sequences) if not request.ended(i)}
        self._forget_ended()
        self.check()

    def be_idle(self) -> None:
        """For some time no request comes: what is hottest comes back, and is as it was."""
        assert self.threads is not None
        for _ in range(self.rng.choice([0, 1, 3, 20])):
            self.engine.between()
            self.threads.work(1)
        self.check()

    def _take(self, output: StepOutput, failed: bool) -> None:
        request = self.asked[output.request_id]
        assert request.beams or not request.ended(output.index), "an output after the end"
        if output.finish_reason == "error":
            params = request.params
            broken = isinstance(params, SamplingParams) and params.logits_processors
            assert failed or broken or request.formless, output.error
            request.cut.add(output.index)
            return
        assert output.error is None
        assert 0 <= output.cached_tokens < len(request.prompt)
        self.generated += len(output.new_token_ids)
        request.outputs.setdefault(output.index, []).append(output)

    def _forget_ended(self) -> None:
        self.live = [each for each in self.live if not all(map(each.ended, range(each.sequences)))]
        names = {each.request.request_id for each in self._sequences()}
        assert names == {each.name for each in self.live}, "a request is lost, or lives on"

    def check(self) -> None:
        """Recounts every page and lock; at some steps also checks the KV of every page."""
        assert self.engine.tree is self.tree, "the page accounting was repaired"
        self.engine.check()
        if self.speculates:
            size = self.engine.config.page_size
            for sequence in self.engine.scheduler.running:
                if self.engine.tiers is None or not sequence.remaining > 1:
                    assert len(sequence.table) == -(-sequence.computed // size), "pages of a draft"
        self._check_queue()
        self._check_accounts()
        if self.engine.tiers is not None:
            # What has left since the last step is poisoned now.
            failure, self.model.failure = self.model.failure, None
            self.engine.tiers.flush()
            self.model.failure = failure
        if self.rng.random() < 0.2 or not self.engine.has_unfinished():
            self.model.check_cache()
        self.model.poison()

    def _check_queue(self) -> None:
        """The queue has the number of cached tokens that the tree has."""
        queue, paging = self.engine.scheduler.waiting, self.engine.scheduler.paging
        for place in queue._places.values():
            if paging.caching and not place.sequence.private:
                known = queue._trees[place.sequence.request.namespace].cached(place.tokens)
                assert known == paging.cached(place.sequence), "the queue missed a change"

    def _check_accounts(self) -> None:
        """Accounts and counters have the requests, prompt and hit tokens that were admitted."""
        truth, counters = self.admissions.counts(open=True), self.engine.counters
        assert counters.requests == truth["requests"]
        assert counters.prompt_tokens == truth["prompt_tokens"]
        assert counters.hit_tokens == truth["hit_tokens"]
        assert sum(counters.finished.values()) == len(self.asked) - len(self.live)
        if not self.lost:
            assert counters.generated_tokens == self.generated
        if self.engine.config.enable_prefix_caching:
            counts, truth = self.engine.accounts.counts(), self.admissions.counts(open=False)
            assert {name: getattr(counts, name) for name in truth} == truth
            assert sum(counts.causes.values()) == counts.computed_tokens
            assert min(counts.causes.values()) >= 0
            self._check_loaded(counts)
            recent = [each.request_id for each in self.engine.accounts.recent()]
            assert recent == self.admissions.requests[-RECENT_REQUESTS:]
        hits = self.admissions.hits
        for request in self.asked.values():
            for outputs in request.outputs.values():
                cached = hits[request.name] + self.loaded.get(request.name, 0)
                assert all(each.cached_tokens == cached for each in outputs)
                by_tier = [each.cached_by_tier for each in outputs]
                if self.threads is None:
                    assert not any(by_tier)
                else:
                    assert all(each and sum(each.values()) == cached for each in by_tier)

    def _check_loaded(self, counts: Counts) -> None:
        """Accounts have what tiers say that they brought back; all of it once nothing runs."""
        if self.engine.tiers is None:
            return
        told = self.engine.tiers.told.tiers
        closed = [each for each in self.admissions.all if not (each.open or each.kind)]
        by_tier = [each.tiers.tokens() for each in closed if each.tiers is not None]
        for tier, tokens in counts.loaded.items():
            assert tokens == sum(each.get(tier, 0) for each in by_tier)
            assert tokens <= (told[tier].loaded_tokens if tier in told else 0)
        assert counts.loaded_evicted <= counts.loaded_tokens
        if not self.engine.scheduler.running:
            assert counts.loaded_tokens == sum(self.loaded.values())

    # -- each alone --------------------------------------------------------------------------

    @staticmethod
    def alone_engine(checkpoint: Path) -> Engine:
        """An engine with room for any request, and without a cache."""
        engine, _ = fake_engine(
            checkpoint, page_size=16, kv_cache_tokens=4096, max_num_seqs=8,
            enable_prefix_caching=False,
        )  # fmt: skip
        engine.intake._grammars = LateGrammars(late=False)
        return engine

    def compare_with_each_alone(self, engine: Engine) -> int:
        """Serves each request again, alone in `engine`; returns how many were compared."""
        engine.intake._recipe = self.engine.intake._recipe
        asked = [each for each in self.asked.values() if each.outputs]
        for request in asked:
            request.check_form()
            request.compare_with_alone(engine)
        return len(asked)
