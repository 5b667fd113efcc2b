"""Film the README's animated picture: a real training of three nodes in the real dashboard, of which node 1 is slow and
node 2 is killed. ``python docs/pictures/story.py``, in a home that has a dataset (after ``make run``)."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
from PIL import Image, ImageDraw, ImageFont
from playwright.sync_api import Page
from windows import BIN, browser, dashboard

from dtrain_dagster.cli.common import run_dir
from dtrain_dagster.settings.environment import load_settings

HERE = Path(__file__).parent
JOB = f"story-{int(time.time())}"
SIZE = (1240, 620)
WIDTH = 900
"""Pixels of the window, and of the picture's width."""
FRAME_MILLISECONDS = 700
SLOW = [{"kind": "sleep", "at": "forward", "node": 1, "every": True, "seconds": 0.05}]
"""Node 1 waits this long in each micro-batch, as if its machine were slow."""


def main() -> None:
    """Train, film, and write ``story.gif``."""
    nodes = {**os.environ, "DTRAIN_FAULTS": json.dumps(SLOW)}
    command = ["train", "--dataset", "latest", "--nodes", "3", "--epochs", "3", "--name", JOB, "--detach"]
    subprocess.run([BIN / "dtrain", *command], env=nodes, check=True, stdout=subprocess.DEVNULL)
    try:
        with dashboard() as url, browser() as chromium:
            page = chromium.new_page(viewport={"width": SIZE[0], "height": SIZE[1]}, color_scheme="light")
            page.goto(f"{url}jobs/{JOB}")
            frames = film(page)
    finally:
        subprocess.run([BIN / "dtrain", "cancel", JOB], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    small = [frame.quantize(64, method=Image.Quantize.FASTOCTREE) for frame in frames]
    small[0].save(
        HERE / "story.gif", save_all=True, append_images=small[1:], duration=FRAME_MILLISECONDS, loop=0, optimize=True
    )


def film(page: Page) -> list[Image.Image]:
    """Return frames: until node 1 is named, the kill of node 2, the others going on, and the replacement."""
    frames: list[Image.Image] = []
    seen = wait_until(page, "node 1)", "three nodes train; node 1 is slow, and the first line names it", frames)
    assert seen, "node 1 was not named"
    record(page, 5, "three nodes train; node 1 is slow, and the first line names it", frames)
    kill_node(2)
    wait_until(page, "lost", "kill -9 of node 2", frames)
    record(page, 5, f"the others go on: {stopped_for('lost')} without training", frames)
    wait_until(page, "took in", "a replacement is on its way", frames)
    record(page, 6, "it got the state from the others: three nodes train again", frames)
    return frames


def kill_node(number: int) -> None:
    """Kill the processes of a node as a power cut would."""
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if f"/{JOB}/job.json" in line and "-m trainer" in line and process.environ().get("GROUP_RANK") == str(number):
            process.send_signal(signal.SIGKILL)


def stopped_for(word: str) -> str:
    """Return how long the newest regroup of this job took."""
    settings = load_settings()
    events = [row for row in run_dir(settings, JOB).events() if row.get("kind") == "membership" and row.get(word)]
    return f"{events[-1]['seconds']:.2f} s" if events else "a moment"


def wait_until(page: Page, words: str, caption: str, frames: list[Image.Image], most: int = 90) -> bool:
    """Film every third second until the page has these words; return whether it came to that."""
    for number in range(most):
        if page.get_by_text(words).count():
            return True
        if number % 3 == 0:
            record(page, 1, caption, frames)
        else:
            page.wait_for_timeout(FRAME_MILLISECONDS)
    return False


def record(page: Page, count: int, caption: str, frames: list[Image.Image]) -> None:
    """Add frames, with a line below that says what happens."""
    font = ImageFont.load_default(size=20)
    for _ in range(count):
        shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        shot = shot.resize((WIDTH, round(WIDTH * shot.height / shot.width)), Image.Resampling.LANCZOS)
        frame = Image.new("RGB", (WIDTH, shot.height + 36), "#1f2430")
        frame.paste(shot, (0, 0))
        ImageDraw.Draw(frame).text((12, shot.height + 5), caption, fill="white", font=font)
        frames.append(frame)
        page.wait_for_timeout(FRAME_MILLISECONDS)


if __name__ == "__main__":
    main()
