"""Counts what an engine does, from its start and without a reset.

A gauge that the next batch overwrites says nothing about the batches between two readings. So
everything is counted since the start, and times are kept in histograms; a reader takes rates and
quantiles from the difference of two snapshots.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from coppice.runtime.metrics.adapter_counts import AdapterCounts
from coppice.runtime.metrics.histogram import AGES, COUNTS, LONG_SECONDS, SHORT_SECONDS, Buckets
from coppice.runtime.requests.request import Request, Sequence

FINISH_REASONS = ("stop", "length", "abort", "error")
_NOTHING: Mapping[Sequence, int] = {}
REFUSALS = ("max_queued_requests", "max_queued_tokens")


class EngineCounters:
    """Counts of one engine, written by its scheduler, its accounts and its steps.

    Times are in seconds; `clock` gives seconds and never goes back.

    Attributes:
        requests: those that were admitted; requests, prompt and hit tokens are those of the
            cache's accounts, if there are any.
        prompt_tokens: of these requests.
        hit_tokens: prompt tokens whose KV was reused: at a request's first admission, or from
            tiers after it.
        computed_tokens: of prefill chunks, those of resumptions included.
        generated_tokens: that were sampled.
        preemptions: how often a sequence lost its pages to another.
        evicted_tokens: dropped from the cache to make room.
        rounded_off_tokens: cached after a hit, equal to the prompt's next tokens, and computed all
            the same; a lower bound, since only the next node is compared. The tree matches token by
            token, so this must stay 0.
        late_rows: rows of sequences that had ended, which was known only after they were computed.
        steps, failed_steps: that ran, and that failed.
        prefill_seconds, decode_seconds: the steps' time, divided by each step's share of rows.
        finished: requests by the reason for which their last sequence ended.
        refused: requests by the limit of the queue that was full.
        queue: from a request's arrival to the step with its first chunk.
        ttft: from arrival to the first token; not of beam searches, which have none until they end.
        itl: between tokens of a sequence, preemptions included.
        request: from arrival to the end, aborted requests included.
        step, step_tokens, step_sequences: of each step that ran.
        eviction_age: how long evicted tokens had been unused.
        adapter_counts: of the requests of each adapter.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._arrivals: dict[str, float] = {}  # of the unfinished requests
        self.requests = 0
        self.prompt_tokens = 0
        self.hit_tokens = 0
        self.computed_tokens = 0
        self.generated_tokens = 0
        self.preemptions = 0
        self.evicted_tokens = 0
        self.rounded_off_tokens = 0
        self.late_rows = 0
        self.steps = 0
        self.failed_steps = 0
        self.prefill_seconds = 0.0
        self.decode_seconds = 0.0
        self.finished: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.queue = Buckets(LONG_SECONDS)
        self.ttft = Buckets(LONG_SECONDS)
        self.itl = Buckets(SHORT_SECONDS)
        self.request = Buckets(LONG_SECONDS)
        self.step = Buckets(SHORT_SECONDS)
        self.step_tokens = Buckets(COUNTS)
        self.step_sequences = Buckets(COUNTS)
        self.eviction_age = Buckets(AGES)
        self.adapter_counts = AdapterCounts()

    def arrived(self, request_id: str) -> None:
        """Records when a request was accepted."""
        self._arrivals[request_id] = self._clock()

    def admitted(self, request: Request, hit_tokens: int) -> None:
        """Counts a request when its first sequence is admitted with this hit."""
        self.requests += 1
        self.prompt_tokens += len(request.prompt_token_ids)
        self.hit_tokens += hit_tokens
        if (use := request.adapter) is not None:
            self.adapter_counts.admitted(use.number, use.begin, request, hit_tokens)

    def loaded(self, request: Request, begin: int, end: int) -> None:
        """Counts tokens of a request from position `begin` to `end` that came from a tier."""
        self.hit_tokens += end - begin
        if (use := request.adapter) is not None:
            self.adapter_counts.loaded(use.number, use.begin, begin, end)

    def prefilled(self, sequence: Sequence, count: int, seconds: float) -> None:
        """Counts `count` tokens of a prefill in a step that began `seconds` ago.

        With a request's first chunk its time in the queue is counted.
        """
        self.computed_tokens += count
        if not sequence.counted:
            sequence.counted = True
            waited = self._clock() - seconds - self._arrivals[sequence.request.request_id]
            self.queue.add(max(0.0, waited))

    def stepped(self, sequences: int, decodes: int, tokens: int, seconds: float) -> None:
        """Counts a step of `tokens` tokens; `decodes` of its `sequences` computed one each."""
        self.prefill_seconds += seconds * (tokens - decodes) / tokens
        self.decode_seconds += seconds * decodes / tokens
        self.step.add(seconds)
        self.step_tokens.add(tokens)
        self.step_sequences.add(sequences)

    def sampled(
        self, sequences: Iterable[Sequence], counts: Mapping[Sequence, int] = _NOTHING
    ) -> None:
        """Counts the time since the last token of each sequence, which has just got another.

        `counts` has those that got several at once: each of them took its part of the time.
        O(sequences). Most got their last ones in the same step, so there are few times to count.
        """
        now = self._clock()
        gaps: dict[float, int] = {}
        for sequence in sequences:
            last, sequence.token_at = sequence.token_at, now
            if last:
                if (count := counts.get(sequence)) is not None:
                    self.itl.add((now - last) / count, count)
                    continue
                gaps[last] = gaps.get(last, 0) + 1
            elif not sequence.index:
                self.ttft.add(now - self._arrivals[sequence.request.request_id])
        for last, times in gaps.items():
            self.itl.add(now - last, times)

    def evicted(self, tokens: int, age: float | None) -> None:
        """Counts evicted `tokens`, which had been unused for `age` seconds; None: unknown."""
        self.evicted_tokens += tokens
        if age is not None:
            self.eviction_age.add(age, tokens)

    def ended(self, request_id: str, reason: str) -> None:
        """Counts a request whose last sequence has ended, for one of `FINISH_REASONS`."""
        self.request.add(self._clock() - self._arrivals.pop(request_id))
        self.finished[reason] += 1
