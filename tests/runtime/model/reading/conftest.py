"""Tiny checkpoints that make vectors or scores."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

Make = Callable[..., Path]
_POOLING = {"word_embedding_dimension": 48, "include_prompt": True}


def sentence_modules(folder: Path, mode: str, *, normalize: bool = True) -> None:
    """Writes the files of sentence-transformers for a pooling of this mode."""
    kinds = ["Transformer", "Pooling", *["Normalize"] * normalize]
    modules = [
        {"idx": index, "name": str(index), "path": f"{index}_{kind}" if index else "",
         "type": f"sentence_transformers.models.{kind}"}
        for index, kind in enumerate(kinds)
    ]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    config = _POOLING | {f"pooling_mode_{mode}": True, "pooling_mode_cls_token": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))


def changed(folder: Path, **changes: Any) -> None:
    """Changes the config.json of a folder."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def embedder(tiny_checkpoint: Make, tmp_path: Path) -> Make:
    """``embedder(family, mode)`` is a folder whose model pools; ``bare``: saved without a head."""

    def make(family: str, mode: str = "lasttoken", *, bare: bool = False, **more: Any) -> Path:
        folder = tmp_path / f"{family}-{mode}-{bare}"
        source = tiny_checkpoint(family)
        if bare:
            from transformers import AutoModel

            AutoModel.from_pretrained(source).save_pretrained(folder)
        else:
            shutil.copytree(source, folder)
        if mode:
            sentence_modules(folder, mode, **more)
        return folder

    return make


@pytest.fixture
def classifier(tiny_checkpoint: Make, tmp_path: Path) -> Make:
    """``classifier(family, labels)`` is a folder with a model that has a classifier's head."""

    def make(family: str, labels: int = 1, **changes: Any) -> Path:
        folder = tmp_path / f"{family}-{labels}"
        config = AutoConfig.from_pretrained(tiny_checkpoint(family), num_labels=labels, **changes)
        torch.manual_seed(1)
        model = AutoModelForSequenceClassification.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.3)
        model.save_pretrained(folder)
        return folder

    return make
