"""Derives the flags of fairseq-train from the fields of :class:`TrainingConfig`, and starts it or torchrun.

torchrun starts one fairseq-train per process and node.

``python -m fairseq_rpe.runs.launch`` is fairseq-train with faster imports; it ends when its parent ends.
"""

import logging
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from typing import IO, Any

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.runs import processes, training_data
from fairseq_rpe.runs.child_output import ChildExit, OutputRelay
from fairseq_rpe.runs.defaults import defaults_for
from fairseq_rpe.runs.progress_view import ProgressView
from fairseq_rpe.runs.settings import ResolvedSettings, TrainingPlan
from fairseq_rpe.runs.training_config import PROGRESS, SETTINGS, TrainingConfig
from fairseq_rpe.utils import devices
from fairseq_rpe.utils.child_processes import module_command, python_command
from fairseq_rpe.utils.files import PACKAGE_DIR

# A port of the first node for each SLURM job, derived from the job's number, so that jobs on one machine differ.
_FIRST_PORT, _PORTS = 20000, 10000
# Shell expressions that a SLURM job evaluates to what ``current_node`` returns.
_NODE_RANK = "$SLURM_NODEID"
_MASTER = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'

# flags that no option changes
_CONSTANT_FLAGS = (
    *("--user-dir", str(PACKAGE_DIR), "--optimizer", "adam"),
    *("--keep-interval-updates", "1", "--no-epoch-checkpoints", "--num-workers", "0"),
)
_WARMUP_START = ("--warmup-init-lr", "1e-7")
_FILES = ("rpe_module", "finetune_from")  # settings of a run that run.json records as digests of files


@dataclass(frozen=True)
class Node:
    """One of the machines that train a run together.

    Attributes:
        rank: index of the node, or a shell expression for it.
        master: HOST:PORT at which several nodes meet, None for a single node.
    """

    rank: str = "0"
    master: str | None = None

    @property
    def is_first(self) -> bool:
        """Whether this node writes the folder of the run."""
        return self.rank == "0"


def current_node(config: TrainingConfig) -> Node:
    """Identify this node from the configuration or, without ``node_rank`` and ``master``, from SLURM's environment.

    Args:
        config: configuration of the training.

    Returns:
        The node.

    Raises:
        UserError: rank or address are unknown, or do not fit ``--nodes``.
    """
    nodes = config.nodes
    if nodes == 1:
        if config.node_rank is not None or config.master is not None:
            raise UserError("--node-rank and --master are for several nodes: give --nodes too")
        return Node()
    if "SLURM_NNODES" in os.environ and int(os.environ["SLURM_NNODES"]) != nodes:
        raise UserError(f"--nodes {nodes}: this SLURM job has {os.environ['SLURM_NNODES']}: give --nodes as many")
    rank = os.environ.get("SLURM_NODEID") if config.node_rank is None else str(config.node_rank)
    if rank is None:
        raise UserError(f"--nodes {nodes}: name this one with --node-rank 0 to {nodes - 1}")
    if int(rank) >= nodes:
        raise UserError(f"--node-rank {rank}: {nodes} nodes are numbered 0 to {nodes - 1}")
    master = config.master or _slurm_master()
    if master is None:
        raise UserError(f"--nodes {nodes}: give the address of the first node with --master HOST:PORT")
    return Node(rank, master)


def slurm_node(config: TrainingConfig) -> Node:
    """Return the node of a future SLURM job as shell expressions for :func:`shell_line`."""
    port = f"$(({_FIRST_PORT} + SLURM_JOB_ID % {_PORTS}))"
    return Node(_NODE_RANK, f"{_MASTER}:{port}") if config.nodes > 1 else Node()


def shell_line(words: list[str]) -> str:
    """Quote a command for a shell; words that begin with $ stay shell expressions."""
    return " ".join(word if word.startswith("$") else shlex.quote(word) for word in words)


def _slurm_master() -> str | None:
    """Return the first host of this SLURM job with a port derived from the job's number; None outside SLURM."""
    names, job = os.environ.get("SLURM_JOB_NODELIST"), os.environ.get("SLURM_JOB_ID")
    if not names or not job:
        return None
    try:
        from submitit.slurm.slurm import SlurmJobEnvironment
    except ImportError:
        raise UserError(
            "the first host of this SLURM job is unknown without submitit: give --master HOST:PORT"
        ) from None
    return f"{SlurmJobEnvironment().hostnames[0]}:{_FIRST_PORT + int(re.sub('[^0-9]', '', job)) % _PORTS}"


def training_flags(config: TrainingConfig, plan: TrainingPlan) -> list[str]:
    """Return the flags of fairseq-train, without those for devices and processes.

    Args:
        config: configuration of the training.
        plan: settings and numbers of updates that the configuration resolves to.

    Returns:
        Flags and values; words after ``--`` come last, so that they win.
    """
    flags = [*_task_flags(config, plan.settings), *_CONSTANT_FLAGS]
    for name, s in SETTINGS.items():
        if s.flags and s.is_passed:
            flags += _flag(s.flags[0], _value(name, config, plan))
    flags += [*_batch_flags(plan.settings), *_schedule_flags(plan.settings)]
    flags += ["--log-format", "json" if config.log_format == PROGRESS else config.log_format]
    return [*flags, *config.extra]


def _value(name: str, config: TrainingConfig, plan: TrainingPlan) -> Any:
    """Return the value that follows the flag of a setting, or None if fairseq-train gets no such flag."""
    s = SETTINGS[name]
    if s.is_identity and name not in _FILES:
        value = getattr(plan.settings, name)
        return s.default if value is None and s.passes_default else value
    return getattr(plan, name) if hasattr(plan, name) else getattr(config, name)


def _flag(flag: str, value: Any) -> list[str]:
    """Return the words that pass a value: none for None and False, the flag alone for True."""
    if value is None or value is False:
        return []
    if isinstance(value, tuple) and all(isinstance(item, int) for item in value):
        value = ",".join(map(str, value))
    return [flag] if value is True else [flag, str(value)]


def _task_flags(config: TrainingConfig, s: ResolvedSettings) -> list[str]:
    """Return the flags for the data and the criterion: a generated task, questions, or text."""
    if config.algorithm:
        return ["--task", "rpe_algorithmic", "--algorithm", s.data or "", "--criterion", "answer_cross_entropy"]
    tokens = ["--tokens-per-sample", str(s.tokens)]
    if training_data.is_question_data(config.data):
        return [str(config.data), "--task", "rpe_answers", "--criterion", "answer_cross_entropy", *tokens]
    if s.blocks is not None or s.separate_documents:
        flags = [str(config.data), "--task", "rpe_language_modeling", "--criterion", "lm_cross_entropy"]
        flags += ["--blocks", s.effective("blocks"), *(["--separate-documents"] if s.separate_documents else [])]
        return [*flags, *tokens]
    flags = [str(config.data), "--task", "language_modeling", "--criterion", "lm_cross_entropy"]
    return [*flags, "--sample-break-mode", "none", *tokens]


def _batch_flags(s: ResolvedSettings) -> list[str]:
    """Return the flags for the size of a batch."""
    if s.blocks == "document":
        # rows of single documents may be short, so the batch is limited in tokens
        return ["--max-tokens", str(s.batch_sentences * s.tokens), "--required-batch-size-multiple", "1"]
    return ["--batch-size", str(s.batch_sentences)]


def _schedule_flags(s: ResolvedSettings) -> list[str]:
    """Return the flags for the learning-rate schedule."""
    if s.schedule == "linear":
        return ["--lr-scheduler", "polynomial_decay", "--total-num-update", str(s.last_update)]
    if s.schedule == "cosine":
        return ["--lr-scheduler", "cosine", "--min-lr", str(s.effective("min_lr")), *_WARMUP_START]
    return ["--lr-scheduler", "inverse_sqrt", *_WARMUP_START]


def training_command(config: TrainingConfig, plan: TrainingPlan, node: Node, gpus: int) -> list[str]:
    """Return the command that trains on a node.

    Args:
        config: configuration of the training.
        plan: settings and numbers of updates that the configuration resolves to.
        node: the node.
        gpus: number of GPUs on this node to train on; 0 for processors.

    Returns:
        Program and arguments.
    """
    flags = training_flags(config, plan)
    if config.world_size == 1:
        on_cpu = ["--cpu"] if config.device == "cpu" else []
        return module_command("fairseq_rpe.runs.launch", *flags, *on_cpu, "--distributed-world-size", "1")
    torchrun = module_command("torch.distributed.run", "--nproc-per-node", str(config.nproc))
    if node.master is None:
        torchrun.append("--standalone")
    else:
        host, _, port = node.master.rpartition(":")
        torchrun += ["--nnodes", str(config.nodes), "--node-rank", node.rank]
        torchrun += ["--master-addr", host, "--master-port", port]
    # fairseq's default wraps torch's DistributedDataParallel with a GPU, so processors need legacy_ddp
    device_flags = [] if gpus else ["--cpu", "--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp"]
    world = ["--distributed-world-size", str(config.world_size)]
    # torchrun starts the interpreter itself, and its children inherit PYTHONSAFEPATH; words after ``sys.executable -P``
    # are a script
    trainer = [*python_command()[2:], "-m", "fairseq_rpe.runs.launch"]
    return [*torchrun, *trainer, *flags, *device_flags, *world]


def count_gpus(config: TrainingConfig, dry: bool = False) -> int:
    """Return the number of GPUs on this machine that a training uses.

    Args:
        config: configuration of the training.
        dry: whether the training only is described, perhaps for another machine: then nothing is checked.

    Returns:
        Number of GPUs; 0 if the training runs on processors or fairseq chooses the device.

    Raises:
        UserError: there are fewer GPUs or cores than requested.
    """
    if config.device == "auto" and config.world_size == 1:
        return 0
    if dry:
        counts = {"cpu": 0, "cuda": config.nproc}
        return counts[config.device] if config.device in counts else len(devices.gpu_names())
    count = len(devices.visible_gpus(config.device, config.nproc))
    if not count and config.nproc > (most := max(16, 4 * processes.available_cores())):
        raise UserError(f"--nproc {config.nproc}: the {processes.available_cores()} cores here take {most} at most")
    return count


def threads_per_process(config: TrainingConfig) -> str:
    """Return the threads of each process: OMP_NUM_THREADS, the default of the architecture, or a share of the cores."""
    defaults = defaults_for(config.arch or "tiny", config.algorithm is not None)
    number = defaults.threads or max(1, processes.available_cores() // config.nproc)
    return os.environ.get("OMP_NUM_THREADS", str(number))


def malloc_settings(gpus: int) -> dict[str, str]:
    """Return environment variables for glibc's malloc that keep memory for the next update.

    On a CPU malloc otherwise returns large tensors to the kernel and fetches them again, page by page, in each update.

    Args:
        gpus: number of GPUs of the training; with any, no variables are needed.

    Returns:
        Variables that the user has not set.
    """
    # No separate mappings for large blocks, and no return of memory below 1 TiB.
    variables = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
    return {} if gpus else {name: value for name, value in variables.items() if name not in os.environ}


def launch_training(
    config: TrainingConfig,
    plan: TrainingPlan,
    node: Node,
    inherited: list[int],
    log: IO[bytes] | None = None,
    view: ProgressView | None = None,
) -> ChildExit:
    """Run fairseq-train on this node until it ends.

    Args:
        config: configuration of the training.
        plan: settings and numbers of updates that the configuration resolves to.
        node: this node.
        inherited: file descriptors that the training keeps open, so that their locks last as long as it does.
        log: file that takes the output; see :class:`~fairseq_rpe.runs.child_output.OutputRelay`.
        view: view that replaces the output on the terminal.

    Returns:
        How the training ended.
    """
    gpus = count_gpus(config)
    environment = {"OMP_NUM_THREADS": threads_per_process(config)} | malloc_settings(gpus)
    # one pipe for both streams keeps the order of their lines
    errors = None if view is not None or _share_output() else subprocess.PIPE
    command = training_command(config, plan, node, gpus)
    child = processes.spawn(command, environment, log=subprocess.PIPE, keep_open=inherited, errors=errors)
    relay = OutputRelay(child, log, view)
    try:
        processes.wait(child, relay.mute)
    finally:
        ending = relay.finish(child.returncode)
    return ending


def _share_output() -> bool:
    """Return whether standard output and standard error are one file or terminal."""
    try:
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except (OSError, ValueError):
        return False


if __name__ == "__main__":
    # before the slow imports: a killed torchrun leaves its processes behind, and two trainings must not share a folder
    processes.die_with_parent()
    # the format of fairseq-train, before the import of fairseq configures logging
    logging.basicConfig(
        format="%(asctime)s | %(levelname)s | %(name)s | %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        level=os.environ.get("LOGLEVEL", "INFO").upper(),
        stream=sys.stdout,
    )

    import fairseq_rpe.compat  # before fairseq, which then starts faster

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
        # otherwise its threads can abort the finished process: "terminate called without …"
        torch.distributed.destroy_process_group()
