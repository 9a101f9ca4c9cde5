"""A rehearsal's pictures, as SVG in the report's manner: dark is what was trained on or is proven, light the rest, and
words say which is which."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np
import numpy.typing as npt

from medsilo.privacy.pages.plots import DARK, INK, LIGHT, LINE, WIDTH

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
    parts = []
    for place, (name, colour, counts) in enumerate(rows):
        base = place * _STRIP + 22 + _BARS
        text = f"{name}: {int(counts.sum())}"
        parts.append(f'<text x="0" y="{place * _STRIP + 15}" font-weight="bold">{escape(text)}</text>')
        parts += [
            f'<rect x="{number * step + 1:.1f}" y="{base - tall:.1f}" width="{step - 2:.1f}" height="{tall:.1f}" '
            f'fill="{colour}"/>'
            for number, count in enumerate(counts)
            if (tall := _BARS * int(count) / highest)
        ]
        parts.append(_line(0, base, WIDTH, base))
    y = 2 * _STRIP + 8
    parts.append(f'<text x="0" y="{y}" font-size="12">← the attacker thinks: left out</text>')
    parts.append(f'<text x="{WIDTH}" y="{y}" font-size="12" text-anchor="end">the attacker thinks: used →</text>')
    return _svg("scores", title, 2 * _STRIP + 16, parts)


def epsilon_bars(bars: Sequence[tuple[str, float, bool]], *, title: str) -> str:
    """One horizontal bar for each (words, ε, dark), all on one scale; an infinite one has an arrow's end."""
    finite = [epsilon for _, epsilon, _ in bars if np.isfinite(epsilon)]
    scale = (WIDTH - 20) / max(*finite, 0.1, 1e-9)
    parts = []
    for place, (words, epsilon, dark) in enumerate(bars):
        top = place * _BAR
        wide = epsilon * scale if np.isfinite(epsilon) else WIDTH - 20
        parts.append(f'<text x="0" y="{top + 14}">{escape(words)}</text>')
        parts.append(
            f'<rect x="0" y="{top + 20}" width="{max(wide, 1.5):.1f}" height="12" fill="{DARK if dark else LIGHT}"/>'
        )
        if not np.isfinite(epsilon):
            parts.append(f'<path d="M{WIDTH - 20} {top + 17}l18 9l-18 9z" fill="{LIGHT}"/>')
    return _svg("epsilon", title, _BAR * len(bars), parts)


def profiles(truth: Sequence[float], found: Sequence[float], *, title: str) -> str:
    """A brightness profile as a broad light line, and on it, dark and dashed, the one that was worked out."""
    low, high = min(*truth, *found), max(*truth, *found)
    span = max(high - low, 1e-9)

    def path(values: Sequence[float]) -> str:
        step = WIDTH / max(len(values) - 1, 1)
        return " ".join(f"{n * step:.1f},{130 - 100 * (value - low) / span:.1f}" for n, value in enumerate(values))

    parts = [
        f'<polyline points="{path(truth)}" fill="none" stroke="{LIGHT}" stroke-width="9"/>',
        f'<polyline points="{path(found)}" fill="none" stroke="{DARK}" stroke-width="2" stroke-dasharray="7 4"/>',
        _line(0, 140, WIDTH, 140),
        '<text x="0" y="14">broad, light: the image itself; dashed, dark: worked out from two identifiers</text>',
        '<text x="0" y="157" font-size="12">← left edge of the image</text>',
        f'<text x="{WIDTH}" y="157" font-size="12" text-anchor="end">right edge →</text>',
    ]
    return _svg("profile", title, 164, parts)


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{LINE}" stroke-width="1"/>'


def _svg(identifier: str, title: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-labelledby="{identifier}-title" font-family="Libertinus Serif, sans-serif" font-size="13" '
        f'fill="{INK}"><title id="{identifier}-title">{escape(title)}</title>{"".join(parts)}</svg>'
    )
