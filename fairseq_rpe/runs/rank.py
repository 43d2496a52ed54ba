"""What torchrun starts: fairseq-train as one of several processes, on processors as well as on GPUs."""

import os
import sys

from fairseq_rpe.runs import processes

# Before the slow imports: torchrun, killed outright, leaves its processes behind, and two trainers must never write one
# folder.
processes.die_with_parent()

from fairseq_cli.train import cli_main  # noqa: E402

import fairseq_rpe.models  # noqa: E402, F401  (registers: this package was imported before fairseq)


def main() -> None:
    """Run fairseq-train with the flags given and the rank that torchrun says."""
    # fairseq reads torchrun's variables itself, but divides by the number of GPUs
    sys.argv += ["--distributed-init-method", "env://", "--distributed-no-spawn"]
    sys.argv += ["--distributed-rank", os.environ["RANK"], "--device-id", os.environ["LOCAL_RANK"]]
    cli_main()


if __name__ == "__main__":
    main()
