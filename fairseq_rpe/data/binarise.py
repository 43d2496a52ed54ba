"""fairseq's binary format: written by ``fairseq-preprocess``, read back and checked here."""

from __future__ import annotations

import errno
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.corpus import SPLITS
from fairseq_rpe.data.tokenizer import FAIRSEQ_SPECIALS, symbol_bytes

if TYPE_CHECKING:
    import numpy as np

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<QBQ")  # version, code of the number type, number of lines
_DTYPES = {4: "<i4", 5: "<i8", 8: "<u2", 9: "<u4"}


def write_dictionary(path: Path, symbols: Sequence[str]) -> None:
    """Write a fairseq dictionary; its symbols get the ids 4, 5, ... after fairseq's specials."""
    path.write_text("".join(f"{symbol} 1\n" for symbol in symbols), encoding="utf-8")


def read_dictionary(path: Path) -> list[str]:
    """All symbols of a fairseq dictionary by id, fairseq's specials included."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [*FAIRSEQ_SPECIALS, *(line.rsplit(" ", 1)[0] for line in lines)]


def preprocess(folder: Path, dest: Path, workers: int) -> None:
    """Binarise ``folder/{train,valid,test}.tok`` with ``folder/dict.txt`` into ``dest``.

    Raises:
        UserError: if ``fairseq-preprocess`` fails, with the last line that it wrote.
        OSError: ``ENOSPC`` if it found no space left.
    """
    # Relative prefixes because fairseq splits them at commas; -P because a folder named fairseq_cli
    # in the current one must not take the place of the installed one.
    command = [sys.executable, "-P", "-m", "fairseq_cli.preprocess", "--only-source"]
    command += ["--srcdict", "dict.txt", "--destdir", os.path.relpath(dest, folder)]
    # fairseq's first worker idles until all others are done: one more than processors keeps those busy.
    command += ["--dataset-impl", "mmap", "--workers", str(workers + 1 if workers > 1 else 1)]
    for name in SPLITS:
        command += [f"--{name}pref", f"{name}.tok"]
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        _, errors = process.communicate()
    except BaseException:
        # Its workers, too: they would go on writing into a folder that is being removed.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if process.returncode:
        reason = (errors.strip().splitlines() or ["it printed no reason"])[-1]
        if os.strerror(errno.ENOSPC) in reason:
            raise OSError(errno.ENOSPC, reason)
        raise UserError(f"fairseq-preprocess failed with exit code {process.returncode}: {reason}")
    (dest / "preprocess.log").unlink()


def read_split(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """The token ids of a binarised split, (tokens,), and the tokens per line, (lines,)."""
    import numpy as np

    index = (folder / f"{split}.idx").read_bytes()
    _, code, lines = _HEADER.unpack_from(index, len(_MAGIC))
    sizes = np.frombuffer(index, dtype="<i4", count=lines, offset=len(_MAGIC) + _HEADER.size)
    return np.fromfile(folder / f"{split}.bin", dtype=_DTYPES[code]), sizes


def decode_split(folder: Path, split: str) -> bytes:
    """The text of a binarised split: every line with its newline."""
    table = [symbol_bytes(symbol) for symbol in read_dictionary(folder / "dict.txt")]
    tokens, _ = read_split(folder, split)
    return b"".join(map(table.__getitem__, tokens.tolist()))


def check_split(folder: Path, split: str, text: bytes, tokens: int) -> None:
    """Check that a binarised split has ``tokens`` tokens (line ends included) and spells ``text``.

    Raises:
        UserError: if anything was lost or changed on the way.
    """
    ids, sizes = read_split(folder, split)
    unknown = int((ids == FAIRSEQ_SPECIALS.index("<unk>")).sum())
    problem = ""
    if len(ids) != tokens or int(sizes.sum()) != tokens:
        problem = f"{len(ids)} tokens instead of {tokens}"
    elif unknown:
        problem = f"{unknown} unknown tokens"
    elif decode_split(folder, split) != text:
        problem = "text that differs from the source"
    if problem:
        raise UserError(
            f"fairseq-preprocess wrote a {split} split with {problem}: "
            "use the versions of fairseq and sentencepiece that this project pins"
        )
