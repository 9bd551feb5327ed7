"""Text to token ids and back, through the model's own tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from reprlib import repr as shown
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

DEMO_MODEL = Path(__file__).parent / "demo_model"

Message = Mapping[str, Any]
"""One turn of a conversation: `role` and `content`, as in the OpenAI API."""

_ROLES = ("system", "user", "assistant")


def model_source(model: str) -> str:
    """The directory or hub id that a model's name stands for: "demo" is the shipped checkpoint."""
    return str(DEMO_MODEL) if model == "demo" else model


class Tokenizer:
    """The model's tokenizer, reduced to what the engine's front needs.

    Args:
        path: a local directory with the tokenizer's files.

    Raises:
        ValueError: the directory has no tokenizer that transformers can load.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            self.wrapped: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(path))
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"tokenizer cannot be loaded from {str(path)!r}: {error}") from error
        # Every token of every stream is decoded: what transformers does around the library's own
        # decoder takes three times as long as that.
        plain = getattr(type(self.wrapped), "_decode", None) is PreTrainedTokenizerFast._decode
        self._direct = self.wrapped.backend_tokenizer if plain else None
        # A first call settles the padding and truncation that a tokenizer file may carry, so that
        # later calls change nothing and may come from several threads.
        self.encode("settle")

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the model expects around one.

        Raises:
            ValueError: the text has half of a surrogate pair in it, which no encoding can express.
        """
        _check_characters("prompt", text)
        return list(self.wrapped(text, add_special_tokens=True)["input_ids"])

    def encode_more(self, text: str) -> list[int]:
        """Token ids of text that goes on behind other text: no special tokens are added.

        Raises:
            ValueError: as `encode` does.
        """
        _check_characters("text", text)
        return list(self.wrapped(text, add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the tokens, exactly as they spell it (no spaces are tidied away)."""
        if self._direct is not None:
            return self._direct.decode(token_ids, skip_special_tokens)
        return self.wrapped.decode(
            list(token_ids),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )

    def encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation up to where the assistant's answer begins.

        Without `add_generation_prompt`, up to the end of the last message.

        `content` is a string, or a list of parts of type "text", which are joined.

        Raises:
            ValueError: the model has no chat template, the template refuses the conversation, or a
                message has an unknown role, an unknown key or content that is not text.
        """
        if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
            raise ValueError(f"messages must be a list of messages, got {shown(messages)}")
        turns = [_turn(index, message) for index, message in enumerate(messages)]
        if not self.wrapped.chat_template:
            raise ValueError("messages: this model's tokenizer has no chat template")
        try:
            ids = self.wrapped.apply_chat_template(
                turns,
                add_generation_prompt=add_generation_prompt,
                tokenize=True,
                return_dict=False,
            )
        except Exception as error:  # a template is a program: it raises whatever it likes
            raise ValueError(f"messages: the chat template refuses them: {error}") from error
        return list(ids)


def _turn(index: int, message: Any) -> dict[str, str]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise ValueError(f"{where} must have `role` and `content`, got {shown(message)}")
    # Clients send answers back as they got them, with the fields that were not set as null.
    extra = sorted(
        str(key)
        for key, value in message.items()
        if key not in ("role", "content") and value is not None
    )
    if extra:
        raise ValueError(f"{where} has {', '.join(extra)}, only role and content are supported")
    role = message.get("role")
    if role not in _ROLES:
        raise ValueError(f"{where}.role must be one of {', '.join(_ROLES)}, got {shown(role)}")
    return {"role": role, "content": _content(f"{where}.content", message.get("content"))}


def _content(where: str, content: Any) -> str:
    if isinstance(content, str):
        _check_characters(where, content)
        return content
    if not isinstance(content, list):
        raise ValueError(f"{where} must be a string or a list of text parts, got {shown(content)}")
    texts = []
    for part in content:
        if (
            not isinstance(part, Mapping)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise ValueError(f"{where} may only have parts of type 'text', got {shown(kind)}")
        _check_characters(where, part["text"])
        texts.append(part["text"])
    return "".join(texts)


def _check_characters(where: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        lone = text[error.start]
        raise ValueError(
            f"{where} must be valid Unicode, got a lone surrogate {lone!a} at {error.start}"
        ) from None
