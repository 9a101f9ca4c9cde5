"""Local training in plain PyTorch, as a run's plan says: ordinary, with DP-SGD, or with noise that is shared out."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medsilo.algorithms.method import Correction, Memory, Objective, Watch, derive_seed
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.errors import RefusedError, TrainingError
from medsilo.silo.training.augmentation import Augmenter, seeded
from medsilo.silo.training.data_parallel import Alone
from medsilo.silo.training.device import Precision
from medsilo.silo.training.images import SiloImages
from medsilo.silo.training.measuring import Progress
from medsilo.silo.training.optimizers import NOISED, keep, resumed

if TYPE_CHECKING:
    from medsilo.silo.training.private_training import PrivateTrainer

REPORT_SECONDS = 0.5


@dataclass(frozen=True)
class Training:
    """One training. The fields but the first two are the arguments of ``medsilo.algorithms.method.Site.fit``.

    Attributes:
        model: is trained in its place.
        optimizers: what is kept across rounds, by group; is brought up to date.
    """

    model: nn.Module
    optimizers: Memory
    round_number: int
    correction: Correction | None
    objective: Objective | None
    trainable: Collection[str] | None
    extra: nn.Module | None
    epochs: int | None
    phase: str
    watch: Watch | None


class LocalTrainer:
    """Trains models on one silo's images. It has no state of its own: what lasts is in the models and optimisers.

    Args:
        name: the silo's, which enters the order of the images.
        images: what it trains on.
        plan: the run's.
        device: where the models are.
        precision: in which numbers ordinary training computes; parameters, gradients and optimiser stay float32.
        place: this process's among those that train together.
        private: takes the steps of a plan with privacy; None without.
        progress: is told where a training stands.
        permit: is told, with the round, of steps before they are taken; raises for more than the hospital allows.
    """

    def __init__(
        self,
        name: str,
        images: SiloImages,
        plan: RunPlan,
        *,
        device: torch.device,
        precision: Precision,
        place: Alone,
        private: PrivateTrainer | None,
        progress: Callable[[Progress], None],
        permit: Callable[[int, int], object],
    ) -> None:
        self._name, self._images = name, images
        self._plan = plan.training
        self._seed = plan.seed
        self._fraction_bits = plan.secure_aggregation.fraction_bits if plan.secure_aggregation is not None else 0
        self._device, self._precision = device, precision
        self._place, self._private = place, private
        self._progress, self._permit = progress, permit

    def train(self, asked: Training) -> int:
        """Does a training; see ``medsilo.silo.training.site.LocalSite.fit``, whose errors it raises."""
        if self._private is None:
            return self._plainly(asked)
        if asked.objective is not None or asked.extra is not None:
            raise RefusedError(
                "this method trains on an objective or a module of its own; under differential privacy the gradients "
                "of those have no bound here. Use a method that trains on the cross entropy"
            )
        together = self._private.plan.honest is not None
        return self._together(self._private, asked) if together else self._privately(self._private, asked)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """See ``medsilo.algorithms.method.Site``. With weights of classes the batch's mean is the weighted one: the sum
        of the weighted cross entropies, divided by the sum of the weights."""
        weights = self._images.class_weights
        if weights is None or self._place.size == 1:
            return F.cross_entropy(logits, labels, weight=weights)
        total = F.cross_entropy(logits, labels, weight=weights, reduction="sum")
        return total / (self._place.mean(weights[labels]) * len(labels))

    def orders(self, round_number: int, epochs: int, phase: str) -> Iterator[list[Tensor]]:
        """For each epoch its batches, as indices into the training images; seeds PyTorch's own generator."""
        seed = derive_seed(self._seed, phase, self._name, round_number)
        # Dropout and the like; every process draws its own, for images of its own.
        torch.manual_seed(derive_seed(seed, self._place.rank) if self._place.rank else seed)
        yield from self._images.orders(epochs, seed)

    def batches(self, round_number: int, epochs: int | None, phase: str) -> Iterator[tuple[Tensor, Tensor]]:
        """The mini-batches (images, labels) that an ordinary training in one process goes through."""
        images, labels = self._images.train
        augment = self._augmenter(round_number, phase)
        for order in self.orders(round_number, epochs or self._plan.epochs, phase):
            self._permit(round_number, len(order))
            for index in order:
                yield augment(images[index]), labels[index]

    def _plainly(self, asked: Training) -> int:
        model, number = asked.model, asked.round_number
        augment = self._augmenter(number, asked.phase)
        own = [] if asked.extra is None else [asked.extra]
        epochs = asked.epochs or self._plan.epochs
        reported = time.monotonic()
        steps = 0
        with self._changing(asked) as (chosen, trained, optimizer), self._place.training(model, *own):
            correct = _correcting(asked, chosen)
            given = self._images.inputs()
            for epoch, batches in enumerate(self.orders(number, epochs, asked.phase)):
                self._permit(number, len(batches))
                total = torch.zeros((), device=given[1].device)
                for step, index in enumerate(batches, start=1):
                    optimizer.zero_grad(set_to_none=True)
                    loss = self._gradients(asked, given, index, trained, augment)
                    if asked.watch is not None:
                        asked.watch(gradients_of(chosen))
                    correct()
                    optimizer.step()
                    steps += 1
                    total += loss
                    if step < len(batches) and time.monotonic() - reported > REPORT_SECONDS:
                        reported = time.monotonic()
                        mean = total.item() / step
                        self._progress(Progress(number, epoch + 1, epochs, step, len(batches), mean))
                mean = total.item() / len(batches)
                if not (_all_finite(trained) and torch.isfinite(total)):
                    raise diverged(number, epoch, mean)
                self._progress(Progress(number, epoch + 1, epochs, step, len(batches), mean))
        optimizer.zero_grad(set_to_none=True)  # as large as the model, and nobody looks at them any more
        return steps

    def _gradients(
        self,
        asked: Training,
        given: tuple[Tensor, Tensor],
        index: Tensor,
        trained: Sequence[nn.Parameter],
        augment: Augmenter,
    ) -> Tensor:
        """Makes a batch's gradients, and gives its loss."""
        images, labels = given
        part = self._place.part(index)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._precision == "bfloat16"):
            changed = augment(images[part.index], first=part.first, of=len(index))
            loss = (asked.objective or self._plain_loss)(asked.model, changed, labels[part.index])
        return self._place.backward(loss, part, trained)

    def _privately(self, private: PrivateTrainer, asked: Training) -> int:
        """DP-SGD: see ``medsilo.silo.training.private_training``."""
        from medsilo.silo.training.private_training import reads_of

        number, epochs = asked.round_number, asked.epochs or self._plan.epochs
        steps, per_epoch = private.plan.steps_of(epochs), private.plan.steps_of(1)
        self._permit(number, steps)
        reported = time.monotonic()
        with self._changing(asked) as (chosen, trained, optimizer):

            def progress(step: int, loss: float) -> None:
                nonlocal reported
                epoch = (step - 1) // per_epoch
                if step % per_epoch == 0:
                    if not _all_finite(trained):
                        raise diverged(number, epoch, loss)
                elif time.monotonic() - reported <= REPORT_SECONDS:
                    return
                reported = time.monotonic()
                self._progress(Progress(number, epoch + 1, epochs, (step - 1) % per_epoch + 1, per_epoch, loss))

            private.train(
                asked.model,
                chosen,
                optimizer,
                self._images.inputs(),
                round_number=number,
                phase=asked.phase,
                steps=steps,
                reads=reads_of(asked.model, chosen, optimizer, asked.correction, steps),
                correct=_correcting(asked, chosen),
                progress=progress,
                augmentation=self._plan.augmentation,
                watch=asked.watch,
            )
        return steps

    def _together(self, private: PrivateTrainer, asked: Training) -> int:
        """One step with noise that is shared out: see ``medsilo.silo.training.shared_step``."""
        from medsilo.silo.training.private_training import reads_of
        from medsilo.silo.training.shared_step import step

        if asked.correction is not None or asked.epochs not in (None, 1) or asked.phase != "training":
            raise RefusedError("noise is shared out in one plain step a round, from the mean that all were handed")
        number = asked.round_number
        self._permit(number, 1)
        with self._changing(asked) as (chosen, _, optimizer):
            asked.optimizers[NOISED] = step(
                private,
                asked.model,
                chosen,
                optimizer,
                self._images.inputs(),
                self._plan,
                fraction_bits=self._fraction_bits,
                round_number=number,
                reads=reads_of(asked.model, chosen, optimizer, None, 1),
                progress=lambda _, loss: self._progress(Progress(number, 1, 1, 1, 1, loss)),
            )
        return 1

    @contextmanager
    def _changing(
        self, asked: Training
    ) -> Iterator[tuple[dict[str, nn.Parameter], list[nn.Parameter], torch.optim.Optimizer]]:
        """The model's parameters that the training changes, these and the method's own, and their optimiser. Inside,
        the model's others have no gradients; a training that ends well is what the optimiser remembers."""
        chosen = chosen_of(asked.model, asked.trainable)
        trained = [*chosen.values(), *(asked.extra.parameters() if asked.extra is not None else ())]
        optimizer = resumed(asked.optimizers, trained, chosen, asked.phase, self._plan)
        asked.model.train()
        with _only(asked.model, chosen):
            yield chosen, trained, optimizer
        if self._plan.keep_optimizer_state:
            keep(asked.optimizers, optimizer, chosen, asked.phase)

    def _plain_loss(self, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        return self.loss(model(images), labels)

    def _augmenter(self, round_number: int, phase: str) -> Augmenter:
        seed = derive_seed(self._seed, "augmentation", phase, self._name, round_number)
        return Augmenter(self._plan.augmentation, seeded(seed))


def diverged(round_number: int, epoch: int, loss: float) -> TrainingError:
    """The error of a training whose loss or model is no longer finite; ``epoch`` counts from 0."""
    return TrainingError(
        f"local training diverged in round {round_number}, epoch {epoch + 1}: the loss is {loss}. "
        "Nothing of this round was sent; a smaller learning rate in the coordinator's plan may help"
    )


def gradients_of(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The gradients that parameters have."""
    return {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}


def chosen_of(model: nn.Module, trainable: Collection[str] | None) -> dict[str, nn.Parameter]:
    """The parameters that a training changes: of those that can be trained, the named ones; all for None."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (trainable is None or name in trainable)
    }


@contextmanager
def _only(model: nn.Module, chosen: Collection[str]) -> Iterator[None]:
    """Inside, only the chosen parameters have gradients."""
    frozen = [p for name, p in model.named_parameters() if p.requires_grad and name not in chosen]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


def _correcting(asked: Training, chosen: Mapping[str, nn.Parameter]) -> Callable[[], None]:
    return asked.correction.bind(chosen) if asked.correction is not None else _nothing


def _nothing() -> None:
    pass


def _all_finite(parameters: Sequence[nn.Parameter]) -> bool:
    return all(_finite(parameter.detach()) for parameter in parameters)


def _finite(numbers: Tensor) -> bool:
    # A finite sum means finite numbers, at a fraction of the cost; sums of finite ones may overflow, so look closer.
    return bool(torch.isfinite(numbers.sum())) or bool(torch.isfinite(numbers).all())
