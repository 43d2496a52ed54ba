"""Run a training to its end; the same config resumes a training that was stopped."""

import contextlib
import datetime
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from torch import Tensor

from fairseq_rpe.checkpoints import checkpoint_file
from fairseq_rpe.checkpoints.checkpoint import check_model_size, check_vocabulary
from fairseq_rpe.core.errors import DEBUG_VARIABLE, UserError, require_fairseq
from fairseq_rpe.core.layer_pattern import is_pattern
from fairseq_rpe.data.folder import read_dictionary
from fairseq_rpe.encodings.from_checkpoint import match_checkpoint_weights
from fairseq_rpe.encodings.model import LayerEncodings
from fairseq_rpe.runs import checkpoints, environment, launch
from fairseq_rpe.runs.child_output import ChildExit
from fairseq_rpe.runs.launch import Node
from fairseq_rpe.runs.model_check import check_backend, check_model, check_replacement, model_encodings
from fairseq_rpe.runs.progress_view import ProgressView, TerminalProgressView
from fairseq_rpe.runs.run_folder import CheckpointFolder, FinishedTraining
from fairseq_rpe.runs.settings import TrainingPlan
from fairseq_rpe.runs.training_config import PROGRESS, TrainingConfig
from fairseq_rpe.utils.files import exclusive_lock, sha256_of_files
from fairseq_rpe.utils.output_checks import check_output_folder


def check_training(config: TrainingConfig, plan: TrainingPlan) -> None:
    """Check everything that would make a training fail after it has started.

    Args:
        config: configuration of the training.
        plan: settings and numbers of updates that the configuration resolves to.

    Raises:
        UserError: fairseq is missing, the model cannot be built, there is no bias to log, or the checkpoint to start
            from, a GPU or an output folder cannot be used.
    """
    require_fairseq()
    encodings = check_model(config, plan)
    if config.log_encodings_every and not any(encoding.adds_bias for encoding in encodings):
        raise UserError(
            f"--log-encodings-every: '{config.rpe}' has no bias: drop the flag, or name an encoding with a bias"
        )
    check_backend(config)
    if config.finetune_from is not None:
        _check_start_checkpoint(config, plan, config.finetune_from, encodings)
    launch.count_gpus(config)  # raises UserError if there are too few
    folder = CheckpointFolder(config.out)
    names = (folder.last.name, folder.record_path.name)
    check_output_folder(config.out, (*names, folder.log.name) if config.log_format == PROGRESS else names, "--out")
    if config.tensorboard is not None:
        check_output_folder(config.tensorboard, flag="--tensorboard")


def _check_start_checkpoint(config: TrainingConfig, plan: TrainingPlan, path: Path, encodings: LayerEncodings) -> None:
    """Check that a training can start from a checkpoint: its size, vocabulary and the parameters of its encodings."""
    checkpoint_file.check_file(path)
    checkpoint = checkpoints.load(path)
    check_model_size(checkpoint)
    if config.data is not None:
        check_vocabulary(checkpoint, read_dictionary(config.data / "dict.txt"), config.data)
    trained: Sequence[Mapping[str, Tensor]] = checkpoint.encoding_weights
    if "rpe" in checkpoint.model and (trained or is_pattern(checkpoint.encoding) or is_pattern(config.rpe)):
        encodings = model_encodings(config, plan, all_layers=True)
        trained = match_checkpoint_weights(checkpoint, encodings.index)
    check_replacement(encodings, config.rpe, checkpoint.encoding, trained, further=True)


def train(config: TrainingConfig, plan: TrainingPlan, node: Node) -> None:
    """Train to the last update and record that the run is finished.

    All nodes must see the folder; the first node alone locks it and writes the record and train.log. Further nodes
    write logs of their own.

    Args:
        config: configuration of the training.
        plan: settings and numbers of updates that the configuration resolves to.
        node: this node.

    Raises:
        UserError: the folder holds another run or is in use, or the training failed.
    """
    folder = CheckpointFolder(config.out)
    if not node.is_first:
        _train_further_node(config, plan, node, folder)
        return
    with exclusive_lock(folder.lock, f"another process is training in {folder.path}: wait for it or stop it") as held:
        done, is_new = _recover_updates(folder, plan), not folder.environment.exists()
        folder.check_intermediate(config.keep_at or (), done, "--keep-at")
        folder.keep_last(config.keep_at or (), done)
        for updates, path in checkpoint_file.intermediate_files(folder.path).items():
            if updates > done:  # of updates that a killed process did after its last checkpoint; they are done again
                path.unlink()
        if done < plan.updates:
            log_size = folder.log.stat().st_size if folder.log.exists() else 0
            with _open_outputs(config, plan, node, folder, done) as (log, view):
                folder.write_record(config, plan)
                folder.add_start(environment.current_start(done, launch.threads_per_process(config), config.device))
                ending = launch.launch_training(config, plan, node, [held], log, view)
            if is_new and ending.code and not ending.began_training:
                # A wrong flag, for example: the folder must not refuse the corrected training as another run.
                _remove_records(folder, log_size if log else None)
            _raise_failure(ending)
        _record_end(config, plan, folder)


def _train_further_node(config: TrainingConfig, plan: TrainingPlan, node: Node, folder: CheckpointFolder) -> None:
    """Train on a node that is not the first, unless the folder has the last update already."""
    done, _ = checkpoints.find_newest(folder)
    if done < plan.updates:
        with _open_outputs(config, plan, node, folder, 0) as (log, view):
            _raise_failure(launch.launch_training(config, plan, node, [], log, view))


def _record_end(config: TrainingConfig, plan: TrainingPlan, folder: CheckpointFolder) -> None:
    """Check that the last checkpoint has the last update, and record that the run is finished."""
    done = checkpoints.load(folder.last).num_updates
    has_log = config.log_format == PROGRESS
    if done != plan.updates:
        where = f"in {folder.log}" if has_log else "above"
        raise UserError(f"fairseq-train stopped at update {done} of {plan.updates}: see its messages {where}")
    best = sha256_of_files(folder.best) if folder.best.exists() else None
    kept_files = checkpoint_file.intermediate_files(folder.path)
    intermediate = {str(updates): sha256_of_files(path) for updates, path in kept_files.items()}
    digest = sha256_of_files(folder.last)
    folder.write_record(config, plan, FinishedTraining(done, checkpoint=digest, best=best, intermediate=intermediate))
    if has_log:
        print(f"{done:,} updates are done: {folder.last}, messages of fairseq-train: {folder.log}")


@contextlib.contextmanager
def _open_outputs(
    config: TrainingConfig, plan: TrainingPlan, node: Node, folder: CheckpointFolder, done: int
) -> Iterator[tuple[IO[bytes] | None, ProgressView | None]]:
    """Open the log for fairseq-train's messages and the view that is shown in their place.

    With FAIRSEQ_RPE_DEBUG set the messages are passed on as well. Only the first node shows progress.

    Yields:
        The log and the view. No log: the messages are shown only. No view: they are passed on to the terminal.
    """
    if config.log_format != PROGRESS:
        yield None, None
        return
    path = folder.log if node.is_first else folder.path / f"train-node{node.rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    # unbuffered, so that tail -f shows each message at once
    with open(path, "ab", buffering=0) as log:
        if log.tell():
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            log.write(f"\n---- resumed {now}, after update {done} ----\n".encode())
        if DEBUG_VARIABLE in os.environ:
            yield log, None
            return
        if not node.is_first:
            print(f"node {node.rank} of {config.nodes} has joined, its messages: {path}", flush=True)
            yield log, ProgressView()
            return
        yield log, TerminalProgressView(config.rpe, folder.path, plan.updates, done)


def _remove_records(folder: CheckpointFolder, log_size: int | None) -> None:
    """Remove the records of a run whose training never began.

    The log is truncated to ``log_size`` bytes, and removed if that is 0; None leaves it as it is.
    """
    folder.record_path.unlink()
    folder.environment.unlink()
    if log_size:
        os.truncate(folder.log, log_size)
    elif log_size is not None:
        folder.log.unlink()


def _raise_failure(ending: ChildExit) -> None:
    """Raise UserError if a training failed."""
    if ending.code:
        raise UserError(ending.reason)


def _recover_updates(folder: CheckpointFolder, plan: TrainingPlan) -> int:
    """Repair and check the folder; return the updates of the checkpoint to resume from."""
    if not folder.record_path.exists():
        if any(folder.path.glob("checkpoint*.pt")):
            raise UserError(f"{folder.path} holds checkpoints but no run.json: choose another --out")
        return 0
    done = checkpoints.recover_last(folder)
    if done > plan.updates:
        raise UserError(
            f"{folder.path} holds {done} updates, more than --updates {plan.updates}: choose another folder"
        )
    return done
