"""One pass over whole vectors where PyTorch makes several; compiled by Numba."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]

# Threads wait for Python's lock as often as something is called: few calls that do much, without the lock.
compiled = numba.njit(nogil=True, error_model="numpy")


@compiled
def cut_strips(images: Floats, strips: Floats) -> None:
    """``images``: ``[H, C, W, B]``; ``strips``: ``[H, C, l, w, B]``."""
    rows, channels, columns, wide, batch = strips.shape
    for row in range(rows):
        for channel in range(channels):
            image, strip = images[row, channel].reshape(-1), strips[row, channel]
            for column in range(columns):
                part, there = strip[column].reshape(-1), image[column * batch : (column + wide) * batch]
                for at in range(wide * batch):
                    part[at] = there[at]


@compiled
def join_strips(strips: Floats, images: Floats) -> None:
    """The sum of what has become of each pixel; ``strips`` may have fewer rows than ``images``."""
    rows, channels, columns, wide, batch = strips.shape
    for row in range(rows):
        for channel in range(channels):
            image, strip = images[row, channel].reshape(-1), strips[row, channel]
            image[:] = 0
            for column in range(columns):
                part, there = strip[column].reshape(-1), image[column * batch : (column + wide) * batch]
                for at in range(wide * batch):
                    there[at] += part[at]


@compiled
def pool(results: Floats, bias: Floats, pooled: Floats, places: Floats) -> None:
    """``results``: ``[2H, O, 2W, B]``; ``pooled`` and ``places``, which of the four it was: ``[H, O, W, B]``.

    A NaN is kept, so that training that diverges is seen.
    """
    height, kernels, width, batch = pooled.shape
    for row in range(height):
        for kernel in range(kernels):
            # The bias moves all that a maximum is taken of alike, and ReLU of the maximum is the maximum of the ReLUs.
            add = bias[kernel]
            for column in range(width):
                a, b = results[2 * row, kernel, 2 * column], results[2 * row, kernel, 2 * column + 1]
                c, d = results[2 * row + 1, kernel, 2 * column], results[2 * row + 1, kernel, 2 * column + 1]
                found, place = pooled[row, kernel, column], places[row, kernel, column]
                for image in range(batch):
                    left = a[image] >= b[image] or a[image] != a[image]
                    upper, upper_place = (a[image], 0.0) if left else (b[image], 1.0)
                    left = c[image] >= d[image] or c[image] != c[image]
                    lower, lower_place = (c[image], 2.0) if left else (d[image], 3.0)
                    first = upper >= lower or upper != upper
                    place[image] = upper_place if first else lower_place
                    most = (upper if first else lower) + add
                    found[image] = np.float32(0) if most <= 0 else most


@compiled
def spread(gradient: Floats, pooled: Floats, places: Floats, results: Floats, bias: Floats) -> None:
    """``gradient``, ``pooled``, ``places``: ``[H, O, W, B]``; gives the gradient of ``results``, ``[2H, O, 2W, B]``,
    and of ``bias``, ``[O, B]``."""
    height, kernels, width, batch = pooled.shape
    bias[:] = 0
    own = np.empty_like(bias[0])
    for row in range(height):
        for kernel in range(kernels):
            total = bias[kernel]
            for column in range(width):
                found, given = pooled[row, kernel, column], gradient[row, kernel, column]
                place = places[row, kernel, column]
                for image in range(batch):
                    own[image] = np.float32(0) if found[image] <= 0 else given[image]
                for image in range(batch):
                    total[image] += own[image]
                # One loop for each place: a loop that writes to more arrays is not made one of vectors.
                for half in range(4):
                    to = results[2 * row + half // 2, kernel, 2 * column + half % 2]
                    for image in range(batch):
                        to[image] = own[image] if place[image] == half else np.float32(0)
