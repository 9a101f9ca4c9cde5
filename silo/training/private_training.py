"""DP-SGD (Abadi et al., "Deep Learning with Differential Privacy", 2016, Algorithm 1) as a silo's local training.

Each step takes every unit (image or patient) with probability q, clips each unit's gradient to the norm C, adds
Gaussian noise of standard deviation z·C to the sum, and divides by the expected number of units, q·n (n is public under
zero-out adjacency). A step whose sample is empty is noise alone, and is taken: to skip it would tell that it was empty.
What does not depend on data (a method's correction, weight decay, the optimiser's memory) comes after the noise.

Single images' gradients come from Opacus' hooks (``medsilo.algorithms.protection.per_image``); of a linear head on
fixed inputs they are not needed (``medsilo.silo.training.private_head``). Samples, noise, changes of images and dropout
are all drawn from one secret source (``medsilo.privacy.budget.noise``): sampling is accounted for as amplification,
which holds only if nobody can tell from what the others' draws are whether a unit is in the sample. Opacus' own engine
is not used: it begins a new account with every round. Not covered: how long a step takes, and rounding in 32-bit sums.
"""

from __future__ import annotations

import hashlib
import math
import platform
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from importlib.metadata import version
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medsilo.algorithms.datasets import ImageDataset
from medsilo.algorithms.method import Correction, Watch
from medsilo.algorithms.models import PartlyTrained
from medsilo.algorithms.protection.per_image import gradients_of, per_image_gradients
from medsilo.privacy.budget.accounting import Event, Unit
from medsilo.privacy.budget.noise import NoiseSource
from medsilo.privacy.budget.promise import PrivacyPlan
from medsilo.privacy.budget.sealed_keys import Paid
from medsilo.privacy.budget.shared_noise import Lattice
from medsilo.privacy.consent.plan import AugmentationPlan
from medsilo.privacy.errors import ConfigurationError, DataError
from medsilo.privacy.party.console import medsilo_version
from medsilo.silo.training.augmentation import Augmenter
from medsilo.silo.training.private_head import Head, clipping_factors, head_of

IMAGES_PER_PATIENT = 16
"""In one step, at most so many of a patient's images are used, drawn anew each time; of a linear head, all."""

_GRADIENT_NUMBERS = 1 << 26
_LARGEST_BATCH = 256

Charge = Callable[[int, str, Event, str], Paid]
"""Charges a release to the account (round, phase, its cost, the hash of what it reads: see ``Account.charge``), and
gives the key of all that it draws; raises ``BudgetError`` if it may not happen."""


def owners_of(dataset: ImageDataset, unit: Unit) -> npt.NDArray[np.int64]:
    """Whose each training image is: ``int64 [n]``, units numbered from 0 without gaps.

    Raises ``DataError`` if the unit is the patient and the shard does not say whose the images are.
    """
    if unit == "image":
        return np.arange(len(dataset.train), dtype=np.int64)
    if dataset.train.patients is None:
        raise DataError(
            f"{dataset.source}: the run's unit of privacy is the patient, but the shard does not say which image is "
            "whose (train_patients); cut the shard again with patients, or ask for a run with unit: image"
        )
    return np.unique(dataset.train.patients, return_inverse=True)[1].astype(np.int64)


class PrivateTrainer:
    """Trains a model on one silo's images with DP-SGD.

    What comes out is the last step's model, or, where the plan says so, the mean of the last ones': made from noised
    steps alone, it costs nothing.

    Args:
        plan: the mechanism.
        owners: whose each training image is, ``int64 [n]`` (see ``owners_of``).
        charge: is called before a training's first step.
        noise: where everything random comes from; by default a source under the key that the charge gives.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        owners: npt.NDArray[np.int64],
        charge: Charge,
        *,
        noise: NoiseSource | None = None,
    ) -> None:
        self.plan = plan
        self._charge = charge
        self._noise = noise
        order = np.argsort(owners, kind="stable")
        self._images_of = np.split(order, np.flatnonzero(np.diff(owners[order])) + 1)

    @property
    def units(self) -> int:
        """The number of units, n."""
        return len(self._images_of)

    def train(
        self,
        model: nn.Module,
        chosen: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        data: tuple[Tensor, Tensor],
        *,
        round_number: int,
        phase: str,
        steps: int,
        reads: str,
        correct: Callable[[], None],
        progress: Callable[[int, float], None],
        augmentation: Sequence[AugmentationPlan] = (),
        watch: Watch | None = None,
    ) -> None:
        """Takes so many steps on the chosen parameters; all others of the model must not require gradients.

        Args:
            data: the training images ``[n, C, H, W]`` and labels ``[n]``.
            round_number: for the account.
            phase: for the account.
            steps: at least 1.
            reads: the hash of all that the training is made from, besides what it draws: for the account.
            correct: adds to the noised gradients what does not depend on data.
            progress: is told the number of the step, from 1, and the mean cross entropy of its images (0 for none);
                that number is not noised and must stay here.
            augmentation: changes a step's images at random, each into one: a unit's gradient is clipped after that.
            watch: is shown every step's noised gradients, before the correction.

        Raises ``BudgetError`` before the first step if the account does not allow it.
        """
        watched = [name for name, p in chosen.items() if p._backward_hooks]
        if watched:
            raise ConfigurationError(
                f"something reads the gradients of {watched[0]} as they are before the noise: that cannot be done "
                "under differential privacy"
            )
        parameters = list(chosen.values())
        scale = self.plan.sampling_rate * self.units
        paid = self._charge(round_number, phase, self.plan.training(steps), reads)
        source = self._noise or NoiseSource(paid.key)
        augment = Augmenter(augmentation, lambda count: torch.from_numpy(source.uniform((count, 2))))
        torch.manual_seed(source.seed())  # dropout and the like
        head = None if augmentation else head_of(model, chosen, data, self._images_of)
        averaged = math.ceil(self.plan.averaged_share * steps - 1e-9)  # a whole number but for rounding counts as whole
        means = [parameter.detach().clone() for parameter in parameters] if averaged else []
        with per_image_gradients(model) if head is None else nullcontext():
            for step in range(1, steps + 1):
                sums, loss, count = self._clipped(head, model, parameters, data, source, augment)
                noises = self._noises(parameters, source)
                for parameter, total, noise in zip(parameters, sums, noises, strict=True):
                    parameter.grad = ((total.double() + noise) / scale).to(parameter.dtype)
                if watch is not None:
                    watch({n: p.grad for n, p in chosen.items() if p.grad is not None})
                correct()
                optimizer.step()
                progress(step, loss / max(count, 1))
                if (number := step - (steps - averaged)) > 0:
                    torch._foreach_lerp_(means, [p.detach() for p in parameters], 1 / number)
        with torch.no_grad():
            for parameter, mean in zip(parameters, means, strict=False):
                parameter.copy_(mean)

    def noised_sum(
        self,
        model: nn.Module,
        chosen: Mapping[str, nn.Parameter],
        data: tuple[Tensor, Tensor],
        lattice: Lattice,
        *,
        round_number: int,
        phase: str,
        reads: str,
        progress: Callable[[int, float], None],
    ) -> dict[str, Tensor]:
        """The sum of all units' clipped gradients as whole numbers, with the silo's share of the noise that hospitals
        have together: int64, of each parameter's shape. The arguments are those of ``train``.

        Raises ``BudgetError`` if the account does not allow it, ``TrainingError`` if there is no room for the numbers;
        nothing is drawn then.
        """
        parameters = list(chosen.values())
        lattice.check_room(self.units)
        paid = self._charge(round_number, phase, self.plan.training(1), reads)
        source = self._noise or NoiseSource(paid.key)
        torch.manual_seed(source.seed())  # dropout and the like
        head = head_of(model, chosen, data, self._images_of)
        with per_image_gradients(model) if head is None else nullcontext():
            sums, loss, count = self._clipped(head, model, parameters, data, source, _unchanged, precise=True)
        progress(1, loss / max(count, 1))
        flat = torch.cat([total.reshape(-1).to("cpu", torch.float64) for total in sums])
        noised = torch.split(torch.from_numpy(lattice.noised(flat.numpy(), source)), [p.numel() for p in parameters])
        return {name: own.reshape(p.shape) for (name, p), own in zip(chosen.items(), noised, strict=True)}

    def _clipped(
        self,
        head: Head | None,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        data: tuple[Tensor, Tensor],
        source: NoiseSource,
        augment: Callable[[Tensor], Tensor],
        *,
        precise: bool = False,
    ) -> tuple[list[Tensor], float, int]:
        """The sum of a step's clipped gradients, by parameter; the sum of its images' cross entropies, and their
        number. ``precise``: a head's is added up in 64 bits."""
        bound = self.plan.clipping_norm
        if head is not None:
            return head.clipped_sum(source.sample(self.units, self.plan.sampling_rate), bound, precise=precise)
        images, labels = data
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        loss, count = 0.0, 0
        for index, groups in self._batches(parameters, source):
            where = torch.from_numpy(index).to(labels.device)
            found, part = clipped_sum(model, parameters, augment(images[where]), labels[where], groups, bound)
            torch._foreach_add_(sums, found)
            loss, count = loss + part, count + len(index)
        return sums, loss, count

    def _noises(self, parameters: Sequence[nn.Parameter], source: NoiseSource) -> list[Tensor]:
        deviation = self.plan.noise_multiplier * self.plan.clipping_norm
        sizes = [parameter.numel() for parameter in parameters]
        drawn = torch.split(torch.from_numpy(source.gaussian((sum(sizes),), deviation)), sizes)
        return [noise.to(p.device).reshape(p.shape) for noise, p in zip(drawn, parameters, strict=True)]

    def _batches(
        self, parameters: Sequence[nn.Parameter], source: NoiseSource
    ) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """A step's sample: indices of images, and the number of each one's unit within its batch, from 0.

        Batches are what fits into memory; a unit's images are all in the same one.
        """
        numbers = sum(parameter.numel() for parameter in parameters)
        largest = max(1, min(_LARGEST_BATCH, _GRADIENT_NUMBERS // max(numbers, 1)))
        index: list[npt.NDArray[np.int64]] = []
        size = 0
        for unit in source.sample(self.units, self.plan.sampling_rate):
            own = self._images_of[unit]
            if len(own) > IMAGES_PER_PATIENT:
                own = own[source.shuffled(len(own))[:IMAGES_PER_PATIENT]]
            if index and size + len(own) > largest:
                yield _batch(index)
                index, size = [], 0
            index.append(own)
            size += len(own)
        if index:
            yield _batch(index)


def reads_of(
    model: nn.Module,
    chosen: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    correction: Correction | None,
    steps: int,
) -> str:
    """The hash (SHA-256, hex) of all that a training is made from besides plan, data set, round and phase (of these the
    charge itself speaks) and what it draws: where it begins, what pulls it, and how the machine computes.

    Where the same could come out with other bits, as on a GPU or after an upgrade, no two hashes are the same.
    """
    found = hashlib.sha256()
    remembered = {
        f"{kind}/{name}": value
        for name, parameter in chosen.items()
        for kind, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }
    centre, linear = (correction.centre, correction.linear) if correction is not None else ({}, {})
    found.update(model.frozen_sha256.encode() if isinstance(model, PartlyTrained) else b"")
    for group in (model.state_dict(), remembered, centre, linear):
        found.update(f"{len(group)}\n".encode())
        for name in sorted(group):
            tensor = group[name].detach().to("cpu").contiguous()
            found.update(f"{name!r} {tensor.dtype} {list(tensor.shape)}\n".encode())
            found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    strength = correction.strength if correction is not None else 0.0
    alike = all(parameter.device.type == "cpu" for parameter in model.parameters())
    found.update(f"{list(chosen)!r} {strength!r} {steps} {_computes() if alike else secrets.token_hex()}".encode())
    return found.hexdigest()


def _computes() -> str:
    """What the last bits of a computation on this machine's CPU depend on."""
    built, threads = torch.__config__.show(), torch.__config__.parallel_info()
    return "\n".join([_installed(), torch.backends.cpu.get_cpu_capability(), built, threads])


@cache
def _installed() -> str:
    """The processor and the versions of what runs here: looked up once, for that takes as long as some steps."""
    model = next((line for line in _read("/proc/cpuinfo").splitlines() if line.startswith("model name")), "")
    versions = [version(name) for name in ("torch", "numpy", "randomgen", "opacus")]
    return "\n".join([medsilo_version(), *versions, platform.machine(), model])


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _unchanged(images: Tensor) -> Tensor:
    return images


def _batch(units: Sequence[npt.NDArray[np.int64]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    return np.concatenate(units), np.repeat(np.arange(len(units)), [len(own) for own in units])


def clipped_sum(
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    images: Tensor,
    labels: Tensor,
    groups: npt.NDArray[np.int64],
    bound: float,
) -> tuple[list[Tensor], float]:
    """The sum over units of their gradients, each clipped to the norm ``bound``; inside ``per_image_gradients``.

    A unit's gradient is the mean of its images'. Blanking any one unit moves the sum by at most ``bound``, in the
    Euclidean norm over all parameters together. A gradient that is not finite, or more than 1e30 bounds long, counts as
    none.

    Args:
        model: in training mode.
        parameters: those that require gradients.
        images: ``[b, C, H, W]``, b ≥ 1.
        labels: ``[b]``.
        groups: the number of each image's unit, ``int64 [b]``, from 0, without gaps.
        bound: C > 0.

    Returns:
        A tensor of each parameter's shape, and the sum of the images' cross entropies.
    """
    for parameter in parameters:
        parameter.grad = None
        parameter.grad_sample = None  # type: ignore[attr-defined]
    loss = F.cross_entropy(model(images), labels, reduction="sum")
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [gradients_of(parameter, len(images)) for parameter in parameters]
    sizes = np.bincount(groups)
    if len(sizes) < len(images):
        owner = torch.from_numpy(groups).to(images.device)
        counts = torch.from_numpy(sizes).to(images.device)
        gradients = [_means(gradient, owner, counts) for gradient in gradients]
    norms = torch.stack([torch.linalg.vector_norm(g, dim=1, dtype=torch.float64) for g in gradients])
    norm = torch.linalg.vector_norm(norms, dim=0)
    factor = clipping_factors(norm, bound).to(gradients[0].dtype)
    for gradient in gradients:
        gradient[factor == 0] = 0
    sums = [(factor @ g).reshape(p.shape) for g, p in zip(gradients, parameters, strict=True)]
    for parameter in parameters:
        # The clean gradients go no further.
        parameter.grad = None
        parameter.grad_sample = None  # type: ignore[attr-defined]
    return sums, float(loss.detach())


def _means(gradients: Tensor, owner: Tensor, counts: Tensor) -> Tensor:
    total = gradients.new_zeros(len(counts), gradients.shape[1])
    total.index_add_(0, owner, gradients)
    return total / counts.unsqueeze(1).to(gradients.dtype)
