"""Prepared folders of questions for tests: a small vocabulary, and questions that are written out."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fairseq_rpe.data.folder import MADE_BY, MANIFEST, write_dictionary
from fairseq_rpe.data.tokenization import Tokenizer, train_tokenizer
from fairseq_rpe.questions.build_dataset import PendingQuestion, PendingSet, write_dataset
from fairseq_rpe.questions.dataset import Question, QuestionDataset
from fairseq_rpe.utils.json_files import write_json

LINES = ("The river rose in March. Old Tamsin mended the wheel.", "Who mended the wheel? Tamsin, said Bren.") * 4


def vocabulary(folder: Path, kind: str = "bpe", words: Sequence[str] = (), size: int = 300) -> Path:
    """What ``--vocab-from`` takes: a corpus of nothing but its vocabulary; ``words`` of the kind ``words``."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "words":
        write_dictionary(folder / "dict.txt", words or sorted({word for line in LINES for word in line.split()}))
    else:
        model = train_tokenizer(LINES, size)
        (folder / "spm.model").write_bytes(model)
        write_dictionary(folder / "dict.txt", Tokenizer(model).symbols)
    write_json(folder / MANIFEST, {"made_by": MADE_BY, "tokenizer": {"kind": kind}})
    return folder


def questions(number: int = 6, start: int = 0, words: int = 12) -> list[Question]:
    """Different ones, with a document each, two answers and two choices; their lengths differ."""
    names = ("Tamsin", "Bren")
    found = []
    for i in range(start, start + number):
        text = f"Day {i}. " + "The river rose. " * (i % words) + f"Old {names[i % 2]} mended the wheel."
        answers = (names[i % 2],) if i % 3 else (names[i % 2], f"Old {names[i % 2]}")
        choices = names if i % 3 else ()
        found.append(
            Question(f"q{i}", "Who mended the wheel?\n\n", answers, text, "\n\nAnswer:", f"g{i // 2}", choices)
        )
    return found


def make_folder(
    folder: Path,
    splits: Mapping[str, Sequence[Question]] | None = None,
    vocab: Path | None = None,
    name: str = "made",
    metrics: tuple[str, ...] = ("f1", "em"),
    answer_tokens: int = 16,
) -> QuestionDataset:
    """A prepared folder of one set; its vocabulary is made beside it where none is given."""
    splits = splits or {"train": questions(8), "valid": questions(4, start=8)}
    return make_sets(folder, [asked_set(name, splits, metrics, answer_tokens)], vocab)


def asked_set(
    name: str,
    splits: Mapping[str, Sequence[Question]],
    metrics: tuple[str, ...] = ("f1", "em"),
    answer_tokens: int = 16,
) -> PendingSet:
    """One of several sets for :func:`make_sets`."""

    def reading(split: str):
        return lambda: (PendingQuestion(question, lambda: f"{split}.jsonl") for question in splits[split])

    return PendingSet(name, "own", metrics, metrics[0], answer_tokens, {split: reading(split) for split in splits})


def make_sets(folder: Path, sets: Sequence[PendingSet], vocab: Path | None = None) -> QuestionDataset:
    """A prepared folder of several sets."""
    vocab = vocab or vocabulary(folder.parent / "vocabulary")
    return write_dataset(folder, sets, vocab, "fairseq-rpe prepare-answers", {"made": "here"}, say=lambda line: None)
