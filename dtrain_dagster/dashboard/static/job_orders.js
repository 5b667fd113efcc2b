// Orders: cancel, resume. The server says which can be given.
"use strict";

const orders = { allowed: {}, last: null };
const ORDERS = {
  cancel: {
    button: "Cancel…", title: "Cancel this job?", does: "Cancel the job",
    text: "Every process is asked to save a checkpoint and to stop. The cost so far remains; Resume continues from the checkpoint.",
  },
  resume: {
    button: "Resume…", title: "Resume this job?", does: "Resume the job",
    text: "It continues from its latest checkpoint, on as many nodes as were ordered. They are bought with the settings of this dashboard.",
  },
};

function buildOrders() {
  if (!PAGE.orders) return;
  element("orders").hidden = false;
  for (const order of ["resume", "cancel"]) {
    const button = make("button", order === "cancel" ? "danger" : "", ORDERS[order].button);
    button.type = "button";
    button.id = `order-${order}`;
    button.hidden = true;
    button.addEventListener("click", () => confirmOrder(order));
    element("orders").append(button);
  }
  const why = make("span", { id: "order-why", class: "quiet" }); // a title is not for a keyboard, nor for a phone
  element("orders").append(why);
  element("order-resume").setAttribute("aria-describedby", why.id);
}

function confirmOrder(order) {
  const dialog = make("dialog");
  const words = ORDERS[order];
  const title = make("h2", "", words.title);
  title.id = "dialog-title";
  dialog.setAttribute("aria-labelledby", "dialog-title");
  dialog.append(title, make("p", "name", job.id), make("p", "", words.text));
  const bar = make("div", "bar");
  const no = make("button", "", "Leave it");
  const yes = make("button", order === "cancel" ? "danger" : "", words.does);
  no.type = yes.type = "button";
  no.addEventListener("click", () => dialog.close());
  yes.addEventListener("click", () => {
    dialog.close();
    giveOrder(order);
  });
  dialog.addEventListener("close", () => dialog.remove());
  bar.append(no, yes);
  dialog.append(bar);
  document.body.append(dialog);
  dialog.showModal();
  no.focus();
}

function tellOrder(text, command) {
  const box = element("order");
  box.hidden = !text;
  box.replaceChildren(make("span", "", text));
  if (command) box.append("\n", make("code", "", command));
}

async function giveOrder(order) {
  tellOrder(`${ORDERS[order].does}: asked…`);
  const headers = { "Content-Type": "application/json" };
  try {
    const response = await fetch(`${encodeURIComponent(job.id)}/orders`, { method: "POST", headers, body: JSON.stringify({ order }) });
    if (!response.ok) {
      tellOrder(`${ORDERS[order].does}: ${(await response.text()).trim()}.`);
      return;
    }
    orders.mine = true;
    await pollOrders();
  } catch {
    tellOrder("The dashboard's server does not answer.");
  }
}

async function pollOrders() {
  if (!PAGE.orders) return;
  const body = await ask(`${encodeURIComponent(job.id)}/orders.json`);
  orders.allowed = body.allowed;
  const busy = body.last !== null && body.last.code === null;
  for (const [order, reason] of Object.entries(body.allowed)) {
    const button = element(`order-${order}`);
    button.disabled = busy || Boolean(reason);
    button.title = reason;
    button.hidden = Boolean(reason) && !(order === "resume" && !["it runs", "it has succeeded"].includes(reason));
  }
  const resume = element("order-resume");
  element("order-why").textContent = !resume.hidden && body.allowed.resume ? `cannot be resumed here: ${body.allowed.resume}` : "";
  const before = orders.last;
  orders.last = body.last;
  if (!body.last || JSON.stringify(body.last) === JSON.stringify(before)) return;
  if (before === null && !busy && !orders.mine) return; // of before this page was opened
  const what = ORDERS[body.last.order].does;
  if (busy) tellOrder(`${what}: under way since ${clock(body.last.since)}.`, body.last.command);
  else tellOrder(`${what}: ${body.last.code ? `refused or failed (exit code ${body.last.code}).` : "done."}${body.last.said ? `\n${body.last.said}` : ""}`, body.last.command);
}
