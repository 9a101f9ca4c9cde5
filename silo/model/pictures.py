"""An evaluation's pictures, as SVG in the report's manner: the reliability diagram, and test images beside what of them
spoke for the model's answer. Nothing depends on colour: what did not speak for it is faded."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape

import numpy as np
import numpy.typing as npt
from PIL import Image

from medsilo.algorithms.datasets import Images
from medsilo.privacy.pages.plots import DARK, INK, LIGHT, LINE, WIDTH
from medsilo.silo.model.evaluation import Sample
from medsilo.silo.model.performance import Calibration

_SIDE = 300
_LEFT, _TOP = 60, 16
_IMAGE = 92
_PAIR = 2 * _IMAGE + 6
_IN_A_ROW = 3
_ROW = _IMAGE + 66
_LETTERS = 28
_FADED = 0.15
_GREY = 128


def reliability(calibration: Calibration, *, title: str) -> str:
    """Bars: the share that is right, of the images whose confidence lies in the bar's bin; the dashed diagonal is
    where it would be if probabilities could be taken at their word. Below, lighter: how many images there are."""

    def x(value: float) -> float:
        return _LEFT + _SIDE * value

    def y(value: float) -> float:
        return _TOP + _SIDE * (1 - value)

    strip = _TOP + _SIDE + 44
    most = max(one.count for one in calibration.bins)
    parts = [f'<rect x="{x(0)}" y="{y(1)}" width="{_SIDE}" height="{_SIDE}" fill="none" stroke="{LINE}"/>']
    for one in calibration.bins:
        wide = _SIDE * (one.high - one.low) - 2
        if one.accuracy is not None:
            parts.append(
                f'<rect x="{x(one.low) + 1:.1f}" y="{y(one.accuracy):.1f}" width="{wide:.1f}" '
                f'height="{max(_SIDE * one.accuracy, 1.5):.1f}" fill="{DARK}"/>'
            )
        tall = 40 * one.count / most
        parts.append(
            f'<rect x="{x(one.low) + 1:.1f}" y="{strip + 40 - tall:.1f}" width="{wide:.1f}" height="{tall:.1f}" '
            f'fill="{LIGHT}"/>'
        )
    parts.append(
        f'<line x1="{x(0)}" y1="{y(0)}" x2="{x(1)}" y2="{y(1)}" stroke="{INK}" stroke-width="1.5" '
        'stroke-dasharray="6 4"/>'
    )
    for mark in (0, 0.5, 1):
        parts.append(f'<text x="{x(mark):.0f}" y="{_TOP + _SIDE + 16}" text-anchor="middle">{100 * mark:.0f} %</text>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(mark) + 5:.0f}" text-anchor="end">{100 * mark:.0f} %</text>')
    parts.append(f'<text x="{x(0)}" y="{_TOP + _SIDE + 34}" font-size="12">how sure the model says it is →</text>')
    beside = _LEFT + _SIDE + 14
    for line, text in enumerate(("dark bars: how often it is right", "dashed: how often it should be")):
        parts.append(f'<text x="{beside}" y="{_TOP + 14 + 18 * line}" font-size="12">{text}</text>')
    parts.append(f'<text x="{beside}" y="{strip + 24}" font-size="12">light bars: how many images</text>')
    parts.append(f'<text x="{beside}" y="{strip + 40}" font-size="12">(highest: {most})</text>')
    return _svg("reliability", title, strip + 44, parts)


def pairs(samples: Sequence[Sample], names: Sequence[str], *, identifier: str, title: str) -> str:
    """Images with, beside each, the same image faded where nothing in it spoke for the answer. ``names``: of the
    classes. ``identifier``: names the picture's title; unique in a page."""
    parts = []
    for place, sample in enumerate(samples):
        left, top = (place % _IN_A_ROW) * (WIDTH - _PAIR) / (_IN_A_ROW - 1), place // _IN_A_ROW * _ROW
        parts.append(_image(sample.image, left, top))
        if sample.saliency is not None:
            parts.append(_image(spotlight(sample.image, sample.saliency), left + _IMAGE + 6, top))
        for line, text in enumerate(
            (
                f"image {sample.number}, {100 * sample.probability:.1f} % sure",
                f"says {names[sample.said]}",
                f"is {names[sample.truth]}",
            )
        ):
            short = text if len(text) <= _LETTERS else f"{text[: _LETTERS - 1]}…"
            y = top + _IMAGE + 16 + 16 * line
            parts.append(f'<text x="{left:.1f}" y="{y}" font-size="12">{escape(short)}</text>')
    rows = -(-len(samples) // _IN_A_ROW)
    return _svg(identifier, title, rows * _ROW, parts)


def spotlight(image: Images, saliency: npt.NDArray[np.float32]) -> Images:
    """uint8 [H, W, C] as it is where ``saliency`` (float32 [H, W], 0 to 1) is 1, and almost grey where it is 0."""
    seen = _FADED + (1 - _FADED) * saliency[:, :, None].astype(np.float64)
    faded: Images = np.rint(seen * image + (1 - seen) * _GREY).astype(np.uint8)
    return faded


def whereabouts(saliency: npt.NDArray[np.float32]) -> str:
    """In which ninth of the image a map is highest, in words."""
    if not saliency.any():
        return "nowhere"
    row, column = np.unravel_index(int(saliency.argmax()), saliency.shape)
    vertical = ("upper", "", "lower")[int(3 * row / saliency.shape[0])]
    horizontal = ("left", "", "right")[int(3 * column / saliency.shape[1])]
    if vertical and horizontal:
        return f"{vertical} {horizontal}"
    if vertical:
        return f"{vertical} middle"
    return f"middle {horizontal}" if horizontal else "centre"


def _image(pixels: Images, left: float, top: float) -> str:
    """Embedded as a PNG: the page needs no other file."""
    file = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(file, format="PNG")
    data = base64.b64encode(file.getvalue()).decode()
    return (
        f'<image x="{left:.1f}" y="{top}" width="{_IMAGE}" height="{_IMAGE}" style="image-rendering: pixelated" '
        f'href="data:image/png;base64,{data}"/>'
    )


def _svg(identifier: str, title: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-labelledby="{identifier}-title" font-family="Libertinus Serif, sans-serif" font-size="13" '
        f'fill="{INK}"><title id="{identifier}-title">{escape(title)}</title>{"".join(parts)}</svg>'
    )
