"""Forms of text for the fake model's 40 tokens; a form is compiled when the test says so.

`LateGrammars` takes the place of an engine's `Grammars`, whose thread would make a schedule depend
on time.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from concurrent.futures import Future
from functools import cache

from fake_model import EOS, VOCABULARY
from llguidance import LLTokenizer, TokenizerWrapper

from coppice.runtime.requests.structured_outputs import StructuredOutputsParams
from coppice.runtime.sampling.grammars import CompiledGrammar, Grammars

_NESTED = {
    "type": "object",
    "properties": {
        "a": {"type": "array", "items": {"$ref": "#"}},
        "b": {"enum": ["ab", None, True]},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
_NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3}

FORMS = (
    StructuredOutputsParams(json_object=True),
    StructuredOutputsParams(json=_NESTED),
    StructuredOutputsParams(json={"type": ["array", "string", "null"]}, whitespace_pattern=" ?"),
    StructuredOutputsParams(json=_NUMBERS, disable_any_whitespace=True),
    StructuredOutputsParams(json={"const": {"aaa": [True]}}, disable_any_whitespace=True),
    StructuredOutputsParams(json={"type": "string", "minLength": 6}),
    StructuredOutputsParams(json={"properties": {"b": {}}}, prefix='prefix: /[a-c "]*/ "x"\n'),
    StructuredOutputsParams(regex="[a-c]{2,9}(0|1)?"),
    StructuredOutputsParams(regex="a{3}|b"),
    StructuredOutputsParams(choice=["a", "ab", "abc", "true"]),
    StructuredOutputsParams(grammar='start: "a" ("b" | "[" start "]")'),
)


class Words:
    """A tokenizer whose tokens write JSON; some texts can be written in several ways."""

    eos_token_id = EOS
    bos_token_id = None
    special_token_ids = (0, 1, EOS)
    tokens = (
        b"<pad>", b"<s>", b"</s>",
        *(bytes([each]) for each in b'{}[]":, abc01-.etrufslnx\\\n'),
        b"true", b"null", b"ab", b'":', b'{"', b'"}', b'",', b"aa", b'"a', b"]}", b"10",
    )  # fmt: skip

    def __call__(self, text: bytes | str) -> list[int]:
        """The longest token that fits, again and again; bytes without a token are left out."""
        data = text if isinstance(text, bytes) else text.encode()
        found = []
        while data:
            fitting = (each for each in self.tokens[3:] if data.startswith(each))
            token = max(fitting, key=len, default=b"")
            if token:
                found.append(self.tokens.index(token))
            data = data[len(token) or 1 :]
        return found


class LateGrammars(Grammars):
    """Grammars that are compiled when `arrive` is called, or at once if they are not `late`.

    Attributes:
        late: what was asked for, in order, and has not arrived.
    """

    def __init__(self, *, late: bool = True) -> None:
        super().__init__("", VOCABULARY, [EOS])
        self._late = late
        self.late: list[tuple[Future[CompiledGrammar], StructuredOutputsParams]] = []

    def compiled(
        self, params: StructuredOutputsParams, tenant: str | None = None
    ) -> Future[CompiledGrammar]:
        future: Future[CompiledGrammar] = Future()
        self.late.append((future, params))
        return future if self._late else self.arrive()

    def arrive(self, place: int = 0, error: Exception | None = None) -> Future[CompiledGrammar]:
        """Compiles the form at this place of `late`, or lets it fail; returns its future."""
        future, params = self.late.pop(place)
        if error is None:
            future.set_result(compiled(params))
        else:
            future.set_exception(error)
        return future


@cache
def compiled(params: StructuredOutputsParams) -> CompiledGrammar:
    """A form for the fake model's tokens."""
    grammars = Grammars("", VOCABULARY, [EOS])
    grammars._tokenizer = LLTokenizer(TokenizerWrapper(Words()), slices=[])
    try:
        return grammars._compile(params)
    finally:
        grammars.close()


def follows(params: StructuredOutputsParams, tokens: Seq[int]) -> tuple[bool, bool]:
    """Whether tokens follow a form, and whether the text may end after them."""
    text = list(tokens[:-1] if tokens and tokens[-1] == EOS else tokens)
    matcher = compiled(params).matcher.deep_copy()
    taken = matcher.try_consume_tokens(text)
    return taken == len(text), bool(matcher.is_accepting())
