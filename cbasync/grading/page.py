"""One page for each student: points, messages, printed text; nothing is loaded.

What a student wrote is shown as text, never as a page's own code.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from cbasync.grading.report import Grade
from cbasync.grading.rubric import ASSIGNMENTS, ItemResult

STYLE = """
body { font: 16px/1.5 sans-serif; max-width: 54em; margin: 2em auto; padding: 0 1em;
       color: #222; background: #fff; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .4em .6em;
         border-top: 1px solid #ccc; }
td.points { white-space: nowrap; text-align: right; }
pre { background: #f4f4f4; padding: .6em; white-space: pre-wrap; margin: .3em 0; }
"""


def student_page(student: str, grades: Sequence[Grade]) -> str:
    """The page as text; its policy forbids scripts and anything from elsewhere."""
    points = sum(grade.points for grade in grades)
    out_of = sum(grade.out_of for grade in grades)
    name = escape(student)
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta http-equiv="Content-Security-Policy"',
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>{name}: {points} of {out_of} points</title>",
        f"<style>{STYLE}</style></head><body>",
        f"<h1>{name}: {points} of {out_of} points</h1>",
        *map(_section, grades),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _section(grade: Grade) -> str:
    topic = ASSIGNMENTS[grade.assignment].topic
    rows = "\n".join(map(_row, grade.items))
    measured = "".join(
        f"<p>{escape(key)}: {value:.4f}</p>" for key, value in grade.metrics.items()
    )
    return (
        f"<h2>{escape(topic)}: {grade.points} of {grade.out_of}</h2>\n{measured}"
        "<table><thead><tr><th>Points</th><th>What must hold</th></tr></thead>"
        f"<tbody>\n{rows}\n</tbody></table>"
    )


def _row(item: ItemResult) -> str:
    parts = [escape(item.words)]
    if item.message:
        parts.append(f"<pre>{escape(item.message)}</pre>")
        if item.printed:
            printed = escape(item.printed)
            parts.append(f"<details><summary>printed</summary><pre>{printed}</pre>")
            parts.append("</details>")
    points = f"{item.earned} of {item.points}"
    return f'<tr><td class="points">{points}</td><td>{"".join(parts)}</td></tr>'
