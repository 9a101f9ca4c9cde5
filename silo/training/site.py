"""Local training in plain PyTorch, and the measurement of a model on a silo's own test images."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medsilo.algorithms.datasets import ImageDataset, ImageSplit, image_hashes, to_tensor
from medsilo.algorithms.method import Correction, Memory, Objective, State, Vectors, Watch, derive_seed
from medsilo.algorithms.models import Layout, extractor_of, frozen_names, frozen_state, plain_state
from medsilo.algorithms.protection.private import check_model
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.errors import ConfigurationError, DataError, RefusedError, TrainingError
from medsilo.silo.training.augmentation import Augmenter, seeded
from medsilo.silo.training.data_parallel import Alone, check_layers
from medsilo.silo.training.device import Precision
from medsilo.silo.training.fixed_features import FixedFeatures
from medsilo.silo.training.measuring import Measurement, Progress
from medsilo.silo.training.optimizers import NOISED, keep, resumed
from medsilo.silo.training.testing import EVALUATION_BATCH, judge, mean

if TYPE_CHECKING:
    from medsilo.privacy.budget.kept_releases import KeptReleases
    from medsilo.privacy.budget.noise import NoiseSource
    from medsilo.silo.training.private_average import PrivateAverages
    from medsilo.silo.training.private_training import Charge, PrivateTrainer

REPORT_SECONDS = 0.5


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
    """One silo's data, model and training, as the methods' silo sides see them (``medsilo.algorithms.method.Site``).

    The order of images follows from the run's seed, the silo's name and the round, so that a round repeated after
    a crash gives the same model. A plan with privacy is trained with DP-SGD: ``charge`` is called before each training
    and each average, gives the key of all that it draws (the same after a crash), and raises if the account does not
    allow it; images are given to nobody. ``permit`` is told, with the round, of steps before they are taken, and raises
    for more than the hospital allows. ``noise``: where it is drawn from instead; ``kept`` is where noised
    averages that last are kept. ``precision``: in which numbers ``fit`` computes; parameters, gradients, the
    optimiser and measurements stay float32 (automatic mixed precision). Raises ``ConfigurationError`` for another than
    float32 with privacy. ``place``: this process's among those that train the silo's model together (see
    ``medsilo.silo.training.data_parallel``); a plan with privacy is trained by one alone.

    ``optimizers`` is what the runtime keeps across rounds and restarts, beside the side's memory, where the plan says
    so (``medsilo.silo.training.optimizers``): for each phase a group with the optimiser's state. With privacy it is
    made from noised gradients alone. Modules of a method's own begin anew in every round. Where noise is shared out,
    it holds the whole numbers that are to be masked, too, and ``num_samples`` is the number of units.

    A model whose extractor is fixed or frozen (``extractor_of``) is given its images' features, which are made once and
    kept in the folder ``features``, in memory alone by default; not in training with augmentation, which makes other
    images at each step. What a method does with the images themselves, it does with the images. What is frozen stands
    in the model alone (``medsilo.algorithms.models.frozen``): methods see states without it.
    """

    def __init__(
        self,
        name: str,
        dataset: ImageDataset,
        model: nn.Module,
        plan: RunPlan,
        *,
        device: torch.device,
        precision: Precision = "float32",
        progress: Callable[[Progress], None] = lambda _: None,
        permit: Callable[[int, int], object] = lambda _round, _steps: None,
        charge: Charge | None = None,
        noise: NoiseSource | None = None,
        kept: KeptReleases | None = None,
        place: Alone | None = None,
        features: Path | None = None,
    ) -> None:
        check_fits(dataset, plan)
        self._place = place or Alone()
        if self._place.size > 1:
            check_layers(model)
        self.name = name
        self.layout = Layout.of(model)
        self.input_shape = plan.model.input_shape
        self.num_samples = self.num_units = len(dataset.train)
        self.num_classes = plan.model.classes
        self.training = plan.training
        self.rounds = plan.training_rounds
        self._device, self._precision = device, precision
        self._model = model.to(device)
        self._seed = plan.seed
        self._progress = progress
        self._permit = permit
        self._dataset = dataset
        self._train = _on(device, dataset.train)
        self._test = _on(device, dataset.test)
        extractor = extractor_of(self._model)
        self._features = None if extractor is None else FixedFeatures(extractor, dataset, device, features)
        self._left: Tensor | None = None
        self._class_weights = self._weights_of_classes()
        self.optimizers: Memory = {}
        self._reserved: tuple[Tensor, Tensor] | None = None
        self._validation: tuple[Tensor, Tensor] | None = None
        self._private: PrivateTrainer | None = None
        self._averages: PrivateAverages | None = None
        self._fraction_bits = plan.secure_aggregation.fraction_bits if plan.secure_aggregation is not None else 0
        if plan.privacy is not None:
            if precision != "float32":
                raise ConfigurationError(
                    f"precision: {precision}: run {plan.run} trains with differential privacy, whose bound on each "
                    "gradient is shown for float32 alone; use precision: float32"
                )
            if charge is None:
                raise ValueError("a plan with privacy needs an account to charge")
            from medsilo.silo.training.private_average import PrivateAverages
            from medsilo.silo.training.private_training import PrivateTrainer, owners_of  # Opacus takes seconds to load

            check_model(model, plan.model.name, plan.model.input_shape)
            owners = owners_of(dataset, plan.privacy.unit)
            self._private = PrivateTrainer(plan.privacy, owners, charge, noise=noise)
            if plan.trust is not None:
                self.num_samples = self._private.units  # of which the sum of gradients is one
            self._averages = PrivateAverages(plan.privacy, owners, charge, noise=noise, kept=kept)
            self.num_units = self._averages.units

    @property
    def model(self) -> nn.Module:
        """The plan's architecture; its contents are whatever was loaded or trained last."""
        return self._model

    def with_model(self, model: nn.Module) -> LocalSite:
        """The same silo, with the same images in the same orders, that trains another module of the same kind."""
        twin = copy.copy(self)
        twin._model = model
        return twin

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Loads a whole state, or only some of its tensors, into the model."""
        self._model.load_state_dict(state, strict=False)

    def start(self, whole: Mapping[str, Tensor]) -> State:
        """Takes the starting model, what is frozen included; returns the state that a side begins with."""
        frozen = frozen_names(self._model)
        if frozen:
            self.load({name: whole[name] for name in frozen})
        return {name: tensor for name, tensor in whole.items() if name not in frozen}

    def frozen(self) -> State:
        """What is frozen; empty where all is trained. ``load`` takes it again."""
        return frozen_state(self._model)

    def plain(self, state: Mapping[str, Tensor]) -> State:
        """A state of a side's as that of the plan's network without ``train``: what programs know that load it."""
        return plain_state(self._model, state)

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
        """See ``medsilo.algorithms.method.Site``.

        Every epoch visits every image once; its last batch takes what is left over (a single image joins the batch
        before it). Raises ``TrainingError`` if the loss or a parameter is no longer finite. With privacy an epoch is as
        many steps as take each image once on average; raises ``RefusedError`` for an objective or module of the
        method's own, for whose gradients there is no bound, and ``BudgetError`` if the account does not allow it.
        """
        if self._private is not None:
            _refuse_own(objective, extra)
            if self._private.plan.honest is not None:
                return self._fit_together(self._private, round_number, correction, trainable, epochs, phase)
            return self._fit_privately(self._private, round_number, correction, trainable, epochs, phase, watch)
        loss_of = objective or self._plain_loss
        augment = self._augmenter(round_number, phase)
        chosen = chosen_of(self._model, trainable)
        trained = [*chosen.values(), *(extra.parameters() if extra is not None else ())]
        optimizer = resumed(self.optimizers, trained, chosen, phase, self.training)
        correct = correction.bind(chosen) if correction is not None else _nothing
        self._model.train()
        epochs = epochs or self.training.epochs
        reported = time.monotonic()
        steps = 0
        with _only(self._model, chosen), self._place.training(self._model, *([extra] if extra is not None else [])):
            given = self.inputs()
            for epoch, batches in enumerate(self.orders(round_number, epochs, phase)):
                self._permit(round_number, len(batches))
                total = torch.zeros((), device=self._train[0].device)
                for step, index in enumerate(batches, start=1):
                    optimizer.zero_grad(set_to_none=True)
                    loss = self._gradients(given, index, trained, augment, loss_of)
                    if watch is not None:
                        watch(gradients_of(chosen))
                    correct()
                    optimizer.step()
                    steps += 1
                    total += loss
                    if step < len(batches) and time.monotonic() - reported > REPORT_SECONDS:
                        reported = time.monotonic()
                        mean = total.item() / step
                        self._progress(Progress(round_number, epoch + 1, epochs, step, len(batches), mean))
                mean = total.item() / len(batches)
                finite = all(_finite(parameter.detach()) for parameter in trained)
                if not (finite and torch.isfinite(total)):
                    raise diverged(round_number, epoch, mean)
                self._progress(Progress(round_number, epoch + 1, epochs, step, len(batches), mean))
        if self.training.keep_optimizer_state:
            keep(self.optimizers, optimizer, chosen, phase)
        optimizer.zero_grad(set_to_none=True)  # as large as the model, and nobody looks at them any more
        return steps

    def _gradients(
        self,
        given: tuple[Tensor, Tensor],
        index: Tensor,
        trained: Sequence[nn.Parameter],
        augment: Augmenter,
        loss_of: Objective,
    ) -> Tensor:
        """Makes a batch's gradients, and gives its loss."""
        images, labels = given
        part = self._place.part(index)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._precision == "bfloat16"):
            changed = augment(images[part.index], first=part.first, of=len(index))
            loss = loss_of(self._model, changed, labels[part.index])
        return self._place.backward(loss, part, trained)

    def _fit_privately(
        self,
        private: PrivateTrainer,
        round_number: int,
        correction: Correction | None,
        trainable: Collection[str] | None,
        epochs: int | None,
        phase: str,
        watch: Watch | None,
    ) -> int:
        from medsilo.silo.training.private_training import reads_of

        chosen = chosen_of(self._model, trainable)
        optimizer = resumed(self.optimizers, list(chosen.values()), chosen, phase, self.training)
        epochs = epochs or self.training.epochs
        steps, per_epoch = private.plan.steps_of(epochs), private.plan.steps_of(1)
        self._permit(round_number, steps)
        self._model.train()
        reported = time.monotonic()

        def progress(step: int, loss: float) -> None:
            nonlocal reported
            epoch = (step - 1) // per_epoch
            if step % per_epoch == 0:
                if not all(_finite(parameter.detach()) for parameter in chosen.values()):
                    raise diverged(round_number, epoch, loss)
            elif time.monotonic() - reported <= REPORT_SECONDS:
                return
            reported = time.monotonic()
            self._progress(Progress(round_number, epoch + 1, epochs, (step - 1) % per_epoch + 1, per_epoch, loss))

        with _only(self._model, chosen):
            private.train(
                self._model,
                chosen,
                optimizer,
                self.inputs(),
                round_number=round_number,
                phase=phase,
                steps=steps,
                reads=reads_of(self._model, chosen, optimizer, correction, steps),
                correct=correction.bind(chosen) if correction is not None else _nothing,
                progress=progress,
                augmentation=self.training.augmentation,
                watch=watch,
            )
        if self.training.keep_optimizer_state:
            keep(self.optimizers, optimizer, chosen, phase)
        return steps

    def _fit_together(
        self,
        private: PrivateTrainer,
        round_number: int,
        correction: Correction | None,
        trainable: Collection[str] | None,
        epochs: int | None,
        phase: str,
    ) -> int:
        """One step with noise that is shared out: see ``medsilo.silo.training.shared_step``."""
        from medsilo.silo.training.private_training import reads_of
        from medsilo.silo.training.shared_step import step

        if correction is not None or epochs not in (None, 1) or phase != "training":
            raise RefusedError("noise is shared out in one plain step a round, from the mean that all were handed")
        chosen = chosen_of(self._model, trainable)
        optimizer = resumed(self.optimizers, list(chosen.values()), chosen, phase, self.training)
        self._permit(round_number, 1)
        self._model.train()
        with _only(self._model, chosen):
            self.optimizers[NOISED] = step(
                private,
                self._model,
                chosen,
                optimizer,
                self.inputs(),
                self.training,
                fraction_bits=self._fraction_bits,
                round_number=round_number,
                rounds=self.rounds,
                reads=reads_of(self._model, chosen, optimizer, None, 1),
                progress=lambda _, loss: self._progress(Progress(round_number, 1, 1, 1, 1, loss)),
            )
        if self.training.keep_optimizer_state:
            keep(self.optimizers, optimizer, chosen, phase)
        return 1

    @property
    def noised(self) -> Mapping[str, Tensor]:
        """What the last step with noise that is shared out sends, by parameter: int64, to be masked as it is."""
        return self.optimizers.get(NOISED, {})

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """See ``medsilo.algorithms.method.Site``. With weights of classes the batch's mean is the weighted one: the sum
        of the weighted cross entropies, divided by the sum of the weights."""
        weights = self._class_weights
        if weights is None or self._place.size == 1:
            return F.cross_entropy(logits, labels, weight=weights)
        total = F.cross_entropy(logits, labels, weight=weights, reduction="sum")
        return total / (self._place.mean(weights[labels]) * len(labels))

    def batch_mean(self, values: Tensor) -> Tensor:
        """See ``medsilo.algorithms.method.Site``."""
        return self._place.mean(values)

    def _plain_loss(self, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        return self.loss(model(images), labels)

    def _weights_of_classes(self) -> Tensor | None:
        return None if self.training.class_weights is None else _balanced(self._train[1], self.num_classes)

    def _augmenter(self, round_number: int, phase: str) -> Augmenter:
        seed = derive_seed(self._seed, "augmentation", phase, self.name, round_number)
        return Augmenter(self.training.augmentation, seeded(seed))

    def average(
        self,
        content: str,
        vectors: Vectors,
        *,
        round_number: int,
        lasting: bool = False,
        at_home: bool = False,
        inputs: bool = False,
        at_once: int | None = None,
    ) -> Tensor:
        """See ``medsilo.algorithms.method.Site``.

        With privacy, raises ``RefusedError`` for a content that the plan does not name, and ``BudgetError`` if the
        account does not allow it.
        """
        given, labels = self.inputs() if inputs else self._train
        parts = (
            vectors(images, truth).detach().to("cpu", torch.float64)
            for images, truth in zip(
                torch.split(given, at_once or EVALUATION_BATCH),
                torch.split(labels, at_once or EVALUATION_BATCH),
                strict=True,
            )
        )
        if self._averages is None:
            return torch.stack([part.sum(dim=0) for part in parts]).sum(dim=0) / len(labels)
        if at_home:
            return self._averages.exact(content, parts)
        return self._averages.average(content, parts, round_number=round_number, lasting=lasting)

    def noise(self, content: str) -> float:
        """See ``medsilo.algorithms.method.Site``."""
        return 0.0 if self._averages is None else self._averages.noise(content)

    def _give_images(self) -> None:
        if self._private is not None:
            raise RefusedError(
                "this method reads the images outside the plan's training; under differential privacy nothing bounds "
                "what that tells. Use another method, or a run without privacy"
            )

    def batches(
        self, round_number: int, *, epochs: int | None = None, phase: str = "training"
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """See ``medsilo.algorithms.method.Site``."""
        self._give_images()
        if self._place.size > 1:
            raise ConfigurationError(
                "device: this method takes training steps of its own, which several processes would only repeat; name "
                "one device instead of several"
            )
        images, labels = self._train
        augment = self._augmenter(round_number, phase)
        for order in self.orders(round_number, epochs or self.training.epochs, phase):
            self._permit(round_number, len(order))
            for index in order:
                yield augment(images[index]), labels[index]

    def train_data(self) -> tuple[Tensor, Tensor]:
        """See ``medsilo.algorithms.method.Site``."""
        self._give_images()
        return self._train

    def inputs(self) -> tuple[Tensor, Tensor]:
        """What ``fit`` gives to the model, and the labels ``[n]``: the training images ``[n, C, H, W]``, or their
        features ``[n, F]``."""
        images, labels = self._train
        if self._features is None or self.training.augmentation:
            return images, labels
        features = self._features.of("train")
        return features if self._left is None else features[self._left], labels

    def reserve(self, share: float) -> None:
        """See ``medsilo.algorithms.method.Site``. At least one image is set aside, and at least one is left."""
        self._give_images()
        if self._reserved is not None:
            raise ValueError("validation images have been set aside already")
        images, labels = self._train
        count = min(max(1, round(share * len(labels))), len(labels) - 1)
        order = torch.Generator().manual_seed(derive_seed(self._seed, "reserve", self.name))
        permutation = torch.randperm(len(labels), generator=order).to(labels.device)
        aside, rest = permutation[:count].sort().values, permutation[count:].sort().values
        self._reserved = (images[aside], labels[aside])
        self._train, self._left = (images[rest], labels[rest]), rest
        self.num_samples = self.num_units = len(rest)
        self._class_weights = self._weights_of_classes()

    def reserved_data(self) -> tuple[Tensor, Tensor]:
        """See ``medsilo.algorithms.method.Site``."""
        if self._reserved is None:
            raise ValueError("no validation images have been set aside")
        return self._reserved

    def holds_any(self, hashes: Collection[bytes]) -> int:
        """See ``medsilo.algorithms.method.Site``."""
        self._give_images()
        looked_for = frozenset(hashes)
        splits = (self._dataset.train, self._dataset.test)
        return sum(digest in looked_for for split in splits for digest in image_hashes(split.images))

    def measure(self, state: Mapping[str, Tensor]) -> Measurement | None:
        """A state's accuracy and loss on the silo's test images; None where there are none."""
        return self._measured(state, self._judged("test", self._dataset.test))

    def validate(self, state: Mapping[str, Tensor]) -> Measurement | None:
        """The same on images by which models may be chosen: the shard's validation images, else those that the method
        has set aside; None where there are neither."""
        if self._dataset.validation is not None:
            self._validation = self._validation or self._judged("validation", self._dataset.validation)
        images = self._validation or self._reserved
        return None if images is None else self._measured(state, images)

    def validation_loss(self, state: Mapping[str, Tensor]) -> float | None:
        """See ``medsilo.algorithms.method.Site``."""
        measured = self.validate(state)
        return None if measured is None else measured.loss

    def test(self, state: Mapping[str, Tensor]) -> tuple[npt.NDArray[np.bool_], float]:
        """On which of the silo's test images a state is right, ``bool [m]``, and the sum of its cross entropies."""
        return self._judge(state, self._judged("test", self._dataset.test))

    def _judged(self, name: Literal["test", "validation"], split: ImageSplit) -> tuple[Tensor, Tensor]:
        if self._features is None:
            return self._test if name == "test" else _on(self._device, split)
        return self._features.of(name), torch.as_tensor(split.labels).to(self._device)

    def _measured(self, state: Mapping[str, Tensor], split: tuple[Tensor, Tensor]) -> Measurement | None:
        return mean(*self._judge(state, split), split[1].cpu().numpy())

    def _judge(self, state: Mapping[str, Tensor], split: tuple[Tensor, Tensor]) -> tuple[npt.NDArray[np.bool_], float]:
        self.load(state)
        return judge(self._model, *split)

    def orders(self, round_number: int, epochs: int, phase: str) -> Iterator[list[Tensor]]:
        """For each epoch the batches of ``fit`` as indices into the training images; seeds PyTorch's own generator."""
        seed = derive_seed(self._seed, phase, self.name, round_number)
        # Dropout and the like; every process draws its own, for images of its own.
        torch.manual_seed(derive_seed(seed, self._place.rank) if self._place.rank else seed)
        order = torch.Generator().manual_seed(seed)
        labels = self._train[1]
        sizes = self.batch_sizes()
        for _ in range(epochs):
            yield list(torch.split(torch.randperm(len(labels), generator=order).to(labels.device), sizes))

    def batch_sizes(self) -> list[int]:
        """The sizes of an epoch's batches, in order."""
        whole, left = divmod(len(self._train[1]), self.training.batch_size)
        sizes = [self.training.batch_size] * whole + ([left] if left else [])
        if len(sizes) > 1 and sizes[-1] == 1:
            # Batch normalisation cannot take a batch of one image.
            sizes[-2:] = [sizes[-2] + 1]
        return sizes


def _refuse_own(objective: Objective | None, extra: nn.Module | None) -> None:
    if objective is not None or extra is not None:
        raise RefusedError(
            "this method trains on an objective or a module of its own; under differential privacy the gradients of "
            "those have no bound here. Use a method that trains on the cross entropy"
        )


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


def _balanced(labels: Tensor, classes: int) -> Tensor:
    """``float32 [classes]``: n / (K · n_c) for each of the K classes that n labels have, 0 for the others."""
    counts = torch.bincount(labels, minlength=classes)
    weights = len(labels) / (int((counts > 0).sum()) * counts.clamp(min=1))
    return torch.where(counts > 0, weights, 0).float()


def _on(device: torch.device, split: ImageSplit) -> tuple[Tensor, Tensor]:
    return to_tensor(split.images).to(device), torch.as_tensor(split.labels).to(device)


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


def _finite(numbers: Tensor) -> bool:
    # A finite sum means finite numbers, at a fraction of the cost; sums of finite ones may overflow, so look closer.
    return bool(torch.isfinite(numbers.sum())) or bool(torch.isfinite(numbers).all())


def _nothing() -> None:
    pass
