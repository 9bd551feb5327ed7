"""An engine makes drafts by itself, with the same texts, and tells what became of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from fake_model import VOCABULARY, fake_checkpoint, fake_engine
from free_costs import make_free

from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.report.gather import make_report, make_stats
from coppice.runtime.report.merged import merged_stats
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.sampling.drafts.suffixes import SuffixDrafts


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = fake_checkpoint(tmp_path_factory.mktemp("fake"))
    assert isinstance(path, Path)
    return path


def engine_of(checkpoint: Path, speculation: str) -> Engine:
    engine, _ = fake_engine(checkpoint, speculation=speculation, kv_cache_tokens=2000, page_size=4)
    make_free(engine)
    return engine


def run(
    engine: Engine, prompts: list[list[int]], tenant: str | None = None, **params: Any
) -> tuple[list[Any], list[Any]]:
    """The tokens of each prompt, and the last output of each request; all prompts run together."""
    tokens: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    last = {}
    for number, prompt in enumerate(prompts):
        engine.add_request(
            str(number), prompt, SamplingParams(max_tokens=30, **params), tenant=tenant
        )
    while engine.has_unfinished():
        for output in engine.step():
            assert output.error is None
            tokens[output.request_id] += output.new_token_ids
            last[output.request_id] = output
        engine.check()
    return list(tokens.values()), list(last.values())


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3}])
def test_texts_are_the_same_and_take_fewer_steps(checkpoint: Path, params: Any) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(20)] for _ in range(4)]
    plain, drafting = engine_of(checkpoint, "off"), engine_of(checkpoint, "auto")
    expected, _ = run(plain, prompts, **params)
    assert run(drafting, prompts, **params)[0] == expected
    before = drafting.counters.steps
    found, last = run(drafting, prompts, **params)  # what has been written before is foretold
    assert found == expected
    assert drafting.counters.steps - before < 0.6 * plain.counters.steps
    assert drafting.drafts is not None
    assert sum(each.accepted for each in last) > 40
    assert all(each.accepted <= each.drafted for each in last)
    counts = drafting.drafts.counts
    stats = make_stats(drafting)
    assert stats.accepted_tokens == {"text": counts.accepted}
    assert stats.drafted_tokens == {"text": counts.drafted}
    assert stats.tokens_a_step > 1.2
    assert stats.draft_seconds_saved["text"] > 0
    both = merged_stats({"a": stats, "b": make_report(drafting)})
    assert both.accepted_tokens == {"text": 2 * counts.accepted}
    assert both.draft_rows == 2 * stats.draft_rows
    assert make_stats(plain).drafted_tokens == {}
    plain.close()
    drafting.close()


def test_steps_do_not_betray_what_another_tenant_wrote(checkpoint: Path) -> None:
    """Its own text again takes fewer steps, that of another tenant as many as text nobody had."""
    rng = random.Random(4)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(20)] for _ in range(4)]
    others = [[rng.randrange(3, VOCABULARY) for _ in range(20)] for _ in range(4)]
    steps = {}
    for name, before in (("same", prompts), ("others", others)):
        engine = engine_of(checkpoint, "auto")
        run(engine, before, "a", temperature=0.0, ignore_eos=True)
        for turn in ("first", "again"):
            begun = engine.counters.steps
            run(engine, prompts, "b", temperature=0.0, ignore_eos=True)
            steps[name, turn] = engine.counters.steps - begun
        engine.close()
    assert steps["same", "first"] == steps["others", "first"]
    assert steps["same", "again"] < 0.6 * steps["same", "first"]


def test_a_prediction_and_a_reset(checkpoint: Path) -> None:
    rng = random.Random(2)
    prompt = [rng.randrange(3, VOCABULARY) for _ in range(20)]
    drafting = engine_of(checkpoint, "auto")
    ((expected,), _) = run(drafting, [prompt], temperature=0.0, ignore_eos=True)
    drafting.reset_cache()
    assert drafting.drafts is not None
    before = drafting.drafts.counts.accepted
    found, (last,) = run(
        drafting, [prompt], temperature=0.0, ignore_eos=True, prediction_token_ids=expected
    )
    assert found == [expected]
    assert last.accepted > 15
    assert drafting.drafts.counts.accepted == before + last.accepted
    assert drafting.drafts.counts.of("prediction").accepted > 15
    drafting.close()


def test_an_engine_that_sleeps_keeps_no_text(checkpoint: Path) -> None:
    engine = engine_of(checkpoint, "auto")
    run(engine, [[5, 6, 7, 8]], temperature=0.0)
    assert engine.drafts is not None
    (index,) = (each.index for each in engine.drafts._sources if isinstance(each, SuffixDrafts))
    assert len(index) > 20
    engine.sleep()
    assert len(index) == 0
    engine.wake_up()
    run(engine, [[5, 6, 7, 8]], temperature=0.0)
    engine.close()


def test_the_engine_takes_predictions_as_tokens(checkpoint: Path) -> None:
    engine = engine_of(checkpoint, "off")
    with pytest.raises(ValueError, match="prediction must be token ids here"):
        engine.add_request("a", [1, 2], SamplingParams(prediction="a text"))
    engine.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculation": "on"}, "speculation must be one of auto, off, got 'on'"),
        ({"max_draft_tokens": 0}, "max_draft_tokens must be an integer of at least 1, got 0"),
        ({"max_draft_tokens": 63}, "max_draft_tokens must be at most 62, got 63"),
    ],
)
def test_options_out_of_range_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(model="m", **options)
