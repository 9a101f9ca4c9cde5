"""A step whose noise hospitals share out: what is sent, and what the sum of all is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from medsilo.algorithms.families.sharing import count_part, model_upload
from medsilo.algorithms.method import Correction
from medsilo.algorithms.models import Layout
from medsilo.algorithms.protection.masked import masked_payload, mean_of, noised_upload
from medsilo.algorithms.tensors import MemoryWorkspace
from medsilo.privacy.budget.accounting import Event, SharedGaussian
from medsilo.privacy.budget.noise import NoiseSource
from medsilo.privacy.budget.sealed_keys import Paid, unsealed
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.errors import RefusedError, TrainingError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.secure_aggregation.masking import decode
from medsilo.silo.training.site import LocalSite
from tests.support.hospital.local_training import dataset
from tests.support.hospital.private_training import CPU, private_plan, with_patients

ROUNDS = 4
PATIENTS = [*"aaabbcdddd", *"eeefffgghh"]
TRAINING = {"epochs": 1, "momentum": 0.9, "learning_rate": 0.3, "keep_optimizer_state": True}


class Quiet(NoiseSource):
    """Shares of nothing."""

    def discrete_gaussians(self, count: int, deviation: int) -> Any:
        del deviation
        return np.zeros(count, np.int64)


def net() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 3))


def plan(**privacy: Any) -> RunPlan:
    base = private_plan(rate=1.0, training=TRAINING, unit="patient", **{"noise_multiplier": 3.0, **privacy})
    content = base.model_dump()
    content["rounds"] = content["privacy"]["steps"] = ROUNDS
    content["privacy"]["honest"] = 2
    content["secure_aggregation"] = {"minimum": 3, "fraction_bits": 32, "rounds": ROUNDS}
    return RunPlan.model_validate(content)


def site(one: RunPlan, *, noise: NoiseSource | None = None, number: int = 0, **options: Any) -> LocalSite:
    options.setdefault("charge", lambda *_: unsealed())
    data = with_patients(dataset(20), PATIENTS)
    data.train.images[:] = np.roll(data.train.images, 7 * number, axis=0)
    return LocalSite(f"h{number}", data, net(), one, device=CPU, noise=noise, **options)


def test_the_sum_is_a_step_of_momentum_on_all_units_of_all_hospitals() -> None:
    """Against plain SGD on the mean of all hospitals' clipped patient gradients, over rounds; no noise."""
    one = plan()
    sites = [site(one, noise=Quiet(), number=number) for number in range(3)]
    together = net()
    optimizer = torch.optim.SGD(together.parameters(), lr=0.3, momentum=0.9)
    mean = {name: p.detach().clone() for name, p in together.named_parameters()}
    for number in range(ROUNDS):
        total: dict[str, Tensor] = {}
        for own in sites:
            own.load(mean)
            own.fit(number)
            for name, numbers in own.noised.items():
                total[name] = total.get(name, 0) + numbers
        units = sum(own.num_samples for own in sites)
        assert units == 3 * len(set(PATIENTS))
        mean = {
            n: torch.from_numpy(decode(t.numpy().view(np.uint64), fraction_bits=32) / units).float()
            for n, t in total.items()
        }
        optimizer.zero_grad()
        for own in sites:
            for patient in sorted(set(PATIENTS)):
                images, labels = (t[[i for i, p in enumerate(PATIENTS) if p == patient]] for t in own._images.train)
                gradients = torch.autograd.grad(
                    nn.functional.cross_entropy(together(images), labels), [*together.parameters()]
                )
                length = torch.sqrt(sum((g**2).sum() for g in gradients))
                for parameter, gradient in zip(together.parameters(), gradients, strict=True):
                    part = gradient * min(1.0, one.privacy.clipping_norm / float(length)) / units
                    parameter.grad = part if parameter.grad is None else parameter.grad + part
        optimizer.step()
        for name, parameter in together.named_parameters():
            torch.testing.assert_close(mean[name], parameter.detach(), rtol=1e-4, atol=1e-5)


def test_planted_neighbours_differ_by_no_more_than_the_noise_is_made_for_whatever_the_rest_is() -> None:
    """One patient's images blanked, at a model that was chosen to make its gradient large."""
    one = plan(clipping_norm=0.5)
    for blanked in "aeh":
        numbers = []
        for label_shift in (0, 1):
            own = site(one, noise=Quiet())
            own.load({name: 5 * p for name, p in net().named_parameters()})
            if label_shift:
                rows = [i for i, p in enumerate(PATIENTS) if p == blanked]
                own._images.train[0][rows] = torch.nan  # without a gradient, as zero-out has it
            own.fit(0)
            numbers.append(torch.cat([t.reshape(-1) for t in own.noised.values()]).double())
        moved = float((numbers[0] - numbers[1]).norm())
        bound = 0.3 * 0.5 * 2**32
        assert 0.5 * bound < moved <= bound + 2 * len(numbers[0]) ** 0.5


def test_what_is_sent_is_whole_numbers_with_one_share_of_noise_and_charged_as_shared() -> None:
    charges: list[Event] = []

    def charge(round_number: int, phase: str, event: Event, reads: str) -> Paid:
        del round_number, phase, reads
        charges.append(event)
        return Paid("", bytes(32))

    one = plan()
    noisy, quiet = site(one, charge=charge), site(one, noise=Quiet())
    for own in (noisy, quiet):
        own.fit(0)
    difference = torch.cat([(noisy.noised[n] - quiet.noised[n]).reshape(-1) for n in quiet.noised]).double()
    share = 3.0 * 0.3 * one.privacy.clipping_norm * 2**32 / 2**0.5
    assert float(difference.std()) == pytest.approx(share, rel=0.05)
    assert charges == [SharedGaussian(3.0, 2, 1)]
    assert all(t.dtype == torch.int64 for t in noisy.noised.values())
    again = site(one, charge=charge)
    again.fit(0)
    assert all(torch.equal(again.noised[n], t) for n, t in noisy.noised.items()), "the same key draws the same"


def test_an_upload_of_three_goes_through_masked_numbers_to_the_mean() -> None:
    one = plan()
    assert one.secure_aggregation is not None
    uploads, models, layout = [], [], Layout.of(net())
    for number in range(3):
        own = site(one, number=number)
        own.fit(0)
        state = {name: p.detach().clone() for name, p in own.model.named_parameters()}
        payload = {**model_upload(state, layout), Exposure.SAMPLE_COUNT: count_part(own.num_samples)}
        models.append(state)
        uploads.append(masked_payload(payload, noised_upload(payload, own.noised)))
    with pytest.raises(RefusedError, match="not made with noise"):
        noised_upload(payload, {})
    parts = {exposure: part.specs for exposure, part in payload.items()}
    mean = mean_of(uploads, parts, one.secure_aggregation, MemoryWorkspace())
    for part in (Exposure.MODEL_PARAMETERS_CLASSIFIER,):
        for name, tensor in mean[part].tensors().items():
            torch.testing.assert_close(tensor, sum(m[name] for m in models) / 3, rtol=1e-4, atol=1e-4)


def test_nothing_but_one_plain_step_is_taken_and_nothing_without_room() -> None:
    own = site(plan())
    centre = {name: p.detach() for name, p in own.model.named_parameters()}
    for wrong in ({"correction": Correction(0.1, centre)}, {"epochs": 2}, {"phase": "personal"}):
        with pytest.raises(RefusedError, match="one plain step"):
            own.fit(0, **wrong)
    charged: list[int] = []
    large = site(plan(), charge=lambda *_: charged.append(1) or unsealed())
    large.load({name: p + 1e9 for name, p in large.model.named_parameters()})
    with pytest.raises(TrainingError, match="room"):
        large.fit(0)
    assert not charged


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"secure_aggregation": None}, "masks alone"),
        ({"secure_aggregation": {"minimum": 3, "rounds": 1}}, "in every round"),
        ({"training": {**TRAINING, "epochs": 2}}, "one step a round"),
        ({"training": {**TRAINING, "optimizer": "adam"}}, "optimizer: sgd"),
        ({"training": {**TRAINING, "weight_decay": 0.1}}, "weight_decay"),
        ({"participation": 0.5}, "participation"),
        ({"privacy": {"honest": 3}}, "less than"),
        ({"privacy": {"steps": 8}}, "one step a round"),
        ({"privacy": {"sampling_rate": 0.5}}, "sampling_rate 1"),
        ({"privacy": {"averaged_share": 0.5}}, "averaged_share"),
        (
            {"privacy": {"releases": [{"content": "identifier", "bound": 1, "noise_multiplier": 9, "times": 1}]}},
            "releases",
        ),
    ],
)
def test_plans_for_which_shared_noise_is_not_made_are_refused_with_the_reason(
    change: dict[str, Any], reason: str
) -> None:
    content = plan().model_dump()
    for key, value in change.items():
        content[key] = {**content[key], **value} if key == "privacy" else value
    with pytest.raises(ValueError, match=reason):
        RunPlan.model_validate(content)
    assert RunPlan.from_message(plan().to_message()) == plan()
    assert "honest" not in private_plan().model_dump()["privacy"], "the hash of other plans stays what it was"
