"""The byte-exact tokenizer: every text comes back, and no symbol is one that fairseq would cut or take for its own."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.folder import FAIRSEQ_SPECIALS
from fairseq_rpe.data.tokenization import Tokenizer, symbol_bytes, train_tokenizer

SPLIT_AT = "\t\v\f\r\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2000\u2003\u2028\u2029\u202f\u205f\u3000"
NASTY = ["", " ", "    indented", " " * 50 + "far right", "trailing   ", "\ttab\t\ttabs ", "carriage return\r"]
NASTY += [*(f"a{c}b {c} {c}{c}c" for c in SPLIT_AT), SPLIT_AT, "▁ literal ▁▁ signs ▁", "▅ reserved by the trainer ▅▅"]
NASTY += ["<s> </s> <unk> <pad> <0x41> <0x0a> <0xC3><0xA9> madeupword0000 madeupword0001x", "</s>", "<<s>> <</s>></s"]
NASTY += ["#fairseq:overwrite 1", "NUL \0 and \x01 \x7f \x1b", "\ufeffbyte order mark"]
NASTY += ["é è ü ß Ж 漢字 かな 🙂 👩‍👩‍👧 e\u0301 ﬁ Å ①", "\u200b\u200d\u2060\u00ad\ufffd\uffff\U0010ffff\u2047"]
NASTY += ["x" * 70_000, "word " * 20_000, " " * 5_000]

CODE = """\
class Reader{n}:
    \"\"\"Reads things, number {n}.\"\"\"

    def __init__(self, path, size={n}):
        self.path = path
\tself.size = size  # a tab

    def read(self, count):
        for index in range(count):
            if index % {n} == 0:
                yield self.path.open().read(self.size + index)
        return None
"""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    code = "".join(CODE.replace("{n}", str(n)) for n in range(1, 25))
    return Tokenizer(train_tokenizer([*code.split("\n"), *NASTY[:-3]], 400))


def encode(tokenizer: Tokenizer, line: str) -> list[str]:
    return [tokenizer.symbols[place] for place in tokenizer.encode(line)]


def decode(symbols: list[str]) -> str:
    return b"".join(map(symbol_bytes, symbols)).decode()


def assert_round_trip(tokenizer: Tokenizer, line: str) -> None:
    symbols = encode(tokenizer, line)
    assert decode(symbols) == line
    # and nothing is what fairseq would cut or take for its own
    text = " ".join(symbols)
    assert text.split() == symbols and text.splitlines() == ([text] if text else [])
    assert set(symbols) <= set(tokenizer.symbols) and not set(symbols) & set(FAIRSEQ_SPECIALS)


@pytest.mark.parametrize("line", NASTY, ids=lambda line: repr(line[:24]))
def test_nasty_lines_round_trip(tokenizer: Tokenizer, line: str) -> None:
    assert_round_trip(tokenizer, line)


RESERVED = ("<s>", "</s>", "<unk>", "<pad>", "<0x41>", "<0x", "madeupword0000", "def ", "  ", *"▁▅<>/_().=:", *SPLIT_AT)
CHARACTERS = st.characters(codec="utf-8", exclude_characters="\n")
LINES = st.lists(st.sampled_from(RESERVED) | st.text(CHARACTERS)).map("".join)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(LINES)
def test_any_line_round_trips(tokenizer: Tokenizer, line: str) -> None:
    assert_round_trip(tokenizer, line)


def test_every_character_round_trips(tokenizer: Tokenizer) -> None:
    characters = [chr(i) for i in range(0x3100) if i != 10]
    lines = ["".join(characters[i : i + 50]) for i in range(0, len(characters), 50)]
    assert [decode(encode(tokenizer, line)) for line in lines] == lines


def test_training_on_nasty_text_learns_no_unsafe_piece() -> None:
    lines = NASTY + NASTY[:-3] * 19 + ["def f(self): return </s> <unk> <0x41> madeupword0000 ▁x"] * 50
    tokenizer = Tokenizer(train_tokenizer(lines, 380))
    assert len(tokenizer.symbols) == 380 - len(FAIRSEQ_SPECIALS)
    assert len(set(tokenizer.symbols)) == len(tokenizer.symbols)
    assert all(symbol.split() == [symbol] for symbol in tokenizer.symbols)
    assert all(decode(encode(tokenizer, line)) == line for line in dict.fromkeys(lines))


def test_indentation_is_few_symbols_and_a_newline_none(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode(" " * 8)) == 1
    assert tokenizer.encode("") == []
    with pytest.raises(ValueError, match="newline"):
        tokenizer.encode("a\nb")


def test_decode_of_what_only_a_model_emits() -> None:
    found = b"".join(map(symbol_bytes, ["a", "</s>", "▁b", "<0xC3>", "<unk>", "<pad>"]))
    assert found == b"a\n b\xc3" + "\ufffd".encode()


def test_foreign_models_are_refused(tmp_path: Path) -> None:
    model, sentences = io.BytesIO(), iter(["some text for a usual model"] * 9)
    flags: dict[str, Any] = {"vocab_size": 30, "hard_vocab_limit": False, "minloglevel": 3}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=sentences, model_writer=model, **flags)
    with pytest.raises(UserError, match="prepare-stdlib"):
        Tokenizer(model.getvalue())
    with pytest.raises(UserError, match="not a sentencepiece model"):
        Tokenizer(b"nonsense")
    with pytest.raises(UserError, match="does not exist"):
        Tokenizer.load(tmp_path / "spm.model")


def test_vocabularies_that_do_not_fit_the_text() -> None:
    lines = ["".join(chr(c) for c in range(start, start + 40)) for start in range(0x4E00, 0x4E00 + 400, 40)]
    for text, size, words in (
        (lines, 300, "--vocab-size 300 is too small for this text: use 660 or more"),
        (["ab"], 4096, "the smallest allowed one, 300: give more text"),
        (["\t\t"], 4096, "give more text"),
    ):
        with pytest.raises(UserError, match=words):
            train_tokenizer(text, size)
