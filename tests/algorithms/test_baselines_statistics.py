"""FedGH, FedDBE, FedCAC and FedAP: statistics of features or parameters go up beside, or instead of, a model."""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medsilo.algorithms.fedap import FedAP, closeness, distance, input_statistics
from medsilo.algorithms.fedavg import FedAvg
from medsilo.algorithms.fedcac import FedCAC, collaboration_weights, critical, critical_count, overlaps
from medsilo.algorithms.feddbe import FedDBE, Shift, regularised
from medsilo.algorithms.fedgh import FedGH, train_head
from medsilo.algorithms.method import PERSONAL, Downloads, Federation, Memory, Method, Round
from medsilo.algorithms.models import Features, Layout, build, mlp, state_of
from medsilo.algorithms.tensors import MemoryWorkspace, Part, Payload
from medsilo.privacy.errors import ConfigurationError, RefusedError
from medsilo.privacy.exposure import MODEL, Exposure
from medsilo.silo.training.site import LocalSite
from tests.support.methods.small_site import SmallSite, small_model
from tests.support.methods.tiny_federation import run_plan, shard, simulate

PEER, STATISTICS, MASK = Exposure.PEER_DERIVED, Exposure.RUNNING_STATISTICS, Exposure.PARAMETER_MASK
METHODS: list[Method] = [FedGH(), FedDBE(), FedCAC(), FedAP()]
Uploads = list[dict[str, dict[Exposure, tuple[str, ...]]]]


def names(method: Method) -> str:
    return method.name


def restarted(memory: Memory) -> Memory:
    """A memory as it comes back from disk: copies, and no groups without tensors."""
    file = io.BytesIO()
    torch.save({group: tensors for group, tensors in memory.items() if tensors}, file)
    file.seek(0)
    found: Memory = torch.load(file)
    return found


def drive(
    method: Method,
    schedule: Sequence[Sequence[str]],
    *,
    model: str = "lenet5",
    late: Mapping[int, Collection[str]] | None = None,
    restart: bool = False,
) -> tuple[dict[str, dict[str, Tensor]], Uploads]:
    """Runs the rounds of a schedule of participants, with every upload and exposure checked against what is declared.

    Uploads of silos that are ``late`` in a round are lost. Returns all silos' personal models and, by round and
    silo, the names of the tensors that went up.
    """
    plan = run_plan(method, rounds=len(schedule), model=model)
    everyone = sorted({silo for chosen in schedule for silo in chosen})
    initial = build(plan.model, seed=plan.seed)
    federation = Federation(Layout.of(initial), plan.rounds, plan.seed, tuple(everyone))
    coordinator = method.coordinator_side(federation)
    sides = {}
    for number, name in enumerate(everyone):
        site = LocalSite(
            name, shard(name, seed=number), build(plan.model, seed=plan.seed), plan, device=torch.device("cpu")
        )
        sides[name] = method.silo_side(site)
        sides[name].begin(state_of(initial))
    own: dict[str, Payload] = {}
    all_others: Payload | None = None
    latest: dict[str, Payload] = {}
    seen: Uploads = []
    for number, chosen in enumerate(schedule):
        if restart:
            memory, coordinator = restarted(coordinator.memory), method.coordinator_side(federation)
            coordinator.memory = memory
        downloads = coordinator.downloads(number, chosen, Downloads(own, all_others))
        uploads: dict[str, Payload] = {}
        seen.append({})
        for name in sorted(chosen):
            if restart:
                side = method.silo_side(sides[name].site)
                side.memory = restarted(sides[name].memory)
                sides[name] = side
            sides[name].train(number, downloads.for_silo(name))
            assert set(downloads.for_silo(name)) <= method.downlink
            upload = sides[name].upload()
            wanted = {e: tuple(specs) for e, specs in coordinator.upload_parts(number, name).items()}
            assert {e: part.specs for e, part in upload.items()} == wanted
            assert set(upload) <= method.uploads
            assert all(part.not_finite() is None for part in upload.values())
            seen[-1][name] = {e: tuple(spec.name for spec in part.specs) for e, part in upload.items()}
            if name not in (late or {}).get(number, ()):
                uploads[name] = upload
        if uploads and (number + 1 < len(schedule) or method.downloads_last):
            latest = dict(sorted({**latest, **uploads}.items()))
            fresh = coordinator.aggregate(Round(number, uploads, latest, MemoryWorkspace()))
            own.update(fresh.own)
            all_others = fresh.everyone if fresh.everyone is not None else all_others
    for name in everyone:
        sides[name].finish(Downloads(own, all_others).for_silo(name) if method.downloads_last else {})
    return {name: side.personal() for name, side in sides.items()}, seen


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def side_at(method: Any, site: SmallSite) -> Any:
    side = method.silo_side(site)
    side.begin(state_of(site.model))
    return side


def coordinator_of(method: Any, model: nn.Module | None = None, **changes: Any) -> Any:
    return method.coordinator_side(Federation(Layout.of(model or small_model()), **{"rounds": 3, "seed": 1, **changes}))


def constant_model(value: float, *, without: str = "none of them") -> dict[Exposure, Part]:
    """Parts of the small model with one number everywhere."""
    return {
        exposure: Part.of({s.name: torch.full(s.shape, float(value)) for s in specs if not s.name.startswith(without)})
        for exposure, specs in Layout.of(small_model()).model_parts().items()
    }


def only(payload: Payload) -> dict[str, Tensor]:
    (part,) = payload.values()
    return part.tensors()


def transparent(classes: int = 3) -> nn.Module:
    """A model whose features are its input."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, classes))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(4))  # type: ignore[operator]
    return model


@dataclass
class FourImages(SmallSite):
    """Three images of class 1 and one of class 0, whose features are themselves; no training at all."""

    model: nn.Module = field(default_factory=transparent)
    num_classes: int = 3
    steps: int = 0

    def train_data(self) -> tuple[Tensor, Tensor]:
        images = torch.tensor([[1.0, 0, 0, 0], [3, 2, 0, 0], [5, 1, 0, 3], [0, 4, 0, 1]])
        return images, torch.tensor([1, 1, 1, 0])


# What all four hold.


@pytest.mark.parametrize("method", METHODS, ids=names)
@pytest.mark.parametrize("silos", [1, 2, 3])
def test_a_run_of_any_size_gives_finite_models_and_sends_what_it_declares(method: Method, silos: int) -> None:
    personal, _ = drive(method, [[f"h{n}" for n in range(silos)]] * 4)
    assert all(torch.isfinite(t).all() for state in personal.values() for t in state.values())
    plain = build(run_plan(method, rounds=1, model="lenet5").model, seed=3).state_dict()
    assert all(not torch.equal(state["classifier.weight"], plain["classifier.weight"]) for state in personal.values())


@pytest.mark.parametrize("method", METHODS, ids=names)
def test_silos_may_be_absent_come_late_and_stay_away(method: Method) -> None:
    schedule = [["h0", "h1"], ["h1"], ["h0", "h2"], ["h3"], ["h0", "h1", "h2", "h3"]]
    personal, _ = drive(method, schedule)
    assert set(personal) == {"h0", "h1", "h2", "h3"}
    assert all(torch.isfinite(t).all() for state in personal.values() for t in state.values())


@pytest.mark.parametrize("method", METHODS, ids=names)
def test_a_restart_of_everyone_in_every_round_changes_no_bit(method: Method) -> None:
    schedule = [["h0", "h1"], ["h1", "h2"], ["h0", "h2"], ["h0", "h1", "h2"]]
    kept, sent = drive(method, schedule)
    again, sent_again = drive(method, schedule, restart=True)
    assert sent == sent_again
    assert all(equal(kept[name], again[name]) for name in kept)


@pytest.mark.parametrize("method", METHODS, ids=names)
def test_a_simulations_personal_models_do_better_than_guessing(method: Method) -> None:
    simulation = simulate(method, rounds=6, model="lenet5", participation=0.7)
    for side in simulation.silos.values():
        measured = side.site.measure(side.personal())  # type: ignore[attr-defined]
        assert measured is not None
        assert measured.loss < 1.0986  # ln 3: guessing among three classes


@pytest.mark.parametrize("method", METHODS, ids=names)
def test_uploading_changes_nothing_and_a_rehearsal_has_a_first_uploads_form(method: Method) -> None:
    trained, rehearsed = side_at(method, SmallSite()), side_at(method, SmallSite())
    trained.train(0, {})
    memory = restarted(trained.memory)
    one, two = trained.upload(), trained.upload()
    assert all(equal(one[exposure].tensors(), two[exposure].tensors()) for exposure in one)
    assert all(equal(trained.memory[group], memory[group]) for group in memory)
    rehearsed.rehearse()
    assert rehearsed.site.fits == 0
    assert {e: part.specs for e, part in rehearsed.upload().items()} == {e: part.specs for e, part in one.items()}


@pytest.mark.parametrize("method", METHODS, ids=names)
def test_a_download_of_another_model_is_refused(method: Method) -> None:
    with pytest.raises(RefusedError, match="names and shapes"):
        side_at(method, SmallSite()).train(1, {PEER: Part.of({"stranger": torch.zeros(3)})})


@pytest.mark.parametrize(
    ("method", "parameters", "words"),
    [
        (FedGH, {"server_learning_rate": 0.0}, "above 0"),
        (FedGH, {"passes": 0}, "1 or more"),
        (FedDBE, {"mean_weight": -1.0}, "0 or more"),
        (FedDBE, {"momentum": 0.0}, "above 0 and at most 1"),
        (FedDBE, {"momentum": 1.5}, "above 0 and at most 1"),
        (FedCAC, {"critical_share": 1.5}, "0 or more and at most 1"),
        (FedCAC, {"rounds_to_solitude": 0.0}, "above 0"),
        (FedAP, {"warmup_share": -0.1}, "0 or more and at most 1"),
        (FedAP, {"own_weight": 2.0}, "0 or more and at most 1"),
    ],
)
def test_hyper_parameters_out_of_range_are_refused(method: Any, parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        method(**parameters)


@pytest.mark.parametrize("method", [FedGH(), FedDBE()], ids=names)
def test_a_last_layer_that_is_not_linear_is_refused_by_both_halves(method: Any) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    for make in (lambda: side_at(method, SmallSite(model=model)), lambda: coordinator_of(method, model)):
        with pytest.raises(ConfigurationError, match="must be linear"):
            make()


# FedGH.


def test_fedghs_head_takes_one_step_a_prototype() -> None:
    samples, labels = torch.tensor([[1.0, 2.0], [2.0, 0.0]]), torch.tensor([0, 1])
    weight, bias = train_head(torch.zeros(2, 2), torch.zeros(2), samples[:1], labels[:1], learning_rate=0.5)
    # softmax(0, 0) - (1, 0) = (-1/2, 1/2).
    torch.testing.assert_close(weight, torch.tensor([[0.25, 0.5], [-0.25, -0.5]]))
    torch.testing.assert_close(bias, torch.tensor([0.25, -0.25]))
    weight, bias = train_head(torch.zeros(2, 2), torch.zeros(2), samples, labels, learning_rate=0.5)
    # Logits of the second (0.75, -0.75); 1 / (1 + exp(-1.5)) = 0.8175745.
    torch.testing.assert_close(weight, torch.tensor([[-0.5675745, 0.5], [0.5675745, -0.5]]))
    torch.testing.assert_close(bias, torch.tensor([-0.1587872, 0.1587872]))


def test_fedgh_sends_class_means_and_nothing_of_a_class_that_it_lacks() -> None:
    side = side_at(FedGH(), FourImages())
    side.train(0, {})
    upload = side.upload()
    assert set(upload) == {Exposure.PROTOTYPES}
    found = only(upload)
    torch.testing.assert_close(found["means"], torch.tensor([[0.0, 4, 0, 1], [3, 1, 0, 1], [0, 0, 0, 0]]))
    assert found["present"].tolist() == [1, 1, 0]


def test_fedgh_trains_the_head_on_present_classes_only() -> None:
    coordinator = coordinator_of(FedGH(server_learning_rate=0.5), transparent())
    first = only(coordinator.downloads(0, ["a"], Downloads()).for_silo("a"))
    means = torch.zeros(3, 4)
    means[1] = torch.tensor([1.0, 0, 2, 0])
    means[2] = 1e6  # absent, whatever stands there
    upload = {Exposure.PROTOTYPES: Part.of({"means": means, "present": torch.tensor([0, 1, 0], dtype=torch.uint8)})}
    given = coordinator.aggregate(Round(0, {"a": upload}, {"a": upload}, MemoryWorkspace()))
    found = only(given.for_silo("someone who never took part"))
    step = 0.5 * (torch.softmax(first["1.weight"] @ means[1] + first["1.bias"], 0) - torch.tensor([0.0, 1, 0]))
    torch.testing.assert_close(found["1.weight"], first["1.weight"] - step[:, None] * means[1])
    torch.testing.assert_close(found["1.bias"], first["1.bias"] - step)


def test_fedgh_survives_a_round_without_any_class() -> None:
    coordinator = coordinator_of(FedGH(), transparent())
    first = only(coordinator.downloads(0, ["a"], Downloads()).for_silo("a"))
    tensors = {"means": torch.zeros(3, 4), "present": torch.zeros(3, dtype=torch.uint8)}
    upload = {Exposure.PROTOTYPES: Part.of(tensors)}
    given = coordinator.aggregate(Round(0, {"a": upload}, {"a": upload}, MemoryWorkspace()))
    assert equal(only(given.for_silo("a")), first)


def test_fedghs_silo_replaces_its_head_and_keeps_its_extractor() -> None:
    site = FourImages()
    head = {"1.weight": torch.full((3, 4), 7.0), "1.bias": torch.full((3,), 8.0)}
    side = side_at(FedGH(), site)
    side.train(1, {PEER: Part.of(head)})
    assert equal(side.personal(), {"0.weight": torch.eye(4), **head})


# FedDBE.


def test_feddbes_regulariser_is_the_mean_squared_error_of_the_running_mean() -> None:
    model = nn.Linear(2, 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    entropy = 0.6931472  # of two classes alike
    with Features(model) as features:
        loss = regularised(
            lambda: features.last,
            torch.tensor([0.0, 1.0]),
            batch_mean=lambda values: values.mean(dim=0),
            weight=0.5,
            momentum=0.25,
        )
        # Mean (2, 3), off by (2, 2): 0.5 * 4.
        first = loss(model, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0, 1]))
        # Mean (6, 7), running mean 0.75 (2, 3) + 0.25 (6, 7) = (3, 4), off by (3, 3): 0.5 * 9.
        images = torch.tensor([[6.0, 7.0]], requires_grad=True)
        second = loss(model, images, torch.tensor([0]))
    assert first.item() == pytest.approx(2 + entropy)
    assert second.item() == pytest.approx(4.5 + entropy)
    # d/dz of 0.5 * mean((0.75 r + 0.25 z - m)^2) = 0.5 * 0.25 * (3, 3); the zero classifier adds nothing.
    (gradient,) = torch.autograd.grad(second, images)
    torch.testing.assert_close(gradient, torch.tensor([[0.375, 0.375]]))


def test_feddbe_shifts_what_the_classifier_sees_and_regularises_what_it_does_not() -> None:
    losses = []

    class Probe(FourImages):
        def fit(self, round_number: int, **arguments: Any) -> int:
            losses.append(arguments["objective"](self.model, *self.train_data()).item())
            assert isinstance(arguments["extra"], Shift)
            return 0

    site = Probe()
    images, labels = site.train_data()
    side = side_at(FedDBE(mean_weight=1000.0), site)
    vector = torch.tensor([5.0, -4.0, 3.0, 2.0])
    side.memory["shift"] = {"shift": vector}
    parameters = {spec.name: state_of(site.model)[spec.name] for spec in site.layout.parameters}
    side.train(1, {PEER: Part.of({**parameters, "consensus": images.mean(dim=0)})})
    # The features' mean is the consensus, so nothing but the shifted images' cross entropy is left.
    classifier: Any = site.model[1]  # type: ignore[index]
    assert losses == [pytest.approx(F.cross_entropy(classifier(images + vector), labels).item(), rel=1e-4)]


def test_feddbes_personal_model_holds_the_shift_in_its_bias() -> None:
    side = side_at(FedDBE(), FourImages())
    vector = torch.tensor([5.0, -4.0, 3.0, 2.0])
    side.memory["shift"] = {"shift": vector}
    side.finish({})
    model = transparent()
    model.load_state_dict(side.personal())
    images = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    classifier: Any = side.site.model[1]
    torch.testing.assert_close(model(images), classifier(images + vector))


def test_feddbe_releases_the_mean_once_and_the_shift_never() -> None:
    personal, sent = drive(FedDBE(), [["h0", "h1"], ["h0", "h1", "h2"], ["h0", "h1", "h2"]], model="mlp-64")
    assert [STATISTICS in upload for upload in sent[0].values()] == [True, True]
    assert not any(STATISTICS in upload for chosen in sent[1:] for upload in chosen.values())
    model = {spec.name for spec in Layout.of(mlp((1, 16, 16), 3)).parameters}
    for chosen in sent:
        for upload in chosen.values():
            assert {name for e in upload for name in upload[e]} <= model | {"samples", "mean"}
    # One global model: silos differ in their shift alone, which only the bias shows.
    assert torch.equal(personal["h0"]["hidden.weight"], personal["h1"]["hidden.weight"])
    assert not torch.equal(personal["h0"]["classifier.bias"], personal["h1"]["classifier.bias"])


def test_feddbes_mean_is_that_of_all_the_silos_images() -> None:
    side = side_at(FedDBE(), FourImages())
    side.train(0, {})
    assert side.upload()[STATISTICS].tensors()["mean"].tolist() == [2.25, 1.75, 0, 1]


def test_feddbes_consensus_weighs_means_by_numbers_of_images_and_is_kept() -> None:
    coordinator = coordinator_of(FedDBE())

    def upload(value: float, count: int, mean: list[float] | None) -> Payload:
        payload = {**constant_model(value), Exposure.SAMPLE_COUNT: Part.of({"samples": torch.tensor(count)})}
        return payload if mean is None else {**payload, STATISTICS: Part.of({"mean": torch.tensor(mean)})}

    first = {"a": upload(0, 1, [0, 4, 8]), "b": upload(4, 3, [4, 0, 0])}
    found = only(coordinator.aggregate(Round(0, first, first, MemoryWorkspace())).for_silo("c"))
    assert found["consensus"].tolist() == [3, 1, 2]
    assert {float(value) for name, t in found.items() if name != "consensus" for value in t.reshape(-1)} == {3.0}
    coordinator_again = coordinator_of(FedDBE())
    coordinator_again.memory = restarted(coordinator.memory)
    second = {"b": upload(6, 3, None)}
    found = only(coordinator_again.aggregate(Round(1, second, {**first, **second}, MemoryWorkspace())).for_silo("a"))
    assert found["consensus"].tolist() == [3, 1, 2]
    assert found["0.bias"].tolist() == [6, 6, 6]


def test_feddbe_needs_a_bias_to_put_the_shift_into() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2, bias=False))
    with pytest.raises(ConfigurationError, match="bias"):
        FedDBE().silo_side(SmallSite(model=model))


# FedCAC.


def test_fedcacs_critical_numbers_have_the_largest_products_of_value_and_change() -> None:
    after, before = torch.tensor([[1.0, -2.0], [3.0, 0.5]]), torch.tensor([[0.0, -1.5], [3.0, 0.0]])
    # |θ Δθ| = 1, 1, 0, 0.25: a large value that did not move is not sensitive.
    assert critical(after, before, share=0.5).tolist() == [[1, 1], [0, 0]]
    assert critical(after, before, share=0.75).tolist() == [[1, 1], [0, 1]]
    assert critical(after, before, share=0.25).tolist() == [[1, 0], [0, 0]]
    assert critical(after, before, share=0.0).sum() == 0
    assert critical(after, before, share=1.0).sum() == 4
    assert [critical_count(size, 0.5) for size in (1, 2, 3, 4)] == [1, 1, 2, 2]


def test_fedcacs_overlap_is_the_share_of_critical_numbers_in_common() -> None:
    masks = [[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 1, 1]]
    parts = [Part.of({"w": torch.tensor(mask, dtype=torch.uint8)}) for mask in masks]
    assert overlaps(parts, 2).tolist() == [[1, 0.5, 0], [0.5, 1, 0.5], [0, 0.5, 1]]
    assert overlaps(parts[:2], 0).tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("progress", "sets"),
    [
        # Mean overlap 0.5, largest 0.8: the threshold is 0.5, 0.65, 0.8 and then beyond all.
        (0.0, [[0, 1], [0, 1, 2], [1, 2]]),
        (0.5, [[0, 1], [0, 1], [2]]),
        (1.0, [[0, 1], [0, 1], [2]]),
        (1.5, [[0], [1], [2]]),
    ],
)
def test_fedcac_grows_more_cautious(progress: float, sets: list[list[int]]) -> None:
    together = torch.tensor([[1.0, 0.8, 0.2], [0.8, 1.0, 0.5], [0.2, 0.5, 1.0]], dtype=torch.float64)
    weights = collaboration_weights(together, torch.tensor([True, True, True]), progress=progress)
    expected = [[1 / len(s) if j in s else 0 for j in range(3)] for s in sets]
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64))


def test_fedcac_lets_an_absent_silos_model_count_for_itself_alone() -> None:
    together = torch.tensor([[1.0, 0.8, 0.9], [0.8, 1.0, 0.3], [0.9, 0.3, 1.0]], dtype=torch.float64)
    weights = collaboration_weights(together, torch.tensor([True, True, False]), progress=0.0)
    # The only pair present makes the threshold 0.8; the absent third overlaps by 0.9 with the first.
    assert weights.tolist() == [[0.5, 0.5, 0], [0.5, 0.5, 0], [0.5, 0, 0.5]]


def test_fedcacs_coordinator_gives_both_averages() -> None:
    coordinator = coordinator_of(FedCAC(critical_share=0.5, rounds_to_solitude=1.0))
    layout = Layout.of(small_model())

    def upload(value: float, first_half: bool) -> Payload:
        masks = {}
        for spec in layout.parameters:
            size = torch.zeros(spec.shape).numel()
            mask = torch.zeros(size, dtype=torch.uint8)
            count = critical_count(size, 0.5)
            mask[slice(0, count) if first_half else slice(size - count, size)] = 1
            masks[spec.name] = mask.reshape(spec.shape)
        return {**constant_model(value), MASK: Part.of(masks)}

    uploads = {"a": upload(0, True), "b": upload(3, True), "c": upload(9, False)}
    given = coordinator.aggregate(Round(0, uploads, uploads, MemoryWorkspace()))
    for silo, custom in [("a", 1.5), ("b", 1.5), ("c", 9.0), ("late", 4.0)]:
        found = only(given.for_silo(silo))
        for spec in layout.parameters:
            assert found[f"global.{spec.name}"].unique().tolist() == [4.0], silo
            assert found[f"custom.{spec.name}"].unique().tolist() == [custom], silo


def test_fedcacs_silo_takes_critical_numbers_from_its_collaborators() -> None:
    site = SmallSite(steps=0)
    side = side_at(FedCAC(), site)
    specs = site.layout.parameters
    download = {PEER: Part.of({p + s.name: torch.full(s.shape, v) for p, v in MIXED.items() for s in specs})}
    side.train(0, download)  # without a mask everything comes from all
    assert {float(v) for s in specs for v in side.personal()[s.name].reshape(-1)} == {1.0}
    mask = {s.name: torch.zeros(s.shape, dtype=torch.uint8) for s in specs}
    mask["3.weight"][1] = 1
    side.memory["mask"] = mask
    side.train(1, download)
    assert side.personal()["3.weight"].tolist() == [[1, 1, 1], [2, 2, 2]]
    assert side.personal()["3.bias"].tolist() == [1, 1]


MIXED = {"global.": 1.0, "custom.": 2.0}


def test_fedcac_without_critical_parameters_is_uniform_fedavg() -> None:
    cautious = simulate(FedCAC(critical_share=0.0), rounds=3, participation=0.7)
    plain = simulate(FedAvg(weighting="uniform"), rounds=3, participation=0.7)
    for name, side in cautious.silos.items():
        trained = plain.silos[name].memory.get("trained")
        if trained is not None:
            for key, tensor in trained.items():
                torch.testing.assert_close(side.memory[PERSONAL][key], tensor)


# FedAP.


def test_fedaps_distance_adds_the_layers_wasserstein_distances() -> None:
    # Layer 1: means off by (3, 0), deviations 1 and 5, 2 and 2: √(9 + 16). Layer 2: deviations 3 and 0.
    one = torch.tensor([0.0, 0, 1, 4, 1, 9])
    other = torch.tensor([3.0, 0, 25, 4, 1, 0])
    assert distance(one, other, [2, 1]).item() == 8
    assert distance(one, one, [2, 1]).item() == 0


def test_fedap_weighs_by_inverse_distance() -> None:
    assert closeness(torch.tensor([1.0, 3.0], dtype=torch.float64)).tolist() == [0.75, 0.25]
    twins = closeness(torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64))
    assert twins.tolist() == pytest.approx([0.5, 0.5, 0.0])


def test_fedaps_statistics_are_those_of_what_goes_into_the_layers() -> None:
    model = nn.Sequential(nn.BatchNorm2d(2), nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[0].eps = 0.0  # type: ignore[assignment]
    model[0].running_mean = torch.tensor([1.0, 0.0])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    images = torch.tensor([[[[0.0, 2.0]], [[5.0, 5.0]]], [[[4.0, 6.0]], [[5.0, 5.0]]]])
    found = input_statistics(model, images, ["0", "2"])
    # Channel 0 over images and positions: 0, 2, 4, 6. Behind the first layer (running mean 1, variance 1): each less 1.
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "0.input_mean": [3, 5],
        "0.input_variance": [5, 0],
        "2.input_mean": [1, 3, 5, 5],
        "2.input_variance": [4, 4, 0, 0],
    }
    assert equal(before, model.state_dict())
    assert model.training


def test_fedap_mixes_half_its_own_model_with_the_closer_and_the_farther() -> None:
    coordinator = coordinator_of(FedAP(warmup_share=0.0), rounds=9, silos=("a", "b", "c", "d"))

    def upload(value: float, mean: float) -> Payload:
        said = {"1.input_mean": torch.tensor([mean, 0, 0]), "1.input_variance": torch.ones(3)}
        return {**constant_model(value, without="1."), STATISTICS: Part.of(said)}

    uploads = {"a": upload(0, 0), "b": upload(8, 1), "c": upload(16, 3)}
    given = coordinator.aggregate(Round(2, uploads, uploads, MemoryWorkspace()))
    # a: distances 1 and 3; b: 1 and 2; c: 3 and 2; d has said nothing yet.
    expected = {"a": 0.375 * 8 + 0.125 * 16, "b": 4 + 16 / 6, "c": 8 + 0.5 * (0.4 * 0 + 0.6 * 8), "d": 8.0}
    for silo, value in expected.items():
        found = only(given.for_silo(silo))
        assert found.pop("statistics_wanted").item() == (silo == "d")
        assert {round(float(v), 5) for t in found.values() for v in t.reshape(-1)} == {round(value, 5)}
    # Next round only a and d come: b is at home and counts for nobody but itself.
    alone = {"a": {e: part for e, part in upload(2, 0).items() if e != STATISTICS}, "d": upload(10, 1)}
    given = coordinator.aggregate(Round(3, alone, {**uploads, **alone}, MemoryWorkspace()))
    assert only(given.for_silo("a"))["0.bias"].tolist() == [6, 6, 6]  # 0.5 * 2 + 0.5 * 10
    assert only(given.for_silo("b"))["0.bias"].tolist() == pytest.approx([9, 9, 9])  # d is its twin: 0.5 * 8 + 0.5 * 10


def test_fedap_asks_once_after_the_warm_up_and_again_only_if_nothing_came() -> None:
    schedule = [["h0", "h1", "h2"]] * 2 + [["h0", "h1"], ["h0", "h1", "h2"], ["h0", "h1", "h2"], ["h1"]]
    _, sent = drive(FedAP(warmup_share=0.34), schedule, late={2: ["h1"]})
    asked = [sorted(silo for silo, upload in chosen.items() if STATISTICS in upload) for chosen in sent]
    assert asked == [[], [], ["h0", "h1"], ["h1", "h2"], [], []]


def test_fedaps_batch_normalisation_stays_at_the_silo() -> None:
    personal, sent = drive(FedAP(), [["h0", "h1"]] * 4)
    for chosen in sent:
        for upload in chosen.values():
            model = [name for exposure in MODEL for name in upload[exposure]]
            assert model
            assert not any(name.startswith("norm") for name in model)
    assert not torch.equal(personal["h0"]["norm1.weight"], personal["h1"]["norm1.weight"])
    assert not torch.equal(personal["h0"]["norm1.running_mean"], personal["h1"]["norm1.running_mean"])


def test_fedap_says_which_models_to_choose_where_there_is_no_batch_normalisation() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    for make in (lambda: FedAP().silo_side(SmallSite(model=model)), lambda: coordinator_of(FedAP(), model)):
        with pytest.raises(ConfigurationError, match="choose a model with it, such as lenet5"):
            make()


def test_fedap_alone_keeps_its_own_model() -> None:
    alone = coordinator_of(FedAP(warmup_share=0.0), rounds=9, silos=("a",))
    said = {"1.input_mean": torch.zeros(3), "1.input_variance": torch.ones(3)}
    uploads = {"a": {**constant_model(5, without="1."), STATISTICS: Part.of(said)}}
    found = only(alone.aggregate(Round(1, uploads, uploads, MemoryWorkspace())).for_silo("a"))
    assert found["0.bias"].tolist() == [5, 5, 5]
