"""The sequences and tokens of a step, from a device's memory and rates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coppice.runtime.model.config_file import load_model_config
from coppice.runtime.planning.numbers import count
from coppice.runtime.planning.steps import Rates, step_sizes

GIB = 2**30
H100 = Rates(80 * GIB, 3.35e12, 1.0e15)


@pytest.fixture
def model(tiny_checkpoint):
    return load_model_config(tiny_checkpoint("llama"))


def sizes(model, rates, used=8 * 10**9, itemsize=2):
    numbers = count(model)
    numbers = replace(numbers, rest=numbers.rest + used - numbers.used)
    assert numbers.used == used
    made = step_sizes(model, numbers, rates, itemsize)
    return made.seqs, made.tokens


def test_the_rates_decide(model):
    assert sizes(model, H100) == (256, 8192)
    assert sizes(model, replace(H100, bandwidth=4.9e12)) == (256, 8192)
    assert sizes(model, Rates(80 * GIB, 2.0e12, 312e12)) == (128, 2048)


def test_a_step_of_a_large_model_is_short(model):
    assert sizes(model, H100, used=10**9) == (256, 8192)
    assert sizes(model, H100, used=16 * 10**9) == (256, 4096)
    assert sizes(model, H100, used=400 * 10**9) == (256, 1024)


def test_a_small_memory_bounds_both_but_not_below_a_cpus(model):
    wide = replace(model, vocab_size=152_000)
    assert sizes(wide, H100) == (256, 8192)
    assert sizes(wide, replace(H100, memory=24 * GIB)) == (128, 8192)
    assert sizes(wide, replace(H100, memory=GIB // 2)) == (64, 8192)
    huge = replace(model, intermediate_size=200_000)
    assert sizes(huge, replace(H100, memory=24 * GIB)) == (256, 1024)


def test_more_sequences_than_512_are_never_the_default(model):
    assert sizes(model, Rates(800 * GIB, 1e12, 9e15))[0] == 512
