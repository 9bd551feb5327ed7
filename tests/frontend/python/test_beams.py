"""Beam search from Python: outputs in order, best first, and refusals without a trace."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from coppice import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from coppice.frontend.text.beam_stops import WatchStopStrings
from coppice.frontend.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(str(checkpoint), kv_cache_tokens=4096, max_num_seqs=16)


def test_each_prompt_has_its_results_best_first(llm: LLM) -> None:
    prompts = ["The key is", "Where is the fox?"]
    outputs = llm.beam_search(prompts, BeamSearchParams(3, max_tokens=6, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = llm.get_tokenizer()(prompt)["input_ids"]
        assert len(output.sequences) == 3
        scores = [sequence.score for sequence in output.sequences]
        assert scores == sorted(scores, reverse=True)
        for sequence in output.sequences:
            assert list(sequence.tokens[: len(ids)]) == ids
            assert len(sequence.tokens) == len(ids) + 6
            assert sequence.cum_logprob == pytest.approx(6 * sequence.score)
            assert sequence.finish_reason == "length"
            text = llm.get_tokenizer().decode(sequence.tokens[len(ids) :], skip_special_tokens=True)
            assert sequence.text == text


def test_one_beam_is_the_greedy_answer(llm: LLM) -> None:
    (output,) = llm.beam_search("The key is", BeamSearchParams(1, max_tokens=6))
    (greedy,) = llm.generate("The key is", SamplingParams(temperature=0, max_tokens=6))
    assert output.sequences[0].text == greedy.outputs[0].text


def test_what_is_refused_leaves_nothing(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"prompts\[0\]: beam_width must be at most max_num_seqs"):
        llm.beam_search(["fine", "fine"], BeamSearchParams(17))
    with pytest.raises(ValueError, match=r"prompts\[1\]: prompt must be shorter than"):
        llm.beam_search(["fine", [1] * 600], BeamSearchParams(2))
    with pytest.raises(ValueError, match="params must be a BeamSearchParams"):
        llm.beam_search("fine", SamplingParams())  # type: ignore[arg-type]
    assert not llm._text_engine.engine.has_unfinished()


@torch.inference_mode()
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("width", [2, 4])
def test_stop_strings_end_beams_as_in_transformers(
    llm: LLM, checkpoint: Path, width: int, early_stopping: bool
) -> None:
    """Strings inside one token, over several tokens, and in tokens that continue after them."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = llm.get_tokenizer()
    prompt = "Where is the key?"
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    (free,) = llm.beam_search(prompt, BeamSearchParams(4, max_tokens=14, ignore_eos=True))
    texts = [found.text for found in free.sequences]
    common = {"max_tokens": 14, "ignore_eos": True, "early_stopping": early_stopping}
    common["skip_special_tokens"] = False  # they are text to transformers
    for stop in ([texts[0][4:6]], [texts[1][3:8], texts[2][5:6]], ["e"]):
        params = BeamSearchParams(width, stop=stop, **common)
        (ours,) = llm.beam_search(prompt, params)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=14,
            early_stopping=early_stopping,
            stop_strings=stop,
            tokenizer=tokenizer,
            eos_token_id=None,
            pad_token_id=None,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
        rows = [[token for token in row if token >= 0] for row in out.sequences.tolist()]
        scores = out.sequences_scores.tolist()
        # Where more lines have ended than beams were left, transformers fills up with nonsense.
        expected = [(row, score) for row, score in zip(rows, scores, strict=True) if score > -1e6]
        found = [
            (list(each.tokens), pytest.approx(each.score, abs=1e-4)) for each in ours.sequences
        ]
        assert expected == found
        for each in ours.sequences:
            whole = tokenizer.decode(each.tokens[ids.shape[1] :])
            if each.finish_reason == "length":
                assert each.text == whole and not any(string in whole for string in stop)
                continue
            assert each.stop_reason in stop
            assert each.text == whole[: whole.index(each.stop_reason)]


def test_a_stop_string_may_be_kept_and_waits_for_min_tokens(llm: LLM) -> None:
    prompt = "Where is the key?"
    (free,) = llm.beam_search(prompt, BeamSearchParams(2, max_tokens=14, ignore_eos=True))
    letter = next(c for c in free.sequences[0].text[2:] if c.isalnum())
    params = {"max_tokens": 14, "ignore_eos": True, "stop": letter}
    (kept,) = llm.beam_search(
        prompt, BeamSearchParams(2, include_stop_str_in_output=True, **params)
    )
    ended = [each for each in kept.sequences if each.finish_reason == "stop"]
    assert ended and all(each.text.endswith(letter) for each in ended)
    (late,) = llm.beam_search(prompt, BeamSearchParams(2, min_tokens=8, **params))
    count = len(llm.get_tokenizer()(prompt)["input_ids"])
    assert all(len(each.tokens) - count > 8 for each in late.sequences)
    (one,) = llm.beam_search(prompt, BeamSearchParams(1, min_tokens=8, **params))
    (greedy,) = llm.generate(prompt, SamplingParams(temperature=0, min_tokens=8, **params))
    assert one.sequences[0].text == greedy.outputs[0].text
    assert one.sequences[0].stop_reason == greedy.outputs[0].stop_reason


def test_words_are_forbidden_and_logprobs_named(llm: LLM) -> None:
    prompt = "The key is under"
    (free,) = llm.beam_search(prompt, BeamSearchParams(3, max_tokens=8, ignore_eos=True))
    tokens = llm.get_tokenizer().convert_ids_to_tokens(free.sequences[0].tokens[-8:])
    word = next(token for token in tokens if token.isascii() and token.isalnum())
    params = BeamSearchParams(3, max_tokens=8, ignore_eos=True, bad_words=[word], logprobs=1)
    (output,) = llm.beam_search(prompt, params)
    count = len(llm.get_tokenizer()(prompt)["input_ids"])
    for sequence in output.sequences:
        assert word not in llm.get_tokenizer().convert_ids_to_tokens(sequence.tokens[count:])
        assert sequence.logprobs is not None
        own = [
            place[token].logprob
            for token, place in zip(sequence.tokens[count:], sequence.logprobs, strict=True)
        ]
        assert sum(own) == pytest.approx(sequence.cum_logprob, abs=1e-4)
    with pytest.raises(ValueError, match="best_so_far must be False"):
        llm.beam_search(prompt, BeamSearchParams(2, best_so_far=True))


def test_every_result_has_the_form_that_was_asked_for(llm: LLM) -> None:
    words = ["no", "nothing", "Straße", "yes"]
    form = StructuredOutputsParams(choice=words)
    params = BeamSearchParams(12, max_tokens=12, structured_outputs=form, early_stopping="never")
    outputs = llm.beam_search(["one", "two"], params)
    for output in outputs:
        assert {sequence.text for sequence in output.sequences} <= set(words)
        assert len({sequence.text for sequence in output.sequences}) > 1
        assert {sequence.finish_reason for sequence in output.sequences} == {"stop"}
    bad = BeamSearchParams(2, structured_outputs=StructuredOutputsParams(regex="("))
    with pytest.raises(ValueError, match=r"^regex must be"):
        llm.beam_search("one", bad)


def test_the_watch_of_stop_strings_can_be_sent_to_another_process(checkpoint: Path) -> None:
    make = pickle.loads(pickle.dumps(WatchStopStrings(str(checkpoint))))
    watch = make(BeamSearchParams(2, stop=["key", "e q"], min_tokens=1), ())
    ids = Tokenizer(checkpoint).encode("key the quick")
    line, ends = watch, []
    for token in ids:
        fork = line
        line, stop = fork.follow(token)
        again, same = fork.follow(token)
        assert same == stop, "following changes nothing"
        ends.append(stop)
        if stop:
            break
    assert ends[-1] == "e q" and not any(ends[:-1])
    assert len(ends) < len(ids)
    assert again.stops.text == line.stops.text
