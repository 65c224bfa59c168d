// Numbers and names as people read them.

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const precise = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

/** A count. 64-bit counts arrive as strings. */
export const count = (value) => grouped.format(Number(value || 0));

/** A rate in a second. */
export const rate = (value) => (value >= 100 ? grouped.format(value) : precise.format(value || 0));

/** Seconds, in the unit that suits them. */
export function duration(seconds) {
  const value = Number(seconds || 0);
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  if (value < 1) return `${(value * 1000).toFixed(0)} ms`;
  if (value < 100) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  if (value < 6000) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${(value / 3600).toFixed(1)} h`;
}

/** The name of an enum's value without its prefix, as words. */
export const word = (value, prefix) => String(value || "").replace(prefix, "").toLowerCase().replaceAll("_", " ");

/** A share as a percentage. */
export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;

/** "1 member", "2 members". */
export const plural = (number, noun) => `${count(number)} ${noun}${Number(number) === 1 ? "" : "s"}`;
