"""The engine's step: compute what is scheduled, sample, commit; end whatever fails in it."""

from __future__ import annotations

import logging
import time
from collections.abc import Container
from dataclasses import replace

import torch

from coppice.kernels.transfer import take
from coppice.runtime.accounts import PromptAccounts
from coppice.runtime.beams import BeamSearches
from coppice.runtime.model_runner import ModelRunner
from coppice.runtime.report import Counters
from coppice.runtime.request import Sequence, StepOutput
from coppice.runtime.sampler import Sampled, Sampler
from coppice.runtime.scheduler import Schedule
from coppice.runtime.sequences import Sequences
from coppice.runtime.stats import StatsRecorder

logger = logging.getLogger(__name__)

GRAMMAR_WAIT_SECONDS = 0.01


class Steps:
    """Makes the steps of one engine, over the sequences that it has."""

    def __init__(
        self,
        runner: ModelRunner,
        sequences: Sequences,
        searches: BeamSearches,
        *,
        counters: Counters,
        recorder: StatsRecorder,
        accounts: PromptAccounts,
    ) -> None:
        self._runner = runner
        self._sequences = sequences
        self._searches = searches
        self._counters = counters
        self._recorder = recorder
        self._accounts = accounts
        self._eos: Container[int] = runner.model_config.eos_token_ids
        self._sampler = Sampler(runner.model_config.eos_token_ids)

    def make(self) -> list[StepOutput]:
        """Schedules, runs and commits one mixed batch; [] when there is nothing to do.

        If it fails, the requests in it end with an error; an exception that is none of `Exception`
        goes on from there.
        """
        refused = [
            output
            for sequence, why in self._sequences.compiled()
            for output in self._end_failed(sequence.request.request_id, why)
        ]
        if refused:
            return refused
        start = time.perf_counter()
        scheduler = self._sequences.scheduler
        schedule = scheduler.schedule()
        if not schedule.chunks:
            self._sequences.wait_for_grammar(GRAMMAR_WAIT_SECONDS)
            return []
        try:
            sequences, sampled = self._run(schedule)
        except BaseException as error:
            # Copies that were to be made may be missing: nothing of this step can be resumed.
            outputs = self._fail(schedule, error)
            if not isinstance(error, Exception):
                raise
            logger.exception("a step failed; the %d requests in it end", len(schedule.chunks))
            return outputs
        seconds = time.perf_counter() - start
        scheduler.observe(schedule, seconds)
        for request_id in self._counters.ran(schedule, seconds):
            self._recorder.scheduled(request_id, seconds)
        self._recorder.stepped(schedule, seconds)
        return self._commit(schedule, sequences, sampled)

    def end(self, sequence: Sequence, reason: str, *, keep: bool = True) -> None:
        """A sequence has ended; so has its request, if it was the last one.

        Of a beam search none ends by this but with all others.
        """
        self._searches.forget(sequence.request.request_id)
        self._sequences.end(sequence, reason, keep=keep)

    @torch.inference_mode()
    def _run(self, schedule: Schedule) -> tuple[list[Sequence], Sampled]:
        """Computes the step; the sequences that got a token, and the tokens."""
        batch, logits = self._runner.run(schedule)
        self._accounts.settle_batch()  # a device computes meanwhile
        sequences = batch.sampled
        rows = self._sequences.with_siblings(sequences)
        if len(rows) > len(logits):
            logits = take(logits, rows)
        beams = [row for row, each in enumerate(sequences) if each.request.beam_search]
        if beams:
            self._searches.score(take(logits, beams), [sequences[row] for row in beams])
            others = [row for row, each in enumerate(sequences) if not each.request.beam_search]
            logits, sequences = take(logits, others), [sequences[row] for row in others]
        return sequences, self._sampler.sample(logits, sequences)

    def _commit(
        self, schedule: Schedule, sequences: list[Sequence], sampled: Sampled
    ) -> list[StepOutput]:
        for chunk in schedule.chunks:
            self._sequences.scheduler.computed(chunk)
        self._sequences.enter(sequences)
        errors = sampled.errors
        self._recorder.sampled(each for row, each in enumerate(sequences) if row not in errors)
        outputs = []
        for row, (sequence, token) in enumerate(zip(sequences, sampled.tokens, strict=True)):
            if row not in sampled.errors:
                sequence.tokens.append(token)
            if sequence.preempted:  # a fork that found no place
                self._sequences.scheduler.add(sequence)
            if row in sampled.errors:
                self.end(sequence, "error")
                outputs.append(StepOutput.of(sequence, (), "error", None, sampled.errors[row]))
                continue
            self._counters.generated_tokens += 1
            reason, stop = sequence.ending(self._eos)
            if reason is not None:
                self.end(sequence, reason)
            logprobs = sampled.logprobs[row]
            outputs.append(StepOutput.of(sequence, (token,), reason, stop, logprobs=logprobs))
        found = self._searches.advance()
        self._counters.generated_tokens += sum(len(each.new_token_ids) for each in found)
        return outputs + found

    def _fail(self, schedule: Schedule, error: BaseException) -> list[StepOutput]:
        """Ends the requests of a step that failed; only what was committed before stays cached."""
        self._counters.failed_steps += 1
        message = f"the step failed: {type(error).__name__}: {error}"
        targets = {copy.target for copy in schedule.copies}
        without_copy = [
            s for s in self._sequences.scheduler.running if not targets.isdisjoint(s.table)
        ]
        sequences = [*(chunk.sequence for chunk in schedule.chunks), *without_copy]
        failed = dict.fromkeys(each.request.request_id for each in sequences)
        return [output for request_id in failed for output in self._end_failed(request_id, message)]

    def _end_failed(self, request_id: str, message: str) -> list[StepOutput]:
        """Ends a request; an error for each of its results, those not yet begun included."""
        sequences = self._sequences.of(request_id)
        first = sequences[0]
        results = self._searches.results(request_id)
        if results is None and not first.forked:
            results = first.request.params.n
        indices = [each.index for each in sequences] if results is None else range(results)
        error = StepOutput.of(first, (), "error", None, message)
        for sequence in sequences:
            self.end(sequence, "error", keep=False)
        return [replace(error, index=index) for index in indices]
