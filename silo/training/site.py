"""What a silo is to a method's silo side: its data, its model and its training, within what the plan allows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from medsilo.algorithms.datasets import ImageDataset
from medsilo.algorithms.method import Correction, Memory, Objective, State, Vectors, Watch, derive_seed
from medsilo.algorithms.models import Layout, frozen_names, frozen_state, plain_state
from medsilo.algorithms.protection.private import check_model
from medsilo.privacy.budget.promise import PrivacyPlan
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.errors import ConfigurationError, RefusedError
from medsilo.silo.training.data_parallel import Alone, check_layers
from medsilo.silo.training.device import Precision
from medsilo.silo.training.images import SiloImages, check_fits
from medsilo.silo.training.local_training import LocalTrainer, Training
from medsilo.silo.training.measuring import Measurement, Progress
from medsilo.silo.training.optimizers import NOISED
from medsilo.silo.training.testing import EVALUATION_BATCH, judge, mean

if TYPE_CHECKING:
    from medsilo.privacy.budget.kept_releases import KeptReleases
    from medsilo.privacy.budget.noise import NoiseSource
    from medsilo.silo.training.private_average import PrivateAverages
    from medsilo.silo.training.private_training import Charge, PrivateTrainer


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
        self.optimizers: Memory = {}
        self._model = model.to(device)
        self._seed = plan.seed
        self._images = SiloImages(dataset, self._model, plan, device, features)
        self._averages: PrivateAverages | None = None
        private = None
        if plan.privacy is not None:
            _check_precision(plan, precision)
            check_model(model, plan.model.name, plan.model.input_shape)
            private, self._averages = _under_privacy(plan.privacy, dataset, charge, noise, kept)
            if plan.trust is not None:
                self.num_samples = private.units  # of which the sum of gradients is one
            self.num_units = self._averages.units
        self._trainer = LocalTrainer(
            name,
            self._images,
            plan,
            device=device,
            precision=precision,
            place=self._place,
            private=private,
            progress=progress,
            permit=permit,
        )

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
        if not frozen_names(self._model).isdisjoint(state):
            self._images.forget_features()

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
        asked = Training(
            self._model,
            self.optimizers,
            round_number,
            correction=correction,
            objective=objective,
            trainable=trainable,
            extra=extra,
            epochs=epochs,
            phase=phase,
            watch=watch,
        )
        return self._trainer.train(asked)

    @property
    def noised(self) -> Mapping[str, Tensor]:
        """What the last step with noise that is shared out sends, by parameter: int64, to be masked as it is."""
        return self.optimizers.get(NOISED, {})

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """See ``medsilo.algorithms.method.Site``."""
        return self._trainer.loss(logits, labels)

    def batch_mean(self, values: Tensor) -> Tensor:
        """See ``medsilo.algorithms.method.Site``."""
        return self._place.mean(values)

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
        given, labels = self.inputs() if inputs else self._images.train
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
        if self._averages is not None:
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
        yield from self._trainer.batches(round_number, epochs, phase)

    def train_data(self) -> tuple[Tensor, Tensor]:
        """See ``medsilo.algorithms.method.Site``."""
        self._give_images()
        return self._images.train

    def inputs(self) -> tuple[Tensor, Tensor]:
        """What ``fit`` gives to the model, and the labels ``[n]``: the training images ``[n, C, H, W]``, or their
        features ``[n, F]``."""
        return self._images.inputs()

    def reserve(self, share: float) -> None:
        """See ``medsilo.algorithms.method.Site``. At least one image is set aside, and at least one is left."""
        self._give_images()
        self.num_samples = self.num_units = self._images.reserve(share, derive_seed(self._seed, "reserve", self.name))

    def reserved_data(self) -> tuple[Tensor, Tensor]:
        """See ``medsilo.algorithms.method.Site``."""
        if self._images.reserved is None:
            raise ValueError("no validation images have been set aside")
        return self._images.reserved

    def holds_any(self, hashes: Collection[bytes]) -> int:
        """See ``medsilo.algorithms.method.Site``."""
        self._give_images()
        return self._images.holds_any(hashes)

    def measure(self, state: Mapping[str, Tensor]) -> Measurement | None:
        """A state's accuracy and loss on the silo's test images; None where there are none."""
        return self._measured(state, self._images.test())

    def validate(self, state: Mapping[str, Tensor]) -> Measurement | None:
        """The same on images by which models may be chosen: the shard's validation images, else those that the method
        has set aside; None where there are neither."""
        images = self._images.validation()
        return None if images is None else self._measured(state, images)

    @property
    def has_validation(self) -> bool:
        """See ``medsilo.algorithms.method.Site``."""
        return self._images.has_validation

    def validation_loss(self, state: Mapping[str, Tensor]) -> float | None:
        """See ``medsilo.algorithms.method.Site``."""
        measured = self.validate(state)
        return None if measured is None else measured.loss

    def test(self, state: Mapping[str, Tensor]) -> tuple[npt.NDArray[np.bool_], float]:
        """On which of the silo's test images a state is right, ``bool [m]``, and the sum of its cross entropies."""
        return self._judge(state, self._images.test())

    def _measured(self, state: Mapping[str, Tensor], split: tuple[Tensor, Tensor]) -> Measurement | None:
        return mean(*self._judge(state, split), split[1].cpu().numpy())

    def _judge(self, state: Mapping[str, Tensor], split: tuple[Tensor, Tensor]) -> tuple[npt.NDArray[np.bool_], float]:
        self.load(state)
        return judge(self._model, *split)

    def orders(self, round_number: int, epochs: int, phase: str) -> Iterator[list[Tensor]]:
        """For each epoch the batches of ``fit`` as indices into the training images; seeds PyTorch's own generator."""
        return self._trainer.orders(round_number, epochs, phase)

    def batch_sizes(self) -> list[int]:
        """The sizes of an epoch's batches, in order."""
        return self._images.batch_sizes()


def _check_precision(plan: RunPlan, precision: Precision) -> None:
    if precision != "float32":
        raise ConfigurationError(
            f"precision: {precision}: run {plan.run} trains with differential privacy, whose bound on each "
            "gradient is shown for float32 alone; use precision: float32"
        )


def _under_privacy(
    plan: PrivacyPlan,
    dataset: ImageDataset,
    charge: Charge | None,
    noise: NoiseSource | None,
    kept: KeptReleases | None,
) -> tuple[PrivateTrainer, PrivateAverages]:
    """What trains and what averages under differential privacy, each training and average charged."""
    if charge is None:
        raise ValueError("a plan with privacy needs an account to charge")
    from medsilo.silo.training.private_average import PrivateAverages
    from medsilo.silo.training.private_training import PrivateTrainer, owners_of  # Opacus takes seconds to load

    owners = owners_of(dataset, plan.unit)
    private = PrivateTrainer(plan, owners, charge, noise=noise)
    return private, PrivateAverages(plan, owners, charge, noise=noise, kept=kept)
