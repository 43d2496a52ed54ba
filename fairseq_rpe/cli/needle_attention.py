"""``needle-attention``: measure and draw the attention of all heads to the needle of one example."""

import argparse
from pathlib import Path

from fairseq_rpe.cli.options import (
    add_figure_width,
    add_loading_options,
    nonnegative_float,
    nonnegative_int,
    positive_int,
    spec,
)
from fairseq_rpe.utils.records import from_attributes

_JSON, _MASS, _WEIGHTS = "needle_attention.json", "needle_mass.csv", "needle_weights.csv"
_PNG, _PDF = "needle_attention.png", "needle_attention.pdf"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``needle-attention``."""
    parser.description = (
        "Attention from the words of the answer to the needle of one test example, for each layer and head, and the "
        "weights of the head with the largest attention to the needle over the text."
    )
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="checkpoint of passkey or another needle task"
    )
    about = "tokens of prompt and answer (default: the longest in training)"
    parser.add_argument("--length", type=positive_int, metavar="N", help=about)
    about = "depth of the needle, from 0 (first) to 1 (last) (default: 0.5)"
    parser.add_argument("--depth", type=nonnegative_float, default=0.5, metavar="X", help=about)
    about = "number of the example among those of its length and depth, from 0 (default: 0)"
    parser.add_argument("--example", type=nonnegative_int, default=0, metavar="N", help=about)
    parser.add_argument(
        "--rpe", type=spec, metavar="SPEC", help="measure with this encoding instead of the checkpoint's"
    )
    add_loading_options(parser)
    out = Path("runs/needle-attention")
    parser.add_argument("--out", type=Path, default=out, metavar="DIR", help="folder to write (default: %(default)s)")
    add_figure_width(parser)


def run(args: argparse.Namespace) -> None:
    """Run ``needle-attention``."""
    from fairseq_rpe.data.folder import check_output
    from fairseq_rpe.evaluation import needle_records
    from fairseq_rpe.evaluation.checkpoint_defaults import with_checkpoint_rotation
    from fairseq_rpe.evaluation.needle_attention import measure_needle_attention, needle_example
    from fairseq_rpe.evaluation.records import ExactMatchRequest
    from fairseq_rpe.evaluation.task_model import checkpoint_algorithm
    from fairseq_rpe.figures.needle_attention import NeedleMap, draw_needle_attention
    from fairseq_rpe.figures.style import figures_at_width, save
    from fairseq_rpe.runs import checkpoints
    from fairseq_rpe.utils import records
    from fairseq_rpe.utils.files import atomic_write
    from fairseq_rpe.utils.json_files import write_json

    request = with_checkpoint_rotation(from_attributes(ExactMatchRequest, args))
    checkpoint = checkpoints.load(request.checkpoint)
    algorithm = checkpoint_algorithm(checkpoint)
    length = args.length or algorithm.max_length("train")
    needle_example(algorithm, request.split, length, args.depth, args.example)  # refuses before the model is loaded
    check_output(args.out, (_JSON, _MASS, _WEIGHTS, _PNG, _PDF))
    result = measure_needle_attention(request, checkpoint, length, args.depth, args.example)
    write_json(args.out / _JSON, records.to_dict(result))
    atomic_write(args.out / _MASS, needle_records.mass_csv(result))
    atomic_write(args.out / _WEIGHTS, needle_records.weights_csv(result))
    with figures_at_width(args.figure_width):
        needle_map = from_attributes(NeedleMap, result, title=result.encoding)
        save(draw_needle_attention([needle_map]), args.out / _PNG, args.out / _PDF)
    answer, prediction = (" ".join(words) for words in (result.answer, result.prediction))
    print(f"{algorithm.spec}: example {args.example} of {length} tokens, needle at depth {args.depth:g}")
    print(f"right answer: {answer}")
    print(f"prediction:   {prediction} ({'right' if result.is_right else 'wrong'})")
    print(
        f"largest attention to the needle: layer {result.layer}, head {result.head + 1}, "
        f"{100 * result.mass[result.layer][result.head]:.1f} % (even: {100 * result.even_mass:.1f} %)"
    )
    print(f"numbers: {args.out / _JSON}")
    print(f"figure:  {args.out / _PNG}")
