// The charts over time: hit rate with its ideal, where prompt tokens came from, requests, and latencies.

import { Chart, ticks } from "./charts.js";
import { byId } from "./dom.js";
import { clock, count, latency, percent, short } from "./format.js";

export class OverTime {
  constructor() {
    this.rate = new Chart(byId("chart-rate"));
    this.tiers = null; // most servers have none
    this.requests = new Chart(byId("chart-requests"));
    this.ttft = new Chart(byId("chart-ttft"));
    this.itl = new Chart(byId("chart-itl"));
    this.span = localStorage.getItem("span") ?? "ten_minutes";
    this.report = null;
    this.buttons = [...document.querySelectorAll("[data-span]")];
    if (!this.buttons.some((each) => each.dataset.span === this.span)) this.span = "ten_minutes";
    for (const button of this.buttons) button.addEventListener("click", () => this.choose(button.dataset.span));
    this.choose(this.span);
  }

  choose(span) {
    this.span = span;
    localStorage.setItem("span", span);
    for (const each of this.buttons) each.setAttribute("aria-pressed", each.dataset.span === span);
    if (this.report) this.update(this.report);
  }

  update(report) {
    this.report = report;
    const past = report.over_time[this.span];
    const axis = {
      x: past.at, xName: "until", xText: (i) => clock(past.at[i]), xTicks: moments(past.at),
    };
    const rate = (tokens) => past.prompt_tokens.map((all, i) => (all ? tokens[i] / all : null));
    this.rate.update({
      ...axis, label: "Hit rate and ideal hit rate over time", yMax: 1,
      yTicks: [0, 0.25, 0.5, 0.75, 1], yText: (value) => `${Math.round(100 * value)}%`, valueText: percent,
      series: [
        { name: "ideal", values: rate(past.ideal_tokens), kind: "dots", colour: "ideal" },
        { name: "hit rate", values: rate(past.hit_tokens), kind: "line", colour: "hit", area: true },
      ],
      bars: { name: "prompt tokens", values: past.prompt_tokens, text: count },
    });
    this.updateTiers(past, axis);
    const most = Math.max(...past.requests_running, ...past.requests_waiting, 3);
    this.requests.update({
      ...axis, label: "Requests running and waiting over time", ...upTo(most, short),
      series: [
        { name: "running", values: past.requests_running, kind: "line", colour: "hit", area: true },
        { name: "waiting", values: past.requests_waiting, kind: "line", colour: "evicted" },
      ],
    });
    for (const name of ["ttft", "itl"]) {
      const [half, worst] = [past[`${name}_p50`], past[`${name}_p99`]];
      this[name].update({
        ...axis, ...upTo(Math.max(...worst.map((each) => each ?? 0), 0.001), latency),
        label: `${name === "ttft" ? "Time to first token" : "Time between tokens"} over time`,
        series: [
          { name: "median", values: half, kind: "line", colour: "hit" },
          { name: "99% are below", values: worst, kind: "line", colour: "in-flight" },
        ],
      });
    }
  }

  /** Tokens hit in the pool, loaded from each tier, and computed; hidden for a server without tiers. */
  updateTiers(past, axis) {
    const tiers = Object.keys(past).filter((name) => name.startsWith("loaded_"))
      .map((name) => ({ name: name.slice("loaded_".length), values: past[name] }));
    byId("over-tiers").hidden = !tiers.length;
    if (!tiers.length) return;
    this.tiers ??= new Chart(byId("chart-tiers"));
    const pool = past.hit_tokens.map((hit, i) => tiers.reduce((left, { values }) => left - values[i], hit));
    const series = [
      { name: "hit in the pool", values: pool, colour: "hit" },
      ...tiers.map(({ name, values }) => ({ name: `loaded from ${name}`, values, colour: `loaded-${name}` })),
      { name: "computed", values: past.prompt_tokens.map((all, i) => all - past.hit_tokens[i]), colour: "computed" },
    ];
    this.tiers.update({
      ...axis, label: "Prompt tokens by where they came from over time", stacked: true, valueText: count,
      ...upTo(Math.max(...past.prompt_tokens, 1), short),
      series: series.map((each) => ({ ...each, kind: "line", area: true })),
    });
  }
}

function upTo(most, yText) {
  const yTicks = ticks(most);
  return { yMax: yTicks.at(-1), yTicks, yText };
}

/** Up to seven round times of day, as ticks [seconds since the epoch, text]. */
function moments(at) {
  if (at.length < 2) return at.map((each) => [each, clock(each)]);
  const length = at.at(-1) - at[0];
  const step = [5, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 28800]
    .find((each) => length / each <= 6) ?? 28800;
  const offset = -60 * new Date(1000 * at[0]).getTimezoneOffset();
  const found = [];
  for (let t = Math.ceil((at[0] + offset) / step) * step - offset; t <= at.at(-1); t += step) {
    found.push([t, clock(t, step < 60)]);
  }
  return found;
}
