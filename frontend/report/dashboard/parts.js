// The other parts of the page: memory, near misses, latencies, namespaces, pins, the footer.

import { Chart, ticks } from "./charts.js";
import { byId, h, show, table } from "./dom.js";
import { count, duration, latency, percent, piece, plural, short, visible } from "./format.js";

export class Memory {
  constructor() {
    this.chart = new Chart(byId("chart-curve"));
  }

  update(report) {
    const { points, sentence, note } = report.curve, size = report.pool.tokens;
    const { since_start: counts } = report.counts;
    byId("sentence").textContent = sentence
      || "There is no curve yet: too few prompts have come to estimate what other sizes would hit.";
    byId("curve-note").textContent = note;
    byId("chart-curve").hidden = !points.length;
    if (points.length) {
      const most = Math.max(counts.ideal_hit_rate, counts.hit_rate, ...points.map((each) => each.hit_rate));
      const yTicks = ticks(Math.max(most, 0.01)).filter((each) => each <= 1);
      this.chart.update({
        label: "Hit rate by size of the cache", log: true, xName: "tokens in the cache",
        x: points.map((each) => each.pool_tokens),
        xText: (i) => `${short(points[i].pool_tokens)} tokens (× ${Number(points[i].factor.toPrecision(2))})`,
        xTicks: points.filter((_, i) => i % 2 === 0).map((each) => [each.pool_tokens, short(each.pool_tokens)]),
        yMax: Math.min(1, 1.08 * Math.max(yTicks.at(-1), most)), yTicks, valueText: percent,
        yText: (value) => `${Number((100 * value).toPrecision(3))}%`,
        series: [
          { name: "an unlimited cache", values: points.map(() => counts.ideal_hit_rate), kind: "dots", colour: "ideal" },
          { name: "LRU of this size, estimated", values: points.map((each) => each.hit_rate), kind: "line", colour: "hit", area: true },
        ],
        marks: [{ x: size, y: counts.hit_rate, colour: "here" }],
      });
    }
    this.pool(report.pool, report.windows?.sentence);
  }

  pool(pool, windows) {
    show(byId("pool"), [pool, windows], () => {
      const { pages } = pool;
      const states = [["held", "held by running requests"], ["pinned", "kept by pins"],
        ["cached", "cached, evicted when needed"], ["free", "free"]];
      const bar = h("div", {
        class: "mix slim", role: "img",
        "aria-label": states.map(([state, words]) => `${count(pages[state])} pages ${words}`).join(", "),
      }, states.filter(([state]) => pages[state]).map(([state]) => {
        const part = h("i", { class: `pages-${state}` });
        part.style.setProperty("flex-grow", pages[state]);
        return part;
      }));
      const age = pool.eviction_age_seconds === null ? ""
        : `, half of them after ${duration(pool.eviction_age_seconds)} without use`;
      return [
        bar,
        h("dl", { class: "pages" }, states.map(([state, words]) => h("div", null,
          h("dt", null, h("i", { class: `pages-${state}` }), words),
          h("dd", { id: `pages-${state}` }, count(pages[state]))))),
        h("p", { class: "note" },
          `${count(pages.total)} pages of ${pool.page_size} tokens: room for ${short(pool.tokens)} tokens. `,
          pool.evicted_tokens ? `${count(pool.evicted_tokens)} tokens were evicted by ${pool.eviction_policy}${age}.`
            : "Nothing has been evicted."),
        ...windows ? [h("p", { class: "note" }, `${windows}.`)] : [],
      ];
    });
  }
}

export function nearMisses(container, report) {
  show(container, report.near_misses, () => {
    if (!report.near_misses.length) {
      return h("p", { class: "nothing" }, "None: no known text came after another beginning.");
    }
    const cards = report.near_misses.map((miss) => nearMiss(miss, report.namespaces.length > 1));
    const [first, rest] = [cards.slice(0, 3), cards.slice(3)];
    return rest.length
      ? [...first, h("details", { "data-key": "near" }, h("summary", null, `${rest.length} more that cost less`), rest)]
      : first;
  });
}

function nearMiss(miss, named) {
  const example = miss.differences[0];
  const side = (kind, label, part) => h("p", { class: `side-by ${kind}` },
    h("span", null, label),
    part.tokens ? h(kind === "ours" ? "del" : "ins", null, piece(part))
      : h("em", null, kind === "ours" ? "nothing" : "nothing, or no longer cached"));
  const more = miss.differences.slice(1).map((each) => h("li", null,
    h("del", null, piece(each.ours)), " – ", each.theirs.tokens ? h("ins", null, piece(each.theirs)) : h("em", null, "no longer cached")));
  return h("article", { class: "near" },
    h("h3", null, `${count(miss.tokens_cost)} tokens computed again`),
    h("p", { class: "note" },
      `${plural(miss.requests, "request")} ${miss.position
        ? `shared the first ${plural(miss.position, "token")}, then differed` : "differed from the beginning"}, `,
      `then continued with ${count(miss.tokens_after)} tokens that were known${named ? `, in namespace ${miss.namespace}` : ""}.`),
    miss.before.tokens ? h("p", { class: "shared" }, h("span", null, "shared"), context(miss.before, "end")) : null,
    example ? [side("ours", "here", example.ours), side("theirs", "in the cache", example.theirs)] : null,
    h("p", { class: "shared" }, h("span", null, "then again"), context(miss.after, "start")),
    more.length ? h("details", { "data-key": `near ${miss.before.hash} ${miss.after.hash}` },
      h("summary", null, `${more.length} more of these differences`), h("ul", { class: "more" }, more)) : null);
}

function context(part, from) {
  if (part.text === null) return piece(part);
  const text = [...visible(part.text)];
  return from === "end" ? `… ${text.slice(-180).join("")}` : `${text.slice(0, 180).join("")} …`;
}

export function latencies(container, report) {
  const names = {
    queue: "In the queue", ttft: "To the first token", itl: "Between tokens", request: "To the end",
  };
  const { requests } = report;
  show(container, [report.latency_seconds, requests], () => {
    const refused = Object.values(requests.refused).reduce((a, b) => a + b, 0);
    const ended = Object.entries(requests.finished).filter(([, number]) => number)
      .map(([reason, number]) => `${count(number)} ${reason}`).join(", ");
    return [
      h("dl", { class: "tiles" },
        [["running", requests.running], ["waiting", requests.waiting], ["preemptions", requests.preemptions],
          ["refused", refused], ["failed steps", requests.failed_steps]].map(([name, value]) =>
          h("div", null, h("dt", null, name), h("dd", { id: `now-${name.replace(" ", "-")}` }, count(value))))),
      table("Latencies", [
        { name: "last ten minutes" }, { name: "median", number: true }, { name: "90%", number: true },
        { name: "99%", number: true }, { name: "median since the start", number: true },
        { name: "99% since the start", number: true },
      ], Object.entries(names).map(([key, name]) => {
        const { last_ten_minutes: last, since_start: all } = report.latency_seconds[key];
        return [name, latency(last.p50), latency(last.p90), latency(last.p99), latency(all.p50), latency(all.p99)];
      })),
      h("p", { class: "note" }, ended ? `Requests that ended: ${ended}.` : "No request has ended yet."),
    ];
  });
}

export function namespaces(container, report) {
  const { other_namespaces: others } = report;
  const rows = [...report.namespaces].sort((a, b) => b.since_start.prompt_tokens - a.since_start.prompt_tokens);
  if (others.since_start.requests) rows.push({ name: "all others", ...others });
  const adapters = report.adapters ?? [];
  show(container, [rows, report.causes, adapters], () => {
    if (!rows.length) return h("p", { class: "nothing" }, "No request has come yet.");
    return [table("All namespaces", [
      { name: "namespace" }, { name: "requests", number: true }, { name: "prompt tokens", number: true },
      { name: "hit rate", number: true }, { name: "ideal", number: true },
      { name: "last ten minutes", number: true }, { name: "most computed since" },
    ], rows.map(({ name, since_start: all, last_ten_minutes: last }) => {
      const [cause, tokens] = Object.entries(all.causes).sort((a, b) => b[1] - a[1])[0];
      return [
        h("code", null, name), count(all.requests), count(all.prompt_tokens), percent(all.hit_rate),
        percent(all.ideal_hit_rate), last.prompt_tokens ? percent(last.hit_rate) : "–",
        tokens ? report.causes[cause]?.name ?? cause : "–",
      ];
    })), ...adapters.length ? [adapterTable(adapters)] : []];
  });
}

function adapterTable(adapters) {
  return table("Adapters", [
    { name: "adapter" }, { name: "requests", number: true }, { name: "prompt tokens", number: true },
    { name: "hit rate", number: true }, { name: "hit in the base model's cache", number: true },
  ], adapters.map((each) => [
    h("code", null, each.name), count(each.requests), count(each.prompt_tokens),
    each.prompt_tokens ? percent(each.hit_tokens / each.prompt_tokens) : "–",
    each.invoked ? count(each.base_hit_tokens) : "–",
  ]));
}

/** A row for each replica; the section is hidden for a server with one engine. */
export function replicas(section, container, report) {
  const all = report.replicas ?? [];
  section.hidden = !all.length;
  show(container, all, () => (all.length ? table("All replicas", [
    { name: "replica" }, { name: "requests", number: true }, { name: "prompt tokens", number: true },
    { name: "hit rate", number: true }, { name: "held by another", number: true },
    { name: "running", number: true }, { name: "waiting", number: true }, { name: "pool use", number: true },
  ], all.map((each) => [
    h("code", null, each.name), count(each.requests), count(each.prompt_tokens),
    each.prompt_tokens ? percent(each.hit_rate) : "–",
    each.prompt_tokens ? percent(each.other_replica_tokens / each.prompt_tokens) : "–",
    count(each.running), count(each.waiting),
    each.pages.total ? percent(1 - each.pages.free / each.pages.total) : "–",
  ])) : []));
}

/** A row for each tier beyond the pool; the section is hidden without any. */
export function tiers(section, container, report) {
  const all = report.tiers;
  section.hidden = !all;
  show(container, all, () => (all ? [table("All tiers", [
    { name: "tier" }, { name: "loaded tokens", number: true }, { name: "GB/s read", number: true },
    { name: "stored GB", number: true }, { name: "GB/s stored", number: true }, { name: "kept GB", number: true }, { name: "failed", number: true },
    { name: "damaged pages", number: true },
  ], all.stores.map((each) => [
    h("code", null, each.name), count(each.loaded_tokens),
    each.load_seconds ? (each.loaded_bytes / each.load_seconds / 1e9).toFixed(2) : "–",
    (each.written_bytes / 1e9).toFixed(2),
    each.write_seconds ? (each.written_bytes / each.write_seconds / 1e9).toFixed(2) : "–",
    each.used_bytes === null ? "–" : (each.used_bytes / 1e9).toFixed(2),
    count(each.failures + each.slow), count(each.damaged),
  ])), h("p", { class: "note" }, `${all.sentence}.`)] : []));
}

/** A row for each source of drafts, and what they came to; the section is hidden without speculation. */
export function drafts(section, container, report) {
  const all = report.drafts;
  section.hidden = !all;
  show(container, all, () => (all ? [...all.sources.length ? [table("All sources of drafts", [
    { name: "source" }, { name: "drafted tokens", number: true }, { name: "accepted", number: true },
    { name: "share", number: true }, { name: "seconds saved", number: true },
  ], all.sources.map((each) => [
    h("code", null, each.name), count(each.drafted_tokens), count(each.accepted_tokens),
    each.drafted_tokens ? percent(each.accepted_tokens / each.drafted_tokens) : "–",
    each.saved_seconds.toFixed(1).replace(/^-0\.0$/, "0.0"),
  ]))] : [], h("p", { class: "note" }, `${all.sentence}.`)] : []));
}

export function pins(container, report) {
  show(container, report.pins, () => {
    if (!report.pins.length) {
      return h("p", { class: "nothing" }, "There are none. ", h("code", null, "PUT /cache/pins"), " makes one.");
    }
    return table("All pins", [
      { name: "name" }, { name: "namespace" }, { name: "tokens", number: true },
      { name: "cached now", number: true }, { name: "ends without use", number: true },
    ], report.pins.map((pin) => [
      pin.name, h("code", null, pin.namespace), count(pin.tokens), percent(pin.cached_tokens / pin.tokens),
      pin.seconds_left === null ? "never" : `in ${duration(pin.seconds_left)}`,
    ]));
  });
}

export function foot(container, report) {
  show(container, [report.coppice, report.model, report.has_text, Math.floor(report.uptime_seconds / 60)], () => [
    h("p", null, `coppice ${report.coppice}, up for ${duration(report.uptime_seconds, 1)}. `,
      "The same figures: ", h("a", { href: "cache/report" }, "JSON"), ", ",
      h("a", { href: "cache/report/schema" }, "its schema"), ", ", h("a", { href: "metrics" }, "Prometheus"), "."),
    h("p", null, report.has_text ? "Texts of prompts are shown, since the server runs with --report-text."
      : "Texts of prompts are not shown, only their lengths and hashes; a server with --report-text shows them."),
  ]);
}
