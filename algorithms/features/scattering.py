"""A two-dimensional scattering transform: edges of two sizes and eight directions, and edges among these.

Bruna and Mallat, "Invariant Scattering Convolution Networks", IEEE TPAMI 35 (2013) 1872-1886: orders 0 to 2 of
S x = (x ⋆ φ, |x ⋆ ψ₁| ⋆ φ, ||x ⋆ ψ₁| ⋆ ψ₂| ⋆ φ), with Morlet wavelets of scales 2⁰ … 2ᴶ⁻¹ and L directions, and ψ₂ of
larger scale than ψ₁. All convolutions are periodic, on the image continued by its mirror.

Each of the 81 numbers of a colour is averaged over each quarter of the image: 3 · 81 · 4 = 972 and a constant.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from medsilo.algorithms.features.extractor import FixedExtractor
from medsilo.algorithms.features.public_constants import SCATTERING_DEVIATIONS, SCATTERING_MEANS

SCALES, DIRECTIONS = 2, 8
PATHS = 1 + SCALES * DIRECTIONS + DIRECTIONS**2 * SCALES * (SCALES - 1) // 2
"""1 of order 0, 16 of order 1, 64 of order 2."""

_WIDTH, _FREQUENCY, _SLANT = 0.8, 3 * math.pi / 4, 4 / DIRECTIONS
_FLOOR = 1e-2
_LIMIT = 3.0
_MARGIN = 1 << SCALES
_Array = npt.NDArray[np.float64]


def low_pass(height: int, width: int) -> _Array:
    """φ's Fourier transform on a grid, float64 ``[height, width]``: a Gaussian of sum 1 and width 0.8 · 2ᴶ⁻¹."""
    envelope = _envelope(height, width, _WIDTH * 2 ** (SCALES - 1), angle=0.0, slant=1.0, frequency=0.0)
    return np.fft.fft2(envelope / envelope.sum()).real


def wavelets(height: int, width: int) -> _Array:
    """ψ's Fourier transforms on a grid, float64 ``[J, L, height, width]``: Morlet wavelets of mean 0, all scaled by one
    number, as large as can be with |φ(ω)|² + ½ Σ (|ψ(ω)|² + |ψ(-ω)|²) ≤ 1 at every frequency (Bruna and Mallat,
    equation 6 with α ≤ 1): so the transform brings no two images further apart."""
    found = np.zeros((SCALES, DIRECTIONS, height, width))
    for scale in range(SCALES):
        for direction in range(DIRECTIONS):
            found[scale, direction] = _morlet(height, width, scale, math.pi * direction / DIRECTIONS)
    energy = (found**2).sum(axis=(0, 1))
    energy = (energy + np.roll(energy[::-1, ::-1], 1, axis=(0, 1))) / 2
    free = 1 - low_pass(height, width) ** 2
    carried = energy > 1e-12
    scaled: _Array = found * math.sqrt(float(np.min(free[carried] / energy[carried])))
    return scaled


def _morlet(height: int, width: int, scale: int, angle: float) -> _Array:
    form = {"height": height, "width": width, "deviation": _WIDTH * 2**scale, "angle": angle, "slant": _SLANT}
    wave = _envelope(**form, frequency=_FREQUENCY / 2**scale)
    envelope = _envelope(**form, frequency=0.0)
    return np.fft.fft2(wave - envelope * (wave.sum() / envelope.sum())).real


def _envelope(
    height: int, width: int, deviation: float, angle: float, slant: float, frequency: float
) -> npt.NDArray[np.complex128]:
    """A Gaussian, ``slant`` times as steep along its waves' fronts, times a wave, made periodic; its middle is at
    (0, 0)."""
    turns = range(-2, 3)
    total = np.zeros((height, width), dtype=np.complex128)
    for down in turns:
        for across in turns:
            y, x = np.mgrid[:height, :width].astype(np.float64)
            y, x = y + down * height, x + across * width
            along = math.cos(angle) * x + math.sin(angle) * y
            beside = -math.sin(angle) * x + math.cos(angle) * y
            total += np.exp(-(along**2 + (slant * beside) ** 2) / (2 * deviation**2) + 1j * frequency * along)
    return total


@functools.lru_cache(maxsize=4)
def _filters(height: int, width: int) -> tuple[Tensor, Tensor]:
    """The wavelets, float64 ``[J, L, height, width]``, and what averages over quarters, float64
    ``[height · width, 4]``: φ, then the mean over each quarter of the image without its margin."""
    quarters = np.zeros((4, height, width))
    for place, (down, across) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        quarters[place, _half(height, down), _half(width, across)] = 1
    quarters /= quarters.sum(axis=(1, 2), keepdims=True)
    # φ is the same from all sides, so it may be moved from the image to the weights.
    weights = np.fft.ifft2(np.fft.fft2(quarters) * low_pass(height, width)).real
    return torch.from_numpy(wavelets(height, width)), torch.from_numpy(weights).flatten(1).T.contiguous()


def _half(size: int, second: int) -> slice:
    """Of an odd number of pixels the one in the middle is in both halves."""
    inner = size - 2 * _MARGIN
    return (
        slice(size - _MARGIN - (inner + 1) // 2, size - _MARGIN)
        if second
        else slice(_MARGIN, _MARGIN + (inner + 1) // 2)
    )


def propagate(images: Tensor) -> Tensor:
    """x, |x ⋆ ψ₁| and ||x ⋆ ψ₁| ⋆ ψ₂| of images ``[n, C, H, W]``, ``[n, C, 81, H, W]`` in the images' own precision:
    the transform before its last average. In each order the scales come one after the other, in each the directions of
    ψ₁, for each of these the directions of ψ₂."""
    waves = _filters(*images.shape[2:])[0].to(images)
    number, colours, height, width = images.shape
    first = _edges(images, waves.flatten(0, 1))
    orders = [images.unsqueeze(2), first]
    for scale in range(SCALES):
        of_scale = first[:, :, scale * DIRECTIONS : (scale + 1) * DIRECTIONS].flatten(1, 2)
        for larger in range(scale + 1, SCALES):
            orders.append(_edges(of_scale, waves[larger]).reshape(number, colours, -1, height, width))
    return torch.cat(orders, dim=2)


def _edges(images: Tensor, waves: Tensor) -> Tensor:
    """|x ⋆ ψ|, ``[n, C, K, H, W]``, of images ``[n, C, H, W]`` and K wavelets."""
    # As pairs of real numbers between the transforms: ONNX has no complex ones.
    spectra = torch.view_as_real(torch.fft.fft2(images)).unsqueeze(2) * waves.unsqueeze(-1)
    answers = torch.view_as_real(torch.fft.ifft2(torch.view_as_complex(spectra)))
    return answers.square().sum(dim=-1).sqrt()


class Scattering(FixedExtractor):
    """The features of one image: the logarithm of each average (and 0.01) less its mean and divided by its standard
    deviation over the public tiles (``public_constants``), cut to ±3, together scaled to norm 1; and a last number, 1.
    So no image's are longer than √2, up to float32's rounding."""

    definition = "scattering 1"
    features = 3 * PATHS * 4 + 1
    bound = math.sqrt(2) * (1 + 1e-6)
    pixels_at_once = 1 << 15

    _means: Tensor
    _deviations: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("_means", torch.tensor(SCATTERING_MEANS), persistent=False)
        self.register_buffer("_deviations", torch.tensor(SCATTERING_DEVIATIONS), persistent=False)

    def of(self, images: Tensor) -> Tensor:
        found = self.measured(images.float())
        standard = (found - self._means[:, None]) / self._deviations[:, None]
        whole = standard.clamp(-_LIMIT, _LIMIT).flatten(1)
        length = torch.linalg.vector_norm(whole, dim=1, keepdim=True)
        return torch.cat([whole / length.clamp(min=1e-6), torch.ones_like(length)], dim=1)

    def measured(self, images: Tensor) -> Tensor:
        """``[n, 243, 4]``, in the images' own precision: log(0.01 + the average over each quarter) of RGB images
        ``[n, 3, H, W]`` in [-1, 1], taken as colours from 0 to 1; the 81 numbers of red, then green, then blue."""
        framed = F.pad((images + 1) / 2, (_MARGIN,) * 4, mode="reflect")
        weights = _filters(*framed.shape[2:])[1].to(images)
        averages = propagate(framed).flatten(1, 2).flatten(2) @ weights
        return torch.log(averages.clamp(min=0) + _FLOOR)
