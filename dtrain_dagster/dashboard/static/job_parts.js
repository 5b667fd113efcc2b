// The parts of the page that are words and tables: failure, result, settings, costs, links. What they say
// is decided in dtrain_dagster/dashboard; here it is only laid out.
"use strict";

function table(label, heads, rows, foot) {
  const made = make("table");
  made.setAttribute("aria-label", label);
  const line = (cells, tag) => {
    const row = make("tr");
    row.append(...cells.map(cell => {
      const { text = "", className = "", nodes = [] } = typeof cell === "object" ? cell : { text: cell };
      const isHead = tag === "th" && text !== ""; // a head without words is none
      const box = make(isHead ? "th" : "td", className, nodes.length ? undefined : text);
      box.append(...nodes);
      if (isHead) box.scope = "col";
      return box;
    }));
    return row;
  };
  const head = made.createTHead();
  head.append(line(heads, "th"));
  const body = made.createTBody();
  body.append(...rows.map(row => line(row, "td")));
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

function drawResult(lines) {
  const found = lines && lines.length ? card(...lines.map(text => make("p", "", text))) : nothing("There is no verdict on the model: none was asked for, or the training has not ended.");
  element("part-result").replaceChildren(found);
}

function drawSettings(text) {
  const box = make("pre", { class: "whole-text", tabindex: 0, "aria-label": "the job and its nodes" }, text || "");
  element("part-settings").replaceChildren(card(box));
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
  part.replaceChildren(card(make("h3", "", "What the dollars bought"), table("ledger", heads, rows, foot), ...account.notes.map(text => make("p", "quiet", text))));
}

function drawFacts(facts) {
  drawFailure(facts.failure, job.look.job.state);
  drawLinks(facts.links);
  drawResult(facts.result);
  drawSettings(facts.settings);
  const empty = element("empty");
  empty.hidden = !facts.damaged.length;
  empty.textContent = facts.damaged.join("\n");
}
