"""A tab of a headless Chromium, driven by the DevTools protocol."""

import asyncio
import base64
import contextlib
import itertools
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from patience import extend

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--hide-scrollbars",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--remote-debugging-port=0",
)
# what is wider than the page: elements that no ancestor scrolls or cuts
MEASURE = """(() => {
  const root = document.documentElement, room = root.clientWidth;
  const isContained = element => {
    for (let one = element.parentElement; one && one !== document.body; one = one.parentElement)
      if (getComputedStyle(one).overflowX !== "visible") return true;
    return false;
  };
  const wide = [...document.body.querySelectorAll("*")].filter(element => {
    const box = element.getBoundingClientRect();
    return box.width && box.height && box.right > room + 1 && box.left < room + 200 && !isContained(element);
  });
  const describe = one => `${one.tagName} ${one.className} ${(one.textContent || "").trim().slice(0, 60)}`;
  return {scroll: root.scrollWidth, room, height: root.scrollHeight, wide: wide.slice(0, 5).map(describe)};
})()"""


class Tab:
    """A tab; `complaints` are errors of its console and requests that left this machine or failed."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self.complaints: list[str] = []

    async def read(self) -> None:
        """Handle messages until the browser ends."""
        async for message in self._socket:
            told = message.json()
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
            else:
                self._note(told["method"], told["params"])

    def _note(self, method: str, told: dict[str, Any]) -> None:
        match method:
            case "Page.loadEventFired":
                self._loaded.set()
            case "Runtime.exceptionThrown":
                details = told["exceptionDetails"]
                self.complaints.append(str(details.get("exception", {}).get("description", details["text"])))
            case "Runtime.consoleAPICalled" if told["type"] in ("error", "assert"):
                self.complaints.append(str([one.get("value") for one in told["args"]]))
            case "Log.entryAdded" if told["entry"]["level"] == "error":
                self.complaints.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
            case "Network.requestWillBeSent" if not told["request"]["url"].startswith(
                ("file:", "data:", "blob:")
            ):
                self.complaints.append(f"it asks {told['request']['url']}")

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        told = await asyncio.wait_for(answer, extend(30))
        assert "error" not in told, (method, told)
        return told["result"]

    async def open(self, page: Path, width: int) -> dict[str, Any]:
        """Show a file at a width in pixels; return its `scroll` width, its `room`, and what is too `wide`."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        self._loaded.clear()
        await self.call("Page.navigate", url=page.absolute().as_uri())
        await asyncio.wait_for(self._loaded.wait(), extend(60))
        return await self.evaluate(MEASURE)

    async def evaluate(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript in the page."""
        told = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def take_picture(self, path: Path, height: int = 3000) -> None:
        """Write a PNG of the page, from its top."""
        room = await self.evaluate(
            "[document.documentElement.clientWidth, document.documentElement.scrollHeight]"
        )
        clip = {"x": 0, "y": 0, "width": room[0], "height": min(room[1], height), "scale": 1}
        told = await self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(told["data"]))


@contextlib.asynccontextmanager
async def open_tab(folder: Path) -> AsyncIterator[Tab]:
    """Start Chromium with a new profile in a folder, and yield a tab. Fails without Chromium."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.fail(f"none of {', '.join(PROGRAMS)} is installed (apt-get install chromium)")
    browser = await asyncio.create_subprocess_exec(
        program, *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank",
        stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        address = await asyncio.wait_for(_find_address(browser), extend(60))
        async with aiohttp.ClientSession() as session:
            async with session.put(f"http://{address}/json/new?about:blank") as answer:
                url = (await answer.json())["webSocketDebuggerUrl"]
            async with session.ws_connect(url, max_msg_size=0) as socket:
                tab = Tab(socket)
                reading = asyncio.create_task(tab.read())
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await tab.call(f"{domain}.enable")
                yield tab
                reading.cancel()
    finally:
        browser.terminate()
        await browser.communicate()


async def _find_address(browser: asyncio.subprocess.Process) -> str:
    """Return host and port of the browser's protocol."""
    assert browser.stderr is not None
    seen = b""
    while line := await browser.stderr.readline():
        seen += line
        if b"DevTools listening on ws://" in line:
            return line.decode().split("ws://")[1].split("/")[0]
    raise AssertionError(f"Chromium ended: {seen.decode()}")
