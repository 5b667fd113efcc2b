// The page of one job. Live, it asks for what is new every two seconds; in a saved report, everything is in the page.
// The part of the page that is open, and whose log, is in the address.
"use strict";

const POLL_MILLISECONDS = 2000;
const FACTS_MILLISECONDS = 20000;
const TABS = [["charts", "Charts"], ["result", "Result"], ["settings", "Settings"], ["cost", "Cost"],
  ...(PAGE.live ? [["logs", "Logs"]] : [])];
const facts = { state: "", at: 0, account: 0 };

// ---- the address

const place = () => new URLSearchParams(location.hash.slice(1));

function setPlace(change) {
  const now = place();
  for (const [name, value] of Object.entries(change)) {
    if (value) now.set(name, value);
    else now.delete(name);
  }
  if (now.get("tab") === "charts") now.delete("tab");
  history.replaceState(null, "", now.size ? `#${now}` : location.pathname + location.search);
}

function showTab(name, more = {}) {
  for (const [tab] of TABS) {
    element(`part-${tab}`).hidden = tab !== name;
    element(`tab-${tab}`).setAttribute("aria-selected", String(tab === name));
    element(`tab-${tab}`).tabIndex = tab === name ? 0 : -1;
  }
  element(`tab-${name}`).scrollIntoView({ block: "nearest", inline: "nearest" });
  setPlace({ tab: name, ...more });
  if (name === "charts" && job.look) for (const chart of document.querySelectorAll("#panels .js-plotly-plot")) Plotly.Plots.resize(chart);
  if (!PAGE.live) return;
  logs.shown = name === "logs";
  refresh();
}

function buildTabs() {
  element("tabs").append(...TABS.map(([name, text]) => {
    const tab = make("button", "", text);
    Object.assign(tab, { type: "button", id: `tab-${name}` });
    tab.setAttribute("role", "tab");
    tab.setAttribute("aria-controls", `part-${name}`);
    tab.addEventListener("click", () => showTab(name));
    return tab;
  }));
  element("tabs").addEventListener("keydown", event => {
    const at = TABS.findIndex(([name]) => `tab-${name}` === document.activeElement.id);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: TABS.length - 1 }[event.key];
    if (at < 0 || to === undefined) return;
    event.preventDefault();
    const [name] = TABS[(to + TABS.length) % TABS.length];
    showTab(name);
    element(`tab-${name}`).focus();
  });
}

function readPlace() {
  const now = place();
  const name = now.get("tab") || "charts";
  if (PAGE.live) {
    logs.node = now.get("node") || "";
  }
  showTab(TABS.some(([tab]) => tab === name) ? name : "charts");
}

// ---- figures, verdict, news

function drawHeadline() {
  const { headline, job: row, news } = job.look;
  document.title = `${row.state} · ${row.job_id} · dtrain`;
  document.documentElement.dataset.state = row.state;
  element("headline").replaceChildren(...headline.map(({ label, value, note }) => {
    const figure = make("div", "figure");
    figure.dataset.label = label;
    const text = make("span", "note", note);
    text.title = note;
    figure.append(make("span", "label", label), make("span", value.length > 14 ? "value long" : "value", value), text);
    return figure;
  }));
  drawLoss(job.look.loss);
  drawVerdict(job.look.verdict, job.look.is_whole);
  element("news-section").hidden = !news.length;
  element("news").replaceChildren(...news.map(({ time, kind, text }) => {
    const item = make("li", kind);
    item.append(make("time", "", clock(time)), make("span", "", text));
    return item;
  }));
}

function drawLoss(loss) {
  const box = element("loss");
  box.hidden = !loss;
  if (!loss) return;
  box.dataset.open = String(loss.is_open);
  const said = [`${loss.title}${loss.is_open ? "" : ":"}`, loss.words]; // read aloud where it changes: so only then
  ["strong", "span"].forEach((tag, at) => { if (box.querySelector(tag).textContent !== said[at]) box.querySelector(tag).textContent = said[at]; });
}

function drawVerdict(verdict, isWhole) {
  const box = element("verdict");
  box.hidden = !verdict;
  if (!verdict) return;
  const lines = [...verdict.also.map(text => `also: ${text}`), ...verdict.advice];
  box.dataset.cause = verdict.cause === "healthy" && job.look.loss?.is_open ? "" : verdict.cause;
  box.querySelector("small").textContent = isWhole ? "Over the whole training." : "In the latest steps.";
  box.querySelector("strong").textContent = `${verdict.title}:`;
  box.querySelector("span").textContent = verdict.evidence;
  box.querySelector("details").hidden = !lines.length;
  box.querySelector("summary").textContent = verdict.advice.length ? "what would help" : "also found";
  box.querySelector("ul").replaceChildren(...lines.map(text => make("li", "", text)));
}

// ---- where the figures come from

function take(answer) {
  if (answer.token !== job.token) job.tracks = {};
  for (const [name, { from, rows }] of Object.entries(answer.tracks)) {
    const known = job.tracks[name] || [];
    job.tracks[name] = [...known.slice(0, from), ...rows];
  }
  const first = answer.token !== job.token;
  const nothingNew = !first && answer.version === job.version && answer.job.state === job.look.job.state;
  Object.assign(job, { token: answer.token, version: answer.version, look: answer });
  drawHeadline();
  if (!nothingNew) draw(first ? null : Object.keys(answer.tracks));
}

async function pollFacts() {
  const { state } = job.look.job;
  const isNew = state !== facts.state;
  const now = performance.now();
  if (isNew || (now - facts.at > FACTS_MILLISECONDS && ["running", "queued"].includes(state))) {
    drawFacts(await ask(`${encodeURIComponent(job.id)}/facts.json`));
    Object.assign(facts, { state, at: now });
    if (isNew) facts.account = 0;
  }
  if (place().get("tab") === "cost" && (!facts.account || (now - facts.account > FACTS_MILLISECONDS && ["running", "queued"].includes(state)))) {
    drawCost(await ask(`${encodeURIComponent(job.id)}/account.json`));
    facts.account = now;
  }
}

async function poll() {
  take(await ask(`${encodeURIComponent(job.id)}.json?since=${job.version}&token=${job.token}`));
  const done = await Promise.allSettled([pollFacts(), pollOrders(), pollLogs()]); // one in trouble stops no other
  const failed = done.find(item => item.status === "rejected");
  if (failed) throw failed.reason;
}

let polling = false;
let polledAt = 0;
let again = false; // somebody asked for something else meanwhile

async function refresh() {
  again = polling;
  if (polling) return;
  polling = true;
  try {
    do {
      again = false;
      polledAt = performance.now();
      await poll();
      element("note").textContent = `updated ${clock(Date.now() / 1000)}`;
    } while (again);
  } catch (error) {
    console.error(error);
    const why = error instanceof Refused ? error.message : "the dashboard's server does not answer";
    element("note").textContent = job.look ? `${why}; the figures are old` : "";
    element("empty").hidden = Boolean(job.look);
    if (!job.look) element("empty").textContent = error.status === 404 ? `There is no job ${job.id}.` : why;
  } finally {
    polling = false;
  }
}

// A job that has ended may be started again, but that needs no look every two seconds.
function isQuiet() {
  const runs = !job.look || ["running", "queued"].includes(job.look.job.state) || orders.mine || logs.shown;
  return !runs && performance.now() - polledAt < FACTS_MILLISECONDS;
}

dark.addEventListener("change", () => job.look && draw(null));
document.querySelector(".skip").addEventListener("click", event => {
  event.preventDefault(); // the address says which part is open
  element("tabs").focus();
});
build();
buildTabs();
if (PAGE.live) {
  job.id = decodeURIComponent(location.pathname.split("/").pop());
  element("name").textContent = job.id;
  document.title = `${job.id} · dtrain`;
  buildLogs();
  buildOrders();
  window.addEventListener("hashchange", readPlace);
  readPlace();
  setInterval(() => document.hidden || polling || isQuiet() || refresh(), POLL_MILLISECONDS);
} else {
  const snapshot = embedded("snapshot-data");
  job.id = snapshot.job.job_id;
  element("name").textContent = job.id;
  element("note").textContent = `as it was ${new Date(snapshot.now * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" })}`;
  take(snapshot);
  drawFacts(embedded("facts-data"));
  drawCost(embedded("account-data"));
  readPlace();
}
