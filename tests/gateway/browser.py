"""A real browser for tests of pages: Debian's chromium, driven over its DevTools protocol."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.request
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest
from served import eventually
from websockets.sync.client import connect

SWITCHES: Final = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0",
)  # fmt: skip
PHONE: Final = (390, 844)
DESK: Final = (1280, 900)


class Tab:
    """A tab of a browser.

    Args:
        address: of its DevTools, a WebSocket.
    """

    def __init__(self, address: str) -> None:
        self._socket = connect(address, max_size=None, open_timeout=60, compression=None)
        self._numbers = count(1)

    def close(self) -> None:
        self._socket.close()

    def call(self, method: str, **given: Any) -> dict[str, Any]:
        """The result of a DevTools method."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": given}))
        while True:
            answer = json.loads(self._socket.recv(timeout=60))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                found: dict[str, Any] = answer["result"]
                return found

    def open(self, url: str, size: tuple[int, int] = DESK, *, dark: bool = False) -> None:
        """Goes to a page."""
        width, height = size
        self.call("Page.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=True)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        assert eventually(lambda: self.run("document.readyState") == "complete")

    def run(self, script: str) -> Any:
        """The value of an expression in the page, of JSON."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def text(self) -> str:
        """What a person sees, in words."""
        shown: str = self.run("document.body.innerText")
        return shown

    def shows(self, *words: str) -> bool:
        """Whether the page comes to show all of these."""
        return eventually(lambda: all(word in self.text() for word in words))

    def click(self, text: str) -> None:
        """Clicks the first button with this text, which comes."""
        buttons = "[...document.querySelectorAll('button')]"
        found = f"{buttons}.find(one => one.offsetParent && one.innerText === {json.dumps(text)})"
        assert eventually(lambda: self.run(f"!!{found}")), self.text()
        self.run(f"{found}.click()")

    def type(self, selector: str, text: str) -> None:
        """Types into a field, and sends it."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r"
            )

    def picture(self, file: Path) -> None:
        """Writes the whole page to a PNG file, for a person."""
        file.write_bytes(b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]))


class Browser:
    """A running browser, whose tabs share nothing that a page keeps for a session."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/json/new?about:blank"

    @contextmanager
    def tab(self) -> Iterator[Tab]:
        """A new tab."""
        with urllib.request.urlopen(urllib.request.Request(self._url, method="PUT"), timeout=60) as answer:
            tab = Tab(json.loads(answer.read())["webSocketDebuggerUrl"])
        try:
            yield tab
        finally:
            tab.close()


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser with a profile in this folder; the test is skipped where there is none."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("a page is tested in a real browser: chromium is not on the PATH")
    profile = folder / "profile"
    told = profile / "DevToolsActivePort"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [program, *SWITCHES, f"--user-data-dir={profile}", "about:blank"], stdout=log, stderr=log
        )
    try:
        started = eventually(lambda: process.poll() is not None or (told.exists() and "\n" in told.read_text()))
        assert started, "the browser does not start"
        assert process.poll() is None, (folder / "log").read_text()
        yield Browser(int(told.read_text().split()[0]))
    finally:
        process.terminate()
        process.wait(60)
