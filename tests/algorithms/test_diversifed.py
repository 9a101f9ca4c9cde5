"""DiversiFed against its specification: golden numbers, and what must hold for any models."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from medsilo.algorithms.diversifed import (
    DiversiFed,
    attract_repel,
    bounded_weights,
    mixing_weights,
    model_distance_loss,
)
from medsilo.algorithms.families.tethered import pairwise_distances, squared_distances
from medsilo.algorithms.method import Correction
from medsilo.privacy.errors import ConfigurationError
from medsilo.privacy.exposure import Exposure

GOLDEN_MODELS = torch.tensor([[0.1, -0.2], [0.4, 0.2], [-0.5, 0.9]], dtype=torch.float64)
# Temperature, then for each silo: L_d and z; worked out by hand and by autograd outside this project.
GOLDEN = [
    (1.0, [-0.762409, -0.743524, -0.694737], [[0.294011, -0.214008], [0.429310, -0.018868], [-0.491252, 0.907437]]),
    (0.5, [-0.953319, -0.885425, -0.699498], [[0.787157, -0.249614], [0.506988, -0.598903], [-0.465117, 0.929654]]),
]


def random_models(count: int, size: int, seed: int = 0) -> Tensor:
    return torch.randn(count, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("temperature", "losses", "answers"), GOLDEN)
def test_the_golden_numbers(temperature: float, losses: list[float], answers: list[list[float]]) -> None:
    found = model_distance_loss(GOLDEN_MODELS, temperature=temperature)
    torch.testing.assert_close(found, torch.tensor(losses, dtype=torch.float64), atol=1e-6, rtol=0)
    z = attract_repel(GOLDEN_MODELS, temperature=temperature)
    torch.testing.assert_close(z, torch.tensor(answers, dtype=torch.float64), atol=1e-6, rtol=0)


def test_the_golden_mixing_weights() -> None:
    distances = pairwise_distances([squared_distances(GOLDEN_MODELS)], 3)
    assert distances[0].tolist() == pytest.approx([0, 0.5, 1.252996], abs=1e-6)
    assert distances[1, 2].item() == pytest.approx(1.140175, abs=1e-6)
    weights = mixing_weights(distances, temperature=0.5, step_size=1.0)
    assert weights[0].tolist() == pytest.approx([0.234462, 1.273866, -0.508328], abs=2e-6)
    assert weights[1, [0, 2]].tolist() == pytest.approx([1.130038, -0.495554], abs=1e-6)
    assert weights[2, [0, 1]].tolist() == pytest.approx([-0.089661, 0.098533], abs=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 1.1])
def test_the_step_is_the_gradient_of_the_loss_as_the_paper_prints_it(temperature: float) -> None:
    models = random_models(7, 30)
    expected = []
    for i in range(7):
        own = models[i].clone().requires_grad_()
        others = torch.stack([models[j] for j in range(7) if j != i])
        d = torch.linalg.vector_norm(own - others, dim=1) / temperature
        loss = torch.log(torch.exp(d) / torch.exp(d).sum()).mean()  # Eq. 4, literally
        (gradient,) = torch.autograd.grad(loss, own)
        expected.append(models[i] - gradient)
    torch.testing.assert_close(
        attract_repel(models, temperature=temperature), torch.stack(expected), atol=1e-12, rtol=0
    )


def test_the_golden_proximal_gradient() -> None:
    parameter = nn.Parameter(torch.tensor([0.2, 0.1]))
    parameter.grad = torch.tensor([1.0, 1.0])
    centre = torch.tensor([0.294011, -0.214008])
    Correction(2.0, {"w": centre}).bind({"w": parameter})()  # lambda 2, alpha 1
    assert parameter.grad.tolist() == pytest.approx([1 - 0.188022, 1 + 0.628016], abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(
    count=st.integers(1, 100),
    size=st.integers(1, 50),
    seed=st.integers(0, 1000),
    spread=st.floats(1e-6, 1e6),
    temperature=st.floats(0.1, 10),
)
def test_the_step_never_exceeds_its_bound(count: int, size: int, seed: int, spread: float, temperature: float) -> None:
    models = spread * random_models(count, size, seed)
    z = attract_repel(models, temperature=temperature)
    assert torch.isfinite(z).all()
    bound = 2 / temperature * (1 - 1 / max(count - 1, 1))
    steps = torch.linalg.vector_norm(z - models, dim=1)
    assert (steps <= bound + 1e-9 * spread).all()


def test_order_place_direction_and_scale_do_not_matter() -> None:
    models = random_models(5, 8)
    z = attract_repel(models, temperature=0.7)
    order = torch.tensor([3, 0, 4, 1, 2])
    torch.testing.assert_close(attract_repel(models[order], temperature=0.7), z[order])
    torch.testing.assert_close(attract_repel(models + 5, temperature=0.7), z + 5)
    rotation, _ = torch.linalg.qr(random_models(8, 8, seed=1))
    torch.testing.assert_close(attract_repel(models @ rotation, temperature=0.7), z @ rotation)
    scaled = attract_repel(4 * models, temperature=4 * 0.7)
    torch.testing.assert_close(scaled - 4 * models, (z - models) / 4)


def test_two_silos_and_one_get_their_own_models_back() -> None:
    for count in (1, 2):
        models = random_models(count, 6)
        assert torch.equal(attract_repel(models, temperature=0.5), models)
    assert model_distance_loss(random_models(1, 3), temperature=0.5).tolist() == [0]
    assert DiversiFed().warnings(2, "mlp-64", "adam")
    assert not DiversiFed().warnings(3, "mlp-64", "adam")


def test_equal_distances_move_nobody() -> None:
    triangle = torch.tensor([[0.0, 0], [1, 0], [0.5, math.sqrt(3) / 2]], dtype=torch.float64)
    torch.testing.assert_close(attract_repel(triangle, temperature=0.5), triangle)


def test_identical_models_do_not_act_on_each_other() -> None:
    models = torch.tensor([[0.0, 0], [0, 0], [3000, 4000]], dtype=torch.float64)
    expected = torch.tensor([[-0.3, -0.4], [-0.3, -0.4], [3000, 4000]], dtype=torch.float64)
    torch.testing.assert_close(attract_repel(models, temperature=1.0), expected)
    same = torch.ones(4, 3)
    assert torch.equal(attract_repel(same, temperature=0.5), same)


def test_distances_beyond_the_range_of_exp_are_no_trouble() -> None:
    for far in (60.0, 100.0, 1e6, 1e30):
        models = torch.tensor([[0.0], [1.0], [far]])
        z = attract_repel(models, temperature=0.5)
        assert torch.isfinite(z).all()
        assert torch.isfinite(model_distance_loss(models, temperature=0.5)).all()
        # The softmax is one-hot on the farthest. For the silo in the middle the near one pulls to the left and the
        # far one pushes to the left, each with 1/2 / tau = 1; for the first, pull and push cancel out.
        assert z[:2, 0].tolist() == pytest.approx([0, 1 - 2], abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_answers_have_the_type_of_the_question(dtype: torch.dtype) -> None:
    models = random_models(4, 5).to(dtype)
    assert attract_repel(models, temperature=0.5).dtype == dtype
    assert model_distance_loss(models, temperature=0.5).dtype == dtype


def test_large_models_a_small_distance_apart_keep_their_digits() -> None:
    base = 1e4 * random_models(1, 10_000)
    models = base + 1e-3 * random_models(3, 10_000, seed=5)
    found = pairwise_distances([squared_distances(models)], 3)
    expected = torch.linalg.vector_norm(models[0] - models[1])
    assert found[0, 1].item() == pytest.approx(expected.item(), rel=1e-12)


def test_it_exposes_models_only() -> None:
    assert DiversiFed().uploads == {Exposure.MODEL_PARAMETERS_EXTRACTOR, Exposure.MODEL_PARAMETERS_CLASSIFIER}
    assert Exposure.PEER_DERIVED in DiversiFed().required


@pytest.mark.parametrize(
    "wrong", [{"temperature": 0.0}, {"temperature": float("nan")}, {"proximal_weight": -1.0}, {"step_size": 0.0}]
)
def test_hyper_parameters_outside_their_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        DiversiFed(**wrong)  # type: ignore[arg-type]


def bounded(models: Tensor, **options: float) -> Tensor:
    distances = torch.cdist(models, models, compute_mode="donot_use_mm_for_euclid_dist")
    return bounded_weights(distances, **{"temperature": 1.0, "repulsion": 0.2, "step_size": 1.0, **options}) @ models


def test_the_bounded_variant_by_hand() -> None:
    """Three models on a line at 0, 1 and 3: silo 1 sees distances 1 and 3, mean 2."""
    models = torch.tensor([[0.0], [1.0], [3.0]], dtype=torch.float64)
    near, far = math.exp(-0.5), math.exp(-1.5)
    pull = (1 * near + 3 * far) / (near + far)
    push = (1 * math.exp(0.5) + 3 * math.exp(1.5)) / (math.exp(0.5) + math.exp(1.5))
    z = bounded(models)
    assert float(z[0]) == pytest.approx(pull - 0.2 * push)
    assert float(bounded(models, step_size=0.5)[0]) == pytest.approx((pull - 0.2 * push) / 2)


def test_the_bounded_variant_attracts_the_close_and_repels_the_far() -> None:
    models = torch.tensor([[0.0], [0.1], [10.0]], dtype=torch.float64)
    weights = bounded_weights(torch.cdist(models, models), temperature=0.1, repulsion=0.3, step_size=1.0)
    assert weights[0, 1] > 0 > weights[0, 2]


@settings(max_examples=50, deadline=None)
@given(
    count=st.integers(1, 40),
    seed=st.integers(0, 1000),
    spread=st.floats(1e-6, 1e6),
    temperature=st.floats(0.01, 10),
    repulsion=st.floats(0, 0.99),
)
def test_the_bounded_variant_stays_within_its_bounds(
    count: int, seed: int, spread: float, temperature: float, repulsion: float
) -> None:
    """No farther than (1 + rho) times the farthest model; and the unit of models does not matter."""
    models = random_models(count, 7, seed)
    options = {"temperature": temperature, "repulsion": repulsion}
    moved = (bounded(models, **options) - models).norm(dim=1)
    reach = torch.cdist(models, models).amax(dim=1)
    assert (moved <= (1 + repulsion) * reach + 1e-9).all()
    torch.testing.assert_close(bounded(spread * models, **options), spread * bounded(models, **options))


def test_the_bounded_variant_of_identical_models_changes_nothing() -> None:
    models = torch.ones(5, 3, dtype=torch.float64)
    torch.testing.assert_close(bounded(models), models)
