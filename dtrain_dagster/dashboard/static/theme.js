// Light, dark, or as the system has it: kept over pages and visits. It runs before a page is drawn, so that none flashes.
"use strict";

(() => {
  const KEY = "dtrain-theme";
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let chosen = "auto";
  try {
    const kept = localStorage.getItem(KEY);
    if (["light", "dark"].includes(kept)) chosen = kept;
  } catch { /* a browser that keeps nothing: the system decides */ }

  function apply() {
    const name = chosen === "auto" ? (dark.matches ? "dark" : "light") : chosen;
    document.documentElement.dataset.theme = name;
    document.dispatchEvent(new CustomEvent("themechange", { detail: name }));
  }

  function choose(name) {
    chosen = name;
    try {
      localStorage.setItem(KEY, name);
    } catch { /* as above */ }
    apply();
  }

  apply();
  dark.addEventListener("change", apply);
  window.addEventListener("storage", event => {
    if (event.key !== KEY) return;
    chosen = event.newValue || "auto";
    document.getElementById("theme").value = chosen;
    apply();
  });
  document.addEventListener("DOMContentLoaded", () => {
    const select = document.getElementById("theme");
    select.value = chosen;
    select.addEventListener("change", () => choose(select.value));
  });
})();
