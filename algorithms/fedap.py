"""FedAP: average with silos whose features are distributed alike (Lu et al., "Personalized Federated Learning with
Adaptive Batchnorm for Healthcare", IEEE Transactions on Big Data 2022, section 3), in the form f-FedAP, which needs
no pre-trained model.

Of what goes into batch normalisation layer l at silo i, let μ_i^l be the channels' means and σ_i^l their standard
deviations. Taken as normal distributions with diagonal covariances, two silos are

    d_ij = Σ_l ( ‖μ_i^l − μ_j^l‖² + ‖σ_i^l − σ_j^l‖² )^½

apart (the 2-Wasserstein distance of each layer), and silo i gets λ times its own model plus (1 − λ) times the
others', weighted by 1/d_ij over its sum. Batch normalisation, parameters and statistics, stays at the silo.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from medsilo.algorithms.declarations import MIXTURES, Blind, Protected, Share, Sums
from medsilo.algorithms.method import (
    PERSONAL,
    CoordinatorSide,
    Downloads,
    Federation,
    Method,
    Round,
    SiloSide,
    Site,
    State,
    load_parameters,
    subset,
)
from medsilo.algorithms.models import Layout, state_of
from medsilo.algorithms.tensors import Part, Payload, Stack, TensorSpec
from medsilo.privacy.errors import ConfigurationError
from medsilo.privacy.exposure import MODEL, Exposure

_STATISTICS = "statistics"
_WANTED = "wanted"
_FLAG = TensorSpec("statistics_wanted", ())
_BATCH = 1024
_MEAN = ".input_mean"
_VARIANCE = ".input_variance"
SAME = 1e-12
"""Silos at most this far apart count as equally close."""


@dataclass(frozen=True)
class Normalisation:
    """A layout's batch normalisation, read off its running means.

    Attributes:
        layers: path and number of channels of each layer.
    """

    layers: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, layout: Layout) -> Normalisation:
        """Raises ``ConfigurationError`` for a model without batch normalisation."""
        ending = ".running_mean"
        found = [spec for spec in layout.buffers if spec.name.endswith(ending)]
        if not found:
            raise ConfigurationError(
                "fedap: compares silos by what goes into batch normalisation, and this model has none (with running "
                "statistics); choose a model with it, such as lenet5, resnet8 or torchvision:resnet18, or another "
                "method, such as fedavg"
            )
        return cls(tuple((spec.name.removesuffix(ending), spec.shape[0]) for spec in found))

    @staticmethod
    def shared(layout: Layout) -> dict[Exposure, tuple[TensorSpec, ...]]:
        """The model's parameters without those of batch normalisation, by exposure class."""
        return {
            exposure: tuple(spec for spec in specs if spec.name not in layout.normalisation)
            for exposure, specs in layout.model_parts().items()
        }

    @property
    def statistics(self) -> tuple[TensorSpec, ...]:
        """What a silo says of each layer's input: mean and variance of each channel."""
        return tuple(
            TensorSpec(path + ending, (channels,)) for path, channels in self.layers for ending in (_MEAN, _VARIANCE)
        )


class FedAPSilo(SiloSide):
    """Its personal model is the one that it trained last."""

    def __init__(self, method: FedAP, site: Site) -> None:
        super().__init__(method, site)
        self._normalisation = Normalisation.of(site.layout)
        self._shared = self._normalisation.shared(site.layout)

    def train(self, round_number: int, download: Payload) -> None:
        """E epochs from the mixture; before them the statistics, where they are asked for."""
        site = self.site
        self.memory.pop(_STATISTICS, None)
        state, wanted = dict(self.memory[PERSONAL]), False
        if download:
            specs = tuple(spec for specs in self._shared.values() for spec in specs)
            flag = (_FLAG,) if _FLAG in download[Exposure.PEER_DERIVED].specs else ()
            received = load_parameters(download, Exposure.PEER_DERIVED, specs + flag)
            wanted = bool(received.pop(_FLAG.name, torch.zeros(())))
            state.update(received)
        site.load(state)
        if wanted:
            paths = [path for path, _ in self._normalisation.layers]
            self.memory[_STATISTICS] = input_statistics(site.model, site.train_data()[0], paths)
        site.fit(round_number)
        self.memory[PERSONAL] = state_of(site.model)

    def upload(self) -> Payload:
        """The trained model without batch normalisation, and the statistics where they were asked for."""
        personal = self.memory[PERSONAL]
        payload = {exposure: Part.of(subset(personal, specs)) for exposure, specs in self._shared.items()}
        if _STATISTICS in self.memory:
            statistics = subset(self.memory[_STATISTICS], self._normalisation.statistics)
            payload[Exposure.RUNNING_STATISTICS] = Part.of(statistics)
        return payload


class FedAPCoordinator(CoordinatorSide):
    """Averages in the warm-up, then mixes by distance.

    ``memory["wanted"]`` names the silos whose last download asks for statistics; ``memory["statistics"]`` holds each
    silo's as it came, joined to one vector. Both change where a round ends, together with the downloads, so what is
    asked and what is expected agree also after a restart.
    """

    by_silo: ClassVar[tuple[str, ...]] = (_STATISTICS, _WANTED)

    method: FedAP

    def __init__(self, method: FedAP, federation: Federation) -> None:
        super().__init__(method, federation)
        self._normalisation = Normalisation.of(federation.layout)

    def upload_parts(self, round_number: int, silo: str) -> Mapping[Exposure, Sequence[TensorSpec]]:
        """The model without batch normalisation; the statistics of a silo that is asked for them."""
        parts = self._normalisation.shared(self.federation.layout)
        if silo in self.memory.get(_WANTED, {}):
            parts[Exposure.RUNNING_STATISTICS] = self._normalisation.statistics
        return parts

    def aggregate(self, ended: Round) -> Downloads:
        """One average for everyone in the warm-up, then one mixture for each silo that may ever take part."""
        known = dict(self.memory.get(_STATISTICS, {}))
        for silo, upload in ended.uploads.items():
            if Exposure.RUNNING_STATISTICS in upload:
                known[silo] = torch.cat(list(upload[Exposure.RUNNING_STATISTICS].tensors().values()))
        self.memory[_STATISTICS] = known
        stack = Stack.of(list(ended.latest.values()), MODEL)
        if ended.number + 1 < self.method.warmup_rounds(self.federation.rounds):
            weights = self._average(ended.uploads, ended.latest).reshape(1, -1)
            blocks = stack.map(lambda block: (weights @ block).to(torch.float32))
            (average,) = ended.workspace.write(stack.specs, 1, blocks)
            return Downloads(everyone={Exposure.PEER_DERIVED: average})
        silos = sorted({*self.federation.silos, *ended.latest})
        weights = torch.stack([self._mixture(silo, ended.uploads, ended.latest) for silo in silos])
        asked = torch.tensor([[float(silo not in known)] for silo in silos])
        blocks = itertools.chain(stack.map(lambda block: (weights @ block).to(torch.float32)), [asked])
        rows = ended.workspace.write((*stack.specs, _FLAG), len(silos), blocks)
        self.memory[_WANTED] = {silo: torch.ones(()) for silo in silos if silo not in known}
        return Downloads(own={silo: {Exposure.PEER_DERIVED: row} for silo, row in zip(silos, rows, strict=True)})

    def _average(self, uploads: Mapping[str, Payload], latest: Mapping[str, Payload]) -> Tensor:
        present = torch.tensor([silo in uploads for silo in latest], dtype=torch.float64)
        return present / present.sum()

    def _mixture(self, silo: str, uploads: Mapping[str, Payload], latest: Mapping[str, Payload]) -> Tensor:
        """One silo's weights over the last uploads, ``Tensor[len(latest)]``."""
        known = self.memory[_STATISTICS]
        if silo not in known:
            return self._average(uploads, latest)
        names = list(latest)
        weights = torch.zeros(len(names), dtype=torch.float64)
        others = [name for name in uploads if name in known and name != silo]
        if not others:
            weights[names.index(silo)] = 1
            return weights
        sizes = [channels for _, channels in self._normalisation.layers]
        distances = torch.stack([distance(known[silo], known[name], sizes) for name in others])
        for name, weight in zip(others, closeness(distances), strict=True):
            weights[names.index(name)] = (1 - self.method.own_weight) * weight
        weights[names.index(silo)] = self.method.own_weight
        return weights


@dataclass(frozen=True)
class FedAP(Method):
    """f-FedAP's hyper-parameters.

    Attributes:
        warmup_share: in [0, 1], the share of the rounds (at least one) that are warm-up; 1 leaves nothing but
            warm-up, which is FedBN. 0.5 is customary: it is FL-bench's default. The authors published no code of
            f-FedAP.
        own_weight: λ in [0, 1], the weight of the own model; 1 is separate training after the warm-up, 0 leaves the
            own model out. 0.5 is the default of the authors' published code, whose runs on medical images use 0.3.

    Read as: warm-up is averaging, uniform (no number of images is exposed), with batch normalisation kept at the
    silos, as it is in all later rounds. At its next training after the warm-up a silo is asked for its statistics,
    which it takes before it trains, in evaluation mode, from the averaged model with its own batch normalisation: all
    silos' then belong to the same weights. It is asked once (again only if its answer came too late). Until it has
    answered, a silo gets the uniform average. Others count with this round's models, a silo itself with its last one.
    """

    name: ClassVar[str] = "fedap"
    silo: ClassVar[type[SiloSide]] = FedAPSilo
    coordinator: ClassVar[type[CoordinatorSide]] = FedAPCoordinator
    sends: ClassVar[str] = "model; once: means and variances of features"
    gets: ClassVar[str] = "its own mixture"
    uploads: ClassVar[frozenset[Exposure]] = frozenset({*MODEL, Exposure.RUNNING_STATISTICS})
    downlink: ClassVar[frozenset[Exposure]] = frozenset({Exposure.PEER_DERIVED})
    under_privacy: ClassVar[Protected | str] = (
        "running statistics are averages over the silo's images, and have no mechanism"
    )
    under_masks: ClassVar[Sums | str] = MIXTURES
    under_blind: ClassVar[Blind | str] = (
        "its silos are asked once for their statistics, with a mixture, and distances would be taken in every round; "
        "not built"
    )
    warmup_share: Share = 0.5
    own_weight: Share = 0.5

    def warmup_rounds(self, rounds: int) -> int:
        """How many of a run's rounds are warm-up."""
        return max(1, round(self.warmup_share * rounds))


def distance(one: Tensor, other: Tensor, sizes: Sequence[int]) -> Tensor:
    """How far two silos are apart: the sum over layers of the 2-Wasserstein distances.

    Args:
        one: ``Tensor[2 Σ sizes]``: each layer's means, then its variances (at least 0; less counts as 0).
        other: the same of another silo.
        sizes: channels of each layer.

    Returns:
        A scalar, float64.
    """
    total = torch.zeros((), dtype=torch.float64)
    start = 0
    for size in sizes:
        means, deviations = slice(start, start + size), slice(start + size, start + 2 * size)
        start += 2 * size
        apart = (one[means].to(torch.float64) - other[means].to(torch.float64)).square().sum()
        wider = _root(one[deviations]) - _root(other[deviations])
        total += (apart + wider.square().sum()).sqrt()
    return total


def closeness(distances: Tensor) -> Tensor:
    """Inverse distances over their sum: ``Tensor[M]``, float64; those of 0 share (nearly) all of it."""
    inverse = 1 / distances.clamp(min=SAME)
    return inverse / inverse.sum()


def input_statistics(model: nn.Module, images: Tensor, paths: Sequence[str]) -> State:
    """Means and variances (over all images and positions, biased) of what goes into layers, in evaluation mode.

    Args:
        model: its mode is training mode afterwards.
        images: ``[n, C, H, W]`` or whatever the model takes, n ≥ 1.
        paths: of layers whose input is ``[n, channels, …]``.

    Returns:
        For each path ``path.input_mean`` and ``path.input_variance``, ``[channels]``, float32, on the CPU.
    """
    sums: dict[str, tuple[int, Tensor, Tensor]] = {}

    def watch(path: str, layer: nn.Module) -> torch.utils.hooks.RemovableHandle:
        def add(_layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            values = inputs[0].detach().transpose(0, 1).flatten(1).to(torch.float64)
            count, total, squares = sums.get(path, (0, torch.zeros(()), torch.zeros(())))
            added = values.sum(dim=1).cpu(), values.square().sum(dim=1).cpu()
            sums[path] = count + values.shape[1], total + added[0], squares + added[1]

        return layer.register_forward_pre_hook(add)

    handles = [watch(path, model.get_submodule(path)) for path in paths]
    model.eval()
    try:
        with torch.inference_mode():
            for batch in torch.split(images, _BATCH):
                model(batch)
    finally:
        for handle in handles:
            handle.remove()
        model.train()
    found = {}
    for path in paths:
        count, total, squares = sums[path]
        mean = total / count
        found[path + _MEAN] = mean.to(torch.float32)
        # Rounding can leave a little less than nothing where a channel is constant.
        found[path + _VARIANCE] = (squares / count - mean.square()).clamp(min=0).to(torch.float32)
    return found


def _root(variances: Tensor) -> Tensor:
    return variances.to(torch.float64).clamp(min=0).sqrt()
