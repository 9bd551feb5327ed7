"""Reads plain tokenizers with the tokenizers library alone, without transformers around it.

The demo model's tokenizer is loaded in 0.3 s of processor time and 41 MB; transformers takes 1.4 s
and 74 MB, and with torch loaded 1.3 s more than without it (transformers 5.23, tokenizers
0.23). Where a model declares transformers' general class, that class wraps the `tokenizer.json` as
it is, so the object that encodes and decodes can be had directly. Classes of single models build
theirs anew from parts of the files. Those, and everything else that could change the object or that
is not known here, are left to transformers: `plain_tokenizer` then returns None.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

# Declared classes that take the file as it is, and the models for which transformers uses the
# declared class. For other models it uses the model's own class.
_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
_MODELS = ("llama", "qwen3")

_NAMED = frozenset(
    ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
)
_LISTED = frozenset(("extra_special_tokens", "additional_special_tokens"))
# Other fields that a config may have; none of them changes the object. (`add_bos_token` and
# `add_eos_token` have no effect where there is a tokenizer.json.)
_HARMLESS = frozenset(
    (
        "add_bos_token",
        "add_eos_token",
        "added_tokens_decoder",
        "backend",
        "chat_template",
        "clean_up_tokenization_spaces",
        "is_local",
        "legacy",
        "local_files_only",
        "model_input_names",
        "model_max_length",
        "name_or_path",
        "padding_side",
        "tokenizer_class",
        "truncation_side",
    )
)
# Further files that transformers reads.
_MORE_FILES = ("added_tokens.json", "additional_chat_templates")
# Properties of almost all special tokens; transformers may add others anew, changed.
_USUAL = {
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}


@dataclass(frozen=True, slots=True)
class PlainTokenizer:
    """What transformers would make of the same files.

    Attributes:
        backend: encodes and decodes, without truncation and padding.
        special_tokens: the texts of transformers' `all_special_tokens`.
        chat_template: None if there is none.
    """

    backend: Tokenizer
    special_tokens: frozenset[str]
    chat_template: str | None


def plain_tokenizer(path: Path) -> PlainTokenizer | None:
    """The tokenizer of a directory; None where transformers must read it, or refuse it."""
    try:
        if any((path / name).exists() for name in _MORE_FILES):
            return None
        config, legacy = _read(path / "tokenizer_config.json"), {}
        if (path / "special_tokens_map.json").exists():
            legacy = _read(path / "special_tokens_map.json")
        if (
            _read(path / "config.json").get("model_type") not in _MODELS
            or config.get("tokenizer_class") not in _CLASSES
            or not set(config) <= _HARMLESS | _NAMED | _LISTED
            or not set(legacy) <= _NAMED | _LISTED
        ):
            return None
        template = config.get("chat_template")
        if (path / "chat_template.jinja").exists():  # takes precedence
            template = (path / "chat_template.jinja").read_text(encoding="utf-8")
        if template is not None and not isinstance(template, str):
            return None
        backend = Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception:  # the library raises nothing narrower; transformers reports what is wrong
        return None
    if backend.padding is not None:  # transformers makes its token a special one
        return None
    added = {
        index: {"content": token.content} | {name: getattr(token, name) for name in _USUAL}
        for index, token in backend.get_added_tokens_decoder().items()
    }
    usual = {token["content"] for token in added.values() if token.items() >= _USUAL.items()}
    declared = {str(index): token for index, token in added.items()}
    special = {*_special_tokens(config), *_special_tokens(legacy)}
    if not special <= usual or not _is_part(config.get("added_tokens_decoder", {}), declared):
        return None
    backend.no_truncation()
    return PlainTokenizer(backend, frozenset(usual & special), template)


def _read(file: Path) -> dict[str, Any]:
    found = json.loads(file.read_bytes())
    if not isinstance(found, dict):
        raise ValueError(f"{file} is no object")
    return found


def _special_tokens(config: dict[str, Any]) -> Iterator[str | None]:
    """The texts of the special tokens in a config; None for one with unusual properties."""
    for name in config.keys() & (_NAMED | _LISTED):
        value = config[name]
        if name in _NAMED:
            value = [] if value is None else [value]
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, dict) and token.get("__type", "AddedToken") == "AddedToken":
                changed = any(_USUAL[key] != token[key] for key in token.keys() & _USUAL.keys())
                token = None if changed else token.get("content")
            yield token if isinstance(token, str) else None


def _is_part(part: Any, whole: dict[str, Any]) -> bool:
    return isinstance(part, dict) and all(whole.get(key) == part[key] for key in part)
