// The top of the page: the hit rate, the time it saves, why tokens missed, and advice.

import { h, show } from "./dom.js";
import { count, duration, percent, short } from "./format.js";

const WINDOWS = { last_ten_minutes: "Last ten minutes", since_start: "Since the start" };

export function now(container, report) {
  const { present } = report, counts = report.counts[present.window];
  show(container, [present, counts, report.causes], () =>
    counts.prompt_tokens ? filled(report, present, counts) : empty(report));
}

function empty(report) {
  const body = JSON.stringify({ model: report.model, prompt: "Hello", max_tokens: 16 });
  const curl = `curl ${location.origin}/v1/completions -H 'Content-Type: application/json' -d '${body}'`;
  return [
    h("p", { class: "eyebrow" }, "Nothing yet"),
    h("h2", { id: "now-title", class: "claim" }, "No prompt has come since the server started."),
    h("p", { class: "lead" }, "Send one, and another that begins alike; both will show here within seconds."),
    h("pre", { tabindex: "0" }, curl),
  ];
}

function filled(report, present, counts) {
  const causes = Object.entries(counts.causes).filter(([, tokens]) => tokens).sort((a, b) => b[1] - a[1]);
  const rest = counts.ideal_hit_rate - counts.hit_rate;
  return [
    h("p", { class: "eyebrow" }, WINDOWS[present.window]),
    h("div", { class: "hero" },
      h("h2", { id: "now-title" },
        h("span", { class: "figure", id: "hit-rate" }, percent(counts.hit_rate)),
        h("span", { class: "hidden" }, " of prompt tokens came from the cache")),
      h("div", null,
        h("p", { class: "claim" }, "of prompt tokens came from the cache."),
        h("p", { class: "lead" },
          "That saved about ", h("b", { id: "saved" }, duration(present.saved_seconds)),
          " of computing: ", h("span", { id: "hit-tokens" }, count(counts.hit_tokens)), " of ",
          h("span", { id: "prompt-tokens" }, count(counts.prompt_tokens)), " tokens in ",
          h("span", { id: "requests" }, count(counts.requests)), " requests. ", fromTiers(counts),
          rest < 0.005 ? "An unlimited cache would not have hit more." : [
            "An unlimited cache would have reached ",
            h("b", { id: "ideal-rate" }, percent(counts.ideal_hit_rate)), "."]))),
    mix(counts, causes),
    h("div", { class: "why" },
      h("div", null, h("h3", null, "Why the rest was computed"), list(report, counts, causes)),
      h("div", null, h("h3", null, "What to do"), advice(present, counts))),
  ];
}

/** How many of the hit tokens came from each tier beyond the pool; nothing without any. */
function fromTiers(counts) {
  const loaded = Object.entries(counts.loaded_tokens ?? {}).filter(([, tokens]) => tokens);
  if (!loaded.length) return "";
  return h("span", { id: "from-tiers" },
    `Of them ${loaded.map(([tier, tokens]) => `${count(tokens)} came from the ${tier} tier`).join(", ")}. `);
}

/** All prompt tokens as one bar: hits, then each cause; a tick at the ideal hit rate. */
function mix(counts, causes) {
  const loaded = Object.entries(counts.loaded_tokens ?? {}).filter(([, tokens]) => tokens);
  const pool = counts.hit_tokens - loaded.reduce((sum, [, tokens]) => sum + tokens, 0);
  const parts = [["hit", pool], ...loaded.map(([tier, tokens]) => [`hit from ${tier}`, tokens]), ...causes];
  const words = parts.map(([name, tokens]) => `${name.replaceAll("_", " ")} ${percent(tokens / counts.prompt_tokens)}`);
  const bar = h("div", { class: "mix", role: "img", "aria-label": `Prompt tokens: ${words.join(", ")}` },
    parts.map(([name, tokens]) => {
      const part = h("i", { class: name.replace("hit from ", "loaded-").replaceAll("_", "-"), title: name });
      part.style.setProperty("flex-grow", tokens);
      return part;
    }));
  if (counts.ideal_hit_rate - counts.hit_rate < 0.005) return bar;
  const tick = h("span", { class: "tick-ideal", "aria-hidden": "true" }, h("span", null, "ideal"));
  tick.style.setProperty("left", `${100 * counts.ideal_hit_rate}%`);
  return h("div", { class: "mix-frame" }, bar, tick);
}

function list(report, counts, causes) {
  if (!causes.length) return h("p", { class: "nothing" }, "Nothing was.");
  const found = h("dl", { class: "causes" }, causes.map(([cause, tokens]) => {
    const { name, meaning } = report.causes[cause] ?? { name: cause, meaning: "" };
    return h("div", { "data-cause": cause },
      h("dt", null, h("i", { class: cause.replaceAll("_", "-") }), name),
      h("dd", { class: "share" }, percent(tokens / counts.prompt_tokens)),
      h("dd", { class: "tokens", title: `${count(tokens)} tokens` }, `${short(tokens)} tokens`),
      h("dd", { class: "meaning" }, meaning));
  }));
  return counts.estimate ? h("div", null, found, h("p", { class: "estimate" }, counts.estimate)) : found;
}

function advice(present, counts) {
  if (!present.advice.length) {
    return h("p", { class: "nothing" }, "Nothing: no cause costs enough to be worth it.");
  }
  return h("ol", { class: "advice" }, present.advice.slice(0, 4).map((each) =>
    h("li", { class: each.cause.replaceAll("_", "-") },
      h("b", null, each.title),
      h("span", { class: "cost" }, `${percent(each.tokens / counts.prompt_tokens)} of prompt tokens`),
      h("p", null, each.text))));
}
