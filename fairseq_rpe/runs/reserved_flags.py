"""Words after ``--``: flags of fairseq-train that options of ``fairseq-rpe train`` set, so that none is given twice."""

from collections.abc import Collection, Sequence

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.runs.training_config import OVERRIDABLE, SETTINGS, option_name

# flag of fairseq-train -> option of fairseq-rpe train that sets it; "" if the command sets it itself
RESERVED_FLAGS = {
    "--user-dir": "",
    "--task": "DATA or --algorithm",
    "--cpu": "--device cpu",
    "--distributed-world-size": "--nproc and --nodes",
    **{flag: option_name(name) for name, s in SETTINGS.items() if s.is_reserved for flag in s.flags},
}


def check_extra(extra: Sequence[str], options: Collection[str] = ()) -> None:
    """Refuse flags for fairseq-train that ``fairseq-rpe train`` sets already.

    Args:
        extra: words after ``--``.
        options: settings whose options were given.

    Raises:
        UserError: a flag is reserved, or repeats one of ``options``.
    """
    overridable = {flag: name for name in OVERRIDABLE for flag in SETTINGS[name].flags}
    for word in extra:
        flag = word.partition("=")[0]
        if flag in RESERVED_FLAGS:
            remedy = f"give {RESERVED_FLAGS[flag]} before the -- instead" if RESERVED_FLAGS[flag] else "leave it out"
            raise UserError(f"{flag} after -- is set by this command itself: {remedy}")
        if flag == "--rpe-eval":
            raise UserError("--rpe-eval after -- belongs to evaluation: give --rpe to fairseq-rpe eval instead")
        if (name := overridable.get(flag)) in options and name is not None:
            raise UserError(f"{flag} after -- is set already: give {option_name(name)} before the -- instead")


def is_unchanged_by_flags(name: str, extra: Sequence[str]) -> bool:
    """Return whether no word after ``--`` is a flag of fairseq-train that changes a setting.

    Args:
        name: field of :class:`~fairseq_rpe.runs.training_config.TrainingConfig`.
        extra: words after ``--``.

    Returns:
        True if the value of the setting is that of its option or default.
    """
    return not {word.partition("=")[0] for word in extra} & set(SETTINGS[name].flags)


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
