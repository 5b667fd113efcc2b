// Logs: the last lines of all nodes or of one, again and again while one follows.
"use strict";

const logs = { node: "", follow: true, shown: false, call: null };

function buildLogs() {
  const part = element("part-logs");
  const bar = make("div", "bar");
  const nodeLabel = make("label", "", "node ");
  const node = make("select");
  node.id = "log-node";
  nodeLabel.append(node);
  const followLabel = make("label");
  const follow = make("input");
  Object.assign(follow, { id: "log-follow", type: "checkbox", checked: true });
  followLabel.append(follow, " follow");
  const count = make("span", "count");
  count.id = "log-count";
  count.setAttribute("role", "status");
  bar.append(nodeLabel, followLabel, count);
  const lines = make("div", "log");
  lines.id = "log-lines";
  lines.tabIndex = 0;
  lines.setAttribute("role", "log");
  lines.setAttribute("aria-live", "off");
  lines.setAttribute("aria-label", "lines of the log");
  part.append(card(bar, lines));
  node.addEventListener("change", () => {
    logs.node = node.value;
    setPlace({ node: logs.node });
    pollLogs(true);
  });
  follow.addEventListener("change", () => {
    logs.follow = follow.checked;
    if (logs.follow) pollLogs();
  });
  // Who scrolls up reads: nothing changes until the end is in sight again.
  lines.addEventListener("scroll", () => {
    logs.atEnd = lines.scrollHeight - lines.scrollTop - lines.clientHeight < 40;
  });
}

// Another node's log, from elsewhere on the page.
function openLogs(node) {
  logs.node = node;
  showTab("logs", { node });
  element("tab-logs").focus();
}

function lineOf([node, text]) {
  const kind = /^--- launch \d+/.test(text) ? "start" : /\b(ERROR|CRITICAL|FATAL|Traceback|[A-Z]\w*Error)\b/.test(text) ? "bad" : /\bWARN(ING)?\b/.test(text) ? "warn" : "";
  return make("div", {}, make("span", "of", `node ${node}`), make("span", `line ${kind}`, text));
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
  const isSame = logs.drawn === logs.node;
  if (!logs.shown || (logs.call && !anew && isSame) || (!logs.follow && !anew && isSame)) return;
  logs.call?.abort(); // of another node
  const call = logs.call = new AbortController();
  const { node } = logs;
  const box = element("log-lines");
  try {
    const body = await ask(`${encodeURIComponent(job.id)}/logs.json?${new URLSearchParams({ node })}`, call.signal);
    if (logs.call !== call) return;
    drawNodes(body.nodes);
    const made = body.lines.map(lineOf), isRead = isSame && logs.atEnd === false;
    if (!isRead && (!isSame || box.textContent !== made.map(line => line.textContent).join(""))) {
      box.replaceChildren(...made);
      box.scrollTop = box.scrollHeight;
    }
    logs.drawn = node;
    const found = `${many(box.childElementCount)} lines`;
    element("log-count").textContent = body.nodes.length ? body.is_cut ? `the last ${found}; dtrain logs has all` : found : "nothing was printed yet";
  } catch (error) {
    if (logs.call !== call) return;
    if (!isSame) box.replaceChildren();
    element("log-count").textContent = error instanceof Refused ? error.message : "the dashboard's server does not answer";
  } finally {
    if (logs.call === call) logs.call = null;
  }
}
