"""One training run from its folder's state to its end; the same request goes on where an earlier one was stopped."""

from collections.abc import Iterable
from pathlib import Path

from fairseq_rpe import encodings, positions
from fairseq_rpe.attention import choose
from fairseq_rpe.core.errors import UserError, need_fairseq
from fairseq_rpe.core.files import check_folder, file_digest, lock
from fairseq_rpe.encodings import Encoding
from fairseq_rpe.runs import checkpoints, environment, launch
from fairseq_rpe.runs.run_folder import CheckpointFolder, Finished
from fairseq_rpe.runs.launch import Node
from fairseq_rpe.runs.messages import Ending
from fairseq_rpe.runs.settings import Plan, Request


def check(request: Request, plan: Plan) -> None:
    """Refuse misspelt specs, pictures of a bias that is not there, places that cannot be written, and no fairseq."""
    need_fairseq()
    folder = CheckpointFolder(request.save_dir)
    transforms = (request.positions_train, request.positions_eval)
    encoding = check_specs(request.rpe, transforms, plan.settings.tokens, request.rpe_module)
    if request.inspect_every and not encoding.adds_bias:
        raise UserError(
            f"--inspect-every: '{request.rpe}' has no bias to show: drop the flag, or name an encoding with a bias"
        )
    choose(request.attention_backend)
    launch.gpus(request)
    check_folder(request.save_dir, (folder.last.name, folder.record_path.name), "--save-dir")
    if request.tensorboard is not None:
        check_folder(request.tensorboard, flag="--tensorboard")


def check_specs(rpe: str, transforms: Iterable[str | None], length: int, module: Path | None) -> Encoding:
    """Refuse a misspelt encoding or position transform now, not after fairseq has started; returns the encoding.

    ``module``: a Python file that registers the user's own.
    """
    if module is not None:
        encodings.load_module(module)
    encoding = encodings.build(rpe, heads=4, width=128, length=length)
    for spec in transforms:
        if spec is not None:
            positions.build(spec, length)
    return encoding


def train(request: Request, plan: Plan, node: Node) -> None:
    """Train to the end and put that on record; the first node alone locks and writes the folder, which all must see.

    Raises UserError: the folder holds another run or is busy, or training failed.
    """
    folder = CheckpointFolder(request.save_dir)
    if not node.first:
        if checkpoints.newest(folder)[0] < plan.updates:
            _check(launch.launch(request, plan, node, []))
        return
    with lock(folder.lock, f"another process is training in {folder.path}: wait for it or stop it") as held:
        done, new = _done_so_far(folder, plan), not folder.record_path.exists()
        if done < plan.updates:
            folder.write(plan)
            folder.add_start(environment.now(done, launch.threads(request), request.device))
            ending = launch.launch(request, plan, node, [held])
            if new and ending.code and not ending.began:
                _forget(folder)
            _check(ending)
        ended = checkpoints.load(folder.last).updates
        if ended != plan.updates:
            raise UserError(f"fairseq-train stopped at update {ended} of {plan.updates}: its messages above say why")
        folder.write(plan, Finished(ended, file_digest(folder.last)))


def _forget(folder: CheckpointFolder) -> None:
    """Take back what was put on record of a run whose training never began."""
    folder.record_path.unlink()
    folder.environment.unlink()


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
