// The parts of the page that are words and tables: failure, result, settings, costs, checkpoints, links. What they say
// is decided in dtrain_dagster/dashboard; here it is only laid out.
"use strict";

const bytes = number => number >= 1e9 ? `${(number / 1e9).toPrecision(3)} GB` : number >= 1e6 ? `${(number / 1e6).toPrecision(3)} MB` : `${Math.max(1, Math.round(number / 1e3))} kB`;

function table(label, heads, rows, foot) {
  const made = make("table");
  made.setAttribute("aria-label", label);
  const line = (cells, tag) => {
    const row = make("tr");
    row.append(...cells.map(cell => {
      const { text = "", className = "", nodes = [], small = "" } = typeof cell === "object" ? cell : { text: cell };
      const isHead = tag === "th" && text !== ""; // a head without words is none
      const box = make(isHead ? "th" : "td", className, nodes.length ? undefined : text);
      box.append(...nodes);
      if (small) box.append(make("small", "", small));
      if (isHead) box.scope = "col";
      return box;
    }));
    return row;
  };
  const head = made.createTHead();
  head.append(line(heads, "th"));
  const body = made.createTBody();
  for (const row of rows) {
    const tr = line(row.cells || row, "td");
    if (row.mine) tr.className = "mine";
    body.append(tr);
  }
  if (foot) made.createTFoot().append(line(foot, "td"));
  const box = make("div", "scroll");
  box.tabIndex = 0; // a keyboard scrolls it, too
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", label);
  box.append(made);
  return box;
}

function card(...parts) {
  const made = make("div", "card");
  made.append(...parts);
  return made;
}

const nothing = text => card(make("p", "quiet", text));

function drawFailure(failure, state) {
  const box = element("failure");
  box.hidden = !failure;
  box.dataset.state = state;
  box.replaceChildren();
  if (!failure) return;
  const title = make("h2", "", failure.title);
  title.id = "failure-title";
  box.append(title);
  if (failure.cause) box.append(make("p", "cause", failure.cause));
  if (failure.reason && failure.reason !== failure.cause) box.append(make("p", "", failure.reason));
  if (failure.lines.length) {
    const log = make("pre");
    log.tabIndex = 0;
    log.setAttribute("aria-label", `last lines of ${failure.lines_of || "the log"}`);
    for (const line of failure.lines) log.append(make("span", failure.cause && line.includes(failure.cause) ? "told" : "", line), "\n");
    box.append(log);
    log.scrollTop = log.scrollHeight;
    if (PAGE.live) {
      const more = make("a", "", "all of its log");
      more.href = "#";
      more.addEventListener("click", event => {
        event.preventDefault();
        openLogs((/\d+/.exec(failure.lines_of) || [""])[0]);
      });
      const said = make("p", "quiet", failure.lines_of ? `the last lines of ${failure.lines_of}; ` : "its last lines; ");
      said.append(more);
      box.append(said);
    }
  }
  if (failure.nodes) box.append(make("p", "nodes", failure.nodes));
  if (failure.advice) box.append(make("p", "advice", failure.advice));
}

function drawLinks(links) {
  element("links").replaceChildren(...links.map(({ label, url, note }) => {
    const link = make("a", "", `${label} ↗`);
    link.href = url;
    link.target = "_blank";
    link.rel = "noopener noreferrer";
    link.title = note;
    const item = make("li");
    item.append(link);
    return item;
  }));
}

// Commands that somebody else gives in a shell; a second look leaves them open.
function drawCommands(commands) {
  const box = element("commands");
  box.hidden = !commands.length;
  box.querySelector("dl").replaceChildren(...commands.flatMap(({ command, note }) =>
    [make("dt", "", note), make("dd", "", make("code", "", command))]));
}

function drawResult(result) {
  const part = element("part-result");
  if (!result) {
    part.replaceChildren(nothing("There is no result yet: the test split is judged when the training has ended."));
    return;
  }
  const heads = ["", ...result.columns.map(([text, small]) => ({ text, small, className: "number" })), "the model's gain over it"];
  const rows = result.rows.map(row => ({
    mine: row.is_model,
    cells: [row.name, ...row.values.map((text, at) => ({ text, className: row.is_best[at] ? "number best" : "number" })), { text: row.gain, className: "whole" }],
  }));
  const verdict = make("p", result.is_passed === null ? "" : result.is_passed ? "passed" : "refused", result.verdict);
  const notes = make("ul");
  notes.append(...result.notes.map(text => make("li", "", text)));
  part.replaceChildren(card(verdict, table("test result", heads, rows), ...(result.notes.length ? [make("h3", "", "What it means"), notes] : [])));
}

function drawSettings(settings) {
  const given = settings.filter(item => item.is_given);
  const rows = items => items.map(item => [item.name, { text: item.value, className: "value" }, item.default ?? ""]);
  const rest = make("details");
  const others = settings.filter(item => !item.is_given);
  rest.append(make("summary", "", `${others.length} settings at their defaults`), table("settings at their defaults", ["setting", "value"], others.map(item => [item.name, { text: item.value, className: "value" }])));
  element("part-settings").replaceChildren(
    card(make("h3", "", "What this job has of its own"), table("settings of this job", ["setting", "value", "default"], rows(given))), card(rest));
}

function shareBar(share) {
  const bar = make("span", "share");
  const fill = make("i");
  fill.style.width = `${100 * share}%`;
  bar.append(fill);
  bar.setAttribute("aria-hidden", "true");
  return bar;
}

function drawCost(account) {
  const part = element("part-cost");
  if (!account.rows.length) {
    part.replaceChildren(nothing(`What the money was spent on is not known: ${account.basis}.`));
    return;
  }
  const number = text => ({ text, className: "number" });
  const heads = ["cause", number("dollars"), number("share"), { className: "wide" }, number("node-time"), "what for"];
  const rows = account.rows.map(row => [
    row.cause, number(row.usd), number(`${(100 * row.share).toFixed(1)} %`), { nodes: [shareBar(row.share)], className: "wide" }, number(row.duration), { text: row.meaning, className: "meaning" },
  ]);
  const foot = ["the bill", number(account.total), number("100 %"), { className: "wide" }, number(account.duration), { text: account.basis, className: "meaning" }];
  const notes = [account.goodput, account.estimate, ...account.notes].filter(Boolean);
  part.replaceChildren(card(make("h3", "", "What the dollars bought"), table("ledger", heads, rows, foot), ...notes.map(text => make("p", "quiet", text))));
}

function drawCheckpoints(checkpoints) {
  const part = element("part-checkpoints");
  if (!checkpoints.length) {
    part.replaceChildren(nothing("There is no checkpoint yet."));
    return;
  }
  const meaning = { latest: "latest: it resumes from here", best: "best: the model is taken from here" };
  const rows = checkpoints.map(item => [
    { text: item.step.toLocaleString("en"), className: "number" },
    { nodes: item.marks.map(mark => make("span", "mark", meaning[mark] || mark)) },
    { text: item.saved_at ? moment(item.saved_at) : "", className: "whole" }, { text: bytes(item.bytes), className: "number" },
    { text: String(item.generation), className: "number" }, { text: item.folder, className: "whole" },
  ]);
  const heads = [{ text: "step", className: "number" }, "use", "saved", { text: "size", className: "number" }, { text: "generation", className: "number" }, "folder in the run directory"];
  part.replaceChildren(card(make("h3", "", "Checkpoints that are kept"), table("checkpoints", heads, rows)));
}

function drawFacts(facts) {
  drawFailure(facts.failure, job.look.job.state);
  drawLinks(facts.links);
  drawCommands(facts.commands);
  drawResult(facts.result);
  drawSettings(facts.settings);
  drawCheckpoints(facts.checkpoints);
  const empty = element("empty");
  empty.hidden = !facts.damaged.length;
  empty.textContent = facts.damaged.join("\n");
}

function drawLearning(learning) {
  const box = element("learning");
  box.hidden = !learning || learning.state === "unknown";
  if (box.hidden) return;
  box.dataset.state = learning.state;
  box.textContent = learning.words;
}
