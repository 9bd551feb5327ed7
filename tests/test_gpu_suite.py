"""The GPU suites: all parts run at tiny sizes, and a part that fails does not stop the others."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"

# What the suite's process runs: it imports this by name, from a folder on its path.
FAKE = """
import os, sys, time

def serve(connection, plan):
    for name in plan.names:
        connection.send(("begin", name))
        if name == "hangs":
            time.sleep(60)
        if name == "dies":
            os._exit(7)
        if name == "measures":
            connection.send(("roofs", {"copy": 2.0}))
        connection.send(("row", {"process": os.getpid(), "roofs": plan.roofs}))
        connection.send(("last" if name == "leaves" else "end", name))
    connection.close()
"""


@dataclass(frozen=True)
class Part:
    name: str
    seconds: float = 20.0


@pytest.fixture
def suite(monkeypatch, tmp_path):
    """Imports a module of `benchmarks/` by name; `fake` is a further one."""
    (tmp_path / "fake.py").write_text(textwrap.dedent(FAKE))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module


@pytest.mark.slow
def test_every_part_runs_at_tiny_sizes(tmp_path, suite):
    file = tmp_path / "rows.jsonl"
    ran = subprocess.run(
        [sys.executable, BENCHMARKS / "gpu.py", "--quick", "--json", file],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [row for row in rows if "error" in row or "cut" in row] == []
    old = {"decode in fp8"} if torch.__version__ < "2.13" else set()
    left = {row["benchmark"] for row in rows if "left_out" in row}
    assert left == {"triton instead", "rows"} | old
    names = {part.name.partition(",")[0] for part in suite("gpu_suite.parts").all_parts()}
    found = {row["benchmark"] for row in rows}
    # The rows of these parts have the names of similar parts.
    assert names - found <= {"system prompt without cache", "decode in fp8"}
    assert {"gaps", "ratio"} < found
    decodes = [row for row in rows if row["benchmark"] == "decode"]
    assert [row["batch"] for row in decodes] == [1, 3] * (2 if old else 3)
    assert all(row["of_floor"] > 0 and row["goal"] == 0.85 for row in decodes)
    assert [row.get("quantization") for row in decodes] == [None] * 4 + ([] if old else ["fp8"] * 2)
    prompts = [row for row in rows if row["benchmark"] == "system prompt"]
    ways = [(r["sharing"], r["enable_prefix_caching"], r["hit_rate"] > 0.5) for r in prompts]
    assert ways == [(True, True, True), (False, True, True), (False, False, False)] * 2
    # The other engine has the same weights: it rounds differently, but most tokens agree.
    beside = [row for row in rows if row.get("side") == "transformers"]
    assert len(beside) == 2 and all(row["same_first_tokens"] > 0.6 for row in beside)
    ratios = [row for row in rows if row["benchmark"] == "ratio"]
    assert len(ratios) == 10 and sorted(r["goal"] for r in ratios if "goal" in r) == [
        5,
        5,
        6.4,
        6.4,
    ]
    kept = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(kept) == len(rows)
    assert not any("times" in row for row in kept)  # only those of a GPU are kept


def run_parts(suite: Any, parts: list[Part], limit: float = 100.0) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    suite("gpu_suite.worker").run_parts(
        parts, suite("fake").serve, rows.append, folder=Path(), quick=True, limit=limit
    )
    return rows


def test_a_part_whose_process_ends_does_not_stop_the_others(suite):
    names = ["measures", "dies", "second", "leaves", "third", "fourth"]
    rows = run_parts(suite, [Part(name) for name in names])
    assert [row["part"] for row in rows] == names
    assert rows[1] == {"part": "dies", "error": "its process ended with 7"}
    first, second, leaves, third, fourth = (row for row in rows if "process" in row)
    assert len({first["process"], second["process"], third["process"]}) == 3
    assert (second["process"], third["process"]) == (leaves["process"], fourth["process"])
    assert first["roofs"] == {}
    assert second["roofs"] == third["roofs"] == {"copy": 2.0}  # measured once


def test_a_part_that_hangs_is_ended(suite, monkeypatch):
    monkeypatch.setattr(suite("gpu_suite.worker"), "GRACE_SECONDS", 0.2)
    rows = run_parts(suite, [Part("hangs", 0.1), Part("second")])
    assert rows[0] == {"part": "hangs", "error": "stopped: it took longer than its 0.1 s"}
    assert rows[1]["part"] == "second" and "process" in rows[1]


def test_parts_without_time_are_named(suite):
    rows = run_parts(suite, [Part("hangs"), Part("second"), Part("third")], limit=3.0)
    over = "the suite's 3 s were over"
    assert rows == [
        {"part": "hangs", "error": "stopped: the suite's time was over"},
        {"part": "second", "left_out": over},
        {"part": "third", "left_out": over},
    ]


def test_ratios_need_two_finished_rows(suite):
    gpu = suite("gpu")
    row = {"model": "m", "benchmark": "beside transformers"}
    ours = row | {"side": "coppice", "times": {"tokens_per_s": 50}}
    theirs = row | {"side": "transformers", "times": {"tokens_per_s": 8}}
    (ratio,) = gpu.ratios([ours, theirs])
    assert (ratio["ratio"], ratio["goal"], ratio["model"]) == (6.25, 5, "m")
    assert gpu.ratios([ours, theirs | {"cut": True}]) == []
    assert gpu.ratios([ours, row | {"error": "it failed"}]) == []


def test_the_kernel_suite_has_all_cases_and_time_for_them(suite):
    shapes, limit = suite("gpu_suite.attention_cases"), suite("kernels_gpu").LIMIT_SECONDS
    cases = list(shapes.cases())
    decodes = {(case.batch, case.own) for case in cases if case.name == "decode"}
    assert decodes == {(b, c) for b in (1, 8, 64, 256) for c in (512, 4096, 32768)}
    prefills = {(case.rows, case.own - case.rows) for case in cases if case.name == "prefill"}
    assert prefills == {(r, c) for r in (512, 2048, 8192) for c in (0, 8192, 32768)}
    trees = {case.levels: case.batch for case in cases if case.levels}
    assert trees[((64, 8192),)] == trees[((64, 2048), (8, 8192))] == 64
    assert trees[((8, 4096),)] == 8
    assert len({case.part for case in cases}) == len(cases)
    assert len(cases) * shapes.CASE_SECONDS < limit / 2
    assert limit < 480


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        pytest.param([], None, marks=pytest.mark.slow),
        pytest.param(
            ["beam", "prefill, 512 of 8704", "decode, 8 x 512"],
            [
                ("roofs", None),
                ("decode", "plain"),
                ("decode", "torch, contiguous"),
                ("prefill", "plain"),
                ("prefill", "torch, contiguous"),
                ("tree: beam 8 at 4k", "plain"),
                ("tree: beam 8 at 4k", "tree"),
                ("tree: beam 8 at 4k", "torch, contiguous"),
            ],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["all", "some"],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, make gpu-kernels runs it")
def test_the_kernel_suite_runs_at_tiny_sizes(tmp_path, suite, chosen, expected):
    file = tmp_path / "rows.jsonl"
    command = [sys.executable, BENCHMARKS / "kernels_gpu.py", "--quick", "--json", file]
    if chosen:
        command += ["--cases", *chosen]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert ran.returncode == 0, ran.stderr
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [row for row in rows if "error" in row or "left_out" in row] == []
    found = [(row["benchmark"], row.get("way")) for row in rows]
    if expected is not None:
        assert found == expected
    else:
        names = {case.name for case in suite("gpu_suite.attention_cases").cases()} | {"roofs"}
        assert {name for name, _ in found} == names
    assert all(row["times"]["plan_ms"] > 0 for row in rows[1:])
    assert "flashinfer" in (rows[0]["without_flashinfer"] or "flashinfer")
    assert len(file.read_text().splitlines()) == len(rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter")
def test_a_way_that_fails_leaves_the_others(suite, monkeypatch):
    shapes, measure = suite("gpu_suite.attention_cases"), suite("gpu_suite.attention")
    bench = measure.Bench(shapes.QUICK, quick=True, roofs={})
    bench.measure_roofs()
    (case,) = (case for case in shapes.cases() if "beam" in case.name)

    def wrong(*arguments: Any) -> Any:
        return lambda: torch.zeros(2, 4, 64, dtype=torch.bfloat16)

    monkeypatch.setattr(measure.Bench, "_contiguous", wrong)
    rows = bench.measure(case.at(shapes.QUICK))
    assert [row["way"] for row in rows] == ["torch, contiguous", "plain", "tree"]
    assert rows[0]["error"].startswith("AssertionError: Tensor-likes are not close")
    assert rows[2]["goal"] == {"ratio": 0.98} and "goal" not in rows[1]


def test_busy_time_and_gaps(suite, tmp_path):
    trace = suite("gpu_suite.trace")
    found = trace.of_intervals([(10, 12), (0, 4), (3, 5), (1, 2)])
    assert (found.pieces, found.busy, found.span, found.gaps) == (4, 7, 12, (5,))
    assert found.median_gap == 5
    file = tmp_path / "trace.json"
    work = {"ph": "X", "ts": 5, "dur": 2, "cat": "kernel"}
    file.write_text(json.dumps({"traceEvents": [work, work | {"cat": "cpu_op"}, {"ph": "i"}]}))
    assert trace.busy(file, trace.ON_GPU).busy == 2
    with pytest.raises(ValueError, match="no work of the device"):
        trace.busy(file, ("gpu_memcpy",))


def test_missing_packages_are_named(suite):
    require = suite("common.harness").require
    require("torch", gpu=False)
    with pytest.raises(SystemExit, match=r"lacks no_such_package, nor_this"):
        require("torch", "no_such_package", "nor_this", gpu=False)
