"""The page of a replay, in a real browser without a network."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from coppice.frontend.commands.main import main

# Text that would run a script or change the page if it were not escaped where it is shown.
HOSTILE = "</script><img src=x onerror='window.broken=1'><b>bold</b> &amp; {{title}} "
CHARTS = {
    "curve": ".scatterlayer .point",
    "rate": ".scatterlayer path.js-line",
    "cause": ".scatterlayer path.js-fill",
    "prefix": ".iciclelayer path.surface",
}


@pytest.fixture(scope="module")
def made(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A page and the JSON of the same replay, of a trace with near misses and hostile text."""
    folder = tmp_path_factory.mktemp("page")
    trace = folder / "a<b>&.jsonl"
    tools = " ".join(f"The key is under the mat of house {7 * house}." for house in range(30))
    with trace.open("w") as out:
        for number in range(60):
            day = f"Day {number}. " if number % 3 else ""
            line = {
                "prompt": f"{HOSTILE}{day}{tools} Question {number % 7}",
                "output_tokens": 5,
                "timestamp": 7 * number,
                "namespace": "<i>other</i>" if number % 5 == 4 else None,
            }
            out.write(json.dumps(line) + "\n")
    page, report = folder / "page.html", folder / "report.json"
    options = ["--tokenizer", str(checkpoint), "--pool", "3000", "--concurrency", "2"]
    assert main(["replay", str(trace), *options, "--json", str(report), "--html", str(page)]) == 0
    return page, json.loads(report.read_text(encoding="utf-8"))


# -- without a browser -------------------------------------------------------------------------


class References(HTMLParser):
    """What a page would load: attributes that name another resource."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.found += [
            value or "" for name, value in attributes if name in ("src", "href", "srcset", "action")
        ]


def test_the_page_is_one_file_that_loads_no_other(made: tuple[Path, dict[str, Any]]) -> None:
    text = made[0].read_text(encoding="utf-8")
    references = References()
    references.feed(text)
    assert references.found == ["data:,"], "no more than the empty icon"
    assert references.tags.count("script") == 3
    assert not {"img", "iframe", "object", "embed"} & set(references.tags)
    assert text.count("plotly.js v") == 1, "the library is there once"
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style


def test_every_place_of_the_template_is_filled(made: tuple[Path, dict[str, Any]]) -> None:
    text = made[0].read_text(encoding="utf-8")
    body = text[: text.index("<script>")] + text[text.index('id="charts"') :]
    assert "<title>Replay of a&lt;b&gt;&amp;.jsonl</title>" in body
    # What is left in double braces is the trace's own text.
    assert set(re.findall(r"\{\{\w+\}\}", body)) == {"{{title}}"}
    written, embedded = body.split('id="charts"')
    assert "onerror=&#x27;" in written
    assert "onerror='" not in written, "quotes of the trace are escaped"
    assert "<img" not in embedded, "nothing in the figures ends their element"


# -- in the browser ----------------------------------------------------------------------------


class Opened:
    """The page in a window of its own, offline; records console messages and requests."""

    def __init__(self, browser: Any, file: Path, width: int, scheme: str) -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
        )
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())
        self.page.wait_for_selector("#chart-prefix .iciclelayer path.surface")

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector).strip()

    def style(self, selector: str, name: str) -> str:
        return self.page.eval_on_selector(
            selector, f"element => getComputedStyle(element).getPropertyValue({name!r})"
        )


@pytest.fixture(scope="module")
def windows() -> Iterator[dict[tuple[int, str], Opened]]:
    """Windows that stay open from test to test, since the page takes a second to load."""
    kept: dict[tuple[int, str], Opened] = {}
    yield kept
    for window in kept.values():
        window.context.close()


@pytest.fixture
def opened(
    browser: Any,
    made: tuple[Path, dict[str, Any]],
    windows: dict[tuple[int, str], Opened],
) -> Iterator[Any]:
    """Opens windows; checks after a test that none had an error or loaded any other file."""

    def window(width: int = 1280, scheme: str = "light") -> Opened:
        if (width, scheme) not in windows:
            windows[width, scheme] = Opened(browser, made[0], width, scheme)
        return windows[width, scheme]

    yield window
    for each in windows.values():
        assert each.complaints == []
        elsewhere = [url for url in each.requests if not url.startswith("data:")]
        assert elsewhere == [made[0].as_uri()]


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (1280, "light"),
        (400, "dark"),
        pytest.param(1280, "dark", marks=pytest.mark.slow),
        pytest.param(400, "light", marks=pytest.mark.slow),
    ],
)
def test_every_chart_is_drawn_and_fits(opened: Any, width: int, scheme: str) -> None:
    window = opened(width, scheme)
    for name, marks in CHARTS.items():
        drawn = window.page.query_selector_all(f"#chart-{name} {marks}")
        boxes = [box for mark in drawn if (box := mark.bounding_box()) is not None]
        assert any(box["width"] > 4 and box["height"] > 4 for box in boxes), name
        assert all(box["x"] + box["width"] <= width for box in boxes), name
    assert window.page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_tiles_have_the_figures_of_the_json(
    opened: Any, made: tuple[Path, dict[str, Any]]
) -> None:
    window, report = opened(), made[1]
    counts = report["counts"]["since_start"]
    assert window.text("#tile-hit_rate") == f"{counts['hit_rate']:.1%}"
    assert window.text("#tile-ideal") == f"{counts['ideal_hit_rate']:.1%}"
    assert window.text("#tile-requests") == f"{counts['requests']:,}"
    exact = {
        key: int(window.page.get_attribute(f"#tile-{key} data", "value"))
        for key in ("saved", "evicted", "pool")
    }
    assert exact == {
        "saved": counts["hit_tokens"],
        "evicted": report["pool"]["evicted_tokens"],
        "pool": report["options"]["pool_tokens"],
    }
    for cause, tokens in counts["causes"].items():
        assert (f"{tokens:,} tokens" in window.text(".causes")) or not tokens, cause


def test_the_charts_show_the_jsons_figures(opened: Any, made: tuple[Path, dict[str, Any]]) -> None:
    window, report = opened(), made[1]

    def data(chart: str, trace: int, key: str) -> list[float]:
        return window.page.evaluate(
            f"Array.from(document.getElementById('chart-{chart}').data[{trace}].{key})"
        )

    curve, over_time = report["curve"]["points"], report["over_time"]

    def rates(column: str) -> list[float]:
        pairs = zip(over_time[column], over_time["prompt_tokens"], strict=True)
        return [tokens / prompt for tokens, prompt in pairs]

    assert data("curve", 0, "x") == [point["pool_tokens"] for point in curve]
    assert data("curve", 0, "y") == [point["hit_rate"] for point in curve]
    achieved = report["counts"]["since_start"]["hit_rate"]
    assert data("curve", 1, "y") == [achieved]
    assert data("rate", 0, "y") == rates("ideal_tokens")
    assert data("rate", 1, "y") == rates("hit_tokens")
    layers = window.page.evaluate("document.getElementById('chart-cause').data.length")
    shares = [data("cause", layer, "y") for layer in range(layers)]
    assert [sum(parts) for parts in zip(*shares, strict=True)] == pytest.approx(
        [1.0] * len(over_time["at"])
    )


def test_text_of_the_trace_is_shown_and_does_nothing(
    opened: Any, made: tuple[Path, dict[str, Any]]
) -> None:
    window = opened()
    near = window.text("article.near >> nth=0")
    largest = made[1]["near_misses"][0]
    assert f"{largest['tokens_cost']:,} known tokens again" in near
    assert "<b>bold</b> &amp; {{title}}" in near
    assert re.search(r"Day \d", near)
    assert "The key is under the mat" in near
    assert "namespace <i>other</i>" in window.text("main")
    labels = window.page.eval_on_selector_all(
        "#chart-prefix .slicetext", "all => all.map(each => each.textContent).join(' ')"
    )
    assert "</script><img src=x" in labels
    assert window.page.evaluate("window.broken") is None
    assert window.page.query_selector_all("main img, article b, #chart-prefix a") == []
    assert html.escape(made[1]["trace"]["file"]) in window.page.inner_html("h1")


def test_a_click_zooms_into_a_prefix(opened: Any) -> None:
    window = opened()
    window.page.click("#chart-prefix .slice >> nth=1")
    window.page.wait_for_selector("#chart-prefix .pathbar")
    window.page.reload()
    window.page.wait_for_selector("#chart-prefix .iciclelayer path.surface")
    window.requests.pop(0)  # the page was loaded twice; `opened` expects one request


def test_the_icicle_is_used_by_keyboard(opened: Any) -> None:
    window = opened()

    def focused() -> str:
        return window.page.evaluate("document.activeElement.getAttribute('aria-label')")

    top = "#chart-prefix .slice >> nth=0"
    assert window.page.get_attribute(top, "aria-label") == "all prefixes"
    stops = "#chart-prefix [tabindex='0']"
    assert window.page.get_attribute(stops, "aria-label") == "all prefixes"
    window.page.focus(top)
    window.page.keyboard.press("ArrowUp")
    assert focused() == "all prefixes", "there is none before it"
    window.page.keyboard.press("ArrowDown")
    inside = focused()
    assert len(window.page.query_selector_all(stops)) == 1
    assert inside == window.page.text_content("#chart-prefix .slice >> nth=1")
    window.page.keyboard.press("Enter")
    back = window.page.wait_for_selector("#chart-prefix .pathbar[aria-label='all prefixes']")
    window.page.wait_for_function(
        "name => document.activeElement.getAttribute('aria-label') === name", arg=inside
    )
    back.focus()
    window.page.keyboard.press(" ")
    window.page.wait_for_selector("#chart-prefix .pathbar", state="detached")


def test_the_colours_follow_the_scheme(opened: Any) -> None:
    window = opened(scheme="light")
    line = "#chart-rate .scatterlayer .trace:last-child path.js-line"

    def colours() -> tuple[str, str]:
        return window.style("body", "background-color"), window.style(line, "stroke")

    light = colours()
    window.page.emulate_media(color_scheme="dark")
    window.page.wait_for_function(
        "([line, was]) => getComputedStyle(document.querySelector(line)).stroke !== was",
        arg=[line, light[1]],
    )
    dark = colours()
    window.page.emulate_media(color_scheme="light")
    assert luminance(light[0]) > 0.8 > 0.1 > luminance(dark[0])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_background(opened: Any, scheme: str) -> None:
    """At least 4.5 to 1, as the Web Content Accessibility Guidelines ask (2.1, criterion 1.4.3)."""
    window = opened(scheme=scheme)
    card = luminance(window.style("section", "background-color"))
    for selector in ("h2", ".hint", ".say", ".causes .note", ".near .note", "summary", ".shared"):
        assert contrast(luminance(window.style(selector, "color")), card) >= 4.5, selector
    page = luminance(window.style("body", "background-color"))
    for selector in ("h1", "header p", "footer"):
        assert contrast(luminance(window.style(selector, "color")), page) >= 4.5, selector
    for side in (".side.ours", ".side.theirs"):
        own = luminance(window.style(side, "background-color"))
        for selector in (f"{side} span", f"{side} del, {side} ins"):
            assert contrast(luminance(window.style(selector, "color")), own) >= 4.5, selector


def test_every_chart_has_a_name_for_screen_readers(opened: Any) -> None:
    window = opened()
    for name in CHARTS:
        role = "group" if name == "prefix" else "img"  # it has parts that can be pressed
        assert window.page.get_attribute(f"#chart-{name}", "role") == role
        assert len(window.page.get_attribute(f"#chart-{name}", "aria-label") or "") > 30
    window.page.click("summary >> nth=0")
    assert "hit rate" in window.text("table >> nth=0")


def test_a_single_request_makes_a_readable_page(browser: Any, tmp_path: Path) -> None:
    """Nothing was hit, so there is no tree to show, and the axes begin and end at 0."""
    trace, page = tmp_path / "one.jsonl", tmp_path / "page.html"
    trace.write_text('{"prompt": [5]}\n')
    assert main(["replay", str(trace), "--html", str(page)]) == 0
    context = browser.new_context(offline=True)
    complaints: list[str] = []
    window = context.new_page()
    window.on("console", lambda message: complaints.append(message.text))
    window.on("pageerror", lambda error: complaints.append(str(error)))
    window.goto(page.as_uri())
    window.wait_for_selector("#chart-curve .ytick")
    for chart in ("curve", "rate"):
        ticks = window.eval_on_selector_all(
            f"#chart-{chart} .ytick", "all => all.map(each => each.textContent)"
        )
        assert len(ticks) >= 3 and len(set(ticks)) == len(ticks), ticks
    text = window.inner_text("main")
    assert "1 token: needed for its logits" in text
    assert "No prefix that is still cached was hit." in text
    assert complaints == []
    context.close()


def luminance(colour: str) -> float:
    """Relative luminance of a CSS colour of the form rgb(r, g, b), from 0 to 1."""
    channels = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in channels
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: float, other: float) -> float:
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)
