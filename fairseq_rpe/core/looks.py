"""Colours and markers with which a registered class may be drawn in figures.

Encodings that are often compared have different colours. Encodings of one colour have different markers, and the
figures choose their dashes by it.
"""

from typing import NamedTuple

from fairseq_rpe.core.errors import UserError

# The colours of Okabe and Ito, distinguishable with any colour vision, without their yellow, which is too pale for a
# thin line; then three that are darker or greyer than all of these.
COLOURS = {
    "blue": "#0072B2",
    "vermilion": "#D55E00",
    "green": "#009E73",
    "pink": "#CC79A7",
    "orange": "#E69F00",
    "sky blue": "#56B4E9",
    "black": "#000000",
    "violet": "#7A2F8F",
    "brown": "#7F4A12",
    "grey": "#8A8A8A",
}
MARKERS = "os^Dv<>P"  # of matplotlib


class RegisteredLook(NamedTuple):
    """The look with which a class is registered.

    Attributes:
        colour: key of :data:`COLOURS`.
        marker: one of :data:`MARKERS`.
    """

    colour: str
    marker: str


def make_look(name: str, colour: str | None, marker: str | None) -> RegisteredLook | None:
    """Return the look of the class that is registered as ``name``, or None without a colour and a marker.

    Raises:
        UserError: Only one of them is given, or one is unknown.
    """
    if colour is None and marker is None:
        return None
    if colour not in COLOURS or marker is None or marker not in tuple(MARKERS):
        raise UserError(
            f"@register('{name}', colour={colour!r}, marker={marker!r}): give both or neither, a colour of "
            f"{', '.join(COLOURS)} and a marker of {' '.join(MARKERS)}"
        )
    return RegisteredLook(colour, marker)
