"""Photograph TensorBoard's tabs for a sweep, in a headless Chromium that is driven over its debugging pipe."""

from __future__ import annotations

import argparse
import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WAIT = 60.0  # seconds for TensorBoard to answer, and for a tab to show what it must
SETTLE = 2.0  # seconds for drawing, once the data is there


def _walk(before: str, each: str, after: str = "") -> str:
    """JavaScript that does ``each`` to every node, through the shadow roots of TensorBoard's components."""
    return f"""(() => {{
  {before}
  const walk = (node) => {{
    {each}
    if (node.shadowRoot) walk(node.shadowRoot);
    for (const child of node.childNodes || []) walk(child);
  }};
  walk(document.body);
  {after}
}})()"""


TEXT = _walk("const seen = [];", "if (node.nodeType === 3) seen.push(node.data);", "return seen.join(' ');")
LOADED = _walk(
    "const images = [];",
    "if (node.tagName === 'IMG') images.push(node);",
    "return images.length > 0 && images.every((image) => image.complete && image.naturalWidth > 0);",
)
# The last points of a short run are no outliers, and the panel of settings takes a quarter of the width.
PLAIN_CHARTS = """(() => {
  document.querySelector('.scalars-ignore-outliers input')?.click();
  setTimeout(() => document.querySelector('button.settings-button')?.click(), 200);
})()"""
PLAIN_CUSTOM = _walk(
    "const fit = [];",
    """if (node.tagName === 'PAPER-CHECKBOX' && node.textContent.includes('outliers')) node.click();
    if (node.tagName === 'PAPER-SLIDER') node.value = 0;
    if (node.tagName === 'PAPER-ICON-BUTTON' && node.icon === 'settings-overscan') fit.push(node);""",
    "setTimeout(() => fit.forEach((button) => button.click()), 500);",
)
FULL_SIZE = _walk(
    "", "if (node.tagName === 'PAPER-CHECKBOX' && node.textContent.includes('actual image size')) node.click();"
)
# name -> address, what must be on the page, what more must hold, what to do before the picture
TABS: dict[str, tuple[str, list[str], str, str]] = {
    "scalars": (
        "/?tagFilter=rpe%2F&runFilter=encodings&smoothing=0#timeseries",
        ["rpe/", "head1"],
        "true",
        PLAIN_CHARTS,
    ),
    "images": ("/#images&tagFilter=exp_bias", ["exp_bias/"], LOADED, FULL_SIZE),
    "hparams": ("/#hparams", ["Hyperparameters", "evaluation/", "encoding"], "true", ""),
    "custom": ("/#custom_scalars", ["Learned parameters"], "true", PLAIN_CUSTOM),
}


class Failed(Exception):
    """Told in one line."""


class Browser:
    """A tab of Chromium; messages are JSON ended by a zero byte, on its file descriptors 3 and 4."""

    def __init__(self, program: str, profile: str, width: int, height: int) -> None:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
        flags += ["--disable-background-networking", "--disable-component-update", "--disable-3d-apis"]
        flags += ["--hide-scrollbars", f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        there, self._out = _pipe()
        self._in, back = _pipe()
        command = ["bash", "-c", f'exec "$@" 3<&{there} 4>&{back} {there}<&- {back}>&-', "chromium", program]
        self._child = subprocess.Popen(
            [*command, *flags, "--remote-debugging-pipe"],
            pass_fds=(there, back),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(there)
        os.close(back)
        self._buffer, self._count, self._session = b"", 0, None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command; events in between are of no interest."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + WAIT
        while True:
            answer = self._read(deadline, method)
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise Failed(f"the browser refused {method}: {answer['error'].get('message')}")
                return answer["result"]

    def _read(self, deadline: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            block = os.read(self._in, 1 << 16) if ready else b""
            if not block:
                raise Failed(f"the browser {'ended' if ready else 'did not answer'} at {method}")
            self._buffer += block
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives in the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def close(self) -> None:
        with contextlib.suppress(Failed, OSError):
            self._session = None
            self.call("Browser.close")
        try:
            self._child.wait(10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        os.close(self._in)
        os.close(self._out)


def _pipe() -> tuple[int, int]:
    """A pipe whose ends leave 3 and 4 free, where the browser will want it."""
    ends = os.pipe()
    moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return moved


def photograph(browser: Browser, base: str, tab: str) -> bytes:
    """The PNG of one tab, taken when what it must show is there."""
    path, needles, holds, before = TABS[tab]
    browser.call("Page.navigate", url="about:blank")  # otherwise only the fragment changes, and nothing is loaded
    browser.call("Page.navigate", url=base + path)
    deadline = time.monotonic() + WAIT
    while True:
        text = browser.value(TEXT) or ""
        missing = [needle for needle in needles if needle not in text]
        if not missing and browser.value(holds):
            break
        if time.monotonic() > deadline:
            what = f"'{missing[0]}'" if missing else "its pictures"
            raise Failed(f"tab '{tab}' does not show {what}: was the sweep trained with --inspect-every?")
        time.sleep(0.2)
    if before:
        browser.value(before)
    time.sleep(SETTLE)
    return base64.b64decode(browser.call("Page.captureScreenshot", format="png")["data"])


@contextlib.contextmanager
def tensorboard(folder: Path) -> Iterator[str]:
    """TensorBoard on a free port of this machine for as long as the block lasts; yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--host", "127.0.0.1"]
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen([*command, "--port", str(port)], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        base = f"http://127.0.0.1:{port}"
        try:
            deadline = time.monotonic() + WAIT
            while not _runs(base):
                if child.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    last = log.read().decode(errors="replace").strip().splitlines() or ["no message"]
                    raise Failed(f"TensorBoard shows no run of {folder}: {last[-1]}")
                time.sleep(0.2)
            yield base
        finally:
            child.terminate()
            child.wait()


def _runs(base: str) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        return bool(json.load(direct.open(base + "/data/runs", timeout=5)))
    except OSError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/board_screenshot.sh", description=__doc__)
    parser.add_argument("sweep", type=Path, metavar="SWEEP", help="--out folder of a sweep with --inspect-every")
    parser.add_argument("out", type=Path, metavar="DIR", help="where tensorboard-<tab>.png are written")
    parser.add_argument(
        "--tabs",
        nargs="+",
        choices=tuple(TABS),
        default=["scalars", "images", "hparams"],
        metavar="TAB",
        help=f"of {', '.join(TABS)} (default: scalars images hparams)",
    )
    parser.add_argument("--size", default="1920x1000", metavar="WxH", help="of the window (default: 1920x1000)")
    args = parser.parse_args()
    try:
        width, height = (int(part) for part in args.size.split("x"))
    except ValueError:
        parser.error(f"--size is WIDTHxHEIGHT in pixels, not '{args.size}'")
    try:
        folder = args.sweep / "tensorboard"
        if not folder.is_dir():
            raise Failed(f"{args.sweep} has no tensorboard folder: name the --out folder of a sweep")
        program = next((found for name in BROWSERS if (found := shutil.which(name))), None)
        if program is None:
            raise Failed("no browser: install chromium (Debian: apt-get install chromium)")
        args.out.mkdir(parents=True, exist_ok=True)
        with tensorboard(folder) as base, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            browser = Browser(program, profile, width, height)
            try:
                for tab in args.tabs:
                    path = args.out / f"tensorboard-{tab}.png"
                    path.write_bytes(photograph(browser, base, tab))
                    print(path)
            finally:
                browser.close()
    except Failed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
