"""Tokens that a form leaves no choice about are entered at once, and the text is the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from free_costs import make_free
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.report.gather import make_stats
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.requests.structured_outputs import StructuredOutputsParams
from coppice.runtime.sampling.drafts.draft import NOTHING
from coppice.runtime.sampling.drafts.forced import ForcedDrafts

EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {
        "first_property_of_all": {"type": "integer", "minimum": 0, "maximum": 9},
        "second_property_of_all": {"enum": ["a certain value", "another value"]},
    },
    "required": ["first_property_of_all", "second_property_of_all"],
    "additionalProperties": False,
}
JSON = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
REGEX = StructuredOutputsParams(regex="Dear (Sir|Madam), this text has no choice, (yes|no)!")


@pytest.fixture(scope="module")
def checkpoint(
    tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A random model with a tokenizer of bytes, so that a text can be written in one way only."""
    path = tmp_path_factory.mktemp("bytes")
    shutil.copytree(tiny_checkpoint("llama"), path, dirs_exist_ok=True)
    words = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(path)
    return path


def start(checkpoint: Path, speculation: str = "auto", **options: Any) -> Engine:
    limits = {"kv_cache_tokens": 2048, "max_num_seqs": 8}
    config = EngineConfig(
        model=str(checkpoint), device="cpu", speculation=speculation, **(limits | options)
    )
    engine = Engine(config)
    make_free(engine)
    return engine


def run(engine: Engine, *asked: dict[str, Any]) -> tuple[dict[tuple[str, int], list[int]], int]:
    """The tokens of each sequence, and the most that one step gave."""
    for number, params in enumerate(asked):
        request = SamplingParams(**({"max_tokens": 200} | params))
        engine.add_request(str(number), [5, 6, 7 + number], request)
    tokens: dict[tuple[str, int], list[int]] = {}
    most = 0
    while engine.has_unfinished():
        for output in engine.step():
            assert output.error is None, output.error
            tokens.setdefault((output.request_id, output.index), []).extend(output.new_token_ids)
            most = max(most, len(output.new_token_ids))
        engine.check()
    return tokens, most


@pytest.mark.parametrize("form", [JSON, REGEX], ids=["json", "regex"])
def test_forced_tokens_are_entered_at_once(checkpoint: Path, form: StructuredOutputsParams) -> None:
    asked: list[dict[str, Any]] = [
        {"structured_outputs": form, "temperature": 0, "logprobs": 0},
        {"structured_outputs": form, "seed": 4, "n": 2},
        {"structured_outputs": form, "temperature": 0, "frequency_penalty": 0.7},
        {"temperature": 0, "max_tokens": 20, "ignore_eos": True},  # without a form
    ]
    plain, engine = start(checkpoint, "off"), start(checkpoint)
    assert engine.drafts is not None
    engine.drafts._sources = [ForcedDrafts(1000)]
    expected, one = run(plain, *asked)
    found, most = run(engine, *asked)
    assert found == expected
    assert one == 1 and most >= 15
    # How many tokens a step may have depends on what its engine has learned of steps' time.
    assert engine.counters.steps < 0.7 * plain.counters.steps
    counts = engine.drafts.counts
    assert list(counts.sources) == ["grammar"]
    assert counts.accepted == counts.drafted > 100  # a tokenizer of bytes has no other way
    assert make_stats(engine).accepted_tokens == {"grammar": counts.accepted}
    plain.close()
    engine.close()


def test_beside_the_other_sources_the_text_is_the_same(checkpoint: Path) -> None:
    """Values have been written before, names are forced."""
    asked = [{"structured_outputs": JSON, "temperature": 0.8, "seed": 3}]
    plain, engine = start(checkpoint, "off"), start(checkpoint)
    expected, _ = run(plain, *asked)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    assert json.loads(tokenizer.decode(expected["0", 0]))
    for _ in range(2):
        assert run(engine, *asked)[0] == expected
    assert engine.drafts is not None and engine.drafts.counts.of("grammar").accepted > 40
    plain.close()
    engine.close()


@pytest.mark.slow
def test_a_draft_model_keeps_to_the_form(checkpoint: Path) -> None:
    """Equal to the model and held to the same form, it is nearly always right."""
    free = StructuredOutputsParams(regex="[a-z]{10,40}( [a-z]{3,9}){2}!")
    asked: list[dict[str, Any]] = [
        {"structured_outputs": free, "temperature": 0},
        {"structured_outputs": free, "seed": 4, "n": 2, "presence_penalty": 0.5},
        {"structured_outputs": JSON, "seed": 5, "max_tokens": 60},
    ]
    plain = start(checkpoint, "off")
    engine = start(checkpoint, draft_model=str(checkpoint))
    assert engine.drafts is not None and engine.drafts.model is not None
    engine.drafts._sources = []
    expected, _ = run(plain, *asked)
    assert run(engine, *asked)[0] == expected
    counts = engine.drafts.counts.of("model")
    assert counts.accepted > 0.6 * sum(map(len, expected.values()))
    assert engine.counters.steps < 0.5 * plain.counters.steps
    plain.close()
    engine.close()


def test_it_proposes_what_is_forced_and_no_more(checkpoint: Path) -> None:
    """Nothing without a form, nothing where there is a choice, and at most what is asked for."""
    engine = start(checkpoint, "off")
    source = ForcedDrafts(1000)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    proposed: list[list[int]] = []

    class Noting:
        """Asks the source, and drafts nothing."""

        def skips(self, sequences: int) -> bool:
            return False

        def propose(self, sequences: Any, rows: int) -> Any:
            for sequence, _ in sequences:
                made = source.propose(sequence, 4)
                assert [each.parent for each in made] == list(range(-1, len(made) - 1))
                proposed.append([each.token for each in made])
            return [NOTHING] * len(sequences)

        def verified(self, *told: Any) -> None: ...

        def stepped(self, *told: Any) -> None: ...

        def ended(self, *told: Any) -> None: ...

    engine.speculate(Noting())
    run(engine, {"temperature": 0, "max_tokens": 5, "ignore_eos": True})
    assert proposed == [[]] * len(proposed) and proposed
    proposed.clear()
    (tokens,) = run(engine, {"temperature": 0, "structured_outputs": REGEX})[0].values()
    text = tokenizer.decode(tokens[:-1])
    for place, made in enumerate(proposed, 1):
        assert len(made) <= 4 and made == tokens[place : place + len(made)]
    free = [text.index(" ") + 1, len(text) - len("yes!" if "yes" in text else "no!")]
    assert [place for place, made in enumerate(proposed, 1) if not made][:2] == free
    engine.close()


def test_tokens_beyond_the_models_are_not_proposed(checkpoint: Path) -> None:
    """A tokenizer may have more than the model has words for; each would end the whole step."""
    engine = start(checkpoint, "off")
    form = StructuredOutputsParams(regex="abcdefghijkl")
    engine.add_request("a", [5, 6], SamplingParams(structured_outputs=form))
    while not (sequence := next(iter(engine._sequences))).num_generated:
        engine.step()
    every = [each.token for each in ForcedDrafts(1000).propose(sequence, 8)]
    assert len(every) == 8 and every == sorted(every)
    known = [each.token for each in ForcedDrafts(every[4]).propose(sequence, 8)]
    assert known == every[:4]
    engine.close()
