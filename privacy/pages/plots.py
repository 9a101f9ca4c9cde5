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
from html import escape

from medsilo.privacy.pages.wording import readable_bytes, shown

WIDTH = 600
_BARS = 34
_STRIP = 66
_TOP = 22
_BOTTOM = 40
_WIDEST_BAR = 46
DARK, LIGHT, INK, LINE = "#1f4e79", "#aebac4", "#1b2733", "#8b98a3"


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
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-labelledby="{identifier}-title {identifier}-description" '
        f'font-family="Libertinus Serif, sans-serif" font-size="13" fill="{INK}">',
        f'<title id="{identifier}-title">Bytes by {escape(unit)}</title>',
        f'<desc id="{identifier}-description">{escape(describe(strips, labels, unit=unit))}</desc>',
    ]
    for place, strip in enumerate(strips):
        top = place * _STRIP
        base = top + _TOP + _BARS
        highest = max(strip.values, default=0)
        note = "" if strip.telling else ", nothing about patients"
        parts.append(
            f'<text x="0" y="{top + 15}"><tspan font-weight="bold">{escape(strip.name)} (bytes)</tspan>'
            f"{escape(f': {_scale(strip.values)}{note}')}</text>"
        )
        for number, value in enumerate(strip.values):
            if value:
                tall = max(1.5, _BARS * value / highest)
                parts.append(
                    f'<rect x="{number * step + (step - bar) / 2:.1f}" y="{base - tall:.1f}" width="{bar:.1f}" '
                    f'height="{tall:.1f}" class="{"telling" if strip.telling else "other"}" '
                    f'fill="{DARK if strip.telling else LIGHT}"/>'
                )
        parts.append(f'<line x1="0" y1="{base}" x2="{WIDTH}" y2="{base}" stroke="{LINE}" stroke-width="1"/>')
    axis = height - _BOTTOM + 12
    room = 8 * max(map(len, labels), default=0) + 8
    every = max(1, math.ceil(room / step))
    for number, label in enumerate(labels):
        if (len(labels) - 1 - number) % every == 0:  # even steps that end with the last one
            half = 3.4 * len(label)
            x = min(max(number * step + step / 2, half), WIDTH - half)
            parts.append(f'<text x="{x:.1f}" y="{axis}" text-anchor="middle" font-size="12">{escape(label)}</text>')
    parts.append(f'<text x="0" y="{axis + 19}" font-size="12">{escape(unit)}</text></svg>')
    return "".join(parts)


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
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + _BOTTOM}" role="img" '
        f'aria-labelledby="{identifier}-title {identifier}-description" '
        f'font-family="Libertinus Serif, sans-serif" font-size="13" fill="{INK}">',
        f'<title id="{identifier}-title">Privacy loss by charges</title>',
        f'<desc id="{identifier}-description">{escape(words)}</desc>',
        f'<line x1="{left}" y1="{bottom}" x2="{right}" y2="{bottom}" stroke="{LINE}" stroke-width="1"/>',
    ]
    if budget is not None:
        parts.append(
            f'<line x1="{left}" y1="{y(budget):.1f}" x2="{right}" y2="{y(budget):.1f}" stroke="{INK}" '
            f'stroke-width="1" stroke-dasharray="5 4"/>'
            f'<text x="{left}" y="{y(budget) - 5:.1f}">budget {budget:g}</text>'
        )
    if course:
        path = " ".join(f"{x(charges):.1f},{y(epsilon):.1f}" for charges, epsilon in [(0, 0.0), *course])
        parts.append(f'<polyline points="{path}" class="course" fill="none" stroke="{DARK}" stroke-width="2"/>')
        parts.append(f'<text x="{right + 6}" y="{y(course[-1][1]) + 4:.1f}">ε = {shown(course[-1][1])}</text>')
    parts.append(f'<text x="{right}" y="{bottom + 16}" text-anchor="end" font-size="12">{last}</text>')
    parts.append(f'<text x="{left}" y="{bottom + 35}" font-size="12">charges to the ledger, in order</text></svg>')
    return "".join(parts)


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
