"""How a training run is started: fairseq-train, or torchrun with one fairseq-train per process and node.

``python -m fairseq_rpe.runs.launch`` is what is started: fairseq-train, which ends with us and loads less.
"""

import logging
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from typing import IO

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.runs import processes, training_data
from fairseq_rpe.runs.child_output import Ending, Relay
from fairseq_rpe.runs.progress_view import View
from fairseq_rpe.runs.settings import PROGRESS, Plan, Request
from fairseq_rpe.utils import devices
from fairseq_rpe.utils.child_processes import interpreter, module_command
from fairseq_rpe.utils.files import PACKAGE

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


def here(request: Request) -> Node:
    """This node, as the command line says or else as SLURM does.

    Raises UserError: neither says it, or they do not fit ``--nodes``.
    """
    nodes = request.nodes
    if nodes == 1:
        if request.node_rank is not None or request.master is not None:
            raise UserError("--node-rank and --master are for several nodes: give --nodes too")
        return Node()
    if "SLURM_NNODES" in os.environ and int(os.environ["SLURM_NNODES"]) != nodes:
        raise UserError(f"--nodes {nodes}: this SLURM job has {os.environ['SLURM_NNODES']}: name as many")
    rank = os.environ.get("SLURM_NODEID") if request.node_rank is None else str(request.node_rank)
    if rank is None:
        raise UserError(f"--nodes {nodes}: say which of them this is, with --node-rank 0 to {nodes - 1}")
    if int(rank) >= nodes:
        raise UserError(f"--node-rank {rank}: {nodes} nodes are numbered 0 to {nodes - 1}")
    master = request.master or _slurm_master()
    if master is None:
        raise UserError(f"--nodes {nodes}: say where they meet, with --master HOST:PORT of the first node")
    return Node(rank, master)


def in_slurm(request: Request) -> Node:
    """What ``here`` will find in a SLURM job, as the words of a shell."""
    port = f"$(({_FIRST_PORT} + SLURM_JOB_ID % {_PORTS}))"
    return Node(_NODE_RANK, f"{_MASTER}:{port}") if request.nodes > 1 else Node()


def shown(words: list[str]) -> str:
    """A command as a line for a shell, which fills in what ``in_slurm`` left to it."""
    return " ".join(word if word.startswith("$") else shlex.quote(word) for word in words)


def _slurm_master() -> str | None:
    """The first host of this SLURM job, with a port that another job on it would not choose."""
    names, job = os.environ.get("SLURM_JOB_NODELIST"), os.environ.get("SLURM_JOB_ID")
    if not names or not job:
        return None
    try:
        from submitit.slurm.slurm import SlurmJobEnvironment
    except ImportError:
        raise UserError("this SLURM job's first host is not known without submitit: name it with --master") from None
    return f"{SlurmJobEnvironment().hostnames[0]}:{_FIRST_PORT + int(re.sub('[^0-9]', '', job)) % _PORTS}"


def command(request: Request, plan: Plan, node: Node, gpus: int) -> list[str]:
    """The command that trains on this node, with its ``gpus`` or, if 0, on its processors."""
    flags = _fairseq_flags(request, plan)
    if request.world == 1:
        on_cpu = ["--cpu"] if request.device == "cpu" else []
        return module_command("fairseq_rpe.runs.launch", *flags, *on_cpu, "--distributed-world-size", "1")
    torchrun = module_command("torch.distributed.run", "--nproc-per-node", str(request.nproc))
    if node.master is None:
        torchrun.append("--standalone")
    else:
        host, _, port = node.master.rpartition(":")
        torchrun += ["--nnodes", str(request.nodes), "--node-rank", node.rank]
        torchrun += ["--master-addr", host, "--master-port", port]
    # torch's own DistributedDataParallel, fairseq's default, is asked for a GPU by fairseq
    kind = [] if gpus else ["--cpu", "--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp"]
    world = ["--distributed-world-size", str(request.world)]
    # torchrun starts the interpreter itself, and its children inherit PYTHONSAFEPATH; words after sys.executable -P, if
    # any, are a script
    trainer = [*interpreter()[2:], "-m", "fairseq_rpe.runs.launch"]
    return [*torchrun, *trainer, *flags, *kind, *world]


def _fairseq_flags(request: Request, plan: Plan) -> list[str]:
    """The flags of fairseq-train, except where it runs."""
    s = plan.settings
    if request.algorithm:
        flags = ["--task", "rpe_algorithmic", "--algorithm", s.data or "", "--criterion", "answer_cross_entropy"]
    elif training_data.asks(request.data):
        flags = [str(request.data), "--task", "rpe_answers", "--criterion", "answer_cross_entropy"]
        flags += ["--tokens-per-sample", str(s.tokens)]
    elif s.blocks is not None or s.separate_documents:
        flags = [str(request.data), "--task", "rpe_language_modeling", "--criterion", "lm_cross_entropy"]
        flags += ["--blocks", s.usual("blocks"), *(["--separate-documents"] if s.separate_documents else [])]
        flags += ["--tokens-per-sample", str(s.tokens)]
    else:
        flags = [str(request.data), "--task", "language_modeling", "--criterion", "lm_cross_entropy"]
        flags += ["--sample-break-mode", "none", "--tokens-per-sample", str(s.tokens)]
    flags += ["--user-dir", str(PACKAGE), "--arch", s.arch]
    flags += ["--rpe", s.rpe, "--rpe-share", s.rpe_share, "--attention-backend", request.attention_backend]
    flags += ["--positions-train", s.positions_train]
    if s.blocks == "document":
        # rows of one document may be short: as many of them as make up the tokens of full ones
        flags += ["--max-tokens", str(s.batch_sentences * s.tokens), "--required-batch-size-multiple", "1"]
    else:
        flags += ["--batch-size", str(s.batch_sentences)]
    flags += ["--update-freq", str(s.update_freq)]
    flags += ["--optimizer", "adam", "--adam-betas", str(s.usual("betas"))]
    flags += ["--weight-decay", repr(s.usual("weight_decay")), "--clip-norm", repr(s.usual("clip_norm"))]
    flags += ["--lr", repr(s.lr), "--warmup-updates", str(s.warmup)]
    if s.schedule == "linear":
        flags += ["--lr-scheduler", "polynomial_decay", "--total-num-update", str(s.last_update)]
    elif s.schedule == "cosine":
        flags += ["--lr-scheduler", "cosine", "--min-lr", repr(s.usual("min_lr")), "--warmup-init-lr", "1e-7"]
    else:
        flags += ["--lr-scheduler", "inverse_sqrt", "--warmup-init-lr", "1e-7"]
    flags += ["--dropout", repr(s.dropout), "--seed", str(s.seed), "--max-update", str(plan.updates)]
    flags += ["--save-dir", str(request.save_dir), "--save-interval-updates", str(plan.save_every)]
    flags += ["--keep-interval-updates", "1", "--no-epoch-checkpoints", "--num-workers", "0"]
    log_format = "json" if request.log_format == PROGRESS else request.log_format
    flags += ["--log-format", log_format, "--log-interval", str(request.log_interval)]
    optional = {
        "--compute-dtype": s.compute_dtype,
        "--positions-eval": s.positions_eval,
        "--rpe-module": request.rpe_module,
        "--finetune-from-model": request.finetune_from,
        "--tensorboard-logdir": request.tensorboard,
        "--rpe-inspect-every": request.inspect_every,
        "--attention-dropout": s.attention_dropout,
        "--activation-dropout": s.activation_dropout,
        "--activation-fn": s.activation_fn,
    }
    for flag, value in optional.items():
        flags += [flag, str(value)] if value else []
    flags += ["--share-decoder-input-output-embed"] if s.share_embeddings else []
    return flags + list(request.extra)


def gpus(request: Request, dry: bool = False) -> int:
    """How many GPUs a run finds here, 0: it trains on processors, or fairseq chooses; ``dry``: only suppose.

    Raises UserError: fewer than asked for.
    """
    if request.device == "auto" and request.world == 1:
        return 0
    if dry and request.device == "cpu":
        return 0
    if dry:
        return request.nproc if request.device == "cuda" else len(devices.gpus())
    found = len(devices.check(request.device, request.nproc))
    if not found and request.nproc > (most := max(16, 4 * processes.cores())):
        raise UserError(f"--nproc {request.nproc}: the {processes.cores()} cores here take {most} at most")
    return found


def threads(request: Request) -> str:
    """Threads of each process."""
    number = request.defaults.threads or max(1, processes.cores() // request.nproc)
    return os.environ.get("OMP_NUM_THREADS", str(number))


def keep_memory(used: int) -> dict[str, str]:
    """Settings of glibc's malloc for training on ``used`` GPUs, those of the user excepted.

    On a CPU it would otherwise give large tensors back to the kernel and fetch them again, page by page, each update.
    """
    keep = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
    return {} if used else {name: value for name, value in keep.items() if name not in os.environ}


def launch(
    request: Request, plan: Plan, node: Node, held: list[int], log: IO[bytes] | None = None, view: View | None = None
) -> Ending:
    """Train until it ends; says how it did. ``held``: open files that the trainers keep open as well.

    ``log`` and ``view``: where the trainers' words go, see :class:`Relay`.
    """
    used = gpus(request)
    environment = {"OMP_NUM_THREADS": threads(request)} | keep_memory(used)
    # where both go to the same place, lines keep their order
    errors = None if view is not None or _same_place() else subprocess.PIPE
    words = command(request, plan, node, used)
    child = processes.spawn(words, environment, subprocess.PIPE, held, errors)
    relay = Relay(child, log, view)
    try:
        processes.wait(child, relay.mute)
    finally:
        ending = relay.finish(child.returncode)
    return ending


def _same_place() -> bool:
    """Whether standard output and standard error are one file or terminal."""
    try:
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except (OSError, ValueError):
        return False


if __name__ == "__main__":
    # Before the slow imports: torchrun, killed outright, leaves its processes behind, and two trainers must never write
    # one folder.
    processes.die_with_parent()
    # fairseq-train's own format, before fairseq is imported and settles another
    logging.basicConfig(
        format="%(asctime)s | %(levelname)s | %(name)s | %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        level=os.environ.get("LOGLEVEL", "INFO").upper(),
        stream=sys.stdout,
    )

    import fairseq_rpe.compat  # before fairseq, which then starts quicker

    # isort: split
    import torch
    from fairseq_cli.train import cli_main

    import fairseq_rpe.models  # noqa: F401  (registers: this package was imported before fairseq)

    if "TORCHELASTIC_RUN_ID" in os.environ:
        # fairseq reads torchrun's variables itself, but divides by the number of GPUs
        sys.argv += ["--distributed-init-method", "env://", "--distributed-no-spawn"]
        sys.argv += ["--distributed-rank", os.environ["RANK"], "--device-id", os.environ["LOCAL_RANK"]]
    cli_main()
    if torch.distributed.is_initialized():
        # its threads, left to themselves, can abort a process that is done: "terminate called without …"
        torch.distributed.destroy_process_group()
