"""Opens the draft model of an engine: found, compared with the model, loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from coppice.runtime.config import EngineConfig
from coppice.runtime.model.files.path import resolve_model
from coppice.runtime.runner.draft_model.vocabulary import check_vocabulary
from coppice.runtime.runner.forward import ModelRunner
from coppice.runtime.runner.implementation import choose
from coppice.runtime.startup.room import TooLittleMemory


def open_draft_runner(config: EngineConfig, tokenizer: Path) -> ModelRunner | None:
    """The runner of `config.draft_model`, with weights and without a cache; None: there is none.

    Its weights are there before the model's cache is planned, which gets what they leave.
    `tokenizer` is the folder of the model's. Raises ValueError, which names `draft_model`, for one
    that does not exist, does not load, writes no text or has other tokens than the model.
    """
    name = config.draft_model
    if name is None:
        return None
    model = choose(resolve_model(config.model, config.revision), config).config
    try:
        path = resolve_model(name)
        options = draft_options(config, path)
        draft = choose(path, options).config
    except ValueError as error:
        raise ValueError(f"draft_model {name!r} cannot be used: {error}") from error
    check_vocabulary(name, model.vocab_size, tokenizer, draft.vocab_size, path)
    try:
        runner = ModelRunner(options, cached=False)
    except TooLittleMemory as error:
        raise TooLittleMemory(f"draft_model {name!r}: {error}") from error
    except ValueError as error:
        raise ValueError(f"draft_model {name!r} cannot be used: {error}") from error
    if not runner.recipe.generates:
        runner.close()
        raise ValueError(
            f"draft_model {name!r} has no head for text: it only makes embeddings or scores"
        )
    return runner


def draft_options(config: EngineConfig, path: Path) -> EngineConfig:
    """Options of the draft model: the engine's kernels and types, and nothing of its requests.

    What depends on the rest of a batch may be drafted: only the model's own results need not.
    """
    return replace(
        config,
        model=str(path),
        revision=None,
        draft_model=None,
        speculation="off",
        max_model_len=None,
        kv_cache_tokens=None,
        deterministic=False,
        enable_lora=False,
        cuda_graph_sizes=None,
        host_cache=None,
        disk_cache=None,
        disk_cache_dtype="auto",
        shared_cache=None,
        shared_cache_dtype="auto",
        kv_events_endpoint=None,
        kv_events_replay_endpoint=None,
        kv_events_exact_topic=None,
    )
