// The list of all jobs: a page of it, the newest first, searched and filtered by the server.
"use strict";

const POLL_MILLISECONDS = 2000;
const element = id => document.getElementById(id);
const clock = seconds => new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });
const moment = seconds => new Date(seconds * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "medium", hour12: false });
const list = { state: "", text: "", page: 0, tag: "", answer: null };

function make(tag, text) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  return made;
}

function took(row) {
  if (row.ended_at === null || row.started_at === null) return "";
  const seconds = Math.max(0, Math.round(row.seconds ?? row.ended_at - row.started_at));
  const [hours, minutes] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60];
  return hours ? `${hours} h ${minutes} min` : minutes ? `${minutes} min ${seconds % 60} s` : `${seconds} s`;
}

function rowOf(row) {
  const made = make("tr");
  const link = make("a", row.job_id);
  link.href = `jobs/${encodeURIComponent(row.job_id)}`;
  const state = make("td", row.state);
  state.dataset.state = row.state;
  const name = make("td");
  name.append(link);
  const started = row.started_at ? moment(row.started_at) : "";
  made.append(name, state, ...[started, took(row), row.model, row.step ?? ""].map(text => make("td", text)));
  return made;
}

function drawList() {
  const { jobs, page, pages, first, total, states, unread } = list.answer;
  const none = !Object.keys(states).length;
  element("list").hidden = none;
  element("empty").hidden = !none;
  element("empty").textContent = unread ? "Jobs are being read…"
    : "There is no training yet. `dtrain train --dataset latest` or `make run` starts one.";
  const many = number => number.toLocaleString("en");
  const shown = total ? `${many(first + 1)}–${many(first + jobs.length)} of ${many(total)}` : "no such job";
  element("count").textContent = unread ? `${shown}; ${many(unread)} not read yet` : shown;
  element("newer").disabled = page === 0;
  element("older").disabled = page + 1 >= pages;
  element("rows").replaceChildren(...jobs.map(rowOf));
  if (document.activeElement === element("state")) return;
  const known = { ...(list.state ? { [list.state]: 0 } : {}), ...states };
  const all = Object.values(states).reduce((sum, count) => sum + count, 0);
  element("state").replaceChildren(...[["", all], ...Object.entries(known)].map(([name, count]) => {
    const option = make("option", `${name || "any state"} (${many(count)})`);
    option.value = name;
    return option;
  }));
  element("state").value = list.state;
}

const wanted = () => new URLSearchParams({ state: list.state, text: list.text, page: list.page }).toString();

async function update() {
  const asked = wanted();
  try {
    const response = await fetch(`jobs.json?${asked}`, { cache: "no-store", headers: list.tag ? { "If-None-Match": list.tag } : {} });
    if (response.status !== 304) {
      if (!response.ok) throw new Error(await response.text());
      const answer = await response.json();
      if (asked !== wanted()) return;
      Object.assign(list, { answer, page: answer.page, tag: response.headers.get("ETag") || "" });
      drawList();
    }
    element("note").textContent = `updated ${clock(Date.now() / 1000)}`;
  } catch (error) {
    console.error(error);
    element("note").textContent = "the jobs cannot be read; the list is old";
  }
}

function look(change) {
  Object.assign(list, { page: 0, ...change, tag: "" });
  update();
}

element("search").addEventListener("input", event => look({ text: event.target.value.trim() }));
element("state").addEventListener("change", event => { event.target.blur(); look({ state: event.target.value }); });
element("newer").addEventListener("click", () => look({ page: Math.max(0, list.page - 1) }));
element("older").addEventListener("click", () => look({ page: list.page + 1 }));
if (location.hash.length > 1) location.replace(`jobs/${encodeURIComponent(decodeURIComponent(location.hash.slice(1)))}`); // as of old
setInterval(() => document.hidden || update(), POLL_MILLISECONDS);
update();
