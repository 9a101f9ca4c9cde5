"""FedDFQ: the specification's golden numbers, its invariants, what travels and when."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medsilo.algorithms.feddfq import (
    FedDFQ,
    FedDFQSilo,
    accumulate_gradients,
    data_identifier,
    loss_changes,
    metric_proxies,
    mix_extractors,
)
from medsilo.algorithms.method import Federation, Round
from medsilo.algorithms.models import Layout, state_of
from medsilo.algorithms.registry import make
from medsilo.algorithms.tensors import MemoryWorkspace, Part, Payload, TensorSpec, payload_tensors
from medsilo.privacy.errors import ConfigurationError, RefusedError
from medsilo.privacy.exposure import Exposure
from medsilo.simulation.batched import Engine, InThreads, Stacked
from medsilo.simulation.federation import Simulation
from tests.support.methods.small_site import SmallSite
from tests.support.methods.tiny_federation import run_plan, shard, simulate

# Rows of (channel 0, channel 1), two images a silo.
IMAGES = [
    [[[(0.2, 0.4), (0, 0.2), (-0.2, 0)], [(0.4, 0.2), (0.2, 0), (0, -0.2)]],
     [[(0.6, 0.2), (0.1, 0.3), (-0.1, 0.1)], [(0.2, 0.2), (0.3, 0.1), (0.1, -0.1)]]],
    [[[(0.4, 0.4), (0.2, 0.2), (0, 0.2)], [(0.2, 0.4), (0, 0.2), (0.2, 0)]],
     [[(0.4, 0.2), (0.2, 0), (0, 0)], [(0.4, 0.4), (0.2, 0.4), (0.2, 0.2)]]],
    [[[(-0.4, -0.2), (0.2, 0), (0.4, 0.2)], [(-0.2, -0.4), (0, 0.2), (0.2, 0.4)]],
     [[(-0.2, -0.2), (0, 0), (0.4, 0.4)], [(-0.4, -0.4), (0.2, 0.2), (0.2, 0.2)]]],
]  # fmt: skip
IDENTIFIERS = torch.tensor([[0.3, 0.15, -0.05], [0.35, 0.175, 0.1], [-0.3, 0.1, 0.3]], dtype=torch.float64)
FEATURES = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
LABELS = torch.tensor([0, 1, 1])
CLASSIFIER = torch.tensor([[0.5, -0.5], [-0.5, 0.5]], dtype=torch.float64)
G1 = torch.tensor([[0.3, 0.1], [-0.3, -0.1]], dtype=torch.float64)
G2 = torch.tensor([[-0.4, 0.2], [0.4, -0.2]], dtype=torch.float64)
OWN = torch.tensor([[0.077020, 0.256314], [-0.077020, -0.256314]], dtype=torch.float64)


def test_the_golden_identifiers() -> None:
    for images, expected in zip(IMAGES, IDENTIFIERS.tolist(), strict=True):
        found = data_identifier(torch.tensor(images, dtype=torch.float64).permute(0, 3, 1, 2))
        assert found.tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_golden_weights_and_mixtures(dtype: torch.dtype) -> None:
    weights = metric_proxies(IDENTIFIERS.to(dtype))
    assert weights.dtype == dtype
    assert weights.tolist() == [
        pytest.approx(row, abs=2e-6) for row in ([0.520354, 0.479646, 0], [0.479646, 0.520354, 0], [0, 0, 1])
    ]
    extractors = torch.tensor([[1, 0], [0, 1], [2, -1]], dtype=dtype)
    assert mix_extractors(extractors, weights).tolist() == [
        pytest.approx(row, abs=2e-6) for row in ([0.520354, 0.479646], [0.479646, 0.520354], [2, -1])
    ]
    softmax = metric_proxies(IDENTIFIERS.to(dtype), normalisation="softmax")
    assert softmax[0].tolist() == pytest.approx([0.470618, 0.435204, 0.094178], abs=2e-6)


def test_what_the_coordinator_sends_is_the_golden_mixture() -> None:
    layout = Layout((TensorSpec("extractor", (2,)),), (TensorSpec("weight", (2, 2)),), ())
    side = FedDFQ(agam=False).coordinator_side(Federation(layout, 1, 0, ("a", "b", "c"), (2, 2, 3)))
    extractors = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, -1.0]])
    uploads: dict[str, Payload] = {
        silo: {
            Exposure.MODEL_PARAMETERS_EXTRACTOR: Part.of({"extractor": extractor}),
            Exposure.DATA_IDENTIFIER: Part.of({"profile": identifier}),
        }
        for silo, extractor, identifier in zip("abc", extractors, IDENTIFIERS.float(), strict=True)
    }
    downloads = side.aggregate(Round(0, uploads, uploads, MemoryWorkspace()))
    pure = mix_extractors(extractors, metric_proxies(IDENTIFIERS)).tolist()
    golden = [0.520354, 0.479646], [0.479646, 0.520354], [2, -1]
    for silo, row, exact in zip("abc", golden, pure, strict=True):
        found = downloads.for_silo(silo)[Exposure.PEER_DERIVED].tensors()["extractor"].tolist()
        assert found == pytest.approx(row, abs=2e-6)
        assert found == pytest.approx(exact, abs=1e-6)


def test_the_golden_accumulation() -> None:
    found, loss = accumulate_gradients(
        FEATURES, LABELS, CLASSIFIER, torch.stack([G2, G1]), torch.tensor([0.0, 0.479646]), learning_rate=0.5
    )
    assert found.tolist() == [
        pytest.approx([0.428053, -0.523982], abs=1e-6),
        pytest.approx([-0.428053, 0.523982], abs=1e-6),
    ]
    assert loss == pytest.approx(0.418813, abs=1e-6)


def test_the_golden_accumulation_with_the_own_gradient_last() -> None:
    similarities = torch.tensor([0.0, 0.479646, 0.520354], dtype=torch.float64)
    found, loss = accumulate_gradients(
        FEATURES, LABELS, CLASSIFIER, torch.stack([G2, G1, OWN]), similarities, learning_rate=0.5
    )
    assert found[0].tolist() == pytest.approx([0.408014, -0.590669], abs=1e-6)
    assert loss == pytest.approx(0.386958, abs=1e-6)


def test_argmin_takes_the_best_beginning_of_the_list() -> None:
    """The golden step is the only one of one; where each further gradient may spoil the step, as far as is best."""
    side, site = silo_with_head(FedDFQ(selection="argmin"))
    for seed in range(8):
        gradients = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(seed))
        before = torch.cat([site.model[3].weight, site.model[3].bias[:, None]], dim=1).detach()
        features, labels = site.features()
        steps = [torch.zeros_like(before), *(0.1 * gradients.cumsum(dim=0))]
        losses = [float(F.cross_entropy(features @ (before - step).T, labels)) for step in steps]
        side._try_gradients(1, {f"{k:06d}/3.{n}": t for k, g in enumerate(gradients) for n, t in split(g)})
        after = torch.cat([site.model[3].weight, site.model[3].bias[:, None]], dim=1).detach()
        torch.testing.assert_close(after, before - steps[losses.index(min(losses))])
        assert float(F.cross_entropy(features @ after.T, labels)) <= losses[0] + 1e-6


def test_loss_changes_are_single_images() -> None:
    steps = torch.stack([0.5 * 0.479646 * G1, 0 * G1])
    found = loss_changes(FEATURES, LABELS, CLASSIFIER, steps)
    assert found.shape == (3, 2)
    assert found[:, 0].mean().item() == pytest.approx(0.418813 - 0.439890, abs=1e-6)
    assert found[:, 1].tolist() == [0, 0, 0]


def split(gradient: Tensor) -> list[tuple[str, Tensor]]:
    return [("weight", gradient[:, :2]), ("bias", gradient[:, 2])]


class HeadSite(SmallSite):
    """A model of which the features are two of the image's numbers."""

    def features(self) -> tuple[Tensor, Tensor]:
        images, labels = self.train_data()
        return torch.cat([images[:, :2], torch.ones(8, 1)], dim=1), labels


def silo_with_head(method: FedDFQ) -> tuple[FedDFQSilo, HeadSite]:
    take = nn.Linear(4, 2, bias=False)
    with torch.no_grad():
        take.weight.copy_(torch.eye(2, 4))
    torch.manual_seed(1)
    site = HeadSite(model=nn.Sequential(take, nn.Identity(), nn.Identity(), nn.Linear(2, 2)))
    return FedDFQSilo(method, site), site


@pytest.mark.parametrize("engine", [InThreads(2), Stacked()], ids=["threads", "stacked"])
def test_the_gradient_is_the_same_however_silos_are_trained(engine: Engine) -> None:
    """Also where an engine trains a copy of the model."""
    method = FedDFQ()
    runs = []
    for one in (None, engine):
        shards = [shard(f"hospital{n}", n) for n in (1, 2, 3)]
        runs.append(Simulation(run_plan(method, rounds=2), method, shards, device=torch.device("cpu"), engine=one))
        runs[-1].step()
    for name, side in runs[0].silos.items():
        expected = side.upload()[Exposure.CLASSIFIER_GRADIENT].tensors()
        found = runs[1].silos[name].upload()[Exposure.CLASSIFIER_GRADIENT].tensors()
        for key, tensor in expected.items():
            assert tensor.abs().sum() > 0
            torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=1e-6)


def test_gradients_before_anyone_has_trained_are_refused() -> None:
    side, _ = silo_with_head(FedDFQ())
    with pytest.raises(RefusedError, match="before any silo has trained"):
        side._try_gradients(0, {})


@pytest.mark.parametrize("normalisation", ["clamp", "softmax", "minmax"])
@pytest.mark.parametrize("count", [1, 2, 100])
def test_weights_are_convex(normalisation: str, count: int) -> None:
    identifiers = torch.randn(count, 28, generator=torch.Generator().manual_seed(count))
    identifiers[0] = 0
    weights = metric_proxies(identifiers, normalisation=normalisation)  # type: ignore[arg-type]
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(count))
    if normalisation == "clamp":
        assert weights[0].tolist() == [1.0] + [0.0] * (count - 1)


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_cosines_do_not_depend_on_brightness(scale: float) -> None:
    torch.testing.assert_close(metric_proxies(scale * IDENTIFIERS), metric_proxies(IDENTIFIERS))


def test_the_training_loss_never_rises() -> None:
    generator = torch.Generator().manual_seed(5)
    features, labels = torch.randn(40, 6, generator=generator), torch.arange(40) % 4
    classifier = torch.randn(4, 6, generator=generator)
    losses = [float(F.cross_entropy(features @ classifier.T, labels))]
    for count in (0, 1, 5, 30):
        gradients = torch.randn(count, 4, 6, generator=torch.Generator().manual_seed(1))
        found, loss = accumulate_gradients(
            features, labels, classifier, gradients, torch.ones(count), learning_rate=0.3
        )
        assert loss == pytest.approx(float(F.cross_entropy(features @ found.T, labels)), abs=1e-6)
        losses.append(loss)
    assert all(later <= earlier for earlier, later in pairwise(losses))
    assert losses[-1] < losses[0], "among thirty directions one should help"


def federation(*silos: str) -> Federation:
    return Federation(SmallSite().layout, rounds=3, seed=0, silos=silos, input_shape=(1, 1, 4))


class ImageSite(SmallSite):
    """Eight images of 1×1×4 for a model that flattens them."""

    def train_data(self) -> tuple[Tensor, Tensor]:
        images, labels = super().train_data()
        return images.reshape(8, 1, 1, 4), labels


def upload(value: float, profile: list[float] | None, gradient: float = 1.0) -> Payload:
    layout = SmallSite().layout
    payload = {
        Exposure.MODEL_PARAMETERS_EXTRACTOR: Part.of({s.name: torch.full(s.shape, value) for s in layout.extractor}),
        Exposure.CLASSIFIER_GRADIENT: Part.of({s.name: torch.full(s.shape, gradient) for s in layout.classifier}),
    }
    if profile is not None:
        payload[Exposure.DATA_IDENTIFIER] = Part.of({"profile": torch.tensor(profile)})
    return payload


def test_the_identifier_is_asked_for_once_and_again_if_it_did_not_arrive() -> None:
    side = FedDFQ().coordinator_side(federation("a", "b"))
    assert Exposure.DATA_IDENTIFIER in side.upload_parts(0, "a")
    uploads = {"a": upload(1.0, [1, 0, 0, 0])}
    downloads = side.aggregate(Round(0, uploads, uploads, MemoryWorkspace()))
    assert Exposure.DATA_IDENTIFIER not in side.upload_parts(1, "a")
    assert Exposure.DATA_IDENTIFIER in side.upload_parts(1, "b"), "b's never arrived"
    site = ImageSite(steps=0)
    silo = FedDFQ().silo_side(site)
    silo.begin(state_of(site.model))
    site.load = lambda _: None  # type: ignore[method-assign, assignment]
    silo.train(0, {})
    assert Exposure.DATA_IDENTIFIER in silo.upload()
    silo.train(1, {})
    assert Exposure.DATA_IDENTIFIER in silo.upload(), "no answer came, so the coordinator has not got it"
    answer = {Exposure.PEER_DERIVED: downloads.for_silo("a")[Exposure.PEER_DERIVED]}
    silo.train(2, answer)
    assert Exposure.DATA_IDENTIFIER not in silo.upload()


@pytest.mark.parametrize(("order", "expected"), [("ascending", [3.0, 2.0]), ("descending", [2.0, 3.0])])
def test_gradients_come_scaled_in_order_of_similarity_and_nobody_is_named(order: str, expected: list[float]) -> None:
    side = FedDFQ(order=order).coordinator_side(federation("a", "b", "c", "d"))  # type: ignore[arg-type]
    uploads = {
        "a": upload(1.0, [1, 0, 0, 0]),
        "b": upload(2.0, [1, 0.5, 0, 0], gradient=2.0),
        "c": upload(3.0, [1, 2, 0, 0], gradient=3.0),
        "d": upload(4.0, [-1, 0, 0, 0], gradient=4.0),
    }
    part = side.aggregate(Round(0, uploads, uploads, MemoryWorkspace())).for_silo("a")[Exposure.CLASSIFIER_GRADIENT]
    tensors = part.tensors()
    weights = metric_proxies(torch.tensor([[1, 0, 0, 0], [1, 0.5, 0, 0], [1, 2, 0, 0], [-1, 0, 0, 0.0]]))[0]
    scaled = {2.0: 2 * weights[1].item(), 3.0: 3 * weights[2].item()}
    weight = SmallSite().layout.classifier[0].name
    found = [tensor.unique().tolist() for name, tensor in tensors.items() if name.endswith(weight)]
    assert found == [[pytest.approx(scaled[gradient], abs=1e-6)] for gradient in expected]
    assert not any(silo in name.split("/")[0] for name in tensors for silo in "abcd")


def test_the_number_of_candidates_is_the_most_similar() -> None:
    side = FedDFQ(candidates=1).coordinator_side(federation("a", "b", "c"))
    uploads = {
        "a": upload(1.0, [1, 0, 0, 0]),
        "b": upload(2.0, [0.1, 1, 0, 0], 2.0),
        "c": upload(3.0, [1, 0.1, 0, 0], 3.0),
    }
    tensors = (
        side.aggregate(Round(0, uploads, uploads, MemoryWorkspace()))
        .for_silo("a")[Exposure.CLASSIFIER_GRADIENT]
        .tensors()
    )
    assert len(tensors) == len(SmallSite().layout.classifier)
    assert all(tensor.mean() > 1 for tensor in tensors.values()), "c's, of size 3, not b's"


def test_each_part_can_be_switched_off_and_then_does_not_leave() -> None:
    assert FedDFQ().uploads == {
        Exposure.MODEL_PARAMETERS_EXTRACTOR,
        Exposure.DATA_IDENTIFIER,
        Exposure.CLASSIFIER_GRADIENT,
    }
    assert Exposure.CLASSIFIER_GRADIENT in FedDFQ().downlink
    alone = FedDFQ(diem=False, agam=False)
    assert alone.uploads == {Exposure.MODEL_PARAMETERS_EXTRACTOR}
    assert alone.downlink == {Exposure.PEER_DERIVED}
    run = simulate(alone, rounds=2)
    extractors = [payload_tensors(side.upload(), [Exposure.MODEL_PARAMETERS_EXTRACTOR]) for side in run.silos.values()]
    assert all(set(side.upload()) == alone.uploads for side in run.silos.values())
    assert len(extractors) == 3


@pytest.mark.parametrize("felpa", ["personal", "global"])
def test_a_whole_run_keeps_classifiers_apart(felpa: str) -> None:
    run = simulate(FedDFQ(felpa=felpa), rounds=3)  # type: ignore[arg-type]
    heads = [side.personal()["classifier.weight"] for side in run.silos.values()]
    assert not torch.equal(heads[0], heads[1])
    assert all(torch.isfinite(head).all() for head in heads)
    assert all(Exposure.DATA_IDENTIFIER not in side.upload() for side in run.silos.values())


@pytest.mark.parametrize("kind", ["mean", "delta"])
def test_with_plain_sgd_the_mean_gradient_is_the_change_over_the_learning_rate(kind: str) -> None:
    mean, delta = (
        simulate(FedDFQ(gradient=gradient), rounds=1)  # type: ignore[arg-type]
        for gradient in ("mean", "delta")
    )
    for name, side in mean.silos.items():
        one = side.upload()[Exposure.CLASSIFIER_GRADIENT].tensors()
        two = delta.silos[name].upload()[Exposure.CLASSIFIER_GRADIENT].tensors()
        for key, tensor in one.items():
            torch.testing.assert_close(tensor, two[key], rtol=1e-3, atol=1e-5)


def test_gradients_of_another_shape_are_refused() -> None:
    site = ImageSite(steps=0)
    silo = FedDFQ().silo_side(site)
    silo.begin(state_of(site.model))
    with pytest.raises(RefusedError, match="names and shapes"):
        silo.train(1, {Exposure.CLASSIFIER_GRADIENT: Part.of({"000000/3.weight": torch.zeros(5, 5)})})


def test_hyper_parameters_have_ranges() -> None:
    with pytest.raises(ConfigurationError, match="candidates"):
        FedDFQ(candidates=-1)
    with pytest.raises(ConfigurationError, match="order"):
        make("feddfq", {"order": "random"})
    with pytest.raises(ConfigurationError, match="selection"):
        make("feddfq", {"selection": "best"})
