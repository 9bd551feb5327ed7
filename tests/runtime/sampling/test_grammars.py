"""Grammars in the engine: the text of any model has the form that was asked for."""

from __future__ import annotations

import json
import re
import shutil
import threading
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.report.gather import make_report
from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.requests.request import Request, Sequence, StepOutput
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.requests.structured_outputs import StructuredOutputsParams
from coppice.runtime.sampling import grammar_source, grammars
from coppice.runtime.sampling.grammars import (
    CompiledGrammar,
    Grammars,
    GrammarState,
    forbid_other_tokens,
)
from tests.runtime.helpers.forms import follows

EOS = 2
CHAIN = [f"a{number}: a{number + 1}" for number in range(9000)]
MUTUAL = {
    "$ref": "#/$defs/a",
    "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
}
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


@pytest.mark.parametrize("sign", ["", "?", "!", "?!"])
def test_rules_of_lark_may_have_a_sign(sign: str) -> None:
    """outlines begins its grammar of JSON with `?start: value`."""
    form = StructuredOutputsParams(grammar=f'{sign}start: value\n{sign}value: "yes"\n')
    assert grammar_source.check(form) == ()


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
    assert make_report(made).pages_held == 0
    return {key: (tokens[key], last[key]) for key in tokens}


def searched(made: Engine) -> list[StepOutput]:
    """The results of beam search "a"; pages are recounted at each step."""
    results = []
    while made.has_unfinished():
        results += [output for output in made.step() if output.request_id == "a"]
        made.check()
    assert make_report(made).pages_held == 0
    assert not any(node.draft or node.wanted for node in made.tree.nodes())
    return results


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
    """Its length is not bounded, so it may not end; the text begins an object in any case."""
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


@pytest.mark.parametrize("overlap", [False, True])
def test_others_in_the_batch_are_left_alone(checkpoint: Path, overlap: bool) -> None:
    """A free request gives the tokens that it gives alone; a grammar's neighbours don't matter."""
    free = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    form = params(FORMS["regex"][0], seed=4)
    alone = {}
    for name, each in (("free", free), ("form", form)):
        made = engine(checkpoint)
        made.add_request(name, [9, 8, 7], each)
        alone |= run(made)
    made = engine(checkpoint, async_scheduling=overlap)
    made.add_request("free", [9, 8, 7], free)
    made.add_request("form", [9, 8, 7], form)
    made.add_request("other", [9, 8, 7], params(FORMS["json"][0], seed=1))
    together = run(made)
    for key, (tokens, _) in alone.items():
        assert together[key][0] == tokens
    assert make_report(made).hit_tokens > 0


def test_preemption_keeps_its_place(checkpoint: Path, decode: Callable[[list[int]], str]) -> None:
    """With few pages, sequences return to the queue and later continue their grammar."""
    form, good = FORMS["json"]
    roomy = engine(checkpoint, enable_prefix_caching=False)
    few = {"kv_cache_tokens": 14 * 16, "enable_prefix_caching": False}
    tight = engine(checkpoint, async_scheduling=True, **few)
    for made in (roomy, tight):
        for seed in range(5):
            made.add_request(str(seed), [3 + seed] * 20, params(form, seed=seed, max_tokens=200))
    expected, found = run(roomy), run(tight)
    assert make_report(tight).preemptions > 0
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
    ready = threading.Event()
    compile_it = Grammars._compile

    def slow(self: Grammars, form: StructuredOutputsParams) -> CompiledGrammar:
        assert ready.wait(20)
        return compile_it(self, form)

    monkeypatch.setattr(Grammars, "_compile", slow)
    made = engine(checkpoint, max_queued_requests=3)
    made.add_request("slow", [5], params(FORMS["choice"][0]))
    made.add_request("aborted", [5], params(FORMS["regex"][0]))
    made.add_request("free", [6], SamplingParams(max_tokens=3, ignore_eos=True))
    with pytest.raises(Exception, match="the queue is full"):
        made.add_request("more", [5], params(FORMS["choice"][0]))
    done = []
    while "free" not in done:
        done += [output.request_id for output in made.step() if output.finish_reason]
        made.check()
    assert done == ["free"]
    assert made.step() == []
    assert made.abort("aborted")
    assert not made.abort("aborted")
    ready.set()
    found = run(made)
    assert list(found) == [("slow", 0)]
    assert found["slow", 0][1].finish_reason == "stop"


# -- beam searches -------------------------------------------------------------------------------

# None of them has more than one letter that must follow: of such a stretch llguidance allows the
# tokenizer's own spelling only.
WORDS = ("name", "names", "age", "ages", "no", "na", "as")


class Language:
    """The lines of tokens that spell one of WORDS and then end, found by trying them all."""

    def __init__(self, checkpoint: Path) -> None:
        tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        pieces = {token: str(tokenizer.id_to_token(token)) for token in range(3, 290)}
        self.following: dict[tuple[int, ...], list[int]] = {}
        self.lines: list[tuple[int, ...]] = []
        waiting = [((), "")]
        while waiting:
            line, text = waiting.pop()
            more = [
                (token, text + piece)
                for token, piece in pieces.items()
                if any(word.startswith(text + piece) for word in WORDS)
            ]
            self.following[line] = [token for token, _ in more]
            if text in WORDS:
                self.following[line].append(EOS)
                self.lines.append((*line, EOS))
            waiting += [((*line, token), longer) for token, longer in more]


@torch.inference_mode()
def logprob(model: Any, prompt: list[int], line: tuple[int, ...]) -> float:
    logits = model(torch.tensor([[*prompt, *line]])).logits[0, len(prompt) - 1 : -1]
    return float(logits.log_softmax(-1).gather(1, torch.tensor(line).unsqueeze(1)).sum())


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.5])
def test_a_wide_beam_finds_the_best_of_all_that_a_grammar_allows(
    checkpoint: Path, page_size: int, length_penalty: float
) -> None:
    """Against the score of each line that there is: spellings differ in tokens, not in text."""
    language, prompt = Language(checkpoint), [5, 9, 33, 7, 12]
    assert 20 < len(language.lines) < 60
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    scores = {
        line: logprob(model, prompt, line) / len(line) ** length_penalty for line in language.lines
    }
    expected = sorted(scores, key=lambda line: -scores[line])
    made = engine(checkpoint, max_num_seqs=64, kv_cache_tokens=8192, page_size=page_size)
    form = StructuredOutputsParams(choice=list(WORDS))
    search = BeamSearchParams(
        60, 12, length_penalty=length_penalty, structured_outputs=form, early_stopping="never"
    )
    made.add_beam_search("a", prompt, search)
    made.add_request("b", prompt, params(FORMS["regex"][0], seed=3))
    outputs = searched(made)
    assert [output.new_token_ids for output in outputs] == expected
    assert [output.score for output in outputs] == [
        pytest.approx(scores[line], abs=1e-4) for line in expected
    ]


@torch.inference_mode()
@pytest.mark.parametrize("width", [1, 2, 3])
def test_narrow_beams_go_where_those_of_transformers_go(checkpoint: Path, width: int) -> None:
    language, prompt = Language(checkpoint), [3, 50, 41]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, 3, dtype=torch.long),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=12,
        eos_token_id=EOS,
        pad_token_id=0,
        do_sample=False,
        prefix_allowed_tokens_fn=lambda _, ids: language.following.get(
            tuple(ids[3:].tolist()), [0]
        ),
    )
    expected = [tuple(row[3 : row.index(EOS) + 1]) for row in out.tolist()]
    made = engine(checkpoint, page_size=4)
    form = StructuredOutputsParams(choice=list(WORDS))
    made.add_beam_search("a", prompt, BeamSearchParams(width, 12, structured_outputs=form))
    outputs = searched(made)
    assert [output.new_token_ids for output in outputs] == expected
    assert set(expected) <= set(language.lines)


@pytest.mark.parametrize("kind", FORMS)
def test_every_result_of_a_search_has_its_form(
    kind: str, checkpoint: Path, decode: Callable[[list[int]], str]
) -> None:
    """In few pages, where beams are preempted, and in many: the same."""
    form, good = FORMS[kind]
    search = BeamSearchParams(3, 60, structured_outputs=form, length_penalty=0.6)
    found = []
    few_pages = {"page_size": 4, "kv_cache_tokens": 4 * 60}
    for options in (few_pages, {"enable_prefix_caching": False}):
        made = engine(checkpoint, **options)
        for number in range(4):
            made.add_beam_search(str(number), [3 + number, 7, *range(20)], search)
        found.append(run(made))
        if kind == "json" and options is few_pages:
            assert make_report(made).preemptions > 0
    few, many = ({key: tokens for key, (tokens, _) in each.items()} for each in found)
    assert few == many
    ended = [(key, output) for key, (_, output) in found[0].items() if output.score is not None]
    assert len(ended) >= 3
    for key, output in ended:
        tokens = list(output.new_token_ids)
        assert output.finish_reason == ("stop" if tokens[-1] == EOS else "length"), key
        if output.finish_reason == "stop":
            assert EOS not in tokens[:-1]
            assert good(decode(tokens[:-1])), decode(tokens)
    assert any(output.finish_reason == "stop" for _, output in ended)


def test_a_search_whose_grammar_fails_ends_with_an_error_for_each_result(checkpoint: Path) -> None:
    made = engine(checkpoint)
    bad = StructuredOutputsParams(regex="(")
    made.add_beam_search("bad", [5], BeamSearchParams(3, 8, structured_outputs=bad))
    form = FORMS["choice"][0]
    none = BeamSearchParams(2, 8, structured_outputs=form, allowed_token_ids=[50, EOS])
    made.add_beam_search("none", [5], none)
    found = run(made)
    assert sorted(found) == [("bad", 0), ("bad", 1), ("bad", 2), ("none", 0), ("none", 1)]
    for (name, _), (_, output) in found.items():
        assert output.finish_reason == "error"
        assert ("regex: " if name == "bad" else "structured_outputs") in str(output.error)


@pytest.mark.parametrize("more", [{"ignore_eos": True}, {"min_tokens": 2}])
def test_a_search_refuses_what_does_not_go_with_a_form(more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(more))} must be"):
        BeamSearchParams(2, structured_outputs=FORMS["choice"][0], **more)


# -- the grammars themselves ---------------------------------------------------------------------


def test_forked_states_go_their_own_ways(checkpoint: Path) -> None:
    made = Grammars(checkpoint, 320, [EOS])
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    a, b = (tokenizer.encode(letter).ids[0] for letter in "ab")
    first = GrammarState(made.compiled(StructuredOutputsParams(regex="[ab]{2}")).result())
    line = Sequence(Request("a", array("i", [5]), SamplingParams(), None, 0, 0, 9))
    line.tokens.append(a)
    first.update(line)
    second = first.forked()
    line.tokens.append(b)
    first.update(line)
    logits = torch.zeros(2, 320)
    forbid_other_tokens(logits, [(0, first), (1, second)])
    assert logits[0].isfinite().nonzero().flatten().tolist() == [EOS]
    assert logits[1].isfinite().nonzero().flatten().tolist() == [a, b]
    made.close()


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
    assert [len(kept) for kept in made._compiled.values()] == [2]
    own = made.compiled(forms[0], "a")
    for form in forms:
        made.compiled(form, "b")
    assert made.compiled(forms[0], "a") is own, "another tenant takes no place of it"
    assert made.compiled(forms[0]) is first
    made.close()


def test_what_was_checked_for_one_tenant_is_checked_again_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[str] = []

    def run(grammar: str) -> list[str]:
        tried.append(grammar)
        return []

    monkeypatch.setattr(grammar_source.TRIALS, "run", run)
    form = StructuredOutputsParams(regex="tenants[0-9]")
    for tenant in ("a", "b", "a", None, "b"):
        grammar_source.check(form, tenant)
    assert len(tried) == 3


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
        ({"json": "true"}, "json"),  # it allows anything: json_object is meant, or no form at all
        ({"json": {"type": "array", "uniqueItems": True}, "strict": True}, "json"),
        ({"json": '{"const": "\\ud83d"}'}, "json"),
        ({"json_object": True, "whitespace_pattern": "("}, "json_object"),
        ({"regex": "("}, "regex"),
        ({"regex": "a(?=b)"}, "regex"),
        ({"regex": "\ud83d"}, "regex"),
        ({"grammar": "start: nothing"}, "grammar"),
        ({"grammar": "root ::= ("}, "grammar"),
        ({"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000}, "grammar"),
        # What passed a check of its syntax, and failed in the engine or ended its process.
        ({"regex": r"[^\s\S]"}, "regex"),
        ({"regex": "a{400000}"}, "regex"),
        ({"regex": "(a{1000}){1000}"}, "regex"),
        ({"grammar": "start: start"}, "grammar"),
        ({"grammar": "\n".join(["start: a0", *CHAIN, 'a9000: "x"'])}, "grammar"),
        ({"json": {"$ref": "#"}}, "json"),
        ({"json": MUTUAL}, "json"),
        (
            {"json": {"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"}},
            "json",
        ),
        ({"json": {"type": "array", "items": {"anyOf": [{"$ref": "#"}]}, "minItems": 1}}, "json"),
        ({"json": {"multipleOf": 999983}}, "json"),
        (
            {"json": {"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}, {"multipleOf": 9949}]}},
            "json",
        ),
        ({"json": '{"items":' * 3000 + "{}" + "}" * 3000}, "json"),
        ({"json": {"properties": {f"p{number}": {} for number in range(3000)}}}, "json"),
        ({"json": {"not": {}}}, "json"),
        ({"json": {"enum": []}}, "json"),
    ],
)
def test_bad_forms_are_named(form: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be") as caught:
        grammar_source.check(StructuredOutputsParams(**form))
    assert len(str(caught.value)) < 600


def test_a_choice_of_4096_texts_is_followed(
    checkpoint: Path, decode: Callable[[list[int]], str]
) -> None:
    texts = [f"the {number}. of [many] (texts)+" for number in range(4096)]
    form = StructuredOutputsParams(choice=texts)
    assert grammar_source.check(form) == ()
    made = engine(checkpoint)
    made.add_request("a", [5], params(form, temperature=1.0))
    tokens, output = run(made)["a", 0]
    assert output.finish_reason == "stop"
    assert decode(tokens[:-1]) in texts


def test_a_grammar_that_failed_is_compiled_anew(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, form = Grammars(checkpoint, 320, [EOS]), StructuredOutputsParams(regex="a")
    load = Grammars._load

    def fails(self: Grammars) -> None:
        raise ImportError("half imported")

    monkeypatch.setattr(Grammars, "_load", fails)
    with pytest.raises(ImportError):
        made.compiled(form).result()
    monkeypatch.setattr(Grammars, "_load", load)
    assert made.compiled(form).result().matcher is not None
    made.close()


def test_two_engines_load_their_tokenizers_one_after_the_other(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each load waits for a second one to begin, in vain."""
    load, loading, overlaps = grammars.load_tokenizer, threading.Semaphore(0), []

    def slow(path: str) -> Any:
        loading.release()
        overlaps.append(
            len(overlaps) == 0 and loading.acquire(timeout=0.1) and loading.acquire(timeout=0.1)
        )
        return load(path)

    monkeypatch.setattr(grammars, "load_tokenizer", slow)
    both = [Grammars(checkpoint, 320, [EOS]) for _ in range(2)]
    form = StructuredOutputsParams(regex="a")
    for each in [made.compiled(form) for made in both]:
        assert each.result().vocabulary == 320
    assert overlaps == [False, False]
    for made in both:
        made.close()


def test_tenants_do_not_share_compiled_grammars(checkpoint: Path) -> None:
    made, form = Grammars(checkpoint, 320, [EOS]), StructuredOutputsParams(regex="a")
    assert made.compiled(form, "a") is made.compiled(form, "a")
    assert made.compiled(form, "a") is not made.compiled(form, "b")
    assert made.compiled(form) is not made.compiled(form, "b")
    made.close()
    one = engine(checkpoint)
    for name in ("a", "b"):
        one.add_request(name, [5], params(form), tenant=name)
    first, second = (sequence.request.grammar for sequence in one._sequences)
    assert first is not second
    run(one)


@pytest.mark.parametrize(
    ("expression", "text", "fits"),
    [
        (r"\d{2}", "12", True),
        (r"\d{2}", "1\u0663", False),  # an Arabic digit
        (r"(?u)\d{2}", "1\u0663", True),
        (r"\w", "é", False),
        (r"[\w ]+", "a b", True),
        (r"(?u)\w", "é", True),
        (r"a\sb", "a\u00a0b", False),
        (r"\\d", "\\d", True),
    ],
)
def test_classes_of_characters_are_ascii(expression: str, text: str, fits: bool) -> None:
    assert follows({"regex": expression}, text) is fits
    schema = {"type": "string", "pattern": f"^({expression})$"}
    if "(?u)" not in expression and "\\\\" not in expression:
        assert follows({"json": schema}, json.dumps(text, ensure_ascii=False)) is fits


def test_good_forms_pass() -> None:
    for form, _ in FORMS.values():
        grammar_source.check(form)
    grammar_source.check(StructuredOutputsParams(json_object=True))
