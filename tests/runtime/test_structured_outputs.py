"""Grammars in the engine: whatever a model says, its text has the form that was asked for."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from coppice.runtime import grammars
from coppice.runtime.config import EngineConfig
from coppice.runtime.engine import Engine
from coppice.runtime.grammars import CompiledGrammar, Grammars, GrammarState, forbid_other_tokens
from coppice.runtime.request import StepOutput
from coppice.runtime.sampling_params import SamplingParams
from coppice.runtime.structured_outputs import MAX_CHOICES, StructuredOutputsParams

EOS = 2
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bé", "🙂"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GRAMMAR = 'start: term ("+" term)~0..3\nterm: /[0-9]{1,3}/ | "(" term ")"\n'
GBNF = 'root ::= "yes" | "no" digit{2}\ndigit ::= [0-9]'
FORMS: dict[str, tuple[StructuredOutputsParams, Callable[[str], bool]]] = {
    "json": (StructuredOutputsParams(json=SCHEMA), lambda text: bool(is_person(text))),
    "compact": (
        StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
        lambda text: is_person(text) and not re.search(r"[,:\[{]\s", text),
    ),
    "regex": (
        StructuredOutputsParams(regex=r"[A-Z][a-zé]{2,9} (x|yy)[0-9]+!"),
        lambda text: bool(re.fullmatch(r"[A-Z][a-zé]{2,9} (x|yy)[0-9]+!", text)),
    ),
    "choice": (
        StructuredOutputsParams(choice=["red", "redder", "grün", '"quoted"\n', "🙂"]),
        lambda text: text in ("red", "redder", "grün", '"quoted"\n', "🙂"),
    ),
    "grammar": (
        StructuredOutputsParams(grammar=GRAMMAR),
        lambda text: bool(re.fullmatch(r"[0-9+()]+", text)) and text.count("(") == text.count(")"),
    ),
    "gbnf": (
        StructuredOutputsParams(grammar=GBNF),
        lambda text: bool(re.fullmatch(r"yes|no\d\d", text)),
    ),
}


def is_person(text: str) -> bool:
    found = json.loads(text)
    return (
        list(found) == ["name", "age", "tags"]
        and len(found["name"]) <= 12
        and 0 <= found["age"] <= 150
        and set(found["tags"]) <= {"a", "bé", "🙂"}
        and len(found["tags"]) <= 3
    )


@pytest.fixture(scope="module")
def checkpoint(
    tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A random model with a tokenizer that has fewer tokens than the model."""
    path = tmp_path_factory.mktemp("with-tokenizer")
    shutil.copytree(tiny_checkpoint("llama"), path, dirs_exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ['{"name": "Ann", "age": 12, "tags": ["a"]} grün yes no'], trainer
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    assert fast.eos_token_id == EOS
    fast.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def decode(checkpoint: Path) -> Callable[[list[int]], str]:
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def engine(path: Path, **options: Any) -> Engine:
    options = {"kv_cache_tokens": 4096, "max_num_seqs": 32, **options}
    return Engine(EngineConfig(model=str(path), dtype="float32", **options))


def run(made: Engine) -> dict[tuple[str, int], tuple[list[int], StepOutput]]:
    """Generated tokens and the last output of each sequence; pages are recounted at each step."""
    tokens: dict[tuple[str, int], list[int]] = {}
    last: dict[tuple[str, int], StepOutput] = {}
    while made.has_unfinished():
        for output in made.step():
            key = (output.request_id, output.index)
            tokens.setdefault(key, []).extend(output.new_token_ids)
            last[key] = output
        made.check()
    assert made.cache_report().pages_held == 0
    return {key: (tokens[key], last[key]) for key in tokens}


def params(form: StructuredOutputsParams, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 400, "structured_outputs": form} | more)


@pytest.mark.parametrize("kind", FORMS)
def test_every_text_has_its_form_and_ends_by_itself(
    kind: str, checkpoint: Path, decode: Callable[[list[int]], str]
) -> None:
    form, good = FORMS[kind]
    made = engine(checkpoint)
    for seed in range(3):
        made.add_request(f"random {seed}", [3 + seed, 7], params(form, seed=seed))
        made.add_request(f"greedy {seed}", [3 + seed, 9], params(form, temperature=0))
        many = params(form, seed=seed, n=3, top_p=0.9, logprobs=1)
        made.add_request(f"many {seed}", [3 + seed, 11], many)
    found = run(made)
    assert len(found) == 3 * 5
    for key, (tokens, output) in found.items():
        assert output.finish_reason == "stop", (key, decode(tokens))
        assert tokens[-1] == EOS
        assert EOS not in tokens[:-1]
        assert good(decode(tokens[:-1])), decode(tokens[:-1])
    texts = {decode(tokens) for (name, _), (tokens, _) in found.items() if name[0] != "g"}
    assert len(texts) > 2


def test_a_json_object(checkpoint: Path, decode: Callable[[list[int]], str]) -> None:
    """Nothing bounds it, so it may not come to its end; what there is begins an object."""
    made = engine(checkpoint)
    form = StructuredOutputsParams(json_object=True)
    for seed in range(8):
        made.add_request(str(seed), [5, 6], params(form, seed=seed, max_tokens=50))
    ended = 0
    for tokens, output in run(made).values():
        text = decode(tokens)
        assert text.startswith("{")
        if output.finish_reason == "stop":
            ended += 1
            assert isinstance(json.loads(text.removesuffix("</s>")), dict)
    assert ended


def test_others_in_the_batch_are_left_alone(checkpoint: Path) -> None:
    """A free request gives the tokens that it gives alone; a grammar's neighbours don't matter."""
    free = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    form = params(FORMS["regex"][0], seed=4)
    alone = {}
    for name, each in (("free", free), ("form", form)):
        made = engine(checkpoint)
        made.add_request(name, [9, 8, 7], each)
        alone |= run(made)
    made = engine(checkpoint)
    made.add_request("free", [9, 8, 7], free)
    made.add_request("form", [9, 8, 7], form)
    made.add_request("other", [9, 8, 7], params(FORMS["json"][0], seed=1))
    together = run(made)
    for key, (tokens, _) in alone.items():
        assert together[key][0] == tokens
    assert made.cache_report().hit_tokens > 0


def test_preemption_keeps_its_place(checkpoint: Path, decode: Callable[[list[int]], str]) -> None:
    """Few pages: sequences are put back in the queue and go on where they were."""
    form, good = FORMS["json"]
    roomy = engine(checkpoint, enable_prefix_caching=False)
    tight = engine(checkpoint, kv_cache_tokens=14 * 16, enable_prefix_caching=False)
    for made in (roomy, tight):
        for seed in range(5):
            made.add_request(str(seed), [3 + seed] * 20, params(form, seed=seed, max_tokens=200))
    expected, found = run(roomy), run(tight)
    assert tight.cache_report().preemptions > 0
    for key, (tokens, _) in found.items():
        assert good(decode(tokens[:-1]))
        assert tokens == expected[key][0]


def test_bias_and_grammar_together(checkpoint: Path, decode: Callable[[list[int]], str]) -> None:
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    b, c = (tokenizer.encode(letter).ids[0] for letter in "bc")
    form = StructuredOutputsParams(regex="[abc]{4}")
    made = engine(checkpoint)
    made.add_request("bias", [5], params(form, logit_bias={b: 100}, temperature=0))
    made.add_request("ban", [5], params(form, allowed_token_ids=[c, EOS], temperature=0))
    made.add_request("none", [5], params(form, allowed_token_ids=[EOS, 50], temperature=0))
    found = run(made)
    assert decode(found["bias", 0][0]) == "bbbb</s>"
    assert decode(found["ban", 0][0]) == "cccc</s>"
    output = found["none", 0][1]
    assert output.finish_reason == "error"
    assert "structured_outputs" in str(output.error)


def test_a_grammar_that_does_not_compile_ends_every_result(checkpoint: Path) -> None:
    made = engine(checkpoint)
    form = StructuredOutputsParams(regex="(")
    made.add_request("bad", [5], params(form, n=3))
    made.add_request("good", [5], params(FORMS["choice"][0]))
    found = run(made)
    assert {index for name, index in found if name == "bad"} == {0, 1, 2}
    for index in range(3):
        output = found["bad", index][1]
        assert output.finish_reason == "error"
        assert "structured_outputs: regex" in str(output.error)
    assert found["good", 0][1].finish_reason == "stop"


def test_a_slow_compilation_holds_up_nobody(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a grammar is compiled the others are served; the request can be aborted meanwhile."""
    import threading

    go = threading.Event()
    compile_it = Grammars._compile

    def slow(self: Grammars, form: StructuredOutputsParams) -> CompiledGrammar:
        assert go.wait(20)
        return compile_it(self, form)

    monkeypatch.setattr(Grammars, "_compile", slow)
    made = engine(checkpoint, max_queued_requests=3)
    made.add_request("slow", [5], params(FORMS["choice"][0]))
    made.add_request("gone", [5], params(FORMS["regex"][0]))
    made.add_request("free", [6], SamplingParams(max_tokens=3, ignore_eos=True))
    with pytest.raises(Exception, match="the queue is full"):
        made.add_request("more", [5], params(FORMS["choice"][0]))
    done = []
    while "free" not in done:
        done += [output.request_id for output in made.step() if output.finish_reason]
        made.check()
    assert done == ["free"]
    assert made.step() == []
    assert made.abort("gone")
    assert not made.abort("gone")
    go.set()
    found = run(made)
    assert list(found) == [("slow", 0)]
    assert found["slow", 0][1].finish_reason == "stop"


def test_a_step_that_fails_is_an_error_of_every_result(checkpoint: Path) -> None:
    made = engine(checkpoint)

    def broken(*args: Any) -> Any:
        raise RuntimeError("out of luck")

    made.runner.decoder.forward = broken  # type: ignore[method-assign]
    made.add_request("a", [5], SamplingParams(n=3))
    found = run(made)
    assert {key for key, (_, output) in found.items() if output.error} == {
        ("a", 0),
        ("a", 1),
        ("a", 2),
    }


def test_masks_are_those_of_the_matcher(checkpoint: Path) -> None:
    """Against the bits as the library gives them for one matcher; rows between stay as they are."""
    made = Grammars(checkpoint, 320, [EOS])
    states = [GrammarState(made.compiled(form).result()) for form, _ in FORMS.values()]
    logits = torch.randn(12, 320)
    before = logits.clone()
    forbid_other_tokens(logits, [(2 * row, state) for row, state in enumerate(states)])
    for row, state in enumerate(states):
        packed = state.matcher.compute_bitmask()
        allowed = [bool(packed[token // 8] >> token % 8 & 1) for token in range(320)]
        assert 0 < sum(allowed) < 320
        expected = before[2 * row].masked_fill(~torch.tensor(allowed), -torch.inf)
        assert torch.equal(logits[2 * row], expected)
        assert torch.equal(logits[2 * row + 1], before[2 * row + 1])
    made.close()


def test_compiled_grammars_are_kept_and_forgotten(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "MAX_COMPILED", 2)
    made = Grammars(checkpoint, 320, [EOS])
    forms = [StructuredOutputsParams(choice=[word]) for word in "abc"]
    first = made.compiled(forms[0])
    made.compiled(forms[1])
    assert made.compiled(forms[0]) is first
    made.compiled(forms[2])
    assert made.compiled(forms[0]) is first
    assert len(made._compiled) == 2
    made.close()


def test_a_model_without_an_end_is_refused(checkpoint: Path) -> None:
    made = Grammars(checkpoint, 320, [])
    with pytest.raises(ValueError, match="end-of-text token"):
        made.compiled(FORMS["choice"][0]).result()
    made.close()


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ({"json": '{"type": "objct"}'}, "json"),
        ({"json": "{"}, "json"),
        ({"json": "5"}, "json"),
        ({"json": "false"}, "json"),
        ({"json": "true"}, "json"),  # it says nothing: json_object is meant, or no form at all
        ({"json": {"type": "array", "uniqueItems": True}}, "json"),
        ({"json": '{"const": "\\ud83d"}'}, "json"),
        ({"json_object": True, "whitespace_pattern": "("}, "json_object"),
        ({"regex": "("}, "regex"),
        ({"regex": "a(?=b)"}, "regex"),
        ({"regex": "\ud83d"}, "regex"),
        ({"grammar": "start: nothing"}, "grammar"),
        ({"grammar": "root ::= ("}, "grammar"),
        ({"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000}, "grammar"),
    ],
)
def test_bad_forms_are_named(form: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be") as caught:
        grammars.check(StructuredOutputsParams(**form))
    assert len(str(caught.value)) < 600


def test_good_forms_pass() -> None:
    for form, _ in FORMS.values():
        grammars.check(form)
    grammars.check(StructuredOutputsParams(json_object=True))


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({}, "structured_outputs"),
        ({"regex": "a", "choice": ["b"]}, "structured_outputs"),
        ({"json_object": False}, "structured_outputs"),
        ({"json": ""}, "json"),
        ({"json": 5}, "json"),
        ({"json": {"a": {1, 2}}}, "json"),
        ({"regex": 5}, "regex"),
        ({"regex": "x" * 200_000}, "regex"),
        ({"choice": []}, "choice"),
        ({"choice": "ab"}, "choice"),
        ({"choice": ["a", 5]}, "choice"),
        ({"choice": ["a", ""]}, "choice"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, "choice"),
        ({"choice": ["a" * 200_000]}, "choice"),
        ({"grammar": ["start: x"]}, "grammar"),
        ({"json_object": 1}, "json_object"),
        ({"json_object": "yes"}, "json_object"),
        ({"json_object": True, "disable_any_whitespace": 1}, "disable_any_whitespace"),
        ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern"),
        (
            {"json_object": True, "disable_any_whitespace": True, "whitespace_pattern": " "},
            "whitespace_pattern",
        ),
    ],
)
def test_bad_values_are_named(values: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} "):
        StructuredOutputsParams(**values)


def test_parameters_travel_and_are_kept_in_one_form() -> None:
    form = StructuredOutputsParams(json={"type": "object"})
    assert form == StructuredOutputsParams(json='{"type": "object"}')
    assert hash(form) == hash(StructuredOutputsParams(json='{"type": "object"}'))
    assert form.kind == "json"
    made = params(StructuredOutputsParams(choice=["a", "b"]))
    assert pickle.loads(pickle.dumps(made)) == made


@pytest.mark.parametrize(
    "more", [{"ignore_eos": True}, {"min_tokens": 2}, {"structured_outputs": {"regex": "a"}}]
)
def test_what_does_not_go_with_a_form_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(more))} must be"):
        params(FORMS["choice"][0], **more)
