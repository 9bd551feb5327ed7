"""The Python API: order, kinds of prompts, refusals without a trace, failures."""

from __future__ import annotations

import gc
import json
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tqdm

from coppice import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from coppice.frontend.text.outputs import GenerationError

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
PROMPTS = ["The key is", "Where is the fox?", "The key is", "東京", "The quick brown fox jumps"]


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(str(checkpoint), kv_cache_tokens=4096, max_num_seqs=4)


def nothing_left(llm: LLM) -> bool:
    engine = llm._text_engine.engine
    return not engine.has_unfinished() and llm.cache_report().pages_held == 0


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    lengths = [9, 2, 7, 1, 4]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate(PROMPTS, params)
    assert [output.prompt for output in outputs] == PROMPTS
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    alone = [llm.generate(prompt, one)[0] for prompt, one in zip(PROMPTS, params, strict=True)]
    assert [o.outputs[0] for o in outputs] == [o.outputs[0] for o in alone]
    assert all(output.finished for output in outputs)
    assert len({output.request_id for output in outputs}) == len(outputs)
    assert nothing_left(llm)


def test_every_way_to_write_a_prompt(llm: LLM) -> None:
    ids = llm.get_tokenizer()("The key is")["input_ids"]
    ways: list[Any] = [
        "The key is",
        ["The key is"],
        ids,
        [ids],
        {"prompt": "The key is"},
        [{"prompt_token_ids": ids}],
        [{"prompt_token_ids": tuple(ids), "cache_salt": "mine"}],
    ]
    outputs = [llm.generate(way, GREEDY) for way in ways]
    assert all(len(output) == 1 for output in outputs)
    assert len({output[0].outputs[0] for output in outputs}) == 1
    assert all(output[0].prompt_token_ids == tuple(ids) for output in outputs)
    assert outputs[2][0].prompt is None


def test_a_second_time_the_prompt_is_cached(llm: LLM) -> None:
    prompt = {"prompt": "The lazy dog is under the mat.", "cache_salt": "second time"}
    first, second = llm.generate(prompt, GREEDY)[0], llm.generate(prompt, GREEDY)[0]
    assert first.cached_tokens == 0
    assert second.cached_tokens == len(second.prompt_token_ids) - 1
    assert first.outputs == second.outputs
    other = llm.generate(prompt | {"cache_salt": "another"}, GREEDY)[0]
    assert other.cached_tokens == 0


def test_chat_is_generate_on_the_template(llm: LLM) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Where is "}, {"type": "text", "text": "it?"}],
        },
    ]
    text = "<|system|>Be brief.<|end|><|user|>Where is it?<|end|><|assistant|>"
    expected = llm.generate(text, GREEDY)[0]
    (single,) = llm.chat(messages, GREEDY)
    assert single.prompt_token_ids == expected.prompt_token_ids
    assert single.outputs == expected.outputs
    assert [o.outputs for o in llm.chat([messages, messages], GREEDY)] == [expected.outputs] * 2


def test_a_chat_with_a_template_and_tools(llm: LLM) -> None:
    template = (
        "{{ tools[0].function.name }} {% for m in messages %}{{ m.content }}. {% endfor %}"
        "{{ mood }}{% if add_generation_prompt %}?{% endif %}"
    )
    clock = {"type": "function", "function": {"name": "clock", "parameters": {}}}
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Where"}]
    given: dict[str, Any] = {"tools": [clock], "chat_template": template}
    (made,) = llm.chat(messages, GREEDY, chat_template_kwargs={"mood": "calm"}, **given)
    tokenizer = llm.get_tokenizer()
    assert tokenizer.decode(made.prompt_token_ids) == "clock Hello. Where. calm?"
    (made,) = llm.chat(messages, GREEDY, add_generation_prompt=False, **given)
    assert tokenizer.decode(made.prompt_token_ids) == "clock Hello. Where. "
    (made,) = llm.chat(
        messages, GREEDY, add_generation_prompt=False, continue_final_message=True, **given
    )
    assert tokenizer.decode(made.prompt_token_ids) == "clock Hello. Where"


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "prompts must not be empty"),
        (7, "prompts must be a prompt or a list"),
        (b"bytes", "prompts must be a prompt or a list"),
        (["text", 3], "must be all token ids or all prompts"),
        (["fine", ""], r"prompts\[1\]: prompt must have at least one token"),
        (["fine", [1, 100_000]], r"prompts\[1\]: prompt token ids must be .* got 100000"),
        (["fine", [1, -1]], r"prompts\[1\]: .* got -1"),
        (["fine", [1.5]], r"prompts\[1\]: .* got 1.5"),
        (["fine", [1] * 600], r"prompts\[1\]: prompt must be shorter than 512"),
        (["fine", None], r"prompts\[1\] must be text or token ids, got None"),
        (["fine", {"text": "x"}], r"prompts\[1\] must have either prompt or"),
        ([{"prompt": "x", "prompt_token_ids": [1]}], r"prompts\[0\] must have either"),
        ([{"prompt": 5}], r"prompts\[0\]: prompt must be text, got 5"),
        ([{"prompt": "x", "cache_salt": 5}], r"prompts\[0\]: cache_salt must be a string"),
        (["fine", "half \ud83d"], "lone surrogate"),
    ],
)
def test_a_bad_prompt_is_refused_before_anything_runs(llm: LLM, prompts: Any, message: str) -> None:
    before = llm.cache_report()
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, GREEDY)
    after = llm.cache_report()
    assert after.accounts.overall.since_start == before.accounts.overall.since_start
    assert [each.hits for each in after.top_prefixes] == [each.hits for each in before.top_prefixes]
    assert [each.request_id for each in after.recent] == [each.request_id for each in before.recent]
    for name in ("requests", "computed_tokens", "generated_tokens", "pages_cached", "step"):
        assert getattr(after, name) == getattr(before, name), name
    assert nothing_left(llm)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([GREEDY], "one for each of the 2, got 1"),
        ([GREEDY, None], "must be a SamplingParams or a list of them"),
        ("greedy", "must be a SamplingParams or a list of them"),
    ],
)
def test_bad_parameters_are_refused(llm: LLM, params: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(["a", "b"], params)
    assert nothing_left(llm)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages must be a conversation"),
        ("hello", "messages must be a conversation"),
        ([{"role": "robot", "content": "x"}], r"messages\[0\].role must be one of .*'robot'"),
        ([{"role": "user"}], r"messages\[0\].content is required"),
        (
            [{"role": "user", "content": "x", "name": 5}],
            r"messages\[0\].name must be a valid string",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            r"messages\[0\].content must be a string or a list of parts of type 'text', got",
        ),
        ([[{"role": "user", "content": "x"}], []], "messages must be a list of messages"),
    ],
)
def test_bad_conversations_are_refused(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.chat(messages, GREEDY)
    assert nothing_left(llm)


def test_a_failed_step_fails_the_call_with_all_outputs(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step in which the second batch begins breaks; the first four prompts have ended."""
    decoder = llm._text_engine.engine.runner.decoder
    forward, calls = decoder.forward, 0

    def break_late(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ArithmeticError("a cosmic ray")
        return forward(*arguments, **options)

    monkeypatch.setattr(decoder, "forward", break_late)
    params = SamplingParams(temperature=0.0, max_tokens=1)
    with pytest.raises(GenerationError, match=r"1 of 5 requests failed: .*cosmic ray") as caught:
        llm.generate([[token] for token in range(10, 15)], params)
    reasons = [output.outputs[0].finish_reason for output in caught.value.outputs]
    assert sorted(reasons) == ["error", "length", "length", "length", "length"]
    monkeypatch.undo()
    assert nothing_left(llm)
    assert llm.generate("The key", GREEDY)[0].outputs[0].finish_reason in ("length", "stop")


def test_an_interrupt_leaves_nothing_running(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    text_engine = llm._text_engine
    step, calls = text_engine.step, 0

    def interrupted() -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(text_engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, SamplingParams(max_tokens=50, ignore_eos=True))
    assert nothing_left(llm)


def test_forgetting_the_cache(llm: LLM) -> None:
    llm.generate("The key is under the mat", GREEDY)
    assert llm.cache_report().pages_cached > 0
    llm.reset_prefix_cache()
    assert llm.cache_report().pages_cached == 0
    assert llm.generate("The key is under the mat", GREEDY)[0].cached_tokens == 0


def test_unknown_options_are_refused_by_name(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"tensor: no such option"):
        LLM(str(checkpoint), tensor=2)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"page_size must be .* got 0"):
        LLM(str(checkpoint), page_size=0)


def test_a_model_without_a_tokenizer(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    with pytest.raises(ValueError, match=r"tokenizer cannot be loaded from .*, which has none"):
        LLM(str(tmp_path), kv_cache_tokens=64, max_num_seqs=4)
    llm = LLM(str(tmp_path), str(checkpoint), kv_cache_tokens=64, max_num_seqs=4)
    assert llm.generate("The key", GREEDY)[0].prompt == "The key"


def test_the_bar_draws_only_where_there_is_a_terminal(
    llm: LLM, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.generate("The key", GREEDY)
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    llm.generate(["The key", "The fox"], GREEDY)
    drawn = capfd.readouterr()
    assert "2/2" in drawn.err
    assert "tokens/s" in drawn.err
    assert not drawn.out
    llm.generate("The key", GREEDY, use_tqdm=False)
    assert capfd.readouterr() == ("", "")


def test_a_notebook_shows_the_bar_though_it_has_no_terminal(
    llm: LLM, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a class that is given makes the bar anywhere."""
    shell = SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    llm.generate(["The key", "The fox"], GREEDY)
    assert "2/2" in capfd.readouterr().err
    monkeypatch.delitem(sys.modules, "IPython")
    made = []

    class Kept(tqdm.tqdm):
        def __init__(self, **options: Any) -> None:
            made.append(self)
            super().__init__(**options)

    llm.generate(["The key", "The fox", "A"], GREEDY, use_tqdm=Kept)
    (bar,) = made
    assert (bar.n, bar.total) == (3, 3)
    assert "3/3" in capfd.readouterr().err


@pytest.mark.parametrize("level", [1, 2])
def test_it_sleeps_and_wakes_up(llm: LLM, level: int) -> None:
    (before,) = llm.generate("The key", GREEDY)
    with llm.session("The key") as session:
        llm.sleep(level)
        assert llm.is_sleeping()
        with pytest.raises(ValueError, match="refused while the engine sleeps"):
            llm.generate("The key", GREEDY)
        llm.wake_up()
        assert not llm.is_sleeping()
        assert session.text == "The key"
        assert session.generate(GREEDY).outputs[0].token_ids == before.outputs[0].token_ids
    assert nothing_left(llm)


def test_it_shuts_down_for_good(checkpoint: Path) -> None:
    with LLM(str(checkpoint), kv_cache_tokens=512, max_num_seqs=2) as llm:
        engine = weakref.ref(llm._text_engine.engine)
        decoder = weakref.ref(llm._text_engine.engine.runner.decoder)
        assert llm.generate("The key", GREEDY)[0].finished
    assert decoder() is None, "the weights are freed"
    gc.collect()
    assert engine() is None
    llm.shutdown()
    for call in (lambda: llm.generate("The key"), llm.cache_report, llm.sleep):
        with pytest.raises(RuntimeError, match="this LLM was shut down"):
            call()


def test_n_continuations_of_each_prompt(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=4, max_tokens=8, ignore_eos=True, logprobs=1)
    outputs = llm.generate(PROMPTS[:2], params)
    for output in outputs:
        assert [each.index for each in output.outputs] == [0, 1, 2]
        assert len({each.text for each in output.outputs}) > 1
        for each in output.outputs:
            assert len(each.token_ids) == len(each.logprobs) == 8
    again = llm.generate(PROMPTS[:2], params)
    assert [each.text for o in again for each in o.outputs] == [
        each.text for o in outputs for each in o.outputs
    ]
    assert nothing_left(llm)


def test_a_stop_string_ends_one_continuation_only(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=4, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate(PROMPTS[0], params)
    texts = [each.text for each in output.outputs]
    stop = next(
        piece for size in range(1, 6) for at in range(len(texts[1]) - size)
        if (piece := texts[1][at : at + size]) not in texts[0] + texts[2] and piece.strip()
    )  # fmt: skip
    (cut,) = llm.generate(
        PROMPTS[0], SamplingParams(n=3, seed=4, max_tokens=8, ignore_eos=True, stop=stop)
    )
    assert cut.outputs[1].finish_reason == "stop"
    assert cut.outputs[1].stop_reason == stop
    assert [cut.outputs[0].text, cut.outputs[2].text] == [texts[0], texts[2]]
    assert nothing_left(llm)


def test_classes_need_the_policy_that_knows_them(llm: LLM, checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"prompts\[1\]: priority needs scheduling_policy"):
        llm.generate(PROMPTS[:2], GREEDY, priority=[0, 1])
    with pytest.raises(ValueError, match="priority must have one number for each of the 2"):
        llm.generate(PROMPTS[:2], GREEDY, priority=[0])
    assert nothing_left(llm)
    classes = LLM(str(checkpoint), kv_cache_tokens=512, scheduling_policy="priority")
    expected = llm.generate(PROMPTS[:2], GREEDY)
    outputs = classes.generate(PROMPTS[:2], GREEDY, priority=[1, 0])
    assert [o.outputs[0].text for o in outputs] == [o.outputs[0].text for o in expected]


def test_the_best_of_several_are_those_with_the_highest_logprob_per_token(llm: LLM) -> None:
    prompt = "Where is the key?"
    common: dict[str, Any] = {"seed": 12, "max_tokens": 9, "stop": ["e"], "temperature": 1.5}
    (every,) = llm.generate(prompt, SamplingParams(n=5, logprobs=0, **common))
    means = [each.cumulative_logprob / len(each.token_ids) for each in every.outputs]
    assert len({len(each.token_ids) for each in every.outputs}) > 1, "lengths must matter"
    order = sorted(range(5), key=lambda index: -means[index])
    (best,) = llm.generate(prompt, SamplingParams(n=2, best_of=5, **common))
    assert [each.text for each in best.outputs] == [every.outputs[i].text for i in order[:2]]
    assert [each.index for each in best.outputs] == [0, 1]
    assert [each.logprobs for each in best.outputs] == [None, None]
    left_out = sum(len(every.outputs[i].token_ids) for i in order[2:])
    assert best.left_out_tokens == left_out and every.left_out_tokens == 0
    (asked,) = llm.generate(prompt, SamplingParams(n=1, best_of=5, logprobs=2, **common))
    (again,) = llm.generate(prompt, SamplingParams(n=5, logprobs=2, **common))
    found, expected = asked.outputs[0].logprobs, again.outputs[order[0]].logprobs
    assert [list(each) for each in found] == [list(each) for each in expected]
    for mine, theirs in zip(found, expected, strict=True):
        # Steps with drafts add in another order.
        assert [each.logprob for each in mine.values()] == pytest.approx(
            [each.logprob for each in theirs.values()], abs=1e-4
        )


@pytest.mark.parametrize("value", [0, 1, 1025, True, "3"])
def test_a_bad_best_of_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="best_of must be"):
        SamplingParams(n=2, best_of=value)


def test_structured_outputs(llm: LLM) -> None:
    schema = {"type": "array", "items": {"enum": [1, 22, "x"]}, "minItems": 2, "maxItems": 3}
    forms = [
        StructuredOutputsParams(json=schema),
        StructuredOutputsParams(choice=["no", "Straße"]),
        None,
    ]
    params = [
        SamplingParams(temperature=0, max_tokens=300, structured_outputs=form) for form in forms
    ]
    outputs = llm.generate(["one", "two", "three"], params)
    found = json.loads(outputs[0].outputs[0].text)
    assert 2 <= len(found) <= 3
    assert set(found) <= {1, 22, "x"}
    assert outputs[1].outputs[0].text in ("no", "Straße")
    assert [output.outputs[0].finish_reason for output in outputs[:2]] == ["stop", "stop"]
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))
    with pytest.raises(ValueError, match=r"^regex must be"):
        llm.generate(["one", "two"], [params[0], bad])


def test_a_text_goes_on_from_its_prompt() -> None:
    """The demo's decoder drops the first space of its input; a form counts it, too."""
    llm = LLM("demo", kv_cache_tokens=1024)
    form = StructuredOutputsParams(choice=[" yes", " no"])
    held = SamplingParams(temperature=0.0, structured_outputs=form)
    (free,) = llm.generate("People: The badge of", SamplingParams(temperature=0.0, max_tokens=1))
    assert free.outputs[0].text.startswith(" ")
    (output,) = llm.generate("Is it so? It is:", held)
    (answer,) = llm.chat([{"role": "user", "content": "Is it so?"}], held)
    assert {output.outputs[0].text, answer.outputs[0].text} <= {" yes", " no"}
    beams = BeamSearchParams(2, max_tokens=8, stop=" no", include_stop_str_in_output=True,
                             structured_outputs=form)  # fmt: skip
    (found,) = llm.beam_search("Is it so? It is:", beams)
    assert {each.text for each in found.sequences} == {" yes", " no"}
    assert {each.stop_reason for each in found.sequences} == {None, " no"}
