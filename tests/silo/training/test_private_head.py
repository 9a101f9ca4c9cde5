"""A linear head's private steps: the same release as by the general way, the same bound, at no more draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

from medsilo.algorithms.datasets import ImageDataset
from medsilo.privacy.budget.accounting import SampledGaussian
from medsilo.privacy.budget.noise import NoiseSource
from medsilo.privacy.budget.sealed_keys import Paid, unsealed
from medsilo.privacy.consent.plan import RunPlan
from medsilo.silo.training import private_training
from medsilo.silo.training.private_head import Head, head_of
from medsilo.silo.training.site import LocalSite
from tests.support.hospital.local_training import dataset
from tests.support.hospital.private_training import CPU, Silent, norm, private_plan, with_patients

KEY = bytes(range(32))
PATIENTS = [*"aaabbcdddd", *"eeefffgghh"]


class Extractor(nn.Module):
    """Fixed features of an image, of which it counts how often they are computed."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(12, 3 * 16 * 16, generator=torch.Generator().manual_seed(4)) / 30
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.seen = 0

    def forward(self, images: Tensor) -> Tensor:
        self.seen += len(images)
        return torch.tanh(images.flatten(1) @ self.weight.T)


def model(*, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(Extractor(), nn.Linear(12, 3, bias=bias))


def site(run: RunPlan, data: ImageDataset | None = None, *, net: nn.Module | None = None, **options: Any) -> LocalSite:
    options.setdefault("charge", lambda *_: unsealed())
    return LocalSite("h", data or dataset(20), net or model(), run, device=CPU, **options)


def trained(one: LocalSite, **options: Any) -> dict[str, Tensor]:
    one.fit(0, **options)
    return {name: p.detach().clone() for name, p in one.model.named_parameters() if p.requires_grad}


def never(*_: Any) -> None:
    return None


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rate", [1.0, 0.4])
@pytest.mark.parametrize("unit", ["image", "patient"])
def test_the_release_is_that_of_the_general_way_under_the_same_key(
    unit: Any, rate: float, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples, noise, momentum and average included, over many steps."""
    training = {"epochs": 6, "momentum": 0.9, "learning_rate": 0.3, "keep_optimizer_state": True}
    run = private_plan(unit=unit, rate=rate, training=training, averaged_share=0.5, noise_multiplier=0.2)
    data = with_patients(dataset(20), PATIENTS)
    net = model(bias=bias)
    fast = trained(site(run, data, net=net, noise=NoiseSource(KEY)))
    assert net[0].seen < 60, "features are computed once, beside what is tried before the first step"
    with monkeypatch.context() as without:
        without.setattr(private_training, "head_of", never)
        general = trained(site(run, data, net=model(bias=bias), noise=NoiseSource(KEY)))
    assert fast.keys() == general.keys()
    for name, tensor in fast.items():
        torch.testing.assert_close(tensor, general[name], rtol=1e-4, atol=1e-5)
    assert norm({n: t - dict(model(bias=bias).named_parameters())[n].detach() for n, t in fast.items()}) > 0.1


def test_nothing_but_the_secret_source_is_drawn_from() -> None:
    run = private_plan(rate=0.4, training={"epochs": 3})
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        one = site(run, net=model(), noise=NoiseSource(KEY))
        torch.manual_seed(seed)
        found.append(trained(one))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    other = trained(site(run, noise=NoiseSource(bytes(32))))
    assert not any(torch.equal(found[0][name], other[name]) for name in other)


def head(net: nn.Module, images: Tensor, labels: Tensor, images_of: list[list[int]]) -> Head:
    net.train()
    chosen = {name: p for name, p in net.named_parameters() if p.requires_grad}
    found = head_of(net, chosen, (images, labels), [np.array(own, dtype=np.int64) for own in images_of])
    assert found is not None
    return found


def units(*numbers: int) -> npt.NDArray[np.int64]:
    return np.array(numbers, dtype=np.int64)


GROUPS = {"image": [[index] for index in range(8)], "patient": [[0, 3, 4], [1], [2, 5], [6, 7]]}


@pytest.mark.parametrize("unit", GROUPS)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4, 1e15])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bound", [0.01, 0.7])
def test_no_unit_moves_the_sum_by_more_than_the_bound(unit: str, scale: float, bias: bool, bound: float) -> None:
    """Weight and bias together, exactly; features and weights of any size, and classes that are missed by far."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 3, bias=bias))
    numbers = torch.Generator().manual_seed(3)
    with torch.no_grad():
        net[1].weight.copy_(torch.randn(3, 6, generator=numbers) * 20)
    images, labels = torch.randn(8, 1, 2, 3, generator=numbers) * scale, torch.arange(8) % 3
    one = head(net, images, labels, GROUPS[unit])
    everyone = units(*range(len(GROUPS[unit])))
    whole = one.clipped_sum(everyone, bound)[0]
    largest = 0.0
    for left_out in everyone:
        alone = one.clipped_sum(units(left_out), bound)[0]
        own = norm(dict(enumerate(alone)))  # type: ignore[arg-type]
        assert own <= bound
        largest = max(largest, own)
        less = one.clipped_sum(np.delete(everyone, left_out), bound)[0]
        differences = {str(i): a.double() - b.double() for i, (a, b) in enumerate(zip(whole, less, strict=True))}
        assert norm(differences) <= bound * (1 + 1e-5)
    if scale >= 1:
        assert largest == pytest.approx(bound, rel=1e-5), "and the bound is used"


@pytest.mark.parametrize("confident", [False, True])
@pytest.mark.parametrize("unit", ["image", "patient"])
def test_factors_that_32_bits_cannot_hold_leave_the_bound_as_it_is(unit: str, confident: bool) -> None:
    """Features of 1e38, as a hostile start may make them, and bounds so small that factors, or what they make of a
    confident model's residuals, have no digits left."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    nn.init.zeros_(net[1].weight)
    with torch.no_grad():
        net[1].bias.copy_(torch.tensor([60.0, 0.0, 0.0]) if confident else torch.zeros(3))
    images, labels = torch.full((4, 1, 8, 8), 1e38), torch.zeros(4, dtype=torch.int64)
    one = head(net, images, labels, [[0], [1], [2], [3]] if unit == "image" else [[0, 1], [2, 3]])
    for bound in np.geomspace(1e-7, 3e-5, 40):
        alone = one.clipped_sum(units(0), float(bound))[0]
        assert norm(dict(enumerate(alone))) <= bound  # type: ignore[arg-type]


@pytest.mark.parametrize("unit", GROUPS)
def test_the_sum_is_that_of_single_backward_passes(unit: str) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
    images, labels = torch.randn(8, 1, 2, 3, generator=torch.Generator().manual_seed(3)), torch.arange(8) % 3
    single = []
    for own in GROUPS[unit]:
        loss = nn.functional.cross_entropy(net(images[own]), labels[own])
        single.append(torch.autograd.grad(loss, list(net.parameters())))
    sizes = [float(torch.cat([g.flatten() for g in gradients]).norm()) for gradients in single]
    bound = float(np.median(sizes))  # half of them are clipped
    expected = [
        sum(gradients[part] * min(1, bound / size) for gradients, size in zip(single, sizes, strict=True))
        for part in (0, 1)
    ]
    found, _, count = head(net, images, labels, GROUPS[unit]).clipped_sum(units(*range(len(GROUPS[unit]))), bound)
    assert count == 8
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("unit", GROUPS)
def test_a_gradient_that_is_not_finite_counts_as_none(unit: str) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
    images, labels = torch.randn(8, 1, 2, 3, generator=torch.Generator().manual_seed(3)), torch.arange(8) % 3
    images[3, 0, 0, 0] = float("inf")
    images[5, 0, 1, 1] = float("nan")
    one = head(net, images, labels, GROUPS[unit])
    bad = [number for number, own in enumerate(GROUPS[unit]) if {3, 5} & set(own)]
    everyone = units(*range(len(GROUPS[unit])))
    found, without = (one.clipped_sum(some, 1.0)[0] for some in (everyone, np.delete(everyone, bad)))
    for ours, theirs in zip(found, without, strict=True):
        assert torch.isfinite(ours).all()
        torch.testing.assert_close(ours, theirs)


class Rescaled(nn.Linear):
    """A layer whose gradients are not a linear one's."""

    def forward(self, features: Tensor) -> Tensor:
        return 2 * super().forward(features)


OTHERS: dict[str, nn.Module] = {
    "two layers": nn.Sequential(nn.Flatten(), nn.Linear(768, 4), nn.Linear(4, 3)),
    "something after it": nn.Sequential(nn.Flatten(), nn.Linear(768, 3), nn.Tanh()),
    "another kind of layer": nn.Sequential(nn.Flatten(), Rescaled(768, 3)),
    "dropout before it": nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(768, 3)),
    "several vectors an image": nn.Sequential(nn.Flatten(2), nn.Linear(256, 3), nn.Flatten(), nn.Identity()),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_is_no_linear_head_on_fixed_inputs_is_trained_the_general_way(what: str) -> None:
    net = OTHERS[what].train()
    state = torch.random.get_rng_state()
    data = torch.zeros(4, 3, 16, 16), torch.zeros(4).long()
    assert head_of(net, dict(net.named_parameters()), data, [np.array([index]) for index in range(4)]) is None
    assert torch.equal(torch.random.get_rng_state(), state), "and nothing was drawn in finding out"


def test_changes_of_images_are_made_anew_in_every_step() -> None:
    net = model()
    changes = {"augmentation": [{"kind": "horizontal_flip", "amount": 0.5}], "epochs": 4}
    trained(site(private_plan(rate=1.0, training=changes), net=net, noise=Silent()))
    assert net[0].seen > 4 * 20


@pytest.mark.parametrize("kind", ["head", "network"])
@pytest.mark.parametrize(("share", "taken"), [(0.0, 1), (0.1, 1), (0.5, 3), (1.0, 5)])
def test_a_training_gives_the_mean_of_its_last_models_and_costs_the_same(kind: str, share: float, taken: int) -> None:
    run = private_plan(rate=1.0, training={"epochs": 5, "momentum": 0.5}, averaged_share=share)
    charged: list[Any] = []

    def charge(_round: int, _phase: str, event: Any, _reads: str) -> Paid:
        charged.append(event)
        return unsealed()

    net = model() if kind == "head" else nn.Sequential(nn.Flatten(), nn.Linear(768, 4), nn.Tanh(), nn.Linear(4, 3))
    one = site(run, net=net, noise=NoiseSource(KEY), charge=charge)
    models: list[list[Tensor]] = []
    real = torch.optim.SGD.step

    def step(optimizer: torch.optim.SGD) -> None:
        real(optimizer)
        models.append([p.detach().clone() for p in one.model.parameters() if p.requires_grad])

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.optim.SGD, "step", step)
        found = list(trained(one).values())
    assert charged == [SampledGaussian(1.0, 2.0, 5)]
    assert len(models) == 5
    for index, tensor in enumerate(found):
        expected = torch.stack([one_model[index] for one_model in models[-taken:]]).mean(dim=0)
        torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-6)
