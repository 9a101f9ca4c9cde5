"""The page's pictures, as SVG: accuracy by round, and who was given how much of whose model.

Colours come from the page's style sheet, so that they follow dark mode; lines also differ in their dashes, and each has
its sample beside its name. Each line and each cell also says in words what it is (``<title>``, read aloud and shown
under the pointer), and the figures stand in a table beside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 300, 46, 170, 12, 34
_COLOURS = 6
_DASHES = ("", "9 7", "2 5", "9 4 2 4")
_MOST_NAMED = 12


def curves(measured: Mapping[str, Sequence[tuple[int, float]]], *, planned: int, identifier: str) -> str:
    """Lines of accuracies (0 to 1) by round (from 1), one a silo; after the ``planned`` rounds comes the run's end."""
    rounds = max(points[-1][0] for points in measured.values() if points)
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def x(number: int) -> float:
        return _LEFT + width * (number - 1) / max(1, rounds - 1)

    def y(accuracy: float) -> float:
        return _TOP + height * (1 - accuracy)

    def said(number: int) -> str:
        return str(number) if number <= planned else "end"

    parts = [_begin(_WIDTH, _HEIGHT, "Accuracy by round", _spoken(measured), identifier)]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(
            f'<line class="cell" x1="{_LEFT}" x2="{_LEFT + width}" y1="{y(share):.1f}" y2="{y(share):.1f}"/>'
            f'<text x="{_LEFT - 6}" y="{y(share) + 4:.1f}" text-anchor="end">{100 * share:.0f} %</text>'
        )
    for number in dict.fromkeys((1, (1 + rounds) // 2, rounds)):
        parts.append(f'<text x="{x(number):.1f}" y="{_HEIGHT - 14}" text-anchor="middle">{said(number)}</text>')
    parts.append(f'<text x="{_LEFT + width + 24}" y="{_HEIGHT - 14}">round</text>')
    ends = _spread({name: y(points[-1][1]) for name, points in measured.items() if points})
    for place, (name, points) in enumerate(measured.items()):
        if not points:
            continue
        # Neighbours differ in both, so that of lines that lie on each other the lower one shows through the gaps.
        style = f'class="line" stroke-dasharray="{_DASHES[(place + place // 12) % len(_DASHES)]}"'
        path = " ".join(f"{x(number):.1f},{y(accuracy):.1f}" for number, accuracy in points)
        dot = (
            f'<circle {style} cx="{x(points[0][0]):.1f}" cy="{y(points[0][1]):.1f}" r="2"/>' if len(points) == 1 else ""
        )
        parts.append(
            f'<g class="c{place % _COLOURS}">'
            f"<title>{escape(name)}: {100 * points[-1][1]:.1f} %, round {said(points[-1][0])}</title>"
            f'<polyline {style} points="{path}"/>{dot}'
        )
        if len(measured) <= _MOST_NAMED:
            beside = _LEFT + width + 8
            parts.append(
                f'<line {style} x1="{beside}" x2="{beside + 30}" y1="{ends[name]:.1f}" y2="{ends[name]:.1f}"/>'
                f'<text x="{beside + 36}" y="{ends[name] + 4:.1f}">{escape(name)}</text>'
            )
        parts.append("</g>")
    return "".join([*parts, "</svg>"])


def matrix(silos: Sequence[str], weights: Sequence[Sequence[float]], *, identifier: str) -> str:
    """A square for each pair of silos: how much of the column's model the row's silo was given.

    What it was pulled to is filled with one colour, what it was pushed from with another and a minus sign; a silo's own
    share is left out.
    """
    size = max(16, min(44, 560 // max(1, len(silos))))
    left, top = 130, 100
    width, height = left + size * len(silos) + 10, top + size * len(silos) + 10
    highest = max(
        (abs(w) for i, row in enumerate(weights) for j, w in enumerate(row) if i != j),
        default=0.0,
    )
    spoken = f"Rows are given, columns give. The largest share is {highest:.4g}."
    parts = [_begin(width, height, "Who was given how much of whose model", spoken, identifier)]
    for place, name in enumerate(silos):
        along = top + size * place + size / 2 + 4
        parts.append(f'<text x="{left - 6}" y="{along:.1f}" text-anchor="end">{escape(name)}</text>')
        parts.append(
            f'<text transform="translate({left + size * place + size / 2 + 4:.1f} {top - 6}) rotate(-60)">'
            f"{escape(name)}</text>"
        )
    for i, row in enumerate(weights):
        for j, weight in enumerate(row):
            square = f'x="{left + size * j}" y="{top + size * i}" width="{size}" height="{size}"'
            if i == j or highest == 0:
                parts.append(f'<rect class="cell none" {square}/>')
                continue
            way, said = ("pull", "pulled to") if weight >= 0 else ("push", "pushed from")
            parts.append(
                f"<g><title>{escape(silos[i])} is {said} {escape(silos[j])}: {weight:.4g}</title>"
                f'<rect class="cell none" {square}/>'
                f'<rect class="cell {way}" fill-opacity="{abs(weight) / highest:.3f}" {square}/>'
            )
            if weight < 0:
                middle = f'x="{left + size * j + size / 2:.1f}" y="{top + size * i + size / 2 + 5:.1f}"'
                parts.append(f'<text text-anchor="middle" {middle}>−</text>')
            parts.append("</g>")
    return "".join([*parts, "</svg>"])


def _begin(width: float, height: float, title: str, spoken: str, identifier: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'role="img" aria-labelledby="{identifier}-title {identifier}-description">'
        f'<title id="{identifier}-title">{escape(title)}</title>'
        f'<desc id="{identifier}-description">{escape(spoken)}</desc>'
    )


def _spoken(measured: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    ends = [f"{name}: {100 * points[-1][1]:.1f} %" for name, points in measured.items() if points]
    return "; ".join(ends) or "Nobody has shared an accuracy."


def _spread(places: Mapping[str, float]) -> dict[str, float]:
    """Heights for names beside lines' ends, at least a line of text apart."""
    found: dict[str, float] = {}
    last = float("-inf")
    for name, place in sorted(places.items(), key=lambda item: item[1]):
        last = max(place, last + 14)
        found[name] = last
    # Those at the bottom make room upwards.
    limit = float(_HEIGHT - _BOTTOM)
    for name in reversed(found):
        found[name] = limit = min(found[name], limit)
        limit -= 14
    return found
