// The table of all jobs. It holds what the server has told (`dtrain_dagster/dashboard/job_table.py`), asks every two
// seconds for what has changed, and draws what `table_state.js` decides to show.
import { arrange, COLUMNS, readState, ROWS_AT_ONCE, sortedBy, tookSeconds, writeState } from "./table_state.js";

const POLL_MILLISECONDS = 2000, HURRY_MILLISECONDS = 400; // the latter while jobs are being read
const MOST_HURRIES = 25; // for figures only; those of thousands of jobs take minutes
const STATES = ["running", "queued", "failed", "damaged", "cancelled", "succeeded"];
const JOB_ID = /^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$/;
const known = { token: "", version: 0, rows: new Map(), unread: 0, read: false };
const drawn = new Map(); // the elements of lines by their key, and what they were drawn from
let state = readState(location.hash);

// ---- the state and its address

function change(patch, replace = false) {
  state = { ...state, ...patch };
  const written = writeState(state);
  const address = written ? `#${written}` : location.pathname;
  if (replace) history.replaceState(null, "", address);
  else history.pushState(null, "", address);
  draw();
}

function followAddress() {
  const name = decodeURIComponent(location.hash.slice(1));
  if (JOB_ID.test(name) && name !== "rows") location.replace(`jobs/${encodeURIComponent(name)}`); // as of old
  else if (name !== "rows") {
    state = readState(location.hash);
    draw();
  }
}

function toggle(set, name) {
  const made = new Set(set);
  if (!made.delete(name)) made.add(name);
  return made;
}

// ---- what a line is made of

const paidText = usd => usd === undefined ? "" : money(usd);
const figure = value => value === undefined ? "" : value.toFixed(Math.abs(value) >= 100 ? 1 : 4);

function cell(key, ...children) {
  const title = COLUMNS.find(column => column.key === key).title;
  return make(key === "job" ? "th" : "td", { role: key === "job" ? "rowheader" : "cell", scope: key === "job" && "row", class: key, "data-label": title }, ...children);
}

function stepCell(row) {
  if (row.step === undefined) return cell("step");
  const made = cell("step", many(row.step));
  if (!row.of || row.of < row.step) return made;
  const bar = make("span", { class: "progress", "aria-hidden": "true" }, make("span"));
  bar.firstChild.style.width = `${100 * Math.min(1, row.step / row.of)}%`;
  made.append(make("span", { class: "of" }, ` of ${many(row.of)}`), row.live ? bar : "");
  return made;
}

function tookText(row) {
  const seconds = tookSeconds(row, Date.now() / 1000);
  return seconds === undefined ? "" : duration(seconds);
}

function jobLine(row, within) {
  const made = make("tr", { role: "row", class: within ? "within" : null });
  const link = make("a", { href: `jobs/${encodeURIComponent(row.id)}`, "data-row": row.id }, row.id);
  const label = within && !row.id.startsWith(row.group[2]) ? make("span", { class: "label" }, row.group[3]) : "";
  const waiting = row.unread ? "…" : "";
  const verdict = cell("verdict", make("span", { class: "words", title: row.verdict || null }, row.verdict || waiting));
  verdict.dataset.tone = row.tone || "";
  const atEnd = row.live && row.end !== undefined ? make("span", { class: "of" }, ` of ${money(row.end)}`) : "";
  const usd = cell("usd", row.usd === undefined ? waiting : money(row.usd), atEnd);
  if (row.price) usd.title = row.price;
  const score = cell("score");
  if (row.score !== undefined) score.append(make("span", {}, figure(row.score), make("span", { class: "metric" }, ` ${row.metric}`)));
  const gate = cell("gate", row.gate || "");
  gate.dataset.tone = row.gate === "passed" ? "good" : "";
  made.append(
    cell("job", link, label), stateCell(row.state), cell("model", row.model || ""),
    cell("valid", figure(row.valid)), score, gate, cell("nodes", row.nodes === undefined ? "" : many(row.nodes)), stepCell(row), usd,
    cell("started", row.started === undefined ? "" : moment(row.started)), cell("took", tookText(row)), verdict,
  );
  return made;
}

function stateCell(name) {
  const made = cell("state", make("span", { class: "badge" }, name));
  made.firstChild.dataset.state = name;
  return made;
}

function groupLine(group) {
  const made = make("tr", { role: "row", class: "group", title: "best validation loss, sum of dollars, newest start" });
  const button = make("button", { type: "button", "aria-expanded": String(group.open), "data-row": `group ${group.key}` },
    make("span", { class: "kind" }, `${group.kind} `), group.name);
  button.addEventListener("click", () => change({ open: toggle(state.open, group.key) }));
  const jobs = group.count === group.of ? `${many(group.of)} jobs` : `${many(group.count)} of ${many(group.of)} jobs`;
  const states = cell("verdict", ...STATES.filter(name => group.states[name]).map(name => {
    const badge = make("span", { class: "badge" }, `${many(group.states[name])} ${name}`);
    badge.dataset.state = name;
    return [badge, " "];
  }).flat());
  made.append(
    cell("job", button, make("span", { class: "label" }, jobs)), cell("state"), cell("model"),
    cell("valid", figure(group.valid)), cell("score"), cell("gate"), cell("nodes"), cell("step"), cell("usd", paidText(group.usd)),
    cell("started", group.started === undefined ? "" : moment(group.started)), cell("took"), states,
  );
  return made;
}

// ---- how they are drawn

// The element of a line: the one from before, where it says the same.
function lineElement(line) {
  const from = line.group ? JSON.stringify(line.group) : line.row;
  const before = drawn.get(line.key);
  if (before && before.from === from && before.within === line.within) {
    if (line.row && line.row.live) before.made.querySelector(".took").textContent = tookText(line.row);
    return before.made;
  }
  const focused = before && before.made.contains(document.activeElement) && document.activeElement.tagName;
  const made = line.group ? groupLine(line.group) : jobLine(line.row, line.within);
  drawn.set(line.key, { from, within: line.within, made });
  if (before) before.made.replaceWith(made);
  if (focused) made.querySelector(focused).focus();
  return made;
}

function drawRows(lines) {
  const body = element("rows"), keys = new Set(lines.map(line => line.key));
  for (const [key, { made }] of drawn) {
    if (keys.has(key)) continue;
    made.remove();
    drawn.delete(key);
  }
  const elements = lines.map(lineElement), added = document.createDocumentFragment();
  let place = body.firstChild;
  for (const made of elements) {
    if (made === place) place = place.nextSibling;
    else if (place === null) added.append(made);
    else body.insertBefore(made, place);
  }
  body.append(added);
}

function drawHeads() {
  for (const head of element("heads").querySelectorAll("th[data-key]")) {
    const isIt = head.dataset.key === state.sort;
    head.setAttribute("aria-sort", isIt ? (state.down ? "descending" : "ascending") : "none");
  }
  element("sort").value = state.sort ? (state.down ? "-" : "") + state.sort : "";
}

function drawStates(states, total) {
  const there = STATES.filter(name => states[name] || name === state.state);
  const wanted = [["", `all ${many(total)}`], ...there.map(name => [name, `${name} ${many(states[name] || 0)}`])];
  const box = element("states"), buttons = [...box.children];
  if (!buttons.length || buttons.map(button => button.dataset.state).join() !== wanted.map(([name]) => name).join()) {
    box.replaceChildren(...wanted.map(([name]) => {
      const button = make("button", { type: "button", "data-state": name });
      button.addEventListener("click", () => change({ state: name }));
      return button;
    }));
  }
  wanted.forEach(([name, text], place) => {
    box.children[place].textContent = text;
    box.children[place].setAttribute("aria-pressed", String(name === state.state));
  });
}

function draw() {
  if (!known.read) return; // not a word of "no jobs" before the server has said so
  const { lines, states, found, total } = arrange([...known.rows.values()], state, Date.now() / 1000);
  const shown = lines.slice(0, state.most), rest = lines.length - shown.length, all = known.rows.size;
  drawRows(shown);
  drawHeads();
  drawStates(states, all);
  element("table").hidden = !all;
  const none = known.unread ? "Jobs are being read…" : all ? "No job matches." : "There is no training yet. `dtrain train --dataset latest` or `make run` starts one.";
  element("empty").textContent = none;
  element("empty").hidden = found > 0;
  const paid = total.usd === undefined ? "" : `, ${money(total.usd)}`;
  const unread = known.unread ? `; ${many(known.unread)} not read yet` : "";
  element("count").textContent = all ? `${many(found)} ${found === 1 ? "job" : "jobs"}${paid}${unread}` : "";
  element("rest").hidden = !rest;
  element("more").textContent = `show ${many(Math.min(rest, ROWS_AT_ONCE))} more of ${many(rest)}`;
  if (document.activeElement !== element("search")) element("search").value = state.text;
  element("grouped").checked = !state.flat;
  const running = states.running || 0;
  document.title = `${running ? `${many(running)} running · ` : ""}dtrain: jobs`;
}

// ---- where the rows come from

function take(answer) {
  if (answer.whole) known.rows.clear();
  for (const row of answer.rows) known.rows.set(row.id, row);
  for (const id of answer.gone) known.rows.delete(id);
  Object.assign(known, { token: answer.token, version: answer.version, unread: answer.unread, read: true });
}

// Draw, and mark in the browser's own record when there were rows for the first time.
function drawFirst() {
  draw();
  if (known.marked || !known.rows.size) return;
  known.marked = true;
  requestAnimationFrame(() => performance.mark("rows"));
}

async function poll() {
  try {
    take(await ask(`table.json?token=${known.token}&since=${known.version}`));
    drawFirst();
    tellAge(null);
  } catch (error) {
    tellAge(error);
  }
}

let hurries = 0;

async function keepUp() {
  if (!document.hidden) await poll();
  const hurry = known.unread || (hurries < MOST_HURRIES && [...known.rows.values()].some(row => row.unread));
  hurries += hurry ? 1 : 0;
  setTimeout(keepUp, hurry ? HURRY_MILLISECONDS : POLL_MILLISECONDS);
}

// ---- keys

function moveFrom(place, by) {
  const rows = [...element("rows").querySelectorAll("[data-row]")];
  const next = by === "first" ? 0 : by === "last" ? rows.length - 1 : Math.max(0, Math.min(rows.length - 1, rows.indexOf(place) + by));
  if (rows[next]) rows[next].focus();
}

const MOVES = { ArrowDown: 1, ArrowUp: -1, Home: "first", End: "last" };

document.addEventListener("keydown", event => {
  const on = event.target;
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/" && !["INPUT", "SELECT"].includes(on.tagName)) {
    event.preventDefault();
    element("search").focus();
  } else if (on.dataset.row && event.key in MOVES) {
    event.preventDefault();
    moveFrom(on, MOVES[event.key]);
  } else if (on.id === "search" && event.key === "ArrowDown") {
    event.preventDefault();
    moveFrom(null, "first");
  }
});

// ---- the page is set up

element("heads").append(...COLUMNS.map(column => {
  const button = make("button", { type: "button" }, column.title);
  button.addEventListener("click", () => change(sortedBy(state, column.key)));
  return make("th", { role: "columnheader", scope: "col", class: column.key, "data-key": column.key, "aria-sort": "none" }, button);
}));
element("sort").append(new Option("newest, live ones first", ""), ...COLUMNS.flatMap(({ key, title, down, number }) => {
  const [up, low] = number ? ["lowest first", "highest first"] : ["A to Z", "Z to A"];
  const options = [new Option(`${title}, ${up}`, key), new Option(`${title}, ${low}`, `-${key}`)];
  return down ? options.reverse() : options;
}));
element("sort").addEventListener("change", event => {
  const value = event.target.value;
  change({ sort: value.replace(/^-/, ""), down: value.startsWith("-") });
});
let typing = false; // one entry of the history for a text, however many letters it has
element("search").addEventListener("input", event => {
  change({ text: event.target.value.trim() }, typing);
  typing = true;
});
element("search").addEventListener("blur", () => { typing = false; });
document.querySelector("form").addEventListener("submit", event => event.preventDefault());
element("grouped").addEventListener("change", event => change({ flat: !event.target.checked }));
element("more").addEventListener("click", () => change({ most: state.most + ROWS_AT_ONCE }, true));
document.querySelector("[data-skip]").addEventListener("click", event => {
  event.preventDefault();
  moveFrom(null, "first");
});
window.addEventListener("popstate", followAddress);
document.addEventListener("visibilitychange", () => document.hidden || poll());
followAddress();
const within = element("table-data"); // what the server knew when it sent the page
if (within) {
  take(JSON.parse(within.textContent));
  if (known.rows.size) drawFirst();
}
keepUp();
