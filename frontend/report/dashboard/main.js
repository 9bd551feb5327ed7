// Fetches the report every two seconds while the page is visible, and shows it.

import { byId } from "./dom.js";
import { clock } from "./format.js";
import { Icicle, prefixTable } from "./icicle.js";
import { now } from "./now.js";
import { drafts, foot, latencies, Memory, namespaces, nearMisses, pins, replicas, tiers } from "./parts.js";
import { OverTime } from "./time.js";

const EVERY = 2000;
const THEMES = ["auto", "light", "dark"];

let parts = null;
let last = null;
let paused = false;
let timer = 0;
let asking = false;

function render(report) {
  byId("report").hidden = false;
  parts ??= { time: new OverTime(), memory: new Memory(), icicle: new Icicle(byId("icicle")) };
  byId("model").textContent = report.model;
  now(byId("now"), report);
  parts.time.update(report);
  parts.memory.update(report);
  parts.icicle.update(report);
  prefixTable(byId("prefix-table"), report);
  nearMisses(byId("near-list"), report);
  latencies(byId("latency-table"), report);
  replicas(byId("replicas"), byId("replica-table"), report);
  tiers(byId("tiers"), byId("tier-table"), report);
  drafts(byId("drafts"), byId("draft-table"), report);
  namespaces(byId("space-table"), report);
  pins(byId("pin-table"), report);
  foot(byId("foot"), report);
  last = report;
  document.documentElement.dataset.at = report.at;
}

function say(state, text) {
  const line = byId("state");
  line.className = state;
  if (line.textContent !== text) line.textContent = text;
}

function trouble(text) {
  const line = byId("trouble");
  line.hidden = !text;
  if (line.textContent !== text) line.textContent = text;
}

async function ask() {
  clearTimeout(timer);
  if (asking) return;
  asking = true;
  try {
    const key = sessionStorage.getItem("key");
    const answer = await fetch("cache/report", {
      headers: key ? { Authorization: `Bearer ${key}` } : {}, cache: "no-store",
    });
    const locked = answer.status === 401 || answer.status === 403;
    byId("key").hidden = !locked;
    if (locked) {
      say("off", "locked");
      if (key) sessionStorage.removeItem("key");
      trouble(answer.status === 403 ? "The report needs an admin key."
        : key ? "The server does not know this key." : "");
      return;
    }
    const report = await answer.json();
    if (!answer.ok) throw new Error(report.error?.message ?? `the server answered ${answer.status}`);
    trouble("");
    render(report);
    say("live", paused ? "paused" : "live");
  } catch (error) {
    say("off", "no answer");
    trouble(`${error instanceof TypeError ? "The server does not answer." : `The server answers: ${error.message}.`}`
      + (last ? ` The figures are those of ${clock(last.at)}.` : ""));
  } finally {
    asking = false;
    if (!paused && !document.hidden && byId("key").hidden) timer = setTimeout(ask, EVERY);
  }
}

function theme(chosen) {
  const name = THEMES.includes(chosen) ? chosen : "auto";
  localStorage.setItem("theme", name);
  document.documentElement.dataset.theme = name;
  byId("theme").textContent = `Theme: ${name}`;
}

byId("theme").addEventListener("click", () => {
  theme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]);
});
byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  byId("pause").textContent = paused ? "Resume" : "Pause";
  if (paused) {
    clearTimeout(timer);
    say("off", last ? `paused at ${clock(last.at)}` : "paused");
  } else ask();
});
byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", byId("key-field").value);
  ask();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && !paused) ask();
});

theme(localStorage.getItem("theme"));
say("off", "asking");
ask();
