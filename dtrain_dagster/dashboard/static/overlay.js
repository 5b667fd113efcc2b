// Two to eight runs in one chart, with what they differ in (`dtrain_dagster/dashboard/overlay.py`). The address keeps
// which runs, over what, and which losses.

const POLL_MILLISECONDS = 5000; // while one of them runs
const MARKS = ["circle", "square", "diamond", "triangle-up", "cross", "x", "star", "triangle-down"];
const AXES = { step: "optimizer steps", samples: "training samples", usd: "dollars paid for nodes, without those of probes" };
let state = readState();
let answer = null;

function readState() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const one = (name, options) => options.includes(asked.get(name)) ? asked.get(name) : options[0];
  return {
    jobs: (asked.get("jobs") || "").split(",").filter(Boolean),
    x: one("x", Object.keys(AXES)), show: one("show", ["both", "validation", "training"]),
  };
}

function change(patch) {
  const before = state.jobs.join();
  state = { ...state, ...patch };
  const more = [state.x !== "step" && `x=${state.x}`, state.show !== "both" && `show=${state.show}`].filter(Boolean);
  history.pushState(null, "", `#${[`jobs=${state.jobs.map(encodeURIComponent).join(",")}`, ...more].join("&")}`);
  if (state.jobs.join() === before) draw();
  else look();
}

// ---- the chart

const colour = number => COLOURS[theme()][number % COLOURS[theme()].length];
const escaped = text => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;");

const letterSize = () => parseFloat(getComputedStyle(document.body).fontSize);

function traces() {
  const scale = letterSize() / 14;
  return answer.runs.flatMap((run, number) => {
    const line = (curve, more) => curve.loss.length && curve[state.x] ? [{
      type: "scatter", x: curve[state.x], y: curve.loss, showlegend: false,
      hovertemplate: `${escaped(run.id)}, ${more.name}: %{y:.4~f}<extra></extra>`, ...more,
    }] : [];
    const training = line(run.training, { name: "training", mode: "lines", opacity: 0.55, line: { color: colour(number), width: 1.3 * scale, dash: "dot" } });
    const validation = line(run.validation, {
      name: "validation", mode: "lines+markers", line: { color: colour(number), width: 2 * scale }, marker: { symbol: MARKS[number], size: 8 * scale },
    });
    return [...(state.show === "validation" ? [] : training), ...(state.show === "training" ? [] : validation)];
  });
}

function layout(drawn) {
  const size = letterSize();
  const axis = { gridcolor: css("--grid"), zeroline: false, linecolor: css("--border"), automargin: true };
  return {
    autosize: true, margin: { l: 5 * size, r: size, t: size, b: 3.5 * size }, hovermode: "closest", uirevision: state.x,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family: "inherit", size: 0.9 * size, color: css("--muted") },
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--border"), font: { color: css("--ink"), size: 0.9 * size } },
    xaxis: { ...axis, title: { text: AXES[state.x] }, tickprefix: state.x === "usd" ? "$" : "", rangemode: "tozero" },
    yaxis: { ...axis, title: { text: "loss" } },
    annotations: drawn.length ? [] : [{ text: "not recorded for these runs", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5 }],
  };
}

// ---- what is around it

function legendOf(run, number) {
  const swatch = make("span", { class: "swatch", "aria-hidden": "true" });
  swatch.style.borderTopColor = colour(number);
  const item = make("li", {}, swatch, make("a", { href: `jobs/${encodeURIComponent(run.id)}` }, run.id));
  if (answer.runs.length > 2) {
    const leave = make("button", { type: "button", "aria-label": `leave out ${run.id}` }, "✕");
    leave.addEventListener("click", () => {
      change({ jobs: state.jobs.filter(id => id !== run.id) });
      element("x").focus();
    });
    item.append(leave);
  }
  return item;
}

function tableOf(name, title, rows) {
  const heads = answer.runs.map((run, number) => {
    const swatch = make("span", { class: "swatch", "aria-hidden": "true" });
    swatch.style.borderTopColor = colour(number);
    return make("th", { scope: "col" }, swatch, ` ${run.id}`);
  });
  element(name).replaceChildren(
    make("thead", {}, make("tr", {}, make("th", { scope: "col" }, title), ...heads)),
    make("tbody", {}, ...rows.map(row => make("tr", {}, make("th", { scope: "row" }, row.name), ...row.values.map((value, place) => {
      const best = (row.best || []).includes(place);
      return make("td", { class: best ? "best" : null }, value || "–", best ? " (best)" : "");
    })))),
  );
}

function draw() {
  if (!answer) return;
  element("all").hidden = false;
  element("empty").hidden = true;
  document.title = `${answer.runs.length} runs · dtrain: overlay`;
  element("x").value = state.x;
  element("show").value = state.show;
  element("legend").replaceChildren(...answer.runs.map(legendOf));
  element("words").replaceChildren(...answer.runs.map(run => make("li", {}, run.words)));
  tableOf("results", "result", answer.results);
  tableOf("settings", "setting", answer.settings);
  element("settings").parentElement.hidden = !answer.settings.length;
  element("alike").hidden = answer.settings.length > 0;
  const drawn = traces();
  Plotly.react("chart", drawn, layout(drawn), { displayModeBar: false, responsive: true });
}

function refuse(why) {
  answer = null;
  element("all").hidden = true;
  element("empty").hidden = false;
  element("empty").textContent = why;
}

// ---- where it comes from

async function look() {
  element("jobs").href = state.jobs.length ? `./#sel=${state.jobs.join(",")}` : "./";
  if (state.jobs.length < 2) {
    refuse("Select two to eight jobs in the table of jobs, and overlay them.");
    return;
  }
  const asked = state.jobs.join();
  try {
    const found = await ask(`overlay.json?${state.jobs.map(id => `job=${encodeURIComponent(id)}`).join("&")}`);
    if (asked !== state.jobs.join()) return;
    answer = found;
    draw();
    tellAge(null);
  } catch (error) {
    if (!answer) refuse(error.message);
    tellAge(error);
  }
}

element("x").addEventListener("change", event => change({ x: event.target.value }));
element("show").addEventListener("change", event => change({ show: event.target.value }));
document.addEventListener("themechange", draw);
window.addEventListener("popstate", () => {
  state = readState();
  look();
});
setInterval(() => document.hidden || !answer || !answer.live || look(), POLL_MILLISECONDS);
look();
