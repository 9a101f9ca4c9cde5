"""What the preset ``head`` learns at which ε, on patients of a training split whom no hospital trains on.

Each draw holds a fifth of the patients out and deals the others to hospitals of like size. A linear layer is trained by
FedAvg, and by each hospital alone (the mean over hospitals), with the preset's settings for that ε; at `inf` with those
for a large one and no noise. All of a training but the network is the daemons': the step size, the trainer, its noise,
which no seed repeats. Test images are not read.

    python benchmarks/private_head.py --data FILE.npz --model stain-texture [--unit patient] [--draws 10] [--copies 4]

``--model``: a network whose last linear layer is trained, on fixed features. ``--data``: with ``train_patients``.
``--copies``: a training image is seen so often, but for the first time flipped, turned and recoloured at random; its
gradient is the mean of its copies', which is then clipped (augmentation multiplicity: De et al., "Unlocking high-
accuracy differentially private image classification through scale", 2022). It costs no privacy.
"""

from __future__ import annotations

import argparse
import copy
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medsilo.algorithms.datasets import load_npz, to_tensor
from medsilo.algorithms.method import Method
from medsilo.algorithms.models import build
from medsilo.algorithms.models.layout import Features
from medsilo.algorithms.registry import make
from medsilo.coordinator.config import PrivacyConfig
from medsilo.privacy.budget.noise import NoiseSource
from medsilo.privacy.budget.sealed_keys import unsealed
from medsilo.privacy.consent.plan import AugmentationPlan, ModelPlan, TrainingPlan
from medsilo.silo.training.augmentation import Augmenter, seeded
from medsilo.silo.training.optimizers import make_optimizer
from medsilo.silo.training.private_training import PrivateTrainer

CHANGES = [
    AugmentationPlan(kind="horizontal_flip", amount=0.5),
    AugmentationPlan(kind="rotation", amount=180),
    AugmentationPlan(kind="brightness", amount=0.1),
    AugmentationPlan(kind="saturation", amount=0.2),
    AugmentationPlan(kind="hue", amount=0.03),
]
ROUNDS = 12
LARGE = 50.0


class Silent(NoiseSource):
    """Makes no noise."""

    def gaussian(self, shape: tuple[int, ...], deviation: float) -> npt.NDArray[np.float64]:
        del deviation
        return np.zeros(shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--unit", choices=("image", "patient"), default="image")
    parser.add_argument("--hospitals", type=int, default=6)
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--epsilon", type=float, nargs="+", default=[0.5, 1, 2, 4, 8, math.inf])
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = load_npz(options.data)
    patients = data.train.patients
    if patients is None:
        parser.error(f"{options.data} does not say whose the images are")
    plan = ModelPlan(name=options.model, input_shape=data.image_shape, classes=data.num_classes)
    model = build(plan, seed=1, trusted=(options.model,)).eval()
    change = Augmenter(CHANGES, seeded(1))
    seen = []
    with torch.no_grad(), Features(model) as features:
        for start in range(0, len(data.train), 512):
            images = to_tensor(data.train.images[start : start + 512])
            copies = []
            for copied in (images, *(change(images) for _ in range(options.copies - 1))):
                model(copied)
                copies.append(features.last.clone())
            seen.append(torch.stack(copies, dim=1))
    # An image's copies stand behind each other.
    inputs = torch.cat(seen).flatten(0, 1)
    labels = torch.as_tensor(data.train.labels).repeat_interleave(options.copies)
    patients = np.repeat(patients, options.copies)
    head = features.classifier
    assert isinstance(head, nn.Linear)
    print(f"{inputs.shape[1]} features, {options.hospitals} hospitals, unit {options.unit}, {options.draws} draws")
    print("epsilon  trained    accuracy (sd over draws)  mean of classes  cross entropy")
    for epsilon in options.epsilon:
        for name in ("fedavg", "local"):
            found = []
            for draw in range(options.draws):
                fitted, held_out = deal(patients, options.hospitals, draw)
                private = PrivacyConfig.model_validate(
                    {
                        "preset": "head",
                        "epsilon": min(epsilon, LARGE),
                        "delta": 1e-5,
                        "unit": options.unit,
                        "units": min(len(np.unique(o)) for o in owners(patients, fitted, options.unit, options.copies)),
                    }
                )
                groups = owners(patients, fitted, options.unit, options.copies)
                noise = Silent() if epsilon == math.inf else None
                models = train(head, private, make(name, {}), inputs, labels, fitted, groups, noise)
                whole = held_out[:: options.copies]
                found.append(np.mean([judge(one, inputs[whole], labels[whole]) for one in models], axis=0))
            (accuracy, classes, loss), spread = np.mean(found, axis=0), np.std([one[0] for one in found])
            print(f"{epsilon:<7g}  {name:<9}  {accuracy:.1f} ({spread:.1f})  {classes:.1f}  {loss:.3f}", flush=True)


def deal(
    patients: npt.NDArray[np.str_], hospitals: int, draw: int
) -> tuple[list[npt.NDArray[np.int64]], npt.NDArray[np.int64]]:
    """Each hospital's images, and those held out, as indices."""
    names, counts = np.unique(patients, return_counts=True)
    order = np.random.default_rng(draw).permutation(len(names))
    out, left = order[: len(names) // 5], order[len(names) // 5 :]
    dealt: list[list[str]] = [[] for _ in range(hospitals)]
    sizes = [0] * hospitals
    for index in sorted(left, key=lambda index: -counts[index]):
        smallest = int(np.argmin(sizes))
        dealt[smallest].append(names[index])
        sizes[smallest] += counts[index]
    return [np.flatnonzero(np.isin(patients, own)) for own in dealt], np.flatnonzero(np.isin(patients, names[out]))


def owners(
    patients: npt.NDArray[np.str_], fitted: list[npt.NDArray[np.int64]], unit: str, copies: int = 1
) -> list[npt.NDArray[np.int64]]:
    """Whose each of a hospital's images is, from 0."""
    if unit == "image":
        return [np.arange(len(own), dtype=np.int64) // copies for own in fitted]
    return [np.unique(patients[own], return_inverse=True)[1].astype(np.int64) for own in fitted]


def train(
    head: nn.Linear,
    private: PrivacyConfig,
    method: Method,
    inputs: Tensor,
    labels: Tensor,
    fitted: list[npt.NDArray[np.int64]],
    groups: list[npt.NDArray[np.int64]],
    noise: NoiseSource | None,
) -> list[nn.Linear]:
    """The model that all have in the end, or each one's own."""
    training = private.training(method, TrainingPlan(), ROUNDS, len(fitted))
    plan = private.plan(method, training, ROUNDS)
    models = [copy.deepcopy(head) for _ in fitted]
    trainers = [PrivateTrainer(plan, own, lambda *_: unsealed(), noise=noise) for own in groups]
    optimizers = [make_optimizer(list(model.parameters()), training) for model in models]
    for number in range(ROUNDS):
        for model, trainer, optimizer, own in zip(models, trainers, optimizers, fitted, strict=True):
            trainer.train(
                model,
                dict(model.named_parameters()),
                optimizer,
                (inputs[own], labels[own]),
                round_number=number,
                phase="training",
                steps=plan.steps_of(training.epochs),
                reads="",
                correct=lambda: None,
                progress=lambda _step, _loss: None,
            )
        if method.downlink:
            shares = torch.tensor([len(own) for own in fitted]) / sum(map(len, fitted))
            with torch.no_grad():
                for parameters in zip(*(model.parameters() for model in models), strict=True):
                    mean = torch.tensordot(shares, torch.stack(parameters), dims=1)
                    for parameter in parameters:
                        parameter.copy_(mean)
    return models[:1] if method.downlink else models


def judge(model: nn.Linear, inputs: Tensor, labels: Tensor) -> tuple[float, float, float]:
    """Accuracy and the mean of the classes' accuracies, in percent, and the mean cross entropy."""
    with torch.no_grad():
        logits = model(inputs)
    right = (logits.argmax(dim=1) == labels).float()
    classes = [float(right[labels == label].mean()) for label in labels.unique()]
    return 100 * float(right.mean()), 100 * float(np.mean(classes)), float(F.cross_entropy(logits, labels))


if __name__ == "__main__":
    main()
