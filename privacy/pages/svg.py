"""A picture as SVG that stands in page and PDF alike: named and described for screen readers, without a script, and the
same bytes for the same input."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from html import escape

WIDTH = 600
"""User units from edge to edge of a picture that is as wide as its page."""
DARK, LIGHT, INK, LINE = "#1f4e79", "#aebac4", "#1b2733", "#8b98a3"
PRINTED = {"font_family": "Libertinus Serif, sans-serif", "font_size": "13", "fill": INK}
"""The look of a picture whose page has no style sheet for it."""

Value = str | float


class Drawing:
    """A picture that grows element by element.

    An element's attributes are keyword arguments: ``stroke_width`` is written ``stroke-width``, ``class_`` is written
    ``class``, and a float has one digit after the point.

    ``width``, ``height``: the picture's size in user units. ``identifier``: unique in a page; names the title and,
    where there is one, the ``description`` (what is seen, in words).
    """

    def __init__(
        self, width: float, height: float, title: str, /, *, identifier: str, description: str = "", **attributes: Value
    ) -> None:
        named = [f"{identifier}-title", *([f"{identifier}-description"] if description else [])]
        size = f"0 0 {_written(width)} {_written(height)}"
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" role="img" aria-labelledby="{" ".join(named)}"'
            f"{_attributes(attributes)}>"
        ]
        for name, place, words in zip(("title", "desc"), named, (title, description), strict=False):
            self.element(name, words, id=place)

    def element(self, name: str, words: str = "", /, **attributes: Value) -> None:
        """Any element; ``words`` stand in it."""
        self._add(name, escape(words), attributes)

    def text(self, x: float, y: float, words: str, /, *, bold: str = "", **attributes: Value) -> None:
        """Words, after those that are ``bold``; their base line begins at (``x``, ``y``), unless ``text_anchor`` says
        that it ends or has its middle there."""
        lead = f'<tspan font-weight="bold">{escape(bold)}</tspan>' if bold else ""
        self._add("text", lead + escape(words), {"x": x, "y": y} | attributes)

    def line(self, x1: float, y1: float, x2: float, y2: float, /, **attributes: Value) -> None:
        """A straight line."""
        self._add("line", "", {"x1": x1, "y1": y1, "x2": x2, "y2": y2} | attributes)

    def axis(self, y: float, left: float = 0, right: float = WIDTH) -> None:
        """A thin level line, for bars to stand on."""
        self.line(left, y, right, y, stroke=LINE, stroke_width=1)

    def bar(self, x: float, y: float, width: float, height: float, /, **attributes: Value) -> None:
        """A rectangle by its upper left corner."""
        self._add("rect", "", {"x": x, "y": y, "width": width, "height": height} | attributes)

    def path(self, points: Iterable[tuple[float, float]], /, **attributes: Value) -> None:
        """Straight lines from point to point."""
        joined = " ".join(f"{float(x):.1f},{float(y):.1f}" for x, y in points)
        self._add("polyline", "", {"points": joined} | attributes)

    @contextmanager
    def group(self, title: str, /, **attributes: Value) -> Iterator[None]:
        """Elements that are one thing, with the words that are read aloud and shown under the pointer."""
        self._parts.append(f"<g{_attributes(attributes)}>")
        self.element("title", title)
        yield
        self._parts.append("</g>")

    def end(self) -> str:
        """The whole picture."""
        return "".join([*self._parts, "</svg>"])

    def _add(self, name: str, inside: str, attributes: Mapping[str, Value]) -> None:
        self._parts.append(f"<{name}{_attributes(attributes)}" + (f">{inside}</{name}>" if inside else "/>"))


def _attributes(attributes: Mapping[str, Value]) -> str:
    return "".join(f' {name.rstrip("_").replace("_", "-")}="{_written(value)}"' for name, value in attributes.items())


def _written(value: Value) -> str:
    return f"{value:.1f}" if isinstance(value, float) else escape(str(value))
