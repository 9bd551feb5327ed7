"""Reads the `config.json` of a checkpoint, with the family that its model type names."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from coppice.runtime.model.config import ModelConfig
from coppice.runtime.model.families.registry import FAMILIES
from coppice.runtime.model.files.quantized.method import read_method
from coppice.runtime.model.reading.family import Family

_TEXT, _LABELS = "ForCausalLM", "ForSequenceClassification"


def load_model_config(path: Path) -> ModelConfig:
    """Read ``path/config.json`` and, for end-of-sequence ids, ``path/generation_config.json``.

    Raises ``ValueError``, naming what is in the file and what is allowed, for a missing or broken
    file and for anything that the decoder would compute differently from transformers: models of
    other families than ``FAMILIES``, activations other than SiLU, unsupported RoPE variants, and
    methods of quantisation that are not read.
    """
    raw = read_config(path)
    family = _family(raw)
    quantization = raw.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if quantization is not None and method not in family.stored_quantized:
        if method == "mxfp4":
            raise ValueError(
                f"quantization_config in {path / 'config.json'} has quant_method 'mxfp4', which "
                f"is read for gpt-oss alone, not for {family.architecture}"
            )
        read_method(path)
    config = family.read(raw, eos_token_ids=eos_token_ids(path, raw))
    return _with_head(config, raw, *(raw.get("architectures") or []))


def read_config(path: Path) -> dict[str, Any]:
    """The content of ``path/config.json``; ``ValueError`` for a missing or broken file."""
    return _read_json(path / "config.json")


def has_family(raw: dict[str, Any]) -> bool:
    """Whether the content of a `config.json` names a model of our families, or none at all."""
    named = raw.get("model_type")
    return named in FAMILIES or not isinstance(named, str)


def _with_head(config: ModelConfig, raw: dict[str, Any], named: str = "") -> ModelConfig:
    """The model with the head that transformers' class of this name has.

    Without a head for text, the embedding stands in its place, which costs nothing.
    """
    if named.endswith(_LABELS):
        labels = raw.get("num_labels", len(raw.get("id2label") or (0, 1)))
        if isinstance(labels, bool) or not isinstance(labels, int) or labels < 1:
            raise ValueError(f"num_labels is {labels!r}; it must be an integer of at least 1")
        return replace(config, head="labels", num_labels=labels, tie_word_embeddings=True)
    if named and not named.endswith(_TEXT):
        return replace(config, head="none", tie_word_embeddings=True)
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; a model's folder must hold it") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; it must be a JSON object")
    return content


def _family(raw: dict[str, Any]) -> Family:
    architectures = [family.architecture for family in FAMILIES.values()]
    allowed = ", ".join(architectures)
    allowed += f" (or with {_LABELS}, or the bare model, for embeddings and scores)"
    model_type = raw.get("model_type")
    family = FAMILIES.get(str(model_type))
    named = raw.get("architectures") or []
    if named:
        known = {name: each for each in architectures for name in _classes(each)}
        if not isinstance(named, list) or len(named) != 1 or named[0] not in known:
            raise ValueError(f"architectures is {named}; supported are {allowed}")
        if family is None or known[named[0]] != family.architecture:
            raise ValueError(f"model_type is {model_type!r}, which does not go with {named[0]}")
    if family is None:
        raise ValueError(
            f"model_type is {model_type!r} and architectures is missing; supported are {allowed}"
        )
    return family


def _classes(architecture: str) -> tuple[str, str, str]:
    """transformers' classes for the model: for text, with a classifier's head, without a head."""
    base = architecture.removesuffix(_TEXT)
    bare = f"{base}TextModel" if base == "Gemma3" else f"{base}Model"
    return architecture, f"{base}{_LABELS}", bare


def eos_token_ids(path: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """All ids that either file names, those of the generation config first.

    The two differ in practice, most often because one of them lacks the end of a chat turn, and
    users expect an answer to stop at either.
    """
    generation = path / "generation_config.json"
    sources = [(generation, _read_json(generation))] if generation.exists() else []
    sources.append((path / "config.json", raw))
    found: dict[int, None] = {}
    for source, content in sources:
        value = content.get("eos_token_id")
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for token_id in ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
                raise ValueError(
                    f"eos_token_id in {source} is {value!r}; it must be a token id or a list"
                )
            found[token_id] = None
    return tuple(found)
