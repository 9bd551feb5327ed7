"""The page at /cache in a real browser: its numbers are the JSON's, and it is accessible."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright to drive a browser")
axe_api = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe")


# On a busy machine a request and the page's next update take their time.
sync_api.expect.set_options(timeout=30_000)

# Text that would run a script or change the page if it entered the page as HTML.
HOSTILE = "</script><img src=x onerror='window.broken=1'><b>bold</b> &amp; "
HOUSES = " ".join(f"The key is under the mat of house {7 * number}." for number in range(14))
PHONE, DESK = 390, 1280  # widths of windows in pixels
FOLDER = Path(__file__).resolve().parents[3] / "frontend" / "report" / "dashboard"

PROMPTS: list[tuple[str, str | None]] = [
    each
    for number in range(8)
    for each in (
        (f"{HOSTILE}Where is {number}? {HOUSES}", None),
        (f"{HOSTILE}{HOUSES} Question {number % 3}", None),
        (HOUSES, "a-secret"),
    )
]


@pytest.fixture(scope="module")
def url(served: Callable[..., str], checkpoint: Path) -> str:
    """A server that shows texts, after requests with hits, near misses, namespaces and a pin."""
    # No other test uses these options, so no other prompts are in its tree.
    url = served("--report-text", "--drain-timeout", "20", "--speculation", "off")
    for prompt, salt in PROMPTS:
        body = {"model": str(checkpoint), "prompt": prompt, "max_tokens": 4, "cache_salt": salt}
        answer = httpx.post(url + "/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
    pin = {"name": "<i>houses</i>", "prompt": HOUSES, "ttl": 3600}
    assert httpx.put(url + "/cache/pins", json=pin).status_code == 200
    return url


# -- without a browser -------------------------------------------------------------------------


def test_the_page_loads_nothing_from_elsewhere(url: str) -> None:
    page = httpx.get(url + "/cache")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    references = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
    assert {"cache/page/style.css", "cache/page/main.js"} <= set(references)
    names = {"index.html"}
    for reference in references:
        if reference.startswith("cache/page/"):
            names.add(reference.removeprefix("cache/page/"))
    for name in ("main.js", *names):
        text = httpx.get(f"{url}/cache/page/{name}").text
        names |= set(re.findall(r'from "\./([\w.]+)"', text))
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in text
        assert "innerHTML" not in text
    for name in names:
        assert httpx.get(f"{url}/cache/page/{name}").status_code == 200, name
    assert {path.name for path in FOLDER.iterdir()} >= names
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 100_000


def test_files_are_asked_for_again_but_not_sent_again(url: str) -> None:
    first = httpx.get(url + "/cache/page/main.js")
    assert first.headers["cache-control"] == "no-cache"
    again = httpx.get(url + "/cache/page/main.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_only_the_files_of_the_page_are_served(url: str) -> None:
    assert httpx.get(url + "/cache/page/missing.js").status_code == 404
    assert (FOLDER.parent / "routes.py").exists()
    assert httpx.get(url + "/cache/page/..%2froutes.py").status_code == 404


# -- in the browser ----------------------------------------------------------------------------


class Window:
    """A page in a browser window; records its console messages and its requests."""

    def __init__(self, browser: Any, url: str, width: int = DESK, scheme: str = "light") -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme
        )
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.report: Any = None
        self.page.on("response", self._keep)
        self.page.goto(url + "/cache")
        self.page.wait_for_selector("html[data-at]")

    def _keep(self, response: Any) -> None:
        if response.url.endswith("/cache/report") and response.status == 200:
            self.answer = response

    def freeze(self) -> Any:
        """Pauses the page; returns the report that it shows."""
        self.page.click("#pause")
        sync_api.expect(self.page.locator("#state")).to_contain_text("paused at")
        report = self.answer.json()
        assert str(report["at"]) == self.page.get_attribute("html", "data-at")
        return report

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector)).strip()

    def texts(self, selector: str) -> list[str]:
        return [each.strip() for each in self.page.locator(selector).all_inner_texts()]


@pytest.fixture
def opened(browser: Any, url: str) -> Iterator[Callable[..., Window]]:
    """Opens windows; checks after a test that none had an error or loaded anything elsewhere."""
    windows: list[Window] = []

    def window(width: int = DESK, scheme: str = "light") -> Window:
        windows.append(Window(browser, url, width, scheme))
        return windows[-1]

    yield window
    for each in windows:
        each.context.close()
        assert each.complaints == []
        assert all(asked.startswith((url, "data:")) for asked in each.requests), each.requests


@contextmanager
def load(url: str, checkpoint: Path) -> Iterator[None]:
    """Sends the requests of `url` again and again, two at a time, until the block ends.

    So the tree keeps its proportions, however many are sent.
    """
    ended = threading.Event()

    def ask() -> None:
        with httpx.Client(timeout=60) as http:
            for prompt, salt in cycle(PROMPTS):
                if ended.is_set():
                    return
                body = {"model": str(checkpoint), "prompt": prompt, "max_tokens": 20}
                body |= {"cache_salt": salt, "ignore_eos": True}
                http.post(url + "/v1/completions", json=body)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def test_the_numbers_on_the_page_are_the_jsons_under_load(
    opened: Callable[..., Window], url: str, checkpoint: Path
) -> None:
    with load(url, checkpoint):
        window = opened()
        first = window.text("#requests")
        sync_api.expect(window.page.locator("#requests")).not_to_have_text(first)
        report = window.freeze()
    present = report["present"]
    counts = report["counts"][present["window"]]
    assert window.text("#hit-rate") == f"{counts['hit_rate']:.1%}"
    assert window.text("#hit-tokens") == f"{counts['hit_tokens']:,}"
    assert window.text("#prompt-tokens") == f"{counts['prompt_tokens']:,}"
    assert window.text("#requests") == f"{counts['requests']:,}"
    if counts["ideal_hit_rate"] - counts["hit_rate"] >= 0.005:
        assert window.text("#ideal-rate") == f"{counts['ideal_hit_rate']:.1%}"
    else:
        assert "An unlimited cache would not have hit more." in window.text("#now")
    shown = dict(
        zip(
            window.page.locator("[data-cause]").evaluate_all("a => a.map(e => e.dataset.cause)"),
            window.texts("[data-cause] .share"),
            strict=True,
        )
    )
    assert shown == {
        cause: f"{tokens / counts['prompt_tokens']:.1%}"
        for cause, tokens in counts["causes"].items()
        if tokens
    }
    assert window.texts(".advice b") == [each["title"] for each in present["advice"]][:4]
    for state, pages in report["pool"]["pages"].items():
        if state != "total":
            assert window.text(f"#pages-{state}") == f"{pages:,}"
    assert window.text("#sentence") == report["curve"]["sentence"]
    assert window.text("#curve-note") == report["curve"]["note"]
    cells = window.texts("#space-table tbody th")
    ordered = sorted(report["namespaces"], key=lambda e: -e["since_start"]["prompt_tokens"])
    assert cells == [each["name"] for each in ordered]
    rates = window.texts("#space-table tbody td:nth-child(4)")
    assert rates == [f"{each['since_start']['hit_rate']:.1%}" for each in ordered]
    assert window.text("#now-running") == f"{report['requests']['running']:,}"
    assert window.texts("#pin-table tbody th") == ["<i>houses</i>"]


def test_the_charts_show_the_jsons_figures(opened: Callable[..., Window]) -> None:
    window = opened()
    report = window.freeze()
    window.page.click("#chart-rate summary")
    window.page.wait_for_selector("#chart-rate tbody tr")
    past = report["over_time"]["ten_minutes"]
    expected = [
        f"{hit / prompt:.1%}" if prompt else "–"
        for hit, prompt in zip(past["hit_tokens"], past["prompt_tokens"], strict=True)
    ]
    assert window.texts("#chart-rate tbody td:nth-child(3)") == expected[::-1]
    window.page.click("#chart-curve summary")
    window.page.wait_for_selector("#chart-curve tbody tr")
    points = [f"{point['hit_rate']:.1%}" for point in report["curve"]["points"]]
    assert window.texts("#chart-curve tbody td:nth-child(3)") == points[::-1]
    assert len(points) == 13
    window.page.focus("#chart-curve svg")
    window.page.keyboard.press("Home")
    assert points[0] in window.text("#chart-curve .tip")
    window.page.keyboard.press("ArrowRight")
    assert points[1] in window.text("#chart-curve .tip")
    window.page.click("[data-span=hour]")
    assert window.page.get_attribute("[data-span=hour]", "aria-pressed") == "true"


def test_it_follows_what_happens(opened: Callable[..., Window], url: str, checkpoint: Path) -> None:
    window = opened()
    before = window.text("#requests")
    body = {"model": str(checkpoint), "prompt": HOUSES, "max_tokens": 1}
    assert httpx.post(url + "/v1/completions", json=body, timeout=60).status_code == 200
    sync_api.expect(window.page.locator("#requests")).not_to_have_text(before)
    assert int(window.text("#requests")) == int(before) + 1


def test_the_icicle_is_used_by_keyboard_and_mouse(opened: Callable[..., Window]) -> None:
    window = opened()
    report = window.freeze()
    blocks = window.page.locator(".icicle button")
    assert blocks.count() > 3
    window.page.focus(".icicle button[tabindex='0']")
    window.page.keyboard.press("ArrowDown")
    assert window.page.locator(".icicle button[aria-pressed=true]").count() == 1
    assert "tokens saved" in window.text(".about")
    chosen = window.page.evaluate("document.activeElement.dataset.key")
    window.page.keyboard.press("Enter")
    assert window.page.locator(".crumbs li button").count() > 1
    assert window.page.evaluate("document.activeElement.dataset.key") == chosen
    window.page.keyboard.press("Escape")
    window.page.click(".crumbs button >> nth=0")
    assert window.page.locator(".crumbs li button").count() == 1
    assert blocks.count() <= len(report["tree"])
    for box in (block.bounding_box() for block in blocks.all()):
        assert box is not None
        assert box["x"] + box["width"] <= DESK


def test_text_of_prompts_is_shown_and_does_nothing(opened: Callable[..., Window]) -> None:
    window = opened()
    report = window.freeze()
    near = window.text(".near >> nth=0")
    assert f"{report['near_misses'][0]['tokens_cost']:,} tokens computed again" in near
    assert "The key is under the mat" in near
    assert "</script><img src=x" in window.text("main")
    assert window.page.evaluate("window.broken") is None
    assert window.page.locator("main img, main i i, .near b, #pin-table i").count() == 0


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (DESK, "light"),
        (PHONE, "dark"),
        pytest.param(DESK, "dark", marks=pytest.mark.slow),
        pytest.param(PHONE, "light", marks=pytest.mark.slow),
    ],
)
def test_it_is_accessible_and_fits(
    opened: Callable[..., Window], scheme: str, width: int, tmp_path: Path
) -> None:
    window = opened(width, scheme)
    window.freeze()
    assert window.page.evaluate("document.documentElement.scrollWidth") <= width
    for each in window.page.locator("summary").all():
        each.click()
    window.page.click(".icicle button >> nth=0")
    found = axe_api.Axe().run(window.page)
    assert found.violations_count == 0, found.generate_report()
    assert window.page.evaluate("document.documentElement.scrollWidth") <= width
    picture = window.page.screenshot(path=tmp_path / f"{scheme}-{width}.png", full_page=True)
    assert len(picture) > 50_000
    light = sum(channel(window.page, "body", "background-color")) > 3 * 128
    assert light == (scheme == "light")


def test_the_theme_can_be_chosen(opened: Callable[..., Window]) -> None:
    window = opened(scheme="light")
    light = channel(window.page, "body", "background-color")
    window.page.click("#theme")
    assert channel(window.page, "body", "background-color") == light
    window.page.click("#theme")
    assert window.text("#theme") == "Theme: dark"
    assert sum(channel(window.page, "body", "background-color")) < 3 * 60
    window.page.reload()
    window.page.wait_for_selector("html[data-at]")
    assert window.text("#theme") == "Theme: dark"


def channel(page: Any, selector: str, name: str) -> list[int]:
    """The red, green and blue of a colour of an element."""
    value = page.eval_on_selector(selector, f"e => getComputedStyle(e).getPropertyValue('{name}')")
    return [int(part) for part in re.findall(r"\d+", value)[:3]]


@pytest.mark.slow
def test_without_text_lengths_and_hashes_are_shown(
    browser: Any, served: Callable[..., str], checkpoint: Path
) -> None:
    quiet = served()
    for number in range(3):
        body = {"model": str(checkpoint), "prompt": f"Day {number}. {HOUSES}", "max_tokens": 2}
        assert httpx.post(quiet + "/v1/completions", json=body, timeout=60).status_code == 200
    window = Window(browser, quiet)
    report = window.freeze()
    main = window.text("main")
    assert "under the mat" not in main
    assert "see its text" not in main
    assert "Choose a prefix to see its length, its hash and its hits." in main
    edge = report["tree"][0]["edge"]
    assert f"{edge['tokens']:,} token" in main
    assert f"#{edge['hash']}" in main
    assert "Texts of prompts are not shown" in window.text("footer")
    window.context.close()


def test_replicas_have_a_table_where_there_are_any(opened: Callable[..., Window]) -> None:
    window = opened()
    report = window.freeze()
    assert window.page.is_hidden("#replicas") == (not report["replicas"])
    pages = {"total": 40, "free": 10, "cached": 30, "pinned": 0, "held": 0}
    counts = {"requests": 1234, "running": 1, "waiting": 2, "generated_tokens": 5}
    tokens = {"prompt_tokens": 8000, "hit_tokens": 6000, "hit_rate": 0.75}
    first = {"name": "<i>r0</i>", **counts, **tokens, "other_replica_tokens": 800, "pages": pages}
    empty = {"name": "r1", **counts, "prompt_tokens": 0, "hit_tokens": 0, "hit_rate": 0.0}
    report["replicas"] = [first, empty | {"other_replica_tokens": 0, "pages": pages}]
    counted = report["counts"][report["present"]["window"]]
    counted["causes"]["other_replica"] = counted["prompt_tokens"]
    window.page.route("**/cache/report", lambda route: route.fulfill(json=report))
    window.page.click("#pause")
    window.page.wait_for_selector("#replicas:not([hidden])")
    assert window.texts("#replica-table tbody th") == ["<i>r0</i>", "r1"]
    assert window.texts("#replica-table tbody tr:first-child td") == [
        "1,234", "8,000", "75.0%", "10.0%", "1", "2", "75.0%",
    ]  # fmt: skip
    assert window.texts("#replica-table tbody tr:last-child td")[2:4] == ["–", "–"]
    mark = window.page.locator("[data-cause=other_replica] i")
    assert mark.evaluate("e => getComputedStyle(e).backgroundColor") != "rgba(0, 0, 0, 0)"
    assert axe_api.Axe().run(window.page).violations_count == 0


def test_what_tiers_gave_has_a_chart_where_there_are_any(opened: Callable[..., Window]) -> None:
    window = opened()
    report = window.freeze()
    assert report["tiers"] is None
    assert window.page.is_hidden("#over-tiers")
    past = {name: column[-1:] * 3 for name, column in report["over_time"]["ten_minutes"].items()}
    past |= {"at": [report["at"] - 10, report["at"] - 5, report["at"]]}
    past |= {"prompt_tokens": [1000, 0, 4000], "hit_tokens": [600, 0, 3000]}
    past |= {"loaded_host": [100, 0, 1000], "loaded_disk": [0, 0, 1500]}
    report["over_time"]["ten_minutes"] = past
    window.page.route("**/cache/report", lambda route: route.fulfill(json=report))
    window.page.click("#pause")
    window.page.wait_for_selector("#over-tiers:not([hidden])")
    window.page.click("#chart-tiers summary")
    window.page.wait_for_selector("#chart-tiers tbody tr")
    assert window.texts("#chart-tiers thead th")[1:] == [
        "hit in the pool", "loaded from host", "loaded from disk", "computed",
    ]  # fmt: skip
    rows = [window.texts(f"#chart-tiers tbody tr:nth-child({row}) td") for row in (1, 2, 3)]
    assert rows == [
        ["500", "1,000", "1,500", "1,000"], ["0", "0", "0", "0"], ["500", "100", "0", "400"],
    ]  # fmt: skip
    # Each line stands on the one before it: the last one is that of all prompt tokens.
    window.page.focus("#chart-tiers svg")
    window.page.keyboard.press("End")
    assert "loaded from disk 1,500" in window.text("#chart-tiers .tip")
    heights = window.page.locator("#chart-tiers .cross circle").evaluate_all(
        "all => all.map(each => Number(each.getAttribute('cy')))"
    )
    top, floor = heights[-1], heights[0] + (heights[0] - heights[1]) * 500 / 1000
    shares = [(floor - each) / (floor - top) for each in heights]
    assert shares == pytest.approx([500 / 4000, 1500 / 4000, 3000 / 4000, 1])
    colours = window.page.locator("#chart-tiers .keys i").evaluate_all(
        "all => all.map(each => getComputedStyle(each).backgroundColor)"
    )
    assert len(set(colours)) == 4 and "rgba(0, 0, 0, 0)" not in colours
    assert axe_api.Axe().run(window.page).violations_count == 0
    window.page.click("[data-span=hour]")
    assert window.page.is_hidden("#over-tiers"), "there are no such columns"


# -- drafts, and a tier that is there ----------------------------------------------------------


@pytest.fixture(scope="module")
def drafting(served: Callable[..., str], checkpoint: Path) -> str:
    """A server with speculation and a tier, after a text that came again and again."""
    url = served("--speculation", "auto", "--host-cache", "64MiB")
    body = {"model": str(checkpoint), "prompt": HOUSES, "max_tokens": 40, "temperature": 0}
    deadline = time.monotonic() + 60
    while True:
        for _ in range(4):
            answer = httpx.post(
                url + "/v1/completions", json=body | {"ignore_eos": True}, timeout=60
            )
            assert answer.status_code == 200, answer.text
        drafts = httpx.get(url + "/cache/report").json()["drafts"]
        if drafts and drafts["sources"] and drafts["sources"][0]["accepted_tokens"]:
            return url
        assert time.monotonic() < deadline, drafts


def test_the_metrics_of_drafts_are_those_of_the_report(drafting: str) -> None:
    drafts = httpx.get(drafting + "/cache/report").json()["drafts"]
    (text,) = drafts["sources"]
    families = text_string_to_metric_families(httpx.get(drafting + "/metrics").text)
    found = {
        (sample.name, sample.labels.get("source")): sample.value
        for family in families
        for sample in family.samples
    }
    for name, expected in (
        ("coppice_drafted_tokens_total", text["drafted_tokens"]),
        ("coppice_accepted_draft_tokens_total", text["accepted_tokens"]),
        ("coppice_draft_saved_seconds", pytest.approx(text["saved_seconds"], abs=1e-3)),
    ):
        assert found[name, "text"] == expected
    assert found["coppice_draft_base_tokens_total", None] == drafts["rows"]


def test_drafts_have_a_table_by_source(browser: Any, drafting: str) -> None:
    window = Window(browser, drafting)
    report = window.freeze()
    drafts = report["drafts"]
    (text,) = drafts["sources"]
    assert text["name"] == "text", "nothing else proposes any"
    assert 0 < text["accepted_tokens"] <= text["drafted_tokens"]
    assert drafts["rows"] > 0
    gain = text["accepted_tokens"] / drafts["rows"]
    assert drafts["tokens_a_step"] == pytest.approx(1 + gain)
    assert window.page.is_visible("#drafts")
    assert window.texts("#draft-table tbody th") == ["text"]
    assert window.texts("#draft-table tbody td") == [
        f"{text['drafted_tokens']:,}",
        f"{text['accepted_tokens']:,}",
        f"{text['accepted_tokens'] / text['drafted_tokens']:.1%}",
        f"{text['saved_seconds']:z.1f}",
    ]
    note = window.text("#draft-table .note")
    assert note == f"{drafts['sentence']}."
    assert f"{drafts['tokens_a_step']:.2f} tokens a step" in note
    # Nothing was evicted, so the tier that is there has given nothing yet.
    assert window.page.is_visible("#tiers") and window.page.is_visible("#over-tiers")
    past = report["over_time"]["ten_minutes"]
    assert set(past["loaded_host"]) == {0} and "loaded_disk" not in past
    assert axe_api.Axe().run(window.page).violations_count == 0
    assert window.complaints == []

    many = {"drafted_tokens": 12_345, "accepted_tokens": 0, "saved_seconds": -0.01}
    idle = {"name": "<i>grammar</i>", "drafted_tokens": 0, "accepted_tokens": 0}
    idle["saved_seconds"] = -1.26
    drafts["sources"] = [text | many, idle]
    window.page.route("**/cache/report", lambda route: route.fulfill(json=report))
    window.page.click("#pause")
    sync_api.expect(window.page.locator("#draft-table tbody tr")).to_have_count(2)
    assert window.texts("#draft-table tbody th") == ["text", "<i>grammar</i>"]
    assert window.texts("#draft-table tbody td") == [
        "12,345", "0", "0.0%", "0.0", "0", "0", "–", "-1.3",
    ]  # fmt: skip
    drafts["sources"] = []  # speculation is on, and nothing was worth a draft yet
    sync_api.expect(window.page.locator("#draft-table table")).to_have_count(0)
    assert window.text("#draft-table") == note
    window.context.close()


def test_without_speculation_no_drafts_are_shown(opened: Callable[..., Window], url: str) -> None:
    window = opened()
    assert window.freeze()["drafts"] is None
    assert window.page.is_hidden("#drafts")
    assert window.page.inner_html("#draft-table") == ""
    assert "coppice_drafted_tokens_total{" not in httpx.get(url + "/metrics").text


@pytest.mark.slow
def test_it_says_when_the_server_does_not_answer(opened: Callable[..., Window]) -> None:
    window = opened()
    window.page.route("**/cache/report", lambda route: route.abort())
    window.page.wait_for_selector("#trouble:not([hidden])")
    assert "The server does not answer. The figures are those of" in window.text("#trouble")
    window.page.unroute("**/cache/report")
    refusal = {"error": {"message": "the engine died", "type": "", "param": None, "code": None}}
    window.page.route("**/cache/report", lambda route: route.fulfill(status=503, json=refusal))
    sync_api.expect(window.page.locator("#trouble")).to_contain_text("the engine died")
    window.page.unroute("**/cache/report")
    window.page.wait_for_selector("#trouble", state="hidden")
    failed = "Failed to load resource"  # the browser reports each such answer
    window.complaints[:] = [each for each in window.complaints if not each.startswith(failed)]


def test_it_asks_for_a_key_where_one_is_needed(browser: Any, url: str) -> None:
    context = browser.new_context()
    page = context.new_page()
    keys: list[str | None] = []

    def guard(route: Any) -> None:
        keys.append(route.request.headers.get("authorization"))
        if keys[-1] == "Bearer right":
            route.continue_()
        else:
            route.fulfill(status=401, json={"error": {"message": "no"}})

    page.route("**/cache/report", guard)
    page.goto(url + "/cache")
    page.wait_for_selector("#key:not([hidden])")
    assert axe_api.Axe().run(page).violations_count == 0
    page.fill("#key-field", "wrong")
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("#trouble")).to_contain_text("does not know this key")
    page.fill("#key-field", "right")
    page.click("#key button")
    page.wait_for_selector("html[data-at]")
    assert page.is_hidden("#key")
    assert keys[:3] == [None, "Bearer wrong", "Bearer right"]
    context.close()
