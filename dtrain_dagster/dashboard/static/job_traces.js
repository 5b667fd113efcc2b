// Traces of steps: asked for while a job trains, then listed with a link to each file.
"use strict";

const traces = { shown: false, known: "", at: 0 };

function buildTraces() {
  const form = make("div", { id: "trace-ask" }), note = make("p", { id: "trace-note", class: "quiet", role: "status" });
  const perfetto = make("a", { href: "https://ui.perfetto.dev" }, "ui.perfetto.dev");
  const how = make("p", {}, "To look at a trace, download it and open the file in ", perfetto, ": it is read in your browser, and sent nowhere.");
  element("part-traces").append(card(form, note, make("ul", { id: "trace-files" }), how));
}

async function pollTraces() {
  const waits = PAGE.orders && orders.last && orders.last.order === "trace" && performance.now() - traces.at > 1000;
  if (!traces.shown || (traces.known && !waits && performance.now() - traces.at < 10000)) return;
  traces.at = performance.now();
  const body = await ask(`${encodeURIComponent(job.id)}/traces.json`);
  const known = JSON.stringify(body);
  if (known === traces.known) return;
  traces.known = known;
  element("trace-files").replaceChildren(...body.map(({ name, rank, step }) => {
    const place = `${encodeURIComponent(job.id)}/traces/${encodeURIComponent(name)}`;
    return make("li", {}, make("a", { href: place, download: name }, `rank ${rank}, until step ${step.toLocaleString("en")}`));
  }));
  element("trace-note").textContent = body.length ? "" : "There is no trace yet. A trace of a few steps says which operations take the time; it is made while the job trains.";
}
