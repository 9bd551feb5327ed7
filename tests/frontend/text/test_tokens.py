"""Single tokens as text and bytes, for both ways in which vocabularies write bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from coppice.frontend.text.tokenizer import Tokenizer
from coppice.frontend.text.tokens import TokenTexts
from tests.frontend.conftest import byte_fallback_tokenizer

TEXT = "The key 🙂 is under 東京, naïve café"


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    pieces = dict.fromkeys([*"Thekyisundrcafïv,", "▁the", "▁key", "<s>"])
    path = tmp_path_factory.mktemp("byte-fallback")
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=byte_fallback_tokenizer(*pieces), bos_token="<s>"
    )
    wrapped.save_pretrained(path)
    return Tokenizer(path)


def test_bytes_of_a_text_add_up(tokenizer: Tokenizer) -> None:
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode(TEXT)
    pieces = [texts.bytes(token) for token in ids]
    assert any("\ufffd" in texts.text(token) for token in ids), "no character is in parts"
    assert bytes(byte for piece in pieces if piece is not None for byte in piece) == TEXT.encode()


def test_bytes_of_a_vocabulary_with_byte_fallback(byte_fallback: Tokenizer) -> None:
    texts = TokenTexts(byte_fallback)
    ids = byte_fallback.encode(TEXT)
    joined = bytes(byte for token in ids for byte in texts.bytes(token) or ())
    assert joined == (" " + TEXT).encode()
    known = byte_fallback.wrapped.convert_tokens_to_ids
    assert texts.text(known("▁key")) == " key", "the space is a part of the token"
    assert texts.bytes(known("<0xF0>")) == [0xF0]


def test_special_tokens_have_their_names(tokenizer: Tokenizer) -> None:
    texts = TokenTexts(tokenizer)
    end = tokenizer.wrapped.eos_token_id
    assert texts.text(end) == "<|end|>"
    assert texts.bytes(end) == list(b"<|end|>")


def test_every_single_byte_of_a_byte_level_vocabulary(checkpoint: Path) -> None:
    tokenizer = Tokenizer(checkpoint)
    texts = TokenTexts(tokenizer)
    spelt = {tuple(texts.bytes(token) or ()) for token in range(len(tokenizer.wrapped))}
    assert {(byte,) for byte in range(256)} <= spelt
