"""``answer``: a checkpoint's answers to prepared questions at several context lengths, scored as their papers do."""

import argparse
from pathlib import Path

from fairseq_rpe.cli.options import add_checkpoint, int_list, least, positive_int, words
from fairseq_rpe.cli.printing import Column, ResultPrinter, add_json, seconds
from fairseq_rpe.utils.progress import Progress
from fairseq_rpe.utils.records import filled

_COLUMNS = (
    Column("set", 16, lambda r: r.set, left=True),
    Column("length", 8, lambda r: str(r.length)),
    Column("score %", 8, lambda r: f"{r.score:.2f}"),
    Column("questions", 9, lambda r: f"{r.questions:,}"),
    Column("shortened", 9, lambda r: f"{r.cut_documents:,}"),
    Column("seconds", 9, seconds),
    # the score is one of them
    Column("metrics %", 0, lambda r: ", ".join(f"{k} {v:.2f}" for k, v in r.metrics.items()), left=True),
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Prints a table of the scores by set and length, with all metrics of the set; what is in --out is not measured "
        "again, and of what is unfinished no question is asked again."
    )
    add_checkpoint(parser)
    add_json(parser)
    parser.add_argument("data", type=Path, metavar="DATA", help="folder of fairseq-rpe prepare-answers")
    about = "context lengths: most tokens of prompt, document, cue and answer together"
    parser.add_argument("--lengths", type=int_list, required=True, metavar="N,N,...", help=about)
    parser.add_argument("--sets", type=words, metavar="NAME,...", help="sets to answer (default: all in DATA)")
    parser.add_argument("--subset", default="valid", help="split to answer (default: valid)")
    about = "generation: written to the end; likelihood: the likeliest of the choices (default: %(default)s)"
    parser.add_argument("--by", choices=("generation", "likelihood"), default="generation", help=about)
    parser.add_argument("--beam", type=positive_int, default=1, metavar="K", help="beam width (default: 1, greedy)")
    about = "of a beam: sums of log-probabilities are divided by answer tokens ** X, 0 to 10 (default: 1)"
    parser.add_argument("--length-penalty", type=least, metavar="X", help=about)
    about = "where a document that is too long is shortened (default: end)"
    parser.add_argument("--cut", choices=("end", "start", "middle"), default="end", help=about)
    parser.add_argument("--compute-dtype", choices=("fp32", "bf16"), help="default: the checkpoint's")
    about = "folder for the answers: SET-LENGTH-DIGEST.json, as id: text"
    parser.add_argument("--predictions", type=Path, metavar="DIR", help=about)


def run(args: argparse.Namespace) -> None:
    from fairseq_rpe.evaluation.question_answering import answered
    from fairseq_rpe.evaluation.question_records import QuestionRequest
    from fairseq_rpe.evaluation.replaced_encoding import with_checkpoint_rotation

    request = with_checkpoint_rotation(filled(QuestionRequest, args))
    with Progress(args.data.name, "questions") as bar:
        printer = ResultPrinter(_COLUMNS, args.json, bar.say)
        for result in answered(request, bar):
            printer.add(result)
