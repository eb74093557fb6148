"""A real browser for tests: Chromium without a window, driven over its DevTools protocol.

Wants nothing but the browser: the protocol is JSON over a web socket, which tornado speaks.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tornado.websocket import websocket_connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LIMIT = 60.0
"""Seconds that the browser has for anything; a busy machine starts it slowly."""
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests run as root too, which its sandbox refuses
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    "--remote-debugging-port=0",
)


def executable() -> str:
    """The browser, or skip and say so."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser is installed: none of {', '.join(NAMES)}")
    return found


@contextlib.contextmanager
def open_page(url: str = "", width: int = 1400, height: int = 900) -> Iterator[Page]:
    """A page in a browser of its own; nothing of it is left afterwards."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        size = f"--window-size={width},{height}"
        command = [executable(), *FLAGS, size, f"--user-data-dir={profile}", "about:blank"]
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(command, stdout=quiet, stderr=quiet, start_new_session=True)
        try:
            page = Page(_port(Path(profile), process))
            page.resize(width, height)
            try:
                if url:
                    page.go(url)
                yield page
            finally:
                page.close()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(LIMIT)


def _port(profile: Path, process: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + LIMIT
    file = profile / "DevToolsActivePort"
    while not file.exists() or "\n" not in file.read_text():
        assert process.poll() is None, "the browser did not start"
        assert time.monotonic() < deadline, "the browser does not listen"
        time.sleep(0.05)
    return int(file.read_text().splitlines()[0])


class Page:
    """One tab. Blocks the calling thread, on a loop of its own."""

    def __init__(self, port: int) -> None:
        self.errors: list[str] = []
        """What the page's scripts raised or logged as an error, and resources that failed."""
        self._loop = asyncio.new_event_loop()
        self._numbers = itertools.count(1)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=LIMIT) as answer:
            tab = next(tab for tab in json.load(answer) if tab["type"] == "page")
        self._socket = self._loop.run_until_complete(_connect(tab["webSocketDebuggerUrl"]))
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def resize(self, width: int, height: int, scale: float = 1) -> None:
        """Give the page another size, in CSS pixels; ``scale`` makes more of them in pictures."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    def call(self, method: str, **params: Any) -> Any:
        """A command of the protocol, and its result."""
        return self._loop.run_until_complete(asyncio.wait_for(self._call(method, params), LIMIT))

    async def _call(self, method: str, params: dict[str, Any]) -> Any:
        number = next(self._numbers)
        await self._socket.write_message(
            json.dumps({"id": number, "method": method, "params": params})
        )
        while True:
            message = json.loads(await self._socket.read_message())
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        match message.get("method"), message.get("params", {}):
            case "Runtime.exceptionThrown", params:
                details = params["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description", str(details)))
            case "Runtime.consoleAPICalled", {"type": "error", "args": args}:
                self.errors.append(" ".join(str(arg.get("value")) for arg in args))
            case "Network.responseReceived", {"response": response}:
                if response["status"] >= 400:
                    self.errors.append(f"{response['status']} {response['url']}")

    def go(self, url: str) -> None:
        """Load another page in the tab."""
        self.errors.clear()
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, which may be a promise."""
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait until an expression is true; its value."""
        deadline = time.monotonic() + LIMIT
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline, f"{expression}: never true; {self.errors}"
            time.sleep(0.05)
        return value

    def click(self, text: str) -> None:
        """Click on the first link or button with a text."""
        self.evaluate(
            "[...document.querySelectorAll('a, button')]"
            f".find(e => e.textContent.trim() === {json.dumps(text)}).click()"
        )

    def move(self, x: float, y: float) -> None:
        """Move the mouse there."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path | str) -> None:
        """Save what is seen as PNG."""
        data = self.call("Page.captureScreenshot", format="png")["data"]
        Path(path).write_bytes(base64.b64decode(data))

    def close(self) -> None:
        self._loop.run_until_complete(self._hang_up())
        self._loop.close()

    async def _hang_up(self) -> None:
        self._socket.close()


async def _connect(url: str) -> Any:
    return await websocket_connect(url, max_message_size=1 << 28)


def data_url(html: str) -> str:
    """A page of its own source."""
    return "data:text/html;charset=utf-8," + urllib.parse.quote(html)
