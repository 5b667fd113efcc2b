// Traces of steps: asked for while a job trains, then drawn as a flame graph or in order of time, with a table of the
// operations that take the time.
"use strict";

const traces = { name: "", view: "flame", show: "", shown: false, pictures: null, known: "", at: 0 };
const VIEWS = { flame: "flame graph", time: "in order of time" };
const SHOWN = { operations: "operations", python: "Python and operations" };
const NO_PYTHON = "This trace holds no Python functions: it was requested without them, or by an older version.";

// What is drawn: with Python's functions where the trace holds them, unless somebody wants the operations alone.
const shownOf = () => traces.show === "operations" || !traces.pictures.python ? "operations" : "python";

function buildTraces() {
  const part = element("part-traces");
  const bar = make("div", "bar");
  const label = make("label", "", "trace ");
  const select = make("select");
  select.id = "trace-name";
  label.append(select);
  const views = choiceOf("view", VIEWS), shown = choiceOf("show", SHOWN);
  const file = make("a", "", "the file, for Perfetto");
  file.id = "trace-file";
  bar.append(label, views, shown, file);
  const note = make("p", "quiet");
  note.id = "trace-note";
  note.setAttribute("role", "status");
  const chart = make("div", "flame");
  chart.id = "trace-chart";
  const heavy = make("div");
  heavy.id = "trace-table";
  const form = make("div");
  form.id = "trace-ask";
  part.append(card(form, bar, note, chart, heavy));
  select.addEventListener("change", () => {
    traces.name = select.value;
    setPlace({ trace: traces.name });
    loadTrace();
  });
  document.addEventListener("themechange", () => traces.pictures && traces.shown && drawTrace());
}

// Buttons of which one is pressed; the address keeps it.
function choiceOf(name, choices) {
  const group = make("span");
  group.setAttribute("role", "group");
  group.setAttribute("aria-label", name);
  for (const [choice, text] of Object.entries(choices)) {
    const button = make("button", "", text);
    button.type = "button";
    button.id = `${name}-${choice}`;
    button.addEventListener("click", () => {
      traces[name] = choice;
      setPlace({ [name]: choice });
      drawTrace();
    });
    group.append(button, " ");
  }
  return group;
}

const traceWords = ({ rank, step }) => `rank ${rank}, until step ${step.toLocaleString("en")}`;

async function pollTraces() {
  const waits = PAGE.orders && orders.last && orders.last.order === "trace" && performance.now() - traces.at > 1000;
  if (!traces.shown || (traces.known && !waits && performance.now() - traces.at < 10000)) return;
  traces.at = performance.now();
  const body = await ask(`${encodeURIComponent(job.id)}/traces.json`);
  const known = JSON.stringify(body);
  if (known === traces.known) return;
  const had = traces.known;
  traces.known = known;
  const select = element("trace-name");
  select.replaceChildren(...body.map(trace => {
    const option = make("option", "", traceWords(trace));
    option.value = trace.name;
    return option;
  }));
  const isThere = body.some(trace => trace.name === traces.name);
  if (!isThere || had) traces.name = body.length ? body[0].name : ""; // a new one is what was waited for
  select.value = traces.name;
  const buttons = [...Object.keys(VIEWS).map(view => `view-${view}`), ...Object.keys(SHOWN).map(show => `show-${show}`)];
  for (const box of [select.parentElement, element("trace-file"), ...buttons.map(element)]) box.hidden = !body.length;
  if (body.length) await loadTrace();
  else element("trace-note").textContent = "There is no trace yet. A trace of a few steps says which operations take the time; it is made while the job trains.";
}

async function loadTrace() {
  const name = traces.name;
  const place = `${encodeURIComponent(job.id)}/traces/${encodeURIComponent(name)}`;
  element("trace-file").href = place;
  element("trace-note").textContent = "The trace is being read…";
  traces.pictures = null;
  element("trace-chart").hidden = true;
  element("trace-table").replaceChildren();
  try {
    const body = await ask(`${place}/picture.json`);
    if (name !== traces.name) return;
    traces.pictures = body;
    element("trace-chart").hidden = false;
    drawTrace();
  } catch (error) {
    if (name !== traces.name) return;
    element("trace-note").textContent = error instanceof Refused ? error.message : "the dashboard's server does not answer";
  }
}

function colourOf(name) {
  let sum = 0;
  for (const letter of name) sum = (sum * 31 + letter.codePointAt(0)) % 9973;
  return COLOURS[theme()][sum % 7];
}

const milliseconds = value => value >= 100 ? `${value.toFixed(0)} ms` : `${value.toPrecision(3)} ms`;

const MOST_ROWS = 32, ROW_PIXELS = 24, LEAST_PIXELS = 440;

// The rows of a flame graph that are drawn: a click shows those below.
function flameRows(frames) {
  const depths = []; // a frame comes after its parent
  for (const frame of frames) depths[frame.id] = frame.parent === null ? 1 : depths[frame.parent] + 1;
  return Math.min(MOST_ROWS, Math.max(...depths));
}

function flameTrace({ frames }) {
  const whole = frames[0].nanoseconds || 1;
  return [{
    type: "icicle", ids: frames.map(frame => String(frame.id)), parents: frames.map(frame => frame.parent === null ? "" : String(frame.parent)),
    labels: frames.map(frame => escaped(frame.name)), values: frames.map(frame => frame.nanoseconds), branchvalues: "total", sort: true,
    tiling: { orientation: "v", pad: 1 }, pathbar: { visible: true, thickness: 22 }, maxdepth: flameRows(frames),
    marker: { colors: frames.map(frame => frame.id === 0 ? css("--border") : colourOf(frame.name)), line: { width: 0 } },
    customdata: frames.map(frame => [milliseconds(frame.nanoseconds / 1e6), `${(100 * frame.nanoseconds / whole).toFixed(1)} %`, frame.calls ? `, ${frame.calls.toLocaleString("en")} calls` : ""]),
    hovertemplate: "%{label}<br>%{customdata[0]}, %{customdata[1]} of all%{customdata[2]}<extra></extra>", textinfo: "label", leaf: { opacity: 1 },
  }];
}

function timeTrace({ bars, threads }) {
  const depths = threads.map((_, at) => 1 + Math.max(0, ...bars.filter(bar => bar.thread === at).map(bar => bar.depth)));
  const starts = depths.map((_, at) => depths.slice(0, at).reduce((sum, depth) => sum + depth + 1, 0));
  return [[{
    type: "bar", orientation: "h", base: bars.map(bar => bar.start), x: bars.map(bar => bar.milliseconds), width: 0.9,
    y: bars.map(bar => starts[bar.thread] + bar.depth), marker: { color: bars.map(bar => colourOf(bar.name)), line: { width: 0 } },
    text: bars.map(bar => escaped(bar.name)), textposition: "inside", insidetextanchor: "start", constraintext: "inside", textangle: 0, insidetextfont: { color: theme() === "dark" ? "#0b0f14" : "#ffffff" },
    customdata: bars.map(bar => [escaped(bar.name), milliseconds(bar.milliseconds), bar.by ? `<br>launched by ${escaped(bar.by)}` : ""]), showlegend: false,
    hovertemplate: "%{customdata[0]}<br>%{customdata[1]} from %{base:.2f} ms on%{customdata[2]}<extra></extra>",
  }], { tickvals: starts, ticktext: threads.map(escaped) }];
}

function drawTrace() {
  const chart = element("trace-chart");
  for (const view of Object.keys(VIEWS)) element(`view-${view}`).setAttribute("aria-pressed", String(view === traces.view));
  if (!traces.pictures) return;
  const shown = shownOf(), picture = traces.pictures[shown];
  for (const show of Object.keys(SHOWN)) element(`show-${show}`).setAttribute("aria-pressed", String(show === shown));
  element("show-python").disabled = !traces.pictures.python;
  element("show-python").title = traces.pictures.python ? "" : NO_PYTHON;
  const layout = {
    autosize: true, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 8, r: 8, t: 8, b: 8 },
    font: { family: "inherit", size: 12, color: css("--ink") }, hovermode: "closest", uirevision: `${traces.name} ${traces.view} ${shown}`,
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--border"), font: { color: css("--ink"), size: 12 } },
  };
  let drawn = null;
  const pixels = Math.max(LEAST_PIXELS, ROW_PIXELS * (flameRows(picture.frames) + 1));
  chart.style.height = traces.view === "flame" ? `${pixels}px` : "";
  if (traces.view === "time") {
    const [made, ticks] = timeTrace(picture);
    drawn = made;
    const axis = { gridcolor: css("--grid"), zeroline: false, automargin: true };
    layout.xaxis = { ...axis, title: { text: "ms" } };
    layout.yaxis = { ...axis, ...ticks, autorange: "reversed", showgrid: false };
    layout.dragmode = "zoom";
    layout.uniformtext = { minsize: 11, mode: "hide" };
  } else {
    drawn = flameTrace(picture);
    layout.uniformtext = { minsize: 11, mode: "hide" };
  }
  Plotly.react(chart, drawn, layout, { displayModeBar: false, responsive: true });
  chart.setAttribute("role", "img");
  const first = picture.top[0];
  chart.setAttribute("aria-label", `${VIEWS[traces.view]} of the trace; most self time: ${first.name}, ${milliseconds(first.milliseconds)}. The table below has the heaviest operations.`);
  const hint = traces.view === "flame" ? "The width of a frame is its time; below it is what it called. Click a frame to open it, and the bar on top to go back."
    : "Drag to zoom in, double-click to see all.";
  element("trace-note").textContent = picture.left_out && traces.view === "time" ? `${hint} ${picture.left_out.toLocaleString("en")} shorter operations are not drawn.` : hint;
  const number = text => ({ text, className: "number" });
  const onGpu = picture.top.some(row => row.is_on_gpu);
  const where = row => onGpu ? [row.is_on_gpu ? "GPU" : "CPU"] : [];
  element("trace-table").replaceChildren(make("h3", "", "Operations with the most self time"), table("heaviest operations",
    ["operation", ...(onGpu ? ["on"] : []), number("own time"), number("share"), number("calls")],
    picture.top.map(row => [{ text: row.name, className: "value" }, ...where(row), number(milliseconds(row.milliseconds)), number(`${(100 * row.share).toFixed(1)} %`), number(row.calls.toLocaleString("en"))])));
}
