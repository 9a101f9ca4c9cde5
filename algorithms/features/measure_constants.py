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
from medsilo.algorithms.features.stain_texture import StainTexture


def module(tiles: Path) -> str:
    """The module's text."""
    with np.load(tiles, allow_pickle=False) as file:
        pixels = file["images_28"]
    images = to_tensor(pixels).double()
    scattered = Scattering().measured(images).transpose(1, 2).flatten(0, 1)
    parts = [
        '"""What centres and scales the fixed extractors: means and standard deviations over public images alone.\n',
        f"{len(pixels)} tiles of human colorectal tissue, 28×28 RGB, of NCT-CRC-HE-100K and CRC-VAL-HE-7K (Kather, "
        "Halama and Marx,\n2018, https://doi.org/10.5281/zenodo.1214456, CC BY 4.0), made by ``measure_constants``. "
        "SHA-256 of their pixels (uint8,\nrow-major):\n"
        f"{hashlib.sha256(np.ascontiguousarray(pixels).tobytes()).hexdigest()}\n",
        "Scattering's are over the four quarters of each tile as well.",
        '"""\n\n',
        "def _numbers(text: str) -> tuple[float, ...]:\n    return tuple(map(float, text.split()))\n\n",
    ]
    for name, numbers in {"STAIN_TEXTURE": StainTexture().measured(images), "SCATTERING": scattered}.items():
        parts.append(_lines(f"{name}_MEANS", numbers.double().mean(dim=0)))
        parts.append(_lines(f"{name}_DEVIATIONS", numbers.double().std(dim=0)))
    return "\n".join([*parts, ""])


def _lines(name: str, numbers: Tensor) -> str:
    text = textwrap.fill(" ".join(f"{number:.6g}" for number in numbers.tolist()), 110)
    return f'{name} = _numbers("""\n{text}\n""")'


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(module(Path(sys.argv[1])))
