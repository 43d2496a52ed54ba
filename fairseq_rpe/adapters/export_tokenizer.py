"""Tokenizers of prepared corpora as ``tokenizer.json`` of transformers, with the ids of fairseq's dictionary.

Both kinds give the ids of ``data/tokenization.py`` and restore every byte. There is one exception: a text that spells
out a symbol of the dictionary, such as ``</s>`` or ``<0x41>``. Here its characters become one token, there several.

A newline is ``</s>`` of the dictionary, id 2. It is an added token and not a named special token: transformers'
``decode(…, skip_special_tokens=True)``, the default of pipelines, would drop a special token, and with it all newlines.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.folder import EOS_ID, FAIRSEQ_SPECIALS, read_dictionary
from fairseq_rpe.data.tokenization import BYTES, GPT2_WORD
from fairseq_rpe.data.transformers_tokenizer import TOKENIZER_FILE, load_model_vocabulary
from fairseq_rpe.utils.json_files import read_json, write_json

_FIRST_ID = len(FAIRSEQ_SPECIALS)
_SPACE = "▁"  # a space in the pieces of sentencepiece
# kind of a tokenizer that has no equal in transformers -> reason
NOT_EXPORTED = {"words": "a tokenizer of words cannot restore the white space of a text"}


def export_tokenizer(kind: str, data: Path, out: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``.

    Args:
        kind: kind of the tokenizer of the corpus: ``bpe``, ``gpt2``, or ``transformers`` for that of an imported model.
        data: folder of the corpus.
        out: folder in which the files are written.

    Raises:
        UserError: the package tokenizers is not installed, or the files of the corpus do not belong together.
    """
    symbols = read_dictionary(data / "dict.txt")
    if kind == "transformers":
        write_json(out / "tokenizer.json", _reordered(data))
        write_json(out / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
        return
    tokenizer = _bpe(symbols) if kind == "bpe" else _gpt2(symbols, data)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
    }
    write_json(out / "tokenizer_config.json", config)


def can_reorder(data: Path) -> bool:
    """Return whether the tokenizer of an imported model can be written with the ids of the dictionary.

    Args:
        data: folder with the ``tokenizer.json`` of the model.
    """
    model = read_json(data / TOKENIZER_FILE).get("model")
    return isinstance(model, dict) and model.get("type") == "BPE"


def _reordered(data: Path) -> dict[str, Any]:
    """Return the ``tokenizer.json`` of an imported model with the ids of the dictionary.

    The merges of BPE name tokens, not ids. Added tokens are written into the vocabulary, too: the package tokenizers
    would give a new id to an added token that the vocabulary lacks. No special tokens are added to a text.
    """
    content = read_json(data / TOKENIZER_FILE)
    new_ids = {token_id: new for new, token_id in enumerate(load_model_vocabulary(data).token_ids)}
    vocabulary = {token: new_ids[token_id] for token, token_id in content["model"]["vocab"].items()}
    for token in content.get("added_tokens") or []:
        token["id"] = vocabulary[token["content"]] = new_ids[token["id"]]
    content.get("added_tokens", []).sort(key=lambda token: token["id"])
    content["model"]["vocab"] = vocabulary
    return {**content, "post_processor": None, "truncation": None, "padding": None}


def _bpe(symbols: Sequence[str]) -> Any:
    """Return sentencepiece's byte-exact BPE.

    sentencepiece joins the neighbours whose piece has the smallest number first. A merge list with all pairs that join
    to a piece, in the order of these numbers, does the same.
    """
    tokenizers = _tokenizers()
    pieces = [symbol.replace(_SPACE, " ") for symbol in symbols[_FIRST_ID:]]
    ranks = {piece: rank for rank, piece in enumerate(pieces) if rank >= BYTES}
    merges = []
    for piece, rank in ranks.items():
        pairs = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        merges += [(rank, ranks[a], ranks[b], a, b) for a, b in pairs if a in ranks and b in ranks]
    vocabulary = _with_specials({piece: _FIRST_ID + index for index, piece in enumerate(pieces)})
    model = tokenizers.models.BPE(
        vocab=vocabulary,
        merges=[(a, b) for *_, a, b in sorted(merges)],
        unk_token="<unk>",
        fuse_unk=False,
        byte_fallback=True,
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()])
    return _with_newline(tokenizer)


def _gpt2(symbols: Sequence[str], data: Path) -> Any:
    """Return GPT-2's byte-level BPE; its numbers are decimal numbers in the dictionary."""
    tokenizers = _tokenizers()
    tokens = {str(number): token for token, number in read_json(data / "vocab.json").items()}
    vocabulary = _with_specials({tokens.get(s, s): i for i, s in enumerate(symbols) if i >= _FIRST_ID})
    lines = (data / "merges.txt").read_text(encoding="utf-8").split("\n")
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    words = GPT2_WORD.pattern.strip().removeprefix(r"\n|")  # newlines are cut off before
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(words), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return _with_newline(tokenizer)


def _tokenizers() -> Any:
    try:
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers  # noqa: F401
    except ImportError:
        raise UserError("exporting a tokenizer needs the package tokenizers: pip install tokenizers") from None
    return tokenizers


def _with_specials(vocabulary: dict[str, int]) -> dict[str, int]:
    """Return the vocabulary with fairseq's special symbols, of which ``</s>`` is a newline."""
    specials = {symbol: i for i, symbol in enumerate(FAIRSEQ_SPECIALS) if i != EOS_ID}
    return {**specials, "\n": EOS_ID, **vocabulary}


def _with_newline(tokenizer: Any) -> Any:
    newline = _tokenizers().AddedToken("\n", normalized=False, special=False)
    tokenizer.add_tokens([newline])
    assert tokenizer.token_to_id("\n") == EOS_ID
    return tokenizer
