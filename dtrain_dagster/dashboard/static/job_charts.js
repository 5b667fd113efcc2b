// Draws the panels from a job's tracks (dtrain_dagster/dashboard/series.py). Text from events only ever becomes
// textContent or escaped labels.
"use strict";

const MANY = 12; // lines of a chart: more have no legend, and tell their name where one points at them
const SEGMENTS = {
  input: "#d4a72c", forward: "#6cb6ff", backward: "#316dca", communication: "#986ee2", waiting: "#e5534b",
  optimizer: "#46a758", checkpoint: "#2f9aa0", other: "#8b949e",
};

// The charts. A line is a column of a track; "node *" stands for the tracks of all nodes, and one without a label has its
// track's name.
const PANELS = [
  {
    key: "loss", section: "Training", title: "Loss", unit: "loss per sample", kind: "lines", x: "step", wide: true,
    about: "Mean over the samples of all ranks since the report before; validation at each evaluation.",
    lines: [
      { track: "steps", column: "loss", label: "training" },
      { track: "evaluations", column: "loss", label: "validation", marker: true },
    ],
  },
  {
    key: "throughput", section: "Training", title: "Throughput", unit: "samples/s", kind: "lines", x: "time",
    about: "All nodes together while they train, and each node.",
    lines: [
      { track: "steps", column: "samples_per_second", label: "all nodes" },
      { track: "node *", column: "samples_per_second" },
    ],
  },
  {
    key: "ranks", section: "Where the time goes", title: "A step, by rank", unit: "ms per step", kind: "ranks", x: "step",
    about: "Over the newest reports. The others wait for the rank that waits least.", lines: [],
  },
  {
    key: "breakdown", section: "Where the time goes", title: "A step, by what it was spent on", unit: "ms per step",
    kind: "stack", x: "step", wide: true,
    about: "Mean over ranks. Communication: on the network, not hidden by computation. Waiting: for slower ranks.",
    lines: Object.keys(SEGMENTS).map(name => ({ track: "timing", column: name, label: name })),
  },
  {
    key: "busy", section: "Nodes", title: "Utilisation", unit: "%", kind: "lines", x: "time",
    about: "Mean over a node's GPUs; without GPUs, its share of the machine's processors.",
    lines: [{ track: "node *", column: "busy" }],
  },
  {
    key: "memory", section: "Nodes", title: "Memory", unit: "%", kind: "lines", x: "time",
    about: "Share of the GPUs' memory; without GPUs, the ranks' share of the machine's.",
    lines: [{ track: "node *", column: "memory" }],
  },
  {
    key: "timeline", section: "Nodes", title: "When nodes were there", unit: "", kind: "timeline", x: "time",
    about: "A bar for each incarnation of a node.", lines: [],
  },
];

const embedded = id => element(id) && JSON.parse(element(id).textContent);
const PAGE = embedded("page-data"); // whether a server answers, and whether it takes orders
const job = { id: null, token: "", version: 0, tracks: {}, look: null };

// ---- what the charts are made of

const escaped = text => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;");
const local = seconds => (seconds - new Date(seconds * 1000).getTimezoneOffset() * 60) * 1000;
const nodeColour = node => COLOURS[theme()][node % COLOURS[theme()].length];
const rowsOf = name => job.tracks[name] || [];

function matching(track) {
  if (track !== "node *") return [track];
  return Object.keys(job.tracks).filter(name => name.startsWith("node ")).sort((a, b) => nodeOf(a) - nodeOf(b));
}

const nodeOf = name => Number((/^node (\d+)/.exec(name) || [0, 0])[1]);

function lineTraces(panel) {
  const traces = [];
  let number = 0;
  for (const line of panel.lines) {
    for (const name of matching(line.track)) {
      const rows = rowsOf(name).filter(row => row[line.column] !== undefined);
      const isNode = line.track === "node *";
      const label = line.label || name;
      const colour = isNode ? nodeColour(nodeOf(name)) : panel.x === "time" ? css("--ink") : COLOURS[theme()][number++];
      if (!rows.length) continue;
      traces.push({
        type: "scatter", name: label,
        x: rows.map(row => panel.x === "time" ? local(row.time) : row.step), y: rows.map(row => row[line.column]),
        customdata: rows.map(row => clock(row.time)),
        mode: line.marker || rows.length === 1 ? "lines+markers" : "lines", line: { color: colour, width: 1.6 },
        hovertemplate: `${escaped(label)}: %{y:.4~g} (%{customdata})<extra></extra>`,
      });
    }
  }
  return traces;
}

function stackTraces(panel) {
  const rows = rowsOf("timing");
  if (!rows.length) return [];
  return panel.lines.filter(line => rows.some(row => row[line.column] !== undefined)).map(line => ({
    type: "scatter", mode: "lines", stackgroup: "step", name: line.label,
    x: rows.map(row => row.step), y: rows.map(row => row[line.column] || 0), customdata: rows.map(row => clock(row.time)),
    line: { width: 0, color: SEGMENTS[line.column] }, fillcolor: SEGMENTS[line.column],
    hovertemplate: "%{y:.1f} ms",
  }));
}

function rankTraces() {
  const ranks = job.look.ranks;
  if (!ranks) return [];
  return Object.entries(ranks.milliseconds).map(([name, values]) => ({
    type: "bar", name, x: ranks.labels, y: values, marker: { color: SEGMENTS[name] }, hovertemplate: "%{y:.1f} ms",
  }));
}

function timelineTraces() {
  const { presences, now } = job.look;
  const running = job.look.job.ended_at === null && ["running", "queued"].includes(job.look.job.state);
  const until = node => node.ended_at ?? (running ? now : node.last_seen_at ?? node.started_at);
  return presences.length ? [{
    type: "bar", orientation: "h", y: presences.map(node => `node ${node.node_id}`), base: presences.map(node => local(node.started_at)),
    x: presences.map(node => 1000 * Math.max(1, until(node) - node.started_at)),
    marker: { color: presences.map(node => nodeColour(node.node_id)) }, width: 0.6, showlegend: false,
    text: presences.map(node => (node.incarnation > 1 ? `incarnation ${node.incarnation}` : "")), textposition: "inside", insidetextanchor: "start",
    customdata: presences.map(node => `${clock(node.started_at)} to ${clock(until(node))}` +
      (node.exit_codes.length ? `, exit codes ${node.exit_codes.join(", ")}` : "")),
    hovertemplate: "%{y}: %{customdata}<extra></extra>",
  }] : [];
}

const TRACES = { lines: lineTraces, stack: stackTraces, ranks: rankTraces, timeline: timelineTraces };

// ---- how they are drawn

function layoutOf(panel, traces) {
  const axis = { gridcolor: css("--grid"), zeroline: false, linecolor: css("--border"), automargin: true, tickfont: { size: 11 } };
  const title = text => ({ text, font: { size: 11 }, standoff: 6 });
  const xaxis = { ...axis, showgrid: false };
  const yaxis = { ...axis, title: title(panel.unit) };
  if (panel.x === "time") xaxis.type = "date";
  else if (["lines", "stack"].includes(panel.kind)) xaxis.title = title("step");
  if (panel.key !== "loss" && panel.kind === "lines") yaxis.rangemode = "tozero";
  if (panel.kind === "timeline") {
    const nodes = [...new Set(job.look.presences.map(node => node.node_id))].sort((a, b) => b - a).map(node => `node ${node}`);
    Object.assign(yaxis, { type: "category", categoryorder: "array", categoryarray: nodes });
  }
  if (panel.kind === "ranks") xaxis.type = "category";
  if (!traces.length) {
    xaxis.visible = yaxis.visible = false;
  }
  const isWaiting = job.look.job.step === null && ["running", "queued"].includes(job.look.job.state);
  const waiting = isWaiting ? "waiting for the first step" : "not recorded";
  return {
    autosize: true, uirevision: job.id, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "inherit", size: 12, color: css("--muted") }, margin: { l: 44, r: 10, t: 6, b: 26 },
    hovermode: panel.kind === "timeline" || traces.length > MANY ? "closest" : "x unified",
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--border"), font: { color: css("--ink"), size: 12 } },
    showlegend: traces.length > 1 && traces.length <= MANY && panel.kind !== "timeline",
    legend: ["stack", "ranks"].includes(panel.kind)
      ? { x: 1.01, y: 0.5, yanchor: "middle", traceorder: "reversed", font: { size: 11 } }
      : { orientation: "h", x: 0, y: 1, yanchor: "bottom", font: { size: 11 } },
    barmode: panel.kind === "ranks" ? "stack" : "overlay", bargap: 0.35, xaxis, yaxis,
    annotations: traces.length ? [] : [
      { text: waiting, showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5, font: { size: 13 } },
    ],
  };
}

// Where nodes were lost and came back, on the curve of the loss.
function changeTraces(panel) {
  const rows = panel.key === "loss" ? rowsOf("steps").filter(row => row.loss !== undefined) : [];
  const near = step => rows.reduce((best, row) => (Math.abs(row.step - step) < Math.abs(best.step - step) ? row : best));
  const kinds = [["lost", "x", "--bad", "lost"], ["joined", "triangle-up", "--good", "joined"]];
  return !rows.length ? [] : kinds.flatMap(([field, symbol, colour, word]) => {
    const found = job.look.changes.filter(change => change[field].length && change.step !== null);
    return !found.length ? [] : [{
      type: "scatter", mode: "markers", name: `node ${word}`, x: found.map(change => change.step), y: found.map(change => near(change.step).loss),
      marker: { symbol, size: 11, color: css(colour), line: { width: 1, color: css("--card") } }, cliponaxis: false,
      text: found.map(change => `node ${escaped(change[field].join(", "))} ${field === "lost" && change.was_asked ? "left when asked to" : word} at step ${change.step}`), hovertemplate: "%{text}<extra></extra>",
    }];
  });
}

// What a chart shows, for those who do not see it.
function describe(panel, traces) {
  const figure = value => typeof value === "number" ? String(Number(value.toPrecision(4))) : value;
  const latest = ["lines", "stack"].includes(panel.kind) ? traces.slice(0, MANY).map(trace => `${trace.name}: ${figure(trace.y[trace.y.length - 1])}`) : [];
  const unit = panel.unit ? ` In ${panel.unit}.` : "";
  return `${panel.title}. ${panel.about}${unit} ${latest.length ? `Latest: ${latest.join("; ")}.` : traces.length ? "" : "Not recorded."}`.trim();
}

function uses(panel, changed) {
  return panel.lines.length === 0 || panel.lines.some(line => matching(line.track).some(name => changed.includes(name)));
}

function draw(changed) {
  for (const panel of PANELS) {
    const traces = [...TRACES[panel.kind](panel), ...changeTraces(panel)];
    const box = element(`panel-${panel.key}`);
    if (changed && !uses(panel, changed)) continue;
    if (panel.key === "busy" || panel.key === "memory") {
      box.querySelector("h3").textContent = `${panel.title} of ${job.look.has_gpus ? "the GPUs" : "the processors (no GPU here)"}`;
      if (panel.key === "memory" && !job.look.has_gpus) box.querySelector("h3").textContent = "Memory of the ranks (no GPU here)";
    }
    const chart = box.querySelector(".chart");
    chart.setAttribute("role", "img");
    chart.setAttribute("aria-label", describe(panel, traces));
    Plotly.react(chart, traces, layoutOf(panel, traces), { displayModeBar: false, responsive: true });
  }
}

function build() {
  const sections = new Map();
  for (const panel of PANELS) {
    if (!sections.has(panel.section)) {
      const grid = make("div", "grid");
      sections.set(panel.section, grid);
      element("panels").append(make("h2", "", panel.section), grid);
    }
    const box = make("section", panel.wide ? "panel wide" : "panel");
    box.id = `panel-${panel.key}`;
    const about = make("p", "", panel.about);
    about.title = panel.about;
    box.append(make("h3", "", panel.title), about, make("div", "chart"));
    sections.get(panel.section).append(box);
  }
}
