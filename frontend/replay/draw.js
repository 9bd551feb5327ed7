"use strict";
const figures = JSON.parse(document.getElementById("charts").textContent);
const config = { responsive: true, displayModeBar: false, showTips: false };

// Colours are named in the figures and defined in the style sheet, once for each scheme.
function resolved(value, style) {
  if (typeof value === "string") {
    const name = /^var\((--[\w-]+)\)$/.exec(value);
    return name ? style.getPropertyValue(name[1]).trim() : value;
  }
  if (Array.isArray(value)) return value.map((each) => resolved(each, style));
  if (value && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, resolved(each, style)]));
  }
  return value;
}

function draw() {
  const style = getComputedStyle(document.documentElement);
  for (const [name, figure] of Object.entries(figures)) {
    const { data, layout } = resolved(figure, style);
    Plotly.react("chart-" + name, data, layout, config);
  }
}

// Plotly's icicle reacts to the mouse only, and redraws its pieces when one is opened. This makes it
// one stop of the tab key, inside which arrow keys move between the pieces.
function reachable(chart) {
  const pieces = () => Array.from(chart.querySelectorAll(".pathbar, .slice"));
  let last = "";
  let moving = false; // Plotly ignores clicks while it zooms
  let next = ""; // the piece that was chosen meanwhile
  const named = (name) => pieces().find((piece) => piece.getAttribute("aria-label") === name);
  const open = (piece) => piece.dispatchEvent(new MouseEvent("click", { bubbles: true }));
  chart.on("plotly_transitioning", () => { moving = true; });
  chart.on("plotly_transitioned", () => {
    moving = false;
    const piece = next && named(next);
    next = "";
    if (piece) open(piece);
  });
  const choose = (piece) => {
    for (const each of pieces()) each.setAttribute("tabindex", each === piece ? "0" : "-1");
    piece.focus();
  };
  const prepare = () => {
    const all = pieces();
    for (const piece of all) {
      const name = piece.querySelector("text")?.textContent || "a prefix too narrow for its text";
      piece.setAttribute("role", "button");
      piece.setAttribute("aria-label", name);
      if (!piece.hasAttribute("tabindex")) piece.setAttribute("tabindex", "-1");
    }
    if (all.length && !all.some((piece) => piece.tabIndex === 0)) {
      all[0].setAttribute("tabindex", "0");
    }
    const same = last && named(last);
    if (same && document.activeElement === document.body) choose(same);
  };
  chart.addEventListener("keydown", (event) => {
    const piece = event.target.closest(".pathbar, .slice");
    if (!piece) return;
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (step) {
      const all = pieces();
      choose(all[Math.min(all.length - 1, Math.max(0, all.indexOf(piece) + step))]);
    } else if (event.key === "Enter" || event.key === " ") {
      last = piece.getAttribute("aria-label");
      if (moving) next = last;
      else open(piece);
    } else {
      return;
    }
    event.preventDefault();
  });
  chart.addEventListener("focusout", () => { last = ""; });
  new MutationObserver(prepare).observe(chart, { childList: true, subtree: true });
  prepare();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
if (figures.prefix) reachable(document.getElementById("chart-prefix"));
