"""The page's pictures, as SVG: accuracy by round, and who was given how much of whose model.

Colours come from the page's style sheet, so that they follow dark mode; lines also differ in their dashes, and each has
its sample beside its name. Each line and each cell also says in words what it is (``<title>``, read aloud and shown
under the pointer), and the figures stand in a table beside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from medsilo.privacy.pages.svg import Drawing

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

    drawing = Drawing(
        _WIDTH, _HEIGHT, "Accuracy by round", identifier=identifier, description=_spoken(measured), width=_WIDTH
    )
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        drawing.line(_LEFT, y(share), _LEFT + width, y(share), class_="cell")
        drawing.text(_LEFT - 6, y(share) + 4, f"{100 * share:.0f} %", text_anchor="end")
    for number in dict.fromkeys((1, (1 + rounds) // 2, rounds)):
        drawing.text(x(number), _HEIGHT - 14, said(number), text_anchor="middle")
    drawing.text(_LEFT + width + 24, _HEIGHT - 14, "round")
    ends = _spread({name: y(points[-1][1]) for name, points in measured.items() if points})
    for place, (name, points) in enumerate(measured.items()):
        if not points:
            continue
        # Neighbours differ in both, so that of lines that lie on each other the lower one shows through the gaps.
        style = {"class_": "line", "stroke_dasharray": _DASHES[(place + place // 12) % len(_DASHES)]}
        at_last = f"{name}: {100 * points[-1][1]:.1f} %, round {said(points[-1][0])}"
        with drawing.group(at_last, class_=f"c{place % _COLOURS}"):
            drawing.path([(x(number), y(accuracy)) for number, accuracy in points], **style)
            if len(points) == 1:
                drawing.element("circle", cx=x(points[0][0]), cy=y(points[0][1]), r=2, **style)
            if len(measured) <= _MOST_NAMED:
                beside = _LEFT + width + 8
                drawing.line(beside, ends[name], beside + 30, ends[name], **style)
                drawing.text(beside + 36, ends[name] + 4, name)
    return drawing.end()


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
    title = "Who was given how much of whose model"
    drawing = Drawing(width, height, title, identifier=identifier, description=spoken, width=width)
    for place, name in enumerate(silos):
        middle = size * place + size / 2 + 4
        drawing.text(left - 6, top + middle, name, text_anchor="end")
        drawing.element("text", name, transform=f"translate({left + middle:.1f} {top - 6}) rotate(-60)")
    for i, row in enumerate(weights):
        for j, weight in enumerate(row):
            square = (left + size * j, top + size * i, size, size)
            if i == j or highest == 0:
                drawing.bar(*square, class_="cell none")
                continue
            way, said = ("pull", "pulled to") if weight >= 0 else ("push", "pushed from")
            with drawing.group(f"{silos[i]} is {said} {silos[j]}: {weight:.4g}"):
                drawing.bar(*square, class_="cell none")
                drawing.bar(*square, class_=f"cell {way}", fill_opacity=f"{abs(weight) / highest:.3f}")
                if weight < 0:
                    drawing.text(square[0] + size / 2, square[1] + size / 2 + 5, "−", text_anchor="middle")
    return drawing.end()


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
