"""The text and the bytes of single tokens, for results that list tokens one by one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from coppice.frontend.text.detokenizer import REPLACEMENT
from coppice.frontend.text.outputs import Logprob
from coppice.frontend.text.tokenizer import Tokenizer
from coppice.runtime.requests.logprobs import Logprobs

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in byte-level vocabularies (Radford et al. 2019, GPT-2).

    Bytes that are printable in Latin-1 are written as themselves, the others as the characters
    from U+0100 on, in order.
    """
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in plain]
    alphabet = {chr(byte): byte for byte in plain}
    return alphabet | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_alphabet()


class TokenTexts:
    """What each token of a tokenizer spells. Each token is decoded once.

    A token is decoded after another one, since some decoders drop the space at the beginning.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor = tokenizer.anchor
        self._skip = len(tokenizer.decode(self._anchor, skip_special_tokens=False))
        self._texts: dict[int, str] = {}

    def text(self, token: int) -> str:
        """Its text, special tokens included; U+FFFD for bytes that are no whole character."""
        text = self._texts.get(token)
        if text is None:
            decoded = self._tokenizer.decode([*self._anchor, token], skip_special_tokens=False)
            text = self._texts[token] = decoded[self._skip :]
        return text

    def bytes(self, token: int) -> list[int] | None:
        """The bytes that it stands for, also where they are part of a character; None: unknown."""
        text = self.text(token)
        if REPLACEMENT not in text:
            return list(text.encode())
        spelt = self._tokenizer.spelt(token)
        if spelt is None:
            return None
        if byte := _FALLBACK.fullmatch(spelt):
            return [int(byte[1], 16)]
        if all(character in _BYTES for character in spelt):
            return [_BYTES[character] for character in spelt]
        return list(text.encode())

    def logprobs(self, found: Logprobs, token_ids: Sequence[int]) -> Iterator[dict[int, Logprob]]:
        """For each token, the logprobs of itself and of the most probable ones, in that order."""
        columns = (found.logprobs, found.ranks, found.top_ids, found.top_logprobs)
        rows: list[np.ndarray] = [*columns, found.top_ranks()]
        for token, logprob, rank, ids, values, ranks in zip(
            token_ids, *(column.tolist() for column in rows), strict=True
        ):
            place = {token: Logprob(logprob, rank, self.text(token))}
            for other, value, its_rank in zip(ids, values, ranks, strict=True):
                if other != token:
                    place[other] = Logprob(value, its_rank, self.text(other))
            yield place
