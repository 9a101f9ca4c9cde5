"""Both sides of each method, run over a small site: what is trained, what is uploaded, what comes back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medsilo.algorithms.diversifed import DiversiFed, attract_repel
from medsilo.algorithms.fedavg import FedAvg
from medsilo.algorithms.fedprox import FedProx
from medsilo.algorithms.local import Local
from medsilo.algorithms.method import PERSONAL, TRAINED, Downloads, Federation, Round
from medsilo.algorithms.models import Layout, state_of
from medsilo.algorithms.tensors import BLOCK, MemoryWorkspace, Part, Payload, Stack, payload_tensors
from medsilo.privacy.errors import RefusedError
from medsilo.privacy.exposure import MODEL, Exposure
from tests.support.methods.small_site import SmallSite, small_model

EXTRACTOR, CLASSIFIER = MODEL


def side_at(method: Any, site: SmallSite) -> Any:
    side = method.silo_side(site)
    side.begin(state_of(site.model))
    return side


def payload_of(model: nn.Module) -> Payload:
    state, parts = state_of(model), Layout.of(model).model_parts()
    return {e: Part.of({spec.name: state[spec.name] for spec in specs}) for e, specs in parts.items()}


def peer(tensors: Mapping[str, Tensor]) -> Payload:
    return {Exposure.PEER_DERIVED: Part.of(tensors)}


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def federation(model: nn.Module) -> Federation:
    return Federation(Layout.of(model), rounds=3, seed=1)


@pytest.mark.parametrize("method", [FedAvg(), FedProx()])
def test_the_last_update_is_let_go_of_while_the_next_is_trained(method: Any) -> None:
    class Watched(SmallSite):
        def fit(self, round_number: int, **options: Any) -> int:
            held.append(TRAINED in side.memory)
            return super().fit(round_number, **options)

    held: list[bool] = []
    site = Watched()
    side = side_at(method, site)
    side.train(0, {})
    first = dict(side.memory[TRAINED])
    side.train(1, peer({spec.name: torch.ones(spec.shape) for spec in site.layout.parameters}))
    assert held == [False, False]
    # What the silo keeps to itself goes on from the first round's all the same.
    buffers = [spec.name for spec in site.layout.buffers]
    assert buffers
    assert all(torch.equal(side.memory[PERSONAL][name], first[name]) for name in buffers)


def test_diversifed_without_a_centre_trains_plainly() -> None:
    one, two = SmallSite(), SmallSite()
    side_at(DiversiFed(), one).train(0, {})
    two.fit(0)
    assert torch.equal(flat(one.model), flat(two.model))


def test_diversifeds_proximal_term_pulls_towards_z() -> None:
    site = SmallSite(steps=1, pull=0.0)
    before = flat(site.model)
    centre = {spec.name: torch.full(spec.shape, 5.0) for spec in site.layout.parameters}
    side_at(DiversiFed(proximal_weight=3.0, step_size=2.0), site).train(1, peer(centre))
    # One step of rate 0.1 along lambda/alpha (w - z) = 1.5 (w - z).
    torch.testing.assert_close(flat(site.model), before - 0.1 * 1.5 * (before - 5))


def test_diversifed_with_lambda_0_is_separate_training() -> None:
    site, alone = SmallSite(), SmallSite()
    centre = {spec.name: torch.full(spec.shape, 5.0) for spec in site.layout.parameters}
    side_at(DiversiFed(proximal_weight=0.0), site).train(1, peer(centre))
    side_at(Local(), alone).train(1, {})
    assert torch.equal(flat(site.model), flat(alone.model))


@pytest.mark.parametrize(("start", "found"), [("own", 2.0), ("z", 5.0)])
def test_diversifed_continues_its_own_model_unless_told_to_start_from_z(start: str, found: float) -> None:
    site = SmallSite(steps=0)
    side = side_at(DiversiFed(start=start), site)  # type: ignore[arg-type]
    for spec in site.layout.parameters:
        side.memory[PERSONAL][spec.name].fill_(2.0)
    side.train(1, peer({spec.name: torch.full(spec.shape, 5.0) for spec in site.layout.parameters}))
    assert flat(site.model).unique().tolist() == [found]


def test_diversifed_uploads_exactly_the_models_parameters() -> None:
    site = SmallSite()
    side = side_at(DiversiFed(), site)
    side.train(0, {})
    upload = side.upload()
    assert list(upload) == [EXTRACTOR, CLASSIFIER]
    found = payload_tensors(upload, MODEL)
    parameters = dict(site.model.named_parameters())
    assert list(found) == list(parameters)  # no running statistics among them
    assert all(torch.equal(found[name], parameter) for name, parameter in parameters.items())
    coordinator = DiversiFed().coordinator_side(federation(site.model))
    assert {e: part.specs for e, part in upload.items()} == coordinator.upload_parts(0, "a")


@pytest.mark.parametrize("method", [DiversiFed(), FedAvg(), FedAvg(weighting="uniform"), Local()])
def test_uploading_twice_gives_the_same_bytes_and_changes_nothing(method: Any) -> None:
    side = side_at(method, SmallSite())
    side.train(0, {})
    memory = {group: {name: t.clone() for name, t in state.items()} for group, state in side.memory.items()}
    one, two = side.upload(), side.upload()
    for exposure in one:
        size = one[exposure].nbytes
        assert bytes(one[exposure].source.read(0, size)) == bytes(two[exposure].source.read(0, size))
    assert {group: list(state) for group, state in side.memory.items()} == {g: list(s) for g, s in memory.items()}
    assert all(torch.equal(side.memory[g][n], t) for g, state in memory.items() for n, t in state.items())


@pytest.mark.parametrize("method", [DiversiFed(), FedAvg(), FedAvg(weighting="uniform"), Local()])
def test_a_rehearsal_has_the_names_and_shapes_of_a_real_upload(method: Any) -> None:
    rehearsed, trained = side_at(method, SmallSite()), side_at(method, SmallSite())
    rehearsed.rehearse()
    trained.train(0, {})
    assert rehearsed.site.fits == 0
    real = {e: part.specs for e, part in trained.upload().items()}
    assert {e: part.specs for e, part in rehearsed.upload().items()} == real
    wanted = method.coordinator_side(federation(small_model())).upload_parts(0, "a")
    assert {e: tuple(specs) for e, specs in wanted.items()} == real
    assert set(real) == method.uploads


@pytest.mark.parametrize("method", [DiversiFed(), FedAvg()])
def test_a_download_of_another_shape_is_refused(method: Any) -> None:
    side = side_at(method, SmallSite())
    names = [spec.name for spec in side.site.layout.parameters]
    for wrong in (
        peer({name: torch.zeros(2) for name in names}),
        peer({spec.name: torch.zeros(spec.shape) for spec in side.site.layout.parameters[:-1]}),
        {Exposure.INITIAL_MODEL: Part.of({"x": torch.zeros(1)})},
    ):
        with pytest.raises(RefusedError, match="names and shapes"):
            side.train(1, wrong)


def test_the_coordinators_z_is_that_of_the_pure_function() -> None:
    models = [small_model(seed) for seed in range(4)]
    uploads = {f"h{n}": payload_of(model) for n, model in enumerate(models)}
    side = DiversiFed(temperature=0.7, step_size=0.9).coordinator_side(federation(models[0]))
    downloads = side.aggregate(Round(0, uploads, uploads, MemoryWorkspace()))
    order = Layout.of(models[0]).parameters
    rows = torch.stack([torch.cat([state_of(m)[spec.name].reshape(-1) for spec in order]) for m in models])
    expected = attract_repel(rows, temperature=0.7, step_size=0.9)
    for n in range(4):
        part = downloads.for_silo(f"h{n}")[Exposure.PEER_DERIVED]
        assert part.specs == order
        found = torch.cat([t.reshape(-1) for t in part.tensors().values()])
        torch.testing.assert_close(found, expected[n], rtol=0, atol=1e-6)


def test_z_does_not_depend_on_how_a_model_is_cut_into_blocks() -> None:
    generator = torch.Generator().manual_seed(3)
    size = 2 * BLOCK + 11
    rows = torch.randn(3, size, generator=generator)
    uploads: dict[str, Payload] = {
        str(n): {EXTRACTOR: Part.of({"w": row[:-5]}), CLASSIFIER: Part.of({"b": row[-5:]})}
        for n, row in enumerate(rows)
    }
    side = DiversiFed().coordinator_side(federation(small_model()))
    downloads = side.aggregate(Round(0, uploads, uploads, MemoryWorkspace()))
    centre = rows.double()
    d = torch.cdist(centre, centre, compute_mode="donot_use_mm_for_euclid_dist")
    for i, (j, k) in enumerate(((1, 2), (0, 2), (0, 1))):
        softmax = torch.softmax(torch.stack([d[i, j], d[i, k]]) / 0.5, 0)
        expected = centre[i]
        for other, share in ((j, softmax[0]), (k, softmax[1])):
            expected = expected - (0.5 - share) * (centre[i] - centre[other]) / (0.5 * d[i, other])
        found = torch.cat(list(downloads.for_silo(str(i))[Exposure.PEER_DERIVED].tensors().values()))
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


def test_a_hundred_silos_with_ten_thousand_parameters() -> None:
    models = torch.randn(100, 10_000, generator=torch.Generator().manual_seed(1))
    z = attract_repel(models, temperature=0.5)
    assert z.dtype == torch.float32
    steps = torch.linalg.vector_norm(z.double() - models.double(), dim=1)
    assert (steps <= 4 * (1 - 1 / 99) + 1e-3).all()
    assert (steps > 0).all()


@pytest.mark.parametrize(("stale", "kept"), [("reuse", False), ("none", True)])
def test_a_silo_that_missed_the_round_keeps_its_z_or_gets_none(stale: str, kept: bool) -> None:
    uploads = {f"h{n}": payload_of(small_model(n)) for n in range(3)}
    latest = {**uploads, "absent": payload_of(small_model(9))}
    side = DiversiFed(stale=stale).coordinator_side(federation(small_model()))  # type: ignore[arg-type]
    downloads = side.aggregate(Round(1, uploads, latest, MemoryWorkspace()))
    assert {"h0", "h1", "h2"} <= set(downloads.own)
    assert ("absent" in downloads.own) is kept  # an empty download replaces the old one, no download leaves it
    assert downloads.for_silo("absent") == {}


def fedavg_of(counts: list[int] | None) -> dict[str, Tensor]:
    uploads = {}
    for n, value in enumerate((1.0, 2.0, 4.0)):
        payload = {
            EXTRACTOR: Part.of({"a": torch.full((2, 2), value)}),
            CLASSIFIER: Part.of({"b": torch.full((3,), 10 * value)}),
        }
        if counts:
            payload[Exposure.SAMPLE_COUNT] = Part.of({"samples": torch.tensor(counts[n])})
        uploads[str(n)] = payload
    side = FedAvg(weighting="samples" if counts else "uniform").coordinator_side(federation(small_model()))
    everyone = side.aggregate(Round(0, uploads, uploads, MemoryWorkspace())).everyone
    assert everyone is not None
    return everyone[Exposure.PEER_DERIVED].tensors()


@pytest.mark.parametrize(
    ("counts", "average"),
    [([1, 1, 2], 2.75), ([3, 1, 0], 1.25), (None, 7 / 3), ([0, 0, 0], 7 / 3), ([-4, 0, 8], 4.0)],
)
def test_fedavg_averages_by_samples_or_uniformly(counts: list[int] | None, average: float) -> None:
    found = fedavg_of(counts)
    torch.testing.assert_close(found["a"], torch.full((2, 2), average))
    torch.testing.assert_close(found["b"], torch.full((3,), 10 * average))


def test_fedavgs_silo_takes_the_global_parameters_and_keeps_its_own_running_statistics() -> None:
    side = side_at(FedAvg(), SmallSite())
    side.train(0, {})
    own = state_of(side.site.model)
    side.finish(peer({spec.name: torch.full(spec.shape, 5.0) for spec in side.site.layout.parameters}))
    personal = side.personal()
    assert set(personal) == set(own)
    for name, tensor in personal.items():
        if "running" in name or "batches" in name:
            assert torch.equal(tensor, own[name]), name
        else:
            assert tensor.unique().tolist() == [5.0], name


def test_fedavg_uploads_its_number_of_images_only_where_it_weighs() -> None:
    for weighting, wanted in (("samples", 8), ("uniform", None)):
        side = side_at(FedAvg(weighting=weighting), SmallSite())  # type: ignore[arg-type]
        side.train(0, {})
        counts = payload_tensors(side.upload(), [Exposure.SAMPLE_COUNT])
        assert [int(count) for count in counts.values()] == ([] if wanted is None else [wanted])


def test_separate_training_exposes_nothing() -> None:
    side = side_at(Local(), SmallSite())
    side.train(0, {})
    assert side.upload() == {}
    assert Local().uploads == Local().downlink == frozenset()
    coordinator = Local().coordinator_side(federation(small_model()))
    assert coordinator.upload_parts(0, "a") == {}
    assert coordinator.aggregate(Round(0, {}, {}, MemoryWorkspace())) == Downloads()


def test_only_float32_is_mixed() -> None:
    with pytest.raises(RefusedError, match="float32"):
        Stack([[Part.of({"a": torch.zeros(3, dtype=torch.float64)})]])
