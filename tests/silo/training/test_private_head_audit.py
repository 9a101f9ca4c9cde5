"""A linear head's training over and over, with one unit and without: what its noise hides, measured.

T full-batch steps of multiplier z are one Gaussian release of μ = √T/z: no test has Φ⁻¹(power) + Φ⁻¹(1 - false
alarms) above μ (Dong, Roth and Su, "Gaussian differential privacy", 2022). The attacker knows everything but whether
the unit is in, and projects the change of the model on the unit's gradient, at steps so small that gradients stay.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.stats import binomtest, norm
from torch import Tensor, nn

from medsilo.privacy.budget.noise import NoiseSource
from medsilo.privacy.budget.sealed_keys import unsealed
from medsilo.silo.training.private_head import head_of
from medsilo.silo.training.site import LocalSite
from tests.support.hospital.local_training import dataset
from tests.support.hospital.private_training import CPU, private_plan

TRAININGS = 300
STEPS, NOISE, STEP, BOUND, CANARY = 4, 1.0, 1e-4, 0.05, 5
CLAIM = math.sqrt(STEPS) / NOISE


class Repeatable(NoiseSource):
    """All units, or all but the canary, with a share of the noise that is asked for."""

    def __init__(self, share: float) -> None:
        super().__init__(bytes(range(32)))
        self.share, self.with_canary = share, True

    def gaussian(self, shape: tuple[int, ...], deviation: float) -> npt.NDArray[np.float64]:
        return super().gaussian(shape, deviation) * self.share

    def sample(self, count: int, rate: float) -> npt.NDArray[np.int64]:
        everyone = super().sample(count, rate)
        return everyone if self.with_canary else np.delete(everyone, CANARY)


def proven(share: float, *, momentum: float, averaged: float) -> float:
    """A lower bound on μ, at a confidence of 98 %."""
    training = {"epochs": STEPS, "learning_rate": STEP, "momentum": momentum}
    run = private_plan(
        rate=1.0, clipping_norm=BOUND, noise_multiplier=NOISE, averaged_share=averaged, training=training
    )
    torch.manual_seed(1)
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 3))
    data, source = dataset(12), Repeatable(share)
    site = LocalSite("h", data, net, run, device=CPU, charge=lambda *_: unsealed(), noise=source)
    start = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    head = head_of(net.train(), dict(net.named_parameters()), site._train, [np.array([i]) for i in range(12)])
    assert head is not None
    direction = flat(head.clipped_sum(np.array([CANARY]), BOUND)[0])

    def told(with_canary: bool, share: float) -> float:
        source.with_canary, source.share = with_canary, share
        site.load(start)
        site.fit(0)
        moved = flat([start[name] - tensor for name, tensor in net.state_dict().items()])
        return float(moved @ direction)

    threshold = (told(True, 0.0) + told(False, 0.0)) / 2
    alarms = [sum(told(present, share) > threshold for _ in range(TRAININGS)) for present in (True, False)]
    power = binomtest(alarms[0], TRAININGS).proportion_ci(0.98).low
    false = binomtest(alarms[1], TRAININGS).proportion_ci(0.98).high
    return float(norm.ppf(power) + norm.ppf(1 - false))


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten().double() for tensor in tensors])


def test_the_claim_stands_and_is_refuted_when_a_quarter_of_the_noise_is_taken_away() -> None:
    sound = proven(1.0, momentum=0.0, averaged=0.0)
    assert 0.6 * CLAIM < sound <= CLAIM
    assert proven(0.75, momentum=0.0, averaged=0.0) > CLAIM


@pytest.mark.parametrize(("momentum", "averaged"), [(0.9, 0.0), (0.0, 0.5), (0.9, 0.5)])
def test_momentum_and_averaged_models_tell_no_more(momentum: float, averaged: float) -> None:
    assert proven(1.0, momentum=momentum, averaged=averaged) <= CLAIM
