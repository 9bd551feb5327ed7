// Makes elements. Text is always inserted as text, never as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else if (name === "style") Object.entries(value).forEach(([k, v]) => element.style.setProperty(k, v));
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** An HTML element with attributes, listeners (functions), style properties and children. */
export function h(tag, properties, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** An SVG element, with the same arguments as `h`. */
export function s(tag, properties, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

export function byId(id) {
  return document.getElementById(id);
}

const shown = new WeakMap();

/**
 * Puts the elements that `make` returns into `container`, unless `data` is as in the last call.
 *
 * So a selection of text stays until something changes, and focus and opened details stay also then.
 */
export function show(container, data, make) {
  const key = JSON.stringify(data);
  if (shown.get(container) === key) return;
  shown.set(container, key);
  const focused = container.contains(document.activeElement)
    ? document.activeElement.dataset.key : undefined;
  const open = new Set(
    [...container.querySelectorAll("details[open]")].map((each) => each.dataset.key));
  container.replaceChildren(...[make()].flat());
  for (const each of container.querySelectorAll("details")) each.open = open.has(each.dataset.key);
  if (focused !== undefined) {
    [...container.querySelectorAll("[data-key]")].find((each) => each.dataset.key === focused)
      ?.focus({ preventScroll: true });
  }
}

/** A table in a frame that scrolls if it is too large. Columns: {name, number?, class?}. */
export function table(label, columns, rows) {
  return h("div", { class: "scroll", role: "region", "aria-label": label, tabindex: "0" },
    h("table", null,
      h("thead", null, h("tr", null, columns.map((column) =>
        h("th", { scope: "col", class: column.number ? "number" : column.class }, column.name)))),
      h("tbody", null, rows.map((row) => h("tr", null, row.map((cell, at) =>
        h(at ? "td" : "th", {
          scope: at ? null : "row",
          class: columns[at].number ? "number" : columns[at].class,
        }, cell)))))));
}
