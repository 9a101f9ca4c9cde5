"""The network whose first blocks are done in lanes, and the memory that they compute in."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, cast

import torch
from torch import Tensor, nn

from medsilo.simulation.lanes.passes import cut_strips, join_strips, pool, spread


def in_lanes(model: nn.Module) -> nn.Module | None:
    """The same network with the same parameters under the same names; None for one that this cannot do.

    It can do ``nn.Sequential`` that begins with blocks of convolution (stride 1, no padding), ReLU and max-pooling by
    two; what comes after them is done as always. For training alone: one forward pass, then its backward pass.
    """
    if type(model) is not nn.Sequential:
        return None
    children = list(model.named_children())
    blocks = 0
    while _is_block([module for _, module in children[3 * blocks : 3 * blocks + 3]]):
        blocks += 1
    return _Lanes(OrderedDict(children), blocks) if blocks else None


def _is_block(modules: list[nn.Module]) -> bool:
    match modules:
        case [nn.Conv2d() as convolution, nn.ReLU(), nn.MaxPool2d() as pooling]:
            plain = (convolution.stride, convolution.dilation, convolution.groups) == ((1, 1), (1, 1), 1)
            unpadded = convolution.padding in ((0, 0), "valid")
            halves = (
                pooling.kernel_size in (2, (2, 2)) and pooling.stride in (2, (2, 2)) and pooling.padding in (0, (0, 0))
            )
            return plain and unpadded and halves and pooling.dilation in (1, (1, 1)) and not pooling.ceil_mode
        case _:
            return False


class _Lanes(nn.Sequential):
    def __init__(self, children: OrderedDict[str, nn.Module], blocks: int) -> None:
        super().__init__(children)
        self._convolutions = [cast(nn.Conv2d, module) for module in list(children.values())[: 3 * blocks : 3]]
        self._rest = list(children.values())[3 * blocks :]
        self._workspaces: dict[tuple[int, ...], _Workspace] = {}

    def forward(self, images: Tensor) -> Tensor:
        """``images``: ``[B, C, H, W]``."""
        lanes = images.permute(2, 1, 3, 0).contiguous()
        for number, convolution in enumerate(self._convolutions):
            key = (number, *lanes.shape)
            if key not in self._workspaces:
                self._workspaces[key] = _Workspace(lanes, convolution)
            lanes = _Block.apply(lanes, convolution.weight, convolution.bias, self._workspaces[key])
        found = lanes.permute(3, 1, 0, 2)
        for module in self._rest:
            found = module(found)
        return found


class _Workspace:
    """What a block computes in, at every step anew: memory, and the views of it, which would cost as much as the
    arithmetic if they were made each time.

    Sizes: images C × H × W in a batch of B, O kernels k × l, of whose h × w results an odd last row or column is not
    pooled and so not computed.
    """

    def __init__(self, images: Tensor, convolution: nn.Conv2d) -> None:
        height, channels, width, batch = images.shape
        kernels, _, k, l = convolution.weight.shape  # noqa: E741
        h, w = (height - k + 1) // 2 * 2, (width - l + 1) // 2 * 2
        new = images.new_empty
        self.uses = 0
        self.k, self.rows = k, channels * l
        # Each row of pixels, for each column of the kernel: [H, C, l, w, B].
        strips = new(height, channels, l, w, batch)
        self.strips = strips.numpy()
        row = self.rows * w * batch
        self.windows = strips.as_strided((h, k * self.rows, w * batch), (row, w * batch, 1))
        # The convolution's results, and in the backward pass what their gradient is: [h, O, w, B], between rows of 0.
        padded = images.new_zeros(h + 2 * (k - 1), kernels, w * batch)
        self.results = padded[k - 1 : k - 1 + h]
        self.rows_of_results = self.results.view(h, kernels, w, batch).numpy()
        # Which of four is their maximum, as a number of the same type: others are several times slower.
        self.places = new(h // 2, kernels, w // 2, batch).numpy()
        self.bias = images.new_zeros(kernels)
        self.bias_gradients = new(kernels, batch)
        # Of two orders of the same product one is much faster, by the number of kernels (MKL, AVX-512 and AVX2).
        self.windows_first = kernels >= 16
        self.products = new(h, k * self.rows, kernels) if self.windows_first else new(h, kernels, k * self.rows)
        if images.requires_grad:
            # To a row of pixels lead the gradients of the k rows of results that it was part of.
            self.back = padded.as_strided((h + k - 1, k * kernels, w * batch), (kernels * w * batch, w * batch, 1))
            self.strip_gradients = new(h + k - 1, self.rows, w * batch)
            self.by_column = self.strip_gradients.view(h + k - 1, *strips.shape[1:]).numpy()
            self.image_gradient = images.new_zeros(images.shape)


class _Block(torch.autograd.Function):
    """Convolution, ReLU and max-pooling by two of images ``[H, C, W, B]``: ``[H', O, W', B]``.

    Where a maximum is found more than once its first place gets the gradient, as in PyTorch.
    """

    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, bias: Tensor | None, work: _Workspace) -> Tensor:
        kernels, channels, k, l = weight.shape  # noqa: E741
        work.uses += 1
        ctx.work, ctx.use = work, work.uses
        ctx.permuted = kernels, k, channels, l
        cut_strips(images.numpy(), work.strips)
        ctx.matrix = weight.permute(0, 2, 1, 3).reshape(kernels, k * channels * l)
        torch.bmm(ctx.matrix.expand(len(work.results), -1, -1), work.windows, out=work.results)
        pooled = images.new_empty(work.places.shape)
        pool(work.rows_of_results, (work.bias if bias is None else bias).numpy(), pooled.numpy(), work.places)
        ctx.save_for_backward(pooled)
        return pooled

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        work: _Workspace = ctx.work
        if work.uses != ctx.use:
            raise RuntimeError("a network in lanes was used again before its backward pass")
        (pooled,) = ctx.saved_tensors
        to_images, to_weight, to_bias, _ = ctx.needs_input_grad
        spread(
            gradient.contiguous().numpy(),
            pooled.numpy(),
            work.places,
            work.rows_of_results,
            work.bias_gradients.numpy(),
        )
        bias = work.bias_gradients.sum(dim=1) if to_bias else None
        weight = None
        if to_weight:
            if work.windows_first:
                torch.bmm(work.windows, work.results.transpose(1, 2), out=work.products)
                found = work.products.sum(0).t()
            else:
                torch.bmm(work.results, work.windows.transpose(1, 2), out=work.products)
                found = work.products.sum(0)
            weight = found.reshape(ctx.permuted).permute(0, 2, 1, 3)
        if not to_images:
            return None, weight, bias, None
        kernels = ctx.matrix.view(-1, work.k, work.rows).flip(1).permute(2, 1, 0).reshape(work.rows, -1)
        torch.bmm(kernels.expand(len(work.back), -1, -1), work.back, out=work.strip_gradients)
        join_strips(work.by_column, work.image_gradient.numpy())
        return work.image_gradient, weight, bias, None
