"""Tokenizers of transformers models (``tokenizer.json``) over a fairseq dictionary.

The dictionary has exactly the V token ids of the model, in another order, so that a softmax over the dictionary is the
model's own. fairseq's four special symbols stand for four of these ids, and the others follow in ascending order:

- ``</s>``, which begins every block and separates documents, is ``bos_token_id`` of the config, or ``eos_token_id`` if
  the config has none: the token before the first token of a text in the training of the model.
- ``<unk>`` is the unknown token of the tokenizer, if it has one.
- ``<pad>`` and ``<s>`` are ``pad_token_id`` and ``eos_token_id``, if these are free and no text has them.
- Otherwise a special symbol is the largest free id that no text has: that of a special token, or of no token. If there
  is none, it is the largest free id, and a text that has it is refused.

Special tokens that a text spells out, such as ``<|endoftext|>``, are encoded as text.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.folder import FAIRSEQ_SPECIALS
from fairseq_rpe.utils.files import read_input
from fairseq_rpe.utils.json_files import parse_json_object

TOKENIZER_FILE, CONFIG_FILE = "tokenizer.json", "config.json"
MODEL_FILES = (TOKENIZER_FILE, CONFIG_FILE)
_BOS, _PAD, _EOS, _UNK = range(len(FAIRSEQ_SPECIALS))
_NEVER_IN_TEXT = (_BOS, _PAD)  # the pipeline gives these symbols another meaning
_REMEDY = "name a folder that transformers wrote with save_pretrained, for model and tokenizer"


@dataclass(frozen=True)
class ModelVocabulary:
    """The token ids of a transformers model as a fairseq dictionary.

    Attributes:
        token_ids: token id of each symbol of the dictionary, special symbols included; a permutation of 0 … V-1.
        symbols: symbols of the dictionary without the four special ones, each ``ID:TOKEN``.
        tokenizer: the tokenizer of the package ``tokenizers``, without truncation, padding and special tokens.
    """

    token_ids: tuple[int, ...]
    symbols: tuple[str, ...]
    tokenizer: Any

    @property
    def start(self) -> int:
        """Token id that ``</s>`` stands for."""
        return self.token_ids[_EOS]

    @cached_property
    def _symbols_by_id(self) -> np.ndarray:
        """The symbol of each token id, (V,) int64."""
        return np.argsort(self.token_ids)

    def encode(self, text: str) -> np.ndarray:
        """Return the symbols (n,) int64 of a text.

        Raises:
            UserError: the text has a token that stands for ``<s>`` or ``<pad>``.
        """
        ids = np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, np.int64)
        symbols: np.ndarray = self._symbols_by_id[ids]
        for special in _NEVER_IN_TEXT:
            if (symbols == special).any():
                token_id = self.token_ids[special]
                raise UserError(
                    f"the text has the token {token_id} ({self.tokenizer.id_to_token(token_id)!r}), which stands for "
                    f"{FAIRSEQ_SPECIALS[special]} because the model has no spare token: leave such documents out"
                )
        return symbols

    def decode(self, symbols: Sequence[int]) -> bytes:
        """Return the text of symbols in UTF-8; ``<s>``, ``<pad>`` and ``</s>`` have no text."""
        ids = [self.token_ids[symbol] for symbol in symbols if symbol not in (_BOS, _PAD, _EOS)]
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text.encode()


def find_model_files(folder: Path) -> dict[str, Path]:
    """Find the files of a transformers model from which the vocabulary is made.

    Args:
        folder: folder of the model.

    Returns:
        Paths of config.json and tokenizer.json by their names.

    Raises:
        UserError: the folder or one of the files does not exist.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: {_REMEDY}")
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(f"{folder} has no {CONFIG_FILE}, so it is no transformers model: {_REMEDY}")
    if not (folder / TOKENIZER_FILE).is_file():
        raise UserError(
            f"{folder} has no {TOKENIZER_FILE}: make it with AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    return {name: folder / name for name in MODEL_FILES}


def load_model_vocabulary(folder: Path) -> ModelVocabulary:
    """Load the vocabulary of a transformers model.

    Args:
        folder: folder with config.json and tokenizer.json, of a model or of a corpus that was made with its tokenizer.

    Raises:
        UserError: a file is missing or damaged, the tokenizer has ids that the model lacks, or the package
            ``tokenizers`` is not installed.
    """
    files = find_model_files(folder)
    config = parse_json_object(read_input(files[CONFIG_FILE]), files[CONFIG_FILE], _REMEDY)
    tokenizer, content = _load_tokenizer(files[TOKENIZER_FILE])
    size = config.get("vocab_size")
    if type(size) is not int or size < len(FAIRSEQ_SPECIALS):
        raise UserError(f"{files[CONFIG_FILE]} has the vocab_size {size!r}, no number of tokens: {_REMEDY}")
    tokens = {token_id: token for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}
    if max(tokens) >= size:
        raise UserError(
            f"{files[TOKENIZER_FILE]} has the token id {max(tokens)} and the model has {size} tokens: take both from "
            "one model"
        )
    specials = _special_ids(config, content, tokenizer, size, tokens, files[CONFIG_FILE])
    others = [token_id for token_id in range(size) if token_id not in specials]
    symbols = tuple(f"{token_id}:{_printable(tokens.get(token_id, ''))}" for token_id in others)
    return ModelVocabulary((*specials, *others), symbols, tokenizer)


def _load_tokenizer(path: Path) -> tuple[Any, dict[str, Any]]:
    """Return a tokenizer that only splits text into tokens, and the content of its file."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UserError("tokenizers of transformers need the package tokenizers: pip install tokenizers") from None
    data = read_input(path)
    content = parse_json_object(data, path, _REMEDY)
    try:
        tokenizer = Tokenizer.from_str(data.decode())
    except Exception as error:  # the library has no error classes of its own
        raise UserError(f"{path} is no tokenizer of the package tokenizers ({error}): {_REMEDY}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # special tokens in a text are text
    if tokenizer.get_vocab_size() == 0:
        raise UserError(f"{path} has no tokens: {_REMEDY}")
    return tokenizer, content


def _special_ids(
    config: dict[str, Any], content: dict[str, Any], tokenizer: Any, size: int, tokens: dict[int, str], path: Path
) -> tuple[int, ...]:
    """Return the token ids that fairseq's special symbols stand for."""

    def configured(name: str) -> int | None:
        value = config.get(name)
        value = value[0] if isinstance(value, list) and value else value
        return value if type(value) is int and 0 <= value < size else None

    bos, eos = configured("bos_token_id"), configured("eos_token_id")
    start = eos if bos is None else bos
    if start is None:
        raise UserError(f"{path} has neither bos_token_id nor eos_token_id: add the id of the token that begins a text")
    unknown = _unknown_id(content, tokenizer)
    added = content.get("added_tokens") or []
    special_tokens = {token["id"] for token in added if token.get("special")}
    spare = {i for i in range(size) if i not in tokens or i in special_tokens} - {start, unknown}
    used = {start, unknown}

    def take(*candidates: int | None) -> int:
        """Return the first candidate that is free, or the largest free id that no text has, or the largest free id."""
        free = [i for i in candidates if i is not None and i not in used]
        left = free[:1] or sorted(spare - used)[-1:] or [i for i in range(size) if i not in used][-1:]
        used.add(left[0])
        return left[0]

    pad = configured("pad_token_id")
    pad = take(pad if pad in spare else None)
    end = take(eos if eos in spare else None)
    has_unknown = unknown is not None and unknown != start
    return end, pad, start, unknown if has_unknown else take()


def _unknown_id(content: dict[str, Any], tokenizer: Any) -> int | None:
    """Return the id of the token that stands for unknown text, or None."""
    model = content.get("model") or {}
    token = model.get("unk_token")
    if token is None:  # a unigram model names the id
        unknown = model.get("unk_id")
        return unknown if type(unknown) is int else None
    token_id = tokenizer.token_to_id(token)
    return token_id if type(token_id) is int else None


def _printable(token: str) -> str:
    """Return a token without spaces and control characters, which a dictionary file cannot have."""
    return "".join(c if c.isprintable() and c != " " else json.dumps(c)[1:-1].replace(" ", "\\u0020") for c in token)


def load_model_codec(
    folder: Path, symbols: Sequence[str]
) -> tuple[Callable[[str], np.ndarray], Callable[[Sequence[int]], bytes]]:
    """Load encoder and decoder of a corpus that was made with the tokenizer of a model.

    Args:
        folder: folder with the files of the vocabulary.
        symbols: symbols of its dictionary by id.

    Returns:
        Functions from text to symbols (n,) int64, and from symbols to UTF-8.

    Raises:
        UserError: the files do not belong together.
    """
    vocabulary = load_model_vocabulary(folder)
    if [*FAIRSEQ_SPECIALS, *vocabulary.symbols] != list(symbols):
        raise UserError(
            f"{folder}/dict.txt is not of the same model as its {TOKENIZER_FILE}: take both from one folder"
        )
    return vocabulary.encode, vocabulary.decode
