"""An evaluation's pictures, as SVG in the report's manner: the reliability diagram, and test images beside what of them
spoke for the model's answer. Nothing depends on colour: what did not speak for it is faded."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image

from medsilo.algorithms.datasets import Images
from medsilo.privacy.pages.svg import DARK, INK, LIGHT, LINE, PRINTED, WIDTH, Drawing
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
    drawing = Drawing(WIDTH, strip + 44, title, identifier="reliability", **PRINTED)
    drawing.bar(x(0), y(1), _SIDE, _SIDE, fill="none", stroke=LINE)
    for one in calibration.bins:
        wide = _SIDE * (one.high - one.low) - 2
        if one.accuracy is not None:
            drawing.bar(x(one.low) + 1, y(one.accuracy), wide, max(_SIDE * one.accuracy, 1.5), fill=DARK)
        tall = 40 * one.count / most
        drawing.bar(x(one.low) + 1, strip + 40 - tall, wide, tall, fill=LIGHT)
    drawing.line(x(0), y(0), x(1), y(1), stroke=INK, stroke_width=1.5, stroke_dasharray="6 4")
    for mark in (0, 0.5, 1):
        drawing.text(x(mark), _TOP + _SIDE + 16, f"{100 * mark:.0f} %", text_anchor="middle")
        drawing.text(_LEFT - 6, y(mark) + 5, f"{100 * mark:.0f} %", text_anchor="end")
    drawing.text(x(0), _TOP + _SIDE + 34, "how sure the model says it is →", font_size=12)
    beside = _LEFT + _SIDE + 14
    for line, text in enumerate(("dark bars: how often it is right", "dashed: how often it should be")):
        drawing.text(beside, _TOP + 14 + 18 * line, text, font_size=12)
    drawing.text(beside, strip + 24, "light bars: how many images", font_size=12)
    drawing.text(beside, strip + 40, f"(highest: {most})", font_size=12)
    return drawing.end()


def pairs(samples: Sequence[Sample], names: Sequence[str], *, identifier: str, title: str) -> str:
    """Images with, beside each, the same image faded where nothing in it spoke for the answer. ``names``: of the
    classes. ``identifier``: names the picture's title; unique in a page."""
    rows = -(-len(samples) // _IN_A_ROW)
    drawing = Drawing(WIDTH, rows * _ROW, title, identifier=identifier, **PRINTED)
    for place, sample in enumerate(samples):
        left, top = (place % _IN_A_ROW) * (WIDTH - _PAIR) / (_IN_A_ROW - 1), place // _IN_A_ROW * _ROW
        _image(drawing, sample.image, left, top)
        if sample.saliency is not None:
            _image(drawing, spotlight(sample.image, sample.saliency), left + _IMAGE + 6, top)
        for line, text in enumerate(
            (
                f"image {sample.number}, {100 * sample.probability:.1f} % sure",
                f"says {names[sample.said]}",
                f"is {names[sample.truth]}",
            )
        ):
            short = text if len(text) <= _LETTERS else f"{text[: _LETTERS - 1]}…"
            drawing.text(left, top + _IMAGE + 16 + 16 * line, short, font_size=12)
    return drawing.end()


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


def _image(drawing: Drawing, pixels: Images, left: float, top: float) -> None:
    """Embedded as a PNG: the page needs no other file."""
    file = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(file, format="PNG")
    data = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    pixelated = "image-rendering: pixelated"
    drawing.element("image", x=left, y=top, width=_IMAGE, height=_IMAGE, style=pixelated, href=data)
