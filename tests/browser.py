"""A headless Chromium over its debugging pipe: opens a page from disk and says what the page did.

The DevTools protocol runs over two inherited file descriptors, JSON messages ended by a NUL byte, so that no port is
opened and no driver is needed.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
         "--disable-dev-shm-usage", "--remote-debugging-pipe")  # fmt: skip


def chromium() -> str | None:
    """The path of a Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab: sends commands and keeps every event that arrived meanwhile."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process, self.number, self.session, self.events = process, 0, "", list[dict[str, Any]]()
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and wait for its answer."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\0")
        self.process.stdin.flush()
        while True:
            answer = self._read()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        written = bytearray()
        while (byte := self.process.stdout.read(1)) != b"\0":
            assert byte, "Chromium ended."
            written += byte
        return json.loads(written)

    def open(self, path: Path, *, width: int, height: int = 900, dark: bool = False, media: str = "") -> None:
        """Open a file at that window size and wait until it has loaded."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.events.clear()
        self.send("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def complaints(self) -> list[Any]:
        """Console messages, exceptions and log entries so far."""
        self.send("Runtime.evaluate", expression="0")
        wanted = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [event["params"] for event in self.events if event.get("method") in wanted]

    def requests(self) -> list[str]:
        """Every address that the page asked for, itself included."""
        self.send("Runtime.evaluate", expression="0")
        sent = (event for event in self.events if event.get("method") == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in sent]

    def screenshot(self, target: Path, top: float | None = None, height: float = 900) -> None:
        """A PNG of the whole page, or of `height` pixels from `top`."""
        box = self.evaluate("[document.documentElement.clientWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": top or 0, "width": box[0], "height": box[1] if top is None else height, "scale": 1}
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        target.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self, target: Path) -> None:
        """The page as it prints on A4."""
        printed = self.send("Page.printToPDF", paperWidth=8.27, paperHeight=11.69, printBackground=False)
        target.write_bytes(base64.b64decode(printed["data"]))


@contextmanager
def open_browser(binary: str) -> Iterator[Page]:
    """A fresh browser with a profile of its own; both are gone afterwards."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The shell hands its own pipes on as descriptors 3 and 4, where the browser looks for them.
        words = ["sh", "-c", 'exec "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1', "sh"]
        command = [*words, binary, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(os.environ))
        try:
            yield Page(process)
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
