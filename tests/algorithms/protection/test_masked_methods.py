"""Which methods run under masks, and that for those the coordinator needs no more than the sum."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from medsilo.algorithms.declarations import Mixing, Sums, unit_rows
from medsilo.algorithms.families.sharing import count_part
from medsilo.algorithms.feddfq import metric_proxies
from medsilo.algorithms.method import CoordinatorSide, Federation, Method, Round
from medsilo.algorithms.models import Layout, build
from medsilo.algorithms.pfedsim import classifier_similarity, normalised_rows
from medsilo.algorithms.protection.blind import blind_method
from medsilo.algorithms.protection.blind import required as required_blind
from medsilo.algorithms.protection.masked import (
    WEIGHT,
    check_masks,
    encode_upload,
    masked_payload,
    masked_rounds,
    masked_specs,
    mean_of,
    required,
)
from medsilo.algorithms.protection.tiers import best_tier
from medsilo.algorithms.registry import METHODS, make
from medsilo.algorithms.tensors import MemoryWorkspace, Part, Payload
from medsilo.algorithms.tensors.transfer import check_parts
from medsilo.privacy.consent.plan import SecureAggregationPlan
from medsilo.privacy.errors import ConfigurationError, RefusedError, TrainingError
from medsilo.privacy.exposure import MODEL, Exposure
from tests.support.methods.tiny_federation import run_plan

SUMS = [name for name, method in METHODS.items() if isinstance(method.under_masks, Sums)]
PLAN = SecureAggregationPlan(minimum=3, rounds=3)


def summed(side: CoordinatorSide, number: int, uploads: dict[str, Payload]) -> dict[str, Payload]:
    """What a coordinator has of a round under masks: the mean in each silo's place. Masks themselves cancel."""
    parts = side.upload_parts(number, next(iter(uploads)))
    masked = []
    for upload in uploads.values():
        payload = masked_payload(upload, encode_upload(upload, PLAN, len(uploads))[1])
        check_parts({e: part.specs for e, part in payload.items()}, {Exposure.MASKED_UPDATE: masked_specs(parts)})
        masked.append(payload)
    mean = mean_of(masked, parts, PLAN, MemoryWorkspace())
    check_parts({e: part.specs for e, part in mean.items()}, parts)
    return dict.fromkeys(uploads, mean)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [(name, {}) for name in SUMS]
    + [("fedavg", {"weighting": "uniform"}), ("scaffold", {"weighting": "samples", "global_step": 0.5})]
    + [("pfedsim", {"warmup_share": 1.0}), ("pfedsim", {"warmup_share": 1.0, "buffers": "aggregate"})],
)
def test_the_mean_in_each_silos_place_gives_what_the_single_updates_give(name: str, parameters: dict[str, Any]) -> None:
    method = make(name, parameters)
    model = build(run_plan(method, rounds=3, model="stain-texture" if name == "ridge" else "lenet5").model, seed=1)
    plain, blind = (
        method.coordinator_side(Federation(Layout.of(model), rounds=3, seed=1, silos=("a", "b", "c", "d")))
        for _ in range(2)
    )
    rng = np.random.default_rng(7)
    for number in range(masked_rounds(method, 3)):
        # One silo has not taken part; silos of different sizes, so that weights matter.
        uploads = {silo: random_upload(plain, number, silo, rng) for silo in ("a", "b", "d")}
        masked = summed(blind, number, uploads)
        found = blind.aggregate(Round(number, masked, masked, MemoryWorkspace()))
        expected = plain.aggregate(Round(number, uploads, uploads, MemoryWorkspace()))
        assert found.everyone is not None
        assert expected.everyone is not None
        assert not expected.own
        assert set(found.everyone) == set(expected.everyone)
        for exposure, part in expected.everyone.items():
            for key, tensor in part.tensors().items():
                torch.testing.assert_close(found.everyone[exposure].tensors()[key], tensor, rtol=1e-5, atol=1e-6)


def random_upload(side: CoordinatorSide, number: int, silo: str, rng: np.random.Generator) -> Payload:
    """Random numbers in the form that the method wants."""
    found = {}
    for exposure, specs in side.upload_parts(number, silo).items():
        if exposure == Exposure.SAMPLE_COUNT:
            found[exposure] = count_part(int(rng.integers(1, 1000)))
        else:
            tensors = {s.name: torch.from_numpy(rng.normal(size=s.shape).astype(np.float32)) for s in specs}
            found[exposure] = Part.of(tensors)
    return found


def test_every_method_is_either_a_sum_or_refused_with_the_reason() -> None:
    for name in METHODS:
        method = make(name, {})
        if name in SUMS:
            assert masked_rounds(method, 7) == (3 if name == "pfedsim" else 7), "all rounds, or the warm-up"
        else:
            with pytest.raises(
                ConfigurationError, match=f"{name} cannot run with secure aggregation: .{{20,}}"
            ) as told:
                masked_rounds(method, 7)
            assert "no one has stated" not in str(told.value)
    with pytest.raises(ConfigurationError, match="without warm-up rounds"):
        masked_rounds(make("pfedsim", {"warmup_share": 0.0}), 7)


def test_every_methods_mixtures_are_blind_or_refused_with_the_reason() -> None:
    for name in METHODS:
        method = make(name, {})
        if name in ("diversifed", "fedamp", "pfedsim"):
            for number in range(4):
                mixing = blind_method(method).mixing(method, number, 4)
                squared = torch.tensor([[[0.0, 2, 9], [2, 0, 5], [9, 5, 0]]]).double()
                weights = mixing.weights(squared if mixing.compared else squared[:0])
                torch.testing.assert_close(weights.sum(dim=1), torch.ones(3, dtype=torch.float64))
        else:
            with pytest.raises(ConfigurationError, match=f"{name} can.* run with blind mixtures.{{20,}}") as told:
                blind_method(method)
            assert "no one has stated" not in str(told.value)


def squared_of(mixing: Mixing, tensors: list[torch.Tensor]) -> torch.Tensor:
    """Of what silos compare the squared distances: ``[K, N, N]``."""
    assert mixing.compared is not None
    rows = torch.stack([mixing.compared.rows(tensor) for tensor in tensors], dim=1)
    return torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square()


@pytest.mark.parametrize("variant", ["paper", "author"])
@pytest.mark.parametrize("diagonal", ["clip", "one"])
def test_pfedsims_blind_weights_are_its_own(variant: str, diagonal: str) -> None:
    method = make("pfedsim", {"variant": variant, "diagonal": diagonal})
    heads = torch.randn(5, 9, 84, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    heads += torch.randn(1, 9, 84, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    similarity = classifier_similarity(heads, variant=variant, diagonal=diagonal)  # type: ignore[arg-type]
    mixing = blind_method(method).mixing(method, 2, 4)
    found = mixing.weights(squared_of(mixing, list(heads)))
    torch.testing.assert_close(found, normalised_rows(similarity), atol=1e-6, rtol=0)
    assert mixing.mixed == {Exposure.MODEL_PARAMETERS_EXTRACTOR}, "no classifier is handed out"
    warmup = blind_method(method).mixing(method, 1, 4)
    assert (warmup.mixed, warmup.compared) == (frozenset(MODEL), None)
    torch.testing.assert_close(warmup.weights(torch.zeros(0, 4, 4)), torch.full((4, 4), 0.25).double())


@pytest.mark.parametrize("felpa", ["personal", "global"])
def test_feddfqs_blind_weights_are_its_own_and_silos_consent_to_what_is_compared_whole(felpa: str) -> None:
    method = make("feddfq", {"agam": False, "felpa": felpa})
    identifiers = torch.randn(5, 28, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.3
    expected = metric_proxies(identifiers)
    if felpa == "global":
        expected = expected.mean(dim=0).expand(5, -1)
    mixing = blind_method(method).mixing(method, 0, 4)
    torch.testing.assert_close(mixing.weights(squared_of(mixing, list(identifiers))), expected)
    assert Exposure.DATA_IDENTIFIER in required_blind(method, 4)
    assert Exposure.DATA_IDENTIFIER not in required_blind(make("pfedsim", {}), 4)
    for wrong in ({"agam": True}, {"agam": False, "centre": "global_mean"}):
        with pytest.raises(ConfigurationError, match="feddfq can run with blind mixtures only with"):
            blind_method(make("feddfq", wrong))
    with pytest.raises(ConfigurationError, match="a robust one compares single models"):
        blind_method(make("pfedsim", {"aggregation": "median"}))


@pytest.mark.parametrize(
    ("method", "parameters", "tier"),
    [
        ("local", {}, "nothing leaves"),
        ("fedavg", {}, "masked sum"),
        ("fedavg", {"aggregation": "median"}, "plain"),
        ("diversifed", {}, "blind mixture"),
        ("pfedsim", {}, "blind mixture"),
        ("pfedsim", {"warmup_share": 1.0}, "masked sum"),
        ("feddfq", {}, "plain"),
        ("feddfq", {"agam": False}, "blind mixture"),
        ("fedproto", {}, "plain"),
    ],
)
def test_a_methods_best_tier_is_what_a_plan_of_it_may_announce(
    method: str, parameters: dict[str, Any], tier: str
) -> None:
    assert best_tier(make(method, parameters), 10) == tier


def test_what_has_no_direction_is_not_compared() -> None:
    with pytest.raises(TrainingError, match="all zeros"):
        unit_rows(torch.zeros(3, 4))


def test_a_method_that_nobody_has_thought_about_is_refused() -> None:
    """Also where it changes one that somebody has."""

    class Newcomer(METHODS["fedavg"]):  # type: ignore[misc]
        name = "newcomer"

    with pytest.raises(ConfigurationError, match="newcomer cannot run with secure aggregation: no one has stated"):
        masked_rounds(Newcomer(), 7)
    with pytest.raises(ConfigurationError, match="newcomer cannot run with blind mixtures: no one has stated"):
        blind_method(Newcomer())


def test_consent_to_masked_runs_is_to_the_sum_and_not_to_models() -> None:
    assert required(make("fedavg", {}), PLAN, 3) == (
        Exposure.PROTOCOL, Exposure.IDENTITY, Exposure.PEER_DERIVED, Exposure.MASKED_UPDATE,
    )  # fmt: skip
    assert set(required(make("scaffold", {}), PLAN, 3)) & {*MODEL, Exposure.MODEL_GRADIENT} == set()
    # pFedSim's later rounds send single models; only its numbers of images stay hidden.
    half_masked = set(required(make("pfedsim", {}), PLAN, 6))
    assert {*MODEL, Exposure.MASKED_UPDATE} <= half_masked
    assert Exposure.SAMPLE_COUNT not in half_masked
    for name in METHODS:
        assert required(make(name, {}), None, 3) == make(name, {}).required


def test_a_plan_whose_masks_are_not_what_it_says_is_refused() -> None:
    def plan(method: Method, masks: SecureAggregationPlan) -> Any:
        return run_plan(method, rounds=4).model_copy(update={"secure_aggregation": masks})

    fedavg, pfedsim, diversifed = (make(name, {}) for name in ("fedavg", "pfedsim", "diversifed"))
    check_masks(plan(fedavg, PLAN.model_copy(update={"rounds": 4})), fedavg)
    check_masks(plan(pfedsim, PLAN.model_copy(update={"rounds": 2})), pfedsim)
    check_masks(run_plan(diversifed, rounds=4), diversifed)
    with pytest.raises(RefusedError, match="announces masks in 3 rounds; fedavg has 4"):
        check_masks(plan(fedavg, PLAN), fedavg)
    with pytest.raises(RefusedError, match="single model"):
        check_masks(plan(diversifed, PLAN), diversifed)


def test_masks_that_do_not_cancel_are_noticed() -> None:
    upload: Payload = {Exposure.MODEL_PARAMETERS_CLASSIFIER: Part.of({"w": torch.ones(5)})}
    parts = {exposure: part.specs for exposure, part in upload.items()}
    _, numbers = encode_upload(upload, PLAN, 3)
    spoiled = numbers + np.random.default_rng(1).integers(0, 2**64, len(numbers), dtype=np.uint64)
    with pytest.raises(RefusedError, match="do not cancel"):
        mean_of([masked_payload(upload, n) for n in (numbers, numbers, spoiled)], parts, PLAN, MemoryWorkspace())
    assert masked_specs(parts)[0] == WEIGHT
