"""``prepare-questions`` and ``prepare-cloze``: make a question data set from published sets, your files or any text."""

import argparse
from pathlib import Path

from fairseq_rpe.cli.options import positive_int, seed
from fairseq_rpe.cli.prepare import OVERWRITE_HELP
from fairseq_rpe.data.download import resolve_source
from fairseq_rpe.data.folder import SPLITS
from fairseq_rpe.questions import benchmarks, build_dataset, cloze, cloze_dataset
from fairseq_rpe.utils import records


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``prepare-questions``."""
    parser.description = (
        "Make a question data set for training and evaluation, from published sets or from your own JSON lines. A line "
        "has the fields id, prompt and answers. Optional fields are document (may be truncated), cue (follows the "
        "document), choices and group."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(benchmarks.benchmark_names()))
    _add_folder_options(parser, "FILE", Path)
    about = "folder or zip archive with the sets instead of a download, or another place hub:OWNER/NAME/FOLDER"
    parser.add_argument("--from", dest="local", metavar="PATH", help=about)
    about = "accept published sets that are incomplete"
    parser.add_argument("--no-counts", dest="counts", action="store_false", help=about)
    parser.add_argument("--name", default="", help="name of your own set (default: name of --out)")
    about = f"metrics of your own questions, the main one first (default: {build_dataset.METRIC})"
    parser.add_argument("--metric", dest="metrics", nargs="+", default=(), metavar="NAME", help=about)
    about = "largest number of tokens of an answer, end symbol included "
    about += f"(default: that of the published set, {build_dataset.ANSWER_TOKENS} for your own)"
    parser.add_argument("--answer-tokens", type=positive_int, metavar="N", help=about)


def add_cloze_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``prepare-cloze``."""
    parser.description = (
        "Make cloze questions from any text; novels work best. A question has a passage and a sentence with a gap. The "
        "answer is a name that occurs in the passage; each eighth of the passage has equally many answers. At least "
        "three other names occur nearer to the end of the passage than the answer, or at least as often. The command "
        "prints the scores of simple guesses. A name is a word that is capitalised within sentences and rarely lower "
        "case, as in English."
    )
    parser.add_argument("texts", nargs="*", metavar="SOURCE", help="folders, files or hub:OWNER/NAME, as for prepare")
    _add_folder_options(parser, "SOURCE", str)
    about = "context length in tokens, for passage, question and answer together"
    parser.add_argument("--tokens", type=positive_int, required=True, metavar="N", help=about)
    about = "context length in validation and test, which may be larger than --tokens (default: --tokens)"
    parser.add_argument("--valid-tokens", type=positive_int, metavar="N", help=about)
    about = "draw log-uniform lengths of training passages, from N tokens up (default: all passages fill --tokens)"
    parser.add_argument("--min-tokens", type=positive_int, metavar="N", help=about)
    for flag, default, split in (("", 4000, "training"), ("valid-", 400, "validation, and as many in test")):
        about = f"questions in {split} (default: {default})"
        parser.add_argument(f"--{flag}questions", type=positive_int, default=default, metavar="N", help=about)
    about = (
        "sentence of the question; next (default): the sentence after the passage; earlier: a sentence of the passage; "
        "planted: a sentence that is inserted into the passage and always the same, except for its name (needs "
        "--question-format completion)"
    )
    parser.add_argument("--source", choices=cloze_dataset.SOURCES, default="next", help=about)
    about = "gap (default): the sentence has a gap in place of the name; completion: the sentence ends before the name"
    parser.add_argument("--question-format", choices=cloze.QUESTION_FORMATS, default="gap", help=about)
    about = "own (default): names of the text; exchanged: other names from the training texts, drawn for each question"
    parser.add_argument("--entity-names", choices=cloze_dataset.ENTITY_NAMES, default="own", help=about)
    about = "position of the question: after the passage, before it, or both (default: last)"
    parser.add_argument("--question-position", choices=cloze.QUESTION_POSITIONS, default="last", help=about)
    about = "seed that selects questions, and splits the texts if the corpus has no split by document (default: 1)"
    parser.add_argument("--seed", type=seed, default=1, metavar="N", help=about)
    parser.add_argument("--documents", type=positive_int, metavar="N", help="train only on the first N documents")
    parser.add_argument(
        "--text-field", default="text", metavar="NAME", help="field of a row with its text (default: text)"
    )


def _add_folder_options(parser: argparse.ArgumentParser, metavar: str, kind: type) -> None:
    for split in SPLITS:
        about = f"sources of the {split} split"
        parser.add_argument(f"--{split}", nargs="+", type=kind, default=[], metavar=metavar, help=about)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write, e.g. data-bin/NAME")
    about = "prepared corpus of the pre-training, whose vocabulary is used"
    parser.add_argument("--vocab-from", type=Path, required=True, metavar="DIR", help=about)
    parser.add_argument("--overwrite", action="store_true", help=OVERWRITE_HELP)


def run(args: argparse.Namespace) -> None:
    """Run ``prepare-questions``."""
    names = {"names": tuple(args.names), "metrics": tuple(args.metrics)}
    files = {split: tuple(getattr(args, split)) for split in SPLITS}
    build_dataset.prepare_questions(records.from_attributes(build_dataset.QuestionOptions, args, **names, files=files))


def run_cloze(args: argparse.Namespace) -> None:
    """Run ``prepare-cloze``."""
    args.train = args.texts + args.train
    texts = {split: tuple(path for name in getattr(args, split) for path in resolve_source(name)) for split in SPLITS}
    options = records.from_attributes(cloze_dataset.ClozeOptions, args, **texts)
    print(build_dataset.summary_table(cloze_dataset.prepare_cloze(options)))
