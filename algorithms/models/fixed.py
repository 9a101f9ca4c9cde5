"""A network of which only the last layer is trained: a fixed extractor, then a linear layer."""

from __future__ import annotations

from torch import Tensor, nn

from medsilo.algorithms.features import FixedExtractor


class OnFixedFeatures(nn.Module):
    """Softmax regression on fixed features. Its parameters are ``classifier.weight``, float32 ``[classes, F]``, zero at
    first, and nothing else; the features' constant stands for a bias."""

    def __init__(self, extractor: FixedExtractor, classes: int) -> None:
        super().__init__()
        self.extractor = extractor
        self.classifier = nn.Linear(extractor.features, classes, bias=False)
        nn.init.zeros_(self.classifier.weight)

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``[n, classes]`` of images ``[n, C, H, W]``, or of features ``[n, F]`` that the extractor gave."""
        features = images if images.ndim == 2 else self.extractor(images)
        logits: Tensor = self.classifier(features)
        return logits
