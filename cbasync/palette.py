"""The only palette: one colour a phase, in every figure, table and page.

Standard library only.
"""

from __future__ import annotations

# One colour a phase, told apart by colour-blind readers too (Okabe and Ito). Neighbours
# in the cpu lane are far from each other.
PHASE_COLOURS = {
    "schedule": "#e69f00",
    "prepare": "#56b4e9",
    "h2d": "#009e73",
    "compute": "#0072b2",
    "d2h": "#d55e00",
    "update": "#cc79a7",
}
IDLE_GROUND = "#f1f1ee"
IDLE_LINE = "#8a8a86"
RACE_COLOUR = "#c1121f"
CARRIED_GROUND = "#fdf1b8"  # a token that is carried over; the colour of no phase
INK, SOFT_INK, GRID = "#1c1c1c", "#5b5b5b", "#e2e2de"
FONT = "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif"

# Slots differ by shade, never by hue: colour always means phase. What is mixed in, and
# how much of it, for slots A, B, C, D.
_SHADES = (("#ffffff", 0.0), ("#ffffff", 0.38), ("#000000", 0.28), ("#ffffff", 0.6))

# Requests are told apart by name; the tints only help the eye along. None of them
# is the colour of a phase.
_REQUEST_TINTS = (
    "#9ecae1",
    "#fdd0a2",
    "#a1d9b1",
    "#e7b9d4",
    "#d9d9d9",
    "#f4b9a7",
    "#d8d27a",
    "#c5b8e0",
)

CAUSE_WORDS = {
    "schedule": "waits for schedule",
    "prepare": "waits for prepare",
    "update": "waits for update",
    "h2d": "waits for its inputs",
    "sync": "waits for the copy back",
    "host": "waits for the host",
    "drain": "nothing left to do",
}
_CAUSE_COLOURS = {"sync": PHASE_COLOURS["d2h"]}


def shade(colour: str, slot: int) -> str:
    """The colour of a phase for a slot: A as it is, B lighter, C darker, D lightest.

    >>> shade("#0072b2", 0), shade("#0072b2", 1), shade("#0072b2", -1)
    ('#0072b2', '#61a8cf', '#0072b2')
    """
    other, part = _SHADES[max(slot, 0) % len(_SHADES)]
    pairs = zip(_channels(colour), _channels(other), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in pairs)


def _channels(colour: str) -> list[int]:
    return [int(colour[place : place + 2], 16) for place in (1, 3, 5)]


def request_tint(number: int) -> str:
    """The ground of a request's places: the same few tints over and over.

    >>> request_tint(0), request_tint(8)
    ('#9ecae1', '#9ecae1')
    """
    return _REQUEST_TINTS[number % len(_REQUEST_TINTS)]


def text_colour(ground: str) -> str:
    """Black or white, whichever is easier to read on a colour.

    >>> text_colour("#0072b2"), text_colour("#61a8cf")
    ('#ffffff', '#1c1c1c')
    """
    red, green, blue = _channels(ground)
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 130 else "#ffffff"


def cause_colour(cause: str) -> str:
    """A GPU that waits for a phase is hatched in the colour of that phase."""
    return PHASE_COLOURS.get(cause) or _CAUSE_COLOURS.get(cause, IDLE_LINE)
