"""A command that torchrun starts as one of several ranks of a model."""

from __future__ import annotations

import os
from dataclasses import replace

from coppice.runtime.config import EngineConfig


def takes_part(config: EngineConfig) -> bool:
    """Whether this process was another rank than the first, and has done its part."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("RANK") == "0":
        return False
    from coppice.frontend.text.tokenizer import model_source
    from coppice.runtime.runner.member import run_launched  # loads torch

    return run_launched(replace(config, model=model_source(config.model)))
