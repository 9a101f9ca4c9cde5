"""A small site for the methods' silo sides: a model of 26 numbers, eight images, training that is easy to foresee."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from medsilo.algorithms.method import Correction, Objective, Vectors, Watch
from medsilo.algorithms.models import Layout
from medsilo.privacy.consent.plan import TrainingPlan


def small_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2))


@dataclass
class SmallSite:
    """A site whose local training is ``steps`` of SGD on a loss that pulls every parameter to 1.

    The correction is applied between backward and step, as a runtime has to.
    """

    name: str = "a"
    input_shape: tuple[int, int, int] = (1, 1, 4)
    num_samples: int = 8
    num_units: int = 8
    num_classes: int = 2
    rounds: int = 3
    training: TrainingPlan = field(default_factory=lambda: TrainingPlan(optimizer="sgd", learning_rate=0.1, epochs=1))
    steps: int = 3
    pull: float = 1.0
    model: nn.Module = field(default_factory=small_model)
    fits: int = 0

    @property
    def layout(self) -> Layout:
        return Layout.of(self.model)

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.model.load_state_dict(state, strict=False)

    def fit(
        self,
        round_number: int,
        *,
        correction: Correction | None = None,
        objective: Objective | None = None,
        trainable: Collection[str] | None = None,
        extra: nn.Module | None = None,
        epochs: int | None = None,
        phase: str = "training",
        watch: Watch | None = None,
    ) -> int:
        self.fits += 1
        self.model.train()
        self.model(torch.randn(8, 4, generator=torch.Generator().manual_seed(round_number)))  # moves the buffers
        chosen = {n: p for n, p in self.model.named_parameters() if trainable is None or n in trainable}
        trained = [*chosen.values(), *(extra.parameters() if extra is not None else ())]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        correct = correction.bind(chosen) if correction is not None else lambda: None
        for _ in range(self.steps):
            optimizer.zero_grad()
            if objective is not None:
                loss = objective(self.model, *self.train_data())
            else:
                loss = self.pull / 2 * sum(((parameter - 1) ** 2).sum() for parameter in chosen.values())
            loss.backward()
            if watch is not None:
                watch({n: p.grad for n, p in chosen.items() if p.grad is not None})
            correct()
            optimizer.step()
        return self.steps

    def batch_mean(self, values: Tensor) -> Tensor:
        return values.mean(dim=0)

    def batches(
        self, round_number: int, *, epochs: int | None = None, phase: str = "training"
    ) -> Iterator[tuple[Tensor, Tensor]]:
        images, labels = self.train_data()
        for _ in range(epochs or 1):
            yield images[:4], labels[:4]
            yield images[4:], labels[4:]

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits, labels)

    def average(self, content: str, vectors: Vectors, *, round_number: int, **_: object) -> Tensor:
        return vectors(*self.train_data()).detach().to(torch.float64).mean(dim=0)

    has_validation = False

    def validation_loss(self, state: Mapping[str, Tensor]) -> float | None:
        return None

    def noise(self, content: str) -> float:
        return 0.0

    def train_data(self) -> tuple[Tensor, Tensor]:
        return torch.randn(8, 4, generator=torch.Generator().manual_seed(99)), torch.arange(8) % 2

    def reserve(self, share: float) -> None:
        del share

    def reserved_data(self) -> tuple[Tensor, Tensor]:
        images, labels = self.train_data()
        return images[:2], labels[:2]

    def holds_any(self, hashes: Collection[bytes]) -> int:
        return len(hashes) and 0
