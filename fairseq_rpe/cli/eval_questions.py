"""``eval-questions``: answer a prepared question data set at several context lengths and score the answers."""

import argparse
from pathlib import Path

from fairseq_rpe.cli.options import add_checkpoint_options, int_list, nonnegative_float, positive_int, spec_list
from fairseq_rpe.cli.printing import Column, ResultPrinter, add_json, seconds
from fairseq_rpe.utils.progress import Progress
from fairseq_rpe.utils.records import from_attributes

_COLUMNS = (
    Column("set", 16, lambda r: r.set, left=True),
    Column("length", 8, lambda r: str(r.length)),
    Column("score %", 8, lambda r: f"{r.score:.2f}"),
    Column("questions", 9, lambda r: f"{r.questions:,}"),
    Column("shortened", 9, lambda r: f"{r.truncated_documents:,}"),
    Column("seconds", 9, seconds),
    # the score is among them
    Column("metrics %", 0, lambda r: ", ".join(f"{k} {v:.2f}" for k, v in r.metrics.items()), left=True),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``eval-questions``."""
    parser.description = (
        "Print the scores of each question set at each length, with all metrics of the set. Results in --out are not "
        "measured again, and an interrupted measurement resumes after its last question."
    )
    add_checkpoint_options(parser)
    add_json(parser)
    parser.add_argument("data", type=Path, metavar="DATA", help="folder of fairseq-rpe prepare-questions")
    about = "context lengths: largest number of tokens of prompt, document, cue and answer together"
    parser.add_argument("--lengths", type=int_list, required=True, metavar="N,N,...", help=about)
    parser.add_argument("--sets", type=spec_list, metavar="NAME,...", help="sets to answer (default: all in DATA)")
    parser.add_argument("--split", default="valid", help="split to answer (default: valid)")
    about = "generation: generate the answer; likelihood: choose the most likely choice (default: %(default)s)"
    parser.add_argument("--answer-mode", choices=("generation", "likelihood"), default="generation", help=about)
    parser.add_argument("--beam", type=positive_int, default=1, metavar="K", help="beam width (default: 1, greedy)")
    about = "exponent X of the beam score, log-probability / (answer tokens ** X), 0 to 10 (default: 1)"
    parser.add_argument("--length-penalty", type=nonnegative_float, metavar="X", help=about)
    about = "place at which a document that is too long is truncated (default: end)"
    parser.add_argument("--truncate", choices=("end", "start", "middle"), default="end", help=about)
    parser.add_argument(
        "--compute-dtype", choices=("fp32", "bf16"), help="dtype of matrix products (default: the checkpoint's)"
    )
    about = "folder for the generated answers: files SET-LENGTH-DIGEST.json that map id to text"
    parser.add_argument("--predictions", type=Path, metavar="DIR", help=about)


def run(args: argparse.Namespace) -> None:
    """Run ``eval-questions``."""
    from fairseq_rpe.evaluation.checkpoint_defaults import with_checkpoint_rotation
    from fairseq_rpe.evaluation.question_answering import answer_questions
    from fairseq_rpe.evaluation.question_records import QuestionRequest

    request = with_checkpoint_rotation(from_attributes(QuestionRequest, args))
    with Progress(args.data.name, "questions") as bar:
        printer = ResultPrinter(_COLUMNS, args.json, bar.write)
        for result in answer_questions(request, bar):
            printer.add(result)
