"""Progress of long work on standard error: a bar on a terminal, elsewhere a line per minute."""

import sys
import time
from typing import Any, Self

from fairseq_rpe.core.errors import shorten_path

SECONDS = 60.0  # between two lines
_MAX_TITLE = 28  # characters of the title
_BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


class Progress:
    """A context manager that displays progress.

    Args:
        title: Title of the bar or the lines.
        unit: What is counted, such as tokens.
        total: Number of units, if known.
        done: Units done before this start.
        ends: Whether the start and the end are shown: without a terminal, a first and a last line are printed, too
            (otherwise nothing is printed in the first minute); on a terminal, the bar remains at the end.
    """

    def __init__(self, title: str, unit: str, total: int | None = None, *, done: float = 0, ends: bool = False) -> None:
        self._title, self._unit, self._total, self._ends = shorten_path(title, _MAX_TITLE), unit, total, ends
        self._first = self._done = done
        self._printed: float | None = None
        self._note = ""
        self._bar: Any = None
        self._start = self._last = time.monotonic()
        if sys.stderr.isatty():
            from tqdm import tqdm

            layout = {"bar_format": _BAR_FORMAT} if ends else {}
            options = {"leave": ends, "dynamic_ncols": True, "file": sys.stderr, **layout}
            self._bar = tqdm(total=total, initial=done, desc=self._title, unit=f" {unit}", **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start_timing(self, total: int | None = None) -> None:
        """Estimate the remaining time from now on, because what came before was preparation.

        Args:
            total: Number of units, if it was unknown before.
        """
        self._start = time.monotonic()
        self._total = self._total if total is None else total
        if self._bar is not None:
            self._bar.total = self._total
            self._bar.unpause()

    def update(self, n: float = 1) -> None:
        """Add ``n`` units to those done."""
        self.update_to(self._done + n)

    def update_to(self, done: float, note: str | None = None) -> None:
        """Set the number of units done; ``note`` replaces the last note."""
        self._done = done
        self._note = self._note if note is None else note
        if self._bar is not None:
            self._bar.set_postfix_str(self._note, refresh=False)
            # set rather than added, because fractions would accumulate rounding errors
            self._bar.n = done
            self._bar.update(0)
        elif self._ends and self._printed is None:
            self._print_line()
        else:
            self.refresh()

    def refresh(self) -> None:
        """Redraw the bar, or print a line if a minute has passed."""
        if self._bar is not None:
            self._bar.refresh()
        elif time.monotonic() - self._last >= SECONDS:
            self._print_line()

    def write(self, line: str) -> None:
        """Print a line on standard output, above the bar."""
        if self._bar is None:
            print(line, flush=True)
        else:
            self._bar.write(line, file=sys.stdout)
            sys.stdout.flush()

    def close(self) -> None:
        """End the display."""
        if self._bar is not None:
            self._bar.close()
        elif self._ends and self._done not in (self._first, self._printed):
            self._print_line()

    def _print_line(self) -> None:
        self._last, self._printed = time.monotonic(), self._done
        seconds, done = self._last - self._start, self._done - self._first
        total = "" if self._total is None else f" of {self._total:,}"
        words = [f"{self._title}: {self._done:,}{total} {self._unit}", self._note]
        if self._total is None or not done:
            words.append(f"{_clock(seconds)} so far")
        elif self._done < self._total:
            words.append(f"{_clock(seconds * (self._total - self._done) / done)} left")
        print(", ".join(filter(None, words)), file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
