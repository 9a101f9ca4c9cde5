"""Networks of which a part is frozen: what a plan's ``train`` comes to.

A *layer* is a module with a weight matrix or kernels of its own; what else has parameters or statistics (normalisation,
say) belongs to the layer before it, in the order in which the network lists its modules. Frozen layers, and all that
comes before the first that is trained, are always in evaluation mode: no dropout there, and batch normalisation takes
its running statistics as they are.

To everybody else a network's state is then what is not frozen: ``state_dict`` gives, a layout names, methods keep and
send that alone. ``whole_state`` has all of it, and ``plain_state`` is that of the network without ``train``.

Where what comes before the first trained layer is one frozen extractor, its features can be kept (``extractor_of``), as
those of a fixed one are: the network takes images ``[n, C, H, W]``, or their features ``[n, F]``. That is so for
``head`` in a network that ends in its classifier, and for the last layers of an ``nn.Sequential`` where features are no
more numbers than the image has.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from medsilo.algorithms.features.extractor import Extractor
from medsilo.algorithms.models.fixed import OnFixedFeatures
from medsilo.algorithms.models.layout import classifier_of, whole_state
from medsilo.algorithms.models.low_rank import add_updates, merged
from medsilo.privacy.consent.plan import LastLayers, LowRankUpdates, ModelPlan
from medsilo.privacy.errors import ConfigurationError

_Layers = dict[str, list[nn.Module]]
"""By its path, a layer and what belongs to it."""


@dataclass(frozen=True, eq=False)
class _Cut:
    """Where a network is divided: its modules ``before`` one after the other and those ``after``; or, without any
    before, in front of its classifier, the only one after. ``shape``: of an image's features."""

    before: tuple[nn.Module, ...]
    after: tuple[nn.Module, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Parts:
    """``frozen``: names of tensors. ``still``: modules that are always in evaluation mode. ``updated``: paths of layers
    with low-rank updates. ``probe``: an image of the right size."""

    frozen: frozenset[str]
    still: tuple[nn.Module, ...]
    updated: tuple[str, ...]
    cut: _Cut | None
    probe: Tensor


class PartlyTrained(nn.Module):
    """What is mixed into the class of a network of which a part is frozen."""

    _parts: _Parts
    _frozen_sha256: str | None

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``[n, classes]`` of images, or of features that its extractor gave."""
        cut = self._parts.cut
        if cut is None or images.ndim != 2:
            return cast(Tensor, super().forward(images))
        return _through(cut.after, images.reshape(len(images), *cut.shape))

    def train(self, mode: bool = True) -> Self:
        """As ever, but what is frozen stays in evaluation mode."""
        super().train(mode)
        for module in self._parts.still:
            module.training = False
        return self

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        """Without what is frozen."""
        found: dict[str, Any] = super().state_dict(*args, **options)
        return {name: tensor for name, tensor in found.items() if name not in self._parts.frozen}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As ever; what is frozen may be in it or not."""
        found = super().load_state_dict(state_dict, strict=False, assign=assign)
        if not self._parts.frozen.isdisjoint(state_dict):
            self._frozen_sha256 = None
        missing = [name for name in found.missing_keys if name not in self._parts.frozen]
        if strict and (missing or found.unexpected_keys):
            raise RuntimeError(f"missing tensors: {missing}; unexpected ones: {found.unexpected_keys}")
        return found

    @property
    def frozen_sha256(self) -> str:
        """Of the frozen tensors' names, types, shapes and bytes."""
        if self._frozen_sha256 is None:
            digest = hashlib.sha256()
            for name, tensor in frozen_state(self).items():
                digest.update(f"{name!r} {tensor.dtype} {list(tensor.shape)}\n".encode())
                digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            self._frozen_sha256 = digest.hexdigest()
        return self._frozen_sha256


@dataclass(frozen=True, eq=False)
class _FrozenFront:
    """What comes before the first trained layer, as an extractor (``medsilo.algorithms.features.Extractor``)."""

    network: PartlyTrained
    cut: _Cut

    @property
    def features(self) -> int:
        return math.prod(self.cut.shape)

    @property
    def definition(self) -> str:
        """The frozen tensors' hash, and the hash of what it says of one image: code of a user's own may change."""
        image = self.network._parts.probe[:1].to(next(self.network.parameters()).device)
        said = hashlib.sha256(self(image).cpu().numpy().tobytes()).hexdigest()
        return f"frozen tensors {self.network.frozen_sha256}, which say of one image {said}"

    def __call__(self, images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, enabled=False), _evaluated(self.network):
            return _features(self.network, self.cut, images).flatten(1)


def extractor_of(model: nn.Module) -> Extractor | None:
    """The extractor whose features the model takes in place of images; None where it takes images alone."""
    if isinstance(model, OnFixedFeatures):
        return model.extractor
    if isinstance(model, PartlyTrained) and (cut := model._parts.cut) is not None:
        return _FrozenFront(model, cut)
    return None


def frozen_names(model: nn.Module) -> frozenset[str]:
    """The names of the tensors that are frozen."""
    return model._parts.frozen if isinstance(model, PartlyTrained) else frozenset()


def frozen_state(model: nn.Module) -> dict[str, Tensor]:
    """What is frozen, on the CPU, by name; empty where all is trained."""
    frozen = frozen_names(model)
    return {name: tensor for name, tensor in whole_state(model).items() if name in frozen}


def plain_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of the same network without ``train``: with this state of what is not frozen, and low-rank updates
    added to the weights that they update."""
    if not isinstance(model, PartlyTrained):
        return dict(state)
    return merged({**whole_state(model), **state}, model._parts.updated)


def train_only(model: nn.Module, plan: ModelPlan) -> nn.Module:
    """The same module, all but what ``plan.train`` names frozen; low-rank updates are drawn from torch's generator.

    Raises ``ConfigurationError`` for more layers than it has, and for a rank that is too high for all of them.
    """
    if plan.train == "all":
        return model
    layers = _layers_of(model)
    last = plan.train.last if isinstance(plan.train, LastLayers) else 1
    if last > len(layers):
        names = list(layers)
        shown = ", ".join(names if len(names) <= 12 else [*names[:4], "…", *names[-4:]])
        raise ConfigurationError(
            f"model {plan.name}: `train: last: {last}` is more than the {len(layers)} layers that it has ({shown})"
        )
    probe = torch.rand(2, *plan.input_shape, generator=torch.Generator().manual_seed(1)) * 2 - 1
    chosen = list(layers)[-last:]
    trained = [p for path in chosen for m in layers[path] for p in m.parameters(recurse=False) if p.requires_grad]
    belongs = {id(module) for path in chosen for module in layers[path]}
    frozen_modules = [module for module in model.modules() if id(module) not in belongs]
    model.requires_grad_(False)
    updated: tuple[str, ...] = ()
    if isinstance(plan.train, LowRankUpdates):
        rank = plan.train.lora.rank
        updated = add_updates(_called(model, probe, without=chosen), rank)
        if not updated:
            raise ConfigurationError(
                f"model {plan.name}: `train: lora`: no layer but its classifier is larger than an update of rank "
                f"{rank}; use a lower rank, or `train: head`"
            )
        trained += [p for path in updated for m in model.get_submodule(path).children() for p in m.parameters()]
    for parameter in trained:
        parameter.requires_grad_(True)
    frozen = _frozen_names(model, frozen_modules)
    if not frozen:
        return model
    still = _still(model, frozen_modules)
    cut = None if updated else _cut(model, plan, probe)
    kind = type(model)
    model.__class__ = cast("type[nn.Module]", type(kind.__name__, (PartlyTrained, kind), {}))
    network = cast(PartlyTrained, model)
    network._parts = _Parts(frozen, still, updated, cut, probe)
    network._frozen_sha256 = None
    return model.train()


def _layers_of(model: nn.Module) -> _Layers:
    """In order, the classifier last; what comes before the first belongs to none."""
    layers: _Layers = {}
    for path, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        linear = isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
        if linear or any(sum(size > 1 for size in parameter.shape) > 1 for parameter in own):
            layers[path] = [module]
        elif layers:
            layers[list(layers)[-1]].append(module)
    classifier = classifier_of(model)[1]
    (path,) = [path for path, modules in layers.items() if any(module is classifier for module in modules)]
    return {**{p: modules for p, modules in layers.items() if p != path}, path: layers[path]}


def _still(model: nn.Module, frozen: list[nn.Module]) -> tuple[nn.Module, ...]:
    """Of the modules in which nothing is trained, those that are frozen, and those that come before all that is not."""
    own = {id(m) for m in frozen if [*m.parameters(recurse=False), *m.buffers(recurse=False)]}
    found, begun = [], False
    for module in model.modules():
        begun = begun or any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        if not any(parameter.requires_grad for parameter in module.parameters()) and (not begun or id(module) in own):
            found.append(module)
    return tuple(found)


def _frozen_names(model: nn.Module, frozen: list[nn.Module]) -> frozenset[str]:
    statistics = {id(buffer) for module in frozen for buffer in module.buffers(recurse=False)}
    return frozenset(
        name
        for name, tensor in nn.Module.state_dict(model, keep_vars=True).items()
        if (isinstance(tensor, nn.Parameter) and not tensor.requires_grad) or id(tensor) in statistics
    )


def _called(model: nn.Module, probe: Tensor, *, without: list[str]) -> dict[str, nn.Module]:
    """By path, the layers that a network calls: others it may have, and take their weights alone."""
    found: set[str] = set()
    hooks = [
        module.register_forward_pre_hook(lambda _module, _inputs, path=path: found.add(path))
        for path, module in model.named_modules()
    ]
    try:
        with _evaluated(model):
            model(probe)
    finally:
        for hook in hooks:
            hook.remove()
    return {path: module for path, module in model.named_modules() if path in found and path not in without}


def _cut(model: nn.Module, plan: ModelPlan, probe: Tensor) -> _Cut | None:
    children = [module for module in model._modules.values() if module is not None]
    begins = [any(parameter.requires_grad for parameter in child.parameters()) for child in children]
    if type(model) is nn.Sequential:
        first = begins.index(True)
        before, after = tuple(children[:first]), tuple(children[first:])
    elif plan.train == "head":
        before, after = (), (classifier_of(model)[1],)
    else:
        return None
    try:
        with _evaluated(model):
            found = _features(model, _Cut(before, after, ()), probe)
            shape, kept = tuple(found.shape[1:]), found.clone()
            same = torch.equal(_through(after, found), model(probe)) and torch.equal(found, kept)
    except _NoFeaturesError:
        return None
    small = plan.train == "head" or math.prod(shape) <= math.prod(plan.input_shape)
    return _Cut(before, after, shape) if same and small and shape else None


class _NoFeaturesError(Exception):
    """The classifier is not called once, on one vector for each image."""


def _features(network: nn.Module, cut: _Cut, images: Tensor) -> Tensor:
    if cut.before:
        return _through(cut.before, images)
    seen: list[Tensor] = []
    handle = cut.after[0].register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    try:
        network(images)
    finally:
        handle.remove()
    if len(seen) != 1 or seen[0].ndim != 2 or len(seen[0]) != len(images):
        raise _NoFeaturesError
    return seen[0]


def _through(modules: tuple[nn.Module, ...], images: Tensor) -> Tensor:
    for module in modules:
        images = module(images)
    return images


@contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    """Inside, it is in evaluation mode, and nothing has gradients."""
    before = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(before)
