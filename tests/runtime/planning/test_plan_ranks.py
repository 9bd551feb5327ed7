"""Plans of models that are divided among devices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from coppice.runtime.model.config_file import load_model_config
from coppice.runtime.planning.plan import PlanOptions, make_plan


def test_each_device_has_its_part(tiny_checkpoint: Callable[..., Path]) -> None:
    model = load_model_config(tiny_checkpoint("llama"))
    plans = [
        make_plan(model, PlanOptions(tensor_parallel_size=size, memory_bandwidth=10**9))
        for size in (1, 2, 4)
    ]
    assert plans[0].numbers == plans[1].numbers
    weights = [plan.weights.total for plan in plans]
    norms = 5 * 64 * 4  # each has them all
    assert weights[1] == (weights[0] - norms) // 2 + norms
    assert weights[2] < weights[1]
    # Two heads of keys and values: four ranks have one each, as two have.
    assert [plan.token_bytes for plan in plans] == [2 * 2 * 2 * 16 * 4, 256, 256]
    assert plans[1].alone is not None and plans[0].alone is not None
    assert 1.9 < plans[1].alone / plans[0].alone < 2


def test_a_model_that_cannot_be_divided_so_is_refused(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    model = load_model_config(tiny_checkpoint("llama"))
    with pytest.raises(ValueError, match="tensor_parallel_size is 5; the model has 4 heads"):
        make_plan(model, PlanOptions(tensor_parallel_size=5))
    with pytest.raises(ValueError, match="tensor_parallel_size must be at least 1, got 0"):
        PlanOptions(tensor_parallel_size=0)
