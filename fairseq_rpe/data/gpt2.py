"""GPT-2's byte-level BPE (Radford et al. 2019), with the dictionary that fairseq's models use for it.

Symbols of the dictionary are GPT-2's ids as decimal numbers. With four specials, three ``madeupword`` and ``<mask>``,
GPT-2's 50,257 types make fairseq's 50,265. A ``dict.txt`` beside the vocabulary, such as the published one, decides
the order; otherwise it is the order of the ids.

Bytes, merges and back are of the package tokenizers. Words are found here, as their ids are looked up in a table.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import regex

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.utils.files import read_json

# GPT-2's own, but that a newline is by itself: every line is cut as if it were alone.
PATTERN = regex.compile(r"""\n|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|[^\S\n]+(?!\S)|[^\S\n]+""")
_NAMES = {"vocab.json": ("vocab.json", "encoder.json"), "merges.txt": ("merges.txt", "vocab.bpe")}
_ADDED = ("madeupword0000", "madeupword0001", "madeupword0002", "<mask>")
# What stands for a newline in GPT-2's vocabulary.
_NEWLINE = "\u010a"


def find_files(folder: Path) -> dict[str, Path]:
    """The files of a GPT-2 vocabulary by the names they have in a prepared corpus; refused if one is missing."""
    found = {}
    for name, names in _NAMES.items():
        paths = [folder / n for n in names if (folder / n).is_file()]
        if not paths:
            raise UserError(f"--gpt2 {folder} has no {' or '.join(names)}: put GPT-2's vocabulary there")
        found[name] = paths[0]
    given = folder / "dict.txt"
    return {**found, given.name: given} if given.is_file() else found


def dictionary_symbols(folder: Path) -> list[str]:
    """The dictionary of the vocabulary in ``folder``, without fairseq's four specials."""
    return [*map(str, sorted(_read_vocabulary(folder).values())), *_ADDED]


def _read_vocabulary(folder: Path) -> dict[str, int]:
    try:
        from tokenizers.pre_tokenizers import ByteLevel
    except ImportError:
        raise UserError("GPT-2's BPE needs the package tokenizers: pip install tokenizers") from None
    path = folder / "vocab.json"
    numbers = read_json(path)
    for symbol, number in numbers.items():
        if type(number) is not int or number < 0:
            raise UserError(f"{path} is not a GPT-2 vocabulary ({symbol[:40]!r} has no number): get it again")
    if missing := sorted(set(ByteLevel.alphabet()) - numbers.keys()):
        raise UserError(f"{path} is not a GPT-2 vocabulary: it lacks the bytes {''.join(missing)[:20]}")
    return numbers


def load_gpt2(
    folder: Path, symbols: Sequence[str]
) -> tuple[Callable[[str], list[int]], Callable[[Sequence[int]], bytes]]:
    """From a word of :data:`PATTERN` to its ids in the dictionary of ``symbols``, and from ids back to their text.

    Raises UserError if the vocabulary in ``folder`` is damaged or another than that of the dictionary, or
    ``tokenizers`` is missing; the first function does if merges and vocabulary do not fit.
    """
    vocabulary = _read_vocabulary(folder)
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    places = {symbol: place for place, symbol in enumerate(symbols)}
    lacking = [number for number in vocabulary.values() if str(number) not in places]
    if lacking:
        raise UserError(f"{folder}/dict.txt does not match its vocab.json: it has no {lacking[0]}")
    try:
        tokenizer = Tokenizer(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    except Exception as error:  # the library raises nothing more special
        raise UserError(f"{folder}/merges.txt does not fit its vocab.json ({error}): get both again") from None
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    ids = {number: places[str(number)] for number in vocabulary.values()}
    numbers = {place: number for number, place in ids.items()} | {places["</s>"]: vocabulary[_NEWLINE]}

    def spell(word: str) -> list[int]:
        found = tokenizer.encode(word).ids
        if tokenizer.decode(found) != word:
            fault = "its vocab.json and merges.txt are not of one vocabulary"
            raise UserError(f"GPT-2's BPE changes {word[:40]!r}: {fault}")
        return [ids[number] for number in found]

    return spell, lambda ids: tokenizer.decode([numbers[place] for place in ids if place in numbers]).encode()
