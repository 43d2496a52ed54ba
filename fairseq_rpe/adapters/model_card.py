"""Model card of an exported model: README.md with its encoding, training, perplexities, and how to load it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq_rpe import __version__
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.questions import dataset
from fairseq_rpe.runs.checkpoints import RpeCheckpoint
from fairseq_rpe.runs.run_folder import CheckpointFolder
from fairseq_rpe.runs.training_data import data_digest
from fairseq_rpe.utils.files import sha256_of_files
from fairseq_rpe.utils.json_files import read_json_lines

_HEAD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- fairseq_rpe
- length-extrapolation
---
"""
_LOAD = """```python
{imports}from transformers import {classes}

model = AutoModelForCausalLM.from_pretrained("{name}"{arguments})
```
"""
_IMPORT = "import fairseq_rpe  # registers the model type\n"
_INSTALL = "pip install 'fairseq_rpe[transformers]'"


@dataclass(frozen=True)
class ModelCard:
    """What a model card states about a model.

    Attributes:
        checkpoint: the exported checkpoint.
        rpe: spec of the encoding.
        positions_eval: position transform in evaluation; empty for the default.
        data: data folder of the dictionary, or None.
        tokenizer: kind of the exported tokenizer, or None.
        no_tokenizer: reason why there is no tokenizer, or "".
        remote_code: whether transformers can import the package from a file of the folder.
        caches: whether ``generate`` can use a KV cache.
    """

    checkpoint: RpeCheckpoint
    rpe: str
    positions_eval: str
    data: Path | None
    tokenizer: str | None
    no_tokenizer: str
    remote_code: bool
    caches: bool


def write_model_card(card: ModelCard, architecture: str, folder: Path) -> None:
    """Write README.md.

    Args:
        card: contents of the card.
        architecture: type of the exported model.
        folder: folder of the exported model.
    """
    sections = {
        "Model": _model(card),
        "Load": _load(card, architecture),
        "Tokenizer": _tokenizer(card),
        "Training": _training(card),
        "Perplexity": _perplexities(card.checkpoint.path),
    }
    if architecture == "fairseq_rpe":
        sections["Not supported"] = _refusals(card)
    text = "\n".join(f"## {title}\n\n{body}" for title, body in sections.items() if body)
    path = folder / "README.md"
    path.write_text(f"{_HEAD}\n# {card.rpe}\n\n{text}", encoding="utf-8")


def _model(card: ModelCard) -> str:
    length = card.checkpoint.train_length()
    rows = {
        "encoding": f"`{card.rpe}`",
        "encoding in training": f"`{card.checkpoint.encoding}`" if card.rpe != card.checkpoint.encoding else "",
        "training length": f"{length} tokens" if length else "not recorded",
        "position transform": f"`{card.positions_eval}`" if card.positions_eval else "",
        "updates": f"{card.checkpoint.num_updates:,}" if card.checkpoint.num_updates else "",
        "checkpoint": f"SHA-256 `{sha256_of_files(card.checkpoint.path)}`",
        "data": f"SHA-256 `{_digest(card.data)}`" if _digest(card.data) else "",
        "exported by": f"fairseq_rpe {__version__}",
    }
    return _table(("property", "value"), [row for row in rows.items() if row[1]])


def _digest(data: Path | None) -> str:
    """Return the digest of a data folder; empty if it holds the dictionary alone."""
    if data is None:
        return ""
    is_complete = dataset.is_question_folder(data) or any((data / name).is_file() for name in corpus.BINARIES)
    return data_digest(data) if is_complete else ""


def _load(card: ModelCard, architecture: str) -> str:
    needs_package = architecture == "fairseq_rpe"
    classes = "AutoModelForCausalLM" if card.no_tokenizer else "AutoModelForCausalLM, AutoTokenizer"
    arguments = ", trust_remote_code=True" if needs_package and card.remote_code else ""
    imports = _IMPORT if needs_package and not card.remote_code else ""
    code = _LOAD.format(imports=imports, classes=classes, name="FOLDER", arguments=arguments)
    if not card.no_tokenizer:
        code = code.replace("\n```\n", '\ntokenizer = AutoTokenizer.from_pretrained("FOLDER")\n```\n')
    return f"{code}\nInstall the package first: `{_INSTALL}`.\n" if needs_package else code


def _tokenizer(card: ModelCard) -> str:
    if card.no_tokenizer:
        return f"This folder has no tokenizer: {card.no_tokenizer}.\n"
    if card.tokenizer == "transformers":
        return (
            "The tokenizer is that of the imported model. In training, the id `model.config.bos_token_id` precedes the "
            "first token of a text.\n"
        )
    return (
        "The tokenizer restores every byte of a text. A newline is the token 2, which also stands for the end of the "
        "text before: put this id (`model.config.bos_token_id`) before the first token of a text, as in training. The "
        "tokenizer does not add it. A text that spells out a token, such as `</s>` or `<0x41>`, has other ids than in "
        "training.\n"
    )


def _training(card: ModelCard) -> str:
    """Return the settings in run.json next to the checkpoint."""
    try:
        record = CheckpointFolder(card.checkpoint.path.parent).read_record()
    except UserError:  # of another version: the card is not worth refusing the export
        record = None
    if record is None:
        return ""
    settings = record.settings.to_dict()
    rows = [(name, f"`{value}`") for name, value in settings.items() if value not in (None, [], "")]
    return _table(("setting", "value"), rows)


def _perplexities(checkpoint: Path) -> str:
    """Return the perplexities of a checkpoint in the results of its run."""
    digest = sha256_of_files(checkpoint)
    rows: list[Mapping[str, Any]] = []
    for folder in (checkpoint.parent, checkpoint.parent.parent):
        rows += [
            row for row in _read_results(folder / "eval.jsonl") if row.get("checkpoint") == digest and "ppl" in row
        ]
    columns = ("split", "length", "ppl", "tokens", "rpe", "positions")
    used = [name for name in columns if any(row.get(name) is not None for row in rows)]
    lines = [tuple("" if row.get(name) is None else str(row[name]) for name in used) for row in rows]
    return _table(tuple(used), list(dict.fromkeys(lines))) if rows else ""


def _read_results(path: Path) -> list[dict[str, Any]]:
    try:
        return read_json_lines(path)
    except UserError:  # damaged results are no reason to refuse the export
        return []


def _refusals(card: ModelCard) -> str:
    items = [
        "attention weights (`output_attentions`) and other attention implementations of transformers",
        "`position_ids` and `inputs_embeds`",
        "caches of fixed size, offloaded and quantized caches",
    ]
    if not card.caches:
        items.append(
            "a KV cache, because earlier tokens change when the text grows: `generate` computes all tokens again"
        )
    return "".join(f"- {item}\n" for item in items)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a table of Markdown."""
    cells = [head, tuple("---" for _ in head), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)
