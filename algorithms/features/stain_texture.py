"""Stain and texture: 122 numbers and a constant, made for small H&E images with the thing to be named in the middle.

Pixels are read as the 256 levels that they are, and every sum is one of whole numbers below 2⁵³: in whatever order it
is added up, and beside whatever other images, an image has the same features to the last bit.

Optical density: Beer and Lambert's law, -log₁₀((level + 1) / 256), through the inverse of three stain vectors:
haematoxylin and eosin of Ruifrok and Johnston, "Quantification of histochemical staining by color deconvolution", Anal.
Quant. Cytol. Histol. 23 (2001) 291-299, and the residual at right angles to both.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from medsilo.algorithms.features.extractor import FixedExtractor
from medsilo.algorithms.features.public_constants import (
    STAIN_TEXTURE_DEVIATIONS,
    STAIN_TEXTURE_DIRECTIONS,
    STAIN_TEXTURE_MEANS,
)

HAEMATOXYLIN, EOSIN = (0.65, 0.70, 0.29), (0.07, 0.99, 0.11)
"""Optical density in red, green and blue (Ruifrok and Johnston 2001)."""

STEPS = (1, 2, 4)
QUANTILES = (0.02, 0.10, 0.25, 0.40, 0.60, 0.75, 0.90, 0.98)
RINGS = 6
NAMES: tuple[str, ...]
"""What each number is, in order; the constant apart."""

_LEVEL = 1024
"""Colour, density and gradients are rounded to multiples of 1/1024."""

_FINE = 1 << 16
LIMIT = 3.0
"""How many standard deviations a feature counts at most."""

_MAPS = ("red", "green", "blue", "haematoxylin", "eosin", "residual")
_TEXTURES = ("haematoxylin", "grey")


def _names() -> tuple[str, ...]:
    windows = [f"{map_} {of} {window}" for map_ in _MAPS for window in _WINDOWS for of in ("mean", "sd")]
    rings = [f"{map_} {of} ring {ring}" for map_ in _TEXTURES for ring in range(RINGS) for of in ("mean", "sd")]
    kinds = ("across", "down", "gradient mean", "gradient sd", "gradient centre")
    steps = [f"{map_} step {step} {kind}" for step in STEPS for map_ in _TEXTURES for kind in kinds]
    quantiles = [
        f"{map_} quantile {q} {where}" for where in ("whole", "centre") for map_ in _TEXTURES for q in QUANTILES
    ]
    return (*windows, *rings, *steps, *quantiles)


_WINDOWS = {"whole": 1.0, "middle": 0.64, "centre": 0.36}
"""The share of height and width that each window takes."""

NAMES = _names()


def unmixing() -> Tensor:
    """float64 ``[3, 3]``: the amounts of haematoxylin, eosin and residual in an optical density are its product with
    this. Stain vectors have length 1."""
    haematoxylin, eosin = (np.array(vector) / np.linalg.norm(vector) for vector in (HAEMATOXYLIN, EOSIN))
    residual = np.cross(haematoxylin, eosin)
    stains = np.stack([haematoxylin, eosin, residual / np.linalg.norm(residual)])
    return torch.from_numpy(np.round(np.linalg.inv(stains), 9))


def densities() -> Tensor:
    """float64 ``[256]``: the optical density of each level of a pixel."""
    return torch.tensor([-math.log10((level + 1) / 256) for level in range(256)], dtype=torch.float64)


class StainTexture(FixedExtractor):
    """The features of one image: ``NAMES``, each less its mean and divided by its standard deviation over the public
    tiles (``public_constants``), cut to ±3, together scaled to norm 1; and a last number, 1. So no image's are longer
    than √2, up to float32's rounding."""

    definition = "stain-texture 1"
    features = len(NAMES) + 1
    bound = math.sqrt(2) * (1 + 1e-6)

    _unmixing: Tensor
    _densities: Tensor
    _means: Tensor
    _deviations: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name, numbers in {
            "_unmixing": unmixing(),
            "_densities": densities(),
            "_means": torch.tensor(STAIN_TEXTURE_MEANS, dtype=torch.float64),
            "_deviations": torch.tensor(STAIN_TEXTURE_DEVIATIONS, dtype=torch.float64),
        }.items():
            self.register_buffer(name, numbers, persistent=False)

    def of(self, images: Tensor) -> Tensor:
        return _with_constant(self.whole(images))

    def whole(self, images: Tensor) -> Tensor:
        """float64 ``[n, 122]``: the features centred, scaled and cut, in whole numbers of 1/65,536."""
        standard = ((self.measured(images) - self._means) / self._deviations).clamp(-LIMIT, LIMIT)
        return (standard * _FINE).round()

    def measured(self, images: Tensor) -> Tensor:
        """float64 ``[n, 122]``: the features of RGB images ``[n, 3, H, W]`` in [-1, 1] as they are measured: colours
        from 0 to 1, stains as optical densities."""
        height, width = images.shape[2:]
        levels = ((images.double() + 1) * 127.5).round().clamp(0, 255)
        red, green, blue = levels.unbind(1)
        density = self._densities[levels.long()]
        # Term by term: a matrix product may add up in another order in another batch.
        r, g, b = density.unbind(1)
        stains = [r * column[0] + g * column[1] + b * column[2] for column in self._unmixing.T]
        grey = (0.299 * red + 0.587 * green + 0.114 * blue) / 255
        maps = torch.stack([red / 255, green / 255, blue / 255, *stains, grey], dim=1)
        maps = (maps * _LEVEL).round()
        textures = maps[:, [3, 6]]
        found = _moments(maps[:, :6], _windows(height, width, maps))
        found += _moments(textures, _rings(height, width, maps))
        for step in STEPS:
            found.append(_gradients(textures, step))
        for margin in (1.0, _WINDOWS["centre"]):
            found.append(_quantiles(_middle(textures, margin)))
        return torch.cat([part.flatten(1) for part in found], dim=1)


class StainDirections(StainTexture):
    """``StainTexture`` along the 24 principal directions that its features have over the public tiles, each widened
    half-way to the spread of the first, together scaled to norm 1.

    With a fifth of the numbers it says less, and it has no constant: there half of what a unit may count would say no
    more than which class is frequent. Where units are few, patients say, it is the better one under noise
    (docs/results/coloncells-shared-noise.md). No image's features are longer than 1, up to float32's rounding.
    """

    definition = "stain-directions 2"
    features = len(STAIN_TEXTURE_DIRECTIONS) // len(NAMES)
    bound = 1 + 1e-6

    _directions: Tensor

    def __init__(self) -> None:
        super().__init__()
        rows = torch.tensor(STAIN_TEXTURE_DIRECTIONS, dtype=torch.float64).reshape(-1, len(NAMES))
        self.register_buffer("_directions", (rows * _FINE).round(), persistent=False)

    def of(self, images: Tensor) -> Tensor:
        # Sums of whole numbers below 2⁵³, as everywhere here; 2⁻²⁰ leaves their squares below that too.
        along = (self.whole(images) @ self._directions.T / (1 << 20)).round()
        return _of_norm_1(along).float()


def _with_constant(whole: Tensor) -> Tensor:
    """float32 ``[n, F + 1]``: whole numbers ``[n, F]`` scaled to norm 1, and a 1."""
    scaled = _of_norm_1(whole)
    return torch.cat([scaled, torch.ones_like(scaled[:, :1])], dim=1).float()


def _of_norm_1(whole: Tensor) -> Tensor:
    """float64 ``[n, F]``: whole numbers scaled to norm 1; zeros stay."""
    length = whole.square().sum(dim=1, keepdim=True).sqrt()
    return whole / length.clamp(min=1)


def _moments(maps: Tensor, regions: Tensor) -> list[Tensor]:
    """Mean and standard deviation ``[n, M, R, 2]`` of maps ``[n, M, H, W]`` in regions ``[R, H·W]`` of 0 and 1."""
    flat = maps.flatten(2)
    count = regions.sum(dim=1)
    total, squares = flat @ regions.T, flat.square() @ regions.T
    mean = total / count
    variance = ((squares * count - total.square()) / count.square()).clamp(min=0)
    return [torch.stack([mean, variance.sqrt()], dim=3) / _LEVEL]


def _gradients(maps: Tensor, step: int) -> Tensor:
    """``[n, M, 5]``: mean absolute differences across and down, and the gradient's mean, deviation, and mean in the
    middle."""
    across = maps[:, :, :-step, step:] - maps[:, :, :-step, :-step]
    down = maps[:, :, step:, :-step] - maps[:, :, :-step, :-step]
    gradient = (across.square() + down.square()).sqrt().round()
    size = gradient.shape[2:]
    whole = _moments(gradient, torch.ones(1, size[0] * size[1], dtype=maps.dtype, device=maps.device))[0][:, :, 0]
    means = [part.sum(dim=(2, 3)) / (part.shape[2] * part.shape[3]) / _LEVEL for part in (across.abs(), down.abs())]
    centre = _middle(gradient, _WINDOWS["centre"])
    middle = centre.sum(dim=(2, 3)) / (centre.shape[2] * centre.shape[3]) / _LEVEL
    return torch.stack([*means, whole[..., 0], whole[..., 1], middle], dim=2)


def _quantiles(maps: Tensor) -> Tensor:
    """``[n, M, 8]``: of each map the value at each quantile's nearest rank."""
    ordered = maps.flatten(2).sort(dim=2).values
    last = ordered.shape[2] - 1
    return ordered[:, :, [round(q * last) for q in QUANTILES]] / _LEVEL


def _span(size: int, share: float) -> slice:
    margin = round(size * (1 - share) / 2)
    return slice(margin, size - margin)


def _middle(maps: Tensor, share: float) -> Tensor:
    return maps[:, :, _span(maps.shape[2], share), _span(maps.shape[3], share)]


def _windows(height: int, width: int, like: Tensor) -> Tensor:
    found = torch.zeros(len(_WINDOWS), height, width, dtype=like.dtype, device=like.device)
    for one, share in zip(found, _WINDOWS.values(), strict=True):
        one[_span(height, share), _span(width, share)] = 1
    return found.flatten(1)


def _rings(height: int, width: int, like: Tensor) -> Tensor:
    """Rings of equal width around the middle, as far as the nearest edge (ellipses, where an image is no square);
    corners are in none."""
    down, across = (_from_middle(size) for size in (height, width))
    radius = (down[:, None] ** 2 + across[None, :] ** 2) ** 0.5
    found = [(radius >= ring / RINGS) & (radius < (ring + 1) / RINGS) for ring in range(RINGS)]
    return torch.from_numpy(np.stack(found)).to(like.device, like.dtype).flatten(1)


def _from_middle(size: int) -> np.ndarray:
    return np.abs(np.arange(size) * 2 - (size - 1)) / size
