// What the pages share: how they make elements, write figures, and ask the server. Text is set as text, never as HTML.

export const COLOURS = {
  light: ["#0969da", "#bf5700", "#1a7f37", "#8250df", "#cf222e", "#7d5600", "#0e7490", "#57606a"],
  dark: ["#58a6ff", "#f0883e", "#3fb950", "#bc8cff", "#ff7b72", "#d29922", "#39c5cf", "#a3adb8"],
};

export const element = id => document.getElementById(id);
export const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const theme = () => document.documentElement.dataset.theme;
export const many = number => number.toLocaleString("en");
export const clock = seconds => new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });

export function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

// When something was: today by the clock, this year by the day, else by the date.
export function moment(seconds, now = Date.now() / 1000) {
  const then = new Date(seconds * 1000), today = new Date(now * 1000);
  if (then.toDateString() === today.toDateString()) return then.toLocaleTimeString([], { hour12: false });
  const year = then.getFullYear() === today.getFullYear() ? {} : { year: "numeric" };
  const day = { day: "numeric", month: "short", ...year, hour: "2-digit", minute: "2-digit", hour12: false };
  return then.toLocaleString("en-GB", day);
}

export function duration(seconds) {
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${String(Math.floor(seconds % 60)).padStart(2, "0")} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${String(minutes % 60).padStart(2, "0")} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

// As `dtrain_dagster.support.formatting.dollars` has it.
export function money(usd) {
  if (Math.abs(usd) >= 1000) return `$${many(Math.round(usd))}`;
  return `$${usd.toFixed(Math.abs(usd) >= 1 || usd === 0 ? 2 : 4)}`;
}

export class Refused extends Error {}

export async function ask(path) {
  const response = await fetch(path, { cache: "no-store" });
  if (!response.ok) throw new Refused(await response.text());
  return response.json();
}

export function tellAge(error) {
  if (error) console.error(error);
  const why = error instanceof Refused ? error.message : "the dashboard's server does not answer";
  element("note").textContent = error ? `${why}; the figures are old` : `updated ${clock(Date.now() / 1000)}`;
  element("note").classList.toggle("old", Boolean(error));
}
