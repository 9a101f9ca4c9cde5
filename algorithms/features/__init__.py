"""Fixed extractors: features of one image, without anything to train."""

from medsilo.algorithms.features.backbone import Backbone
from medsilo.algorithms.features.extractor import Extractor, FixedExtractor
from medsilo.algorithms.features.scattering import Scattering
from medsilo.algorithms.features.stain_texture import StainDirections, StainTexture

__all__ = ["Backbone", "Extractor", "FixedExtractor", "Scattering", "StainDirections", "StainTexture"]
