"""Low-rank updates of frozen layers (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2022).

A linear layer with frozen weights W ``[out, in]`` then computes (W + B·A)x, with A ``[r, in]`` and B ``[out, r]``
trained; a convolution likewise, with A its kernels to r maps and B a 1×1 convolution of these. B begins as zeros, so
that the network begins as it was. The paper's factor α/r is 1 here: the learning rate does what it does.

A layer keeps its class, its attributes and its tensors' names; A and B are its children ``down`` and ``up``, added by a
hook of its forward pass, so that DP-SGD sees two ordinary layers without bias.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn


def add_updates(layers: Mapping[str, nn.Module], rank: int) -> tuple[str, ...]:
    """Gives layers updates of this rank, A drawn from torch's generator as it stands; returns the paths of those that
    have one now.

    Args:
        layers: those that may have one, by path. One that is no larger than its update would be gets none, nor does a
            grouped convolution or a layer of another kind than a linear one or a 2-D convolution.
        rank: r.
    """
    found = []
    for path, layer in layers.items():
        if (update := _update_of(layer, rank)) is None:
            continue
        down, up = update
        nn.init.zeros_(up.weight)
        layer.add_module("down", down)
        layer.add_module("up", up)
        layer.register_forward_hook(_add)
        found.append(path)
    return tuple(found)


def _update_of(layer: nn.Module, rank: int) -> tuple[nn.Linear | nn.Conv2d, nn.Linear | nn.Conv2d] | None:
    down: nn.Linear | nn.Conv2d
    up: nn.Linear | nn.Conv2d
    if type(layer) is nn.Linear:
        down = nn.Linear(layer.in_features, rank, bias=False)
        up = nn.Linear(rank, layer.out_features, bias=False)
    elif type(layer) is nn.Conv2d and layer.groups == 1:
        down = nn.Conv2d(
            layer.in_channels,
            rank,
            cast("tuple[int, int]", layer.kernel_size),
            stride=cast("tuple[int, int]", layer.stride),
            padding=cast("str | tuple[int, int]", layer.padding),
            dilation=cast("tuple[int, int]", layer.dilation),
            bias=False,
            padding_mode=layer.padding_mode,
        )
        up = nn.Conv2d(rank, layer.out_channels, 1, bias=False)
    else:
        return None
    return (down, up) if down.weight.numel() + up.weight.numel() < layer.weight.numel() else None


def added_names(model: nn.Module) -> frozenset[str]:
    """The names of the tensors that updates have in a model's state."""
    paths = [path for path, module in model.named_modules() if _add in module._forward_hooks.values()]
    return frozenset(f"{path}.{child}.weight" for path in paths for child in ("down", "up"))


def _add(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    added: Tensor = layer.get_submodule("up")(layer.get_submodule("down")(inputs[0]))
    return output + added


def merged(state: Mapping[str, Tensor], paths: Sequence[str]) -> dict[str, Tensor]:
    """The state of a network whose layers at these paths have updates, as that of the same network without them: they
    are added to the layers' weights.

    W + B·A is computed in float64, so that what it gives differs from the network's by rounding alone.
    """
    found = dict(state)
    for path in paths:
        down, up = found.pop(f"{path}.down.weight"), found.pop(f"{path}.up.weight")
        weight = found[f"{path}.weight"]
        product = torch.tensordot(up.double().flatten(1), down.double(), dims=1)
        found[f"{path}.weight"] = (weight.double() + product).to(weight.dtype)
    return found
