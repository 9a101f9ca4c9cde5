"""FedPDC: the specification's golden numbers, what the literal loss does not do, and the public set."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from medsilo.algorithms.datasets import ImageDataset, image_hashes
from medsilo.algorithms.datasets.public_set import PublicImages
from medsilo.algorithms.fedavg import FedAvg
from medsilo.algorithms.fedpdc import FedPDC, accuracy_weights, adaptive_penalty
from medsilo.algorithms.method import Federation, Round
from medsilo.algorithms.models import Layout, build, state_of
from medsilo.algorithms.tensors import MemoryWorkspace, Part, Payload, payload_tensors
from medsilo.privacy.consent.plan import ModelPlan
from medsilo.privacy.errors import ConfigurationError, RefusedError
from medsilo.privacy.exposure import MODEL, Exposure
from tests.support.methods.small_site import SmallSite, small_model
from tests.support.methods.tiny_federation import shard, simulate


class FixedPublic:
    """Accuracies given beforehand, in the order of the calls."""

    def __init__(self, *accuracies: float) -> None:
        self.left = list(accuracies)

    def accuracy(self, parameters: Mapping[str, Tensor]) -> float:
        assert parameters
        return self.left.pop(0)

    def hashes(self) -> Tensor:
        return torch.zeros(2, 32, dtype=torch.uint8)


def plain_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


def upload(value: float, layout: Layout) -> Payload:
    return {
        e: Part.of({s.name: torch.full(s.shape, value) for s in specs}) for e, specs in layout.model_parts().items()
    }


def public_images(seed: int = 77) -> PublicImages:
    data = shard("public", seed, train=30, test=1)
    plan = ModelPlan(name="mlp-64", input_shape=(1, 16, 16), classes=3)
    return PublicImages(data, build(plan, seed=0), (1, 16, 16))


def test_the_golden_weights() -> None:
    accuracies = torch.tensor([0.5, 0.25, 0.75])
    weights = accuracy_weights(accuracies)
    assert weights.tolist() == pytest.approx([1 / 3, 1 / 6, 1 / 2])
    models = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0]])
    assert (weights @ models).tolist() == pytest.approx([-0.166667, 0.833333], abs=1e-6)
    assert (accuracy_weights(torch.zeros(3)) @ models).tolist() == pytest.approx([0, 1])


def test_the_golden_penalties() -> None:
    assert [FedPDC(penalty=10).penalty_of(0) * (1 - p) for p in (0.5, 0.25, 0.75)] == [5, 7.5, 2.5]
    assert [adaptive_penalty(4) * (1 - p) for p in (0.5, 0.25, 0.75)] == [1.0, 1.5, 0.5]
    assert FedPDC(adaptive=True).penalty_of(3) == 2.0, "round 4, counted from 1"
    assert FedPDC(adaptive=True, penalty_max=3).penalty_of(99) == 3


def test_the_coordinator_averages_by_accuracy_and_sends_back_each_silos_own() -> None:
    layout = Layout.of(plain_model())
    federation = Federation(layout, 9, 0, ("a", "b", "c"), public=FixedPublic(0.5, 0.25, 0.75))
    side = FedPDC().coordinator_side(federation)
    uploads = {silo: upload(value, layout) for silo, value in (("a", 1.0), ("b", 2.0), ("c", 4.0))}
    kept = side.aggregate(Round(0, uploads, uploads, MemoryWorkspace()))
    average = payload_tensors(kept.for_silo("a"), [Exposure.PEER_DERIVED])[layout.parameters[0].name]
    assert average.unique().tolist() == pytest.approx([1 / 3 + 2 / 6 + 4 / 2])

    def told(round_number: int, silo: str) -> float:
        found = side.downloads(round_number, [silo], kept).for_silo(silo)
        return float(found[Exposure.DERIVED_ACCURACY].tensors()["accuracy"])

    assert [told(1, silo) for silo in "abc"] == [0.5, 0.25, 0.75]
    assert told(2, "a") == 1.0, "it was not part of the round before"
    assert told(1, "newcomer") == 1.0


@pytest.mark.parametrize("penalty", [0.0, 10.0, 50.0])
def test_the_literal_loss_trains_as_if_it_were_not_there(penalty: float) -> None:
    literal = simulate(FedPDC(penalty=penalty), rounds=3, public=public_images())
    without = simulate(FedPDC(penalty=0.0), rounds=3, public=public_images())
    for name, side in literal.silos.items():
        for key, tensor in side.personal().items():
            assert torch.equal(tensor, without.silos[name].personal()[key])


def test_only_the_weights_of_the_average_differ_from_fedavg() -> None:
    one, two = simulate(FedPDC(), rounds=1, public=public_images()), simulate(FedAvg(weighting="uniform"), rounds=1)
    for name, side in one.silos.items():
        for key, tensor in payload_tensors(side.upload(), MODEL).items():
            assert torch.equal(tensor, payload_tensors(two.silos[name].upload(), MODEL)[key])


def test_the_proximal_term_pulls_by_its_strength() -> None:
    """Golden: at w = (0.2, 0.4) from the global model 0, with λ = 10 and p = 0.5, the extra gradient is (1, 2)."""
    site = SmallSite(steps=1, pull=0.0, model=plain_model())
    side = FedPDC(mode="proximal", check_disjoint=False).silo_side(site)
    side.begin(state_of(site.model))
    centre = {spec.name: torch.zeros(spec.shape) for spec in site.layout.parameters}
    seen = []
    fit = site.fit
    site.fit = lambda n, **options: seen.append(options["correction"]) or fit(n, **options)  # type: ignore[method-assign]
    side.train(
        1, {Exposure.PEER_DERIVED: Part.of(centre), Exposure.DERIVED_ACCURACY: Part.of({"accuracy": torch.tensor(0.5)})}
    )
    (correction,) = seen
    parameter = nn.Parameter(torch.tensor([0.2, 0.4]))
    type(correction)(correction.strength, {"w": torch.zeros(2)}).bind({"w": parameter})()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == pytest.approx([1.0, 2.0])


def test_a_first_participation_is_not_pulled() -> None:
    site = SmallSite(steps=2, pull=1.0, model=plain_model())
    alone = SmallSite(steps=2, pull=1.0, model=plain_model())
    side = FedPDC(mode="proximal", check_disjoint=False).silo_side(site)
    side.begin(state_of(site.model))
    side.train(0, {Exposure.DERIVED_ACCURACY: Part.of({"accuracy": torch.tensor(1.0)})})
    alone.fit(0)
    assert all(torch.equal(a, b) for a, b in zip(site.model.parameters(), alone.model.parameters(), strict=True))


def test_a_silo_whose_image_is_in_the_public_set_refuses() -> None:
    mine = shard("hospital1", seed=1)
    data = shard("public", 77)
    pixels = data.train.images.copy()
    pixels[3] = mine.test.images[2]
    mixed = ImageDataset(
        "public", "", True, data.class_names, type(data.train)(pixels, data.train.labels, None), None, data.test
    )
    plan = ModelPlan(name="mlp-64", input_shape=(1, 16, 16), classes=3)
    public = PublicImages(mixed, build(plan, seed=0), (1, 16, 16))
    with pytest.raises(RefusedError, match="1 of this silo's images"):
        simulate(FedPDC(), rounds=1, public=public)
    simulate(FedPDC(check_disjoint=False), rounds=1, public=public)


def test_public_images_measure_like_a_count_by_hand() -> None:
    data = shard("public", 77, train=40, test=5)
    plan = ModelPlan(name="mlp-64", input_shape=(1, 16, 16), classes=3)
    model = build(plan, seed=5)
    public = PublicImages(data, build(plan, seed=0), (1, 16, 16))
    pixels = np.concatenate([data.train.images, data.test.images])
    labels = np.concatenate([data.train.labels, data.test.labels])
    logits = model(torch.tensor(pixels).permute(0, 3, 1, 2) / 127.5 - 1)
    right = int((logits.argmax(dim=1).numpy() == labels).sum())
    assert public.accuracy(state_of(model)) == right / 45
    assert [bytes(row.tolist()) for row in public.hashes()] == image_hashes(pixels)


def test_public_images_must_fit_the_model() -> None:
    plan = ModelPlan(name="mlp-64", input_shape=(3, 28, 28), classes=3)
    with pytest.raises(ConfigurationError, match="do not fit the model"):
        PublicImages(shard("public", 77), build(plan, seed=0), (3, 28, 28))


def test_a_model_with_running_statistics_cannot_be_measured_without_them() -> None:
    federation = Federation(Layout.of(small_model()), 3, 0, ("a",), public=FixedPublic())
    with pytest.raises(ConfigurationError, match="buffers: aggregate"):
        FedPDC().coordinator_side(federation)
    FedPDC(buffers="aggregate").coordinator_side(federation)


def test_what_it_exposes() -> None:
    assert FedPDC().uploads == set(MODEL)
    assert Exposure.DERIVED_ACCURACY in FedPDC().required
    assert FedPDC().downlink == {Exposure.PEER_DERIVED, Exposure.DERIVED_ACCURACY, Exposure.PUBLIC_DATA}
    assert FedPDC(check_disjoint=False).downlink == {Exposure.PEER_DERIVED, Exposure.DERIVED_ACCURACY}
