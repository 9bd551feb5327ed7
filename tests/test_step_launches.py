"""The benchmark that counts a step's launches: what a graph has taken over, and what it has not."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter")
def test_steps_without_rules_are_one_graph_and_its_transfers():
    """All arrays sent, the kernel that puts them in their places, the last tokens in (two),
    the graph, and the new ones out (two)."""
    ran = subprocess.run(
        [sys.executable, BENCHMARKS / "step_launches.py", "--quick"],
        capture_output=True, text=True, timeout=280, check=True,
    )  # fmt: skip
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(rows) == 8
    for row in rows:
        assert (row["graphs"], row["kernels"]) == (1, 1)
        if row["kind"] in ("greedy", "top-p"):
            assert (row["launches"], row["operations"], row["transfers"]) == (7, 3, 2)
        else:
            assert row["launches"] > 7
        parts = ("graphs", "kernels", "operations", "transfers")
        assert row["launches"] == sum(row[part] for part in parts)


def test_folders_that_are_no_checkouts_are_refused(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    trees = import_module("common.trees")
    with pytest.raises(SystemExit, match="is no checkout: it has no coppice"):
        list(trees.in_turn("none.py", [tmp_path], [], 1))
    assert trees.commit(tmp_path) == tmp_path.name
