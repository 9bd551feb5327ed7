"""Chat templates of requests: what they may take, and that the next one is filled all the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coppice.frontend.chat import dialect as dialects
from coppice.frontend.chat.dialect import Dialect
from coppice.frontend.chat.request_template import MEMORY_BYTES, RequestTemplates
from coppice.frontend.text.tokenizer import Tokenizer
from coppice.runtime.requests.request import PromptTooLong

ASK = [{"role": "user", "content": "Where is the key?"}]
LOOKED = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
GOOD = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}{{ eos_token }}"


@pytest.fixture(scope="module")
def templates() -> Iterator[RequestTemplates]:
    templates = RequestTemplates(seconds=2.0)
    yield templates
    templates.close()


@pytest.fixture
def trusting(
    checkpoint: Path, templates: RequestTemplates, monkeypatch: pytest.MonkeyPatch
) -> Dialect:
    monkeypatch.setattr(dialects, "REQUEST_TEMPLATES", templates)
    return Dialect.of(Tokenizer(checkpoint), trust_templates=True)


def test_it_fills_as_the_models_own_is_filled(trusting: Dialect) -> None:
    talk: Any = [
        *ASK,
        {"role": "assistant", "content": "I look.", "tool_calls": [LOOKED]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]
    for template in (
        GOOD + "{% if tools %}{{ tools | tojson }}{% endif %}{{ greeting }}",
        "{% for m in messages %}{% for call in m.tool_calls or [] %}"
        "{{ 'calls ' + call.function.arguments }}{% endfor %}{% endfor %}",
    ):
        texts = []
        for own in (True, False):
            trusting.tokenizer.chat_template = template
            given = {"chat_template": template} if own else {}
            texts.append(trusting.write(talk, template_arguments={"greeting": "Hi"}, **given))
        assert texts[0] == texts[1] != ""


@pytest.mark.parametrize(
    ("template", "error"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            r"it takes more than 2 s",
        ),
        ("{{ 'a' * 10 ** 12 }}", f"it takes more than {MEMORY_BYTES >> 20} MiB"),
        ("{{ 'a' * 50_000_000 }}", "its text has 50000000 characters"),
        ("{{ raise_exception('Never.') }}", "the chat template refuses them: Never."),
        ("{% for %}", "the chat template refuses them: Expected"),
    ],
)
def test_one_that_takes_too_much_is_refused_and_the_next_is_filled(
    trusting: Dialect, template: str, error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        trusting.write(ASK, chat_template=template, longest=512)
    text = trusting.write(ASK, chat_template=GOOD, longest=512)
    assert text == "[user] Where is the key?<|end|>"


def test_the_text_may_be_as_long_as_a_prompt(trusting: Dialect) -> None:
    with pytest.raises(PromptTooLong, match="messages must be shorter than 512"):
        trusting.write(ASK, chat_template="{{ 'key ' * 100000 }}", longest=512)
