"""MLflow's first page, which begins with what this project writes: runs of trainings.

MLflow's pages begin with traces of language models, whatever kind an experiment is of, until a person has switched to
*Model training*; the choice is then kept in the browser. Here it begins as that, and stays a person's choice.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

SCRIPT = (
    b'<script>try{const k="mlflow.workflowType_v1";'
    b'if(localStorage.getItem(k)===null)localStorage.setItem(k,JSON.stringify("machine_learning"))}catch{}</script>'
)
"""Where the browser has no choice yet, it gets this one. The key and the value are those of MLflow 3.17's own page; to
one that has others it does nothing."""
_VALIDATORS = (b"content-length", b"etag", b"last-modified")


class BeginsWithTrainings:
    """MLflow's application, whose first page has `SCRIPT` in its head."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; every other page is passed on as it is."""
        if scope["type"] != "http" or scope["method"] != "GET" or scope["path"] != "/":
            return await self.app(scope, receive, send)
        start: Message = {}
        body = b""

        async def keep(message: Message) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start":
                start = message
                return
            body += message.get("body", b"")
            if not message.get("more_body"):
                page = with_script(body)
                headers = [pair for pair in start["headers"] if pair[0].lower() not in _VALIDATORS]
                await send({**start, "headers": [*headers, (b"content-length", str(len(page)).encode())]})
                await send({"type": "http.response.body", "body": page})

        # A file that could be sent by the server itself, or not at all if the browser has it, could not be changed.
        extensions = {name: value for name, value in scope.get("extensions", {}).items() if "pathsend" not in name}
        headers = [pair for pair in scope["headers"] if not pair[0].lower().startswith(b"if-")]
        await self.app({**scope, "extensions": extensions, "headers": headers}, receive, keep)


def with_script(page: bytes) -> bytes:
    """Return the page with `SCRIPT` at the beginning of its head; unchanged if it has none. Pure."""
    return page.replace(b"<head>", b"<head>" + SCRIPT, 1)
