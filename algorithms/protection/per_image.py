"""Single images' gradients by Opacus' hooks, and whether they are those of the images. Loading Opacus takes seconds."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from torch import Tensor, nn
from torch.func import functional_call

from medsilo.privacy.errors import ConfigurationError

# The first layer's input is images, which have no gradient: as intended.
warnings.filterwarnings("ignore", message="Full backward hook is firing when gradients are computed with respect to")

_ROUNDING = 1e-3
_NUMBERS = (2, 3)
"""Of images in the tries: what is no number of images, say of patches, is not the same as both."""


@contextmanager
def per_image_gradients(model: nn.Module) -> Iterator[None]:
    """Inside, a backward pass of a sum over images leaves each image's gradient in ``parameter.grad_sample``."""
    hooks = GradSampleHooks(model, loss_reduction="sum")
    try:
        yield
    finally:
        hooks.cleanup()


def gradients_of(parameter: nn.Parameter, count: int) -> Tensor:
    """What a backward pass over so many images has left, ``[count, numbers of the parameter]``.

    Raises ``ConfigurationError`` if it is not of so many images.
    """
    found = getattr(parameter, "grad_sample", None)
    if found is None:
        # No image's loss depends on it.
        return parameter.new_zeros(count, parameter.numel())
    if not isinstance(found, Tensor) or len(found) != count:
        raise ConfigurationError(
            "this model's layers do not take one image in each row of their input, so that single images' gradients "
            "cannot be told apart; it cannot be trained with differential privacy"
        )
    return found.detach().reshape(count, -1)


def tells_apart(model: nn.Module, input_shape: tuple[int, int, int]) -> bool:
    """Whether what the hooks leave for each image is its own gradient, which another backward pass gives: so with two
    images and with three. The model's state stays as it is.

    Raises ``ConfigurationError`` as ``gradients_of``, and for a layer that the hooks cannot work with.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    dropouts = [m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.training]
    try:
        for one in dropouts:
            one.training = False
        with torch.random.fork_rng(devices=[]):
            return all(_are_own(model, parameters, input_shape, count) for count in _NUMBERS)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigurationError(
            f"single images' gradients cannot be computed for this model ({reason}); it cannot be trained with "
            "differential privacy"
        ) from error
    finally:
        for one in dropouts:
            one.training = True
        for parameter in parameters:
            parameter.grad = None


def _are_own(model: nn.Module, parameters: list[nn.Parameter], input_shape: tuple[int, int, int], count: int) -> bool:
    numbers = torch.Generator().manual_seed(count)
    device = parameters[0].device
    images = (torch.rand(count, *input_shape, generator=numbers) * 2 - 1).to(device)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def losses() -> Tensor:
        """Of each image: what no logit, however large, makes flat."""
        torch.manual_seed(1)
        logits: Tensor = functional_call(model, buffers, images)
        weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(device)
        return (logits * weights).sum(dim=1)

    with per_image_gradients(model):
        losses().sum().backward()  # type: ignore[no-untyped-call]
        found = [gradients_of(parameter, count) for parameter in parameters]
    expected = losses()
    for number in range(count):
        exact = torch.autograd.grad(expected[number], parameters, retain_graph=True, allow_unused=True)
        own = [torch.zeros_like(p) if g is None else g for g, p in zip(exact, parameters, strict=True)]
        largest = max(float(gradient.abs().max()) for gradient in own)
        for ours, theirs in zip(found, own, strict=True):
            allowed = _ROUNDING * (float(theirs.abs().max()) + 0.1 * largest)
            # So that what is not a number is another number, too.
            if not float((ours[number] - theirs.reshape(-1)).abs().max()) <= allowed:
                return False
    return True
