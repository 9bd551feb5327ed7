"""Finds a model and loads all that is around it, alike for the server, Python and the commands."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coppice.frontend.text.beam_stops import WatchStopStrings
from coppice.frontend.text.model.generation_config import GenerationDefaults, load_defaults
from coppice.frontend.text.model.options import TextOptions
from coppice.frontend.text.model.template_file import read_template
from coppice.frontend.text.tokenizer import Tokenizer, model_source
from coppice.runtime.config import EngineConfig
from coppice.runtime.model.files.folder import check_model_folder, check_tokenizer_folder
from coppice.runtime.model.files.path import resolve_model


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that has been found, and the text around it; its weights are not loaded.

    Attributes:
        config: of its engine; the model is a folder.
        tokenizer: of the model.
        tokenizer_folder: where that is.
        defaults: the sampling parameters of requests that do not set them.
    """

    config: EngineConfig
    tokenizer: Tokenizer
    tokenizer_folder: Path
    defaults: GenerationDefaults

    @property
    def engine_arguments(self) -> dict[str, Any]:
        """What `Engine` takes beside its config; it can be pickled."""
        folder = self.tokenizer_folder
        return {"tokenizer": folder, "watch_lines": WatchStopStrings(str(folder))}


def load_around(
    config: EngineConfig, options: TextOptions | None = None, *, without_torch: bool = False
) -> Loaded:
    """Finds the model of `config` and loads what is around it.

    What is wrong with a folder is reported here, before anything slow. With `without_torch` the
    tokenizer is for a process that computes nothing (see `leave_out_torch`).

    Raises ValueError: there is no such model or tokenizer, or an option is not acceptable.
    """
    options = options or TextOptions()
    folder = resolve_model(model_source(config.model), config.revision)
    check_model_folder(folder, weights=config.load_format != "dummy")
    source = folder
    if options.tokenizer is not None:
        source = resolve_model(model_source(options.tokenizer))
    check_tokenizer_folder(source)
    defaults = load_defaults(folder, options)
    tokenizer = Tokenizer(source, without_torch=without_torch)
    if options.chat_template is not None:
        tokenizer.chat_template = read_template(options.chat_template)
    config = replace(config, model=str(folder), revision=None)
    if config.draft_model is not None:
        config = replace(config, draft_model=model_source(config.draft_model))
    return Loaded(config, tokenizer, source, defaults)
