"""What the drawings are made of: a picture, boxes, words, a key."""

from __future__ import annotations

from collections.abc import Sequence

from cbasync.palette import FONT, IDLE_GROUND, IDLE_LINE, INK

WIDTH = 960


def picture_svg(height: int, parts: Sequence[str]) -> str:
    """A whole SVG file, `WIDTH` wide, of these parts; lengths are pixels."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" style="max-width:100%;height:auto" '
        f'font-family="{FONT}" font-size="13" fill="{INK}">'
    )
    ground = f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
    return "\n".join([head, ground, *parts, "</svg>"]) + "\n"


def rect_svg(x: float, y: float, width: float, height: float, colour: str) -> str:
    """A box; idle ground gets a thin line around it."""
    line = f' stroke="{IDLE_LINE}" stroke-width=".5"' if colour == IDLE_GROUND else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{colour}"{line}/>'
    )


def words_svg(
    x: float, y: float, words: str, anchor: str = "start", colour: str = INK
) -> str:
    """Words whose middle height is `y`; `anchor` is start, middle or end."""
    place = f'x="{x:.1f}" y="{y:.1f}" dy=".35em" text-anchor="{anchor}"'
    fill = "" if colour == INK else f' fill="{colour}"'
    return f"<text {place}{fill}>{words}</text>"


def key_svg(x: float, colour: str, words: str) -> list[str]:
    """One entry of a legend at the top: a small box and what it means."""
    return [rect_svg(x, 14, 18, 13, colour), words_svg(x + 24, 21, words)]
