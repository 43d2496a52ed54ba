"""The identity of a run: the settings that its configuration resolves to, and that no later start may change."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fairseq_rpe.algorithms import build
from fairseq_rpe.checkpoints.model_sizes import find_size, full_arch_name
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.decoder.config import BLOCK_PRESETS, DecoderConfig
from fairseq_rpe.runs.defaults import (
    check_arch,
    check_keep_at,
    check_warmup,
    default_save_every,
    default_warmup,
    defaults_for,
)
from fairseq_rpe.runs.reserved_flags import check_extra
from fairseq_rpe.runs.training_config import (
    BY_BLOCK,
    IDENTITY,
    OVERRIDABLE,
    SETTINGS,
    Sharing,
    TrainingConfig,
    TrainingSettings,
)
from fairseq_rpe.utils.files import sha256_of_files

# settings in run.json; "last_update" is no option of a training
_IDENTITY_KEYS = [*(name for name, s in SETTINGS.items() if s.is_identity), "last_update"]
# settings that run.json lacks where they are None
_OPTIONAL_KEYS = {"last_update", "finetune_from", *(name for name, s in SETTINGS.items() if s.is_recorded_if_changed)}
# settings whose defaults are those of --block
_BY_BLOCK = {name for name, s in SETTINGS.items() if s.default == BY_BLOCK}


@dataclass(frozen=True)
class RunSettings(TrainingSettings):
    """Settings that determine the numbers of a run and may not change between two starts; None: not recorded.

    None is the default of a setting that is recorded only if it was changed
    (:attr:`~fairseq_rpe.runs.training_config.Setting.is_recorded_if_changed`). A setting without a line below has the
    meaning of the field of :class:`~fairseq_rpe.runs.training_config.TrainingConfig`.

    Attributes:
        data: digest of the data folder, or the spec of a generated task.
        nproc: number of processes on all nodes.
        rpe_module, finetune_from: digests of the files.
        last_update: last update of the training, for a ``schedule`` that depends on it.
    """

    rpe: str | None = None
    data: str | None = None
    nproc: int | None = None
    seed: int | None = None
    positions_train: str | None = None
    positions_eval: str | None = None
    rpe_module: str | None = None
    finetune_from: str | None = None
    last_update: int | None = None
    extra: tuple[str, ...] | None = None

    def to_dict(self) -> dict[str, object]:
        """Return the settings as in run.json, without optional ones that are None."""
        values = {key: getattr(self, key) for key in _IDENTITY_KEYS}
        settings = {key: value for key, value in values.items() if value is not None or key not in _OPTIONAL_KEYS}
        return {**settings, "extra": list(self.extra or ())}

    def effective(self, name: str) -> Any:
        """Return the value that a setting takes effect with.

        Args:
            name: field of :class:`~fairseq_rpe.runs.training_config.TrainingSettings`.

        Returns:
            The setting, or its default where it is None.
        """
        value = getattr(self, name)
        return self.default(name) if value is None else value

    def default(self, name: str) -> Any:
        """Return the value that a setting takes effect with where it is None, given the architecture and the blocks."""
        preset = BLOCK_PRESETS[self.block or "classic"]
        if name in _BY_BLOCK:
            option = name.removeprefix("block_")
            return preset.get(option, getattr(DecoderConfig, option))
        if name == "activation_fn" and "activation" in preset:
            return preset["activation"]
        if name == "activation_fn":
            return size.activation if (size := find_size(self.arch or "")) else None
        return SETTINGS[name].default

    def first_difference(self, before: "RunSettings") -> str | None:
        """Return the name of the first setting that differs from those of an earlier run, None if all are equal."""
        old, new = before.to_dict(), self.to_dict()
        return next((key for key in {**new, **old} if old.get(key) != new.get(key)), None)

    def difference(self, before: "RunSettings") -> str:
        """Describe the first setting that differs from those of an earlier run.

        Args:
            before: settings of the earlier run.

        Returns:
            The setting with both values, or an empty text if all settings are equal.
        """
        key = self.first_difference(before)
        if key is None:
            return ""
        old, new = before.to_dict(), self.to_dict()
        if key in SETTINGS and SETTINGS[key].is_recorded_if_changed:
            return f"{key} is {before.effective(key)!r} there, {self.effective(key)!r} here"
        return f"{key} is {old.get(key)!r} there, {new.get(key)!r} here"


@dataclass(frozen=True, kw_only=True)
class ResolvedSettings(RunSettings):
    """Settings of a run that can start: sizes, batch and positions are not None."""

    rpe: str
    arch: str
    tokens: int
    batch_sentences: int
    update_freq: int
    nproc: int
    rpe_share: Sharing
    positions_train: str


@dataclass(frozen=True)
class TrainingPlan:
    """A resolved configuration.

    Attributes:
        settings: identity of the run; a run with other settings is another run.
        updates: number of updates of the whole training.
        save_every: number of updates between checkpoints.
    """

    settings: ResolvedSettings
    updates: int
    save_every: int


def make_plan(config: TrainingConfig, data_digest: str) -> TrainingPlan:
    """Resolve a configuration: fill in the defaults.

    Args:
        config: configuration of the training.
        data_digest: digest of the data folder; ignored for a generated task.

    Returns:
        The plan of the training.

    Raises:
        UserError: ``tokens`` is given with a generated task, the architecture is unknown, ``extra`` repeats an option,
            the warm-up takes all updates, or ``keep_at`` is beyond them.
    """
    arch = config.arch or "tiny"
    check_arch(arch, config.rpe_module)
    check_extra(config.extra, {name for name in OVERRIDABLE if getattr(config, name) is not None})
    _check_blocks(config)
    defaults = defaults_for(arch, config.algorithm is not None)
    filled = {**defaults.stated(), **config.stated()}
    if config.algorithm:
        data, filled["tokens"] = _resolve_algorithm(config.algorithm, config.tokens)
    else:
        data = data_digest
    updates = filled["updates"]
    filled["warmup"] = config.warmup or default_warmup(defaults.warmup, updates)
    check_warmup(filled["warmup"], updates)
    check_keep_at(config.keep_at or (), updates, "--keep-at")
    if filled["schedule"] == "cosine" or config.min_lr is not None:
        _check_cosine(filled["schedule"], filled["lr"], config.min_lr or 0.0)
    module, start = config.rpe_module, config.finetune_from
    filled |= {
        "rpe": config.rpe.strip(),
        "arch": full_arch_name(arch),
        "data": data,
        "update_freq": config.update_freq or 1,
        "nproc": config.world_size,
        "rpe_share": config.rpe_share or "auto",
        "positions_train": config.positions_train or IDENTITY,
        "rpe_module": sha256_of_files(module) if module else None,
        "finetune_from": sha256_of_files(start) if start and start.is_file() else None,
    }
    # the learning rate depends on the last update, so the number of updates cannot be raised later
    filled["last_update"] = updates if filled["schedule"] != "inverse_sqrt" else None
    save_every = config.save_every or default_save_every(defaults.save_every, updates)
    return TrainingPlan(_without_defaults(filled), updates, save_every)


def _without_defaults(values: Mapping[str, Any]) -> ResolvedSettings:
    """Return settings with None for each value that equals a default which run.json does not record."""
    defaults = RunSettings(arch=values["arch"], block=values.get("block"))
    settings: dict[str, Any] = {name: values.get(name) for name in _IDENTITY_KEYS}
    for name, value in settings.items():
        if name in SETTINGS and SETTINGS[name].is_recorded_if_changed and value == defaults.default(name):
            settings[name] = None
    return ResolvedSettings(**settings)


def _resolve_algorithm(spec: str, tokens: int | None) -> tuple[str, int]:
    """Return the canonical spec of a generated task and its training length, which --tokens must not set."""
    if tokens is not None:
        raise UserError("--tokens does not go with --algorithm: say how many items, e.g. copy:items=20")
    task = build(spec)
    return task.spec, task.num_tokens(task.max_length("train"))


def _check_blocks(config: TrainingConfig) -> None:
    """Refuse --blocks without a text, and flags of fairseq-train that contradict it."""
    if config.blocks is None and not config.separate_documents:
        return
    option = f"--blocks {config.blocks}" if config.blocks else "--separate-documents"
    if config.algorithm:
        raise UserError(f"{option} is for text: drop it, the examples of a generated task are whole")
    if config.blocks == "document" and config.separate_documents:
        raise UserError(
            "--separate-documents is for --blocks stream: drop it, a block of --blocks document holds one document"
        )
    flags = {word.partition("=")[0] for word in config.extra}
    if "--sample-break-mode" in flags:
        raise UserError(f"--sample-break-mode after -- contradicts {option}: give one of them")
    if config.blocks == "document" and (repeated := flags & {"--max-tokens", "--required-batch-size-multiple"}):
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
