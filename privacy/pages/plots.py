"""Pictures as SVG that stands in page and PDF alike: bytes by round, one strip for each kind of content; and how a
privacy ledger's ε has grown.

Kinds differ in size by orders of magnitude (a model beside a count), so each has a strip and a scale of its own, with
its name and its highest value written on it. Nothing depends on colour: what tells about patients is dark, the rest
is light, and the strip says which it is. Classes let a page's style sheet choose other colours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from medsilo.privacy.pages.svg import DARK, INK, LIGHT, PRINTED, WIDTH, Drawing
from medsilo.privacy.pages.wording import readable_bytes, shown

_BARS = 34
_STRIP = 66
_TOP = 22
_BOTTOM = 40
_WIDEST_BAR = 46


@dataclass(frozen=True)
class Strip:
    """One kind of content: bytes for each of the picture's ``labels``."""

    name: str
    telling: bool
    values: Sequence[int]


def bars_by_round(strips: Sequence[Strip], labels: Sequence[str], *, unit: str, identifier: str) -> str:
    """An SVG of ``WIDTH`` user units with a strip of bars for each kind of content.

    ``labels``: names of the bars, the same for all strips. ``unit``: what a bar stands for, below the axis.
    ``identifier``: names the picture's title and description for screen readers; unique in a page.
    """
    height = _STRIP * len(strips) + _BOTTOM
    step = min(_WIDEST_BAR, WIDTH / max(1, len(labels)))
    bar = max(1.0, step * 0.72)
    drawing = Drawing(
        WIDTH,
        height,
        f"Bytes by {unit}",
        identifier=identifier,
        description=describe(strips, labels, unit=unit),
        **PRINTED,
    )
    for place, strip in enumerate(strips):
        top = place * _STRIP
        base = top + _TOP + _BARS
        highest = max(strip.values, default=0)
        note = "" if strip.telling else ", nothing about patients"
        drawing.text(0, top + 15, f": {_scale(strip.values)}{note}", bold=f"{strip.name} (bytes)")
        for number, value in enumerate(strip.values):
            if value:
                tall = max(1.5, _BARS * value / highest)
                left = number * step + (step - bar) / 2
                look = {"class_": "telling", "fill": DARK} if strip.telling else {"class_": "other", "fill": LIGHT}
                drawing.bar(left, base - tall, bar, tall, **look)
        drawing.axis(base)
    axis = height - _BOTTOM + 12
    room = 8 * max(map(len, labels), default=0) + 8
    every = max(1, math.ceil(room / step))
    for number, label in enumerate(labels):
        if (len(labels) - 1 - number) % every == 0:  # even steps that end with the last one
            half = 3.4 * len(label)
            x = min(max(number * step + step / 2, half), WIDTH - half)
            drawing.text(x, axis, label, text_anchor="middle", font_size=12)
    drawing.text(0, axis + 19, unit, font_size=12)
    return drawing.end()


def spending(course: Sequence[tuple[int, float]], budget: float | None, *, identifier: str) -> str:
    """An SVG of how a privacy ledger's ε has grown with its charges, and of its budget.

    ``course``: (number of charges, ε after them), ascending; an infinite ε is drawn at the upper edge.
    ``identifier``: as in ``bars_by_round``.
    """
    finite = [epsilon for _, epsilon in course if math.isfinite(epsilon)]
    highest = max([*finite, budget or 0.0], default=0.0) or 1.0
    last = course[-1][0] if course else 1
    left, right, top, bottom = 8, WIDTH - 70, 24, 160

    def x(charges: int) -> float:
        return left + (right - left) * charges / last

    def y(epsilon: float) -> float:
        return bottom - (bottom - top) * min(epsilon, highest) / highest

    words = f"{len(course)} points. " + (
        f"After {last} charges ε is {shown(course[-1][1])}." if course else "No charge."
    )
    if budget is not None:
        words += f" The budget is {budget:g}."
    drawing = Drawing(
        WIDTH, bottom + _BOTTOM, "Privacy loss by charges", identifier=identifier, description=words, **PRINTED
    )
    drawing.axis(bottom, left, right)
    if budget is not None:
        drawing.line(left, y(budget), right, y(budget), stroke=INK, stroke_width=1, stroke_dasharray="5 4")
        drawing.text(left, y(budget) - 5, f"budget {budget:g}")
    if course:
        points = [(x(charges), y(epsilon)) for charges, epsilon in [(0, 0.0), *course]]
        drawing.path(points, class_="course", fill="none", stroke=DARK, stroke_width=2)
        drawing.text(right + 6, y(course[-1][1]) + 4, f"ε = {shown(course[-1][1])}")
    drawing.text(right, bottom + 16, str(last), text_anchor="end", font_size=12)
    drawing.text(left, bottom + 35, "charges to the ledger, in order", font_size=12)
    return drawing.end()


def describe(strips: Sequence[Strip], labels: Sequence[str], *, unit: str) -> str:
    """What the picture shows, for who cannot see it."""
    kinds = "; ".join(f"{strip.name}: {_scale(strip.values)}" for strip in strips)
    return f"{len(labels)} bars for each kind of content, by {unit}. {kinds}. The same figures stand in the table."


def _scale(values: Sequence[int]) -> str:
    seen = [value for value in values if value]
    if not seen:
        return "nothing"
    if len(seen) == 1:
        return f"{readable_bytes(seen[0])}, once"
    if min(seen) == max(seen):
        return f"{readable_bytes(seen[0])} each"
    return f"highest bar: {readable_bytes(max(seen))}"
