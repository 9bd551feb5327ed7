"""Comparisons that only a GPU can decide: all run at tiny sizes, and one that fails is named."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from coppice.kernels.triton import plans as triton_plans

ROOT = Path(__file__).resolve().parent.parent
WITHOUT_GPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="needs Triton's interpreter; make gpu-compare runs it"
)


@pytest.fixture
def suite(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "kernels" / "helpers"))
    return import_module


@pytest.mark.slow
@WITHOUT_GPU
def test_every_comparison_runs_at_tiny_sizes(tmp_path, suite):
    file = tmp_path / "rows.jsonl"
    ran = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "gpu_compare.py", "--quick", "--json", file],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    rows = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert [row for row in rows if "error" in row or "cut" in row] == []
    left = {row.get("way", row["benchmark"]) for row in rows if "left_out" in row}
    assert left <= {"fa2", "fa3", "flashinfer", "cost model"}
    found: dict[str, set[Any]] = {}
    for row in rows:
        found.setdefault(row["benchmark"], set()).add(row.get("way"))
    assert found["stages of tiles"] == {"3 stages", "5 stages"}
    assert found["attention in graphs"] == {"by its plan", "in a graph"}
    assert found["fp8 cache"] == {"bfloat16", "e4m3"}
    assert found["fa2 beside fa3"] == {"fa2", "fa3"}
    assert {"ours", "ours, in a graph", "by sorting"} < found["rows"]
    assert {row["eager"] for row in rows if row["benchmark"] == "mixed step"} == {True, False}
    kinds = [row["kv_cache_dtype"] for row in rows if row["benchmark"] == "fp8 cache, decode"]
    assert kinds == ["auto", "fp8"]
    assert all(row["fell_back"] == {} for row in rows if row["benchmark"] == "decode graphs")
    assert all("machine" in row for row in rows)
    assert len(file.read_text().splitlines()) == len(rows)


def test_the_comparisons_are_those_that_were_asked_for_and_have_time(suite):
    kernels, steps = suite("gpu_suite.comparisons"), suite("gpu_suite.compared_steps")
    long = [(32, 8192), (64, 32768), (256, 8192)]
    assert [(case.batch, case.own) for case in kernels.LONG] == list(steps.LONG) == long
    assert kernels.STAGES == (3, 5)
    assert {case.name for case in kernels.TILES} == {"decode", "prefill"}
    parts = suite("gpu_suite.compared").all_parts()
    assert len({part.name for part in parts}) == len(parts) == 9
    limit = suite("gpu_compare").LIMIT_SECONDS
    assert sum(part.seconds for part in parts) < 1.1 * limit and limit < 480


def of(suite: Any, name: str, monkeypatch: pytest.MonkeyPatch, **few: Any) -> list[dict[str, Any]]:
    """The rows of one comparison of kernels, of the first cases alone."""
    kernels, shapes = suite("gpu_suite.comparisons"), suite("gpu_suite.attention_cases")
    for constant, cases in few.items():
        monkeypatch.setattr(kernels, constant, cases)
    bench = suite("gpu_suite.attention").Bench(shapes.QUICK, quick=True, roofs={})
    bench.rounds = 1
    return list(getattr(kernels, name)(bench, time.perf_counter() + 60))


@WITHOUT_GPU
def test_a_graph_without_room_is_named(suite, monkeypatch):
    cases = suite("gpu_suite.comparisons").LONG[:1]
    monkeypatch.setattr(triton_plans, "_MOST_PAGES", 4)
    rows = of(suite, "in_graphs", monkeypatch, LONG=cases)
    assert [row["way"] for row in rows] == ["in a graph", "by its plan"]
    assert rows[0]["left_out"].endswith("the pieces of these contexts have no room in a graph")


@WITHOUT_GPU
def test_flashinfers_kernels_are_compared_where_they_are(suite, monkeypatch):
    """In a library that stands for theirs."""
    monkeypatch.setitem(sys.modules, "flashinfer", suite("fake_flashinfer").Library())
    rows = of(suite, "flashinfer_kernels", monkeypatch, CAUSAL=((512, 512),), WIDE=((512, 8192),))
    assert [(row["kernel"], row["way"]) for row in rows] == [
        ("causal prefill", "fa2"), ("causal prefill", "fa3"),
        ("wide shared level", "fa2"), ("wide shared level", "fa3"),
    ]  # fmt: skip
    assert all(row["ratio"] > 0 and "left_out" not in row for row in rows)


def test_ways_that_compute_something_else_are_left_out(suite):
    kernels, shapes = suite("gpu_suite.comparisons"), suite("gpu_suite.attention_cases")
    bench = suite("gpu_suite.attention").Bench(shapes.QUICK, quick=True, roofs={})
    ways = {"first": lambda: lambda: torch.ones(3), "second": lambda: lambda: torch.zeros(3)}
    moved = dict.fromkeys(ways, 8)
    rows = list(kernels._compared(bench, {"benchmark": "b"}, ways, 0.01, moved, 1))
    assert [row["way"] for row in rows] == ["second", "first"]
    assert rows[0]["left_out"] == "ArithmeticError: its result is off by 1 of the norm"
    assert rows[1]["ratio"] == 1.0 and rows[1]["times"]["gb_per_s"] >= 0


def test_without_rows_no_constants_are_fitted(suite, tmp_path):
    fitted_row = suite("fit_cost").fitted_row
    absent = fitted_row(tmp_path / "none.jsonl")
    assert absent["left_out"].startswith("none.jsonl is not there") and "fitted" not in absent
    (tmp_path / "few.jsonl").write_text('{"benchmark": "decode"}\n')
    assert "0 rows are decoding cases" in fitted_row(tmp_path / "few.jsonl")["left_out"]


def test_the_longest_kernels_of_a_trace(suite, tmp_path):
    longest = suite("gpu_suite.trace").longest
    work = [("a", 2), ("b", 9), ("a", 4), ("c", 1)]
    events = [{"ph": "X", "ts": 0, "cat": "kernel", "name": n, "dur": us} for n, us in work]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": [*events, events[0] | {"cat": "cpu_op"}]}))
    assert longest(file, ("kernel",), 2) == [("b", 1, 9.0), ("a", 2, 6.0)]
