"""Photograph TensorBoard's tabs for a sweep, in the system's own Chromium without a window."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tensorboard.program import TensorBoard

try:
    from playwright import sync_api
    from playwright.sync_api import Error as BrowserError
except ImportError:  # extra "docs"
    sync_api, BrowserError = None, OSError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WAIT = 60.0  # seconds for TensorBoard to find the runs, and for a tab to show what it must
SETTLE = 2.0  # seconds for drawing, once the data is there


class Failed(Exception):
    """Told in one line."""


def plain_charts(page: sync_api.Page) -> None:
    """The last points of a short run are no outliers, and the panel of settings takes a quarter of the width."""
    page.locator(".scalars-ignore-outliers input").dispatch_event("click")
    page.locator("button.settings-button").dispatch_event("click")


def full_size(page: sync_api.Page) -> None:
    """Every picture is loaded and as large as it was drawn."""
    for image in page.locator("img").all():
        image.evaluate("image => image.decode()")
    page.locator("paper-checkbox", has_text="actual image size").click()


def plain_custom(page: sync_api.Page) -> None:
    """No smoothing and no outliers, and then each chart fills its row and fits its curves."""
    page.locator("paper-checkbox", has_text="outliers").click()
    page.locator("paper-slider").first.evaluate("slider => { slider.value = 0; }")
    page.wait_for_timeout(500)
    for icon in ("fullscreen", "settings-overscan"):
        for button in page.locator(f"paper-icon-button[icon={icon}]").all():
            button.dispatch_event("click")
        page.wait_for_timeout(500)


# name -> address, texts that must be on the page, what to do before the picture
TABS: dict[str, tuple[str, tuple[str, ...], Callable[[sync_api.Page], None] | None]] = {
    "scalars": ("?tagFilter=rpe%2F&runFilter=encodings&smoothing=0#timeseries", ("rpe/", "head1"), plain_charts),
    "images": ("#images&tagFilter=exp_bias", ("exp_bias/",), full_size),
    "hparams": ("#hparams", ("Hyperparameters", "evaluation/", "encoding"), None),
    "custom": ("#custom_scalars", ("validation loss", "of each head"), plain_custom),
}


def photograph(page: sync_api.Page, base: str, tab: str, path: Path) -> None:
    """Write the PNG of one tab when what it must show is there; selectors see into shadow roots."""
    address, texts, prepare = TABS[tab]
    page.goto(base + address)
    for text in texts:
        try:
            page.get_by_text(text).first.wait_for(state="attached")
        except sync_api.TimeoutError:
            raise Failed(
                f"tab '{tab}' does not show '{text}': was the sweep trained with --log-encodings-every?"
            ) from None
    if prepare:
        prepare(page)
    page.wait_for_timeout(1000 * SETTLE)
    page.screenshot(path=path)


def serve(folder: Path, request: sync_api.APIRequestContext) -> str:
    """The address of a TensorBoard in this process, on a free port, that has found the runs."""
    board = TensorBoard()
    where = ["--logdir", str(folder), "--host", "127.0.0.1", "--port", "0"]
    board.configure(["tensorboard", *where, "--load_fast", "false"])
    base = board.launch()
    deadline = time.monotonic() + WAIT
    while not request.get(f"{base}data/runs").json():
        if time.monotonic() > deadline:
            raise Failed(f"TensorBoard shows no run of {folder}")
        time.sleep(0.2)
    return base


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/board_screenshot.sh", description=__doc__)
    parser.add_argument("sweep", type=Path, metavar="SWEEP", help="--out folder of a sweep with --log-encodings-every")
    parser.add_argument("out", type=Path, metavar="DIR", help="where tensorboard-<tab>.png are written")
    words = f"of {', '.join(TABS)} (default: scalars images hparams)"
    parser.add_argument("--tabs", nargs="+", choices=TABS, default=list(TABS)[:3], metavar="TAB", help=words)
    parser.add_argument("--size", default="1920x1000", metavar="WxH", help="of the window (default: %(default)s)")
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
        if sync_api is None:
            raise Failed("playwright is missing: pip install -c requirements/constraints.txt -e '.[docs]'")
        args.out.mkdir(parents=True, exist_ok=True)
        with sync_api.sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=program)
            context = browser.new_context(viewport={"width": width, "height": height})
            context.set_default_timeout(1000 * WAIT)
            base = serve(folder, context.request)
            for name in args.tabs:
                path = args.out / f"tensorboard-{name}.png"
                photograph(context.new_page(), base, name, path)
                print(path)
            browser.close()
    except (Failed, BrowserError) as error:
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
