"""Makes ``public_constants.py`` anew: ``python -m medsilo.algorithms.features.measure_constants TILES.npz > FILE``.

TILES.npz holds the tiles as ``images_28``, uint8 ``[n, 28, 28, 3]``.
"""

from __future__ import annotations

import hashlib
import sys
import textwrap
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from medsilo.algorithms.datasets import to_tensor
from medsilo.algorithms.features.scattering import Scattering
from medsilo.algorithms.features.stain_texture import LIMIT, StainTexture

DIRECTIONS = 24
"""How many of the features' principal directions are kept."""


def module(tiles: Path) -> str:
    """The module's text."""
    with np.load(tiles, allow_pickle=False) as file:
        pixels = file["images_28"]
    images = to_tensor(pixels).double()
    scattered = Scattering().measured(images).transpose(1, 2).flatten(0, 1)
    textures = StainTexture().measured(images)
    parts = [
        '"""What centres and scales the fixed extractors: means and standard deviations over public images alone.\n',
        f"{len(pixels)} tiles of human colorectal tissue, 28×28 RGB, of NCT-CRC-HE-100K and CRC-VAL-HE-7K (Kather, "
        "Halama and Marx,\n2018, https://doi.org/10.5281/zenodo.1214456, CC BY 4.0), made by ``measure_constants``. "
        "SHA-256 of their pixels (uint8,\nrow-major):\n"
        f"{hashlib.sha256(np.ascontiguousarray(pixels).tobytes()).hexdigest()}\n",
        "Scattering's are over the four quarters of each tile as well. Directions are a row of 122 numbers after "
        "another.",
        '"""\n\n',
        "def _numbers(text: str) -> tuple[float, ...]:\n    return tuple(map(float, text.split()))\n\n",
    ]
    for name, numbers in {"STAIN_TEXTURE": textures, "SCATTERING": scattered}.items():
        parts.append(_lines(f"{name}_MEANS", numbers.double().mean(dim=0)))
        parts.append(_lines(f"{name}_DEVIATIONS", numbers.double().std(dim=0)))
    parts.append(_lines("STAIN_TEXTURE_DIRECTIONS", directions(textures).flatten(), digits=4))
    return "\n".join([*parts, ""])


def directions(measured: Tensor) -> Tensor:
    """Principal directions of features ``[n, 122]``, made ready as ``StainTexture`` makes them: ``[24, 122]``.

    Eigenvectors of their second moments, the largest first, each times (λ₁/λᵢ)^¼: half-way to equal spread. The largest
    number of each is positive.
    """
    standard = ((measured - measured.mean(dim=0)) / measured.std(dim=0)).clamp(-LIMIT, LIMIT)
    units = standard / standard.norm(dim=1, keepdim=True)
    _, spreads, rows = torch.linalg.svd(units, full_matrices=False)
    rows, spreads = rows[:DIRECTIONS], spreads[:DIRECTIONS]
    largest = rows.gather(1, rows.abs().argmax(dim=1, keepdim=True))
    found: Tensor = rows * largest.sign() * (spreads[0] / spreads).sqrt().unsqueeze(1)
    return found


def _lines(name: str, numbers: Tensor, *, digits: int = 6) -> str:
    text = textwrap.fill(" ".join(f"{number:.{digits}g}" for number in numbers.tolist()), 110)
    return f'{name} = _numbers("""\n{text}\n""")'


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(module(Path(sys.argv[1])))
