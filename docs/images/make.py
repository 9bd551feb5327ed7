"""Makes the two pictures of the README, in this folder.

    python docs/images/make.py            both
    python docs/images/make.py ratios     ratios.svg, from benchmarks/results/
    python docs/images/make.py dashboard  dashboard.png, of the demo model under a minute of load

Needs Playwright (among the development dependencies) and the browser Chromium.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from playwright.sync_api import Browser, sync_playwright
from plotly.offline import get_plotlyjs

from coppice.frontend.demo.facts import ask, make_document

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"
SECONDS = 75  # of load
CLIENTS = 6

GREEN, AMBER = "#23794e", "#b07d2b"
WIDE = {"stored": "float32", "precision": "float32", "workload": "W1"}
VLLM = {"stored": "bfloat16", "precision": "float32", "ratio": "vllm / coppice"}

# For each workload its bars: the peer, the file of results, the key of the ratio in a row, and the
# values that select the rows.
RATIOS: dict[str, list[tuple[str, str, str, Mapping[str, str]]]] = {
    "32 requests with a shared prefix of 1,024 tokens": [
        ("transformers", "serving-cpu", "times_slower", {"ratio": "transformers / cache_on"}),
        ("llama.cpp", "cpu-peers", "times_slower", WIDE | {"ratio": "llama.cpp-1 / coppice"}),
        ("OpenVINO GenAI", "cpu-peers", "times_slower", WIDE | {"ratio": "openvino / coppice"}),
        ("Coppice, cache off", "serving-cpu", "times_slower", {"ratio": "cache_off / cache_on"}),
        ("vLLM", "cpu-peers", "times_slower", VLLM | {"workload": "W1"}),
    ],
    "8 conversations of 4 turns": [
        ("vLLM", "cpu-peers", "times_slower", VLLM | {"workload": "W3"}),
    ],
    "16 samples of one prompt": [
        ("vLLM", "cpu-peers", "times_slower", VLLM | {"workload": "W4"}),
    ],
    "Beam search of width 4": [
        ("transformers", "search-cpu", "times_slower", {"ratio": "transformers / engine"}),
        ("vLLM", "cpu-peers", "times_slower", VLLM | {"workload": "W5"}),
    ],
    "The prefix cache alone, without a model": [
        ("vLLM's block table", "tree-peers-cpu", "vllm_over_coppice_settled", {"workload": "A"}),
        ("SGLang's tree", "tree-peers-cpu", "sglang_over_coppice_settled", {"workload": "A"}),
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the pictures of the README.")
    parser.add_argument("pictures", nargs="*", help="dashboard, ratios (default: both)")
    pictures = parser.parse_args().pictures or ["ratios", "dashboard"]
    made = {"ratios": make_ratios, "dashboard": make_dashboard}
    if wrong := sorted(set(pictures) - set(made)):
        parser.error(f"pictures must be among {', '.join(made)}, got {', '.join(wrong)}")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        for picture in pictures:
            made[picture](browser)
        browser.close()


# -- the chart ---------------------------------------------------------------------------------


def measured(file: str, key: str, values: Mapping[str, str]) -> dict[str, float]:
    """The median of the newest row with these values, the least and the most of all such rows."""
    lines = (RESULTS / f"{file}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if values.items() <= row.items() and key in row]
    found: list[dict[str, float]] = [row[key] for row in rows]
    return {
        "min": min(each["min"] for each in found),
        "median": found[-1]["median"],
        "max": max(each["max"] for each in found),
    }


def make_ratios(browser: Browser) -> None:
    """Writes ratios.svg: how many times longer others take, as bars on a logarithmic scale."""
    figure, place, names = go.Figure(), 0, {}
    last = list(RATIOS)[-1]
    for heading, rows in RATIOS.items():
        _note(figure, f"<b>{heading}</b>", place, x=-0.36)
        for peer, file, key, values in rows:
            place += 1
            names[place] = peer
            found = measured(file, key, values)
            median = found["median"]
            figure.add_bar(
                x=[median],
                y=[place],
                orientation="h",
                marker={"color": AMBER if heading == last else GREEN},
                width=0.66,
                error_x={
                    "type": "data",
                    "symmetric": False,
                    "array": [found["max"] - median],
                    "arrayminus": [median - found["min"]],
                    "color": "#8b938b",
                    "thickness": 1.4,
                    "width": 4,
                },
            )
            _note(figure, f"<b>{median:.3g} ×</b>", place, x=1.01)
        place += 1
    axis = {"zeroline": False, "ticklabelstandoff": 6}
    figure.update_layout(
        template="none",
        showlegend=False,
        width=860,
        height=96 + 26 * place,
        margin={"l": 235, "r": 70, "t": 58, "b": 32},
        paper_bgcolor="#ffffff",
        plot_bgcolor="#ffffff",
        font={"family": "system-ui, Arial, sans-serif", "size": 13, "color": "#1d1f1c"},
        title={
            "text": "How many times longer others take than Coppice "
            "<span style='font-size:12px;color:#5f645d'>on two CPU cores; median, least to most"
            "</span>",
            "x": 0.02,
            "xanchor": "left",
            "font": {"size": 16},
        },
        xaxis=axis
        | {
            "type": "log",
            "range": [0, 1.32],
            "tickvals": [1, 2, 5, 10, 20],
            "ticktext": ["1 ×", "2 ×", "5 ×", "10 ×", "20 ×"],
            "gridcolor": "#e3e2db",
        },
        yaxis=axis
        | {
            "range": [place - 0.4, -0.6],
            "tickvals": list(names),
            "ticktext": list(names.values()),
            "showgrid": False,
        },
    )
    page = browser.new_page()
    page.set_content("<div id='chart'></div>")
    page.add_script_tag(content=get_plotlyjs())
    picture = page.evaluate(
        """async (figure) => {
          await Plotly.newPlot("chart", figure.data, figure.layout);
          return Plotly.toImage("chart", {format: "svg"});
        }""",
        json.loads(figure.to_json()),
    )
    page.close()
    svg = urllib.parse.unquote(picture.split(",", 1)[1])
    (HERE / "ratios.svg").write_text(svg + "\n", encoding="utf-8")


def _note(figure: go.Figure, text: str, place: int, x: float) -> None:
    """Writes `text` beside the bars, at `x` widths of the plot and on the row `place`."""
    figure.add_annotation(
        x=x, xref="paper", y=place, text=text, showarrow=False, xanchor="left", align="left"
    )


# -- the dashboard -----------------------------------------------------------------------------


def make_dashboard(browser: Browser) -> None:
    """Writes dashboard.png: the page at /cache of a server with the demo model, after some load."""
    with serving() as url:
        load(url)
        page = browser.new_page(
            viewport={"width": 1180, "height": 1138}, device_scale_factor=1.5, color_scheme="light"
        )
        page.goto(f"{url}/cache")
        page.wait_for_selector("#chart-rate svg, #chart-rate path")
        page.wait_for_timeout(1500)
        page.screenshot(path=HERE / "dashboard.png")
        page.close()


@contextmanager
def serving() -> Iterator[str]:
    """A server of the demo model, whose pool is a little too small for the load; gives its URL."""
    command = [str(Path(sys.executable).with_name("coppice")), "serve", "demo", "--port", "0"]
    options = ["--report-text", "--kv-cache-tokens", "5000"]
    server = subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if found := re.search(r"http://[\d.]+:\d+", line):
                threading.Thread(target=server.stdout.read, daemon=True).start()
                yield found.group()
                return
        raise RuntimeError("the server did not start")
    finally:
        server.terminate()
        server.wait()


def load(url: str) -> None:
    """Conversations about handbooks, of which some begin with the time of day."""
    documents = [make_document(seed, 40, split="eval") for seed in range(8)]
    until = time.monotonic() + SECONDS

    def client(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < until:
            at = rng.choices(range(len(documents)), (8, 5, 4, 3, 2, 2, 1, 1))[0]
            system = documents[at].text
            if rng.random() < 0.12:
                system = f"It is {rng.randrange(8, 18)}:{rng.randrange(60):02}. {system}"
            messages = [{"role": "system", "content": system}]
            for question in ask(documents[at], rng.randrange(1 << 30), rng.randint(1, 4)):
                messages.append({"role": "user", "content": question.text})
                answer = send(url, messages)
                messages.append({"role": "assistant", "content": answer})
                time.sleep(rng.expovariate(2.0))

    clients = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()


def send(url: str, messages: list[dict[str, str]]) -> str:
    """The answer to a conversation."""
    body: dict[str, Any] = {"model": "demo", "messages": messages, "max_tokens": 24}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


if __name__ == "__main__":
    main()
