"""A draft model with its own tree of KV pages, which follows the sequences of an engine."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence as Seq
from copy import copy
from dataclasses import dataclass, replace

import torch

from coppice.radix import Namespace, OutOfPages, PagePool, RadixTree
from coppice.radix.tokens import TOKEN_BYTES, common_prefix
from coppice.radix.upkeep.recount import check
from coppice.runtime.requests.request import Sequence
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.runner.forward import ModelRunner
from coppice.runtime.sampling.drafts.network import Begun, Guess
from coppice.runtime.sampling.logit_rules import LogitRules, may_have_rules
from coppice.runtime.sampling.sampler import Sampler
from coppice.runtime.schedule.chunks import Chunk, Schedule
from coppice.runtime.schedule.paging import Paging

_BESIDE = 2  # likely tokens beside the chosen one


@dataclass(slots=True)
class DraftModelCounts:
    """What a draft model has done since its start.

    Attributes:
        hit_tokens: of texts that its tree had already when it began with them.
        computed_tokens: that it computed: of texts, and drafted ones.
        passes: of the model.
        seconds: in these passes.
    """

    hit_tokens: int = 0
    computed_tokens: int = 0
    passes: int = 0
    seconds: float = 0.0


class _Follower:
    """A sequence as the draft model has it.

    Attributes:
        own: its tokens, those drafted last included, and its pages in the draft model's cache.
        confirmed: of these, tokens that the sequence had when it was last begun.
        base: tokens that need not be computed, as was found then.
        checked: tokens that the draft model's vocabulary has.
        stale: whether its rules are still to be copied from the sequence.
        able: whether the draft model has a token that the rules allow.
        fixed: what never changes of its rules, where the draft model has fewer tokens; else None.
    """

    __slots__ = ("able", "base", "checked", "confirmed", "fixed", "own", "stale")

    def __init__(self, sequence: Sequence, fewer: int | None) -> None:
        """`fewer`: the draft model's tokens, if the model has more."""
        request = sequence.request
        namespace = request.namespace
        if isinstance(namespace, Namespace):  # it has no adapters: their texts are alike to it
            namespace = namespace._replace(adapter=None)
        params = replace(
            request.params,
            n=1,
            best_of=None,
            logprobs=None,
            prompt_logprobs=None,
            prompt_logprobs_start=0,
            logits_processors=None,
            prediction_token_ids=None,
        )
        self.able = True
        self.fixed: LogitRules | None = None
        if fewer is not None:
            known = _of_tokens_below(fewer, params)
            self.able = known is not None
            if known is not None:
                params, self.fixed = known, LogitRules(known, ())
        own = replace(request, params=params, namespace=namespace, adapter=None)
        self.own = Sequence(own, sequence.index, sequence.arrival)
        self.confirmed = len(self.own.tokens)
        self.base = self.checked = 0
        self.stale = may_have_rules(self.own)

    def follow(self, sequence: Sequence) -> None:
        """Takes the tokens of the sequence in place of those that were drafted."""
        own, known = self.own, self.confirmed
        mine, theirs = own.tokens[known:].tobytes(), sequence.tokens[known:]
        equal = known + common_prefix(mine, 0, theirs.tobytes()) // TOKEN_BYTES
        own.tokens[known:] = theirs
        self.confirmed = len(own.tokens)
        # The last token is computed for its logits, even if it was before.
        own.computed = min(own.computed, equal, self.confirmed - 1)

    def take_rules(self, rules: object) -> None:
        """Goes on with a copy of the sequence's rules, without a user's functions."""
        self.stale = False
        if not isinstance(rules, LogitRules):
            self.own.logit_rules = None  # they are made with the first token
            return
        copied = copy(rules.forked())
        copied.processors = []
        fixed = self.fixed
        if fixed is not None:
            copied.biased, copied.bias = fixed.biased, fixed.bias
            copied.allowed, copied.bad_words = fixed.allowed, fixed.bad_words
            if fixed.thinking is None:
                copied.thinking = None
        self.own.logit_rules = copied


class DraftModel:
    """A `DraftNetwork` over the runner of a small model.

    Each sequence that is drafted for has pages and a lock in the draft model's own tree, as in the
    engine's. What it computed of a text stays in the tree, so that a prompt that is known there
    costs nothing. When pages run out, sequences that were not drafted for lately give theirs back.

    Tokens are chosen with the sequence's parameters, rules and random numbers: the draft model
    draws what the model would draw from the same logits. A user's `logits_processors` are not run.

    Attributes:
        counts: what it has done.
        most_rows: tokens of a pass.
    """

    def __init__(
        self,
        runner: ModelRunner,
        vocabulary: int,
        eos_token_ids: Seq[int],
        *,
        caching: bool,
        policy: str,
        most_rows: int,
    ) -> None:
        """`vocabulary` is the model's, whose tokens alone may be drafted."""
        self.runner = runner
        self.counts = DraftModelCounts()
        self.most_rows = most_rows
        self._caching, self._policy = caching, policy
        self._vocabulary = vocabulary
        self._eos = frozenset(eos_token_ids)
        self._sampler = Sampler(tuple(eos_token_ids))
        limit = runner.model_config.vocab_size
        self._fewer = limit if limit < vocabulary else None  # its tokens, if the model has more
        self.forget()

    @property
    def tree(self) -> RadixTree:
        """Which texts it has the KV of."""
        return self.paging.tree

    def forget(self) -> None:
        """As `DraftNetwork.forget`."""
        pool = PagePool(self.runner.num_pages, self.runner.page_size)
        self.paging = Paging(RadixTree(pool, self._policy), enable_prefix_caching=self._caching)
        # In the order of their last use.
        self._followers: dict[Sequence, _Follower] = {}

    def begin(self, sequence: Sequence) -> Begun | None:
        """As `DraftNetwork.begin`."""
        follower = self._followers.get(sequence)
        if follower is None:
            follower = self._followers[sequence] = _Follower(sequence, self._fewer)
        own, length = follower.own, len(sequence.tokens)
        if length > self.runner.max_model_len or not self._knows(follower, sequence):
            self._leave(follower)
            return None
        follower.follow(sequence)
        if own.hold is not None:
            self.paging.trim(own)
            follower.base = own.computed
        else:
            follower.base = self.paging.match(own).length
        follower.stale = may_have_rules(own)
        return Begun(length - follower.base, self.runner.max_model_len - length + 1)

    def _knows(self, follower: _Follower, sequence: Sequence) -> bool:
        """Whether the draft model has all tokens, and one that may be next.

        Some of the model's may have no name, and then the draft model need not have them.
        """
        if self._fewer is not None:
            new = sequence.tokens[follower.checked :]
            if new and max(new) >= self._fewer:
                return False
            follower.checked = len(sequence.tokens)
        return follower.able

    @torch.inference_mode()
    def run(self, parts: Seq[tuple[Sequence, int]]) -> list[Guess | None]:
        """As `DraftNetwork.run`."""
        begun = time.perf_counter()
        guesses = self._run(parts)
        self.counts.seconds += time.perf_counter() - begun
        return guesses

    def _run(self, parts: Seq[tuple[Sequence, int]]) -> list[Guess | None]:
        schedule = Schedule()
        busy = {sequence for sequence, _ in parts}
        placed: dict[Sequence, Sequence] = {}  # by what they are here
        for sequence, count in parts:
            follower = self._followers[sequence] = self._followers.pop(sequence)
            if self._place(follower, count, schedule, busy):
                placed[follower.own] = sequence
                if follower.stale:
                    follower.take_rules(sequence.logit_rules)
        if not schedule.chunks:
            return [None] * len(parts)
        batch, logits, _ = self.runner.run(schedule)
        for chunk in schedule.chunks:
            self._computed(chunk, self._followers[placed[chunk.sequence]])
        self.counts.passes += 1
        found: dict[Sequence, Guess] = {}
        if batch.sampled:
            guesses = self._guesses(logits, batch.sampled)
            found = {placed[own]: guess for own, guess in guesses.items()}
        return [found.get(sequence) for sequence, _ in parts]

    def append(self, sequence: Sequence, token: int) -> bool:
        """As `DraftNetwork.append`."""
        own = self._followers[sequence].own
        own.tokens.append(token)
        ends = own.ending(self._eos)[0] is not None
        return not ends and len(own.tokens) <= self.runner.max_model_len

    def ended(self, sequence: Sequence) -> None:
        """As `DraftNetwork.ended`."""
        follower = self._followers.pop(sequence, None)
        if follower is not None:
            follower.follow(sequence)
            self._leave(follower)

    def check(self) -> None:
        """Recounts every page and lock; raises AssertionError on a mismatch. For tests."""
        placed = [each.own for each in self._followers.values()]
        check(self.tree, [(own.hold, own.table) for own in placed if own.hold is not None])

    # -- pages -------------------------------------------------------------------------------

    def _place(
        self, follower: _Follower, count: int, schedule: Schedule, busy: set[Sequence]
    ) -> bool:
        """Schedules the next `count` tokens; returns False if there are no pages for them."""
        own, end = follower.own, follower.base + count
        while True:
            try:
                if own.hold is None:
                    match = self.paging.match(own)
                    count = end - match.length
                    copy = self.paging.admit(own, match, count)
                    self.counts.hit_tokens += own.computed
                    if copy is not None:
                        schedule.copies.append(copy)
                elif not self.paging.try_grow(own, count):
                    raise OutOfPages(count, 0)
            except OutOfPages:
                if self._give_back(busy):
                    continue
                return False
            schedule.chunks.append(Chunk(own, count))
            return True

    def _give_back(self, busy: set[Sequence]) -> bool:
        """Takes the pages of the sequence that was drafted for least lately, if it is not busy."""
        for sequence, follower in self._followers.items():
            if sequence not in busy and follower.own.hold is not None:
                self._leave(follower)
                return True
        return False

    def _leave(self, follower: _Follower) -> None:
        """Gives back a sequence's pages, if it has any; its text stays in the tree."""
        own = follower.own
        if own.hold is not None:
            own.computed = min(own.computed, follower.confirmed)
            self.paging.leave(own)

    def _computed(self, chunk: Chunk, follower: _Follower) -> None:
        """Counts a chunk as computed; what it has of a text enters the tree at once.

        But for the last token, which is computed again if the sequence gets no other.
        """
        own, end = follower.own, chunk.start + chunk.count
        entered = min(end, follower.confirmed - 1) - chunk.start
        if entered > 1:
            self.paging.commit(own, entered)
        own.computed = follower.base = end
        self.counts.computed_tokens += chunk.count

    # -- tokens ------------------------------------------------------------------------------

    def _guesses(self, logits: torch.Tensor, sequences: list[Sequence]) -> dict[Sequence, Guess]:
        """What is chosen for each row of `logits`, float32 [R, vocabulary]."""
        if logits.shape[1] > self._vocabulary:
            logits = logits[:, : self._vocabulary].contiguous()
        sampling = self._sampler.sample(logits, sequences)
        params = [sequence.request.params for sequence in sequences]
        if not all(each.greedy or each.temperature == 1 for each in params):
            each_by = [1.0 if each.greedy else each.temperature for each in params]
            logits = logits / torch.tensor(each_by, device=logits.device).unsqueeze(1)
        top = logits.topk(min(_BESIDE + 1, logits.shape[1]), dim=-1)
        values = torch.cat((logits.gather(1, sampling.tokens.unsqueeze(1)), top.values), dim=1)
        shares = (values - logits.logsumexp(dim=-1, keepdim=True)).exp().tolist()
        tops = top.indices.tolist()
        sampled = sampling.read()
        found = {}
        for row, sequence in enumerate(sequences):
            if row in sampled.errors:
                continue
            token, (chosen, *likely) = sampled.tokens[row], shares[row]
            if math.isnan(chosen):  # its form is to be completed, and has no other token
                chosen = 1.0
            others = [
                each
                for each in zip(tops[row], likely, strict=True)
                if each[0] != token and each[1] > 0
            ]
            found[sequence] = Guess(token, chosen, tuple(others[:_BESIDE]))
        return found


def _of_tokens_below(size: int, params: SamplingParams) -> SamplingParams | None:
    """The parameters without what concerns tokens from `size` on.

    Returns None if no token is left that may be chosen.
    """
    allowed, marks = params.allowed_token_ids, params.thinking_marks
    # A budget of reasoning ends with a mark. Without that token it can only be left out: the draft
    # model guesses wrong once, and then the sequence has a token that it lacks.
    unmarked = marks is not None and marks.end >= size
    try:
        return replace(
            params,
            logit_bias={t: bias for t, bias in (params.logit_bias or {}).items() if t < size},
            allowed_token_ids=None if allowed is None else [t for t in allowed if t < size],
            bad_words_token_ids=[w for w in params.bad_words_token_ids or () if max(w) < size],
            thinking_token_budget=None if unmarked else params.thinking_token_budget,
        )
    except ValueError:  # of `allowed_token_ids` none is left, or only some that others forbid
        return None
