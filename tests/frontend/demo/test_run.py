"""The installed command `coppice demo`, on the model that is included."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from coppice.frontend.demo import run as demo
from coppice.frontend.demo.facts import make_document

COPPICE = Path(sys.executable).parent / "coppice"


def test_every_conversation_asks_about_two_facts() -> None:
    document = make_document(demo.DOCUMENT_SEED, demo.FACTS, split="eval")
    talks = demo.make_conversations(document)
    assert len(talks) >= 32
    assert {talk.user for talk in talks} == set(demo.USERS)
    first = [talk.questions[0] for talk in talks]
    assert len({question.fact for question in first}) == len(first)
    for talk in talks:
        opening, follow_up = talk.questions
        assert opening.fact != follow_up.fact
        assert opening.answer in document.text


def test_a_follow_up_continues_the_conversation() -> None:
    document = make_document(1, 40, split="eval")
    talk = demo.make_conversations(document)[0]
    first = talk.messages(document)
    assert [message["role"] for message in first] == ["system", "user"]
    talk.answers.append("because")
    second = talk.messages(document)
    assert second[:2] == first
    assert [message["content"] for message in second[2:]] == ["because", talk.questions[1].text]


@pytest.fixture(scope="module")
def printed() -> str:
    ran = subprocess.run([COPPICE, "demo"], capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr
    assert not ran.stderr
    return ran.stdout


def test_the_demo_reads_well_in_a_file(printed: str) -> None:
    assert "\x1b" not in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_the_demo_answers_most_questions_right(printed: str) -> None:
    marks = printed.count("✓") + printed.count("✗")
    assert marks >= 64
    (right, total) = map(int, re.findall(r"(\d+) of (\d+) answers are right", printed)[0])
    assert total == marks
    assert right == printed.count("✓")
    assert right / total >= 0.85


def test_the_demo_shows_what_the_cache_is_for(printed: str) -> None:
    hit_rate = float(re.findall(r"hit rate +([\d.]+)%", printed)[0])
    assert hit_rate > 80
    assert "Top shared prefixes" in printed
    on, off = (
        int(re.findall(rf"cache {side} +([\d,]+) ", printed)[0].replace(",", ""))
        for side in ("on", "off")
    )
    assert off > 5 * on
    assert re.search(r"off / on +[\d.]+ × +[\d.]+ ×", printed)
