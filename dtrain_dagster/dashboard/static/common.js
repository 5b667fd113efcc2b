// What the pages share: how they make elements, write figures, and ask the server. Text is set as text, never as HTML.
// It is no module: a saved report, which has its scripts within it, has it too.
"use strict";

const COLOURS = {
  light: ["#0969da", "#bf5700", "#1a7f37", "#8250df", "#cf222e", "#7d5600", "#0e7490", "#57606a"],
  dark: ["#58a6ff", "#f0883e", "#3fb950", "#bc8cff", "#ff7b72", "#d29922", "#39c5cf", "#a3adb8"],
};

const element = id => document.getElementById(id);
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const dark = matchMedia("(prefers-color-scheme: dark)");
const theme = () => dark.matches ? "dark" : "light";
const many = number => number.toLocaleString("en");
const clock = seconds => new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });

// An element. A text in the place of attributes is its class; what is not there (null, undefined, false) is left out.
function make(tag, attributes = {}, ...children) {
  const isThere = value => value !== null && value !== undefined && value !== false;
  const given = typeof attributes === "string" ? { class: attributes || null } : attributes;
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) if (isThere(value)) made.setAttribute(name, value === true ? "" : value);
  made.append(...children.filter(isThere));
  return made;
}

class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function ask(path, signal) {
  const response = await fetch(path, { cache: "no-store", signal });
  if (!response.ok) throw new Refused(await response.text(), response.status);
  return response.json();
}

function tellAge(error) {
  if (error) console.error(error);
  const why = error instanceof Refused ? error.message : "the dashboard's server does not answer";
  element("note").textContent = error ? `${why}; the figures are old` : `updated ${clock(Date.now() / 1000)}`;
  element("note").classList.toggle("old", Boolean(error));
}
