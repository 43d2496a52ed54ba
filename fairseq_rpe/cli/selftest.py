"""``selftest``: whether every backend computes every encoding rightly on this machine."""

import argparse
import sys
from pathlib import Path

from fairseq_rpe.cli.options import add_rpe_module, words
from fairseq_rpe.utils.files import write_json

_FILE = "selftest.json"


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Computes attention with every encoding, backend and number type: forward, backward, padded on the left, one "
        "query against cached keys, unevenly spaced positions. Prints errors against the reference in float64, as "
        "multiples of what is allowed (1 is the limit), with times. What a backend refuses is no failure."
    )
    parser.add_argument("--encodings", type=words, default=(), metavar='"SPEC ..."', help="default: all")
    parser.add_argument("--backends", type=words, default=("all",), metavar='"NAME ..."', help="default: all")
    about = "fp32, bf16, fp16 (default: fp32,bf16)"
    parser.add_argument("--dtype", dest="dtypes", type=words, default=("fp32", "bf16"), metavar="NAME,...", help=about)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"folder for {_FILE}, to attach to a report")
    add_rpe_module(parser)


def run(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from fairseq_rpe import __version__
    from fairseq_rpe.analysis import selftest
    from fairseq_rpe.data.folder import check_output
    from fairseq_rpe.runs.environment import commit
    from fairseq_rpe.utils.devices import chosen
    from fairseq_rpe.utils.files import PACKAGE
    from fairseq_rpe.utils.records import filled

    setting = filled(selftest.Setting, args, device=chosen(args.device))
    setting.check()
    if args.out is not None:
        check_output(args.out, (_FILE,))
    about, cells = {"fairseq_rpe": __version__, "commit": commit(PACKAGE)}, []
    tests = setting.tests()
    for number, test in enumerate(tqdm(tests, disable=None, unit="encoding"), 1):
        cells += test()
        if args.out is not None:  # what there is, should this be stopped
            found = selftest.document(setting, cells, about, complete=number == len(tests))
            write_json(args.out / _FILE, found)
    print("\n".join([*(table.markdown() for table in selftest.tables(cells)), *selftest.reasons(cells)]))
    print(selftest.summary(cells))
    failed = any(cell.state == selftest.FAILED for cell in cells)
    if failed:
        print("error: some backends do not compute here what they should", file=sys.stderr)
    return int(failed)
