"""pFedSim: the specification's golden numbers, its invariants, and whole runs."""

from __future__ import annotations

import math

import pytest
import torch

from medsilo.algorithms.fedavg import FedAvg
from medsilo.algorithms.method import Federation, Round
from medsilo.algorithms.models import Layout, state_of
from medsilo.algorithms.pfedsim import PFedSim, Variant, classifier_similarity, personalize_extractors
from medsilo.algorithms.tensors import MemoryWorkspace, Part, Payload, TensorSpec, payload_tensors
from medsilo.privacy.errors import ConfigurationError
from medsilo.privacy.exposure import MODEL, Exposure
from tests.support.methods.small_site import SmallSite
from tests.support.methods.tiny_federation import simulate

CLASSIFIERS = torch.tensor(
    [[[1, 0], [0, 1], [1, 1]], [[0.8, 0.6], [-1, 0], [1, 0.5]], [[0, -1], [0.6, 0.8], [2, 2]]], dtype=torch.float64
)
EXTRACTORS = torch.tensor([[1, 0], [0, 1], [2, -1]], dtype=torch.float64)
# Variant, diagonal, the pairs (1,2), (1,3), (2,3), and the mixed extractors; worked out outside this project.
S12, S13 = -math.log(1 - 0.582894), -math.log(1 - 0.600000)
PAPER = [1.526392, 3.606593, 0.989913]
GOLDEN = [
    ("paper", "clip", PAPER, [[1.145029, -0.145029], [0.298996, 0.701004], [1.595388, -0.595388]]),
    ("paper", "one", PAPER, [[1.339182, -0.339182], [0.997131, 0.002869], [1.001802, -0.001802]]),
    ("author", "clip", [S12, S13, 0.0], [[1.003806, -0.003806], [0.086707, 0.913293], [1.909517, -0.909517]]),
]


@pytest.mark.parametrize(("variant", "diagonal", "pairs", "mixed"), GOLDEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_golden_numbers(
    variant: Variant, diagonal: str, pairs: list[float], mixed: list[list[float]], dtype: torch.dtype
) -> None:
    similarity = classifier_similarity(CLASSIFIERS.to(dtype), variant=variant, diagonal=diagonal)  # type: ignore[arg-type]
    assert similarity.dtype == dtype
    assert similarity[[0, 0, 1], [1, 2, 2]].tolist() == pytest.approx(pairs, abs=2e-6)
    assert torch.equal(similarity, similarity.T)
    assert similarity.diagonal().tolist() == pytest.approx([9.210340 if diagonal == "clip" else 1.0] * 3, abs=1e-6)
    found = personalize_extractors(EXTRACTORS.to(dtype), similarity)
    assert found.dtype == dtype
    assert found.tolist() == [pytest.approx(row, abs=3e-6) for row in mixed]


@pytest.mark.parametrize(("variant", "diagonal", "pairs", "mixed"), GOLDEN)
def test_what_the_coordinator_sends_is_the_golden_mixture(
    variant: Variant, diagonal: str, pairs: list[float], mixed: list[list[float]]
) -> None:
    layout = Layout((TensorSpec("extractor", (2,)),), (TensorSpec("weight", (3, 2)),), ())
    method = PFedSim(warmup_share=0.0, variant=variant, diagonal=diagonal)  # type: ignore[arg-type]
    side = method.coordinator_side(Federation(layout, rounds=1, seed=0, silos=("a", "b", "c")))
    uploads: dict[str, Payload] = {
        silo: {
            Exposure.MODEL_PARAMETERS_EXTRACTOR: Part.of({"extractor": extractor}),
            Exposure.MODEL_PARAMETERS_CLASSIFIER: Part.of({"weight": classifier}),
        }
        for silo, extractor, classifier in zip("abc", EXTRACTORS.float(), CLASSIFIERS.float(), strict=True)
    }
    downloads = side.aggregate(Round(0, uploads, uploads, MemoryWorkspace()))
    pure = personalize_extractors(
        EXTRACTORS,
        classifier_similarity(CLASSIFIERS, variant=variant, diagonal=diagonal),  # type: ignore[arg-type]
    )
    for silo, row, exact in zip("abc", mixed, pure.tolist(), strict=True):
        found = downloads.for_silo(silo)[Exposure.PEER_DERIVED].tensors()["extractor"].tolist()
        assert found == pytest.approx(row, abs=3e-6)
        assert found == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize("variant", ["paper", "author"])
def test_equal_classifiers_count_like_the_own_and_are_never_infinite(variant: Variant) -> None:
    classifiers = torch.randn(1, 7, 5, generator=torch.Generator().manual_seed(1)).repeat(4, 1, 1)
    similarity = classifier_similarity(classifiers, variant=variant)
    torch.testing.assert_close(similarity, torch.full((4, 4), 9.210340))
    extractors = torch.randn(4, 1000)
    torch.testing.assert_close(
        personalize_extractors(extractors, similarity), extractors.mean(dim=0).expand(4, -1), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e30])
def test_similarity_does_not_depend_on_the_size_of_weights(scale: float) -> None:
    torch.testing.assert_close(
        classifier_similarity(scale * CLASSIFIERS), classifier_similarity(CLASSIFIERS), rtol=1e-6, atol=1e-6
    )


def test_a_row_of_zeros_is_like_nothing() -> None:
    classifiers = CLASSIFIERS.clone()
    classifiers[0] = 0
    similarity = classifier_similarity(classifiers)
    assert similarity[0, 1:].tolist() == [0, 0]
    torch.testing.assert_close(personalize_extractors(EXTRACTORS, similarity)[0], EXTRACTORS[0])
    assert torch.equal(personalize_extractors(EXTRACTORS, torch.zeros(3, 3)), EXTRACTORS)


@pytest.mark.parametrize("count", [1, 2])
def test_one_and_two_silos(count: int) -> None:
    similarity = classifier_similarity(CLASSIFIERS[:count])
    mixed = personalize_extractors(EXTRACTORS[:count], similarity)
    assert mixed.isfinite().all()
    if count == 1:
        assert torch.equal(mixed, EXTRACTORS[:1])


def upload(value: float, classifier: list[list[float]], samples: int | None = None) -> Payload:
    layout = SmallSite().layout
    tensors = {spec.name: torch.full(spec.shape, value) for spec in layout.parameters}
    tensors[layout.classifier[0].name] = torch.tensor(classifier)
    payload = {e: Part.of({s.name: tensors[s.name] for s in specs}) for e, specs in layout.model_parts().items()}
    if samples is not None:
        payload[Exposure.SAMPLE_COUNT] = Part.of({"samples": torch.tensor(samples)})
    return payload


A, B = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], [[-1.0, 0.0, 0.0], [0.0, -1.0, 0.0]]


def test_absent_silos_take_part_with_their_last_upload_and_newcomers_get_the_warm_up() -> None:
    federation = Federation(SmallSite().layout, rounds=4, seed=0, silos=("a", "b", "c", "d"))
    side = PFedSim(warmup_share=0.25).coordinator_side(federation)
    work = MemoryWorkspace()
    first = {"a": upload(1.0, A, 10), "b": upload(3.0, A, 30)}
    warm = side.aggregate(Round(0, first, first, work)).for_silo("d")
    weight = SmallSite().layout.extractor[0].name
    assert payload_tensors(warm, [Exposure.PEER_DERIVED])[weight].unique().tolist() == [2.5]
    # Round 1: a and c; b has not been in the personal phase yet, so it does not count.
    one = {"a": upload(1.0, A), "c": upload(5.0, A)}
    own = side.aggregate(Round(1, one, {**first, **one}, work)).own
    assert set(own) == {"a", "c"}
    assert payload_tensors(own["a"], [Exposure.PEER_DERIVED])[weight].unique().tolist() == pytest.approx([3.0])
    assert [spec.name for spec in own["a"][Exposure.PEER_DERIVED].specs] == [
        spec.name for spec in SmallSite().layout.extractor
    ]
    # Round 2: only b, whose classifier points the other way. a and c keep their similarity of round 1.
    two = {"b": upload(9.0, B)}
    own = side.aggregate(Round(2, two, {**first, **one, **two}, work)).own
    for silo, value in (("a", 3.0), ("c", 3.0), ("b", 9.0)):
        assert payload_tensors(own[silo], [Exposure.PEER_DERIVED])[weight].unique().tolist() == pytest.approx([value])


def test_what_travels_depends_on_the_phase() -> None:
    federation = Federation(SmallSite().layout, rounds=4, seed=0, silos=("a",))
    side = PFedSim(warmup_share=0.5, buffers="aggregate").coordinator_side(federation)
    statistics = {Exposure.RUNNING_STATISTICS}
    assert set(side.upload_parts(1, "a")) == {*MODEL, Exposure.SAMPLE_COUNT} | statistics
    assert set(side.upload_parts(2, "a")) == set(MODEL) | statistics
    assert PFedSim().uploads == {*MODEL, Exposure.SAMPLE_COUNT}
    assert PFedSim(warmup_share=0.0).uploads == set(MODEL)
    assert Exposure.RUNNING_STATISTICS in PFedSim(buffers="aggregate").required
    site = SmallSite(rounds=4)
    silo = PFedSim(warmup_share=0.5).silo_side(site)
    silo.begin(state_of(site.model))
    silo.train(1, {})
    assert Exposure.SAMPLE_COUNT in silo.upload()
    silo.train(2, {})
    assert set(silo.upload()) == set(MODEL)


def test_the_classifier_and_running_statistics_stay_the_silos_own() -> None:
    site = SmallSite(steps=0)
    silo = PFedSim(warmup_share=0.0).silo_side(site)
    silo.begin(state_of(site.model))
    before = state_of(site.model)
    mixed = Part.of({spec.name: torch.full(spec.shape, 7.0) for spec in site.layout.extractor})
    silo.train(1, {Exposure.PEER_DERIVED: mixed})
    after = silo.personal()
    assert all(after[spec.name].unique().tolist() == [7.0] for spec in site.layout.extractor)
    assert all(torch.equal(after[spec.name], before[spec.name]) for spec in site.layout.classifier)


def test_rho_1_is_fedavg() -> None:
    """The models that silos train are FedAvg's in every round."""
    one, two = simulate(PFedSim(warmup_share=1.0), rounds=3), simulate(FedAvg(), rounds=3)
    for name, side in one.silos.items():
        trained = payload_tensors(two.silos[name].upload(), MODEL)
        for tensor_name, tensor in payload_tensors(side.upload(), MODEL).items():
            assert torch.equal(tensor, trained[tensor_name])


def test_running_statistics_travel_only_when_asked() -> None:
    local = simulate(PFedSim(), rounds=4, model="lenet5")
    together = simulate(PFedSim(buffers="aggregate"), rounds=4, model="lenet5")
    assert all(Exposure.RUNNING_STATISTICS not in side.upload() for side in local.silos.values())
    assert all(Exposure.RUNNING_STATISTICS in side.upload() for side in together.silos.values())


@pytest.mark.parametrize("value", [-0.1, 1.1])
def test_hyper_parameters_have_ranges(value: float) -> None:
    with pytest.raises(ConfigurationError, match="warmup_share"):
        PFedSim(warmup_share=value)


def test_the_phase_has_the_specified_length() -> None:
    assert [PFedSim(warmup_share=0.5).warmup_rounds(n) for n in (1, 3, 200)] == [0, 1, 100]
    assert Layout.of(SmallSite().model).statistics
