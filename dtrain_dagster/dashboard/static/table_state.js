// What of the table is shown, and in which order: pure functions of the rows and of the state that the address keeps.

const numberOf = (text, otherwise) => /^\d{1,6}$/.test(text || "") ? Number(text) : otherwise;

export const ROWS_AT_ONCE = 100;

// A column: what it is called, what it is sorted by, and whether the first click sorts it from high to low.
export const COLUMNS = [
  { key: "job", title: "job", value: row => row.id },
  { key: "state", title: "state", value: row => row.state },
  { key: "model", title: "model", value: row => row.model },
  { key: "valid", title: "best validation", value: row => row.valid, number: true },
  { key: "score", title: "test", value: row => row.score, number: true },
  { key: "gate", title: "gate", value: row => row.gate },
  { key: "nodes", title: "nodes", value: row => row.nodes, down: true, number: true },
  { key: "step", title: "step", value: row => row.step, down: true, number: true },
  { key: "usd", title: "cost", value: row => row.usd, down: true, number: true },
  { key: "started", title: "started", value: row => row.started, down: true, number: true },
  { key: "took", title: "took", value: (row, now) => tookSeconds(row, now), down: true, number: true },
  { key: "verdict", title: "what held it up", value: row => row.verdict },
];
const BY_KEY = new Map(COLUMNS.map(column => [column.key, column]));

export function tookSeconds(row, now) {
  if (row.live && row.started !== undefined) return Math.max(0, now - row.started);
  return row.seconds;
}

export function readState(hash) {
  const asked = new URLSearchParams(hash.replace(/^#/, ""));
  const list = name => (asked.get(name) || "").split(",").filter(Boolean);
  const sort = asked.get("sort") || "";
  const known = BY_KEY.has(sort.replace(/^-/, ""));
  return {
    sort: known ? sort.replace(/^-/, "") : "",
    down: known && sort.startsWith("-"),
    state: asked.get("state") || "",
    text: (asked.get("q") || "").slice(0, 200),
    flat: asked.get("groups") === "off",
    open: new Set(list("open")),
    most: Math.max(ROWS_AT_ONCE, numberOf(asked.get("n"), 0)),
  };
}

export function writeState(state) {
  const parts = [
    ["sort", state.sort && (state.down ? "-" : "") + state.sort], ["state", state.state], ["q", state.text],
    ["groups", state.flat && "off"], ["open", [...state.open].join(",")],
    ["n", state.most > ROWS_AT_ONCE && String(state.most)],
  ];
  const written = text => encodeURIComponent(text).replaceAll("%2C", ",").replaceAll("%2F", "/");
  return parts.filter(([, value]) => value).map(([name, value]) => `${name}=${written(value)}`).join("&");
}

// The state after a click on a column's head: sorted, the other way round, and as without a sort.
export function sortedBy(state, key) {
  const first = Boolean(BY_KEY.get(key).down);
  if (state.sort !== key) return { sort: key, down: first };
  return state.down === first ? { sort: key, down: !first } : { sort: "", down: false };
}

function newestFirst(a, b) {
  return Number(b.live || false) - Number(a.live || false) || (b.started || 0) - (a.started || 0) || (a.id < b.id ? 1 : -1);
}

function order(state, now) {
  if (!state.sort) return newestFirst;
  const { value } = BY_KEY.get(state.sort), sign = state.down ? -1 : 1;
  return (a, b) => {
    const [one, other] = [value(a, now), value(b, now)];
    const [noOne, noOther] = [one === undefined || one === "", other === undefined || other === ""];
    if (noOne || noOther) return noOne - noOther || newestFirst(a, b); // what is not known comes last, either way
    return sign * (typeof one === "string" ? one.localeCompare(other, "en", { numeric: true }) : one - other) || newestFirst(a, b);
  };
}

function matches(row, state, words) {
  if (state.state && row.state !== state.state) return false;
  if (!words.length) return true;
  const text = [row.id, row.model, row.state, row.verdict, ...(row.group || []).slice(1)].join(" ").toLowerCase();
  return words.every(word => text.includes(word));
}

// What a folded group says of its jobs.
export function summary(rows) {
  const known = name => rows.map(row => row[name]).filter(value => value !== undefined);
  const states = {};
  for (const row of rows) states[row.state] = (states[row.state] || 0) + 1;
  const sum = values => values.length ? values.reduce((total, value) => total + value, 0) : undefined;
  return {
    states, live: rows.some(row => row.live), usd: sum(known("usd")),
    end: rows.every(row => row.usd === undefined || row.end !== undefined) ? sum(known("end")) : undefined,
    valid: known("valid").length ? Math.min(...known("valid")) : undefined,
    started: known("started").length ? Math.max(...known("started")) : undefined,
  };
}

// The lines of the table: jobs, and heads of groups, each where the first of its jobs would be.
export function arrange(rows, state, now) {
  const words = state.text.toLowerCase().split(/\s+/).filter(Boolean);
  const states = {}, sizes = new Map();
  for (const row of rows) {
    states[row.state] = (states[row.state] || 0) + 1;
    if (row.group) sizes.set(row.group[0], (sizes.get(row.group[0]) || 0) + 1);
  }
  const found = rows.filter(row => matches(row, state, words)).sort(order(state, now));
  const groups = new Map();
  const isGrouped = row => !state.flat && row.group && sizes.get(row.group[0]) > 1;
  for (const row of found) {
    if (!isGrouped(row)) continue;
    if (!groups.has(row.group[0])) groups.set(row.group[0], []);
    groups.get(row.group[0]).push(row);
  }
  const lines = [], told = new Set();
  for (const row of found) {
    if (!isGrouped(row)) {
      lines.push({ key: row.id, row });
      continue;
    }
    const [key, kind, name] = row.group;
    if (told.has(key)) continue;
    told.add(key);
    const members = groups.get(key), open = state.open.has(key);
    lines.push({ key: `group ${key}`, group: { key, kind, name, open, count: members.length, of: sizes.get(key), ...summary(members) } });
    if (open) lines.push(...members.map(member => ({ key: member.id, row: member, within: true })));
  }
  return { lines, states, found: found.length, total: summary(found) };
}
