"""A headless Chromium, spoken to through its debugging pipe: open a page, evaluate, see what it complained about.

Owns the browser's process and profile. No driver package: the protocol is JSON between NUL bytes (chromedevtools.github.io).
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), "")
BOUND_S = float(os.environ.get("TEST_BOUND_S", "200"))
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
         "--disable-background-networking", "--remote-debugging-pipe", "about:blank")  # fmt: skip


def need_chromium() -> None:
    """Skip, which is shown as a suite that was not run, where there is no browser."""
    if not CHROMIUM:
        pytest.skip("BROWSER NOT RUN: chromium is not installed (make system installs it where it may)")


class Browser:
    """One page of one browser; ``complaints`` is everything it wrote to its console as a warning or error, and failed loads;
    ``asked`` every URL it went for."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._ids, self._buffer = itertools.count(1), b""
        self.complaints: list[str] = []
        self.asked: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command and wait for its answer; events that come before it are kept."""
        number = next(self._ids)
        session = {"sessionId": self._session} if hasattr(self, "_session") else {}
        os.write(self._commands, json.dumps({"id": number, "method": method, "params": params} | session).encode() + b"\0")
        while (message := self._message()).get("id") != number:
            self._note(message)
        assert "error" not in message, f"{method}: {message['error']}"
        return dict(message["result"])

    def _message(self) -> dict[str, Any]:
        deadline = time.monotonic() + BOUND_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self._answers, 1 << 20)
            assert part, "the browser has ended"
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(text))

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method", ""), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"].get("exception", params["exceptionDetails"])))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(str([a.get("value") for a in params["args"]]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])

    def open(self, url: str) -> None:
        """Go to a page and wait until it is loaded."""
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def leave(self) -> None:
        """Go where nothing is asked for any more."""
        self.call("Page.navigate", url="about:blank")
        self.until("document.readyState === 'complete' && location.href === 'about:blank'")

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """As a screen of that many points: a phone where it is narrow."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, *, whole: bool = False) -> bytes:
        """PNG of what is on the screen, or of the whole page."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"])

    def evaluate(self, expression: str) -> Any:
        """Value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def until(self, expression: str) -> Any:
        """Poll until the expression is true; returns its value."""
        deadline = time.monotonic() + BOUND_S
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline, f"never true: {expression}; {self.complaints}; {self.text()[:2000]}"
            time.sleep(0.1)
        return value

    def text(self) -> str:
        """What a person reads."""
        return str(self.evaluate("document.body.innerText"))


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with a fresh profile under ``profile``; killed with the block."""
    need_chromium()
    to_browser, from_browser = os.pipe(), os.pipe()
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}"]
    inside = f'exec "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}'
    with (profile.parent / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", inside, "chromium", *command], pass_fds=(to_browser[0], from_browser[1]), stdin=subprocess.DEVNULL,
            stdout=log, stderr=log, start_new_session=True, env=os.environ | {"HOME": str(profile.parent)},
        )  # fmt: skip
    os.close(to_browser[0])
    os.close(from_browser[1])
    try:
        yield Browser(to_browser[1], from_browser[0])
    finally:
        os.killpg(process.pid, 9)
        process.wait()
        os.close(to_browser[1])
        os.close(from_browser[0])
