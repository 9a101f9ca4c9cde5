"""Ridge: its solution against NumPy's, its sensitivity on neighbours that attain it, its noise by dp-accounting."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant
from torch import Tensor, nn

from medsilo.algorithms.datasets import ImageDataset
from medsilo.algorithms.method import Federation, Round
from medsilo.algorithms.models import Layout, state_of
from medsilo.algorithms.protection.private import reporting_refusal
from medsilo.algorithms.ridge import SENSITIVITY, Ridge, RidgeCoordinator, RidgeSilo, moments, solve
from medsilo.algorithms.tensors import MemoryWorkspace, Part, Payload
from medsilo.coordinator.config import CoordinatorConfig
from medsilo.privacy.budget.noise import NoiseSource
from medsilo.privacy.budget.promise import PrivacyPlan
from medsilo.privacy.budget.sealed_keys import unsealed
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.errors import ConfigurationError, RefusedError
from medsilo.privacy.exposure import Exposure
from medsilo.silo.run.account import check_promise
from medsilo.silo.training.site import LocalSite
from tests.support.methods.tiny_federation import run_plan, shard

Numbers = npt.NDArray[np.float64]
CLASSES, SHRINKAGE = 3, 0.01


def pooled() -> nn.Module:
    """16 features of an image 1×16×16 that nothing trains, and a linear layer with a bias."""
    torch.manual_seed(5)
    return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(16, CLASSES))


def private(**changes: Any) -> PrivacyPlan:
    release = {"content": "moments", "bound": SENSITIVITY, "noise_multiplier": 3.0, "times": 1}
    plan = {"epsilon": 8, "delta": 1e-5, "clipping_norm": 1, "noise_multiplier": 3, "sampling_rate": 1, "steps": 0}
    return PrivacyPlan.model_validate({**plan, "releases": [release], **changes})


def planned(method: Ridge, privacy: PrivacyPlan | None = None) -> RunPlan:
    return run_plan(method, rounds=1).model_copy(update={"privacy": privacy})


def half_of(method: Ridge, data: ImageDataset, privacy: PrivacyPlan | None = None) -> RidgeSilo:
    site = LocalSite(
        data.name,
        data,
        pooled(),
        planned(method, privacy),
        device=torch.device("cpu"),
        charge=lambda *_: unsealed(),
        noise=NoiseSource(bytes(31) + data.name[-1:].encode()),
    )
    side = method.silo_side(site)
    side.begin(state_of(site.model))
    assert isinstance(side, RidgeSilo)
    return side


def together(sides: list[RidgeSilo], method: Ridge) -> Payload:
    """What one round gives to all."""
    names = tuple(side.site.name for side in sides)
    coordinator = method.coordinator_side(Federation(Layout.of(pooled()), rounds=1, seed=1, silos=names))
    for side in sides:
        side.train(0, {})
    uploads = {side.site.name: side.upload() for side in sides}
    return coordinator.aggregate(Round(0, uploads, uploads, MemoryWorkspace())).for_silo(names[0])


def features_of(data: ImageDataset) -> Numbers:
    """[n, 17]: the model's features and 1, of norm 1 or shorter."""
    images = torch.from_numpy(data.train.images).permute(0, 3, 1, 2).double() / 127.5 - 1
    x = images.reshape(len(images), 4, 4, 4, 4).mean(dim=(2, 4)).flatten(1).numpy()
    x = np.column_stack([x, np.ones(len(x))])
    return np.asarray(x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1))


def numpys(x: Numbers, labels: npt.NDArray[np.int64], weight: float) -> Numbers:
    """argmin over W of ‖X Wᵀ - (Y - 1/K)‖² + λ‖W‖², as a least-squares problem of more rows: [K, d]."""
    rows = np.vstack([x, math.sqrt(weight) * np.eye(x.shape[1])])
    targets = np.vstack([np.eye(CLASSES)[labels] - 1 / CLASSES, np.zeros((x.shape[1], CLASSES))])
    return np.asarray(np.linalg.lstsq(rows, targets, rcond=None)[0].T)


def weights_of(side: RidgeSilo) -> Numbers:
    found = side.personal()
    return np.column_stack([found["2.weight"].double(), found["2.bias"].double()])


DATA = [shard(name, seed) for seed, name in enumerate(["a", "b", "c"], start=1)]


def test_without_noise_every_silo_gets_the_ridge_regression_of_all_images_together() -> None:
    method = Ridge(shrinkage=SHRINKAGE)
    sides = [half_of(method, data) for data in DATA]
    download = together(sides, method)
    x = np.concatenate([features_of(data) for data in DATA])
    labels = np.concatenate([data.train.labels for data in DATA])
    expected = numpys(x, labels, SHRINKAGE * float((x**2).sum()))
    for side in sides:
        side.finish(download)
        np.testing.assert_allclose(weights_of(side) / 5, expected, atol=1e-6, err_msg="logits are five times an answer")
    assert np.abs(expected).max() > 0.05


def test_a_silo_alone_or_late_has_the_ridge_regression_of_its_own_images() -> None:
    side = half_of(Ridge(shrinkage=SHRINKAGE), DATA[0])
    side.train(0, {})
    side.finish({})
    x = features_of(DATA[0])
    expected = numpys(x, DATA[0].train.labels, SHRINKAGE * float((x**2).sum()))
    np.testing.assert_allclose(weights_of(side) / 5, expected, atol=1e-6)


# --- sensitivity ---------------------------------------------------------------------------------------------------


def sums_of(features: Tensor, labels: Tensor, *, but: int | None = None) -> Tensor:
    vectors = moments(features, labels, classes=4, clip=0.5)
    if but is not None:
        vectors[but] = 0
    return vectors.sum(dim=0)


def test_the_sensitivity_is_attained_by_neighbours_and_passed_by_none() -> None:
    """One image of norm c is blanked: that moves the sums by R exactly. Shorter and longer ones move it by less or the
    same."""
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(40, 6, generator=generator, dtype=torch.float64)
    features[7] *= 0.5 / features[7].norm()
    features[8] *= 0.2 / features[8].norm()
    features[9] *= 1e6
    labels = torch.arange(40) % 4
    whole = sums_of(features, labels)
    moved = [float((whole - sums_of(features, labels, but=image)).norm()) for image in range(40)]
    assert moved[7] == pytest.approx(math.sqrt(1.5), abs=1e-9)
    assert moved[8] == pytest.approx(math.sqrt(0.4**4 + 0.4**2 / 2), abs=1e-9), "‖x‖⁴ + ‖x‖²/2 at ‖x‖ = 0.4"
    assert max(moved) <= SENSITIVITY * (1 + 1e-6)


def test_a_patient_of_equal_images_attains_it_and_one_of_different_images_does_not() -> None:
    same = torch.full((3, 4), 0.5, dtype=torch.float64)
    assert float(moments(same, torch.zeros(3), classes=2, clip=1.0).mean(dim=0).norm()) == pytest.approx(SENSITIVITY)
    mixed = torch.eye(3, 4, dtype=torch.float64)
    assert float(moments(mixed, torch.zeros(3), classes=2, clip=1.0).mean(dim=0).norm()) < 0.8 * SENSITIVITY


def test_what_travels_holds_the_whole_of_both_sums() -> None:
    """A from its triangle, with the diagonal as it is and the rest over √2; B with codes of norm 1/√2."""
    features = torch.tensor([[0.6, 0.0], [0.3, 0.4]], dtype=torch.float64)
    found = moments(features, torch.tensor([1, 0]), classes=2, clip=1.0)
    assert found[0].tolist() == pytest.approx([0.36, 0, 0, -0.3, 0, 0.3, 0])
    assert found[1].tolist() == pytest.approx([0.09, 0.12 * math.sqrt(2), 0.16, 0.15, 0.2, -0.15, -0.2])


# --- under differential privacy ------------------------------------------------------------------------------------


def config(folder: Path, **run: Any) -> CoordinatorConfig:
    return CoordinatorConfig.model_validate(
        {
            "federation": "test",
            "listen": "127.0.0.1:7443",
            "insecure": True,
            "state": str(folder),
            "silos": ["a", "b", "c"],
            "run": {
                "name": "r",
                "method": {"name": "ridge", "own": "noised"},
                "model": {"name": "stain-texture", "input_shape": [3, 28, 28], "classes": 4},
                "rounds": 1,
                "privacy": {"preset": "head", "units": 1000, "epsilon": 2, "delta": 1e-5, "unit": "image"},
                **run,
            },
        }
    )


def test_the_plans_noise_is_what_dp_accounting_says_for_one_gaussian_release(tmp_path: Path) -> None:
    plan = config(tmp_path).plan()
    assert plan.privacy is not None
    (release,) = plan.privacy.releases
    assert (plan.privacy.steps, release.times, release.bound) == (0, 1, SENSITIVITY)

    def epsilon(noise: float) -> float:
        return float(PLDAccountant().compose(GaussianDpEvent(noise)).get_epsilon(1e-5))

    assert epsilon(release.noise_multiplier) <= 2
    assert epsilon(release.noise_multiplier - 0.002) > 2
    check_promise(plan, Ridge(own="noised"))


def test_the_noise_in_what_leaves_has_the_plans_deviation() -> None:
    method = Ridge()
    side = half_of(method, DATA[0], private())
    side.train(0, {})
    sent = torch.cat([tensor.flatten() for tensor in side.memory["moments"].values()]).double()
    exact = moments(torch.from_numpy(features_of(DATA[0])), torch.from_numpy(DATA[0].train.labels), classes=3, clip=1)
    noise = (sent - exact.sum(dim=0)).numpy()
    expected = 3.0 * math.sqrt(1.5)
    assert len(noise) == 17 * 18 // 2 + 3 * 17
    # The deviation of a sample deviation over n numbers is σ/√(2n).
    assert abs(noise.std() - expected) < 4 * expected / math.sqrt(2 * len(noise))
    assert Part.of(side.memory["moments"]).nbytes == side.upload()[Exposure.FEATURE_MOMENTS].nbytes


@pytest.mark.parametrize("own", ["exact", "noised"])
def test_a_silos_own_exact_sums_are_in_its_own_model_where_the_plan_says_so(own: Any) -> None:
    method = Ridge(own=own, shrinkage=SHRINKAGE)
    sides = [half_of(method, data, private()) for data in DATA]
    download = together(sides, method)
    first = sides[0]
    first.finish(download)
    sent = [side.upload()[Exposure.FEATURE_MOMENTS].tensors() for side in sides]
    exact = moments(torch.from_numpy(features_of(DATA[0])), torch.from_numpy(DATA[0].train.labels), classes=3, clip=1)
    products, classes = exact.sum(dim=0).split([17 * 18 // 2, 3 * 17])
    parts = [(one["products"].double(), one["classes"].double()) for one in sent]
    if own == "exact":
        parts.append((products, classes.reshape(3, 17)))
    expected = solve(
        sum((a for a, _ in parts), torch.zeros(())),
        sum((b for _, b in parts), torch.zeros(())),
        deviation=3 * SENSITIVITY * math.sqrt(3),
        shrinkage=SHRINKAGE,
    )
    scale = 5 * math.sqrt(2 / 3) * math.sqrt(2)
    np.testing.assert_allclose(weights_of(first), scale * expected.numpy(), atol=1e-5)


def test_the_weight_against_noise_is_the_stated_one() -> None:
    """One feature pair with A = diag(4, -1): by hand."""
    products, crossed = torch.tensor([4.0, 0.0, -1.0], dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64)
    assert solve(products, crossed, deviation=2.0, shrinkage=0.0).tolist()[0] == pytest.approx([1 / 6, 1 / 2])
    adassp = 2 * math.sqrt(2 * math.log(2 * 4 / 0.05))
    found = solve(products, crossed, deviation=2.0, shrinkage=0.0, regularisation="adassp")
    assert found.tolist()[0] == pytest.approx([1 / (4 + adassp), 1 / (adassp - 1)])
    assert solve(products, crossed, deviation=0.0, shrinkage=0.5).tolist()[0] == pytest.approx([1 / 5.5, 1 / 1.5])


def test_accuracies_of_models_with_an_exact_part_cannot_be_asked_for(tmp_path: Path) -> None:
    private = {"preset": "head", "units": 1000, "epsilon": 2, "delta": 1e-5, "metrics_epsilon": 1}
    asking: dict[str, Any] = {"privacy": private, "ask_for": ["LOCAL_METRICS"]}
    plan = config(tmp_path, **asking).plan()
    assert Exposure.LOCAL_METRICS in plan.optional, "with its part noised they can"
    check_promise(plan, Ridge(own="noised"))
    with pytest.raises(ConfigurationError, match=r"run\.ask_for.*own: noised"):
        config(tmp_path, method={"name": "ridge"}, **asking).plan()
    with pytest.raises(RefusedError, match="own: noised"):
        check_promise(plan, Ridge())
    assert reporting_refusal(Ridge(own="noised")) is None


# --- what is refused -----------------------------------------------------------------------------------------------


def test_a_model_of_which_more_is_trained_is_refused() -> None:
    convolutional = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(392, 3))
    federation = Federation(Layout.of(convolutional), rounds=1, seed=1)
    with pytest.raises(ConfigurationError, match="fixed features"):
        RidgeCoordinator(Ridge(), federation)


@pytest.mark.parametrize("change", [lambda t: {**t, "silos": torch.tensor(0)}, lambda t: {"products": t["products"]}])
def test_sums_that_cannot_be_are_refused(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    method = Ridge()
    sides = [half_of(method, data) for data in DATA]
    tensors = together(sides, method)[Exposure.PEER_DERIVED].tensors()
    with pytest.raises(RefusedError):
        sides[0].finish({Exposure.PEER_DERIVED: Part.of(change(tensors))})
