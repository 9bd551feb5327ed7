"""Keys that sliding windows did not read, beside what each row of a step sees by definition."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.metrics.window_keys import WindowKeys
from coppice.runtime.report.gather import make_report
from coppice.runtime.requests.sampling_params import SamplingParams


def test_a_model_without_windows_counts_nothing() -> None:
    assert WindowKeys.of((None, None), 64, 4) is None


def test_a_step_reads_what_its_rows_see() -> None:
    windows, steps = (None, 5, 3, 5), [([7, 1, 30], [4, 1, 1]), ([5], [5]), ([31, 8], [1, 1])]
    keys = WindowKeys(windows, page_bytes=4 * 4 * 8, page_size=4)
    read = every = 0
    for context, rows in steps:
        keys.step(np.array(context, np.int32), np.concatenate([[0], np.cumsum(rows)]))
        for window in (5, 3, 5):
            for tokens, count in zip(context, rows, strict=True):
                every += tokens
                places = range(tokens - count, tokens)
                read += len({key for at in places for key in range(tokens)
                             if at - window < key <= at})  # fmt: skip
    report = keys.report([], num_pages=0)
    assert (report.keys_read, report.keys_skipped) == (read, every - read)
    assert report.bytes_skipped == 8 * (every - read)
    assert (report.layers, report.windows) == (4, ((3, 1), (5, 2)))
    assert (report.pages_old, report.bytes_old) == (0, 0)


def test_a_page_is_old_if_no_running_sequence_sees_it() -> None:
    """Of 18 tokens a window of 6 sees those from 13 on in the next step, and of 9 from 4 on."""
    keys = WindowKeys((6, None), page_bytes=200, page_size=4)
    long = SimpleNamespace(table=array("i", [3, 5, 1, 7, 8]), computed=18)
    short = SimpleNamespace(table=array("i", [3, 5, 2]), computed=9)
    alone = keys.report([long], num_pages=10)
    assert (alone.pages_old, alone.bytes_old) == (3 / 2, 3 * 100)  # 3, 5 and 1, in half the layers
    both = keys.report([long, short], num_pages=10)
    assert both.pages_old == 2 / 2  # the short one still sees page 5


@pytest.mark.parametrize("family", ["llama", "ministral"])
def test_an_engine_reports_them(tiny_checkpoint: Callable[..., Path], family: str) -> None:
    """The ministral of tests has two layers, of which the first has a window of 11 tokens."""
    model = str(tiny_checkpoint(family))
    engine = Engine(
        EngineConfig(model, kv_cache_tokens=512, max_num_seqs=4, max_num_batched_tokens=24)
    )
    engine.add_request("a", list(range(40, 80)), SamplingParams(max_tokens=9, ignore_eos=True))
    for _ in range(4):
        engine.step()
    report = make_report(engine)
    if family == "llama":
        assert report.windows is None
        assert report.window_keys == {}
        return
    windows = report.windows
    assert windows is not None
    # Chunks of 24 and 16 tokens, then a token each: the rows of a chunk see from its first row's.
    context, first = (24, 40, 41, 42), (0, 24, 40, 41)
    skipped = sum(max(0, each + 1 - 11) for each in first)
    assert (windows.keys_read, windows.keys_skipped) == (sum(context) - skipped, skipped)
    assert report.window_keys == {"read": sum(context) - skipped, "skipped": skipped}
    # 42 tokens have their KV; the next step sees those from 32 on, and two pages end before.
    page = 2 * 2 * 2 * 16 * 16 * 4
    assert (windows.pages_old, windows.bytes_old) == (2 / 2, page)
    while engine.has_unfinished():
        engine.step()
    after = make_report(engine).windows
    assert after is not None
    assert after.pages_old == 0
