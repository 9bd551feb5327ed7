"""The document of models lists the families that there are, and columns that are explained."""

from __future__ import annotations

import models_table
import pytest

from coppice.runtime.model.families.registry import FAMILIES


@pytest.mark.skipif("config.getoption('--models-table', None)", reason="this run writes the tables")
def test_the_document_has_the_families_that_there_are() -> None:
    ours = models_table.documented(models_table.OURS)
    assert list(ours) == list(FAMILIES)
    assert all({"logits", "tokens", "beams", "int8"} <= found for found in ours.values())
    others = models_table.documented(models_table.OTHERS)
    assert len(others) >= 15 and all("tokens" in found for found in others.values())


def test_each_column_is_explained() -> None:
    text = models_table.DOCUMENT.read_text(encoding="utf-8")
    for feature, promise in models_table.FEATURES.items():
        assert f"| {feature} | {promise} |" in text
