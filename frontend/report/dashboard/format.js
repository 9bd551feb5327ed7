// Numbers, times and pieces of text as strings, written as in the terminal's report.

const integer = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export const count = (number) => integer.format(number);
export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

/** A share with one decimal; of two that are equally near, the even one, as in the report's Python. */
export function percent(share) {
  const number = 100 * share;
  if (Math.abs((4 * number) % 2) !== 1) return `${number.toFixed(1)}%`;
  return `${(2 * Math.round((10 * number - 0.5) / 2) / 10).toFixed(1)}%`;
}

/** A count with three digits and a unit: 950, 12.5k, 3M. */
export function short(number) {
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (number >= 0.9995 * size) return digits(number / size) + unit;
  }
  return digits(number);
}

function digits(number) {
  return number < 999.5 ? String(Number(number.toPrecision(3))) : number.toFixed(0);
}

/** A time for people: its one or two largest units; below a minute, tenths of a second. */
export function duration(seconds, units = 2) {
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  let left = Math.round(seconds);
  const parts = [];
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]]) {
    const whole = Math.floor(left / size);
    left -= whole * size;
    if (whole) parts.push(`${whole} ${unit}`);
    if (parts.length && (parts.length === units || !whole)) break;
  }
  return parts.join(" ");
}

/** A latency in seconds as text; "–" for null. */
export function latency(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.9995) return `${digits(1000 * seconds)} ms`;
  if (seconds < 99.95) return `${digits(seconds)} s`;
  return duration(seconds);
}

/** The time of day of seconds since the epoch. */
export function clock(at, withSeconds = true) {
  return new Date(1000 * at).toLocaleTimeString("en-GB", {
    hour: "2-digit", minute: "2-digit", second: withSeconds ? "2-digit" : undefined,
  });
}

/** Text with line breaks and other characters that do not print made visible. */
export function visible(text) {
  return text.replace(/\r\n?/g, "\n").replace(/\n/g, "↵")
    .replace(/[\p{Cc}\p{Cf}\p{Co}\p{Cs}]/gu, "·");
}

/** A piece of a prompt: its text, cut to `characters` from its start or end; or length and hash. */
export function piece(part, characters = Infinity, from = "start") {
  if (part.text === null) return `${plural(part.tokens, "token")} #${part.hash}`;
  const text = [...visible(part.text)];
  if (text.length <= characters) return text.join("");
  return from === "end" ? `…${text.slice(-characters).join("")}` : `${text.slice(0, characters).join("")}…`;
}
