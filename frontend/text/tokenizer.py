"""Text to token ids and back, through the model's own tokenizer and chat template."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from coppice.frontend.text.characters import check_characters
from coppice.frontend.text.detokenizer import REPLACEMENT
from coppice.frontend.text.fast_tokenizer import plain_tokenizer
from coppice.runtime.requests.request import too_long
from coppice.runtime.startup.light_transformers import leave_out_torch, load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer
    from transformers import PreTrainedTokenizerBase

DEMO_MODEL = Path(__file__).parents[1] / "demo" / "model"


def model_source(model: str) -> str:
    """The directory or hub id that a model's name stands for: "demo" is the shipped checkpoint."""
    return str(DEMO_MODEL) if model == "demo" else model


_CUT = 64  # more tokens than a cut can add to a text
_BEFORE = 4  # tokens of a prompt that the text after it continues


class Tokenizer:
    """The model's tokenizer, reduced to what the frontend needs.

    A plain one is read without transformers (see `plain_tokenizer`), whose own tokenizer is loaded
    when something needs it, usually to fill a chat template.

    Args:
        path: a local directory with the tokenizer's files.
        without_torch: for a process that computes nothing; see `leave_out_torch`.

    Attributes:
        vocabulary: the number of tokens, added ones included.
        special_tokens: the texts of the special tokens that the tokenizer names.
        added_tokens: the texts and ids of the tokens that stand for a whole text.
        hidden_tokens: the texts of those that `decode` leaves out unless asked otherwise.
        chat_template: nothing, the template's text, or several of them by name.

    Raises:
        ValueError: the directory has no tokenizer that transformers can load.
    """

    def __init__(self, path: str | Path, *, without_torch: bool = False) -> None:
        self._path = str(path)
        self._without_torch = without_torch
        self._wrapped: PreTrainedTokenizerBase | None = None
        self._loading = threading.Lock()
        self._direct: FastTokenizer | None
        self._encoder: FastTokenizer | None
        self.special_tokens: frozenset[str]
        self.chat_template: str | dict[str, str] | None
        plain = plain_tokenizer(Path(path))
        self._plain = plain is not None
        if plain is not None:
            self._direct = self._encoder = plain.backend
            self.special_tokens, self.chat_template = plain.special_tokens, plain.chat_template
            self.vocabulary = plain.backend.get_vocab_size()
            added = plain.backend.get_added_tokens_decoder()
        else:
            self._take(self.wrapped)
            added = self.wrapped.added_tokens_decoder
        self._special = {token for token, each in added.items() if each.special}
        self.added_tokens = {each.content: token for token, each in added.items()}
        self.hidden_tokens = frozenset(each.content for each in added.values() if each.special)
        # Ids of a text after which decoders keep the space at the beginning of a token.
        self.anchor = self._ids("a", add_special_tokens=False)

    def _take(self, wrapped: PreTrainedTokenizerBase) -> None:
        """Takes from transformers' tokenizer what can be called without it."""
        from transformers import PreTrainedTokenizerFast

        # Every token of every stream is decoded. What transformers does around the library's own
        # decoder takes three times as long as the decoder.
        plain = getattr(type(wrapped), "_decode", None) is PreTrainedTokenizerFast._decode
        self._direct = wrapped.backend_tokenizer if plain else None
        # What it does around the encoder is as slow, and no other thread can run meanwhile.
        own = getattr(type(wrapped), "_encode_plus", None)
        plain = own is not None and own is PreTrainedTokenizerFast._encode_plus
        self._encoder = wrapped.backend_tokenizer if plain else None
        self.special_tokens = frozenset(wrapped.all_special_tokens)
        self.chat_template = wrapped.chat_template
        self.vocabulary = len(wrapped)

    @property
    def wrapped(self) -> PreTrainedTokenizerBase:
        """transformers' tokenizer, loaded at the first use, which may be in any thread."""
        with self._loading:
            if self._wrapped is None:
                if self._without_torch:
                    leave_out_torch()
                self._wrapped = _load(self._path, plain=self._plain)
            return self._wrapped

    def load_wrapped_soon(self) -> None:
        """Loads `wrapped` in a thread, so that a later use of it does not wait."""

        def load() -> None:
            with suppress(ValueError):  # the first use of it raises the same
                _ = self.wrapped

        if self._wrapped is None:
            threading.Thread(target=load, name="tokenizer", daemon=True).start()

    def encode(self, text: str, *, longest: int | None = None) -> list[int]:
        """Token ids of a prompt, with the special tokens that the model expects around one.

        Raises:
            ValueError: the text has half of a surrogate pair in it, which no encoding can express,
                or far more than `longest` tokens (see `check_length`).
        """
        check_characters("prompt", text)
        if longest is not None:
            self.check_length("prompt", text, longest)
        return self._ids(text, add_special_tokens=True)

    def check_length(self, name: str, text: str, longest: int) -> None:
        """Raises PromptTooLong, with that name, for a text of far more than `longest` tokens.

        It encodes beginnings of the text, each twice as long as the last, and stops at the first
        that is too long: so tens of megabytes, which take a minute to encode, are refused in the
        time of a few times `longest` tokens. A text that passes may still be too long.
        """
        length = 8 * longest + 4096
        while length < len(text):
            # Cutting a text changes tokens only where it is cut.
            count = len(self._ids(text[:length], add_special_tokens=False))
            if count > longest + _CUT:
                raise too_long(name, count - _CUT, longest, counted=False)
            length *= 2

    def encode_more(self, text: str) -> list[int]:
        """Token ids of text that continues other text: no special tokens are added.

        Raises:
            ValueError: as `encode` does.
        """
        check_characters("text", text)
        return self._ids(text, add_special_tokens=False)

    def tokens_before(self, text: str, ends: Sequence[int]) -> list[int]:
        """How many tokens of `encode_more(text)` lie before each of these places in the text."""
        if self._encoder is None:
            return [len(self.encode_more(text[:end])) for end in ends]
        offsets = self._encoder.encode(text, add_special_tokens=False).offsets
        return [bisect_right(offsets, end, key=itemgetter(1)) for end in ends]

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if self._encoder is not None:
            encode = self._encoder.encode_batch_fast
            (found,) = encode([text], add_special_tokens=add_special_tokens)
            ids: list[int] = found.ids  # a new list
            return ids
        return list(self.wrapped(text, add_special_tokens=add_special_tokens)["input_ids"])

    def spelt(self, token: int) -> str | None:
        """A token as it stands in the vocabulary; None if there is none of that number."""
        if self._direct is not None:
            return self._direct.id_to_token(token)
        return self.wrapped.convert_ids_to_tokens(token)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the tokens, exactly as they spell it (no spaces are tidied away)."""
        if self._direct is not None:
            return self._direct.decode(token_ids, skip_special_tokens)
        return self.wrapped.decode(
            list(token_ids),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )

    def text_before(self, prompt_token_ids: Sequence[int], *, exact: bool = False) -> list[int]:
        """The last tokens of a prompt, as far as the text after it continues them.

        Some decoders drop the space at the beginning of what they are given. A text that continues
        other text keeps its space, so that prompt and text together read as they were meant. A text
        after a special token, such as an answer after the mark of its speaker, begins anew, unless
        it must be `exact`, as structured outputs must.
        """
        last: list[int] = []
        for token in reversed(prompt_token_ids[-_BEFORE:]):
            if token in self._special or not 0 <= token < self.vocabulary:
                break  # the engine refuses tokens that there are not
            last.insert(0, token)
        whole = last and not self.decode(last).endswith(REPLACEMENT)  # no character is cut
        return last if whole else list(self.anchor) if exact else []


def _load(path: str, *, plain: bool) -> PreTrainedTokenizerBase:
    """transformers' tokenizer; a `plain` one is of its general class."""
    wrapped: PreTrainedTokenizerBase
    try:
        if plain:  # half a second faster than finding the class in the table of all models
            from transformers import PreTrainedTokenizerFast

            wrapped = PreTrainedTokenizerFast.from_pretrained(path)
        else:
            wrapped = load_tokenizer(path)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"tokenizer cannot be loaded from {path!r}: {error}") from error
    # A first call settles the padding and truncation that a tokenizer file may carry, so that
    # later calls change nothing and may come from several threads.
    wrapped("settle")
    return wrapped
