"""The engine's step: compute what is scheduled, sample, commit; requests of a failed step end."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import NoReturn

import numpy as np
import torch

from coppice.kernels.sampling.choose import compiled_choice
from coppice.kernels.transfer import take
from coppice.runtime.engine.beams import BeamSearches
from coppice.runtime.engine.queued import Step
from coppice.runtime.engine.sequences import Sequences
from coppice.runtime.engine.verifying import Followed, Verification
from coppice.runtime.metrics.counters import EngineCounters
from coppice.runtime.metrics.prompt_accounts import PromptAccounts
from coppice.runtime.requests.logprobs import Logprobs
from coppice.runtime.requests.request import LATE, DeviceLost, Sequence, Status, StepOutput
from coppice.runtime.runner.batch import Batch
from coppice.runtime.runner.forward import Computed, ModelRunner
from coppice.runtime.sampling.drafts.draft import Speculation
from coppice.runtime.sampling.logit_rules import was_cut
from coppice.runtime.sampling.sampler import Sampled, Sampler
from coppice.runtime.schedule.chunks import Schedule
from coppice.runtime.schedule.scheduler import Scheduler
from coppice.runtime.tiers.exchange import Tiers

logger = logging.getLogger(__name__)

_LOST = "the device has failed, and its process has to end: {}"
_TIERS_WAIT_SECONDS = 0.01  # the same, for pages
# Steps without a draft, though they asked, after which overlapped steps don't ask; and how many.
_UNANSWERED, _PAUSE = 4, 16
_GRAMMAR_WAIT_SECONDS = 0.01  # of a step that has nothing else to do


class Steps:
    """Makes the steps of one engine over its sequences.

    With `overlap` a step is scheduled and queued on the device before the tokens of the one before
    it have arrived (docs/gpu-steps.md). Without, each step is committed at once.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        sequences: Sequences,
        searches: BeamSearches,
        *,
        counters: EngineCounters,
        accounts: PromptAccounts,
        overlap: bool,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._sequences = sequences
        self._searches = searches
        self._counters = counters
        self._accounts = accounts
        self._overlap = overlap
        self._eos = frozenset(runner.model_config.eos_token_ids)
        self._sampler = Sampler(runner.model_config.eos_token_ids)
        if runner.device.type == "cpu":
            compiled_choice()  # now, and not in the first step that samples
        self._before: Step | None = None  # its tokens have not arrived yet
        self._settled = 0.0  # when the tokens of the last step arrived
        self._undelivered: list[StepOutput] = []  # of a call that was interrupted
        self.tiers: Tiers | None = None  # that keep pages beside the pool
        self._speculation: Speculation | None = None
        self._path_sampler = Sampler(runner.model_config.eos_token_ids)
        self._unanswered = 0  # steps in a row that asked for drafts and got none
        self._pause = 0  # steps that don't wait for the tokens that a draft would follow
        self._lost: str | None = None  # why the device can't be used any more

    def make(self) -> list[StepOutput]:
        """Schedules, runs and commits one mixed batch; [] when there is nothing to do.

        With overlap it commits the batch before. If the batch fails, its requests end with an
        error; an exception outside `Exception`, such as an interrupt, is raised after that. If the
        device does not compute any more, all requests end and DeviceLost is raised.
        """
        self.check_device()
        outputs, self._undelivered = self._undelivered, []
        refused = [
            output
            for sequence, why in self._sequences.compiled()
            for output in self._end_failed(sequence.request.request_id, why)
        ]
        if refused:
            return outputs + refused
        start = time.perf_counter()
        before, self._before = self._before, None
        if before is not None and before.abandoned:
            before = None
        if before is not None and before.verification is not None:
            # An interrupt kept it from being committed. How far its sequences have come decides
            # what the next step computes.
            outputs = self._committed(outputs, before)
            before = None
        self._scheduler.late = before is not None
        schedule = self._scheduler.schedule()
        if not schedule.chunks and schedule.failure is None:
            if before is not None:
                return self._committed(outputs, before)
            self._sequences.wait_for_grammar(_GRAMMAR_WAIT_SECONDS)
            if self.tiers is not None:
                self.tiers.wait(_TIERS_WAIT_SECONDS)
            return outputs
        step: Step | None = None
        failure: BaseException | None = schedule.failure
        if failure is None:
            try:
                late = None if before is None else before.late
                computed = self._runner.run(schedule, late, self._columns)
            except BaseException as error:
                failure = error
        self._accounts.settle_batch()  # while the device computes
        if before is not None:
            outputs = self._committed(outputs, before)
        if failure is None:
            try:
                step = self._sample(schedule, start, computed)
            except BaseException as error:
                failure = error
        if failure is not None:
            # Page copies may not have been made: nothing of this step can be resumed.
            failed = self._fail(schedule, failure)
            if not isinstance(failure, Exception):
                self._undelivered = [each for each in outputs if each.request_id in self._sequences]
                raise failure
            outputs += failed
            logger.error(
                "a step failed; the %d requests in it end", len(schedule.chunks), exc_info=failure
            )
        if step is None:
            return outputs
        try:
            self._enter(step)
        except Exception as error:  # as in `_commit`
            logger.exception("the tokens of a step did not come; the requests in it end")
            return outputs + self._fail(schedule, error)
        searching = any(chunk.sequence.request.beam_search for chunk in schedule.chunks)
        waits = searching or schedule.short or step.verification is not None
        if self._overlap and self._speculation is not None:
            waits |= self._asks_next(schedule)
        if self._overlap and not waits:
            self._before = step
            return outputs
        return self._committed(outputs, step)

    def end(self, sequence: Sequence, reason: str, *, keep: bool = True) -> None:
        """Ends a sequence, and its request with its last one.

        Of a beam search, all sequences must be ended together.
        """
        self._searches.forget(sequence.request.request_id)
        self._sequences.end(sequence, reason, keep=keep)

    def speculate(self, speculation: Speculation | None) -> None:
        """Computes drafts from `speculation` from now on; None: none any more."""
        self._speculation = self._scheduler.speculation = speculation
        self._sequences.speculation = speculation
        self._scheduler.branches = self._runner.attention.branches
        self._runner.expect_drafts(speculation is not None)
        self._unanswered = self._pause = 0

    def _asks_next(self, schedule: Schedule) -> bool:
        """Whether the next step is to have the tokens of this one, to ask for drafts after them.

        With overlap that costs the time of the host's work. Where nothing was foretold for some
        steps, it is done in some steps only.
        """
        if schedule.drafted:
            self._unanswered = 0
        elif schedule.asked:
            self._unanswered += 1
            if self._unanswered >= _UNANSWERED:
                self._pause = _PAUSE
        if self._pause:
            self._pause -= 1
        return not self._pause

    def _columns(self, batch: Batch) -> np.ndarray | None:
        """The parameters of the choice of a batch's tokens, if they suffice for it."""
        sequences, ahead = batch.sampled, None
        if batch.drafts:
            sequences, ahead = list(sequences), [0] * len(sequences)
            for each in batch.drafts:
                sequences += [each.sequence] * len(each.draft)
                ahead += each.draft.depths()
        return self._sampler.columns(sequences, self._runner.model_config.vocab_size, ahead)

    @torch.inference_mode()
    def _sample(self, schedule: Schedule, start: float, computed: Computed) -> Step | None:
        """Chooses tokens for the sequences that have not ended meanwhile; None if all have."""
        batch, logits, tokens = computed
        chunks = schedule.running()
        self._counters.late_rows += len(schedule.chunks) - len(chunks)
        if not chunks:
            return None
        sequences, verification = batch.sampled, None
        if batch.drafts:
            verification = Verification(batch.drafts, logits)
            logits = logits[: len(sequences)]
        left = [row for row, each in enumerate(sequences) if each.status is Status.RUNNING]
        if len(left) < len(sequences):
            logits, sequences = take(logits, left), [sequences[row] for row in left]
        rows = self._sequences.with_siblings(sequences)
        if len(rows) > len(logits):
            logits = take(logits, rows)
        beams = [row for row, each in enumerate(sequences) if each.request.beam_search]
        if beams and len(beams) == len(sequences):
            self._searches.score(logits, sequences)
            logits, sequences = logits[:0], []
        elif beams:
            self._searches.score(take(logits, beams), [sequences[row] for row in beams])
            others = [row for row, each in enumerate(sequences) if not each.request.beam_search]
            logits, sequences = take(logits, others), [sequences[row] for row in others]
        pooled = [each.sequence for each in batch.pooled if each.prompt.complete]
        if verification is None:
            sampling = self._sampler.sample(logits, sequences, chosen=tokens)
        else:
            all_rows = verification.with_drafts(logits, sequences)
            sampling = self._sampler.sample(*all_rows, chosen=tokens)
        return Step(schedule, start, sequences, sampling, pooled, verification)

    def _enter(self, step: Step) -> None:
        """Counts the step's chunks as computed: steps run in order, so later ones find their KV."""
        for chunk in step.schedule.running():
            self._scheduler.computed(chunk)
        sequences = step.sequences
        self._sequences.enter(sequences)
        for sequence in sequences:
            sequence.tokens.append(LATE)
        placeless = [sequence for sequence in sequences if sequence.preempted]
        if placeless:  # forks that found no place
            try:
                step.settle()  # the queue must know all tokens of a sequence in it
            finally:
                for sequence in placeless:
                    self._scheduler.add(sequence)
        seconds = time.perf_counter() - step.started
        self._counters.steps += 1
        for chunk in step.schedule.prefills():
            self._counters.prefilled(chunk.sequence, chunk.count, seconds)

    def _committed(self, outputs: list[StepOutput], step: Step) -> list[StepOutput]:
        """`outputs` and those of a step; an interrupt leaves them to the next call."""
        try:
            return outputs + self._commit(step)
        except BaseException:
            self._undelivered = outputs + self._undelivered
            raise

    def _commit(self, step: Step) -> list[StepOutput]:
        """Takes the tokens of a step; a sequence that its token ends gives back its pages."""
        try:
            sampled = step.settle()
        except Exception as error:  # the device may report the failure of any earlier call here
            logger.exception("the tokens of a step did not come; the requests in it end")
            return self._fail(step.schedule, error)
        except BaseException:  # an interrupt: the next call waits for them again
            self._before = step
            raise
        followed: Mapping[Sequence, Followed] = {}
        if step.verification is not None:
            try:
                followed = self._follow(step.verification, sampled, step.sequences)
            except BaseException as error:
                logger.exception("drafts could not be verified; the requests in the step end")
                failed = self._fail(step.schedule, error)
                if not isinstance(error, Exception):
                    self._undelivered += failed
                    raise
                return failed
        now = time.perf_counter()
        # The device began this step when it was queued, or when the one before it was done.
        seconds = now - max(step.started, self._settled)
        self._settled = now
        schedule = step.schedule
        self._scheduler.observe(schedule, seconds)
        sequences = len(schedule.chunks)
        decodes = sequences - len(schedule.prefills())
        total = schedule.rows()
        self._counters.stepped(sequences, decodes + schedule.drafted, total, seconds)
        if self._speculation is not None and schedule.asked:
            others = total - schedule.asked - schedule.drafted
            self._speculation.stepped(schedule.asked, schedule.drafted, others, seconds)
        errors, outputs = sampled.errors, []
        rows = [
            (row, sequence)
            for row, sequence in enumerate(step.sequences)
            if sequence.status is not Status.FINISHED  # else aborted meanwhile
        ]
        several = {each: len(got.tokens) for each, got in followed.items()}
        self._counters.sampled((each for row, each in rows if row not in errors), several)
        self._counters.generated_tokens += len(rows)
        for row, sequence in rows:
            if row in errors:
                self._counters.generated_tokens -= 1
                self.end(sequence, "error")
                outputs.append(StepOutput.of(sequence, (), "error", None, errors[row]))
                continue
            got, broken = followed.get(sequence), None
            if got is None:
                reason, stop = sequence.ending(self._eos)
                tokens: tuple[int, ...] = (sampled.tokens[row],)
                logprobs = sampled.logprobs[row]
            else:
                reason, stop, broken, tokens = got.reason, got.stop, got.error, tuple(got.tokens)
                logprobs = Logprobs.joined(got.logprobs) if got.logprobs else None
                self._counters.generated_tokens += len(tokens) - 1
            if reason is not None:
                if reason == "stop" and stop is None and was_cut(sequence):
                    reason = "length"  # it ends here since there is no room for more
                self.end(sequence, reason)
            outputs.append(StepOutput.of(sequence, tokens, reason, stop, logprobs=logprobs))
            if broken is not None:
                self.end(sequence, "error")
                outputs.append(StepOutput.of(sequence, (), "error", None, broken))
        for sequence in step.pooled:
            if sequence.status is not Status.FINISHED:
                self.end(sequence, "stop")
                output = StepOutput.of(sequence, (), "stop")
                output.pooled = None if sequence.reader is None else sequence.reader.result()
                outputs.append(output)
        found = self._searches.advance()
        self._counters.generated_tokens += sum(len(each.new_token_ids) for each in found)
        return outputs + found

    @torch.inference_mode()
    def _follow(
        self, verification: Verification, sampled: Sampled, sequences: Seq[Sequence]
    ) -> Mapping[Sequence, Followed]:
        """Gives sequences with drafts all of their tokens; what was not accepted is undone."""
        followed = verification.follow(sampled, sequences, self._path_sampler, self._eos)
        sources: list[int] = []
        targets: list[int] = []
        for got in followed.values():
            away, home = got.rows.moves(got.path, self._runner.page_size)
            sources += away
            targets += home
        if sources:
            self._runner.move_slots(sources, targets)
        for sequence, got in followed.items():
            self._scheduler.verified(sequence, len(got.path))
            if self._speculation is not None:
                self._speculation.verified(sequence, got.rows.draft, got.path)
        return followed

    def _fail(self, schedule: Schedule, error: BaseException) -> list[StepOutput]:
        """Ends the requests of a step that failed; only what was committed before stays cached.

        Raises DeviceLost if the device itself has failed.
        """
        self._counters.failed_steps += 1
        message = f"the step failed: {type(error).__name__}: {error}"
        if (fault := self._runner.fault()) is not None:
            self._lose(fault, error)
        targets = {copy.target for copy in schedule.copies}
        without_copy = [s for s in self._scheduler.running if not targets.isdisjoint(s.table)]
        sequences = [*(chunk.sequence for chunk in schedule.running()), *without_copy]
        failed = dict.fromkeys(each.request.request_id for each in sequences)
        return [output for request_id in failed for output in self._end_failed(request_id, message)]

    def check_device(self) -> None:
        """Raises DeviceLost if a step has found that the device does not compute any more.

        So it does when another rank of the model has ended.
        """
        if self._lost is None and (ended := self._runner.group.ended) is not None:
            self._lost = _LOST.format(ended)
        if self._lost is not None:
            raise DeviceLost(self._lost)

    def _lose(self, fault: str, error: BaseException) -> NoReturn:
        """Ends all requests, since the device's memory can neither be trusted nor read."""
        self._lost = f"{_LOST.format(fault)} (found by {type(error).__name__} in a step)"
        self._before, self._undelivered = None, []
        for request_id in dict.fromkeys(each.request.request_id for each in self._sequences):
            self._end_failed(request_id, self._lost)
        raise DeviceLost(self._lost) from error

    def _end_failed(self, request_id: str, message: str) -> list[StepOutput]:
        """Ends a request with an error for each of its results, those not begun yet included."""
        sequences = self._sequences.of(request_id)
        first = sequences[0]
        results = self._searches.num_results(request_id)
        if results is None and not first.forked:
            results = first.request.params.n
        indices = [each.index for each in sequences] if results is None else range(results)
        error = StepOutput.of(first, (), "error", None, message)
        for sequence in sequences:
            self.end(sequence, "error", keep=False)
        return [replace(error, index=index) for index in indices]
