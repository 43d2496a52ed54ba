"""Take screenshots of TensorBoard's tabs for a sweep, in a Chromium of the system without a window."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tensorboard.program import TensorBoard

try:
    from playwright import sync_api
    from playwright.sync_api import Error as BrowserError
except ImportError:  # extra "docs"
    sync_api, BrowserError = None, OSError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
TIMEOUT = 60.0  # seconds for TensorBoard to find the runs, and for a tab to show its texts
DRAWING_TIME = 2.0  # seconds that a tab draws after its texts are there


class Failed(Exception):
    """An error whose message is one line."""


def plain_charts(page: sync_api.Page) -> None:
    """Show all points, since the last ones of a short run are no outliers, and hide the panel of settings."""
    page.locator(".scalars-ignore-outliers input").dispatch_event("click")
    page.locator("button.settings-button").dispatch_event("click")


def full_size(page: sync_api.Page) -> None:
    """Load every picture, and show it as large as it was drawn."""
    for image in page.locator("img").all():
        image.evaluate("image => image.decode()")
    page.locator("paper-checkbox", has_text="actual image size").click()


def plain_custom(page: sync_api.Page) -> None:
    """Switch off smoothing and the removal of outliers; then let each chart fill its row and fit its curves."""
    page.locator("paper-checkbox", has_text="outliers").click()
    page.locator("paper-slider").first.evaluate("slider => { slider.value = 0; }")
    page.wait_for_timeout(500)
    for icon in ("fullscreen", "settings-overscan"):
        for button in page.locator(f"paper-icon-button[icon={icon}]").all():
            button.dispatch_event("click")
        page.wait_for_timeout(500)


class Tab(NamedTuple):
    """A tab of TensorBoard.

    Attributes:
        address: end of its address.
        texts: texts that it must show.
        prepare: called with the page before the screenshot.
    """

    address: str
    texts: tuple[str, ...]
    prepare: Callable[[sync_api.Page], None] | None = None


TABS = {
    "scalars": Tab("?tagFilter=rpe%2F&runFilter=encodings&smoothing=0#timeseries", ("rpe/", "head1"), plain_charts),
    "images": Tab("#images&tagFilter=exp_bias", ("exp_bias/",), full_size),
    "hparams": Tab("#hparams", ("Hyperparameters", "evaluation/", "encoding")),
    "custom": Tab("#custom_scalars", ("validation loss", "of each head"), plain_custom),
}


def take_screenshot(page: sync_api.Page, base: str, tab: str, path: Path) -> None:
    """Write the PNG of one tab once it shows its texts; playwright's selectors also find elements in shadow roots."""
    page.goto(base + TABS[tab].address)
    for text in TABS[tab].texts:
        try:
            page.get_by_text(text).first.wait_for(state="attached")
        except sync_api.TimeoutError:
            raise Failed(
                f"tab '{tab}' does not show '{text}': was the sweep trained with --log-encodings-every?"
            ) from None
    if prepare := TABS[tab].prepare:
        prepare(page)
    page.wait_for_timeout(1000 * DRAWING_TIME)
    page.screenshot(path=path)


def serve(folder: Path, request: sync_api.APIRequestContext) -> str:
    """Start a TensorBoard in this process on a free port, wait until it has found the runs, and return its address."""
    board = TensorBoard()
    flags = ["--logdir", str(folder), "--host", "127.0.0.1", "--port", "0", "--load_fast", "false"]
    board.configure(["tensorboard", *flags])
    base = board.launch()
    deadline = time.monotonic() + TIMEOUT
    while not request.get(f"{base}data/runs").json():
        if time.monotonic() > deadline:
            raise Failed(f"TensorBoard shows no run of {folder}")
        time.sleep(0.2)
    return base


def take_screenshots(sweep: Path, out: Path, tabs: Sequence[str], width: int, height: int) -> None:
    """Write tensorboard-<tab>.png of each tab into ``out``, and print the paths."""
    folder = sweep / "tensorboard"
    if not folder.is_dir():
        raise Failed(f"{sweep} has no tensorboard folder: name the --out folder of a sweep")
    program = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if program is None:
        raise Failed("no browser: install chromium (Debian: apt-get install chromium)")
    if sync_api is None:
        raise Failed("playwright is missing: pip install -c requirements/constraints.txt -e '.[docs]'")
    out.mkdir(parents=True, exist_ok=True)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program)
        context = browser.new_context(viewport={"width": width, "height": height})
        context.set_default_timeout(1000 * TIMEOUT)
        base = serve(folder, context.request)
        for tab in tabs:
            path = out / f"tensorboard-{tab}.png"
            take_screenshot(context.new_page(), base, tab, path)
            print(path)
        browser.close()


def main() -> int:
    """Parse the command line and take the screenshots."""
    parser = argparse.ArgumentParser(prog="scripts/board_screenshot.sh", description=__doc__)
    parser.add_argument("sweep", type=Path, metavar="SWEEP", help="--out folder of a sweep with --log-encodings-every")
    parser.add_argument("out", type=Path, metavar="DIR", help="where tensorboard-<tab>.png are written")
    about = f"of {', '.join(TABS)} (default: scalars images hparams)"
    parser.add_argument("--tabs", nargs="+", choices=TABS, default=list(TABS)[:3], metavar="TAB", help=about)
    parser.add_argument("--size", default="1920x1000", metavar="WxH", help="of the window (default: %(default)s)")
    args = parser.parse_args()
    try:
        width, height = (int(number) for number in args.size.split("x"))
    except ValueError:
        parser.error(f"--size is WIDTHxHEIGHT in pixels, not '{args.size}'")
    try:
        take_screenshots(args.sweep, args.out, args.tabs, width, height)
    except (Failed, BrowserError) as error:
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
