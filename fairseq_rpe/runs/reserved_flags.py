"""Flags of fairseq-train that options of ``fairseq-rpe train`` set, so that none is given twice."""

from collections.abc import Collection, Sequence

from fairseq_rpe.core.errors import UserError

# flag of fairseq-train -> option of fairseq-rpe train that sets it; "" if the command sets it itself
RESERVED_FLAGS = {
    "--save-dir": "--out",
    "--user-dir": "",
    "--arch": "--arch",
    "-a": "--arch",
    "--task": "DATA or --algorithm",
    "--algorithm": "--algorithm",
    "--tokens-per-sample": "--tokens",
    "--blocks": "--blocks",
    "--separate-documents": "--separate-documents",
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
    "--rpe-log-encodings-every": "--log-encodings-every",
    "--tensorboard-logdir": "--tensorboard",
    "--log-format": "--log-format",
    "--log-interval": "--log-interval",
    "--cpu": "--device cpu",
    "--distributed-world-size": "--nproc and --nodes",
}


# setting -> its flags of fairseq-train. Recorded runs may have these flags after the --, because the settings had no
# options at first; they are refused only together with the option.
SETTING_FLAGS = {
    "min_lr": ("--min-lr",),
    "betas": ("--adam-betas",),
    "weight_decay": ("--weight-decay", "--wd"),
    "clip_norm": ("--clip-norm",),
    "attention_dropout": ("--attention-dropout",),
    "activation_dropout": ("--activation-dropout", "--relu-dropout"),
    "activation_fn": ("--activation-fn",),
    "share_embeddings": ("--share-decoder-input-output-embed",),
}
# The same for flags that remain allowed without the option.
ALTERNATIVE_FLAGS = {"schedule": ("--lr-scheduler",), "finetune_from": ("--finetune-from-model", "--restore-file")}


def check_extra(extra: Sequence[str], options: Collection[str] = ()) -> None:
    """Refuse flags for fairseq-train that ``fairseq-rpe train`` sets already.

    Args:
        extra: words after ``--``.
        options: settings whose options were given.

    Raises:
        UserError: a flag is reserved, or repeats one of ``options``.
    """
    settings = {flag: name for name, flags in {**SETTING_FLAGS, **ALTERNATIVE_FLAGS}.items() for flag in flags}
    for word in extra:
        flag = word.partition("=")[0]
        if flag in RESERVED_FLAGS:
            remedy = f"give {RESERVED_FLAGS[flag]} before the -- instead" if RESERVED_FLAGS[flag] else "leave it out"
            raise UserError(f"{flag} after -- is set by this command itself: {remedy}")
        if flag == "--rpe-eval":
            raise UserError("--rpe-eval after -- belongs to evaluation: give --rpe to fairseq-rpe eval instead")
        if settings.get(flag) in options:
            option = "--" + settings[flag].replace("_", "-")
            raise UserError(f"{flag} after -- is set already: give {option} before the -- instead")


def is_unchanged_by_flags(name: str, extra: Sequence[str]) -> bool:
    """Return whether no word after ``--`` is a flag of fairseq-train that changes a setting.

    Args:
        name: key of :data:`SETTING_FLAGS`.
        extra: words after ``--``.

    Returns:
        True if the value of the setting is that of its option or default.
    """
    return not {word.partition("=")[0] for word in extra} & set(SETTING_FLAGS[name])


def flag_values(extra: Sequence[str], flags: Collection[str]) -> dict[str, str]:
    """Read the values of flags of fairseq-train.

    Args:
        extra: words after ``--``; a flag and its value are ``--flag value`` or ``--flag=value``.
        flags: flags to read.

    Returns:
        The last value of each flag that occurs in ``extra``.
    """
    values = {}
    for index, word in enumerate(extra):
        flag, equals, value = word.partition("=")
        if flag in flags:
            values[flag] = value if equals else "".join(extra[index + 1 : index + 2])
    return values
