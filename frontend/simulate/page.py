"""The page of a simulation: one HTML file, which loads no other and opens offline."""

from __future__ import annotations

from html import escape
from pathlib import Path

from coppice.frontend.replay.shell import fill, table
from coppice.frontend.report.words import Report
from coppice.frontend.simulate.charts import (
    COLOURS,
    latency_chart,
    page_chart,
    slot_chart,
    throughput_chart,
)
from coppice.frontend.simulate.words import describe, machine_words, rows

_TEMPLATE = Path(__file__).with_name("page.html")


def render_page(report: Report) -> str:
    """The whole page of a simulation, from its JSON. Names of traces are escaped."""
    stages = report["stages"]
    parts = {
        "title": escape(f"Simulation of {report['requests']['source']}"),
        "subtitle": escape(describe(report)),
        "machine": escape(machine_words(report)),
        "tiles": "\n".join(map(_tile, stages)),
        "keys": "".join(
            f'<li><i style="--colour: {COLOURS[stage["name"]]}"></i><b>{stage["name"]}</b>: '
            f"{escape(stage['meaning'])}</li>"
            for stage in stages
        ),
        "table": table(
            ("", *(stage["name"] for stage in stages), ""),
            ([name, *values, meaning] for name, values, meaning in rows(report)),
        ),
        "version": escape(report["coppice"]),
    }
    charts = {
        "slots": slot_chart(report),
        "throughput": throughput_chart(report),
        "ttft": latency_chart(report, "ttft"),
        "itl": latency_chart(report, "itl"),
        "pages": page_chart(report),
    }
    return fill(_TEMPLATE, parts, charts)


def _tile(stage: Report) -> str:
    slots = stage["slots"]
    return (
        f'<div class="tile"><dt>{stage["name"]}</dt><dd><b id="tile-{stage["name"]}">'
        f"{stage['output_tokens_a_second']:,.1f}</b><small>output tokens a second; "
        f"{slots['utilisation']:.1%} of slots useful, {stage['memory']['waste']:.1%} of memory "
        f"wasted</small></dd></div>"
    )
