"""A rehearsal's pictures, as SVG in the report's manner: dark is what was trained on or is proven, light the rest, and
words say which is which."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from medsilo.privacy.pages.svg import DARK, LIGHT, PRINTED, WIDTH, Drawing

_BINS = 30
_BARS = 60
_STRIP = 92
_BAR = 44


def score_histograms(scores: npt.NDArray[np.float64], trained: npt.NDArray[np.bool_], *, title: str) -> str:
    """Two rows of bars on one axis: how the attacker scored what was trained on, and what was left out.

    The axis goes from the 1st to the 99th percentile; scores beyond count at its ends.
    """
    low, high = np.percentile(scores, [1, 99])
    edges = np.linspace(low, max(high, low + 1e-12), _BINS + 1)
    held = np.clip(scores, edges[0], edges[-1])
    rows = [
        ("used in training", DARK, np.histogram(held[trained], edges)[0]),
        ("left out of training", LIGHT, np.histogram(held[~trained], edges)[0]),
    ]
    highest = max(1, *(int(counts.max()) for _, _, counts in rows))
    step = WIDTH / _BINS
    drawing = Drawing(WIDTH, 2 * _STRIP + 16, title, identifier="scores", **PRINTED)
    for place, (name, colour, counts) in enumerate(rows):
        base = place * _STRIP + 22 + _BARS
        drawing.text(0, place * _STRIP + 15, f"{name}: {int(counts.sum())}", font_weight="bold")
        for number, count in enumerate(counts):
            if tall := _BARS * int(count) / highest:
                drawing.bar(number * step + 1, base - tall, step - 2, tall, fill=colour)
        drawing.axis(base)
    y = 2 * _STRIP + 8
    drawing.text(0, y, "← the attacker thinks: left out", font_size=12)
    drawing.text(WIDTH, y, "the attacker thinks: used →", font_size=12, text_anchor="end")
    return drawing.end()


def epsilon_bars(bars: Sequence[tuple[str, float, bool]], *, title: str) -> str:
    """One horizontal bar for each (words, ε, dark), all on one scale; an infinite one has an arrow's end."""
    finite = [epsilon for _, epsilon, _ in bars if np.isfinite(epsilon)]
    scale = (WIDTH - 20) / max(*finite, 0.1, 1e-9)
    drawing = Drawing(WIDTH, _BAR * len(bars), title, identifier="epsilon", **PRINTED)
    for place, (words, epsilon, dark) in enumerate(bars):
        top = place * _BAR
        wide = epsilon * scale if np.isfinite(epsilon) else WIDTH - 20
        drawing.text(0, top + 14, words)
        drawing.bar(0, top + 20, max(wide, 1.5), 12, fill=DARK if dark else LIGHT)
        if not np.isfinite(epsilon):
            drawing.element("path", d=f"M{WIDTH - 20} {top + 17}l18 9l-18 9z", fill=LIGHT)
    return drawing.end()


def profiles(truth: Sequence[float], found: Sequence[float], *, title: str) -> str:
    """A brightness profile as a broad light line, and on it, dark and dashed, the one that was worked out."""
    low, high = min(*truth, *found), max(*truth, *found)
    span = max(high - low, 1e-9)

    def points(values: Sequence[float]) -> list[tuple[float, float]]:
        step = WIDTH / max(len(values) - 1, 1)
        return [(n * step, 130 - 100 * (value - low) / span) for n, value in enumerate(values)]

    drawing = Drawing(WIDTH, 164, title, identifier="profile", **PRINTED)
    drawing.path(points(truth), fill="none", stroke=LIGHT, stroke_width=9)
    drawing.path(points(found), fill="none", stroke=DARK, stroke_width=2, stroke_dasharray="7 4")
    drawing.axis(140)
    drawing.text(0, 14, "broad, light: the image itself; dashed, dark: worked out from two identifiers")
    drawing.text(0, 157, "← left edge of the image", font_size=12)
    drawing.text(WIDTH, 157, "right edge →", font_size=12, text_anchor="end")
    return drawing.end()
