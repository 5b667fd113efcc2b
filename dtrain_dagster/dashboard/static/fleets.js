"use strict";

// The page of fleets: it asks for one fleet every two seconds and draws it. All text is set as text, never as HTML.

const EVERY_MS = 2000;
const colour = number => COLOURS[theme()][number % COLOURS[theme()].length];
const took = seconds => seconds === null ? "" : duration(seconds);
const at = seconds => new Date(1000 * seconds);

function headline(fleet) {
  const figures = [
    ["jobs over", `${fleet.over} of ${fleet.jobs.length}`, fleet.is_run ? "" : fleet.over < fleet.jobs.length ? "nobody runs it now" : ""],
    ["nodes", `${fleet.busy_nodes} of ${fleet.nodes}`, "in use"],
    ["dollars", money(fleet.used_usd), `of ${money(fleet.budget_usd)}`],
    ["promised", money(fleet.promised_usd), "when all nodes stop by themselves"],
    ["ETA", took(fleet.ends_in_seconds) || "–", [
      fleet.may_grow ? "of the jobs that are known" : "", fleet.left_out ? `${fleet.left_out} not expected to succeed` : "",
    ].filter(Boolean).join(", ")],
    ["deadline", fleet.deadline === null ? "–" : at(fleet.deadline).toLocaleTimeString(), at(fleet.deadline).toLocaleDateString()],
  ];
  element("headline").replaceChildren(...figures.map(([label, value, note]) => {
    const parts = [["label", label], ["value", value], ["note", note]];
    return make("div", "figure", ...parts.map(([name, text]) => make("span", name, text)));
  }));
}

function table(fleet) {
  element("rows").replaceChildren(...fleet.jobs.map(job => {
    const row = make("tr"), loss = job.valid_loss === null ? job.loss : job.valid_loss;
    const name = make("td", {}, make("a", { href: `jobs/${encodeURIComponent(job.job_id)}` }, job.job_id));
    const step = job.step === null ? "" : job.total_steps ? `${job.step}/${job.total_steps}` : `${job.step}`;
    row.append(name, make("td", { "data-state": job.state }, job.state), ...[
      job.priority, job.nodes || "", step, loss === null ? "" : loss.toFixed(4), took(job.begins_in_seconds),
      took(job.ends_in_seconds), job.launches || "", job.launches ? money(job.usd) : "", job.why,
    ].map(text => make("td", {}, `${text}`)));
    return row;
  }));
}

// Where the nodes of some jobs came and went, in order: [time, change].
const changes = jobs => jobs.flatMap(job => job.presence.flatMap(([began, ended]) => [[began, 1], [ended, -1]]))
  .sort((a, b) => a[0] - b[0]);

function layout(title, most, shapes) {
  return {
    height: 260, margin: { l: 56, r: 16, t: 24, b: 36 }, shapes,
    paper_bgcolor: css("--card"), plot_bgcolor: css("--card"), font: { color: css("--ink"), size: 12 },
    xaxis: { type: "date", gridcolor: css("--grid") },
    yaxis: { title: { text: title }, gridcolor: css("--grid"), range: [0, 1.15 * most] },
    legend: { orientation: "h", y: -0.18 }, showlegend: true, hovermode: "x unified",
  };
}

const line = (y, words) => ({
  type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line: { color: css("--muted"), dash: "dash", width: 1 },
  label: { text: words, textposition: "end", yanchor: "bottom", font: { color: css("--muted"), size: 11 } },
});

function nodesChart(fleet) {
  const begun = fleet.jobs.filter(job => job.presence.length);
  const moments = [...new Set(changes(begun).map(([time]) => time))].sort((a, b) => a - b);
  const traces = begun.map((job, number) => {
    const own = changes([job]);
    let here = 0, next = 0;
    const counts = moments.map(moment => {
      while (next < own.length && own[next][0] <= moment) here += own[next++][1];
      return here;
    });
    return {
      name: job.job_id, x: moments.map(at), y: counts, stackgroup: "nodes", mode: "lines",
      line: { shape: "hv", width: 0.5, color: colour(number) },
    };
  });
  Plotly.react("nodes", traces, layout("nodes", fleet.nodes, [line(fleet.nodes, "nodes there are")]), { displayModeBar: false, responsive: true });
}

function dollarsChart(fleet) {
  const all = changes(fleet.jobs), x = [], y = [];
  let here = 0, paid = 0, before = all.length ? all[0][0] : 0;
  for (const [time, change] of all) {
    paid += here * (time - before) * fleet.usd_per_node_hour / 3600;
    here += change;
    before = time;
    x.push(at(time));
    y.push(paid);
  }
  const trace = { name: "paid", x, y, mode: "lines", line: { color: colour(0) }, fill: "tozeroy" };
  Plotly.react("dollars", [trace], layout("dollars", Math.max(fleet.budget_usd, paid), [line(fleet.budget_usd, "budget")]), { displayModeBar: false, responsive: true });
}

const wanted = () => decodeURIComponent(location.hash.slice(1));

async function look() {
  try {
    const names = await ask("fleets.json"), known = [...element("names").options].map(option => option.value);
    if (names.join("\n") !== known.join("\n")) {
      element("names").replaceChildren(...names.map(name => new Option(name, name)));
    }
    const isEmpty = names.length === 0;
    element("empty").hidden = !isEmpty;
    element("empty").textContent = "no fleets yet: `dtrain fleet FILE` begins one";
    for (const part of ["choice", "fleet"]) element(part).hidden = isEmpty;
    const name = names.includes(wanted()) ? wanted() : names[0];
    if (name) {
      element("names").value = name;
      const fleet = await ask(`fleets/${encodeURIComponent(name)}.json`);
      headline(fleet);
      table(fleet);
      nodesChart(fleet);
      dollarsChart(fleet);
      element("nodes").setAttribute("aria-label", `nodes over time: ${fleet.busy_nodes} of ${fleet.nodes} are in use now`);
      element("dollars").setAttribute("aria-label", `dollars over time: ${money(fleet.used_usd)} of ${money(fleet.budget_usd)} are paid`);
    }
    element("note").textContent = "";
  } catch (error) {
    element("note").textContent = error.message;
  }
}

document.addEventListener("themechange", look);
element("names").addEventListener("change", () => { location.hash = element("names").value; });
window.addEventListener("hashchange", look);
look();
setInterval(look, EVERY_MS);
