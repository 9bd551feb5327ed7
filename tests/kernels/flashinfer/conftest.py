"""A library that stands for FlashInfer, and needs no GPU."""

from __future__ import annotations

import sys

import pytest
from fake_flashinfer import Library


@pytest.fixture
def library(monkeypatch) -> Library:
    made = Library()
    monkeypatch.setitem(sys.modules, "flashinfer", made)
    return made
