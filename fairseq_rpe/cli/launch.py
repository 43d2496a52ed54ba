"""How a training run is started: fairseq-train itself, or torchrun with one fairseq-train per process and node."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fairseq_rpe.runs import processes
from fairseq_rpe.cli.defaults import defaults_for
from fairseq_rpe.cli.options import package_folder, positive_int
from fairseq_rpe.core.errors import UserError

if TYPE_CHECKING:
    from fairseq_rpe.cli.train import Plan

_FIRST_PORT, _PORTS = 20000, 10000
# what SLURM is asked when the job has begun; the same that ``here`` finds out
_NODE_RANK = "$SLURM_NODEID"
_MASTER = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'


@dataclass(frozen=True)
class Node:
    """One of the machines that train a run together: its number, and HOST:PORT where they meet (several only)."""

    rank: str = "0"
    master: str | None = None

    @property
    def first(self) -> bool:
        """Whether it is the one that writes the run's folder."""
        return self.rank == "0"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--node-rank", type=_rank, metavar="R", help="which of --nodes this is (default: SLURM's)")
    parser.add_argument(
        "--master", type=_address, metavar="HOST:PORT", help="where --nodes meet: the first of them (default: SLURM's)"
    )


def _rank(text: str) -> int:
    return 0 if text == "0" else positive_int(text)


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"'{text}' is not HOST:PORT")
    return text


def here(args: argparse.Namespace) -> Node:
    """This node, as the command line says or else as SLURM does.

    Raises:
        UserError: neither says it, or they do not fit ``--nodes``.
    """
    if args.nodes == 1:
        if args.node_rank is not None or args.master is not None:
            raise UserError("--node-rank and --master are for several nodes: give --nodes too")
        return Node()
    if "SLURM_NNODES" in os.environ and int(os.environ["SLURM_NNODES"]) != args.nodes:
        raise UserError(f"--nodes {args.nodes}: this SLURM job has {os.environ['SLURM_NNODES']}: name as many")
    rank = os.environ.get("SLURM_NODEID") if args.node_rank is None else str(args.node_rank)
    if rank is None:
        raise UserError(f"--nodes {args.nodes}: say which of them this is, with --node-rank 0 to {args.nodes - 1}")
    if int(rank) >= args.nodes:
        raise UserError(f"--node-rank {rank}: {args.nodes} nodes are numbered 0 to {args.nodes - 1}")
    master = args.master or _slurm_master()
    if master is None:
        raise UserError(f"--nodes {args.nodes}: say where they meet, with --master HOST:PORT of the first node")
    return Node(rank, master)


def in_slurm(args: argparse.Namespace) -> Node:
    """What ``here`` will find in a SLURM job, as the words of a shell."""
    port = f"$(({_FIRST_PORT} + SLURM_JOB_ID % {_PORTS}))"
    return Node(_NODE_RANK, f"{_MASTER}:{port}") if args.nodes > 1 else Node()


def shown(words: list[str]) -> str:
    """A command as a line for a shell, which fills in what ``in_slurm`` left to it."""
    return " ".join(word if word.startswith("$") else shlex.quote(word) for word in words)


def _slurm_master() -> str | None:
    """The first host of this SLURM job, with a port that another job on it would not choose."""
    names, job = os.environ.get("SLURM_JOB_NODELIST"), os.environ.get("SLURM_JOB_ID")
    if not names or not job:
        return None
    try:
        told = subprocess.run(["scontrol", "show", "hostnames", names], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(f"scontrol did not say the hosts of this job ({error}): name the first with --master") from None
    return f"{told.stdout.split()[0]}:{_FIRST_PORT + int(re.sub('[^0-9]', '', job)) % _PORTS}"


def command(args: argparse.Namespace, wanted: Plan, node: Node, gpus: int) -> list[str]:
    """The command that trains on this node, with its ``gpus`` or, if 0, on its processors."""
    fairseq = _fairseq_flags(args, wanted)
    on_cpu = ["--cpu"] if args.device == "cpu" else []
    if args.nproc * args.nodes == 1:
        return [sys.executable, "-m", "fairseq_cli.train", *fairseq, *on_cpu, "--distributed-world-size", "1"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(args.nproc)]
    if node.master is None:
        torchrun.append("--standalone")
    else:
        host, _, port = node.master.rpartition(":")
        torchrun += ["--nnodes", str(args.nodes), "--node-rank", node.rank]
        torchrun += ["--master-addr", host, "--master-port", port]
    # torch's own DistributedDataParallel, fairseq's default, is asked for a GPU by fairseq
    kind = [] if gpus else ["--cpu", "--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp"]
    world = ["--distributed-world-size", str(args.nproc * args.nodes)]
    return [*torchrun, "-m", "fairseq_rpe.runs.rank", *fairseq, *kind, *world]


def _fairseq_flags(args: argparse.Namespace, wanted: Plan) -> list[str]:
    """The flags of fairseq-train, except where it runs."""
    s: dict[str, Any] = wanted.settings
    if args.algorithm:
        flags = ["--task", "rpe_algorithmic", "--algorithm", s["data"], "--criterion", "answer_cross_entropy"]
    else:
        flags = [str(args.data), "--task", "language_modeling", "--criterion", "lm_cross_entropy"]
        flags += ["--sample-break-mode", "none", "--tokens-per-sample", str(s["tokens"])]
    flags += ["--user-dir", package_folder(), "--arch", s["arch"]]
    flags += ["--rpe", s["rpe"], "--rpe-share", s["rpe_share"], "--attention-backend", args.attention_backend]
    flags += ["--positions-train", s["positions_train"]]
    if "compute_dtype" in s:
        flags += ["--compute-dtype", s["compute_dtype"]]
    if s["positions_eval"]:
        flags += ["--positions-eval", s["positions_eval"]]
    if args.rpe_module:
        flags += ["--rpe-module", str(args.rpe_module)]
    flags += ["--batch-size", str(s["batch_sentences"]), "--update-freq", str(s["update_freq"])]
    flags += ["--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--weight-decay", "0.01"]
    flags += ["--clip-norm", "1.0", "--lr", repr(s["lr"]), "--warmup-updates", str(s["warmup"])]
    if "schedule" in s:
        flags += ["--lr-scheduler", "polynomial_decay", "--total-num-update", str(s["last_update"])]
    else:
        flags += ["--lr-scheduler", "inverse_sqrt", "--warmup-init-lr", "1e-7"]
    flags += ["--dropout", repr(s["dropout"]), "--seed", str(s["seed"]), "--max-update", str(wanted.updates)]
    flags += ["--save-dir", str(args.save_dir), "--save-interval-updates", str(wanted.save_every)]
    flags += ["--keep-interval-updates", "1", "--no-epoch-checkpoints", "--num-workers", "0"]
    flags += ["--log-format", args.log_format, "--log-interval", str(args.log_interval)]
    if args.tensorboard:
        flags += ["--tensorboard-logdir", str(args.tensorboard)]
    if args.inspect_every:
        flags += ["--rpe-inspect-every", str(args.inspect_every)]
    return flags + s["extra"]


def gpus(args: argparse.Namespace, dry: bool = False) -> int:
    """How many GPUs a run of several processes finds here, 0: it trains on processors; ``dry``: only suppose.

    Raises:
        UserError: fewer than asked for.
    """
    if args.device == "cpu" or (args.device == "auto" and args.nproc * args.nodes == 1):
        return 0
    if dry and args.device == "cuda":
        return args.nproc
    # Asked in a process of its own: a parent that waits for hours needs no CUDA context.
    probe = "import sys, torch; sys.exit(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    there = subprocess.run([sys.executable, "-c", probe], check=False).returncode
    if args.device == "cuda" and there < 1:
        raise UserError("--device cuda: no GPU is to be seen here: drop the flag, or look at nvidia-smi")
    if 0 < there < args.nproc and not dry:
        raise UserError(f"--nproc {args.nproc}: there are {there} GPUs here: name at most as many, or --device cpu")
    return there


def threads(args: argparse.Namespace) -> str:
    """Threads of each process."""
    number = defaults_for(args.arch, bool(args.algorithm)).threads or max(1, processes.cores() // args.nproc)
    return os.environ.get("OMP_NUM_THREADS", str(number))


def keep_memory(used: int) -> dict[str, str]:
    """Settings of glibc's malloc for training on ``used`` GPUs, those of the user excepted.

    On a CPU it would otherwise give large tensors back to the kernel and fetch them again, page by page, each update.
    """
    keep = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
    return {} if used else {name: value for name, value in keep.items() if name not in os.environ}


def start(args: argparse.Namespace, wanted: Plan, node: Node, held: list[int]) -> int:
    """Train until it ends; returns its code. ``held``: open files that the trainers keep open as well."""
    used = gpus(args)
    line = command(args, wanted, node, used)
    child = processes.spawn(line, {"OMP_NUM_THREADS": threads(args)} | keep_memory(used), keep_open=held)
    try:
        return processes.wait_all([child])
    finally:
        processes.stop_all([child])
