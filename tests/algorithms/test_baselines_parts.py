"""FedPer, FedRep, FedBN, FedBABU, FedRoD, FedProto and MOON: what is trained, what travels, what stays."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from medsilo.algorithms.datasets import ImageDataset, ImageSplit
from medsilo.algorithms.fedavg import FedAvg
from medsilo.algorithms.fedbabu import FedBABU
from medsilo.algorithms.fedbn import FedBN
from medsilo.algorithms.fedper import FedPer
from medsilo.algorithms.fedproto import FedProto, average_prototypes, prototypes
from medsilo.algorithms.fedrep import FedRep
from medsilo.algorithms.fedrod import FedRoD, log_class_shares
from medsilo.algorithms.method import PERSONAL, Federation, Method, Round
from medsilo.algorithms.models import ARCHITECTURES, Layout, build, state_of
from medsilo.algorithms.moon import Moon, contrastive_loss
from medsilo.algorithms.registry import make
from medsilo.algorithms.tensors import MemoryWorkspace, Part, Payload
from medsilo.algorithms.tensors.transfer import check_finite, check_parts
from medsilo.privacy.consent.plan import MethodPlan, ModelPlan, RunPlan, TrainingPlan
from medsilo.privacy.errors import ConfigurationError, RefusedError
from medsilo.privacy.exposure import MODEL, Exposure
from medsilo.simulation.federation import Simulation
from tests.support.methods.small_site import SmallSite, small_model

EXTRACTOR, CLASSIFIER = MODEL
METHODS: tuple[Method, ...] = (
    FedPer(),
    FedRep(head_epochs=2),
    FedBN(),
    FedBABU(fine_tune_epochs=1),
    FedRoD(),
    FedProto(),
    FedProto(weighting="counts"),
    Moon(),
)
LEFT = 0.9**3
"""A small site's training takes three steps of 0.1 towards 1: this share of the distance is left."""


@dataclass
class WatchedSite(SmallSite):
    """A small site that notes with what its training was called."""

    calls: list[dict[str, Any]] = field(default_factory=list)

    def fit(self, round_number: int, **settings: Any) -> int:
        self.calls.append({"round": round_number, **settings})
        return super().fit(round_number, **settings)


def side_at(method: Method, site: SmallSite) -> Any:
    side = method.silo_side(site)
    side.begin(state_of(site.model))
    return side


def names(payload: Payload, exposure: Exposure) -> list[str]:
    return [spec.name for spec in payload[exposure].specs]


def average_of(method: Method, model: nn.Module, uploads: Mapping[str, Payload]) -> Payload:
    side = method.coordinator_side(Federation(Layout.of(model), rounds=3, seed=1))
    downloads = side.aggregate(Round(0, uploads, uploads, MemoryWorkspace()))
    return downloads.for_silo("a")


def download_of(side: Any, value: float) -> Payload:
    """An average that is the same number everywhere."""
    return {Exposure.PEER_DERIVED: Part.of({spec.name: torch.full(spec.shape, value) for spec in side.shared})}


# --- What all of them promise -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_an_upload_is_what_the_coordinator_asks_for_and_what_the_method_declares(method: Method) -> None:
    site = SmallSite()
    expected = method.coordinator_side(Federation(site.layout, rounds=3, seed=1)).upload_parts(0, "a")
    side = side_at(method, site)
    side.rehearse()
    rehearsed = side.upload()
    side.train(0, {})
    before = {group: {n: t.clone() for n, t in state.items()} for group, state in side.memory.items()}
    for payload in (rehearsed, side.upload()):
        check_parts({exposure: part.specs for exposure, part in payload.items()}, expected)
        check_finite(payload)
        assert set(payload) == method.uploads
    assert before.keys() == side.memory.keys()
    assert all(torch.equal(before[group][n], t) for group, state in side.memory.items() for n, t in state.items())


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_restarted_silo_goes_on_where_it_was(method: Method) -> None:
    sites = [SmallSite() for _ in range(2)]
    one = side_at(method, sites[0])
    one.train(0, {})
    answer = average_of(method, sites[0].model, {"a": one.upload()})
    again = method.silo_side(sites[1])
    again.memory = {group: {n: t.clone() for n, t in state.items()} for group, state in one.memory.items()}
    sites[1].load({name: torch.zeros_like(tensor) for name, tensor in state_of(sites[1].model).items()})
    for side in (one, again):
        side.train(1, answer)
        side.finish(answer if method.downloads_last else {})
    for exposure, part in one.upload().items():
        other = again.upload()[exposure].tensors()
        assert all(torch.equal(tensor, other[name]) for name, tensor in part.tensors().items())
    assert all(torch.equal(tensor, again.personal()[name]) for name, tensor in one.personal().items())


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_late_silo_takes_what_there_is_at_its_first_participation(method: Method) -> None:
    site = SmallSite()
    other = side_at(method, SmallSite())
    other.train(0, {})
    answer = average_of(method, site.model, {"b": other.upload()})
    side = side_at(method, site)
    side.train(7, answer)
    assert all(torch.isfinite(tensor).all() for tensor in side.personal().values())


# --- Sharing by averages ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("weighting", "expected"), [("samples", 4.0), ("uniform", 3.0)])
@pytest.mark.parametrize("kind", [FedPer, FedRep, FedBN, FedBABU, FedRoD])
def test_the_average_weights_by_images_or_all_alike(kind: Any, weighting: str, expected: float) -> None:
    """(1·1 + 3·5)/4 = 4 with one and three images; (1 + 5)/2 = 3 without."""
    method = kind(weighting=weighting)
    model = small_model()
    uploads = {}
    for name, value, count in (("a", 1.0, 1), ("b", 5.0, 3)):
        parts = method.shared(Layout.of(model))
        upload = {e: Part.of({s.name: torch.full(s.shape, value) for s in specs}) for e, specs in parts.items()}
        if weighting == "samples":
            upload[Exposure.SAMPLE_COUNT] = Part.of({"samples": torch.tensor(count)})
        uploads[name] = upload
    found = average_of(method, model, uploads)[Exposure.PEER_DERIVED].tensors()
    assert all((tensor == expected).all() for tensor in found.values())
    assert (Exposure.SAMPLE_COUNT in method.required) == (weighting == "samples")


@pytest.mark.parametrize("kind", [FedPer, FedRep, FedBN, FedBABU, FedRoD, Moon])
def test_an_unknown_weighting_is_refused_with_the_choices(kind: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=f"{kind.name}: weighting is 'median'; it should be samples or uniform"
    ):
        make(kind.name, {"weighting": "median"})


def test_a_foreign_average_is_refused() -> None:
    side = side_at(FedPer(), SmallSite())
    with pytest.raises(RefusedError, match="names and shapes"):
        side.train(0, {Exposure.PEER_DERIVED: Part.of({"3.weight": torch.zeros(2, 3)})})


def test_fedpers_classifier_never_leaves_and_is_never_replaced() -> None:
    site = SmallSite()
    side = side_at(FedPer(), site)
    start = {name: tensor.clone() for name, tensor in side.memory[PERSONAL].items()}
    side.train(0, download_of(side, 5.0))
    assert names(side.upload(), EXTRACTOR) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert CLASSIFIER not in side.upload()
    personal = side.personal()
    torch.testing.assert_close(personal["0.weight"], torch.full((3, 4), 1 + LEFT * 4))  # from the average 5 towards 1
    torch.testing.assert_close(personal["3.weight"], 1 + LEFT * (start["3.weight"] - 1))  # from its own
    assert personal["1.num_batches_tracked"] == 1


def test_fedrep_fits_the_head_first_and_then_the_body() -> None:
    site = WatchedSite()
    side = side_at(FedRep(head_epochs=10, body_epochs=2), site)
    side.train(4, {})
    head, body = site.calls
    assert head == {"round": 4, "trainable": {"3.weight", "3.bias"}, "epochs": 10, "phase": "head"}
    assert body == {
        "round": 4,
        "trainable": {"0.weight", "0.bias", "1.weight", "1.bias"},
        "epochs": 2,
        "phase": "body",
    }
    assert list(side.upload()) == [EXTRACTOR]


@pytest.mark.parametrize("values", [{"head_epochs": 0}, {"body_epochs": 0}])
def test_fedrep_without_epochs_is_refused(values: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="must be 1 or more"):
        FedRep(**values)


def test_a_layout_names_batch_normalisations_parameters() -> None:
    def named(name: str) -> tuple[str, ...]:
        return Layout.of(build(ModelPlan(name=name, input_shape=(3, 16, 16), classes=3))).normalisation

    assert named("lenet5") == ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias")
    assert named("diversifed-cnn") == ()
    # InstanceNorm and GroupNorm have no statistics of the batch.
    others = nn.Sequential(nn.InstanceNorm2d(2, affine=True), nn.GroupNorm(1, 2), nn.Linear(2, 2))
    assert Layout.of(others).normalisation == ()


def test_fedbn_keeps_batch_normalisation_at_the_silo() -> None:
    site = SmallSite()
    side = side_at(FedBN(), site)
    side.train(0, {})
    upload = side.upload()
    assert names(upload, EXTRACTOR) == ["0.weight", "0.bias"]
    assert names(upload, CLASSIFIER) == ["3.weight", "3.bias"]
    trained = state_of(site.model)
    side.finish(download_of(side, 5.0))
    personal = side.personal()
    for name in ("0.weight", "0.bias", "3.weight", "3.bias"):
        assert (personal[name] == 5).all()
    # Scales start at 1 and stay there; shifts go from 0 to 1 - 0.9^3.
    torch.testing.assert_close(personal["1.bias"], torch.full((3,), 1 - LEFT))
    assert torch.equal(personal["1.running_mean"], trained["1.running_mean"])


def test_fedbn_warns_of_models_without_batch_normalisation_and_of_no_other() -> None:
    def warned(model: str) -> str:
        return " ".join(FedBN().warnings(3, model, "adam"))

    for name in ARCHITECTURES:
        shape = (3, 32, 32) if name in ("cifar-cnn", "fedpdc-cnn") else (1, 28, 28)
        has_it = bool(Layout.of(build(ModelPlan(name=name, input_shape=shape, classes=4))).normalisation)
        assert has_it == (f"{name} has none" not in warned(name)), name
    assert "if torchvision:vgg11 has none" in warned("torchvision:vgg11")


def test_fedbabus_head_stays_at_the_common_start_until_the_end() -> None:
    site = WatchedSite()
    side = side_at(FedBABU(fine_tune_epochs=5), site)
    start = {name: tensor.clone() for name, tensor in side.memory[PERSONAL].items()}
    side.train(0, {})
    side.train(1, download_of(side, 5.0))
    assert torch.equal(side.personal()["3.weight"], start["3.weight"])
    assert (side.personal()["0.weight"] == 5).all()  # measured: the average body under the frozen head
    sent = side.upload()[EXTRACTOR].tensors()
    torch.testing.assert_close(sent["0.weight"], torch.full((3, 4), 1 + LEFT * 4))
    side.finish(download_of(side, 3.0))
    assert site.calls[-1] == {"round": 2, "epochs": 5, "phase": "fine-tuning"}
    torch.testing.assert_close(side.personal()["0.weight"], torch.full((3, 4), 1 + LEFT * 2))
    torch.testing.assert_close(side.personal()["3.weight"], 1 + LEFT * (start["3.weight"] - 1))


def test_fedbabu_without_fine_tuning_ends_with_the_average() -> None:
    site = WatchedSite()
    side = side_at(FedBABU(fine_tune_epochs=0), site)
    side.train(0, {})
    side.finish(download_of(side, 3.0))
    assert len(site.calls) == 1
    assert (side.personal()["0.weight"] == 3).all()
    with pytest.raises(ConfigurationError, match="0 or more"):
        FedBABU(fine_tune_epochs=-1)


# --- FedRoD -------------------------------------------------------------------------------------------------------


@dataclass
class FixedSite(SmallSite):
    """Images that are their own features, with classes 0, 0, 0, 1 of three: one step of SGD with rate 0.1."""

    num_samples: int = 4
    num_units: int = 4
    num_classes: int = 3
    steps: int = 1
    model: nn.Module = field(default_factory=lambda: fixed_model())
    losses: list[float] = field(default_factory=list)

    def train_data(self) -> tuple[Tensor, Tensor]:
        return torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0, 0, 1])

    def fit(self, round_number: int, *, objective: Any = None, extra: Any = None, **settings: Any) -> int:
        trained = [*self.model.parameters(), *(extra.parameters() if extra is not None else ())]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        optimizer.zero_grad()
        loss = objective(self.model, *self.train_data())
        loss.backward()
        optimizer.step()
        self.losses.append(loss.item())
        return 1


def fixed_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 3, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(2))
        model[1].weight.zero_()
    return model


def test_class_shares_leave_absent_classes_out() -> None:
    found = log_class_shares(torch.tensor([0, 0, 0, 1]), 3)
    torch.testing.assert_close(found, torch.tensor([math.log(0.75), math.log(0.25), -math.inf]))


def test_fedrod_trains_the_generic_head_balanced_and_the_personal_head_on_both() -> None:
    """All logits 0. Balanced softmax gives the classes' shares (3/4, 1/4, 0), plain softmax thirds.

    Balanced loss (3 log 4/3 + log 4)/4, personal loss log 3. Gradients of logits, generic: (-1/4, 1/4, 0) for an
    image of class 0 and (3/4, -3/4, 0) for one of class 1; personal: (-2/3, 1/3, 1/3) and (1/3, -2/3, 1/3). Three
    quarters of the images have the features (1, 0), one quarter (0, 1).
    """
    site = FixedSite()
    side = side_at(FedRoD(), site)
    side.train(0, {})
    assert site.losses[0] == pytest.approx((3 * math.log(4 / 3) + math.log(4)) / 4 + math.log(3))
    generic = side.upload()[CLASSIFIER].tensors()["1.weight"]
    expected = torch.tensor([[-3 / 16, 3 / 16], [3 / 16, -3 / 16], [0.0, 0.0]])
    torch.testing.assert_close(generic, -0.1 * expected)
    own = torch.tensor([[-1 / 2, 1 / 12], [1 / 4, -1 / 6], [1 / 4, 1 / 12]])
    torch.testing.assert_close(side.personal()["1.weight"], -0.1 * (expected + own))
    # Heads of zeros send no gradient back, and the personal head must never send one.
    assert torch.equal(side.upload()[EXTRACTOR].tensors()["0.weight"], torch.eye(2))


def test_fedrods_personal_head_does_not_pull_at_the_extractor() -> None:
    """With the generic head at 0 and a personal head at work, the extractor stays where it is."""
    site = FixedSite()
    side = side_at(FedRoD(), site)
    side.memory["personal_head"] = {"1.weight": torch.tensor([[3.0, -1.0], [0.0, 2.0], [1.0, 1.0]])}
    side.train(0, {})
    assert torch.equal(side.personal()["0.weight"], torch.eye(2))


def test_fedrods_average_replaces_the_generic_head_and_leaves_the_personal_one() -> None:
    side = side_at(FedRoD(), FixedSite())
    own = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    side.memory["personal_head"] = {"1.weight": own}
    side.take(download_of(side, 5.0))
    assert (side.upload()[CLASSIFIER].tensors()["1.weight"] == 5).all()
    assert torch.equal(side.personal()["1.weight"], 5 + own)


# --- FedProto -----------------------------------------------------------------------------------------------------


def test_prototypes_are_the_mean_features_of_each_class() -> None:
    model = fixed_model()
    images = torch.tensor([[1.0, 0.0], [3.0, 2.0], [0.0, 7.0]])
    found = prototypes(model, images, torch.tensor([0, 0, 2]), classes=3)
    assert found["prototypes"].tolist() == [[2.0, 1.0], [0.0, 0.0], [0.0, 7.0]]
    assert found["present"].tolist() == [1, 0, 1]
    assert found["label_counts"].tolist() == [2, 0, 1]


def test_prototypes_of_more_images_than_a_batch_count_them_all() -> None:
    images = torch.arange(3000.0).reshape(-1, 1).repeat(1, 2)
    found = prototypes(fixed_model(), images, torch.zeros(3000, dtype=torch.int64), classes=3)
    assert found["prototypes"][0].tolist() == [1499.5, 1499.5]


def test_making_prototypes_leaves_running_statistics_alone_and_uses_them() -> None:
    model = small_model().train()
    before = state_of(model)
    images = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    whole = prototypes(model, images, torch.arange(8) % 2, classes=2)["prototypes"]
    side = prototypes(model.train(), images[::2], torch.zeros(4, dtype=torch.int64), classes=2)["prototypes"]
    torch.testing.assert_close(whole[0], side[0])  # a class's mean does not depend on the other classes' images
    assert all(torch.equal(tensor, before[name]) for name, tensor in state_of(model).items())


def test_a_class_is_averaged_over_the_silos_that_have_it() -> None:
    """Class 0: both silos, 2 and 6; class 1: the second alone, whatever the first holds there; class 2: nobody."""
    means = torch.tensor([[[2.0], [9.0], [9.0]], [[6.0], [4.0], [9.0]]])
    present = torch.tensor([[True, False, False], [True, True, False]])
    uniform = average_prototypes(means, present, present.to(torch.int64))
    assert uniform.flatten().tolist() == [4.0, 4.0, 0.0]
    counts = torch.tensor([[1, 0, 0], [3, 2, 0]])
    assert average_prototypes(means, present, counts).flatten().tolist() == [5.0, 4.0, 0.0]  # (1·2 + 3·6)/4 = 5
    wrong = torch.tensor([[-7, 0, 0], [0, 0, 0]])
    assert average_prototypes(means, present, wrong).flatten().tolist() == [4.0, 4.0, 0.0]


def proto_upload(means: list[list[float]], present: list[int]) -> Payload:
    tensors = {"prototypes": torch.tensor(means), "present": torch.tensor(present, dtype=torch.uint8)}
    return {Exposure.PROTOTYPES: Part.of(tensors)}


def test_a_class_that_is_absent_in_a_round_keeps_its_last_prototype() -> None:
    side = FedProto().coordinator_side(Federation(Layout.of(fixed_model()), rounds=3, seed=1))
    first = {"a": proto_upload([[1.0, 1.0], [2.0, 2.0], [0.0, 0.0]], [1, 1, 0])}
    second = {"b": proto_upload([[5.0, 5.0], [0.0, 0.0], [0.0, 0.0]], [1, 0, 0])}
    side.aggregate(Round(0, first, first, MemoryWorkspace()))
    found = side.aggregate(Round(1, second, second, MemoryWorkspace())).for_silo("a")[Exposure.PEER_DERIVED].tensors()
    assert found["prototypes"].tolist() == [[5.0, 5.0], [2.0, 2.0], [0.0, 0.0]]
    assert found["present"].tolist() == [1, 1, 0]


def test_fedproto_pulls_features_to_the_prototypes_of_classes_that_have_one() -> None:
    """Features (1, 0) of class 0 towards (1, 2): mean square 2, three of four images. Class 1 has no prototype.

    The loss is log 3 + λ · (3 · 2)/4.
    """
    site = FixedSite()
    side = side_at(FedProto(prototype_weight=0.5), site)
    received = proto_upload([[1.0, 2.0], [100.0, 100.0], [0.0, 0.0]], [1, 0, 0])[Exposure.PROTOTYPES]
    side.train(1, {Exposure.PEER_DERIVED: received})
    assert site.losses[0] == pytest.approx(math.log(3) + 0.5 * 1.5)
    # Gradient of the extractor: rows are features; feature 1 of three images moves by -λ·(0 − 2)·3/4 = 0.75 · 0.1.
    torch.testing.assert_close(side.personal()["0.weight"], torch.tensor([[1.0, 0.0], [0.075, 1.0]]))


def test_fedproto_sends_no_weights_and_counts_only_where_they_weigh() -> None:
    assert FedProto().uploads == {Exposure.PROTOTYPES}
    assert FedProto(weighting="counts").uploads == {Exposure.PROTOTYPES, Exposure.LABEL_COUNTS}
    assert Exposure.PEER_DERIVED in FedProto().required
    for values in ({"prototype_weight": -1.0}, {"weighting": "samples"}):
        with pytest.raises(ConfigurationError, match="fedproto: "):
            make("fedproto", values)


@pytest.mark.parametrize("method", [FedRoD(), FedProto()], ids=repr)
def test_a_model_without_a_linear_classifier_is_refused(method: Method) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    with pytest.raises(ConfigurationError, match="linear"):
        method.silo_side(SmallSite(model=model))
    with pytest.raises(ConfigurationError, match="linear"):
        method.coordinator_side(Federation(Layout.of(model), rounds=1, seed=1))


# --- MOON ---------------------------------------------------------------------------------------------------------


def test_the_contrastive_loss_by_hand() -> None:
    one, other = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 3.0]])
    # cos 1 to the global model's features, 0 to the earlier ones, τ = 1/2: log(1 + e^-2); the other way log(1 + e^2).
    near = contrastive_loss(one, one, other, temperature=0.5)
    far = contrastive_loss(one, other, one, temperature=0.5)
    assert near.item() == pytest.approx(math.log(1 + math.exp(-2)))
    assert far.item() == pytest.approx(math.log(1 + math.exp(2)))
    both = contrastive_loss(torch.cat([one, one]), torch.cat([one, other]), torch.cat([other, one]), temperature=0.5)
    assert both.item() == pytest.approx((near.item() + far.item()) / 2)
    assert contrastive_loss(one, other, other, temperature=0.5).item() == pytest.approx(math.log(2))


def test_moon_contrasts_the_received_model_with_the_silos_own_last_one() -> None:
    """Features are E x. Received: E = 1; own last: E = [[0, 1], [1, 0]], which swaps both numbers.

    At the start z = z_g, so cos(z, z_g) = 1 and cos(z, z_p) = 0 for every image: l_con = log(1 + e^(-1/τ)).
    """
    site = FixedSite()
    side = side_at(Moon(contrastive_weight=2.0, temperature=0.5), site)
    swapped = {"0.weight": torch.tensor([[0.0, 1.0], [1.0, 0.0]]), "1.weight": torch.zeros(3, 2)}
    side.memory["trained"] = swapped
    average = Part.of({"0.weight": torch.eye(2), "1.weight": torch.zeros(3, 2)})
    side.train(5, {Exposure.PEER_DERIVED: average})
    assert site.losses[0] == pytest.approx(math.log(3) + 2 * math.log(1 + math.exp(-2)))


def test_moon_compares_with_models_that_no_batch_changes() -> None:
    """With batch normalisation, both models it compares with use their running statistics, and leave them alone."""
    losses: list[float] = []

    class OnceSite(SmallSite):
        def fit(self, round_number: int, *, objective: Any = None, **settings: Any) -> int:
            losses.append(objective(self.model.train(), *self.train_data()).item())
            return 1

    site = OnceSite(model=small_model(1))
    side = side_at(Moon(contrastive_weight=3.0), site)
    side.memory["trained"] = state_of(small_model(2))
    received = state_of(small_model(3))
    side.train(1, {Exposure.PEER_DERIVED: Part.of({s.name: received[s.name] for s in site.layout.parameters})})
    images, labels = site.train_data()
    current, target, before = small_model(3).train(), small_model(3).eval(), small_model(2).eval()
    z, z_g, z_p = (model[:-1](images) for model in (current, target, before))  # type: ignore[index]
    towards, away = (nn.functional.cosine_similarity(z, other) for other in (z_g, z_p))
    contrast = -torch.log(torch.exp(towards / 0.5) / (torch.exp(towards / 0.5) + torch.exp(away / 0.5))).mean()
    plain = nn.functional.cross_entropy(current[-1](z), labels)  # type: ignore[index]
    assert losses == [pytest.approx((plain + 3 * contrast).item(), rel=1e-5)]


@pytest.mark.parametrize("values", [{"contrastive_weight": -1.0}, {"temperature": 0.0}])
def test_moon_refuses_values_out_of_range(values: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match="moon: "):
        Moon(**values)  # type: ignore[arg-type]


# --- Whole runs ---------------------------------------------------------------------------------------------------


def shards(silos: int) -> list[ImageDataset]:
    """Random images; class 3 of four occurs nowhere, and the first silo has class 0 alone."""
    rng = np.random.default_rng(3)

    def split(count: int, silo: int) -> ImageSplit:
        labels = np.zeros(count, dtype=np.int64) if silo == 0 else rng.integers(0, 3, count)
        return ImageSplit(rng.integers(0, 256, (count, 16, 16, 3), dtype=np.uint8), labels, None)

    return [
        ImageDataset(f"s{silo}", "a test", True, ("a", "b", "c", "d"), split(8 + 2 * silo, silo), None, split(4, silo))
        for silo in range(silos)
    ]


def simulate(method: Method, *, silos: int = 4, model: str = "lenet5", **changes: Any) -> Simulation:
    plan = RunPlan(
        federation="test",
        coordinator="c",
        run="r",
        method=MethodPlan(name=method.name, parameters=method.parameters()),
        model=ModelPlan(name=model, input_shape=(3, 16, 16), classes=4),
        training=TrainingPlan(epochs=1, batch_size=4),
        seed=2,
        required=method.required,
        **{"rounds": 4, **changes},
    )
    run = Simulation(plan, method, shards(silos), device=torch.device("cpu"))
    for _ in range(plan.rounds):
        run.step()
    assert set(run.finish()) == set(run.silos)
    return run


def personal(run: Simulation, names: Collection[str] | None = None) -> list[Tensor]:
    return [
        torch.cat([t.reshape(-1).double() for n, t in side.personal().items() if names is None or n in names])
        for side in run.silos.values()
    ]


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_every_method_bears_absences_and_ends_alike_each_time(method: Method) -> None:
    runs = [simulate(method, participation=0.5) for _ in range(2)]
    for one, two in zip(*map(personal, runs), strict=True):
        assert torch.isfinite(one).all()
        assert torch.equal(one, two)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_every_method_bears_a_silo_alone(method: Method) -> None:
    (found,) = personal(simulate(method, silos=1, rounds=2))
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_fedbn_without_batch_normalisation_is_federated_averaging(weighting: Any) -> None:
    runs = [simulate(kind(weighting=weighting), model="mlp-64", participation=0.5) for kind in (FedBN, FedAvg)]
    for one, two in zip(*map(personal, runs), strict=True):
        assert torch.equal(one, two)


def test_fedbn_ends_with_one_model_but_for_batch_normalisation() -> None:
    run = simulate(FedBN())
    first, *others = personal(run, ["convolution1.weight", "classifier.bias"])
    assert all(torch.equal(first, other) for other in others)
    first, *others = personal(run, ["norm1.weight"])
    assert not any(torch.equal(first, other) for other in others)


def test_fedbabu_ends_with_one_body_and_the_common_head_before_fine_tuning() -> None:
    first, *others = personal(simulate(FedBABU(fine_tune_epochs=0)), ["hidden1.weight", "classifier.weight"])
    assert all(torch.equal(first, other) for other in others)
    start = build(ModelPlan(name="lenet5", input_shape=(3, 16, 16), classes=4), seed=2).state_dict()
    run = simulate(FedBABU(fine_tune_epochs=0))
    assert torch.equal(run.silos["s1"].personal()["classifier.weight"], start["classifier.weight"])
    first, *others = personal(simulate(FedBABU(fine_tune_epochs=1)), ["classifier.weight"])
    assert not any(torch.equal(first, other) for other in others)


def test_moon_without_weight_or_earlier_model_is_federated_averaging() -> None:
    average = personal(simulate(FedAvg()))
    without = personal(simulate(Moon(contrastive_weight=0.0)))
    assert all(torch.equal(one, two) for one, two in zip(average, without, strict=True))
    first = [personal(simulate(method, rounds=1)) for method in (FedAvg(), Moon(contrastive_weight=5.0))]
    assert all(torch.equal(one, two) for one, two in zip(*first, strict=True))
    contrasted = personal(simulate(Moon(contrastive_weight=5.0)))
    assert not any(torch.equal(one, two) for one, two in zip(average, contrasted, strict=True))


def test_fedproto_with_weight_0_is_separate_training_of_each_silo() -> None:
    """What a silo ends with does not depend on who else takes part."""
    alone = personal(simulate(FedProto(prototype_weight=0.0), silos=1))
    together = personal(simulate(FedProto(prototype_weight=0.0), silos=4))
    assert torch.equal(alone[0], together[0])
    pulled = personal(simulate(FedProto(prototype_weight=1.0), silos=4))
    assert not torch.equal(alone[0], pulled[0])


def test_fedrods_personal_model_predicts_with_the_sum_of_both_heads() -> None:
    run = simulate(FedRoD())
    side = run.silos["s2"]
    model = build(ModelPlan(name="lenet5", input_shape=(3, 16, 16), classes=4)).eval()
    images = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    model.load_state_dict(side.personal())
    both = model(images)
    model.load_state_dict(side.outgoing())  # type: ignore[attr-defined]
    generic = model(images)
    head = side.memory["personal_head"]
    own = model[:-1](images) @ head["classifier.weight"].T + head["classifier.bias"]  # type: ignore[index]
    torch.testing.assert_close(both, generic + own)
    assert own.abs().max() > 1e-4
