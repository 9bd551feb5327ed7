// Line charts as SVG, one unit a pixel, with a crosshair for mouse and arrow keys, and a table.

import { h, s, table } from "./dom.js";

const LEFT = 46, RIGHT = 10, TOP = 10, BOTTOM = 24;

/**
 * A chart; the point that is examined stays chosen when its data change.
 *
 * Its data are a figure {label, x, xText(i), xTicks: [[x, text]], log?, yMax, yText, yTicks, series, bars?,
 * marks?, stacked?}. A series is {name, values, kind: "line" | "dots", colour, area?}; values may be null.
 * With `stacked` each series stands on the one before it, so that the last one's line is their sum.
 * `bars`, drawn below the lines, have a scale of their own: {name, values, text}.
 */
export class Chart {
  constructor(container) {
    this.container = container;
    this.figure = null;
    this.at = null;
    this.picture = s("svg", {
      role: "img", tabindex: "0", class: "plot",
      pointermove: (event) => this.point(event),
      pointerleave: () => this.move(null),
      blur: () => this.move(null),
      keydown: (event) => this.key(event),
    });
    this.tip = h("div", { class: "tip", "aria-live": "polite" });
    this.tip.hidden = true;
    this.keys = h("ul", { class: "keys", "aria-hidden": "true" });
    this.details = h("details", null, h("summary", null, "The figures"));
    this.details.addEventListener("toggle", () => this.tabulate());
    container.replaceChildren(
      this.keys, h("div", { class: "frame" }, this.picture, this.tip), this.details);
    new ResizeObserver(() => this.draw()).observe(container);
  }

  update(figure) {
    this.figure = figure;
    this.floors = floors(figure);
    if (this.at !== null && this.at >= figure.x.length) this.at = null;
    this.draw();
    this.tabulate();
  }

  draw() {
    const figure = this.figure, width = this.container.clientWidth;
    if (!figure || !width) return;
    const height = this.container.classList.contains("tall") ? 250 : 150;
    const x = scale(figure.x, LEFT, width - RIGHT, figure.log);
    const y = (value) => height - BOTTOM - (value / figure.yMax) * (height - BOTTOM - TOP);
    this.place = { x, y, width, height };
    this.picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.picture.setAttribute("height", height);
    this.picture.setAttribute("aria-label", figure.label);
    this.keys.replaceChildren(...figure.series.map((each) => h("li", null,
      h("i", { class: `${each.kind} ${each.colour}` }), each.name)));
    this.keys.hidden = figure.series.length < 2;
    const parts = [];
    for (const value of figure.yTicks) {
      parts.push(
        s("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
        s("text", { class: "tick", x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" },
          figure.yText(value)));
    }
    let free = -Infinity; // a label that would touch the one before is left out
    for (const [value, text] of figure.xTicks) {
      const middle = x(value), half = 3.6 * text.length;
      const left = Math.min(middle, width - half) - half;
      if (left < free || middle < LEFT - 1) continue;
      free = left + 2 * half + 12;
      parts.push(s("text", { class: "tick", x: left + half, y: height - 6, "text-anchor": "middle" }, text));
    }
    if (figure.bars) parts.push(...this.bars(figure, x, height));
    figure.series.forEach((series, n) => parts.push(...this.series(figure, series, this.floors[n], x, y)));
    for (const mark of figure.marks ?? []) {
      parts.push(s("circle", { class: `mark ${mark.colour}`, cx: x(mark.x), cy: y(mark.y), r: 6 }));
    }
    this.cross = s("g", { class: "cross" });
    this.picture.replaceChildren(...parts, this.cross);
    this.move(this.at);
  }

  bars(figure, x, height) {
    const most = Math.max(...figure.bars.values);
    if (!most) return [];
    const room = 0.3 * (height - TOP - BOTTOM);
    return figure.bars.values.map((value, i) => {
      const right = x(figure.x[i]), left = i ? x(figure.x[i - 1]) : right - 4;
      const tall = Math.max(value ? 1 : 0, (room * value) / most);
      return s("rect", {
        class: "volume", x: left + 0.5, width: Math.max(0.5, right - left - 1),
        y: height - BOTTOM - tall, height: tall,
      });
    });
  }

  series(figure, series, floor, x, y) {
    const parts = [];
    for (const run of runs(series.values)) {
      const points = run.map((i) => [x(figure.x[i]), y(Math.min(floor[i] + series.values[i], figure.yMax))]);
      if (series.kind === "dots" && points.length > 1) {
        parts.push(s("path", { class: `dots ${series.colour}`, d: path(points) }));
        continue;
      }
      if (series.area && points.length > 1) {
        const below = run.map((i) => [x(figure.x[i]), y(floor[i])]).reverse();
        parts.push(s("path", { class: `area ${series.colour}`, d: `${path([...points, ...below])}Z` }));
      }
      if (points.length > 1) parts.push(s("path", { class: `line ${series.colour}`, d: path(points) }));
      else parts.push(s("circle", { class: `mark ${series.colour}`, cx: points[0][0], cy: points[0][1], r: 3 }));
    }
    return parts;
  }

  point(event) {
    if (!this.figure?.x.length) return;
    const at = event.clientX - this.picture.getBoundingClientRect().left;
    let best = 0;
    this.figure.x.forEach((value, i) => {
      if (Math.abs(this.place.x(value) - at) < Math.abs(this.place.x(this.figure.x[best]) - at)) best = i;
    });
    this.move(best);
  }

  key(event) {
    const last = (this.figure?.x.length ?? 0) - 1;
    const to = {
      ArrowLeft: (this.at ?? last + 1) - 1, ArrowRight: (this.at ?? -1) + 1, Home: 0, End: last,
    }[event.key];
    if (event.key === "Escape") this.move(null);
    if (to === undefined || last < 0) return;
    event.preventDefault();
    this.move(Math.max(0, Math.min(last, to)));
  }

  move(at) {
    this.at = at;
    const figure = this.figure;
    if (!this.cross) return;
    this.tip.hidden = at === null;
    this.cross.replaceChildren();
    if (at === null) return;
    const { x, y, width, height } = this.place;
    const left = x(figure.x[at]);
    this.cross.append(s("line", { x1: left, x2: left, y1: TOP, y2: height - BOTTOM }));
    figure.series.forEach((series, n) => {
      const value = series.values[at];
      if (value !== null && value !== undefined) {
        this.cross.append(s("circle", {
          class: `mark ${series.colour}`, cx: left, cy: y(Math.min(this.floors[n][at] + value, figure.yMax)), r: 4,
        }));
      }
    });
    this.tip.replaceChildren(h("b", null, figure.xText(at)), ...this.row(at).map(([name, text, colour]) =>
      h("span", null, colour ? h("i", { class: colour }) : null, `${name} ${text}`)));
    this.tip.style.setProperty("left", `${Math.min(Math.max(left, 80), width - 80)}px`);
  }

  row(at) {
    const { series, bars, valueText, yText } = this.figure;
    const text = valueText ?? yText;
    const found = series.filter((each) => each.values[at] !== null && each.values[at] !== undefined)
      .map((each) => [each.name, text(each.values[at]), each.colour]);
    return bars ? [...found, [bars.name, bars.text(bars.values[at]), null]] : found;
  }

  tabulate() {
    this.details.hidden = !this.figure?.x.length;
    if (!this.details.open || !this.figure) return;
    const { series, bars, x, xText, xName, valueText, yText } = this.figure;
    const text = valueText ?? yText;
    const columns = [
      { name: xName }, ...series.map(({ name }) => ({ name, number: true })),
      ...(bars ? [{ name: bars.name, number: true }] : []),
    ];
    const rows = x.map((_, i) => [
      xText(i), ...series.map(({ values }) => (values[i] === null ? "–" : text(values[i]))),
      ...(bars ? [bars.text(bars.values[i])] : []),
    ]).reverse();
    const fresh = table(this.figure.label, columns, rows);
    const old = this.details.querySelector(".scroll");
    if (old) old.replaceChildren(...fresh.children);
    else this.details.append(fresh);
  }
}

function scale(values, from, to, log) {
  const of = log ? Math.log : (value) => value;
  const low = of(values[0] ?? 0), high = of(values.at(-1) ?? 1);
  return (value) => (high > low ? from + ((of(value) - low) / (high - low)) * (to - from) : (from + to) / 2);
}

/** For each series, the heights on which its values stand. */
function floors({ x, series, stacked }) {
  const sums = x.map(() => 0);
  return series.map(({ values }) => {
    const below = [...sums];
    if (stacked) values.forEach((value, i) => { sums[i] += value ?? 0; });
    return below;
  });
}

/** The indices of values, in lists that are interrupted by null. */
function runs(values) {
  const found = [];
  values.forEach((value, i) => {
    if (value === null || value === undefined) return;
    if (i && values[i - 1] !== null && values[i - 1] !== undefined) found.at(-1).push(i);
    else found.push([i]);
  });
  return found;
}

const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)},${y.toFixed(1)}`).join("");

/** Round numbers from 0 up to at least `most`, in up to five steps. */
export function ticks(most) {
  if (!(most > 0)) return [0, 1];
  const power = 10 ** Math.floor(Math.log10(most / 3));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => most / each <= 5);
  const count = Math.ceil(most / step - 1e-9);
  return Array.from({ length: count + 1 }, (_, i) => i * step);
}
