"""Convolutional networks that train faster on a CPU: the images of a batch lie side by side in memory.

With the batch innermost (``[H, C, W, B]``), a convolution of small images is a few large matrix products over a buffer
in which each row of pixels stands once for every column of the kernel; a window's rows of pixels follow one another in
that buffer, so that no window is copied out. ReLU and pooling are then steps over whole vectors. PyTorch's own layers,
of which a quarter of such a network's time goes into the pooling alone, give the same up to rounding.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, cast

import torch
from torch import Tensor, nn


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
        case [nn.Conv2d() as convolution, nn.ReLU(), nn.MaxPool2d() as pool]:
            plain = (convolution.stride, convolution.dilation, convolution.groups) == ((1, 1), (1, 1), 1)
            unpadded = convolution.padding in ((0, 0), "valid")
            halves = pool.kernel_size in (2, (2, 2)) and pool.stride in (2, (2, 2)) and pool.padding in (0, (0, 0))
            return plain and unpadded and halves and pool.dilation in (1, (1, 1)) and not pool.ceil_mode
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
        self.k, self.l, self.w, self.rows = k, l, w, channels * l
        # Each row of pixels, for each column of the kernel: [H, C, l, w, B].
        self.strips = new(height, channels, l, w, batch)
        row = self.rows * w * batch
        self.windows = self.strips.as_strided((h, k * self.rows, w * batch), (row, w * batch, 1))
        # The convolution's results, and in the backward pass what their gradient is: [h, O, w, B], between rows of 0.
        padded = images.new_zeros(h + 2 * (k - 1), kernels, w * batch)
        self.results = padded[k - 1 : k - 1 + h]
        apart = self.results.view(h // 2, 2, kernels, w // 2, 2, batch)
        self.left, self.right = apart[:, :, :, :, 0], apart[:, :, :, :, 1]
        # Comparisons are kept as ones and zeros of the same type: arithmetic with truth values is several times slower.
        self.left_wins, self.columns, self.column_gradients = (new(self.left.shape) for _ in range(3))
        self.upper, self.lower = self.columns[:, 0], self.columns[:, 1]
        self.upper_gradient, self.lower_gradient = self.column_gradients[:, 0], self.column_gradients[:, 1]
        self.upper_wins, self.gradient = new(self.upper.shape), new(self.upper.shape)
        self.products = new(h, kernels, k * self.rows)
        if images.requires_grad:
            # To a row of pixels lead the gradients of the k rows of results that it was part of.
            self.back = padded.as_strided((h + k - 1, k * kernels, w * batch), (kernels * w * batch, w * batch, 1))
            self.strip_gradients = new(h + k - 1, self.rows, w * batch)
            self.image_gradient = images.new_zeros(images.shape)
            reached = self.image_gradient[: h + k - 1]
            by_column = self.strip_gradients.view(h + k - 1, *self.strips.shape[1:])
            self.shifts = [(reached[:, :, j : j + w], by_column[:, :, j]) for j in range(l)]


class _Block(torch.autograd.Function):
    """Convolution, ReLU and max-pooling by two of images ``[H, C, W, B]``: ``[H', O, W', B]``.

    Where a maximum is found more than once its first place gets the gradient, as in PyTorch.
    """

    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, bias: Tensor | None, work: _Workspace) -> Tensor:
        kernels, channels, k, l = weight.shape  # noqa: E741
        work.uses += 1
        ctx.work, ctx.use = work, work.uses
        work.strips.copy_(images.unfold(2, work.w, 1)[:, :, :l].movedim(4, 3))
        ctx.matrix = weight.permute(0, 2, 1, 3).reshape(kernels, k * channels * l)
        torch.bmm(ctx.matrix.expand(len(work.results), -1, -1), work.windows, out=work.results)
        torch.ge(work.left, work.right, out=work.left_wins)
        torch.maximum(work.left, work.right, out=work.columns)
        torch.ge(work.upper, work.lower, out=work.upper_wins)
        # The bias moves all that a maximum is taken of alike, and ReLU of the maximum is the maximum of the ReLUs.
        pooled = torch.maximum(work.upper, work.lower)
        if bias is not None:
            pooled.add_(bias.view(1, -1, 1, 1))
        pooled.relu_()
        ctx.save_for_backward(pooled)
        return pooled

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        work: _Workspace = ctx.work
        if work.uses != ctx.use:
            raise RuntimeError("a network in lanes was used again before its backward pass")
        (pooled,) = ctx.saved_tensors
        to_images, to_weight, to_bias, _ = ctx.needs_input_grad
        torch.ops.aten.threshold_backward.grad_input(gradient, pooled, 0, grad_input=work.gradient)
        bias = work.gradient.sum(dim=(0, 2, 3)) if to_bias else None
        torch.mul(work.gradient, work.upper_wins, out=work.upper_gradient)
        torch.sub(work.gradient, work.upper_gradient, out=work.lower_gradient)
        torch.mul(work.column_gradients, work.left_wins, out=work.left)
        torch.sub(work.column_gradients, work.left, out=work.right)
        weight = None
        if to_weight:
            torch.bmm(work.results, work.windows.transpose(1, 2), out=work.products)
            weight = work.products.sum(0).view(-1, work.k, work.rows // work.l, work.l).permute(0, 2, 1, 3)
        if not to_images:
            return None, weight, bias, None
        kernels = ctx.matrix.view(-1, work.k, work.rows).flip(1).permute(2, 1, 0).reshape(work.rows, -1)
        torch.bmm(kernels.expand(len(work.back), -1, -1), work.back, out=work.strip_gradients)
        work.image_gradient.zero_()
        for place, strip in work.shifts:
            place.add_(strip)
        return work.image_gradient, weight, bias, None
