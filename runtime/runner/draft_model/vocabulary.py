"""Whether two models have the same tokens under the same numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coppice.runtime.model.files.folder import check_tokenizer_folder
from coppice.runtime.startup.light_transformers import load_tokenizer


def check_vocabulary(
    name: str, size: int, tokenizer: Path, draft_size: int, draft_folder: Path
) -> None:
    """Raises ValueError, with the first token that differs, for a draft model of other tokens.

    `name` is the draft model's, `size` and `draft_size` are the rows of logits. Where both have
    tokenizers, these are compared, and the sizes may differ by rows that no token has, as those of
    one family of models do. Else the sizes must be equal.
    """
    sizes = f"it has {draft_size:,} tokens, the model {size:,}"
    wrong = f"draft_model {name!r} must have the vocabulary of the model; {sizes}"
    ours, theirs = tokens_of(tokenizer), tokens_of(draft_folder)
    if ours is None or theirs is None:
        if size != draft_size:
            raise ValueError(wrong)
        return
    if ours != theirs:
        token = min(number for number in {*ours, *theirs} if ours.get(number) != theirs.get(number))
        raise ValueError(
            f"{wrong}, and token {token} is {_shown(theirs.get(token))} in it, "
            f"{_shown(ours.get(token))} in the model"
        )
    if max(ours, default=0) >= min(size, draft_size) and size != draft_size:
        raise ValueError(f"{wrong}: the smaller one lacks token {max(ours)} of its tokenizer")


def tokens_of(folder: Path) -> Mapping[int, str] | None:
    """The text of each token of a folder's tokenizer; None where there is none."""
    try:
        return _read(json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, LookupError, TypeError):
        pass  # there is none, or in a form that only its library knows
    try:
        check_tokenizer_folder(folder)
        words = load_tokenizer(str(folder)).get_vocab()
    except (ValueError, OSError):
        return None
    return {number: word for word, number in words.items()}


def _read(tokenizer: Any) -> dict[int, str]:
    """The tokens of a tokenizer.json, whose library need not be loaded for them."""
    words = tokenizer["model"]["vocab"]
    if isinstance(words, dict):
        found = {int(number): str(word) for word, number in words.items()}
    else:  # each with its score, in the order of their numbers
        found = {number: str(word) for number, (word, _) in enumerate(words)}
    for each in tokenizer.get("added_tokens", ()):
        found[int(each["id"])] = str(each["content"])
    return found


def _shown(word: str | None) -> str:
    return "none" if word is None else repr(word)
