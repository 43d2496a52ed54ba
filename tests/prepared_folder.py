"""Small question datasets for tests."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fairseq_rpe.data.folder import MADE_BY, MANIFEST, write_dictionary
from fairseq_rpe.data.tokenization import Tokenizer, train_tokenizer
from fairseq_rpe.questions.build_dataset import MADE_BY as MADE_BY_QUESTIONS
from fairseq_rpe.questions.build_dataset import PendingQuestion, PendingSet, write_dataset
from fairseq_rpe.questions.dataset import Question, QuestionDataset
from fairseq_rpe.utils.json_files import write_json

LINES = ("The river rose in March. Old Tamsin mended the wheel.", "Who mended the wheel? Tamsin, said Bren.") * 4


def vocabulary(folder: Path, kind: str = "bpe", words: Sequence[str] = (), size: int = 300) -> Path:
    """Write a folder for ``--vocab-from``: the vocabulary of a corpus without its text.

    Args:
        folder: output folder.
        kind: ``bpe`` or ``words``.
        words: words of a vocabulary of ``words``; empty: those of ``LINES``.
        size: number of tokens of a vocabulary of ``bpe``.
    """
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
    """Build different questions about documents of different lengths.

    Every third question has two right answers and no choices; the others have one right answer and two choices.

    Args:
        number: number of questions.
        start: number of the first question.
        words: a document repeats a sentence at most so many times, less one.
    """
    names = ("Tamsin", "Bren")
    drawn = []
    for i in range(start, start + number):
        name = names[i % 2]
        document = f"Day {i}. " + "The river rose. " * (i % words) + f"Old {name} mended the wheel."
        answers, choices = ((name,), names) if i % 3 else ((name, f"Old {name}"), ())
        prompt, cue = "Who mended the wheel?\n\n", "\n\nAnswer:"
        drawn.append(Question(f"q{i}", prompt, answers, document, cue, f"g{i // 2}", choices))
    return drawn


def make_folder(
    folder: Path,
    splits: Mapping[str, Sequence[Question]] | None = None,
    vocab: Path | None = None,
    name: str = "made",
    metrics: tuple[str, ...] = ("f1", "em"),
    answer_tokens: int = 16,
) -> QuestionDataset:
    """Write a dataset of one set; without ``vocab``, a vocabulary is written next to ``folder``."""
    splits = splits or {"train": questions(8), "valid": questions(4, start=8)}
    return make_sets(folder, [asked_set(name, splits, metrics, answer_tokens)], vocab)


def asked_set(
    name: str,
    splits: Mapping[str, Sequence[Question]],
    metrics: tuple[str, ...] = ("f1", "em"),
    answer_tokens: int = 16,
) -> PendingSet:
    """Build a set for :func:`make_sets`."""

    def make_reader(split: str):
        return lambda: (PendingQuestion(question, lambda: f"{split}.jsonl") for question in splits[split])

    return PendingSet(name, "own", metrics, metrics[0], answer_tokens, {split: make_reader(split) for split in splits})


def make_sets(folder: Path, sets: Sequence[PendingSet], vocab: Path | None = None) -> QuestionDataset:
    """Write a dataset of several sets; without ``vocab``, a vocabulary is written next to ``folder``."""
    vocab = vocab or vocabulary(folder.parent / "vocabulary")
    return write_dataset(folder, sets, vocab, MADE_BY_QUESTIONS, {"made": "here"}, say=lambda line: None)
