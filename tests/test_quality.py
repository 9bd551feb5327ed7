"""The benchmark of number formats: its text is the same each time, and its rows say what is so."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
DEMO = BENCHMARKS.parent / "frontend" / "demo" / "model"


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.usefixtures("benchmarks")
def test_the_text_has_prose_and_code_in_equal_windows() -> None:
    public_text = import_module("common.public_text").public_text
    text = public_text(lambda each: each.encode(), 4, 500)
    assert [len(window) for window in text.windows] == [500] * 4
    assert b'"assert" statement' in bytes(text.windows[0])
    assert b"Command-line parsing library" in bytes(text.windows[1])
    assert public_text(lambda each: each.encode(), 4, 500) == text
    assert public_text(lambda each: each.encode(), 4, 400).digest != text.digest
    with pytest.raises(ValueError, match=r"the text has 1 tokens; 2 x 500 are asked for"):
        public_text(lambda each: [0], 4, 500)


@pytest.mark.usefixtures("benchmarks")
def test_agreement_counts_equal_texts_and_first_other_tokens() -> None:
    quality = import_module("quality")
    exact = quality.Quality(10.0, [1, 2, 3, 4], [(1, 2, 3), (4, 5, 6), (7, 8, 9)])
    other = quality.Quality(10.1, [1, 2, 3, 5], [(1, 2, 3), (4, 5, 7), (0, 8, 9)])
    assert quality.agreement(other, exact) == {
        "perplexity": 10.1,
        "perplexity_more": 0.01,
        "same_best": 0.75,
        "greedy": {"prompts": 3, "same": 0.333, "first_other": 1.0},
    }


@pytest.mark.slow
def test_rows_of_the_demo_model(tmp_path: Path) -> None:
    """int8 costs little and is smaller; what does not run says why."""
    file = tmp_path / "rows.jsonl"
    modes = ["float32", "int8", "fp8-kv"]
    subprocess.run(
        [sys.executable, BENCHMARKS / "quality.py", "--model", DEMO, "--modes", *modes, "--quick",
         "--json", file],
        check=True,
    )  # fmt: skip
    rows = {row["mode"]: row for row in map(json.loads, file.read_text().splitlines())}
    assert list(rows) == modes
    assert abs(rows["int8"]["perplexity_more"]) < 0.02
    assert rows["int8"]["weights"] < 1
    assert rows["int8"]["speed"].keys() == {"prefill", "decode_1", "decode_16"}
    assert rows["float32"]["answers"]["right"] == 1
    assert "kv_cache_dtype" in rows["fp8-kv"]["refused"]
