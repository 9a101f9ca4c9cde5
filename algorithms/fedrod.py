"""FedRoD: one generic and one personal head on a shared extractor (Chen and Chao, "On Bridging Generic and
Personalized Federated Learning for Image Classification", 2022, section 4, the linear version).

With features z of an image, generic head G and personal head P, a silo m with class shares p_m minimises

    CE(G z + log p_m, y) + CE(sg(G z) + P sg(z), y)

sg meaning that no gradient flows back: the first term (balanced softmax) trains extractor and generic head as if every
class were equally frequent, the second trains the personal head alone. The personal prediction is G z + P z.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from medsilo.algorithms.declarations import Protected, Sums
from medsilo.algorithms.families.partial_sharing import PartialSharing, PartialSharingSilo
from medsilo.algorithms.families.sharing import check_linear
from medsilo.algorithms.method import PERSONAL, SiloSide, State, subset
from medsilo.algorithms.models import Features, Layout, classifier_of, state_of
from medsilo.algorithms.tensors import Payload, TensorSpec
from medsilo.privacy.exposure import MODEL, Exposure

_GENERIC = "generic_head"
_OWN = "personal_head"


class FedRoDSilo(PartialSharingSilo):
    """Keeps both heads apart in memory; the personal model's classifier is their sum."""

    def begin(self, initial: State) -> None:
        """The starting model's classifier is the generic head; the personal head is zero."""
        super().begin(initial)
        self.memory[_GENERIC] = subset(initial, self.site.layout.classifier)
        self.memory[_OWN] = {name: torch.zeros_like(tensor) for name, tensor in self.memory[_GENERIC].items()}

    def train(self, round_number: int, download: Payload) -> None:
        """One training of extractor and generic head, with the personal head alongside."""
        site = self.site
        self.take(download)
        site.load({**self.memory[PERSONAL], **self.memory[_GENERIC]})
        path, classifier = classifier_of(site.model)
        prefix = f"{path}." if path else ""
        head = copy.deepcopy(classifier)
        head.load_state_dict({name.removeprefix(prefix): tensor for name, tensor in self.memory[_OWN].items()})
        log_prior = log_class_shares(site.train_data()[1], site.layout.classifier[0].shape[0])

        def objective(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
            with Features(model) as features:
                generic = model(images)
            balanced = site.loss(generic + log_prior, labels)
            return balanced + site.loss(generic.detach() + head(features.last.detach()), labels)

        site.fit(round_number, objective=objective, extra=head)
        trained = state_of(site.model)
        self.memory[_GENERIC] = subset(trained, site.layout.classifier)
        self.memory[_OWN] = {prefix + name: tensor for name, tensor in state_of(head).items()}
        self.memory[PERSONAL] = {**trained, **self._both_heads()}

    def take(self, download: Payload) -> None:
        """The average of extractors, and of generic heads."""
        if download:
            super().take(download)
            self.memory[_GENERIC] = subset(self.memory[PERSONAL], self.site.layout.classifier)
            self.memory[PERSONAL] = {**self.memory[PERSONAL], **self._both_heads()}

    def outgoing(self) -> State:
        """The model with the generic head."""
        return {**self.memory[PERSONAL], **self.memory[_GENERIC]}

    def _both_heads(self) -> State:
        own = self.memory[_OWN]
        return {name: tensor + own[name] for name, tensor in self.memory[_GENERIC].items()}


@dataclass(frozen=True)
class FedRoD(PartialSharing):
    """FedRoD. Extractor and generic head are averaged; the personal head and the silo's class shares stay.

    Heads are linear, so the sum of their logits is the logits of one head with the sum of their weights: that is the
    classifier of the personal model. Personal heads start at zero (ours), so that the personal model starts as the
    generic one. The personal model is the one that local training left, as the paper measures it.

    Raises ``ConfigurationError``, when its sides are made, for a model whose last layer is not linear.

    ``weighting``: the paper weights by numbers of images, "samples".
    """

    name: ClassVar[str] = "fedrod"
    silo: ClassVar[type[SiloSide]] = FedRoDSilo
    sends: ClassVar[str] = "extractor and generic head, number of images"
    shared_classes: ClassVar[tuple[Exposure, ...]] = MODEL
    under_privacy: ClassVar[Protected | str] = (
        "its balanced loss is made from the silo's class counts, which have no mechanism, and trains a head of its own"
    )
    under_masks: ClassVar[Sums | str] = Sums()

    def shared(self, layout: Layout) -> dict[Exposure, tuple[TensorSpec, ...]]:
        """Extractor and generic head."""
        check_linear(self.name, layout)
        return super().shared(layout)


def log_class_shares(labels: Tensor, classes: int) -> Tensor:
    """The logarithms of the classes' shares among labels ``[n]``: ``Tensor[classes]``, float32.

    −∞ for a class that does not occur: the balanced softmax then leaves that class out, and neither gains nor loses
    by its logit.
    """
    counts = torch.bincount(labels, minlength=classes).to(torch.float32)
    return (counts / counts.sum()).log()
