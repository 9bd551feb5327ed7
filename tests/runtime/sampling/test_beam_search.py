"""Beam search against transformers' own, on the same scores."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM

from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.sampling.beam_search import BeamSearch


@pytest.fixture(scope="module")
def model(tiny_checkpoint):
    return AutoModelForCausalLM.from_pretrained(tiny_checkpoint("llama"), dtype=torch.float32)


@torch.inference_mode()
def ours(model, prompt, params, stop_ids):
    search = BeamSearch(params, stop_ids=stop_ids, max_tokens=params.max_tokens)
    while not search.done:
        rows = torch.tensor([[*prompt, *beam.tokens] for beam in search.beams])
        logprobs = torch.log_softmax(model(rows).logits[:, -1].float(), dim=-1)
        values, tokens = logprobs.topk(min(search.continuations, logprobs.shape[1]))
        search.advance(
            [
                list(zip(t, v, strict=True))
                for t, v in zip(tokens.tolist(), values.tolist(), strict=True)
            ]
        )
    return search.results()


@torch.inference_mode()
def theirs(model, prompt, params, stop_ids):
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=params.beam_width,
        num_return_sequences=params.n or params.beam_width,
        max_new_tokens=params.max_tokens,
        min_new_tokens=None,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=sorted(stop_ids) or None,
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    sequences = []
    for row in out.sequences[:, len(prompt) :].tolist():
        ends = [index for index, token in enumerate(row) if token in stop_ids]
        sequences.append(row[: ends[0] + 1] if ends else row[: params.max_tokens])
    scores = out.sequences_scores if params.beam_width > 1 else [None] * len(sequences)
    return list(zip(sequences, [None if s is None else float(s) for s in scores], strict=True))


@pytest.mark.pairwise
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -0.5])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_results_and_scores_are_those_of_transformers(model, width, length_penalty, early_stopping):
    params = BeamSearchParams(
        width, 12, length_penalty=length_penalty, early_stopping=early_stopping
    )
    greedy = theirs(model, [5, 6, 7], BeamSearchParams(1, 12), set())[0][0]
    for prompt in ([1], [9, 3, 3, 8, 2]):
        for stop_ids in ({greedy[3]}, {greedy[1], greedy[5]}):
            expected = theirs(model, prompt, params, stop_ids)
            found = ours(model, prompt, params, stop_ids)
            assert [list(each.tokens) for each in found] == [tokens for tokens, _ in expected]
            for each, (_, score) in zip(found, expected, strict=True):
                if score is not None:
                    assert each.score == pytest.approx(score, abs=1e-4)


def test_n_returns_the_best():
    search = BeamSearch(BeamSearchParams(2, 2, n=1), stop_ids=set(), max_tokens=2)
    search.advance([[(7, -0.1), (8, -3.0), (9, -4.0), (6, -5.0)]])
    assert [(beam.tokens, beam.parent) for beam in search.beams] == [((7,), 0), ((8,), 0)]
    assert search.advance([[(1, -1.0), (2, -1.5)], [(1, -0.1), (2, -9.0)]]) == []
    assert search.done
    (best,) = search.results()
    assert best.tokens == (7, 1)
    assert best.finish_reason == "length"
    assert best.cumulative_logprob == pytest.approx(-1.1)
    assert best.score == pytest.approx(-0.55)


def test_nothing_ends_before_min_tokens():
    params = BeamSearchParams(1, 3, min_tokens=2)
    search = BeamSearch(params, stop_ids={2}, max_tokens=3)
    search.advance([[(2, -0.1), (5, -1.0)]])
    assert search.beams[0].tokens == (5,)
    assert not search.finished
    search.advance([[(2, -0.1), (5, -1.0)]])
    assert not search.finished
    search.advance([[(2, -0.1), (5, -1.0)]])
    assert search.finished[0].tokens == (5, 5, 2)
    assert search.finished[0].finish_reason == "stop"
    assert search.finished[0].stop_reason is None, "it is the model's own"


@dataclass(frozen=True)
class Pair:
    """Ends a line at the same token twice in a row."""

    last: int = -1

    def follow(self, token):
        return Pair(token), "pair" if token == self.last else None


def test_lines_end_where_their_watches_say_and_make_room_for_others():
    params = BeamSearchParams(2, 5, stop_token_ids=(3,))
    search = BeamSearch(params, stop_ids={3}, max_tokens=5, watch=Pair())
    search.advance([[(7, -0.1), (8, -0.2), (9, -4.0), (6, -5.0)]])
    search.advance([[(7, -0.1), (5, -0.5)], [(7, -0.35), (8, -0.45), (3, -0.6)]])
    ended = {each.tokens: each.stop_reason for each in search.finished}
    assert ended == {(7, 7): "pair"}, "only the best as many as there are beams are results"
    assert [beam.tokens for beam in search.beams] == [(8, 7), (7, 5)]
    assert [parent for parent, _ in search.ended] == [0]
    assert search.best().tokens == (7, 7)


def test_one_ending_at_a_token_of_the_user_says_so():
    params = BeamSearchParams(1, 5, stop_token_ids=(3,))
    search = BeamSearch(params, stop_ids={2, 3}, max_tokens=5)
    search.advance([[(3, -0.1), (7, -0.2), (9, -4.0)]])
    assert search.finished[0].stop_reason == 3
