// Logs: the last lines of all nodes or of one, those that contain a text, and what is new while one follows.
"use strict";

const MOST_SHOWN = 5000;
const logs = { node: "", text: "", cursor: "", follow: true, shown: false, asking: "", call: null };
const wantedLogs = () => JSON.stringify([logs.node, logs.text]);

function buildLogs() {
  const part = element("part-logs");
  const bar = make("div", "bar");
  const nodeLabel = make("label", "", "node ");
  const node = make("select");
  node.id = "log-node";
  nodeLabel.append(node);
  const search = make("input");
  Object.assign(search, { id: "log-text", type: "search", maxLength: 200, placeholder: "text in a line", autocomplete: "off" });
  search.setAttribute("aria-label", "text in a line of the log");
  search.setAttribute("aria-keyshortcuts", "/");
  const followLabel = make("label");
  const follow = make("input");
  Object.assign(follow, { id: "log-follow", type: "checkbox", checked: true });
  followLabel.append(follow, " follow");
  const count = make("span", "count");
  count.id = "log-count";
  count.setAttribute("role", "status");
  bar.append(nodeLabel, search, followLabel, count);
  const lines = make("div", "log");
  lines.id = "log-lines";
  lines.tabIndex = 0;
  lines.setAttribute("role", "log");
  lines.setAttribute("aria-live", "off");
  lines.setAttribute("aria-label", "lines of the log");
  part.append(card(bar, lines));
  node.addEventListener("change", () => changeLogs({ node: node.value }));
  let waiting = 0;
  search.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => changeLogs({ text: search.value }), 300);
  });
  follow.addEventListener("change", () => {
    logs.follow = follow.checked;
    if (logs.follow) pollLogs();
  });
  // Who scrolls up reads: new lines do not take the place away.
  lines.addEventListener("scroll", () => {
    logs.atEnd = lines.scrollHeight - lines.scrollTop - lines.clientHeight < 40;
  });
}

function changeLogs(change) {
  Object.assign(logs, change, { cursor: "" });
  setPlace({ node: logs.node, text: logs.text });
  pollLogs(true);
}

// Another node's log, from elsewhere on the page.
function openLogs(node) {
  logs.node = node;
  logs.text = "";
  logs.cursor = "";
  showTab("logs", { node, text: "" });
  element("tab-logs").focus();
}

function lineOf([node, text]) {
  const made = make("div");
  const kind = /^--- launch \d+/.test(text) ? "start" : /\b(ERROR|CRITICAL|FATAL|Traceback|[A-Z]\w*Error)\b/.test(text) ? "bad" : /\bWARN(ING)?\b/.test(text) ? "warn" : "";
  const line = make("span", `line ${kind}`);
  const wanted = logs.text.toLowerCase();
  let at = 0;
  for (let found = wanted ? text.toLowerCase().indexOf(wanted) : -1; found >= 0; found = text.toLowerCase().indexOf(wanted, at)) {
    line.append(text.slice(at, found), make("mark", "", text.slice(found, found + wanted.length)));
    at = found + wanted.length;
  }
  line.append(text.slice(at));
  made.append(make("span", "of", `node ${node}`), line);
  return made;
}

function drawNodes(nodes) {
  const select = element("log-node");
  if (document.activeElement === select) return;
  const all = logs.node && !nodes.includes(Number(logs.node)) ? [...nodes, Number(logs.node)] : nodes;
  select.replaceChildren(...["", ...all].map(node => {
    const option = make("option", "", node === "" ? "all nodes" : `node ${node}`);
    option.value = String(node);
    return option;
  }));
  select.value = logs.node;
}

async function pollLogs(anew) {
  const what = wantedLogs(), isSame = logs.drawn === what;
  if (!logs.shown || (logs.asking === what && !anew) || (!logs.follow && !anew && isSame)) return;
  logs.call?.abort(); // what was looked for before: the server need not look on
  const call = logs.call = new AbortController();
  logs.asking = what;
  const first = !logs.cursor;
  const query = new URLSearchParams({ node: logs.node, text: logs.text, cursor: logs.cursor });
  const box = element("log-lines");
  try {
    const body = await ask(`${encodeURIComponent(job.id)}/logs.json?${query}`, call.signal);
    if (logs.call !== call || wantedLogs() !== what) return;
    drawNodes(body.nodes);
    const stay = isSame && logs.atEnd === false, top = box.scrollTop;
    const made = body.lines.map(lineOf);
    if (!first) box.append(...(body.is_cut ? [make("div", "gap", "Some lines are left out here: more arrived at once than can be shown.")] : []), ...made);
    else if (!isSame || box.textContent !== made.map(line => line.textContent).join("")) box.replaceChildren(...made);
    logs.drawn = what;
    if (stay) box.scrollTop = top;
    if (first) logs.cut = body.is_cut;
    while (box.childElementCount > MOST_SHOWN) {
      box.firstElementChild.remove();
      logs.cut = true;
    }
    if (made.length && !stay) box.scrollTop = box.scrollHeight;
    logs.cursor = body.cursor;
    const number = many(box.childElementCount - box.querySelectorAll(".gap").length);
    const found = logs.text ? `${number} lines with this text` : `${number} lines`;
    element("log-count").textContent = body.nodes.length ? logs.cut ? `the last ${found}` : found : "nothing was printed yet";
  } catch (error) {
    if (logs.call !== call) return;
    if (first) box.replaceChildren();
    element("log-count").textContent = error instanceof Refused ? error.message : "the dashboard's server does not answer";
  } finally {
    if (logs.call === call) logs.asking = "";
  }
}
