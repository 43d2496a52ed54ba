"""GPT-2's byte-level BPE (Radford et al. 2019), with the dictionary that fairseq's models use for it.

Symbols of the dictionary are GPT-2's ids as decimal numbers. With four specials, three ``madeupword`` and ``<mask>``,
GPT-2's 50,257 types make fairseq's 50,265. A ``dict.txt`` beside the vocabulary, such as the published one, decides
the order; otherwise it is the order of the ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import regex

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.tokenizer import FAIRSEQ_SPECIALS, symbol_bytes

# GPT-2's own, but that a newline is by itself: every line is cut as if it were alone.
PATTERN = regex.compile(r"""\n|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|[^\S\n]+(?!\S)|[^\S\n]+""")
_NAMES = {"vocab.json": ("vocab.json", "encoder.json"), "merges.txt": ("merges.txt", "vocab.bpe")}
_ADDED = ("madeupword0000", "madeupword0001", "madeupword0002", "<mask>")


def find_files(folder: Path) -> dict[str, Path]:
    """The files of a GPT-2 vocabulary by the names they have in a prepared corpus.

    Raises:
        UserError: if one is missing.
    """
    found = {}
    for name, names in _NAMES.items():
        paths = [folder / n for n in names if (folder / n).is_file()]
        if not paths:
            raise UserError(f"--gpt2 {folder} has no {' or '.join(names)}: put GPT-2's vocabulary there")
        found[name] = paths[0]
    if (folder / "dict.txt").is_file():
        found["dict.txt"] = folder / "dict.txt"
    return found


def dictionary_symbols(folder: Path) -> list[str]:
    """The dictionary of the vocabulary in ``folder``, without fairseq's four specials."""
    return [*(str(number) for number in sorted(_read_vocabulary(folder).values())), *_ADDED]


def _read_vocabulary(folder: Path) -> dict[str, int]:
    path = folder / "vocab.json"
    try:
        vocabulary = json.loads(path.read_text(encoding="utf-8"))
        numbers = {str(symbol): int(number) for symbol, number in vocabulary.items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise UserError(f"{path} is no GPT-2 vocabulary ({error}): get it again") from None
    if missing := [c for c in _characters().values() if c not in numbers]:
        raise UserError(f"{path} is no GPT-2 vocabulary: it lacks the bytes {''.join(missing)[:20]}")
    return numbers


@cache
def _characters() -> dict[int, str]:
    """The visible character that GPT-2's vocabulary has for each byte."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in visible]
    return {**{byte: chr(byte) for byte in visible}, **{byte: chr(256 + n) for n, byte in enumerate(others)}}


class Gpt2:
    """Spells words of :data:`PATTERN` with a GPT-2 vocabulary.

    Args:
        folder: with ``vocab.json`` and ``merges.txt``.
        ids: of each symbol of the dictionary.

    Raises:
        UserError: if files are damaged or of another vocabulary than the dictionary, or ``tokenizers`` is missing.
    """

    def __init__(self, folder: Path, ids: Mapping[str, int]) -> None:
        try:
            from tokenizers.models import BPE
        except ImportError:
            raise UserError("GPT-2's BPE needs the package tokenizers: pip install tokenizers") from None
        vocabulary = _read_vocabulary(folder)
        lacking = [number for number in vocabulary.values() if str(number) not in ids]
        if lacking:
            raise UserError(f"{folder}/dict.txt is of another vocabulary than its vocab.json: it has no {lacking[0]}")
        try:
            self._bpe = BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
        except Exception as error:  # the library raises nothing more special
            raise UserError(f"{folder}/merges.txt does not fit its vocab.json ({error}): get both again") from None
        self._ids = {number: ids[str(number)] for number in vocabulary.values()}
        self._bytes = _bytes_of(vocabulary)
        self._characters = _characters()

    def spell(self, word: str) -> Sequence[int]:
        """Dictionary ids of a word."""
        content = word.encode()
        tokens = self._bpe.tokenize("".join(map(self._characters.__getitem__, content)))
        if b"".join(self._bytes[token.id] for token in tokens) != content:
            raise UserError(
                f"GPT-2's BPE changes {word[:40]!r}: its vocab.json and merges.txt are not of one vocabulary"
            )
        return [self._ids[token.id] for token in tokens]


def _bytes_of(vocabulary: Mapping[str, int]) -> dict[int, bytes]:
    back = {character: byte for byte, character in _characters().items()}
    return {
        number: bytes(back[c] for c in symbol) if all(c in back for c in symbol) else symbol.encode()
        for symbol, number in vocabulary.items()
    }


def token_bytes(folder: Path, symbols: Sequence[str]) -> list[bytes]:
    """What each symbol of the dictionary stands for, fairseq's specials included."""
    known = {str(number): content for number, content in _bytes_of(_read_vocabulary(folder)).items()}
    return [symbol_bytes(s) if s in FAIRSEQ_SPECIALS else known.get(s, b"") for s in symbols]
