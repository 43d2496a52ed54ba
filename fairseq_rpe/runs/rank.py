"""What torchrun starts: fairseq-train as one of several processes, on processors as well as on GPUs."""

from __future__ import annotations

import os
import sys

from fairseq_rpe.runs import processes


def main() -> None:
    """Run fairseq-train with the flags given and the rank that torchrun says."""
    # torchrun, killed outright, leaves its processes behind; two trainers must never write one folder
    processes.die_with_parent()
    from fairseq_cli.train import cli_main

    import fairseq_rpe.models  # noqa: F401  (registers: this package was imported before fairseq)

    # fairseq reads torchrun's variables itself, but divides by the number of GPUs
    sys.argv += ["--distributed-init-method", "env://", "--distributed-no-spawn"]
    sys.argv += ["--distributed-rank", os.environ["RANK"], "--device-id", os.environ["LOCAL_RANK"]]
    cli_main()


if __name__ == "__main__":
    main()
