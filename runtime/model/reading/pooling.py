"""What a checkpoint is made for beside text: embeddings or scores, as its files say.

Embeddings are made by the modules of sentence-transformers (`modules.json`), or by a bare model
(`Qwen3Model`), whose last token's state is then taken. Scores are made by a classifier's head
(`Qwen3ForSequenceClassification`), or by the logits of two tokens (a `LogitScore` module, or vLLM's
`classifier_from_token`). What the files do not say is refused, with the reason.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coppice.runtime.model.config import ModelConfig
from coppice.runtime.requests.pooling_recipe import EmbedRecipe, Recipe, ScoreRecipe

_POOLINGS = {"lasttoken": "last", "mean": "mean"}
_FLAGS = {"pooling_mode_lasttoken": "lasttoken", "pooling_mode_mean_tokens": "mean"}
_ACTIVATIONS = {"Sigmoid": "sigmoid", "Identity": "none", "Softmax": "softmax"}
_PROBLEMS = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}


def read_recipe(path: Path, model: ModelConfig) -> Recipe:
    """What the checkpoint in this folder is made for. Raises ValueError for a broken file."""
    raw = _json(path / "config.json") if (path / "config.json").is_file() else {}
    modules = _modules(path)
    return Recipe(
        generates=model.head == "text",
        embed=_embed(path, raw, model, modules),
        score=_score(path, raw, model, modules),
    )


def _embed(
    path: Path, raw: dict[str, Any], model: ModelConfig, modules: list[tuple[str, str]]
) -> EmbedRecipe | str:
    if model.head == "labels":
        return "its head is a classifier"
    kinds = [kind for kind, _ in modules]
    if not modules:
        if model.head == "none":  # as vLLM takes a bare model
            return EmbedRecipe("last", True, model.hidden_size, _sizes(raw))
        return (
            "it has no modules.json of sentence-transformers that says how states become a vector"
        )
    if "LogitScore" in kinds:
        return "its modules.json is that of a reranker"
    unknown = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    if unknown or kinds[:2] != ["Transformer", "Pooling"]:
        return f"modules.json has {', '.join(kinds)}; Transformer, Pooling and Normalize are known"
    config = _json(path / modules[1][1] / "config.json")
    mode = config.get("pooling_mode")
    modes = [mode] if mode else [name for flag, name in _FLAGS.items() if config.get(flag)]
    others = [
        flag
        for flag, on in config.items()
        if flag.startswith("pooling_mode_") and on and flag not in _FLAGS
    ]
    if others or len(modes) != 1 or modes[0] not in _POOLINGS:
        named = ", ".join([*map(str, modes), *others]) or "nothing"
        return f"it pools by {named}; lasttoken and mean are supported"
    if _POOLINGS[modes[0]] == "mean" and not config.get("include_prompt", True):
        return "include_prompt is false: a mean without the instruction is not supported"
    return EmbedRecipe(_POOLINGS[modes[0]], "Normalize" in kinds, model.hidden_size, _sizes(raw))


def _sizes(raw: dict[str, Any]) -> tuple[int, ...] | None:
    sizes = raw.get("matryoshka_dimensions")
    if isinstance(sizes, list):
        return tuple(size for size in sizes if isinstance(size, int))
    return None if raw.get("is_matryoshka") else ()


def _score(
    path: Path, raw: dict[str, Any], model: ModelConfig, modules: list[tuple[str, str]]
) -> ScoreRecipe | str:
    if model.head == "labels":
        return ScoreRecipe(model.num_labels, _activation(raw, model.num_labels))
    named = raw.get("classifier_from_token")
    score = next((folder for kind, folder in modules if kind == "LogitScore"), None)
    if model.head != "text" or (named is None and score is None):
        return (
            "it has neither a classifier's head, nor a LogitScore module, nor "
            "classifier_from_token in config.json"
        )
    if score is not None:
        config = _json(path / score / "config.json")
        tokens = config.get("true_token_id"), config.get("false_token_id")
    else:
        if not isinstance(named, list) or len(named) != 2:
            return f"classifier_from_token must name two tokens (no, yes), got {named!r}"
        ids = _token_ids(path)
        tokens = ids.get(str(named[1])), ids.get(str(named[0]))
        if None in tokens:
            return f"classifier_from_token is {named}; the vocabulary lacks one of them"
    yes, no = tokens
    if not isinstance(yes, int) or not (no is None or isinstance(no, int)):
        return f"the tokens of its score must be ids, got {tokens!r}"
    if max(yes, no or 0) >= model.vocab_size:
        return f"the tokens of its score are {tokens}; the vocabulary has {model.vocab_size}"
    return ScoreRecipe(1, _activation(raw, 1), (yes, no))


def _activation(raw: dict[str, Any], labels: int) -> str:
    """sentence-transformers' activation, or what the problem's type asks for."""
    own = raw.get("sentence_transformers")
    name = own.get("activation_fn") if isinstance(own, dict) else None
    name = name or raw.get("sbert_ce_default_activation_function")
    if isinstance(name, str) and name.rpartition(".")[2] in _ACTIVATIONS:
        return _ACTIVATIONS[name.rpartition(".")[2]]
    problem = _PROBLEMS.get(str(raw.get("problem_type")))
    return problem or ("sigmoid" if labels == 1 else "softmax")


def _modules(path: Path) -> list[tuple[str, str]]:
    """The modules of sentence-transformers: the name of each one's class, and its folder."""
    file = path / "modules.json"
    if not file.is_file():
        return []
    content = json.loads(file.read_text(encoding="utf-8"))
    try:
        return [(each["type"].rpartition(".")[2], each["path"]) for each in content]
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} is no list of modules: {error!r}") from error


def _token_ids(path: Path) -> dict[str, int]:
    """The vocabulary of a tokenizer whose file spells it out; {} for others."""
    file = path / "tokenizer.json"
    if not file.is_file():
        return {}
    content = _json(file)
    vocabulary = content.get("model", {}).get("vocab")
    ids = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    return ids | {each["content"]: each["id"] for each in content.get("added_tokens", ())}


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, got a {type(content).__name__}")
    return content
