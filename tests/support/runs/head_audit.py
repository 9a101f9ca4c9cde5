"""Whether a private head's training hides as much as is claimed, tried on real trainings.

    python -m tests.support.runs.head_audit [--noise 1 0.75] [--repeat 20] [--small 200] [--trainings 1000] [--out FILE]

Every training is a hospital's own code, with the settings that ``preset: head`` chooses. A canary is a black image
with one bright number, so that the canaries' gradients are at right angles to each other. A fair coin decides whether
the training sees it; a blanked one counts, as zero-out adjacency says. The attacker sees every noised step, knows all
images but the coins, and takes from each noised sum what the other images give.

*one run*, at ε = 1: FedAvg of six hospitals with 1,200 canaries each; *many runs*, at ε = 8, where it takes fewer:
one hospital, one canary, over and over, in steps of a hundredth: no claim is about their size, and a canary that is
learnt has a short gradient. *small*: one run of two hospitals with 768 canaries each, at ε = 8 and in such steps.
``--noise``: with which shares of the noise that is claimed. ``--repeat``, ``--small``: the one-run audits so often,
each a training of its own, to count how often one finds more than was claimed: a false alarm, where the noise was
whole.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from medsilo.algorithms.datasets import ImageDataset, ImageSplit
from medsilo.algorithms.features import FixedExtractor
from medsilo.algorithms.models.fixed import OnFixedFeatures
from medsilo.algorithms.registry import make
from medsilo.coordinator.config import PrivacyConfig
from medsilo.privacy.budget.accounting import epsilon
from medsilo.privacy.budget.noise import NoiseSource
from medsilo.privacy.budget.sealed_keys import unsealed
from medsilo.privacy.consent.plan import ModelPlan, RunPlan, TrainingPlan
from medsilo.silo.training.site import LocalSite
from tests.support.hospital import gaussian_audit
from tests.support.hospital.local_training import plan as plain_plan

DELTA = 1e-5
LEVEL = 0.05
SURE = 0.02
"""Of all canaries, those of which the one-run audit by guesses makes a guess: fixed before it was run."""

ONE, MANY = 1.0, 8.0
"""ε of the audited runs."""

SLOWED = 0.01
"""Of the preset's step size."""

_BRIGHT = 4.0
_CLASSES = 4
_ROUNDS = 12
_OTHERS = 100


class Lights(FixedExtractor):
    """The first numbers of an image: 0 for black, 4 for what is brightest."""

    definition = "lights 1"

    def __init__(self, count: int) -> None:
        super().__init__()
        self.features, self.bound = count, _BRIGHT * math.sqrt(count)

    def of(self, images: Tensor) -> Tensor:
        return _BRIGHT * (images.flatten(1)[:, : self.features] + 1) / 2


class Coined(NoiseSource):
    """All units but some, and a share of the noise that is asked for."""

    def __init__(self, key: bytes, share: float) -> None:
        super().__init__(key)
        self.share = share
        self.left_out = np.zeros(0, dtype=np.int64)

    def gaussian(self, shape: tuple[int, ...], deviation: float) -> npt.NDArray[np.float64]:
        return super().gaussian(shape, deviation) * self.share

    def sample(self, count: int, rate: float) -> npt.NDArray[np.int64]:
        return np.delete(super().sample(count, rate), self.left_out)


class Watched:
    """A hospital whose first images are canaries, and what its attacker has made of the steps so far.

    Attributes:
        scores: of each canary; what noise adds is N(0, T·z²·C²), and what the canary adds T·C at most.
        likelihoods: the logarithm of how much likelier it is in than not.
    """

    def __init__(self, canaries: int, others: int, run: RunPlan, source: Coined) -> None:
        assert run.privacy is not None
        self.canaries, self.run, self.privacy, self.source = canaries, run, run.privacy, source
        shape = run.model.input_shape
        features = max(canaries, 4)
        numbers = np.random.default_rng(1)
        images = np.zeros((canaries + others, math.prod(shape)), dtype=np.uint8)
        images[np.arange(canaries), np.arange(canaries)] = 255
        images[canaries:, :features] = numbers.integers(0, 256, (others, features))
        labels = np.arange(canaries + others) % _CLASSES
        # The loader has channels last, and the extractor takes them first.
        shown = images.reshape(-1, *shape).transpose(0, 2, 3, 1)
        train = ImageSplit(np.ascontiguousarray(shown), labels.astype(np.int64))
        names = tuple(str(number) for number in range(_CLASSES))
        data = ImageDataset("h", "canaries", True, names, train, None, train.take(np.arange(_CLASSES)))
        model = OnFixedFeatures(Lights(features), _CLASSES)
        cpu = torch.device("cpu")
        self.site = LocalSite("h", data, model, run, device=cpu, charge=lambda *_: unsealed(), noise=source)
        self._inputs, self._labels = self.site.inputs()
        self._lengths = self._inputs.norm(dim=1)
        self.forget()

    def forget(self) -> None:
        """What the attacker knows of an earlier training, and what the hospital keeps of it."""
        self.scores, self.likelihoods = np.zeros(self.canaries), np.zeros(self.canaries)
        self.site.optimizers.clear()

    def train(self, round_number: int) -> dict[str, Tensor]:
        """A round; the model that it gives."""
        self.site.fit(round_number, watch=lambda gradients: self._attack(*gradients.values()))
        return {name: tensor.clone() for name, tensor in self.site.model.state_dict().items()}

    def _attack(self, noised: Tensor) -> None:
        """After one noised mean gradient, ``[K, F]``."""
        bound, deviation = self.privacy.clipping_norm, self.privacy.clipping_norm * self.privacy.noise_multiplier
        weight = next(self.site.model.parameters()).detach()
        residuals = torch.softmax(self._inputs @ weight.T, dim=1)
        residuals[torch.arange(len(residuals)), self._labels] -= 1
        lengths = residuals.norm(dim=1)
        norms = lengths * self._lengths
        clipped = residuals * (bound / norms).clamp(max=1)[:, None]
        left = noised * len(self._inputs) - clipped[self.canaries :].T @ self._inputs[self.canaries :]
        own = slice(0, self.canaries)
        # A canary's input has one number that is not 0, so its gradient has one column.
        column = (left[:, own] * (residuals[own] / lengths[own, None]).T).sum(dim=0).double().numpy()
        signal = norms[own].clamp(max=bound).double().numpy()
        self.scores += column
        self.likelihoods += signal * (column - signal / 2) / deviation**2


@dataclass(frozen=True)
class Found:
    """What an audit has proven, at 95 % each.

    ``by_guesses``: from the sign of the likelihoods (in one run: of the surest). ``by_statistics``: from the scores, in
    one run. All are lower bounds on μ.
    """

    canaries: int
    guesses: int
    right: int
    by_guesses: float
    by_statistics: float | None = None


def planned(hospitals: int, units: int, shape: tuple[int, int, int], target: float, step_size: float = 1.0) -> RunPlan:
    """The run that a coordinator plans with ``preset: head``. ``step_size``: as a share of the preset's."""
    private = PrivacyConfig.model_validate(
        {"preset": "head", "epsilon": target, "delta": DELTA, "unit": "image", "units": units}
    )
    method = make("fedavg", {})
    training = private.training(method, TrainingPlan(), _ROUNDS, hospitals)
    return plain_plan().model_copy(
        update={
            "privacy": private.plan(method, training, _ROUNDS),
            "training": training.model_copy(update={"learning_rate": step_size * training.learning_rate}),
            "rounds": _ROUNDS,
            "model": ModelPlan(name="lights", input_shape=shape, classes=_CLASSES),
        }
    )


def one_run(
    share: float,
    seed: str,
    *,
    target: float = ONE,
    step_size: float = 1.0,
    hospitals: int = 6,
    side: int = 20,
    level: float = LEVEL,
) -> Found:
    """One federated training of hospitals whose canaries are as many as an image has numbers."""
    canaries = 3 * side * side
    run = planned(hospitals, canaries + _OTHERS, (3, side, side), target, step_size)
    coins = np.random.default_rng(int.from_bytes(_key(seed, "coins")[:8], "big"))
    watched, inside = [], []
    for number in range(hospitals):
        source = Coined(_key(seed, f"noise {number}"), share)
        inside.append(coins.random(canaries) < 0.5)
        source.left_out = np.flatnonzero(~inside[-1])
        watched.append(Watched(canaries, _OTHERS, run, source))
    together = watched[0].site.model.state_dict()
    for round_number in range(run.rounds):
        for one in watched:
            one.site.load(together)
        models = [one.train(round_number) for one in watched]
        together = {name: torch.stack([model[name] for model in models]).mean(dim=0) for name in models[0]}
    return judged(
        np.concatenate([one.scores for one in watched]),
        np.concatenate([one.likelihoods for one in watched]),
        np.concatenate(inside),
        level,
    )


def judged(
    scores: npt.NDArray[np.float64], likelihoods: npt.NDArray[np.float64], inside: npt.NDArray[np.bool_], level: float
) -> Found:
    made = round(SURE * len(inside))
    surest = np.argsort(-np.abs(likelihoods), kind="stable")[:made]
    right = int(((likelihoods > 0) == inside)[surest].sum())
    guesses = gaussian_audit.of_one_run(canaries=len(inside), guesses=made, right=right, level=level)
    return Found(len(inside), made, right, guesses, gaussian_audit.of_statistics(scores, inside, level=level))


def many_runs(share: float, seed: str, trainings: int, *, target: float = MANY, level: float = LEVEL) -> Found:
    """One hospital with one canary and three other images, trained over and over."""
    run = planned(6, 1000, (3, 16, 16), target, SLOWED)
    source = Coined(_key(seed, "noise"), share)
    coins = np.random.default_rng(int.from_bytes(_key(seed, "coins")[:8], "big")).random(trainings) < 0.5
    watched = Watched(1, 3, run, source)
    start = copy.deepcopy(watched.site.model.state_dict())
    right = 0
    for number, inside in enumerate(coins):
        watched.forget()
        watched.site.load(start)
        source.left_out = np.zeros(0, dtype=np.int64) if inside else np.zeros(1, dtype=np.int64)
        for round_number in range(run.rounds):
            watched.train(round_number)
        right += int((watched.likelihoods[0] > 0) == inside)
        if (number + 1) % 100 == 0:
            print(f"  many runs, {share:g} of the noise: {number + 1} of {trainings} trainings", flush=True)
    bound = gaussian_audit.of_many_runs(runs=trainings, right=right, level=level)
    return Found(trainings, trainings, right, bound)


def claimed(target: float) -> tuple[float, float]:
    """μ and ε of a whole run by its plan."""
    privacy = planned(6, 1000, (3, 28, 28), target).privacy
    assert privacy is not None
    return math.sqrt(privacy.steps) / privacy.noise_multiplier, epsilon(privacy.events, delta=privacy.delta)


def _key(*words: str) -> bytes:
    return hashlib.sha256("\n".join(words).encode()).digest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--noise", type=float, nargs="+", default=[1.0, 0.75])
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--small", type=int, default=200)
    parser.add_argument("--trainings", type=int, default=1000)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    claims = {target: claimed(target) for target in (ONE, MANY)}
    for mu, cost in claims.values():
        print(f"claimed: μ = {mu:.4f}, ε = {cost:.4f} at δ = {DELTA:g}; all bounds at {1 - LEVEL:.0%}")
    written: dict[str, Any] = {"claims": claims, "delta": DELTA, "level": LEVEL}
    for share in options.noise:
        for kind, target, times, audit in _audits(share, f"{options.seed} {share}", options):
            found = []
            for number in range(times):
                began = time.monotonic()
                found.append(audit(number))
                taken = f"{time.monotonic() - began:.0f} s"
                print(
                    f"  {kind}, {share:g} of the noise, {number + 1} of {times}: {_said(found[-1])}; {taken}",
                    flush=True,
                )
            if found:
                written.setdefault(kind, {})[str(share)] = [asdict(one) for one in found]
                if options.out is not None:
                    options.out.write_text(json.dumps(written, indent=1) + "\n")
            for name in ("by_statistics", "by_guesses"):
                bounds = [bound for one in found if (bound := getattr(one, name)) is not None]
                _summary(f"{kind}, {share:g} of the noise, {name}", bounds, claims[target][0])


def _audits(
    share: float, seed: str, options: argparse.Namespace
) -> list[tuple[str, float, int, Callable[[int], Found]]]:
    """The name of each kind, the ε of its runs, how often it is done, and what does it."""

    def small(number: int) -> Found:
        return one_run(share, f"{seed} small {number}", target=MANY, step_size=SLOWED, hospitals=2, side=16)

    return [
        ("one run", ONE, options.repeat, lambda number: one_run(share, f"{seed} {number}")),
        ("small", MANY, options.small, small),
        ("many runs", MANY, min(options.trainings, 1), lambda _: many_runs(share, seed, options.trainings)),
    ]


def _said(found: Found) -> str:
    statistics = "" if found.by_statistics is None else f"; by statistics μ ≥ {found.by_statistics:.3f}"
    return f"{found.right} of {found.guesses} right, μ ≥ {found.by_guesses:.3f}{statistics}"


def _summary(name: str, bounds: Sequence[float], claim: float) -> None:
    if not bounds:
        return
    middle = float(np.median(bounds))
    above = sum(bound > claim for bound in bounds)
    print(f"{name}: μ ≥ {middle:.3f} (median), ε ≥ {gaussian_audit.epsilon_of(middle, DELTA):.3f}; "
          f"the claim is refuted by {above} of {len(bounds)}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
