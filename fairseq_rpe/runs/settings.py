"""What one training run is asked to be, and what that comes to: defaults filled in, numbers fixed."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from fairseq_rpe.algorithms import build
from fairseq_rpe.core import records
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.files import file_digest
from fairseq_rpe.core.spec import nearest

ARCH_PREFIX = "transformer_rpe_lm_"
IDENTITY = "identity"
PROGRESS = "progress"  # the log format in which fairseq's words go to a file


@dataclass(frozen=True)
class Defaults:
    """Training defaults of an architecture.

    ``batch_sentences`` is per process and per accumulation step; ``threads`` is per process,
    ``None`` for an equal share of the cores, and gives way to OMP_NUM_THREADS. ``schedule`` is ``inverse_sqrt``, or
    ``linear`` down to zero at the last update.
    """

    tokens: int
    updates: int
    batch_sentences: int
    lr: float
    warmup: int
    dropout: float
    save_every: int
    threads: int | None
    schedule: str = "inverse_sqrt"


# Minutes on a laptop: enough to see which encodings break beyond the training length. One thread,
# because sums over several depend on their number: so the same command gives the same bits anywhere.
_TINY = Defaults(tokens=64, updates=400, batch_sentences=16, lr=2e-3, warmup=80, dropout=0.0, save_every=200, threads=1)
# The common published setting: 128 sequences of 512 tokens, 50k updates, 4k of them warm-up.
_PAPER = Defaults(
    tokens=512, updates=50000, batch_sentences=128, lr=5e-4, warmup=4000, dropout=0.1, save_every=1000, threads=None
)
_SIZES = ("tiny", "wiki103", "base", "large")
# Generated tasks know their training length themselves. A thousand updates learn to copy 20 items, two thousand more
# sharpen it; the published setting is that of the index-warping paper.
_TINY_TASK = replace(
    _TINY, tokens=0, batch_sentences=64, schedule="linear", updates=3000, lr=1e-3, warmup=200, save_every=500
)
_PAPER_TASK = replace(
    _PAPER, tokens=0, batch_sentences=64, schedule="linear", updates=40000, lr=3e-5, warmup=2400
)


def full_name(arch: str) -> str:
    """``tiny`` stands for ``transformer_rpe_lm_tiny``; a full name stays as it is."""
    return ARCH_PREFIX + arch if arch in _SIZES else arch


def check_arch(arch: str, module: Path | None) -> None:
    """Refuse an architecture that is neither ours nor of a ``module``: fairseq would take seconds to say so."""
    own = module is not None and arch.startswith(ARCH_PREFIX)
    if full_name(arch) not in (known := [ARCH_PREFIX + size for size in _SIZES]) and not own:
        shorts = ", ".join(_SIZES)
        raise UserError(f"--arch {arch} is not one of {shorts} (or {known[0]} and so on){nearest(arch, _SIZES)}")


# flags of fairseq-train that are decided by options of ours, which put them on record
OURS = {
    "--save-dir": "--save-dir",
    "--user-dir": "",
    "--arch": "--arch",
    "-a": "--arch",
    "--task": "DATA or --algorithm",
    "--algorithm": "--algorithm",
    "--tokens-per-sample": "--tokens",
    "--max-update": "--updates",
    "--batch-size": "--batch-sentences",
    "--max-sentences": "--batch-sentences",
    "--update-freq": "--update-freq",
    "--lr": "--lr",
    "--learning-rate": "--lr",
    "--warmup-updates": "--warmup",
    "--dropout": "--dropout",
    "--seed": "--seed",
    "--rpe": "--rpe",
    "--rpe-share": "--rpe-share",
    "--rpe-module": "--rpe-module",
    "--positions-train": "--positions-train",
    "--positions-eval": "--positions-eval",
    "--compute-dtype": "--compute-dtype",
    "--attention-backend": "--attention-backend",
    "--rpe-inspect-every": "--inspect-every",
    "--tensorboard-logdir": "--tensorboard",
    "--log-format": "--log-format",
    "--log-interval": "--log-interval",
    "--cpu": "--device cpu",
    "--distributed-world-size": "--nproc and --nodes",
}


def check_extra(extra: Sequence[str]) -> None:
    """Refuse flags for fairseq-train that are set here already."""
    for word in extra:
        flag = word.partition("=")[0]
        if flag in OURS:
            how = f"give {OURS[flag]} before the -- instead" if OURS[flag] else "leave it out"
            raise UserError(f"{flag} after -- is set by this command itself: {how}")


def defaults_for(arch: str, algorithm: bool) -> Defaults:
    """The defaults of an architecture, for text or for an algorithmic task; one of your own gets the published ones."""
    tiny = full_name(arch) == ARCH_PREFIX + "tiny"
    return (_TINY_TASK if tiny else _PAPER_TASK) if algorithm else (_TINY if tiny else _PAPER)


@dataclass(frozen=True)
class Request:
    """What one run is asked to be: the options of ``fairseq-rpe train``; ``None``: not said, so the default.

    Text in ``data``, or a generated task, ``algorithm``. ``nproc`` processes or GPUs on each of ``nodes`` machines.
    ``extra``: further flags for fairseq-train.
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
    updates: int | None = None
    batch_sentences: int | None = None
    lr: float | None = None
    warmup: int | None = None
    schedule: str | None = None
    dropout: float | None = None
    compute_dtype: str = "fp32"
    save_every: int | None = None
    inspect_every: int | None = None
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
            if field.name not in ("data", "extra") and value is not None and (field.name, value) != ("nodes", 1):
                words += ["--" + field.name.replace("_", "-"), str(value)]
        return [*words, *(["--", *self.extra] if self.extra else [])]


@dataclass(frozen=True)
class Settings:
    """What fixes the numbers of a run and may not change between two starts; ``None``: not on record.

    ``data`` and ``rpe_module`` are digests (for a generated task its spec), ``nproc`` counts the processes of all
    nodes. ``last_update`` is there for a ``schedule`` that depends on it.
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

    def record(self) -> dict[str, object]:
        """As run.json has them: of the last three only those that are set, because older runs lack them."""
        late = ("compute_dtype", "schedule", "last_update")
        found = {k: v for k, v in records.write(self).items() if v is not None or k not in late}
        return {**found, "extra": list(self.extra or ())}

    def difference(self, before: "Settings") -> str:
        """In words, the first setting that was another one ``before``; nothing where all are the same."""
        there, here = before.record(), self.record()
        found = (key for key in {**here, **there} if there.get(key) != here.get(key))
        return next((f"{key} is {there.get(key)!r} there, {here.get(key)!r} here" for key in found), "")


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

    Raises UserError: --tokens with a generated task, no such architecture, further flags that are set here.
    """

    def chosen(name: str) -> Any:
        given = getattr(request, name)
        return getattr(request.defaults, name) if given is None else given

    check_arch(request.arch or "tiny", request.rpe_module)
    check_extra(request.extra)
    data, tokens = data_digest, chosen("tokens")
    if request.algorithm:
        if request.tokens is not None:
            raise UserError("--tokens does not go with --algorithm: say how many items, e.g. copy:items=20")
        task = build(request.algorithm)
        data, tokens = task.spec, task.tokens(task.longest("train"))
    linear = chosen("schedule") == "linear"
    settings = Resolved(
        rpe=request.rpe.strip(),
        arch=full_name(request.arch or "tiny"),
        data=data,
        tokens=tokens,
        **{name: chosen(name) for name in ("batch_sentences", "lr", "warmup", "dropout")},
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
        schedule="linear" if linear else None,
        last_update=chosen("updates") if linear else None,
    )
    return Plan(settings, chosen("updates"), chosen("save_every"))
