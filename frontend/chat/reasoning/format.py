"""What a way of writing reasoning must know: the interface of `marked.py` and `harmony.py`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum

from coppice.frontend.chat.marks import Marks
from coppice.frontend.chat.pieces import Reader
from coppice.runtime.requests.sampling_params import ThinkingMarks


class Start(Enum):
    """Where the generated text begins, as the prompt leaves it."""

    OPEN = "the text may begin with reasoning"
    INSIDE = "the text begins inside reasoning"
    ENDED = "the prompt has ended the reasoning"


class ReasoningFormat(ABC):
    """How one family of models writes reasoning.

    Attributes:
        marks: texts that mark reasoning; they stay in the text even if they are special tokens.
    """

    marks: tuple[str, ...] = ()

    @abstractmethod
    def start(self, end_of_prompt: str, continued: str | None) -> Start:
        """Where the text begins after a prompt.

        Args:
            end_of_prompt: the last characters of the prompt, marks included.
            continued: the message that the text continues, if it continues one.
        """

    @abstractmethod
    def reader(self, answer: Reader, start: Start) -> Reader:
        """A new reader of one continuation; `answer` reads what comes after the reasoning."""

    @abstractmethod
    def prefix(self, start: Start, marks: Marks) -> str | None:
        """Lark rules, of which `prefix` matches what comes before a form; None: nothing does."""

    @abstractmethod
    def count(
        self, ids: Sequence[int], start: Start, marks: Marks, decode: Callable[[list[int]], str]
    ) -> int | None:
        """The tokens of the reasoning, without its marks; None: they can't be counted exactly."""

    def token_marks(self, start: Start, marks: Marks) -> ThinkingMarks | None:
        """The marks as tokens, for a bound of the reasoning; None: it can't be bounded."""
        return None
