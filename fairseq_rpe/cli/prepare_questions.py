"""``prepare-answers`` and ``prepare-gaps``: questions with their answers, from published sets, own files or a text."""

import argparse
from pathlib import Path

from fairseq_rpe.cli.options import positive_int, seed
from fairseq_rpe.cli.prepare import OVERWRITE
from fairseq_rpe.data.folder import SPLITS
from fairseq_rpe.data.hub import sources
from fairseq_rpe.questions import benchmarks, build_dataset, cloze, cloze_dataset
from fairseq_rpe.utils import records


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Make a folder of questions to train on and to answer: of known sets, perhaps several, or of your own JSON "
        "lines with id, prompt, answers and perhaps document (it may be shortened), cue (after it), choices, group."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(benchmarks.names()))
    _add_places(parser, "FILE", Path)
    about = "folder or zip archive with the sets instead of a download; or hub:OWNER/NAME/FOLDER"
    parser.add_argument("--from", dest="local", metavar="PATH", help=about)
    parser.add_argument("--no-counts", dest="counts", action="store_false", help="take incomplete known sets, too")
    parser.add_argument("--name", default="", help="of the set in your own files (default: that of --dest)")
    about = f"metrics of your own questions, the one that counts first (default: {build_dataset.METRIC})"
    parser.add_argument("--metric", dest="metrics", nargs="+", default=(), metavar="NAME", help=about)
    about = "most of an answer, its end included "
    about += f"(default: what a known set has, {build_dataset.ANSWER_TOKENS} for your own)"
    parser.add_argument("--answer-tokens", type=positive_int, metavar="N", help=about)


def add_gaps(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Make questions of any text, best of novels: a passage, and a sentence with a gap for a name of the passage, "
        "equally often in each eighth of it; at least three other names are nearer or as frequent, and the table shows "
        "what guesses get. Names are words capitalised within sentences and hardly ever written small, as in English."
    )
    parser.add_argument("source", nargs="*", metavar="SOURCE", help="folders, files or hub:OWNER/NAME, as for prepare")
    _add_places(parser, "SOURCE", str)
    about = "what passage, question and answer have together, the context length that they fill"
    parser.add_argument("--tokens", type=positive_int, required=True, metavar="N", help=about)
    about = "the same in validation and test, e.g. to ask of longer contexts than in training (default: --tokens)"
    parser.add_argument("--valid-tokens", type=positive_int, metavar="N", help=about)
    about = "train on passages of any length from N tokens on, even on a logarithmic scale (default: all fill --tokens)"
    parser.add_argument("--shortest", type=positive_int, metavar="N", help=about)
    for flag, number, about in (("", 4000, "of training"), ("valid-", 400, "of validation, as many of the test")):
        about = f"{about} (default: {number})"
        parser.add_argument(f"--{flag}questions", type=positive_int, default=number, metavar="N", help=about)
    about = "the one after the passage (default); an earlier one, of the passage itself, that can be looked up there; "
    about = f"{about}or one planted there, the same each time but for its name, which is drawn (with --form completion)"
    parser.add_argument("--sentence", choices=cloze_dataset.ASKED, default="next", help=about)
    about = "a gap in the sentence (default), or the sentence breaks off before the name, to be completed"
    parser.add_argument("--form", choices=cloze.FORMS, default="gap", help=about)
    about = "those of the text (default); or others of the training's for each question, so that none is known by heart"
    parser.add_argument("--names", choices=cloze_dataset.NAMES, default="own", help=about)
    about = "its place (default: last)"
    parser.add_argument("--question", dest="where", choices=cloze.WHERE, default="last", help=about)
    about = "of the choice, and of the division of texts where the corpus has none (default: 1)"
    parser.add_argument("--seed", type=seed, default=1, metavar="N", help=about)
    parser.add_argument("--documents", type=positive_int, metavar="N", help="train on the first N documents alone")
    parser.add_argument("--text-field", default="text", metavar="NAME", help="of a row (default: text)")


def _add_places(parser: argparse.ArgumentParser, what: str, kind: type) -> None:
    for split in SPLITS:
        parser.add_argument(f"--{split}", nargs="+", type=kind, default=[], metavar=what, help=f"the {split} split")
    parser.add_argument("--dest", type=Path, required=True, metavar="DIR", help="folder to make, e.g. data-bin/NAME")
    about = "take the vocabulary of this prepared corpus, that of the pre-training"
    parser.add_argument("--vocab-from", type=Path, required=True, metavar="DIR", help=about)
    parser.add_argument("--overwrite", action="store_true", help=OVERWRITE)


def run(args: argparse.Namespace) -> None:
    words = {"names": tuple(args.names), "metrics": tuple(args.metrics)}
    files = {split: tuple(getattr(args, split)) for split in SPLITS}
    build_dataset.make_answers(records.filled(build_dataset.AnswerOptions, args, **words, files=files))


def run_gaps(args: argparse.Namespace) -> None:
    args.train = args.source + args.train
    texts = {split: tuple(path for name in getattr(args, split) for path in sources(name)) for split in SPLITS}
    print(build_dataset.summary(cloze_dataset.make_gaps(records.filled(cloze_dataset.GapOptions, args, **texts))))
