"""Fixed extractors: features of one image, without anything to download or to train."""

from medsilo.algorithms.features.extractor import FixedExtractor
from medsilo.algorithms.features.scattering import Scattering
from medsilo.algorithms.features.stain_texture import StainTexture

__all__ = ["FixedExtractor", "Scattering", "StainTexture"]
