"""What one training run is asked to be, and what that comes to: defaults filled in, numbers fixed."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fairseq_rpe.algorithms import build
from fairseq_rpe.checkpoints.model_sizes import full_name, size_of
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.runs.defaults import Defaults, check_arch, check_warmup, default_warmup, defaults_for
from fairseq_rpe.runs.reserved_flags import ALSO, LATER, check_extra
from fairseq_rpe.utils import records
from fairseq_rpe.utils.files import file_digest

IDENTITY = "identity"
PROGRESS = "progress"  # the log format in which fairseq's words go to a file


# What runs had before LATER's settings could be chosen.
USUAL: dict[str, object] = {
    "min_lr": 0.0,
    "betas": (0.9, 0.98),
    "weight_decay": 0.01,
    "clip_norm": 1.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "share_embeddings": False,
}
STREAM = "stream"  # the blocks of a text that nobody has chosen others for


@dataclass(frozen=True)
class Request:
    """What one run is asked to be: the options of ``fairseq-rpe train``; ``None``: not said, so the default.

    Text or questions in ``data``, or a generated task, ``algorithm``. ``nproc`` processes or GPUs on each of ``nodes``
    machines. ``finetune_from``: a checkpoint whose weights it begins with. ``extra``: further flags for fairseq-train.
    """

    rpe: str
    save_dir: Path
    data: Path | None = None
    algorithm: str | None = None
    positions_train: str | None = None
    positions_eval: str | None = None
    seed: int = 1
    tensorboard: Path | None = None
    log_format: str = PROGRESS
    log_interval: int = 25
    arch: str | None = None
    rpe_share: str | None = None
    attention_backend: str = "auto"
    device: str = "auto"
    nproc: int = 1
    nodes: int = 1
    node_rank: int | None = None
    master: str | None = None
    update_freq: int | None = None
    rpe_module: Path | None = None
    tokens: int | None = None
    blocks: str | None = None
    separate_documents: bool | None = None
    updates: int | None = None
    batch_sentences: int | None = None
    lr: float | None = None
    warmup: int | None = None
    schedule: str | None = None
    min_lr: float | None = None
    betas: tuple[float, ...] | None = None
    weight_decay: float | None = None
    clip_norm: float | None = None
    dropout: float | None = None
    attention_dropout: float | None = None
    activation_dropout: float | None = None
    activation_fn: str | None = None
    share_embeddings: bool | None = None
    compute_dtype: str | None = None
    save_every: int | None = None
    inspect_every: int | None = None
    finetune_from: Path | None = None
    extra: tuple[str, ...] = ()

    @property
    def world(self) -> int:
        """Processes in all."""
        return self.nproc * self.nodes

    @property
    def defaults(self) -> Defaults:
        return defaults_for(self.arch or "tiny", self.algorithm is not None)

    def argv(self) -> list[str]:
        """The words after ``fairseq-rpe train`` that ask for the same."""
        words = [] if self.data is None else [str(self.data)]
        for field in fields(self):
            value = getattr(self, field.name)
            flag = field.name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            elif field.name not in ("data", "extra") and value is not None and (field.name, value) != ("nodes", 1):
                words += [f"--{flag}", ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
        return [*words, *(["--", *self.extra] if self.extra else [])]


@dataclass(frozen=True)
class Settings:
    """What fixes the numbers of a run and may not change between two starts; ``None``: not on record.

    ``data``, ``rpe_module`` and ``finetune_from`` are digests (for a generated task its spec), ``nproc`` counts the
    processes of all nodes. ``last_update`` is there for a ``schedule`` that depends on it. Of the settings from
    ``compute_dtype`` on ``None`` is what runs had before there was a choice, of ``blocks`` a stream.
    """

    rpe: str | None = None
    arch: str | None = None
    data: str | None = None
    tokens: int | None = None
    batch_sentences: int | None = None
    lr: float | None = None
    warmup: int | None = None
    dropout: float | None = None
    update_freq: int | None = None
    nproc: int | None = None
    seed: int | None = None
    rpe_share: str | None = None
    positions_train: str | None = None
    positions_eval: str | None = None
    rpe_module: str | None = None
    extra: tuple[str, ...] | None = None
    compute_dtype: str | None = None
    schedule: str | None = None
    last_update: int | None = None
    min_lr: float | None = None
    betas: tuple[float, ...] | None = None
    weight_decay: float | None = None
    clip_norm: float | None = None
    attention_dropout: float | None = None
    activation_dropout: float | None = None
    activation_fn: str | None = None
    share_embeddings: bool | None = None
    finetune_from: str | None = None
    blocks: str | None = None
    separate_documents: bool | None = None

    def record(self) -> dict[str, object]:
        """As run.json has them: of those from ``compute_dtype`` on only what is set, because older runs lack them."""
        late = ("compute_dtype", "schedule", "last_update", "finetune_from", "blocks", "separate_documents", *LATER)
        found = {k: v for k, v in records.write(self).items() if v is not None or k not in late}
        return {**found, "extra": list(self.extra or ())}

    def usual(self, name: str) -> Any:
        """``blocks`` or a setting of ``LATER`` as it takes effect: without a choice, what runs had before it."""
        value = getattr(self, name)
        if name == "blocks":
            return value or STREAM
        if value is None and name == "activation_fn":
            return size.activation if (size := size_of(self.arch or "")) else None
        return USUAL[name] if value is None else value

    def difference(self, before: "Settings") -> str:
        """In words, the first setting that was another one ``before``; nothing where all are the same."""
        there, here = before.record(), self.record()
        key = next((key for key in {**here, **there} if there.get(key) != here.get(key)), None)
        if key is None:
            return ""
        was, now = (one.usual(key) if key in (*LATER, "blocks") else one.record().get(key) for one in (before, self))
        return f"{key} is {was!r} there, {now!r} here"


@dataclass(frozen=True, kw_only=True)
class Resolved(Settings):
    """The settings of a run that can start: everything that a count or a cost depends on is there."""

    rpe: str
    arch: str
    tokens: int
    batch_sentences: int
    update_freq: int
    nproc: int
    rpe_share: str
    positions_train: str


@dataclass(frozen=True)
class Plan:
    """A resolved run: a run with other ``settings`` is another run."""

    settings: Resolved
    updates: int
    save_every: int


def plan(request: Request, data_digest: str) -> Plan:
    """Fill in the defaults. ``data_digest`` fixes the data; a task's own spec does for a generated one.

    Raises UserError: --tokens with a generated task, no such architecture, further flags that are set here, a warm-up
    that takes all of the updates.
    """

    def chosen(name: str) -> Any:
        given = getattr(request, name)
        return getattr(request.defaults, name) if given is None else given

    arch = request.arch or "tiny"
    check_arch(arch, request.rpe_module)
    check_extra(request.extra, {name for name in (*ALSO, *LATER) if getattr(request, name) is not None})
    _check_blocks(request)
    data, tokens = data_digest, chosen("tokens")
    if request.algorithm:
        if request.tokens is not None:
            raise UserError("--tokens does not go with --algorithm: say how many items, e.g. copy:items=20")
        task = build(request.algorithm)
        data, tokens = task.spec, task.tokens(task.longest("train"))
    schedule, updates = chosen("schedule"), chosen("updates")
    warmup = request.warmup or default_warmup(request.defaults.warmup, updates)
    check_warmup(warmup, updates)
    if schedule == "cosine" or request.min_lr is not None:
        _check_cosine(schedule, chosen("lr"), request.min_lr or 0.0)
    before, first = Settings(arch=full_name(arch)), request.finetune_from
    later: dict[str, Any] = {name: v if (v := getattr(request, name)) != before.usual(name) else None for name in LATER}
    settings = Resolved(
        rpe=request.rpe.strip(),
        arch=full_name(arch),
        data=data,
        tokens=tokens,
        **{name: chosen(name) for name in ("batch_sentences", "lr", "dropout")},
        warmup=warmup,
        update_freq=request.update_freq or 1,
        nproc=request.world,
        seed=request.seed,
        rpe_share=request.rpe_share or "auto",
        positions_train=request.positions_train or IDENTITY,
        positions_eval=request.positions_eval,
        rpe_module=file_digest(request.rpe_module) if request.rpe_module else None,
        extra=request.extra,
        compute_dtype=request.compute_dtype if request.compute_dtype != "fp32" else None,
        # the learning rate depends on the last update, so a run cannot be prolonged
        schedule=schedule if schedule != "inverse_sqrt" else None,
        last_update=updates if schedule != "inverse_sqrt" else None,
        finetune_from=file_digest(first) if first is not None and first.is_file() else None,
        blocks=request.blocks if request.blocks != STREAM else None,
        separate_documents=request.separate_documents or None,
        **later,
    )
    return Plan(settings, updates, chosen("save_every"))


def _check_blocks(request: Request) -> None:
    """Refuse --blocks for what is no text, and flags that decide the blocks or their batches a second time."""
    if request.blocks is None and not request.separate_documents:
        return
    named = f"--blocks {request.blocks}" if request.blocks else "--separate-documents"
    if request.algorithm:
        raise UserError(f"{named} is for text: drop it, the examples of a generated task are whole")
    if request.blocks == "document" and request.separate_documents:
        raise UserError("--separate-documents is for --blocks stream: drop it, a block of --blocks document is of one")
    flags = {word.partition("=")[0] for word in request.extra}
    if "--sample-break-mode" in flags:
        raise UserError(f"--sample-break-mode after -- contradicts {named}: give one of them")
    if request.blocks == "document" and (twice := flags & {"--max-tokens", "--required-batch-size-multiple"}):
        raise UserError(
            f"{min(twice)} after -- is set by --blocks document: give --batch-sentences, which counts full blocks"
        )


def _check_cosine(schedule: str, lr: float, least: float) -> None:
    if schedule != "cosine":
        raise UserError(f"--min-lr is where a cosine ends: give --schedule cosine too, not {schedule}, or drop it")
    if least >= lr:
        raise UserError(f"--min-lr {least:g} is not below --lr {lr:g}: a cosine falls from the one to the other")
