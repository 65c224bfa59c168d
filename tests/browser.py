"""The system's Chromium without a window, driven over its DevTools protocol: what page tests need of a browser.

https://chromedevtools.github.io/devtools-protocol/
"""

import asyncio
import base64
import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import websockets

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
START_S = 60.0
ANSWER_S = 30.0
LOOK_AGAIN_S = 0.05
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


def browser_program() -> str:
    """Path of the browser. Without one the test skips, but where CI is true it fails."""
    found = next((path for name in PROGRAMS if (path := shutil.which(name))), None)
    if found is None:
        words = "no Chromium on this machine: tools/system_packages.sh installs it"
        if os.environ.get("CI") == "true":
            pytest.fail(words)
        pytest.skip(words)
    return found


@dataclass
class Page:
    """One page. `console` and `requests` are what it has said and asked for so far."""

    socket: Any
    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    _numbers: Any = field(default_factory=lambda: itertools.count(1))
    _answers: dict[int, "asyncio.Future[Any]"] = field(default_factory=dict)

    async def call(self, method: str, **parameters: Any) -> Any:
        """One command of the protocol."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self.socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        async with asyncio.timeout(ANSWER_S):
            return await answer

    async def open(self, url: str) -> None:
        """Goes there; the page may go on loading."""
        await self.call("Page.navigate", url=url)

    async def run(self, script: str) -> Any:
        """The value of an expression, or of the promise that it is."""
        answer = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, script: str, timeout_s: float = 30.0) -> Any:
        """The first truthy value of an expression."""
        due = time.monotonic() + timeout_s
        while not (value := await self.run(script)):
            assert time.monotonic() < due, f"{script}: not within {timeout_s} s; the page says {await self.text('body')!r}"
            await asyncio.sleep(LOOK_AGAIN_S)
        return value

    async def text(self, selector: str) -> str:
        """Text of the first element that fits, as it is seen; empty when there is none."""
        return str(await self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    async def click(self, selector: str) -> None:
        """Clicks on the first element that fits, which must be there."""
        await self.run(f"document.querySelector({json.dumps(selector)}).click()")

    async def shows(self, selector: str, words: str, timeout_s: float = 30.0) -> None:
        """Waits until an element that fits has these words."""
        looked = json.dumps(selector), json.dumps(words)
        script = "[...document.querySelectorAll({})].some((one) => one.innerText.includes({}))".format(*looked)
        await self.until(script, timeout_s)

    async def look(self, width: int, height: int, scheme: str = "light") -> None:
        """Size of the window in pixels, and the system's colours: light or dark."""
        await self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def picture(self) -> bytes:
        """What is seen, as PNG."""
        return base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])

    def take(self, message: dict[str, Any]) -> None:
        """Notes an answer or an event."""
        if "id" in message:
            waiting = self._answers.pop(message["id"], None)
            if waiting is not None and not waiting.done():
                if "error" in message:
                    waiting.set_exception(AssertionError(str(message["error"])))
                else:
                    waiting.set_result(message["result"])
            return
        parameters = message.get("params", {})
        if message["method"] == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif message["method"] == "Runtime.consoleAPICalled":
            self.console += [str(one.get("value", one.get("description"))) for one in parameters["args"]]
        elif message["method"] == "Runtime.exceptionThrown":
            self.console.append(str(parameters["exceptionDetails"]))
        elif message["method"] == "Log.entryAdded":
            entry = parameters["entry"]
            self.console.append(f"{entry['source']} {entry['level']}: {entry['text']}")


@asynccontextmanager
async def browser_page(*, any_certificate: bool = False) -> AsyncIterator[Page]:
    """A page of a fresh browser, which is gone after the block with all that it kept. `any_certificate`: it knows no authority of
    a test, so a page over https needs that."""
    program = browser_program()
    with tempfile.TemporaryDirectory(prefix="tandem-browser-", ignore_cleanup_errors=True) as folder:
        quiet = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            program, *_FLAGS, f"--user-data-dir={folder}", "about:blank", stdin=quiet, stdout=quiet, stderr=quiet
        )
        try:
            async with websockets.connect(await _page_address(Path(folder)), max_size=None) as socket:
                page = Page(socket)
                reading = asyncio.create_task(_read(socket, page))
                for domain in ("Page", "Runtime", "Network", "Log"):
                    await page.call(f"{domain}.enable")
                await page.call("Security.setIgnoreCertificateErrors", ignore=any_certificate)
                yield page
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
        finally:
            if process.returncode is None:
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), ANSWER_S)
            except TimeoutError:
                process.kill()
                await process.wait()


async def _page_address(folder: Path) -> str:
    """Where the browser's first page listens: it writes its port into its folder, and tells its pages over HTTP."""
    port_file, due = folder / "DevToolsActivePort", time.monotonic() + START_S
    while not port_file.exists() or not port_file.read_text().strip():
        assert time.monotonic() < due, "the browser did not start"
        await asyncio.sleep(LOOK_AGAIN_S)
    port = int(port_file.read_text().split()[0])
    while True:
        for target in json.loads(await _get(port, "/json/list")):
            if target["type"] == "page":
                return str(target["webSocketDebuggerUrl"])
        assert time.monotonic() < due, "the browser has no page"
        await asyncio.sleep(LOOK_AGAIN_S)


async def _get(port: int, path: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = next(int(line.partition(":")[2]) for line in head.splitlines() if line.startswith("content-length"))
        return (await reader.readexactly(length)).decode()
    finally:
        writer.close()


async def _read(socket: Any, page: Page) -> None:
    async for message in socket:
        page.take(json.loads(message))
