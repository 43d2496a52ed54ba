"""How far a long piece of work is, on standard error: a bar on a terminal, elsewhere a line a minute."""

import sys
import time
from typing import Any, Self

from fairseq_rpe.core.errors import shown

SECONDS = 60.0  # from one line to the next
_TITLE = 28  # characters that leave room for the rest
_NOTED = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


class Progress:
    """A context that is told what has been done.

    Args:
        title: of what; ``unit``: what is counted, e.g. tokens; ``total``: of them, if that is known.
        done: before this start.
        ends: where there is no terminal, say a first and a last line too. Without it nothing is said in the first
            minute. On a terminal the bar stays.
    """

    def __init__(self, title: str, unit: str, total: int | None = None, *, done: float = 0, ends: bool = False) -> None:
        self._title, self._unit, self._total, self._ends = shown(title, _TITLE), unit, total, ends
        self._first = self._done = done
        self._told: float | None = None
        self._note = ""
        self._bar: Any = None
        self._start = self._last = time.monotonic()
        if sys.stderr.isatty():
            from tqdm import tqdm

            layout = {"bar_format": _NOTED} if ends else {}
            kind = {"leave": ends, "dynamic_ncols": True, "file": sys.stderr, **layout}
            self._bar = tqdm(total=total, initial=done, desc=self._title, unit=f" {unit}", **kind)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, total: int | None = None) -> None:
        """What went before was preparation: the time that is left is reckoned from now on.

        ``total``: how many there are to do, where that was not known before.
        """
        self._start = time.monotonic()
        self._total = self._total if total is None else total
        if self._bar is not None:
            self._bar.total = self._total
            self._bar.unpause()

    def update(self, more: float = 1) -> None:
        """So many more are done."""
        self.reach(self._done + more)

    def reach(self, done: float, note: str | None = None) -> None:
        """So many are done in all; ``note``: what else there is to say of that, in place of the last one."""
        self._done = done
        self._note = self._note if note is None else note
        if self._bar is not None:
            self._bar.set_postfix_str(self._note, refresh=False)
            # set, not added: shares would gather rounding errors
            self._bar.n = done
            self._bar.update(0)
        elif self._ends and self._told is None:
            self._tell()
        else:
            self.tick()

    def tick(self) -> None:
        """Some time has gone by, whether or not more is done."""
        if self._bar is not None:
            self._bar.refresh()
        elif time.monotonic() - self._last >= SECONDS:
            self._tell()

    def say(self, line: str) -> None:
        """A line on standard output, above the bar."""
        if self._bar is None:
            print(line, flush=True)
        else:
            self._bar.write(line, file=sys.stdout)
            sys.stdout.flush()

    def close(self) -> None:
        """There is no more to come."""
        if self._bar is not None:
            self._bar.close()
        elif self._ends and self._done not in (self._first, self._told):
            self._tell()

    def _tell(self) -> None:
        self._last, self._told = time.monotonic(), self._done
        seconds, done = self._last - self._start, self._done - self._first
        of = "" if self._total is None else f" of {self._total:,}"
        words = [f"{self._title}: {self._done:,}{of} {self._unit}", self._note]
        if self._total is None or not done:
            words.append(f"{_clock(seconds)} so far")
        elif self._done < self._total:
            words.append(f"{_clock(seconds * (self._total - self._done) / done)} left")
        print(", ".join(filter(None, words)), file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
