"""Tests of compiled products are left out on processors without instructions for them."""

from __future__ import annotations

import pytest

from coppice.kernels.cpu.code.processor import path_of


def needs_products(kind: str) -> pytest.MarkDecorator:
    """Leaves a test out where products of a kind of `processor.PATHS` are torch's."""
    reason = f"this processor has no instructions for compiled {kind} products"
    return pytest.mark.skipif(path_of(kind) == "torch", reason=reason)


def quantized(kind: str) -> object:
    """A parameter that names a quantization, for tests of its compiled products."""
    return pytest.param(kind, marks=needs_products(kind))
