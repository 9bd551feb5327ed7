"""The names of the model, the routes that balancers ask, and the page at /."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from coppice.frontend.client.engine import EngineClient
from coppice.frontend.commands.main import build_parser
from coppice.frontend.commands.options import add_server_options, server_options
from coppice.frontend.commands.parser import CommandParser
from coppice.frontend.http.options import ServerOptions
from coppice.frontend.text.engine import TextEngine
from tests.frontend.conftest import serving

Start = Callable[[TextEngine], EngineClient]
BODY = {"prompt": "The fox", "max_tokens": 2, "temperature": 0}


def test_names_are_repeated_or_follow_one_another() -> None:
    parser = CommandParser()
    add_server_options(parser)
    given = ["--served-model-name", "one", "two", "--served-model-name", "three"]
    assert server_options(parser.parse_args(given)).served_model_name == ("one", "two", "three")
    for wrong in ("one", ("",), (1,)):
        with pytest.raises(ValueError, match=r"served_model_name must be a tuple of names, got"):
            ServerOptions(served_model_name=wrong)  # type: ignore[arg-type]


def test_a_model_that_names_have_swallowed_is_missed_with_the_way_to_write_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--served-model-name", "one", "two", "demo"])
    said = " ".join(capsys.readouterr().err.split())
    assert "--served-model-name takes all words that follow it, here one two demo" in said
    assert "write MODEL before it, as in coppice serve demo --served-model-name one two" in said
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--port", "1"])
    assert capsys.readouterr().err.endswith("the following arguments are required: MODEL\n")


async def test_every_name_counts_and_none_is_needed(
    text_engine: TextEngine, engine_client: Start
) -> None:
    options = ServerOptions(served_model_name=("big", "small", "big"))
    async with serving(engine_client(text_engine), options) as (session, port):
        url = f"http://127.0.0.1:{port}"
        async with session.get(url + "/v1/models") as response:
            cards = (await response.json())["data"]
        assert [card["id"] for card in cards] == ["big", "small"]
        assert {card["root"] for card in cards} == {"tiny"}
        assert {card["max_model_len"] for card in cards} == {512}
        assert {card["model_impl"] for card in cards} == {"coppice"}
        async with session.get(url + "/v1/models/small") as response:
            assert await response.json() == cards[1]
        for asked, answered in (({}, "big"), ({"model": "small"}, "small"), ({"model": ""}, "big")):
            async with session.post(url + "/v1/completions", json=BODY | asked) as response:
                assert (await response.json())["model"] == answered
            chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
            async with session.post(url + "/v1/chat/completions", json=chat | asked) as response:
                assert (await response.json())["model"] == answered
            asked_in = {"input": "x", "max_output_tokens": 16} | asked
            async with session.post(url + "/v1/responses", json=asked_in) as response:
                assert (await response.json())["model"] == answered
        async with session.post(url + "/v1/completions", json=BODY | {"model": "tiny"}) as response:
            error = (await response.json())["error"]
        assert (response.status, error["code"]) == (404, "model_not_found")
        assert error["message"] == "model 'tiny' is not served here; 'big', 'small' are"


async def test_ping_and_load(text_engine: TextEngine, engine_client: Start) -> None:
    engine = engine_client(text_engine)
    async with serving(engine) as (session, port):
        url = f"http://127.0.0.1:{port}"
        for method in ("GET", "POST"):
            async with session.request(method, url + "/ping") as response:
                assert response.status == 200
        assert await _load(session, url) == 0
        endless = BODY | {"prompt": ["a", "b"], "max_tokens": 480, "ignore_eos": True}
        async with session.post(url + "/v1/completions", json=endless | {"stream": True}):
            assert await _load(session, url) == 2
        engine._state = "the engine died"
        async with session.get(url + "/ping") as response:
            assert (response.status, await response.json()) == (503, {"status": "the engine died"})


async def _load(session: aiohttp.ClientSession, url: str) -> int:
    async with session.get(url + "/load") as response:
        return int((await response.json())["server_load"])


@pytest.mark.parametrize("key", ["", "secret"])
async def test_the_page_links_to_what_there_is(
    text_engine: TextEngine, engine_client: Start, key: str
) -> None:
    options = ServerOptions(api_key=(key,) if key else (), served_model_name=("<b>",))
    async with serving(engine_client(text_engine), options) as (session, port):
        url = f"http://127.0.0.1:{port}"
        async with session.get(url + "/") as response:
            assert (response.status, response.content_type) == (200, "text/html")
            assert "default-src 'none'" in response.headers["Content-Security-Policy"]
            page = await response.text()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        links = re.findall(r'href="([^"#]+)"', page)
        assert {"v1/models", "openapi.json", "cache", "metrics", "health"} <= {*links}
        for link in links:
            if not link.startswith("data:"):
                async with session.get(f"{url}/{link}", headers=headers) as response:
                    assert response.status == 200, link
        assert "<b>" not in page
        assert ("&lt;b&gt;" in page) == (not key)  # with keys, nobody learns the model from it
        assert f"curl {url}/v1/chat/completions" in page
        assert ("Bearer $KEY" in page) == bool(key)
        assert "//" not in page.replace(url, ""), "it loads nothing from elsewhere"


def test_the_page_passes_what_a_reader_needs() -> None:
    page = (Path(__file__).parents[3] / "frontend/server/front_page.html").read_text()
    assert '<html lang="en">' in page
    assert page.count("<h1") == 1
    assert all(f'id="{name}"' in page for name in re.findall(r'aria-labelledby="([^"]+)"', page))
    assert "<main>" in page and "<title>" in page
