"""The fit of the cost model's constants finds those by which times were made."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from fit_cost import fit
from gpu_suite.attention_cases import WHOLE, cases, described


def made(rate, launch, start, resident):
    rows = []
    for case in cases():
        if case.name != "decode":
            continue
        row = described(case, WHOLE)
        held, partials = 132 * resident, row["bytes"]["partials"]
        waves = row["programs"] / held
        waves = waves + 0.5 if waves > 8 else np.ceil(waves)
        keys = row["bytes"]["kv"] / row["programs"] + WHOLE.model.key_bytes * start
        seconds = (waves * held * keys + partials) / rate + launch * (1 + (partials > 0))
        rows.append({**row, "way": "plain", "times": {"median_ms": seconds * 1e3}})
    return rows


def test_the_constants_are_found():
    found = fit(made(3e12, 4e-6, 100, 2), 132)
    assert found["resident"] == 2
    assert found["START_KEYS"] == 100
    assert found["LAUNCH_BYTES"] == pytest.approx(12e6, rel=1e-3)
    assert found["bytes_per_s"] == pytest.approx(3e12, rel=1e-3)


def test_too_few_rows_are_refused():
    with pytest.raises(ValueError, match="0 rows are decoding cases"):
        fit([{"benchmark": "prefill"}], 132)
