"""The document promises what the tests of this folder show, and nothing else."""

from __future__ import annotations

import pytest

from tests.frontend.clients import table


def test_the_document_has_what_the_tests_show(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--clients-table", None):
        pytest.skip("this run writes the table")
    assert table.documented() == table.marked()


def test_the_document_has_what_was_tried_by_hand(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--clients-table", None):
        pytest.skip("this run writes the table")
    text = table.DOCUMENT.read_text(encoding="utf-8")
    assert len(table.by_hand()) > 2
    assert "\n".join(table.by_hand()) in text


def test_each_feature_has_a_column() -> None:
    for features in table.marked().values():
        assert features <= set(table.FEATURES)
