"""Is what hospitals learn together under ε better than the best that each can do alone, without noise and tuned?

The patients of all splits are dealt anew in each draw: a quarter is for testing, and both parts are dealt to
hospitals as ``silo shard --setting by-patient`` deals them. Together: FedAvg of a linear layer with what ``preset:
head`` chooses at each ε, untuned. Alone, without noise, tuned on the hospital's own patients (five folds, by cross
entropy; test patients are seen by nobody): the same linear layer by steps (rate, number, weight decay) and to the
optimum (L2, with and without balanced classes; one strength for each hospital, or one for all), kernels and trees on
the same features, and whole networks with flips. Printed as a table, in percent: accuracy and the mean of the
classes' accuracies, on each hospital's own test images.

    python benchmarks/alone_tuned.py --data FILE.npz [--draws 10] [--shipped] [--linear] [--networks 3] [--out FILE]

``--shipped``: training and test patients are those of the file's two splits. ``--networks``: in how many draws networks
are trained. ``--linear``: nothing but linear layers.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from private_head import train as train_privately
from sklearn.ensemble import ExtraTreesClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold
from sklearn.svm import SVC
from torch import Tensor
from torch.nn import functional as F

from medsilo.algorithms.datasets import ImageDataset, load_npz, to_tensor
from medsilo.algorithms.features import StainTexture
from medsilo.algorithms.models import build
from medsilo.algorithms.registry import make
from medsilo.coordinator.config import PrivacyConfig
from medsilo.privacy.consent.plan import ModelPlan
from medsilo.silo.data.dealing import by_patient
from medsilo.silo.data.settings import ByPatient

Floats = npt.NDArray[np.float32]
Whole = npt.NDArray[np.int64]
Predict = Callable[[Whole], Whole]
"""Gives the classes of images, by their numbers."""

FOLDS = 5
RATES, STEPS, DECAYS = (0.5, 4.0), (24, 96, 384, 768), (0.0, 1e-3)
INVERSE_L2 = (1.0, 10.0, 100.0, 1000.0)
KERNELS = [(c, gamma) for c in (1.0, 10.0, 100.0) for gamma in (1.0, 4.0)]
EPOCHS, NETWORK_RATES = 40, (3e-4, 1e-3)


class Shared:
    """The common linear layer ``[F, K]``; ``counts``: how many images of each class a hospital trains on, by which it
    divides the chances that its copy gives: that needs no message."""

    def __init__(self, features: Floats, weight: Floats, counts: Whole | None = None):
        self.features, self.weight = features, weight
        self.prior = np.zeros(weight.shape[1]) if counts is None else np.log(np.maximum(counts, 1) / counts.sum())

    def __call__(self, numbers: Whole) -> Whole:
        return (self.features[numbers] @ self.weight - self.prior).argmax(axis=1)


class Hospital:
    """One hospital's images, by their numbers in the whole set, and what it can learn from them alone."""

    def __init__(self, features: Floats, labels: Whole, patients: npt.NDArray[np.str_], images: Tensor, own: Whole):
        self.features, self.labels, self.images, self.own = features, labels, images, own
        self.patients = patients[own]
        folds = GroupKFold(min(FOLDS, len(np.unique(self.patients))))
        self.folds = [(own[a], own[b]) for a, b in folds.split(own, groups=self.patients)]

    def by_steps(self) -> Predict:
        """Full-batch SGD with momentum; rate, steps and weight decay by cross entropy on held-out patients."""
        grid = [(rate, decay) for rate in RATES for decay in DECAYS]
        losses = np.zeros((len(grid), len(STEPS)))
        for fitted, held in self.folds:
            for row, (rate, decay) in enumerate(grid):
                for column, weight in enumerate(self._walk(fitted, rate, decay, STEPS)):
                    losses[row, column] += len(held) * self._loss(weight, held)
        row, column = np.unravel_index(int(losses.argmin()), losses.shape)
        weight = self._walk(self.own, *grid[row], (STEPS[column],))[0]
        return lambda numbers: (self.features[numbers] @ weight).argmax(axis=1)

    def as_on_the_page(self) -> Predict:
        """The settings of the page's row without noise."""
        weight = self._walk(self.own, 2.0, 0.0, (96,))[0]
        return lambda numbers: (self.features[numbers] @ weight).argmax(axis=1)

    def _walk(self, fitted: Whole, rate: float, decay: float, ends: Sequence[int]) -> list[Floats]:
        x, y = self.features[fitted], np.eye(int(self.labels.max()) + 1, dtype=np.float32)[self.labels[fitted]]
        weight, memory = np.zeros((x.shape[1], y.shape[1]), np.float32), 0.0
        found = []
        for step in range(1, max(ends) + 1):
            gradient = x.T @ (_softmax(x @ weight) - y) / len(x) + decay * weight
            memory = 0.9 * memory + gradient
            weight = weight - rate * memory
            if step in ends:
                found.append(weight)
        return found

    def _loss(self, weight: Floats, held: Whole) -> float:
        chances = _softmax(self.features[held] @ weight)[np.arange(len(held)), self.labels[held]]
        return float(-np.log(np.maximum(chances, 1e-12)).mean())

    def to_the_optimum(self, inverse: float, balanced: bool) -> Predict:
        """With so much L2."""
        model = self._optimum(inverse, balanced, self.own)
        return lambda numbers: model.predict(self.features[numbers])

    def held_out_costs(self, balanced: bool) -> npt.NDArray[np.float64]:
        """Of each L2: cross entropy on held-out patients; balanced, the mean of the classes' accuracies, negated."""

        def cost(inverse: float, a: Whole, b: Whole) -> float:
            model = self._optimum(inverse, balanced, a)
            if balanced:
                return -_classes(model.predict(self.features[b]), self.labels[b])
            chances = np.full((len(b), int(self.labels.max()) + 1), 1e-6)
            chances[:, model.classes_] = model.predict_proba(self.features[b])
            return float(-np.log(np.maximum(chances[np.arange(len(b)), self.labels[b]], 1e-6)).mean())

        return self._costs(INVERSE_L2, cost)

    def _optimum(self, inverse: float, balanced: bool, numbers: Whole) -> LogisticRegression:
        weights = "balanced" if balanced else None
        model = LogisticRegression(C=inverse, class_weight=weights, fit_intercept=False, max_iter=200)
        return model.fit(self.features[numbers], self.labels[numbers])

    def kernels(self) -> Predict:
        """A support-vector machine with a Gaussian kernel, by accuracy on held-out patients."""

        def fitted(setting: tuple[float, float], numbers: Whole) -> SVC:
            return SVC(C=setting[0], gamma=setting[1]).fit(self.features[numbers], self.labels[numbers])

        def cost(setting: tuple[float, float], a: Whole, b: Whole) -> float:
            return -_accuracy(fitted(setting, a).predict(self.features[b]), self.labels[b])

        model = fitted(KERNELS[int(self._costs(KERNELS, cost).argmin())], self.own)
        return lambda numbers: model.predict(self.features[numbers])

    def trees(self) -> Predict:
        model = ExtraTreesClassifier(500, min_samples_leaf=2, random_state=1).fit(
            self.features[self.own], self.labels[self.own]
        )
        return lambda numbers: model.predict(self.features[numbers])

    def network(self, name: str) -> Predict:
        """Adam, flips and turns by quarters; rate and number of epochs by cross entropy on a fifth of the patients."""
        fitted, held = self.folds[0]
        tried = []
        for rate in NETWORK_RATES:
            losses = self._network(name, fitted, rate, EPOCHS, held)[1]
            tried.append((min(losses), rate, int(np.argmin(losses)) + 1))
        _, rate, epochs = min(tried)
        model = self._network(name, self.own, rate, epochs)[0]
        return lambda numbers: model(self.images[numbers]).argmax(dim=1).numpy()

    def _network(
        self, name: str, fitted: Whole, rate: float, epochs: int, held: Whole | None = None
    ) -> tuple[Callable[[Tensor], Tensor], list[float]]:
        plan = ModelPlan(name=name, input_shape=tuple(self.images.shape[1:]), classes=int(self.labels.max()) + 1)
        torch.manual_seed(1)
        model = build(plan, seed=1)
        optimizer = torch.optim.Adam(model.parameters(), rate)
        labels, losses = torch.as_tensor(self.labels), []
        for _ in range(epochs):
            model.train()
            for index in torch.split(torch.as_tensor(fitted)[torch.randperm(len(fitted))], 64):
                images = self.images[index]
                for axis in (2, 3):
                    images = torch.where(
                        (torch.rand(len(images)) < 0.5)[:, None, None, None], images.flip(axis), images
                    )
                images = torch.rot90(images, int(torch.randint(4, ())), (2, 3))
                optimizer.zero_grad()
                F.cross_entropy(model(images), labels[index]).backward()
                optimizer.step()
            if held is not None:
                model.eval()
                with torch.no_grad():
                    losses.append(float(F.cross_entropy(model(self.images[held]), labels[held])))
        model.eval()
        return torch.no_grad()(model), losses

    def _costs(self, grid: Sequence[Any], cost: Callable[..., float]) -> npt.NDArray[np.float64]:
        return np.array([sum(len(b) * cost(setting, a, b) for a, b in self.folds) for setting in grid])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--hospitals", type=int, default=6)
    parser.add_argument("--networks", type=int, default=0)
    parser.add_argument("--epsilon", type=float, nargs="+", default=[0.25, 0.5, 1, 2])
    parser.add_argument("--unit", choices=("image", "patient"), default="image")
    parser.add_argument("--shipped", action="store_true")
    parser.add_argument("--linear", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    data = load_npz(options.data)
    images, labels, patients, sizes = everything(data)
    with torch.no_grad():
        features = torch.cat([StainTexture()(part) for part in torch.split(images, 512)]).numpy()
    found: dict[str, list[list[tuple[float, float]]]] = {}
    for draw in range(options.draws):
        fitted, tested = deal(patients, sizes if options.shipped else None, options.hospitals, draw)
        hospitals = [Hospital(features, labels, patients, images, own) for own in fitted]

        def judged(name: str, predicts: Sequence[Predict], draw: int = draw, tested: list[Whole] = tested) -> None:
            rows = []
            for predict, test in zip(predicts, tested, strict=True):
                said = predict(test)
                rows.append((_accuracy(said, labels[test]), _classes(said, labels[test])))
            found.setdefault(name, []).append(rows)
            print(f"  draw {draw}: {name}: {np.mean(rows, axis=0).round(1)}", flush=True)

        judged("alone: linear, as on the page", [one.as_on_the_page() for one in hospitals])
        for balanced in (False, True):
            costs = np.array([one.held_out_costs(balanced) for one in hospitals])
            kind = "alone: linear, L2, balanced" if balanced else "alone: linear, L2"
            settings = [INVERSE_L2[column] for column in costs.argmin(axis=1)]
            judged(
                f"{kind}, tuned by each",
                [one.to_the_optimum(best, balanced) for one, best in zip(hospitals, settings, strict=True)],
            )
            common = INVERSE_L2[int(costs.sum(axis=0).argmin())]
            judged(f"{kind}, tuned by all", [one.to_the_optimum(common, balanced) for one in hospitals])
        if not options.linear:
            judged("alone: linear by steps, tuned by each", [one.by_steps() for one in hospitals])
            judged("alone: Gaussian kernel, tuned by each", [one.kernels() for one in hospitals])
            judged("alone: trees", [one.trees() for one in hospitals])
        if draw < options.networks:
            for name in ("lenet5-gn", "diversifed-cnn"):
                judged(f"alone: {name}, tuned", [one.network(name) for one in hospitals])
        for epsilon in options.epsilon:
            model = together(features, labels, patients, fitted, epsilon, options.unit)
            judged(f"together, ε = {epsilon:g}", [Shared(features, model) for _ in fitted])
            evened = [Shared(features, model, np.bincount(labels[own], minlength=model.shape[1])) for own in fitted]
            judged(f"together, ε = {epsilon:g}, classes evened out at home", evened)
        table(found, options.out)


def everything(data: ImageDataset) -> tuple[Tensor, Whole, npt.NDArray[np.str_], tuple[int, int]]:
    """All images, their labels and patients; and how many of them are of the training and of the test split, which are
    the first and the last."""
    splits = [one for one in (data.train, data.validation, data.test) if one is not None]
    if any(one.patients is None for one in splits):
        raise SystemExit("the file does not say whose the images are")
    labels = np.concatenate([one.labels for one in splits])
    patients = np.concatenate([np.asarray(one.patients) for one in splits])
    images = torch.cat([to_tensor(one.images) for one in splits])
    return images, labels, patients, (len(data.train), len(data.test))


def deal(
    patients: npt.NDArray[np.str_], sizes: tuple[int, int] | None, hospitals: int, draw: int
) -> tuple[list[Whole], list[Whole]]:
    """Each hospital's training and test images."""
    if sizes is None:
        names = np.random.default_rng(draw).permutation(np.unique(patients))
        testing = np.isin(patients, names[: len(names) // 4])
        train, test = np.flatnonzero(~testing), np.flatnonzero(testing)
    else:
        train, test = np.arange(sizes[0]), np.arange(len(patients) - sizes[1], len(patients))
    shards = by_patient(patients[train], patients[test], ByPatient(silos=hospitals), seed=draw + 1)
    return [train[one.train] for one in shards], [test[one.test] for one in shards]


def together(
    features: Floats, labels: Whole, patients: npt.NDArray[np.str_], fitted: list[Whole], epsilon: float, unit: str
) -> Floats:
    """FedAvg's last model, float32 ``[F, K]``, with what the preset chooses."""
    owners = [
        np.arange(len(own)) if unit == "image" else np.unique(patients[own], return_inverse=True)[1] for own in fitted
    ]
    private = PrivacyConfig.model_validate(
        {
            "preset": "head",
            "epsilon": epsilon,
            "delta": 1e-5,
            "unit": unit,
            "units": min(int(own.max()) + 1 for own in owners),
        }
    )
    head = torch.nn.Linear(features.shape[1], int(labels.max()) + 1, bias=False)
    torch.nn.init.zeros_(head.weight)
    x, y = torch.from_numpy(features), torch.as_tensor(labels)
    model = train_privately(head, private, make("fedavg", {}), x, y, fitted, owners, None)[0]
    return model.weight.detach().numpy().T


def table(found: dict[str, list[list[tuple[float, float]]]], out: Path | None) -> None:
    """The rows so far: over draws, and what each has above the best row alone of the same draws."""
    means = {name: np.array([np.mean(rows, axis=0) for rows in draws]) for name, draws in found.items()}
    print("\n| | draws | accuracy | mean of classes |\n| --- | --- | --- | --- |")
    for name, rows in means.items():
        (a, c), (sa, sc) = rows.mean(axis=0), rows.std(axis=0)
        print(f"| {name} | {len(rows)} | {a:.1f} ± {sa:.1f} | {c:.1f} ± {sc:.1f} |")
    print(flush=True)
    if out is not None:
        out.write_text(json.dumps(found, indent=1))


def _softmax(logits: Floats) -> Floats:
    found = np.exp(logits - logits.max(axis=1, keepdims=True))
    return found / found.sum(axis=1, keepdims=True)


def _accuracy(said: Whole, labels: Whole) -> float:
    return 100 * float((said == labels).mean())


def _classes(said: Whole, labels: Whole) -> float:
    return 100 * float(np.mean([(said[labels == label] == label).mean() for label in np.unique(labels)]))


if __name__ == "__main__":
    main()
