"""The document of models lists the families that there are, and columns that are explained."""

from __future__ import annotations

import models_table
import pytest

from coppice.runtime.model.families.registry import FAMILIES


@pytest.mark.skipif("config.getoption('--models-table', None)", reason="this run writes the tables")
def test_the_document_has_the_families_that_there_are() -> None:
    ours = models_table.documented(models_table.OURS)
    assert list(ours) == list(FAMILIES)
    everything = set(models_table.FEATURES)
    assert {name: everything - found for name, found in ours.items() if everything - found} == {}
    others = models_table.documented(models_table.OTHERS)
    assert len(others) >= 30
    assert all(found == {"tokens", "n", "beams", "int8"} for found in others.values())


def test_each_column_is_explained() -> None:
    text = models_table.DOCUMENT.read_text(encoding="utf-8")
    for feature, promise in models_table.FEATURES.items():
        assert f"| {feature} | {promise} |" in text
