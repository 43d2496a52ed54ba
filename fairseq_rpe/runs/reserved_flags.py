"""The flags of fairseq-train that options of ours stand for, so that none is given twice."""

from collections.abc import Collection, Sequence

from fairseq_rpe.core.errors import UserError

# flags of fairseq-train that are decided by options of ours, which put them on record
OURS = {
    "--save-dir": "--save-dir",
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
    "--rpe-inspect-every": "--inspect-every",
    "--tensorboard-logdir": "--tensorboard",
    "--log-format": "--log-format",
    "--log-interval": "--log-interval",
    "--cpu": "--device cpu",
    "--distributed-world-size": "--nproc and --nodes",
}


# Settings that had no option at first, so that runs are on record with these flags after the --: refused only together
# with the option.
LATER = {
    "min_lr": ("--min-lr",),
    "betas": ("--adam-betas",),
    "weight_decay": ("--weight-decay", "--wd"),
    "clip_norm": ("--clip-norm",),
    "attention_dropout": ("--attention-dropout",),
    "activation_dropout": ("--activation-dropout", "--relu-dropout"),
    "activation_fn": ("--activation-fn",),
    "share_embeddings": ("--share-decoder-input-output-embed",),
}
# Flags of fairseq-train that were always further ones, refused together with the option too.
ALSO = {"schedule": ("--lr-scheduler",), "finetune_from": ("--finetune-from-model", "--restore-file")}


def check_extra(extra: Sequence[str], given: Collection[str] = ()) -> None:
    """Refuse flags for fairseq-train that are set here already, by the options ``given`` too."""
    twice = {flag: name for name, flags in {**LATER, **ALSO}.items() for flag in flags}
    for word in extra:
        flag = word.partition("=")[0]
        if flag in OURS:
            how = f"give {OURS[flag]} before the -- instead" if OURS[flag] else "leave it out"
            raise UserError(f"{flag} after -- is set by this command itself: {how}")
        if flag == "--rpe-eval":
            raise UserError("--rpe-eval after -- belongs to evaluation: give --rpe to fairseq-rpe eval instead")
        if twice.get(flag) in given:
            option = "--" + twice[flag].replace("_", "-")
            raise UserError(f"{flag} after -- is set already: give {option} before the -- instead")


def known(name: str, extra: Sequence[str]) -> bool:
    """Whether a setting is what its option or default says, because no flag of ``extra`` may have changed it."""
    return not {word.partition("=")[0] for word in extra} & set(LATER[name])


def flag_values(extra: Sequence[str], flags: Collection[str]) -> dict[str, str]:
    """Read the values of some of fairseq-train's flags.

    Args:
        extra: the words after ``--``, in which a flag and its value are ``--flag value`` or ``--flag=value``.
        flags: those to read.

    Returns:
        By flag, its last value; flags that are not given are not there.
    """
    values = {}
    for index, word in enumerate(extra):
        flag, equals, value = word.partition("=")
        if flag in flags:
            values[flag] = value if equals else "".join(extra[index + 1 : index + 2])
    return values
