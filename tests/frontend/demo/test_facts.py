"""The demo's handbooks: repeatable, unambiguous, and with a separate evaluation split."""

from __future__ import annotations

from collections import Counter

import pytest

from coppice.frontend.demo import words as demo_words
from coppice.frontend.demo.facts import ask, make_document, split_of


def test_same_arguments_give_the_same_document_and_questions() -> None:
    first, second = make_document(7, 40, "eval"), make_document(7, 40, "eval")
    assert first == second
    assert ask(first, 3, 20) == ask(second, 3, 20)
    assert ask(first, 3, 20) != ask(first, 4, 20)
    assert make_document(8, 40, "eval") != first
    assert make_document(7, 40, "train") != first


@pytest.mark.parametrize("num_facts", [1, 2, 3, 10, 60, 200])
@pytest.mark.parametrize("split", ["train", "eval"])
def test_a_document_states_each_fact_once(num_facts: int, split: str) -> None:
    for seed in range(10):
        document = make_document(seed, num_facts, split)  # type: ignore[arg-type]
        assert len(document.facts) == num_facts
        keys = Counter((fact.entity, fact.attribute) for fact in document.facts)
        assert max(keys.values()) == 1
        position = 0
        for fact in document.facts:
            assert fact.entity in fact.sentence
            assert fact.value in fact.sentence
            position = document.text.index(fact.sentence, position) + len(fact.sentence)


def test_the_value_comes_after_the_entity_and_the_cue_and_questions_have_the_cue() -> None:
    for seed in range(30):
        document = make_document(seed, 60, "train")
        for question in ask(document, seed, 60):
            fact = question.fact
            rest = fact.sentence.replace(fact.entity, "*", 1)
            value = rest.rindex(fact.value)
            assert rest.index("*") < value
            assert rest.lower().index(fact.cue) < value
            assert fact.cue in question.text.replace(fact.entity, "").lower()


def test_entities_of_the_two_splits_never_meet() -> None:
    names: dict[str, set[str]] = {}
    for split in ("train", "eval"):
        documents = [make_document(seed, 60, split) for seed in range(60)]  # type: ignore[arg-type]
        names[split] = {fact.entity for document in documents for fact in document.facts}
        assert all(split_of(name) == split for name in names[split])
    assert not names["train"] & names["eval"]


def test_distractors_share_half_of_a_name() -> None:
    facts = make_document(1, 60, "eval").facts
    firsts = Counter(entity.split()[0] for entity in {fact.entity for fact in facts})
    assert max(firsts.values()) >= 2


def test_questions_name_their_fact_and_do_not_repeat() -> None:
    document = make_document(2, 60, "eval")
    questions = ask(document, 0, 60)
    assert {question.fact for question in questions} == set(document.facts)
    for question in questions:
        assert question.fact.entity in question.text
        assert question.answer == question.fact.value
        assert question.answer not in question.text


def test_bad_arguments_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="num_facts is 0"):
        make_document(0, 0)
    with pytest.raises(ValueError, match="split is 'test'"):
        make_document(0, 5, "test")  # type: ignore[arg-type]
    document = make_document(0, 5)
    with pytest.raises(ValueError, match="n is 6; the document has 5 facts"):
        ask(document, 0, 6)
    with pytest.raises(ValueError, match="n is -1"):
        ask(document, 0, -1)


def test_no_word_stands_twice_in_a_list() -> None:
    lists = {name: words for name, words in vars(demo_words).items() if name.isupper()}
    assert lists
    for name, words in lists.items():
        assert len(set(words)) == len(words), name
