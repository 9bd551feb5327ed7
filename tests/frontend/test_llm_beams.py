"""Beam search from Python: outputs in order, best first, and refusals that leave nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from coppice import LLM, BeamSearchParams, SamplingParams


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


def test_what_is_refused_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"prompts\[0\]: beam_width must be at most max_num_seqs"):
        llm.beam_search(["fine", "fine"], BeamSearchParams(17))
    with pytest.raises(ValueError, match=r"prompts\[1\]: prompt must be shorter than"):
        llm.beam_search(["fine", [1] * 600], BeamSearchParams(2))
    with pytest.raises(ValueError, match="params must be a BeamSearchParams"):
        llm.beam_search("fine", SamplingParams())  # type: ignore[arg-type]
    assert not llm._text_engine.engine.has_unfinished()
