"""One training run from its folder's state to its end; the same request goes on where an earlier one was stopped."""

import contextlib
import datetime
import os
from collections.abc import Iterator
from typing import IO

from fairseq_rpe.checkpoints import checkpoint_file
from fairseq_rpe.checkpoints.checkpoint import check_size, check_vocabulary
from fairseq_rpe.core.errors import DEBUG, UserError, need_fairseq
from fairseq_rpe.data.folder import read_dictionary
from fairseq_rpe.runs import checkpoints, environment, launch
from fairseq_rpe.runs.child_output import Ending
from fairseq_rpe.runs.launch import Node
from fairseq_rpe.runs.model_check import STANDING_LAYERS, check_backend, check_model, check_replacement
from fairseq_rpe.runs.progress_view import Summary, View
from fairseq_rpe.runs.run_folder import CheckpointFolder, Finished
from fairseq_rpe.runs.settings import PROGRESS, Plan, Request
from fairseq_rpe.utils.files import check_folder, file_digest, lock


def check(request: Request, plan: Plan) -> None:
    """Refuse misspelt specs, pictures of no bias, a checkpoint or places that cannot be used, and no fairseq."""
    need_fairseq()
    folder = CheckpointFolder(request.save_dir)
    made = check_model(request, plan)
    if request.inspect_every and not made[0].adds_bias:
        raise UserError(
            f"--inspect-every: '{request.rpe}' has no bias to show: drop the flag, or name an encoding with a bias"
        )
    check_backend(request)
    if request.finetune_from is not None:
        checkpoint_file.check(request.finetune_from)
        first = checkpoints.load(request.finetune_from)
        check_size(first)
        if request.data is not None:
            check_vocabulary(first, read_dictionary(request.data / "dict.txt"), request.data)
        trained = first.encodings[:STANDING_LAYERS]
        check_replacement(made, request.rpe, first.encoding, trained, further=True)
    launch.gpus(request)
    names = (folder.last.name, folder.record_path.name)
    check_folder(request.save_dir, (*names, folder.log.name) if request.log_format == PROGRESS else names, "--save-dir")
    if request.tensorboard is not None:
        check_folder(request.tensorboard, flag="--tensorboard")


def train(request: Request, plan: Plan, node: Node) -> None:
    """Train to the end and put that on record; the first node alone locks and writes the folder, which all must see.

    What fairseq-train says is in the folder's train.log, of further nodes in a log of their own.

    Raises UserError: the folder holds another run or is busy, or training failed.
    """
    folder = CheckpointFolder(request.save_dir)
    if not node.first:
        if checkpoints.newest(folder)[0] < plan.updates:
            with _told(request, plan, node, folder, 0) as (log, view):
                _check(launch.launch(request, plan, node, [], log, view))
        return
    with lock(folder.lock, f"another process is training in {folder.path}: wait for it or stop it") as held:
        done, new = _done_so_far(folder, plan), not folder.record_path.exists()
        if done < plan.updates:
            said = folder.log.stat().st_size if folder.log.exists() else 0
            with _told(request, plan, node, folder, done) as (log, view):
                folder.write(plan)
                folder.add_start(environment.now(done, launch.threads(request), request.device))
                ending = launch.launch(request, plan, node, [held], log, view)
            if new and ending.code and not ending.began:
                _forget(folder, said if log else None)
            _check(ending)
        ended = checkpoints.load(folder.last).updates
        quiet = request.log_format == PROGRESS
        if ended != plan.updates:
            where = f"in {folder.log}" if quiet else "above"
            raise UserError(f"fairseq-train stopped at update {ended} of {plan.updates}: its messages {where} say why")
        best = file_digest(folder.best) if folder.best.exists() else None
        folder.write(plan, Finished(ended, file_digest(folder.last), best))
        if quiet:
            print(f"{ended:,} updates are done: {folder.last}, fairseq-train's own messages: {folder.log}")


@contextlib.contextmanager
def _told(
    request: Request, plan: Plan, node: Node, folder: CheckpointFolder, done: int
) -> Iterator[tuple[IO[bytes] | None, View | None]]:
    """The file that takes fairseq-train's messages and what is shown in their place, where that is wanted.

    With FAIRSEQ_RPE_DEBUG set they are passed on as well. Of several nodes only the first one's say how far it is.
    """
    if request.log_format != PROGRESS:
        yield None, None
        return
    path = folder.log if node.first else folder.path / f"train-node{node.rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    # unbuffered: whoever follows the file sees what there is
    with open(path, "ab", buffering=0) as log:
        if log.tell():
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            log.write(f"\n---- resumed {now}, after update {done} ----\n".encode())
        if DEBUG in os.environ:
            yield log, None
            return
        if not node.first:
            print(f"node {node.rank} of {request.nodes} has joined, its messages: {path}", flush=True)
            yield log, View()
            return
        yield log, Summary(request.rpe, folder.path, plan.updates, done)


def _forget(folder: CheckpointFolder, said: int | None) -> None:
    """Take back what was put on record of a run whose training never began; ``said``: bytes that its log had before."""
    folder.record_path.unlink()
    folder.environment.unlink()
    if said:
        os.truncate(folder.log, said)
    elif said is not None:
        folder.log.unlink()


def _check(ending: Ending) -> None:
    if ending.code:
        raise UserError(ending.why)


def _done_so_far(folder: CheckpointFolder, plan: Plan) -> int:
    """Updates behind the checkpoint to go on from, after repairing and checking the folder."""
    if not folder.record_path.exists():
        if any(folder.path.glob("checkpoint*.pt")):
            raise UserError(f"{folder.path} holds checkpoints but no run.json: choose another --save-dir")
        return 0
    done = checkpoints.recover_last(folder)
    if done > plan.updates:
        raise UserError(
            f"{folder.path} holds {done} updates, more than --updates {plan.updates}: choose another folder"
        )
    return done
