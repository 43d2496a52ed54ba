"""The request for one training run, and the plan that it resolves to once defaults are filled in."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fairseq_rpe.algorithms import build
from fairseq_rpe.checkpoints.model_sizes import find_size, full_arch_name
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.runs.defaults import Defaults, check_arch, check_warmup, default_warmup, defaults_for
from fairseq_rpe.runs.reserved_flags import ALTERNATIVE_FLAGS, SETTING_FLAGS, check_extra
from fairseq_rpe.utils import records
from fairseq_rpe.utils.files import sha256_of_files

IDENTITY = "identity"
PROGRESS = "progress"  # the log format that shows a progress line and sends fairseq's messages to a file


# Values of SETTING_FLAGS in runs that were recorded before these settings had options.
EARLIER_DEFAULTS: dict[str, object] = {
    "min_lr": 0.0,
    "betas": (0.9, 0.98),
    "weight_decay": 0.01,
    "clip_norm": 1.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "share_embeddings": False,
}
STREAM_BLOCKS = "stream"  # the default of --blocks


@dataclass(frozen=True)
class TrainingRequest:
    """Options of ``fairseq-rpe train``, in the words of the command line; ``None`` selects the default.

    Attributes:
        rpe: spec of the encoding.
        out: folder of the checkpoints.
        data: folder of a binarised text or of questions; ``None`` with ``algorithm``.
        algorithm: spec of a generated task; ``None`` with ``data``.
        positions_train, positions_eval: specs of the position transforms.
        seed: seed of the weights, the order of the data, dropout and random positions.
        tensorboard: folder for TensorBoard's files.
        log_format: ``progress``, or the log format of fairseq-train.
        log_interval: updates between lines of the log.
        arch: architecture, such as ``tiny``.
        rpe_share: how layers share the encoding: ``model``, ``layer`` or ``auto``.
        attention_backend: attention back end.
        device: ``auto``, ``cpu`` or ``cuda``.
        nproc: processes or GPUs on each node.
        nodes: number of nodes.
        node_rank: index of this node.
        master: HOST:PORT at which the nodes meet.
        update_freq: batches that are accumulated for one update.
        rpe_module: Python file that registers further encodings.
        tokens: training length in tokens.
        blocks: ``stream`` or ``document``.
        separate_documents: whether documents in one block of a stream are separate.
        updates: updates of the whole training.
        batch_sentences: sequences of one process and batch.
        lr: peak learning rate.
        warmup: updates of warm-up.
        schedule: learning-rate schedule: ``inverse_sqrt``, ``linear`` or ``cosine``.
        min_lr: last learning rate of ``cosine``.
        betas, weight_decay: options of Adam.
        clip_norm: largest norm of the gradient; 0 does not clip.
        dropout, attention_dropout, activation_dropout: probabilities of dropout.
        activation_fn: activation of the feed-forward layers.
        share_embeddings: whether input and output embeddings are one matrix.
        compute_dtype: dtype of matrix products: ``fp32`` or ``bf16``.
        save_every: updates between checkpoints.
        log_encodings_every: updates between pictures of the encodings for TensorBoard.
        finetune_from: checkpoint whose weights the training starts from.
        extra: further flags for fairseq-train.
    """

    rpe: str
    out: Path
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
    log_encodings_every: int | None = None
    finetune_from: Path | None = None
    extra: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of processes on all nodes."""
        return self.nproc * self.nodes

    @property
    def defaults(self) -> Defaults:
        """Training defaults of the architecture."""
        return defaults_for(self.arch or "tiny", self.algorithm is not None)

    def argv(self) -> list[str]:
        """Return the arguments of ``fairseq-rpe train`` that make the same request."""
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
class RunSettings:
    """Settings that determine the numbers of a run and may not change between two starts; ``None``: not recorded.

    From ``compute_dtype`` on, ``None`` is the value of runs that were recorded before the setting had an option. A
    setting without a line below has the meaning of the field of :class:`TrainingRequest`.

    Attributes:
        data: digest of the data folder, or the spec of a generated task.
        nproc: number of processes on all nodes.
        rpe_module, finetune_from: digests of the files.
        last_update: last update of the training, for a ``schedule`` that depends on it.
        blocks: ``None`` for a stream.
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

    def to_dict(self) -> dict[str, object]:
        """Return the settings as in run.json, without those from ``compute_dtype`` on that are ``None``."""
        optional = (
            "compute_dtype",
            "schedule",
            "last_update",
            "finetune_from",
            "blocks",
            "separate_documents",
            *SETTING_FLAGS,
        )
        settings = {k: v for k, v in records.to_dict(self).items() if v is not None or k not in optional}
        return {**settings, "extra": list(self.extra or ())}

    def effective(self, name: str) -> Any:
        """Return the value that a setting takes effect with.

        Args:
            name: ``blocks`` or a key of :data:`~fairseq_rpe.runs.reserved_flags.SETTING_FLAGS`.

        Returns:
            The setting, or its default where it is ``None``.
        """
        value = getattr(self, name)
        if name == "blocks":
            return value or STREAM_BLOCKS
        if value is None and name == "activation_fn":
            return size.activation if (size := find_size(self.arch or "")) else None
        return EARLIER_DEFAULTS[name] if value is None else value

    def difference(self, before: "RunSettings") -> str:
        """Describe the first setting that differs from those of an earlier run.

        Args:
            before: settings of the earlier run.

        Returns:
            The setting with both values, or an empty text if all settings are equal.
        """
        old, new = before.to_dict(), self.to_dict()
        key = next((key for key in {**new, **old} if old.get(key) != new.get(key)), None)
        if key is None:
            return ""
        if key in (*SETTING_FLAGS, "blocks"):
            return f"{key} is {before.effective(key)!r} there, {self.effective(key)!r} here"
        return f"{key} is {old.get(key)!r} there, {new.get(key)!r} here"


@dataclass(frozen=True, kw_only=True)
class ResolvedSettings(RunSettings):
    """Settings of a run that can start: sizes, batch and positions are not ``None``."""

    rpe: str
    arch: str
    tokens: int
    batch_sentences: int
    update_freq: int
    nproc: int
    rpe_share: str
    positions_train: str


@dataclass(frozen=True)
class TrainingPlan:
    """A resolved request.

    Attributes:
        settings: identity of the run; a run with other settings is another run.
        updates: updates of the whole training.
        save_every: updates between checkpoints.
    """

    settings: ResolvedSettings
    updates: int
    save_every: int


def make_plan(request: TrainingRequest, data_digest: str) -> TrainingPlan:
    """Resolve a request: fill in the defaults.

    Args:
        request: options of the training.
        data_digest: digest of the data folder; ignored for a generated task.

    Returns:
        The plan of the training.

    Raises:
        UserError: ``tokens`` is given with a generated task, the architecture is unknown, ``extra`` repeats an option,
            or the warm-up takes all updates.
    """

    def value_or_default(name: str) -> Any:
        value = getattr(request, name)
        return getattr(request.defaults, name) if value is None else value

    arch = request.arch or "tiny"
    check_arch(arch, request.rpe_module)
    stated = {name for name in (*ALTERNATIVE_FLAGS, *SETTING_FLAGS) if getattr(request, name) is not None}
    check_extra(request.extra, stated)
    _check_blocks(request)
    if request.algorithm:
        data, tokens = _resolve_algorithm(request.algorithm, request.tokens)
    else:
        data, tokens = data_digest, value_or_default("tokens")
    schedule, updates = value_or_default("schedule"), value_or_default("updates")
    warmup = request.warmup or default_warmup(request.defaults.warmup, updates)
    check_warmup(warmup, updates)
    if schedule == "cosine" or request.min_lr is not None:
        _check_cosine(schedule, value_or_default("lr"), request.min_lr or 0.0)
    finetune_from = request.finetune_from
    settings = ResolvedSettings(
        rpe=request.rpe.strip(),
        arch=full_arch_name(arch),
        data=data,
        tokens=tokens,
        **{name: value_or_default(name) for name in ("batch_sentences", "lr", "dropout")},
        warmup=warmup,
        update_freq=request.update_freq or 1,
        nproc=request.world_size,
        seed=request.seed,
        rpe_share=request.rpe_share or "auto",
        positions_train=request.positions_train or IDENTITY,
        positions_eval=request.positions_eval,
        rpe_module=sha256_of_files(request.rpe_module) if request.rpe_module else None,
        extra=request.extra,
        # From here on a default is recorded as None, as in runs that were recorded before the setting had an option.
        compute_dtype=request.compute_dtype if request.compute_dtype != "fp32" else None,
        # the learning rate depends on the last update, so the number of updates cannot be raised later
        schedule=schedule if schedule != "inverse_sqrt" else None,
        last_update=updates if schedule != "inverse_sqrt" else None,
        finetune_from=sha256_of_files(finetune_from) if finetune_from and finetune_from.is_file() else None,
        blocks=request.blocks if request.blocks != STREAM_BLOCKS else None,
        separate_documents=request.separate_documents or None,
        **_changed_settings(request, full_arch_name(arch)),
    )
    return TrainingPlan(settings, updates, value_or_default("save_every"))


def _resolve_algorithm(spec: str, tokens: int | None) -> tuple[str, int]:
    """Return the canonical spec of a generated task and its training length, which --tokens must not set."""
    if tokens is not None:
        raise UserError("--tokens does not go with --algorithm: say how many items, e.g. copy:items=20")
    task = build(spec)
    return task.spec, task.num_tokens(task.max_length("train"))


def _changed_settings(request: TrainingRequest, arch: str) -> Mapping[str, Any]:
    """Return the settings of :data:`SETTING_FLAGS`, None for those that equal their default."""
    defaults = RunSettings(arch=arch)
    values = {name: getattr(request, name) for name in SETTING_FLAGS}
    return {name: value if value != defaults.effective(name) else None for name, value in values.items()}


def _check_blocks(request: TrainingRequest) -> None:
    """Refuse --blocks without a text, and flags of fairseq-train that contradict it."""
    if request.blocks is None and not request.separate_documents:
        return
    option = f"--blocks {request.blocks}" if request.blocks else "--separate-documents"
    if request.algorithm:
        raise UserError(f"{option} is for text: drop it, the examples of a generated task are whole")
    if request.blocks == "document" and request.separate_documents:
        raise UserError(
            "--separate-documents is for --blocks stream: drop it, a block of --blocks document holds one document"
        )
    flags = {word.partition("=")[0] for word in request.extra}
    if "--sample-break-mode" in flags:
        raise UserError(f"--sample-break-mode after -- contradicts {option}: give one of them")
    if request.blocks == "document" and (repeated := flags & {"--max-tokens", "--required-batch-size-multiple"}):
        raise UserError(
            f"{min(repeated)} after -- is set by --blocks document: give --batch-sentences, which counts full blocks"
        )


def _check_cosine(schedule: str, lr: float, min_lr: float) -> None:
    """Refuse --min-lr for another schedule, and one that is not below the peak learning rate."""
    if schedule != "cosine":
        raise UserError(f"--min-lr is for --schedule cosine: give that instead of {schedule}, or drop --min-lr")
    if min_lr >= lr:
        raise UserError(
            f"--min-lr {min_lr:g} is not below --lr {lr:g}: lower it, the cosine decays from --lr to --min-lr"
        )
