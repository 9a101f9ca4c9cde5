"""Grad-CAM (Selvaraju et al. 2017, equations 1 and 2): which part of an image spoke for a class.

The maps A_k are those of the last layer of the model that still has a place for each part of the image: the last,
in the order of the computation, whose output is of 4 × 4 places or more, pooling apart. Each is weighted with the mean,
over its places, of the gradient of the class's logit; what is negative in their sum is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

FEWEST_PLACES = 4
_POOLING = (
    *(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
    *(nn.LPPool2d, nn.FractionalMaxPool2d),
)


@dataclass(frozen=True)
class Saliency:
    """Maps of the same images' size, float32 [n, H, W]; each goes from 0 to 1, or is 0 where nothing spoke for the
    class. ``layer``: whose maps they were made from, of ``places`` (height, width)."""

    maps: npt.NDArray[np.float32]
    layer: str
    places: tuple[int, int]


def grad_cam(model: nn.Module, images: Tensor, classes: Tensor) -> Saliency | None:
    """``images``: float32 [n, C, H, W]; ``classes``: int64 [n], the class of each that is asked about.

    The model is left in evaluation mode. None for a model without such a layer, for example one without convolutions.
    """
    model.eval()
    layers: list[tuple[str, Tensor]] = []
    pooled: list[Tensor] = []

    def watch(name: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
        def keep(_module: nn.Module, _inputs: object, output: object) -> None:
            if not isinstance(output, Tensor) or output.ndim != 4:
                return
            if isinstance(module, _POOLING):
                pooled.append(output)
            # What holds a pooling at its end gives the very same tensor.
            elif min(output.shape[2:]) >= FEWEST_PLACES and not any(output is one for one in pooled):
                layers.append((name, output))

        return module.register_forward_hook(keep)

    hooks = [watch(name, module) for name, module in model.named_modules() if name]
    try:
        with torch.enable_grad():
            # Models with frozen layers have gradients too; a copy, as a first layer may work in place.
            logits = model(images.clone().requires_grad_(True) + 0.0)
    finally:
        for hook in hooks:
            hook.remove()
    if not layers:
        return None
    chosen = logits.gather(1, classes[:, None]).sum()
    gradients = torch.autograd.grad(chosen, [maps for _, maps in layers], allow_unused=True)
    used = [(*layer, gradient) for layer, gradient in zip(layers, gradients, strict=True) if gradient is not None]
    if not used:
        return None
    name, maps, gradient = used[-1]
    with torch.inference_mode():
        weights = gradient.mean(dim=(2, 3), keepdim=True)
        found = torch.relu((weights * maps).sum(dim=1, keepdim=True))
        size = (images.shape[2], images.shape[3])
        found = F.interpolate(found, size=size, mode="bilinear", align_corners=False)[:, 0]
        highest = found.amax(dim=(1, 2), keepdim=True)
        found = torch.where(highest > 0, found / highest.clamp_min(torch.finfo(found.dtype).tiny), found)
    return Saliency(found.cpu().numpy(), name, (maps.shape[2], maps.shape[3]))
