"""The record of a training: every setting is one field, which states its option, its flag of fairseq-train and its use.

The command line, recipe keys, flags of fairseq-train, ``run.json``, the report and the tables of the documentation are
derived from these fields.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from fairseq_rpe.utils import records
from fairseq_rpe.utils.records import Betas, Count, Counts, Fraction, NonEmptyText, NonNegative, Rule

IDENTITY = "identity"  # the position transform that changes nothing
PROGRESS = "progress"  # the log format that shows a progress line and sends fairseq's messages to a file
BY_ARCHITECTURE = "that of the architecture"  # a default that differs between architectures; never a value
BY_BLOCK = "that of --block"  # a default that differs between blocks; never a value
STREAM_BLOCKS = "stream"  # the default of --blocks

Sharing = Literal["auto", "model", "layer"]
Schedule = Literal["inverse_sqrt", "linear", "cosine"]
Rate = Annotated[float, Rule(lambda v: 0 < v <= 100, "a number above 0 and at most 100, with a decimal point")]
Decay = Annotated[float, Rule(lambda v: 0 <= v <= 100, "a number from 0 to 100 with a decimal point")]
# more processes than 1024 would stop the machine
Processes = Annotated[int, Rule(lambda v: 1 <= v <= 1024, "a whole number from 1 to 1024")]
# NumPy's generators take no larger seed
Seed = Annotated[int, Rule(lambda v: 1 <= v < 2**32, "a whole number from 1 to 4294967295")]
Rank = Annotated[int, Rule(lambda v: 0 <= v <= 10**9, "a whole number from 0 to 1000000000")]


@dataclass(frozen=True)
class Setting:
    """What a field of :class:`TrainingConfig` means outside of Python.

    A run that stays reproducible and resumable depends on four attributes: ``is_identity`` and ``default`` decide what
    ``run.json`` records and so which folders a command can resume; ``is_passed`` and ``passes_default`` decide which
    flags fairseq-train receives.

    Attributes:
        help: help text of the option, without the default.
        metavar: name of the value in the help text.
        flags: flags of fairseq-train with the same meaning. The first one passes the value.
        is_reserved: True: each of ``flags`` is refused among the words after ``--``. False: they are allowed there, but
            not together with the option.
        is_passed: whether the first flag passes the value of the field; otherwise
            :mod:`fairseq_rpe.runs.launch` has a rule for the setting.
        passes_default: whether the flag is passed as well if the option is not given and ``default`` takes effect.
        is_identity: whether ``run.json`` records the value among ``settings``, so that a resumed run may not change it.
        default: value that takes effect without the option, if that is the same for all architectures and data; None
            otherwise. ``run.json`` records this value as None, so that runs recorded before the setting had an option
            compare as equal. This is not the value of the field, which is None if the option is not given.
        default_words: the default in the help text, in place of ``default`` or of a table of architectures.
        in_sweep: whether ``sweep`` has the option, too.
        in_extension: whether ``extend`` has the option, too, if the field has no ``model_key``; None: as ``in_sweep``.
        model_key: setting of a checkpoint's model that a further training takes over.
        title: name of the setting where the report compares it with the published value; empty: it is not compared.
    """

    help: str
    metavar: str | None = None
    flags: tuple[str, ...] = ()
    is_reserved: bool = True
    is_passed: bool = True
    passes_default: bool = True
    is_identity: bool = True
    default: object = None
    default_words: str = ""
    in_sweep: bool = True
    in_extension: bool | None = None
    model_key: str | None = None
    title: str = ""

    @property
    def is_extension_option(self) -> bool:
        """Whether ``extend`` has the option: the setting is not taken over from the checkpoint."""
        in_extension = self.in_sweep if self.in_extension is None else self.in_extension
        return in_extension and self.model_key is None

    @property
    def is_recorded_if_changed(self) -> bool:
        """Whether ``run.json`` has the value only if it differs from the default."""
        return self.is_identity and self.default is not None


def setting(help: str, metavar: str | None = None, *flags: str, value: Any = None, **properties: Any) -> Any:
    """Declare a field of a dataclass with a :class:`Setting`.

    Args:
        help: help text of the option.
        metavar: name of the value in the help text.
        flags: flags of fairseq-train with the same meaning.
        value: value of the field if the option is not given; :data:`dataclasses.MISSING` for a required one.
        properties: further attributes of the setting.

    Returns:
        The field.
    """
    metadata = {"setting": Setting(help, metavar, flags, **properties)}
    return field(metadata=metadata) if value is MISSING else field(default=value, metadata=metadata)


def _block_setting(name: str, help: str, metavar: str | None = None, **properties: Any) -> Any:
    """Declare a field for a flag of the model's blocks with the same name."""
    return setting(help, metavar, option_name(name), passes_default=False, model_key=name, **properties)


def _preset_setting(name: str, help: str, defaults: str, **properties: Any) -> Any:
    """Declare a field for a flag of the model's blocks whose default is that of ``--block``."""
    return _block_setting(name, help, default=BY_BLOCK, default_words=f"that of --block, {defaults}", **properties)


def option_name(name: str) -> str:
    """Return the option of ``fairseq-rpe train`` for a field of :class:`TrainingConfig`."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class OptimizationSettings:
    """Settings of a training that a further training may change; None selects the default.

    In a training that continues another one, None is the value of that training.

    Attributes:
        tokens: training length: tokens of a training sequence.
        batch_sentences: number of sequences of one process and batch; in a recipe, of an update over all processes and
            accumulated batches.
        updates: number of updates of the whole training.
        lr: peak learning rate.
        warmup: number of updates in which the learning rate rises to ``lr``.
        schedule: learning rate after the warm-up.
        min_lr: last learning rate of a cosine schedule.
        betas: β1 and β2 of Adam.
        weight_decay: weight decay of Adam.
        clip_norm: largest norm of the gradient; 0 does not clip it.
        dropout, attention_dropout, activation_dropout: dropout of embeddings and sublayers, of attention weights, and
            in feed-forward layers.
    """

    tokens: Count | None = setting(
        "training length in tokens",
        "N",
        "--tokens-per-sample",
        is_passed=False,
        in_extension=False,  # extend requires it
        title="training length",
    )
    batch_sentences: Count | None = setting(
        "sequences per process; of all processes in a recipe's preset",
        "N",
        "--batch-size",
        "--max-sentences",
        is_passed=False,
        title="sequences per update",
    )
    updates: Count | None = setting(
        "updates of the whole training", "N", "--max-update", is_identity=False, title="updates"
    )
    lr: Rate | None = setting("peak learning rate", "LR", "--lr", "--learning-rate", title="peak learning rate")
    warmup: Count | None = setting("updates of warm-up", "N", "--warmup-updates", title="updates of warm-up")
    schedule: Schedule | None = setting(
        "learning rate after warm-up; linear ends at 0, cosine at --min-lr",
        None,
        "--lr-scheduler",
        is_reserved=False,
        is_passed=False,
        default="inverse_sqrt",
        title="schedule",
    )
    min_lr: NonNegative | None = setting(
        "last learning rate of --schedule cosine",
        "LR",
        "--min-lr",
        is_reserved=False,
        is_passed=False,
        default=0.0,
        title="rate at its end",
    )
    betas: Betas | None = setting(
        "Adam's decay rates",
        "B1,B2",
        "--adam-betas",
        is_reserved=False,
        default=(0.9, 0.98),
        default_words="0.9,0.98",
        title="betas",
    )
    weight_decay: Decay | None = setting(
        "decoupled weight decay as in AdamW",
        "X",
        "--weight-decay",
        "--wd",
        is_reserved=False,
        default=0.01,
        title="weight decay",
    )
    clip_norm: NonNegative | None = setting(
        "largest norm of the gradient; 0: no limit",
        "X",
        "--clip-norm",
        is_reserved=False,
        default=1.0,
        title="gradients clipped at",
    )
    dropout: Fraction | None = setting(
        "dropout of embeddings and sublayers", "X", "--dropout", model_key="dropout", title="dropout"
    )
    attention_dropout: Fraction | None = setting(
        "dropout of attention weights",
        "X",
        "--attention-dropout",
        is_reserved=False,
        passes_default=False,
        default=0.0,
        model_key="attention_dropout",
        title="dropout of attention",
    )
    activation_dropout: Fraction | None = setting(
        "dropout in feed-forward layers",
        "X",
        "--activation-dropout",
        "--relu-dropout",
        is_reserved=False,
        passes_default=False,
        default=0.0,
        model_key="activation_dropout",
        title="dropout of activations",
    )

    def stated(self) -> Mapping[str, Any]:
        """Return the settings that are not None, by name."""
        return {key: value for key, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class ModelSettings(OptimizationSettings):
    """Settings of a training and its model that papers publish as well; None if not stated.

    Attributes:
        arch: model architecture, such as ``tiny``.
        activation_fn: activation function of feed-forward layers.
        share_embeddings: whether input and output embeddings are the same parameters.
    """

    arch: str | None = setting("model architecture", "NAME", "--arch", "-a", in_extension=False, default_words="tiny")
    activation_fn: Literal["relu", "gelu", "gelu_accurate", "swiglu", "geglu", "clamped_swiglu"] | None = setting(
        "activation of feed-forward layers; swiglu, geglu and clamped_swiglu (of gpt-oss) multiply by a gate",
        None,
        "--activation-fn",
        is_reserved=False,
        passes_default=False,
        default=BY_ARCHITECTURE,
        default_words="that of --block; with classic relu for tiny, wiki103 and base, gelu for other sizes",
        model_key="activation_fn",
        title="activation",
    )
    share_embeddings: bool | None = setting(
        "share one table between input and output embeddings",
        None,
        "--share-decoder-input-output-embed",
        is_reserved=False,
        passes_default=False,
        default=False,
        default_words="two tables",
        model_key="share_decoder_input_output_embed",
        title="embeddings",
    )


@dataclass(frozen=True)
class TrainingSettings(ModelSettings):
    """Settings of a training that a preset of a recipe may state; None selects the default.

    Attributes:
        update_freq: number of batches that are accumulated for one update.
        blocks: ``stream``: blocks run across documents; ``document``: each block lies within one document.
        separate_documents: whether documents in one block of a stream are separate.
        rpe_share: how layers share the encoding: ``model``, ``layer`` or ``auto``.
        compute_dtype: dtype of matrix products.
        block: blocks of the layers.
        norm: norm of the layers.
        norm_position: where the norms of the sublayers are.
        bias: which layers have biases.
        block_init: initial weights.
        kv_heads: number of key/value heads; None: as many as query heads.
        head_dim: width of an attention head; None: the model width divided by the heads.
        qk_norm: RMSNorm of queries and keys.
        logit_softcap: c of c·tanh(s/c), applied to the output logits s; 0: none.
    """

    update_freq: Count | None = setting("batches per update", "N", "--update-freq", default_words="1")
    blocks: Literal["stream", "document"] | None = setting(
        "stream: a block may contain several documents; document: a block contains one document only",
        None,
        "--blocks",
        is_passed=False,
        in_extension=False,
        default=STREAM_BLOCKS,
    )
    separate_documents: bool | None = setting(
        "within blocks of a stream, attend only to tokens of the same document and count positions from its start",
        None,
        "--separate-documents",
        is_passed=False,
        in_extension=False,
        default=False,
        default_words="off",
    )
    rpe_share: Sharing | None = setting(
        "one encoding for the whole model or per layer",
        None,
        "--rpe-share",
        default_words="auto, as in the encoding's paper",
        model_key="rpe_share",
    )
    compute_dtype: Literal["fp32", "bf16"] | None = setting(
        "dtype of matrix products",
        None,
        "--compute-dtype",
        passes_default=False,
        default="fp32",
        model_key="compute_dtype",
    )
    block: Literal["classic", "llama", "qwen3", "olmo2", "gemma3", "gpt-oss", "gpt-neox"] | None = _block_setting(
        "block",
        "blocks of the layers: those of fairseq (classic) or of another model; gpt-oss without its experts",
        default="classic",
    )
    norm: Literal["layernorm", "rmsnorm"] | None = _preset_setting(
        "norm", "norm of the layers", "layernorm for classic, rmsnorm for llama"
    )
    norm_position: Literal["pre", "output", "sandwich", "parallel"] | None = _preset_setting(
        "norm_position",
        "pre: x + f(N(x)); output: x + N(f(x)); sandwich: x + N2(f(N1(x))); parallel: x + attn(N1(x)) + ffn(N2(x))",
        "pre for classic and llama",
    )
    bias: Literal["yes", "qkv", "no"] | None = _preset_setting(
        "bias", "biases; qkv: of queries, keys and values only", "yes for classic, no for llama", is_reserved=False
    )
    block_init: Literal["fairseq", "gpt2", "llama"] | None = _preset_setting(
        "block_init", "initial weights", "fairseq for classic, llama for the others"
    )
    kv_heads: Count | None = _block_setting(
        "kv_heads", "key/value heads, each shared by as many query heads", "G", default="as many as query heads"
    )
    head_dim: Count | None = _block_setting(
        "head_dim", "width of an attention head", "D", default="the model width divided by the heads"
    )
    qk_norm: Literal["none", "head", "whole"] | None = _preset_setting(
        "qk_norm", "RMSNorm of queries and keys: of each head, or of all heads together", "none for classic and llama"
    )
    logit_softcap: NonNegative | None = _block_setting(
        "logit_softcap", "c of c*tanh(s/c), applied to the output logits s; 0: none", "C", default=0.0
    )


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(TrainingSettings):
    """Options of ``fairseq-rpe train``: everything that a training is started from.

    Attributes:
        rpe: spec of the encoding.
        out: folder of the checkpoints.
        data: folder of a binarised text or of questions; None with ``algorithm``.
        algorithm: spec of a generated task; None with ``data``.
        positions_train, positions_eval: specs of the position transforms.
        seed: seed of the weights, the order of the data, dropout and random positions.
        finetune_from: checkpoint whose weights the training starts from.
        rpe_module: Python file that registers further encodings.
        attention_backend: attention back end.
        device: ``auto``, ``cpu`` or ``cuda``.
        nproc, nodes: number of processes or GPUs on each node, and number of nodes.
        node_rank: index of this node.
        master: HOST:PORT at which the nodes meet.
        save_every, log_encodings_every, log_interval: numbers of updates between checkpoints, between pictures of the
            encodings for TensorBoard, and between lines of the log.
        keep_at: numbers of updates after which the weights are kept.
        tensorboard: folder for TensorBoard's files.
        log_format: ``progress``, or the log format of fairseq-train.
        extra: further flags for fairseq-train.
    """

    rpe: NonEmptyText = setting(
        "encoding, e.g. alibi or type1:variant=paper", "SPEC", "--rpe", value=MISSING, in_sweep=False, in_extension=True
    )
    out: Path = setting("folder for checkpoints", "DIR", "--save-dir", value=MISSING, is_identity=False, in_sweep=False)
    data: Path | None = setting(
        "binarised text, or folder of prepare-questions", "DATA", is_passed=False, in_sweep=False
    )
    algorithm: NonEmptyText | None = setting(
        "instead of DATA: a generated task, e.g. copy:items=20",
        "SPEC",
        "--algorithm",
        is_passed=False,
        is_identity=False,
        in_sweep=False,
    )
    positions_train: NonEmptyText | None = setting(
        "position transform in training", "SPEC", "--positions-train", default_words="identity"
    )
    positions_eval: NonEmptyText | None = setting(
        "position transform in evaluation",
        "SPEC",
        "--positions-eval",
        default_words="the one that --positions-train implies",
    )
    seed: Seed = setting("seed of all random numbers", "N", "--seed", value=1, in_sweep=False, in_extension=True)
    finetune_from: Path | None = setting(
        "start from the weights of this checkpoint, with a new optimiser, schedule and update count; if DATA has "
        "questions, architecture, dropout, positions and training length come from the checkpoint too",
        "CHECKPOINT",
        "--finetune-from-model",
        "--restore-file",
        is_reserved=False,
        in_sweep=False,
    )
    rpe_module: Path | None = setting("Python file that registers your encodings", "FILE", "--rpe-module")
    attention_backend: str = setting(
        "attention backend", "NAME", "--attention-backend", value="auto", is_identity=False
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "device of the training", None, "--cpu", value="auto", is_passed=False, is_identity=False
    )
    nproc: Processes = setting("processes or GPUs per machine", "N", value=1, is_passed=False)
    nodes: Processes = setting("machines per run", "M", value=1, is_passed=False, is_identity=False, in_extension=False)
    node_rank: Rank | None = setting(
        "rank of this machine among --nodes",
        "R",
        is_passed=False,
        is_identity=False,
        in_sweep=False,
        default_words="SLURM's",
    )
    master: NonEmptyText | None = setting(
        "address of the first machine",
        "HOST:PORT",
        is_passed=False,
        is_identity=False,
        in_sweep=False,
        default_words="SLURM's",
    )
    save_every: Count | None = setting(
        "updates between checkpoints",
        "N",
        "--save-interval-updates",
        is_identity=False,
        in_sweep=False,
        in_extension=True,
    )
    keep_at: Counts | None = setting(
        "updates after which the weights are kept", "N,N,...", "--rpe-keep-at", is_identity=False, in_sweep=False
    )
    tensorboard: Path | None = setting(
        "folder for TensorBoard event files", "DIR", "--tensorboard-logdir", is_identity=False, in_sweep=False
    )
    log_encodings_every: Count | None = setting(
        "updates between plots of the encodings in TensorBoard",
        "N",
        "--rpe-log-encodings-every",
        is_identity=False,
        in_extension=False,
    )
    log_format: Literal["progress", "simple", "json"] = setting(
        "progress: show a progress line and write fairseq-train's messages to DIR/train.log (with --debug to the "
        "terminal too); simple or json: write fairseq's messages in this format to the terminal only",
        None,
        "--log-format",
        value=PROGRESS,
        is_passed=False,
        is_identity=False,
        in_sweep=False,
    )
    log_interval: Count = setting(
        "updates between log lines", "N", "--log-interval", value=25, is_identity=False, in_sweep=False
    )
    extra: tuple[str, ...] = setting("further flags for fairseq-train", value=(), is_passed=False, in_sweep=False)

    @property
    def world_size(self) -> int:
        """Number of processes on all nodes."""
        return self.nproc * self.nodes

    def with_paths_from(self, folder: Path) -> "TrainingConfig":
        """Return the configuration with its relative paths in ``folder``."""
        paths: dict[str, Any] = {k: folder / value for k, value in vars(self).items() if isinstance(value, Path)}
        return replace(self, **paths)

    def argv(self) -> list[str]:
        """Return the arguments of ``fairseq-rpe train`` that make the same configuration."""
        words = [] if self.data is None else [str(self.data)]
        for name in SETTINGS:
            value = getattr(self, name)
            option = option_name(name)
            if isinstance(value, bool):
                words.append(option if value else option.replace("--", "--no-", 1))
            elif name == "nodes" and value == 1:
                continue  # keeps the common command short
            elif name not in ("data", "extra") and value is not None:
                words += [option, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
        return [*words, *(["--", *self.extra] if self.extra else [])]

    def to_dict(self) -> dict[str, object]:
        """Return the configuration as in ``run.json``, without settings that are None."""
        values = {name: value for name in SETTINGS if (value := getattr(self, name)) is not None}
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


# fields that come before all others in commands and help texts; otherwise the order is that of the fields
_FIRST = ("rpe", "out", "data", "algorithm", "finetune_from")
SETTINGS: Mapping[str, Setting] = {
    f.name: f.metadata["setting"] for f in sorted(fields(TrainingConfig), key=lambda f: f.name not in _FIRST)
}
# settings whose flags of fairseq-train are allowed after ``--``, as long as the option is not given
OVERRIDABLE = tuple(name for name, s in SETTINGS.items() if s.flags and not s.is_reserved)


def read_config(table: object, source: str) -> TrainingConfig:
    """Read a configuration from a table of ``run.json``.

    Args:
        table: contents of ``config``.
        source: the file, for messages.

    Returns:
        The configuration.

    Raises:
        UserError: a key is unknown or missing, or a value is not valid.
    """
    return records.read_record(TrainingConfig, table, source, "config")
