"""Local training in plain PyTorch, and the measurement of a model on a silo's own test images."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from algorithms.method import Correction, derive_seed
from algorithms.models import Layout
from privacy.errors import ConfigurationError, DataError, TrainingError
from privacy.plan import RunPlan, TrainingPlan
from silo.datasets import ImageDataset, to_tensor

EVALUATION_BATCH = 1024
REPORT_SECONDS = 0.5


@dataclass(frozen=True)
class Progress:
    """Where local training stands; ``loss`` is the mean cross entropy of the epoch so far."""

    round: int
    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float


@dataclass(frozen=True)
class Measurement:
    """A model's accuracy (share in [0, 1]) and mean cross entropy on a silo's test images."""

    accuracy: float
    loss: float


def choose_device(name: str) -> torch.device:
    """``auto`` takes CUDA where there is one; raises ``ConfigurationError`` for CUDA where there is none."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigurationError(f"device: {name}: this machine's PyTorch sees no CUDA device; use cpu or auto")
    return torch.device(name)


def check_fits(dataset: ImageDataset, plan: RunPlan) -> None:
    """Raises ``DataError`` if a silo's images do not fit the plan's model."""
    if dataset.image_shape != plan.model.input_shape:
        raise DataError(
            f"{dataset.source}: images are {'×'.join(map(str, dataset.image_shape))} (channels, height, width), but "
            f"run {plan.run} trains on {'×'.join(map(str, plan.model.input_shape))}; cut the shard from the data set "
            "that the federation agreed on"
        )
    if dataset.num_classes > plan.model.classes:
        raise DataError(
            f"{dataset.source}: has {dataset.num_classes} classes, but run {plan.run} is for {plan.model.classes}"
        )
    if not len(dataset.train):
        raise DataError(f"{dataset.source}: holds no training images")


class LocalSite:
    """One silo's data, model and training, as the methods' silo halves see them (``algorithms.method.Site``).

    The order of images follows from the run's seed, the silo's name and the round, so that a round repeated after
    a crash gives the same model.
    """

    def __init__(
        self,
        name: str,
        dataset: ImageDataset,
        model: nn.Module,
        plan: RunPlan,
        *,
        device: torch.device,
        progress: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        check_fits(dataset, plan)
        self.name = name
        self.layout = Layout.of(model)
        self.num_samples = len(dataset.train)
        self._model = model.to(device)
        self._training = plan.training
        self._seed = plan.seed
        self._progress = progress
        self._train = (
            to_tensor(dataset.train.images).to(device),
            torch.as_tensor(dataset.train.labels).to(device),
        )
        self._test = (
            to_tensor(dataset.test.images).to(device),
            torch.as_tensor(dataset.test.labels).to(device),
        )

    @property
    def model(self) -> nn.Module:
        """The plan's architecture; its contents are whatever was loaded or trained last."""
        return self._model

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Loads a whole state, or only some of its tensors, into the model."""
        self._model.load_state_dict(state, strict=False)

    def fit(self, round_number: int, *, correction: Correction | None = None) -> None:
        """The plan's epochs of mini-batches on mean cross entropy, with a fresh optimiser.

        Every epoch visits every image once; its last batch takes what is left over (a single image joins the batch
        before it). Raises ``TrainingError`` if the loss or a parameter is no longer finite.
        """
        seed = derive_seed(self._seed, "training", self.name, round_number)
        torch.manual_seed(seed)  # dropout and the like
        order = torch.Generator().manual_seed(seed)
        optimizer = make_optimizer(self._model, self._training)
        self._model.train()
        epochs = self._training.epochs
        reported = time.monotonic()
        for epoch in range(epochs):
            batches = list(self._batches(order))
            total = torch.zeros((), device=self._train[0].device)
            for step, (images, labels) in enumerate(batches, start=1):
                optimizer.zero_grad(set_to_none=True)
                loss = F.cross_entropy(self._model(images), labels)
                loss.backward()  # type: ignore[no-untyped-call]
                if correction is not None:
                    correction()
                optimizer.step()
                total += loss.detach()
                if time.monotonic() - reported > REPORT_SECONDS:
                    reported = time.monotonic()
                    mean = total.item() / step
                    self._progress(Progress(round_number, epoch + 1, epochs, step, len(batches), mean))
            mean = total.item() / len(batches)
            finite = all(bool(torch.isfinite(p).all()) for p in self._model.parameters())
            if not (finite and torch.isfinite(total)):
                raise TrainingError(
                    f"local training diverged in round {round_number}, epoch {epoch + 1}: the loss is {mean}. "
                    "Nothing of this round was sent; ask the coordinator for a smaller learning rate"
                )
            self._progress(Progress(round_number, epoch + 1, epochs, step, len(batches), mean))

    def measure(self, state: Mapping[str, Tensor]) -> Measurement | None:
        """A state's accuracy and loss on the silo's test images; None where there are none."""
        images, labels = self._test
        if not len(labels):
            return None
        self.load(state)
        self._model.eval()
        correct, loss = 0, 0.0
        with torch.inference_mode():
            for start in range(0, len(labels), EVALUATION_BATCH):
                logits = self._model(images[start : start + EVALUATION_BATCH])
                truth = labels[start : start + EVALUATION_BATCH]
                correct += int((logits.argmax(dim=1) == truth).sum())
                loss += float(F.cross_entropy(logits, truth, reduction="sum"))
        return Measurement(correct / len(labels), loss / len(labels))

    def _batches(self, order: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        images, labels = self._train
        permutation = torch.randperm(len(labels), generator=order).to(labels.device)
        pieces = list(torch.split(permutation, self._training.batch_size))
        if len(pieces) > 1 and len(pieces[-1]) == 1:
            # Batch normalisation cannot take a batch of one image.
            pieces[-2:] = [torch.cat(pieces[-2:])]
        for index in pieces:
            yield images[index], labels[index]


def make_optimizer(model: nn.Module, training: TrainingPlan) -> torch.optim.Optimizer:
    """The plan's optimiser over a model's trainable parameters."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if training.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=training.learning_rate, weight_decay=training.weight_decay, fused=True)
    return torch.optim.SGD(
        parameters, lr=training.learning_rate, momentum=training.momentum, weight_decay=training.weight_decay
    )
