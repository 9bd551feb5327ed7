"""The budget of reasoning: once it is used up, only the mark of its end may follow."""

from __future__ import annotations

from coppice.runtime.requests.request import Sequence
from coppice.runtime.requests.sampling_params import SamplingParams


class Thinking:
    """Where one sequence is in its reasoning, of which there may be one before the answer.

    As in vLLM, the budget counts the tokens between the marks. White space may come before the
    begin mark, and nothing else: a mark in the middle of an answer begins no reasoning.
    """

    __slots__ = ("_begin", "_end", "_left", "_over", "_seen", "_space")

    def __init__(self, budget: int, begin: int, end: int, space: int, *, inside: bool) -> None:
        """`space`: most tokens before the begin mark; `inside`: the prompt ends with it."""
        self._begin, self._end, self._left = begin, end, budget
        self._space = 0 if inside else space + 1
        self._over = False
        self._seen = 0

    @classmethod
    def of(cls, params: SamplingParams) -> Thinking | None:
        """That of a sequence with these parameters; None: its reasoning has no bound."""
        budget, marks = params.thinking_token_budget, params.thinking_marks
        if budget is None or marks is None:
            return None
        return cls(budget, marks.begin, marks.end, _MOST_BEFORE, inside=marks.inside)

    def due(self, sequence: Sequence) -> int | None:
        """The end mark if it must come next, else None. O(tokens since the last call)."""
        if self._over:
            return None
        first = len(sequence.request.prompt_token_ids)
        for token in sequence.tokens[first + self._seen :]:
            self._seen += 1
            if token == self._end:
                self._over = True
                return None
            if not self._space:
                self._left -= 1
            elif token == self._begin:
                self._space = 0
            else:
                self._space -= 1
                if not self._space:  # it answers at once
                    self._over = True
                    return None
        return self._end if not self._space and self._left <= 0 else None


_MOST_BEFORE = 4  # tokens of white space that models write before the begin mark
