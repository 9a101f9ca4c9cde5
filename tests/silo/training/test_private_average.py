"""The contracts of noised averages: how far one unit can move a sum, whose noise is never the same, what is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from medsilo.algorithms.datasets import ImageDataset
from medsilo.algorithms.method import PERSONAL
from medsilo.algorithms.models import state_of
from medsilo.algorithms.tensors import Part
from medsilo.privacy.budget.accounting import GaussianRelease, SampledGaussian, Unit
from medsilo.privacy.errors import BudgetError, RefusedError
from medsilo.privacy.exposure import Exposure
from medsilo.silo.training.private_average import clipped_unit_sum
from medsilo.silo.training.site import LocalSite
from tests.support.hospital.averaging import BOUND, METHOD, Account, averaging_plan, identifier
from tests.support.hospital.local_training import dataset
from tests.support.hospital.private_training import Silent, norm, private_plan, private_site, with_patients

PATIENTS = list("aaabbcdddd")


def shard(unit: Unit) -> ImageDataset:
    return with_patients(dataset(train=10), PATIENTS) if unit == "patient" else dataset(train=10)


HOSTILE = {
    "ordinary": 1.0,
    "huge": 1e200,
    "tiny": 1e-200,
    "infinite": float("inf"),
    "not a number": float("nan"),
}


@pytest.mark.parametrize("scale", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("owners", [list(range(8)), [0, 0, 0, 1, 1, 2, 3, 3]], ids=["image", "patient"])
def test_no_unit_moves_the_clipped_sum_by_more_than_the_bound(scale: float, owners: list[int]) -> None:
    """Blanks every unit in turn; one unit's vectors are as bad as can be."""
    vectors = torch.randn(8, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    vectors[3] *= scale
    owner = torch.tensor(owners)
    whole = clipped_unit_sum(vectors.split(7), owner, BOUND)
    assert torch.isfinite(whole).all()
    moved = []
    for unit in range(max(owners) + 1):
        blanked = torch.where((owner == unit).unsqueeze(1), 0.0, vectors)
        moved.append(float((whole - clipped_unit_sum(blanked.split(7), owner, BOUND)).norm()))
    assert max(moved) <= BOUND
    assert max(moved) > 0.99 * BOUND, "and the bound is used: these vectors are longer"


def test_short_vectors_are_not_clipped() -> None:
    vectors = torch.tensor([[0.1, 0.2], [0.0, 0.0], [-0.3, 0.1]], dtype=torch.float64)
    assert clipped_unit_sum([vectors], torch.arange(3), 10.0).tolist() == pytest.approx([-0.2, 0.3])
    assert clipped_unit_sum([vectors], torch.tensor([0, 0, 1]), 10.0).tolist() == pytest.approx([-0.25, 0.2])


def released(site: LocalSite, what: str) -> Tensor:
    """What FedDFQ gets to see of its images: its identifier, or the changes of the loss among which it chooses."""
    found: list[Tensor] = []
    answer = site.average

    def watching(content: str, *arguments: Any, **options: Any) -> Tensor:
        found.append(answer(content, *arguments, **options))
        return found[-1]

    site.average = watching  # type: ignore[method-assign]
    side = METHOD.silo_side(site)
    side.begin(state_of(site.model))
    if what == "identifier":
        side.identifier(0)  # type: ignore[attr-defined]
    else:
        gradients = {}
        for rank in range(3):
            generator = torch.Generator().manual_seed(rank)
            for spec in site.layout.classifier:
                # The coordinator may send what it likes: very long steps are no way around the bound.
                gradients[f"{rank:06d}/{spec.name}"] = 10.0 ** (3 * rank) * torch.randn(spec.shape, generator=generator)
        side._try_gradients(1, gradients)  # type: ignore[attr-defined]
    (one,) = found
    return one


@pytest.mark.parametrize("unit", ["image", "patient"])
@pytest.mark.parametrize("what", ["identifier", "choice"])
def test_removing_any_record_moves_what_feddfq_releases_by_at_most_the_bound(what: str, unit: Unit) -> None:
    """The sum over a shard, and over the same shard without one unit: brute force over all units."""
    data = shard(unit)
    # Small enough that every unit's vector is clipped, so that the bound is reached.
    plan = averaging_plan(unit, bound=0.05)
    owners = np.array(PATIENTS if unit == "patient" else np.arange(10).astype(str))
    units = len(set(owners))
    whole = released(private_site(plan, data, noise=Silent()), what) * units
    moved = []
    for one in sorted(set(owners)):
        rest = ImageDataset(
            "h", "t", True, data.class_names, data.train.take(np.flatnonzero(owners != one)), None, data.test
        )
        less = released(private_site(plan, rest, noise=Silent()), what) * (units - 1)
        moved.append(float((whole - less).norm()))
    assert max(moved) <= 0.05 * (1 + 1e-6)
    assert max(moved) > 0.04


def test_the_noise_has_the_plans_deviation_over_the_number_of_units() -> None:
    site = private_site(averaging_plan(bound=0.3, noise=4.0))
    answer = site.average("identifier", lambda images, _: images.new_zeros(len(images), 20_000), round_number=0)
    assert float(answer.std()) == pytest.approx(4.0 * 0.3 / 10, rel=0.03)


def test_no_two_answers_have_the_same_noise() -> None:
    """Neither in another round, nor at another silo, nor after a restart, though all seeds agree."""
    plan = averaging_plan()
    first = private_site(plan)
    sites = [first, first, private_site(plan), private_site(plan)]
    answers = [
        site.average("identifier", lambda images, _: images.new_zeros(len(images), 50), round_number=number)
        for site, number in zip(sites, (0, 1, 0, 0), strict=True)
    ]
    for index, one in enumerate(answers):
        for other in answers[:index]:
            assert not torch.isclose(one, other, rtol=0, atol=1e-9).any()


def test_the_identifier_is_noised_once_for_a_data_set_and_sent_again_as_the_same_bytes(tmp_path: Path) -> None:
    first = identifier(Account(tmp_path))
    for _ in range(3):
        assert identifier(Account(tmp_path)).numpy().tobytes() == first.numpy().tobytes()
    assert [entry.event for entry in Account(tmp_path).ledger.entries()] == [GaussianRelease(10.0)]
    # Another mechanism is another release; so is another version of the data set, which has another ledger.
    assert not torch.equal(identifier(Account(tmp_path), averaging_plan(noise=12.0)), first)
    assert not torch.equal(identifier(Account(tmp_path / "other")), first)
    assert [e.event for e in Account(tmp_path).ledger.entries()] == [GaussianRelease(10.0), GaussianRelease(12.0)]


def test_a_release_that_the_budget_does_not_cover_is_not_drawn(tmp_path: Path) -> None:
    account = Account(tmp_path)
    account.charge(0, "training", SampledGaussian(0.2, 2, 150), "")
    with pytest.raises(BudgetError, match="refused"):
        identifier(account, averaging_plan(noise=0.5))
    assert not account.kept.folder.exists()
    assert len(account.ledger.entries()) == 1


def test_a_kept_release_that_is_damaged_is_named_with_the_way_out(tmp_path: Path) -> None:
    account = Account(tmp_path)
    identifier(account)
    (path,) = account.kept.folder.iterdir()
    path.write_text(path.read_text()[:-9])
    with pytest.raises(BudgetError, match=r"identifier-.*delete it"):
        identifier(account)


def test_what_the_plan_does_not_name_is_not_released() -> None:
    with pytest.raises(RefusedError, match="does not say how the silo's identifier is protected"):
        private_site(private_plan()).average("identifier", lambda images, _: images, round_number=0)


def test_the_classifiers_gradient_is_that_of_the_noised_steps() -> None:
    """With plain SGD, what the noised model has moved divided by the steps: nothing that the model does not tell."""
    site = private_site(averaging_plan(training={"learning_rate": 0.5}))
    side = METHOD.silo_side(site)
    before = state_of(site.model)
    side.begin(before)
    side.train(0, {})
    found = side.upload()[Exposure.CLASSIFIER_GRADIENT].tensors()
    after = side.memory[PERSONAL]
    steps = 2  # an epoch at sampling rate 1/2
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, (before[name] - after[name]) / (0.5 * steps), rtol=1e-3, atol=1e-5)
    assert norm(found) > 0.1, "noise of deviation 0.6 on a mean over 5 images"


def test_the_choice_among_gradients_is_made_on_noised_numbers_alone() -> None:
    """With noise that outweighs all, useless gradients are taken as often as useful ones."""
    site = private_site(averaging_plan(noise=1e6))
    side = METHOD.silo_side(site)
    before = state_of(site.model)
    torch.nn.functional.cross_entropy(site.model(site._images.train[0]), site._images.train[1]).backward()
    parameters = dict(site.model.named_parameters())
    taken = {"useful": 0, "harmful": 0}
    for kind, sign in (("useful", 1.0), ("harmful", -1.0)):
        gradients = {f"000000/{s.name}": sign * parameters[s.name].grad for s in site.layout.classifier}
        for _ in range(40):
            site.load(before)
            side._try_gradients(1, Part.of(gradients).tensors())  # type: ignore[attr-defined, arg-type]
            taken[kind] += any(not torch.equal(before[n], t) for n, t in state_of(site.model).items())
    for count in taken.values():
        assert 6 <= count <= 34, "a fair coin falls outside in fewer than one of 10^5 runs"
