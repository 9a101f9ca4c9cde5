"""FedProx, SCAFFOLD, FedDyn, Ditto, pFedMe, Per-FedAvg, FedAMP, FedFomo and APPLE: their arithmetic, worked out by
hand, and whole runs over a few tiny silos."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medsilo.algorithms.apple import Apple, Combination, penalty_weight, unit_of_rate, with_newcomers
from medsilo.algorithms.ditto import Ditto
from medsilo.algorithms.families.peers import side_by_side, taken
from medsilo.algorithms.families.two_models import GLOBAL
from medsilo.algorithms.fedamp import FedAMP, attention
from medsilo.algorithms.fedavg import FedAvg
from medsilo.algorithms.feddyn import FedDyn
from medsilo.algorithms.fedfomo import FedFomo, candidate_weights, epsilon_greedy
from medsilo.algorithms.fedprox import FedProx
from medsilo.algorithms.local import Local
from medsilo.algorithms.method import PERSONAL, Downloads, Federation, Method, Round
from medsilo.algorithms.models import Layout, state_of
from medsilo.algorithms.perfedavg import PerFedAvg, pairs
from medsilo.algorithms.pfedme import PFedMe
from medsilo.algorithms.registry import make
from medsilo.algorithms.scaffold import PREFIX, Scaffold, mean_step
from medsilo.algorithms.tensors import FileSource, MemoryWorkspace, Part, Payload, TensorSpec, payload_tensors
from medsilo.algorithms.tensors.files import read_payload, write_payload
from medsilo.privacy.consent.plan import TrainingPlan
from medsilo.privacy.errors import ConfigurationError, RefusedError, TrainingError
from medsilo.privacy.exposure import MODEL, Exposure
from medsilo.simulation.federation import Simulation
from tests.support.methods.small_site import SmallSite, small_model
from tests.support.methods.tiny_federation import run_plan, shard, simulate

EXTRACTOR, CLASSIFIER = MODEL
ALL: list[Method] = [
    FedProx(),
    Scaffold(),
    FedDyn(),
    Ditto(),
    PFedMe(),
    PFedMe(mixing=0.5),
    PerFedAvg(),
    FedAMP(),
    FedFomo(models=2),
    Apple(),
    Apple(models=1),
]
AVERAGING = [m for m in ALL if isinstance(m, FedAvg)]


def ids(method: object) -> str:
    return method.name if isinstance(method, Method) else str(method)


@dataclass
class BiasSite(SmallSite):
    """A site on whose images (all black, all of class 0) only the two biases b matter: with b = (x, -x) the loss is
    log(1 + exp(-2x)) and its gradient (-(1 - s), 1 - s), s = 1/(1 + exp(-2x))."""

    model: nn.Module = field(default_factory=lambda: bias_model())

    def train_data(self) -> tuple[Tensor, Tensor]:
        return torch.zeros(4, 1), torch.zeros(4, dtype=torch.int64)

    def batches(self, round_number: int, *, epochs: int | None = None, phase: str = "training") -> Any:
        yield from [self.train_data()] * (epochs or 1)

    def fit(self, round_number: int, **options: Any) -> int:
        if self.steps == 0:
            return 0
        extra, objective = options.get("extra"), options["objective"]
        optimizer = torch.optim.SGD([*self.model.parameters(), *extra.parameters()], lr=0.1)
        for _ in range(self.steps):
            optimizer.zero_grad()
            objective(self.model, *self.train_data()).backward()
            optimizer.step()
        return self.steps


def bias_model(value: float = 0.0) -> nn.Module:
    model = nn.Linear(1, 2)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor([value, -value]))
    return model


def at(method: Method, site: SmallSite) -> Any:
    side = method.silo_side(site)
    side.begin(state_of(site.model))
    return side


def of(site: SmallSite, value: float) -> dict[str, Tensor]:
    return {spec.name: torch.full(spec.shape, value) for spec in site.layout.parameters}


def peer(tensors: Mapping[str, Tensor]) -> Payload:
    return {Exposure.PEER_DERIVED: Part.of(tensors)}


def peers(**models: nn.Module) -> Payload:
    tensors = {f"{silo}/{name}": t for silo, model in models.items() for name, t in state_of(model).items()}
    return {Exposure.PEER_MODELS: Part.of(tensors)}


def only(state: Mapping[str, Tensor], site: SmallSite) -> float:
    """The one value that all of a state's parameters have."""
    values = torch.cat([state[spec.name].reshape(-1) for spec in site.layout.parameters])
    torch.testing.assert_close(values, values[:1].expand_as(values))
    return float(values[0])


LAYOUT = Layout((TensorSpec("a", (2, 2)),), (TensorSpec("b", (3,)),), ())


def upload(value: float, **more: Part) -> Payload:
    payload: dict[Exposure, Part] = {
        EXTRACTOR: Part.of({"a": torch.full((2, 2), value)}),
        CLASSIFIER: Part.of({"b": torch.full((3,), value)}),
    }
    return payload | {Exposure[name]: part for name, part in more.items()}


def coordinator(method: Method, *silos: str, layout: Layout = LAYOUT) -> Any:
    return method.coordinator_side(Federation(layout, rounds=5, seed=1, silos=silos))


def sent(side: Any, number: int, uploads: Mapping[str, Payload], prefix: str = "") -> float:
    """The one value of what everyone gets after a round."""
    everyone = side.aggregate(Round(number, uploads, uploads, MemoryWorkspace())).everyone
    tensors = everyone[Exposure.PEER_DERIVED].tensors()
    (value,) = torch.cat([tensors[prefix + "a"].reshape(-1), tensors[prefix + "b"]]).unique().tolist()
    return float(value)


# ---- the interface, for all of them


@pytest.mark.parametrize("method", ALL, ids=ids)
def test_a_rehearsal_and_a_real_upload_are_what_the_coordinator_asks_for(method: Method) -> None:
    rehearsed, trained = at(method, SmallSite()), at(method, SmallSite())
    rehearsed.rehearse()
    trained.train(0, {})
    assert rehearsed.site.fits == 0
    real = {e: part.specs for e, part in trained.upload().items()}
    assert {e: part.specs for e, part in rehearsed.upload().items()} == real
    wanted = coordinator(method, "a", "b", layout=trained.site.layout).upload_parts(0, "a")
    assert {e: tuple(specs) for e, specs in wanted.items()} == real
    assert set(real) == method.uploads


@pytest.mark.parametrize("method", ALL, ids=ids)
def test_a_silo_that_restarts_goes_on_as_if_nothing_had_happened(method: Method) -> None:
    one = simulation_of(method, rounds=4)
    one.step()
    one.step()
    saved = {n: {g: {k: t.clone() for k, t in s.items()} for g, s in h.memory.items()} for n, h in one.silos.items()}
    kept = {g: {k: t.clone() for k, t in s.items()} for g, s in one._coordinator.memory.items()}
    one.step()
    one.step()
    other = simulation_of(method, rounds=4)
    other.step()
    other.step()
    for name, side in other.silos.items():
        fresh = method.silo_side(fresh_site(other, name))
        fresh.memory = saved[name]
        other._sites[name], other._sides[name] = fresh.site, fresh  # type: ignore[assignment]
        assert side.memory.keys() == fresh.memory.keys()
    other._coordinator = method.coordinator_side(other._coordinator.federation)
    other._coordinator.memory = kept
    other.step()
    other.step()
    for simulation in (one, other):
        simulation.finish()
    for name, side in one.silos.items():
        for key, tensor in side.personal().items():
            assert torch.equal(tensor, other.silos[name].personal()[key]), (name, key)


def simulation_of(method: Method, *, rounds: int) -> Simulation:
    plan = run_plan(method, rounds=rounds)
    return Simulation(plan, method, [shard(f"hospital{n}", n) for n in (1, 2, 3)], device=torch.device("cpu"))


def fresh_site(simulation: Simulation, name: str) -> Any:
    from medsilo.algorithms.models import build
    from medsilo.silo.training.site import LocalSite

    plan, old = simulation.plan, simulation._sites[name]
    return LocalSite(name, old._images._dataset, build(plan.model, seed=plan.seed), plan, device=torch.device("cpu"))


@pytest.mark.parametrize("silos", [1, 2, 4])
@pytest.mark.parametrize("method", ALL, ids=ids)
def test_runs_with_few_silos_and_absent_ones_end_with_finite_models(method: Method, silos: int) -> None:
    run = simulate(method, rounds=4, silos=silos, participation=0.5)
    for side in run.silos.values():
        assert all(torch.isfinite(tensor).all() for tensor in side.personal().values())
    given = [payload for payload in [*run._own.values(), run._everyone] if payload]
    assert all(set(payload) <= method.downlink for payload in given)
    assert given or silos == 1


@pytest.mark.parametrize("method", ALL, ids=ids)
def test_running_statistics_never_travel(method: Method) -> None:
    side = at(method, SmallSite())
    side.train(0, {})
    names = {spec.name for part in side.upload().values() for spec in part.specs}
    assert not [name for name in names if "running" in name or "batches" in name]


@pytest.mark.parametrize("method", ALL, ids=ids)
def test_a_download_of_another_shape_is_refused(method: Method) -> None:
    side = at(method, SmallSite())
    names = [spec.name for spec in side.site.layout.parameters]
    for exposure, prefix in ((Exposure.PEER_DERIVED, ""), (Exposure.PEER_MODELS, "b/"), (Exposure.PROTOCOL, "")):
        with pytest.raises(RefusedError, match="names and shapes"):
            side.train(1, {exposure: Part.of({prefix + name: torch.zeros(2) for name in names})})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FedProx(proximal_weight=-1), "proximal_weight"),
        (lambda: make("fedprox", {"weighting": "other"}), "weighting"),
        (lambda: Scaffold(global_step=0), "global_step"),
        (lambda: FedDyn(strength=0), "strength"),
        (lambda: Ditto(proximal_weight=-0.1), "proximal_weight"),
        (lambda: Ditto(personal_epochs=-1), "personal_epochs"),
        (lambda: PFedMe(inner_rate=0.2), "inner_rate"),  # 0.2 x 15 overshoots
        (lambda: PFedMe(step_size=0.1), "step_size"),
        (lambda: PFedMe(inner_steps=0), "inner_steps"),
        (lambda: PFedMe(mixing=0), "mixing"),
        (lambda: PerFedAvg(inner_rate=0), "inner_rate"),
        (lambda: PerFedAvg(personal_steps=0), "personal_steps"),
        (lambda: FedAMP(sigma=0), "sigma"),
        (lambda: FedAMP(step_size=0), "step_size"),
        (lambda: FedFomo(models=0), "models"),
        (lambda: FedFomo(explore=1.1), "explore"),
        (lambda: FedFomo(explore_decay=-0.1), "explore_decay"),
        (lambda: FedFomo(validation_share=1), "validation_share"),
        (lambda: Apple(penalty=-1), "penalty"),
        (lambda: Apple(penalty_share=2), "penalty_share"),
        (lambda: Apple(relationship_rate=0), "relationship_rate"),
    ],
)
def test_a_hyper_parameter_outside_its_range_is_refused_by_name(make: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make()


@pytest.mark.parametrize(
    ("method", "reduced"),
    [(FedProx(proximal_weight=0.0), FedAvg()), (FedAMP(proximal_weight=0.0), Local())],
    ids=ids,
)
def test_without_their_term_they_are_the_simpler_method(method: Method, reduced: Method) -> None:
    one, other = simulate(method, rounds=3), simulate(reduced, rounds=3)
    for name, side in one.silos.items():
        for key, tensor in side.personal().items():
            assert torch.equal(tensor, other.silos[name].personal()[key])


# ---- FedProx


def test_fedprox_is_pulled_back_to_the_global_model_it_started_from() -> None:
    side = at(FedProx(proximal_weight=2.0), SmallSite(steps=2))
    side.train(1, peer(of(side.site, 3.0)))
    # The loss pulls to 1 with gradient w - 1. First step: 3 - 0.1 x 2 = 2.8. Second: gradient 1.8 + 2 (2.8 - 3) = 1.4.
    assert only(payload_tensors(side.upload(), MODEL), side.site) == pytest.approx(2.66)


# ---- SCAFFOLD


def controlled(site: SmallSite, model: float, control: float) -> Payload:
    return peer({**of(site, model), **{PREFIX + name: t for name, t in of(site, control).items()}})


def test_scaffolds_control_variate_is_the_mean_gradient_of_the_round() -> None:
    side = at(Scaffold(), SmallSite(steps=2))
    side.train(1, controlled(side.site, 3.0, 0.5))
    # Gradients 2 and then, at 3 - 0.1 (2 + 0.5) = 2.75, 1.75: c_i is their mean, 1.875; the model ends at 2.525.
    assert only(payload_tensors(side.upload(), MODEL), side.site) == pytest.approx(2.525)
    assert only(payload_tensors(side.upload(), [Exposure.MODEL_GRADIENT]), side.site) == pytest.approx(1.875)
    side.train(2, controlled(side.site, 3.0, 1.0))
    # Now c - c_i = -0.875: gradients 2 and, at 3 - 0.1 x 1.125 = 2.8875, 1.8875: c_i = 1.94375, up by 0.06875.
    assert only(payload_tensors(side.upload(), [Exposure.MODEL_GRADIENT]), side.site) == pytest.approx(0.06875, 1e-4)


def test_scaffolds_control_variate_moves_by_the_share_of_silos_that_took_part() -> None:
    side = coordinator(Scaffold(global_step=0.5), *"abcd")
    for number, (models, changes, model, control) in enumerate(
        [([1.0, 3.0], [2.0, 4.0], 2.0, 1.5), ([6.0], [1.0], 4.0, 1.75)]  # 2 + 0.5 (6 - 2); 1.5 + 1/4
    ):
        gradients = [Part.of({"a": torch.full((2, 2), c), "b": torch.full((3,), c)}) for c in changes]
        uploads = {s: upload(m, MODEL_GRADIENT=g) for s, m, g in zip("abcd", models, gradients, strict=False)}
        everyone = side.aggregate(Round(number, uploads, uploads, MemoryWorkspace())).everyone[Exposure.PEER_DERIVED]
        assert everyone.tensors()["b"].tolist() == [model] * 3
        assert everyone.tensors()[PREFIX + "b"].tolist() == [control] * 3
        assert [spec.name for spec in everyone.specs] == ["a", "b", PREFIX + "a", PREFIX + "b"]


def test_scaffold_takes_momentum_for_the_longer_way_it_is() -> None:
    assert mean_step(0.1, 0.9) == pytest.approx(1.0)
    site = SmallSite(steps=1, training=TrainingPlan(optimizer="sgd", learning_rate=0.05, momentum=0.5))
    side = at(Scaffold(), site)
    side.train(1, controlled(site, 3.0, 0.0))
    assert only(payload_tensors(side.upload(), [Exposure.MODEL_GRADIENT]), site) == pytest.approx(2.0)


# ---- FedDyn


def test_feddyns_linear_term_is_what_the_proximal_term_left() -> None:
    side = at(FedDyn(strength=0.5), SmallSite(steps=1))
    side.train(0, {})  # the first round leaves no trace in the linear term
    for number, expected in ((1, 1.9), (2, 1.905)):
        side.train(number, peer(of(side.site, 2.0)))
        # From 2: gradient 1, to 1.9; the linear term is then 0.5 (1.9 - 2) = -0.05, and the gradient 0.95.
        assert only(payload_tensors(side.upload(), MODEL), side.site) == pytest.approx(expected)


def test_feddyns_coordinator_adds_what_all_silos_have_drifted() -> None:
    side = coordinator(FedDyn(), *"abcd")
    assert sent(side, 0, {"a": upload(1.0), "b": upload(3.0)}) == 2.0
    # h/alpha = -1/4 ((5 - 2) + (7 - 2)) = -2, so 6 + 2; then -2 - 1/4 (4 - 8) = -1, so 4 + 1.
    assert sent(side, 1, {"a": upload(5.0), "b": upload(7.0)}) == 8.0
    assert sent(side, 2, {"c": upload(4.0)}) == 5.0


# ---- Ditto


def test_dittos_own_model_is_pulled_to_the_global_one_and_stays_at_home() -> None:
    side = at(Ditto(proximal_weight=1.0), SmallSite(steps=1))
    side.memory[PERSONAL] = {**side.memory[PERSONAL], **of(side.site, 0.0)}
    side.train(1, peer(of(side.site, 2.0)))
    assert only(payload_tensors(side.upload(), MODEL), side.site) == pytest.approx(1.9)
    # v: 0 - 0.1 ((0 - 1) + 1 (0 - 2)), towards the global model as it came, not as trained.
    assert only(side.personal(), side.site) == pytest.approx(0.3)
    side.finish(peer(of(side.site, 9.0)))
    assert only(side.personal(), side.site) == pytest.approx(0.3)


def test_dittos_two_trainings_go_through_the_images_in_different_orders() -> None:
    phases = []

    class Watching(SmallSite):
        def fit(self, round_number: int, **options: Any) -> int:  # type: ignore[override]
            phases.append((options.get("phase", "training"), options.get("epochs")))
            return super().fit(round_number, **options)

    at(Ditto(personal_epochs=7), Watching()).train(0, {})
    assert phases == [("training", None), ("personal", 7)]


# ---- pFedMe and Per-FedAvg


def test_pfedme_takes_k_inner_steps_and_moves_w_part_of_the_way() -> None:
    side = at(PFedMe(proximal_weight=2.0, inner_steps=2, inner_rate=0.1, step_size=0.25), BiasSite())
    side.train(0, {})
    # theta: 0.1 x 0.5 = 0.05; then s = 1/(1 + e^-0.1) = 0.524979 and 0.05 + 0.1 (0.475021 - 2 x 0.05) = 0.0875021.
    torch.testing.assert_close(side.personal()["bias"], torch.tensor([0.0875021, -0.0875021]))
    # w: 0.25 x 2 of the way.
    torch.testing.assert_close(side.upload()[CLASSIFIER].tensors()["bias"], torch.tensor([0.0437510, -0.0437510]))


def test_pfedme_mixes_the_mean_with_what_was_before() -> None:
    side = coordinator(PFedMe(mixing=0.5), *"ab")
    assert sent(side, 0, {"a": upload(1.0), "b": upload(3.0)}) == 2.0
    assert sent(side, 1, {"b": upload(6.0)}) == 4.0
    assert sent(side, 2, {"b": upload(0.0)}) == 2.0


def test_perfedavg_steps_along_the_gradient_after_the_step() -> None:
    side = at(PerFedAvg(inner_rate=0.2, step_size=1.0), BiasSite())
    side.train(0, {})
    # At (0.1, -0.1), 1 - s = 1 - 1/(1 + e^-0.2) = 0.450166.
    torch.testing.assert_close(side.upload()[CLASSIFIER].tensors()["bias"], torch.tensor([0.450166, -0.450166]))
    # The personal model is the global one (not the trained one) after a step.
    torch.testing.assert_close(side.personal()["bias"], torch.tensor([0.1, -0.1]))


def test_perfedavg_personalises_the_last_global_model_by_as_many_steps_as_asked() -> None:
    side = at(PerFedAvg(inner_rate=0.2, personal_steps=2), BiasSite())
    side.train(0, {})
    side.finish(peer({"weight": torch.zeros(2, 1), "bias": torch.zeros(2)}))
    # 0.1, then 0.1 + 0.2 x 0.450166.
    torch.testing.assert_close(side.personal()["bias"], torch.tensor([0.190033, -0.190033]))
    assert side.memory[GLOBAL]["bias"].tolist() == [0, 0]


def test_batches_are_paired_and_none_is_lost() -> None:
    batches = [(torch.tensor(n), torch.tensor(n)) for n in range(3)]
    assert [(int(a[0]), int(b[0])) for a, b in pairs(batches)] == [(0, 1), (2, 2)]


@pytest.mark.parametrize("method", [PFedMe(), PerFedAvg()], ids=ids)
def test_training_that_diverges_says_so(method: Method) -> None:
    side = at(method, BiasSite())
    with pytest.raises(TrainingError, match="diverged in round 3"):
        side.train(3, peer({"weight": torch.zeros(2, 1), "bias": torch.tensor([math.inf, 0.0])}))


# ---- FedAMP


def test_fedamps_attraction_halves_where_the_squared_distance_says_so() -> None:
    sigma = 2.0
    squared = torch.tensor([[0, sigma * math.log(2)], [sigma * math.log(2), 0]], dtype=torch.float64)
    found = attention(squared, sigma=sigma, step_size=1.0)  # 1/2 x 1/2
    torch.testing.assert_close(found, torch.tensor([[0.75, 0.25], [0.25, 0.75]], dtype=torch.float64))


def test_fedamps_weights_stay_convex_when_many_models_are_alike() -> None:
    found = attention(torch.zeros(20, 20, dtype=torch.float64), sigma=1.0, step_size=1.0)
    assert (found >= 0).all()
    torch.testing.assert_close(found.sum(dim=1), torch.ones(20, dtype=torch.float64))
    assert found[0, 1] == pytest.approx(1 / 19)


def test_fedamps_coordinator_uses_squared_norms_and_serves_the_absent() -> None:
    sigma = 7 / math.log(2)  # models of 7 numbers that differ by 1 are at squared distance 7
    side = coordinator(FedAMP(sigma=sigma, step_size=sigma / 2), *"abc")
    latest = {"a": upload(0.0), "b": upload(1.0)}
    downloads = side.aggregate(Round(3, {"a": latest["a"]}, latest, MemoryWorkspace()))
    for silo, value in (("a", 0.25), ("b", 0.75)):
        torch.testing.assert_close(
            downloads.for_silo(silo)[Exposure.PEER_DERIVED].tensors()["b"], torch.full((3,), value)
        )
    assert downloads.for_silo("c") == {}
    assert downloads.weights is not None
    assert downloads.weights.silos == ("a", "b")
    torch.testing.assert_close(
        downloads.weights.weights, torch.tensor([[0.75, 0.25], [0.25, 0.75]], dtype=torch.float64)
    )


def test_fedamps_silo_is_pulled_by_lambda_over_alpha() -> None:
    side = at(FedAMP(proximal_weight=3.0, step_size=2.0), SmallSite(steps=1, pull=0.0))
    side.memory[PERSONAL] = {**side.memory[PERSONAL], **of(side.site, 2.0)}
    side.train(1, peer(of(side.site, 5.0)))
    assert only(side.personal(), side.site) == pytest.approx(2 - 0.1 * 1.5 * (2 - 5))


# ---- FedFomo


def test_fedfomos_weights_are_gains_by_distance() -> None:
    found = candidate_weights(1.0, torch.tensor([0.5, 2.0, 1.0, math.inf]), torch.tensor([2.0, 4.0, 0.0, 1e6]))
    torch.testing.assert_close(found[:3].double(), torch.tensor([0.25, -0.25, 0.0], dtype=torch.float64))
    assert -1.001 < found[3] < -0.999


def test_fedfomos_silo_moves_towards_the_peers_that_help() -> None:
    side = at(FedFomo(models=5), BiasSite(steps=0))
    side.site.reserved_data = side.site.train_data
    side.train(1, peers(b=bias_model(1.0), c=bias_model(-1.0), d=bias_model(3.0)))
    # Losses log(1 + e^-2x): own 0.693147, b 0.126928, c 2.126928, d 0.002476; distances x sqrt(2).
    ratings = side.upload()[Exposure.PEER_RATINGS].tensors()["ratings"]
    torch.testing.assert_close(ratings, torch.tensor([0.400377, -1.013836, 0.162794, 0, 0]), rtol=0, atol=2e-6)
    # Shares 0.710935 and 0.289065: 0.710935 x 1 + 0.289065 x 3.
    torch.testing.assert_close(side.personal()["bias"], torch.tensor([1.578130, -1.578130]), rtol=0, atol=1e-5)


def test_fedfomos_own_trained_model_is_a_candidate_as_well() -> None:
    side = at(FedFomo(models=5), BiasSite(steps=0, model=bias_model(1.0)))
    side.site.reserved_data = side.site.train_data
    side.memory["before"] = bias_model(0.0).state_dict()
    side.train(1, peers(d=bias_model(3.0)))
    # Trained from 0 to 1, and a peer at 3: the weights and shares of b and d above, the peer's alone is told.
    ratings = side.upload()[Exposure.PEER_RATINGS].tensors()["ratings"]
    torch.testing.assert_close(ratings, torch.tensor([0.162794, 0, 0, 0, 0]), rtol=0, atol=2e-6)
    torch.testing.assert_close(side.personal()["bias"], torch.tensor([1.578130, -1.578130]), rtol=0, atol=1e-5)
    assert torch.equal(side.memory["before"]["bias"], side.personal()["bias"])  # no step was taken since


def test_fedfomos_silo_keeps_its_model_where_no_peer_helps() -> None:
    side = at(FedFomo(), BiasSite(steps=0, model=bias_model(2.0)))
    side.site.reserved_data = side.site.train_data
    side.train(1, peers(b=bias_model(1.0), c=bias_model(2.0)))
    assert side.personal()["bias"].tolist() == [2.0, -2.0]
    with pytest.raises(RefusedError, match="at most 5"):
        side.train(2, peers(**{f"s{n}": bias_model(1.0) for n in range(6)}))


def test_fedfomos_coordinator_learns_whom_a_silo_likes() -> None:
    side = coordinator(FedFomo(models=2, explore=0.0), *"abcd")
    assert side.downloads(0, list("abcd"), Downloads()).for_silo("a") == {}
    nothing = Part.of({"ratings": torch.zeros(2)})
    latest = {silo: upload(float(n), PEER_RATINGS=nothing) for n, silo in enumerate("abcd")}
    kept = side.aggregate(Round(0, latest, latest, MemoryWorkspace()))

    def given(number: int) -> dict[str, set[float]]:
        part = side.downloads(number, ["a"], kept).for_silo("a")[Exposure.PEER_MODELS]
        found: dict[str, set[float]] = {}
        for name, tensor in part.tensors().items():
            found.setdefault(name.partition("/")[0], set()).update(tensor.reshape(-1).tolist())
        return found

    first = sorted(given(1))
    assert len(first) == 2
    assert "a" not in first
    ratings = Part.of({"ratings": torch.tensor([-1.0, 3.0])})
    side.aggregate(Round(1, {"a": upload(0.0, PEER_RATINGS=ratings)}, latest, MemoryWorkspace()))
    (unseen,) = set("bcd") - set(first)
    # The second of the two helped, the first hurt, the third is still at 0.
    assert given(2) == {silo: {float("abcd".index(silo))} for silo in (unseen, first[1])}


def test_fedfomo_explores_less_from_round_to_round() -> None:
    assert [FedFomo().exploration(r) for r in (0, 1, 5, 6, 100)] == pytest.approx([0.3, 0.25, 0.05, 0, 0])
    assert FedFomo(explore=0.4, explore_decay=0.0).exploration(100) == 0.4
    side = coordinator(FedFomo(models=1, explore=1.0, explore_decay=0.1), *"abcd")
    nothing = Part.of({"ratings": torch.zeros(1)})
    latest = {silo: upload(float(n), PEER_RATINGS=nothing) for n, silo in enumerate("abcd")}
    kept = side.aggregate(Round(0, latest, latest, MemoryWorkspace()))
    side.memory["affinity"]["matrix"][0, 3] = 1.0

    def chosen(number: int) -> set[str]:
        part = side.downloads(number, ["a"], kept).for_silo("a")[Exposure.PEER_MODELS]
        return {spec.name.partition("/")[0] for spec in part.specs}

    assert set.union(*[chosen(number) for number in range(8)]) > {"d"}
    assert set.union(*[chosen(number) for number in range(10, 30)]) == {"d"}


def test_epsilon_greedy_takes_the_best_and_explores_when_told() -> None:
    values = torch.tensor([0.0, 5.0, 1.0, 3.0, 2.0])
    assert epsilon_greedy(values, [0, 2, 3, 4], 2, explore=0.0, seed=1) == [3, 4]
    assert epsilon_greedy(values, [0], 2, explore=0.0, seed=1) == [0]
    drawn = [tuple(epsilon_greedy(values, range(5), 2, explore=1.0, seed=seed)) for seed in range(300)]
    assert len(set(drawn)) == 10  # each pair comes up
    assert all(len(set(pair)) == 2 for pair in drawn)


def test_single_models_are_cut_out_of_a_file_without_reading_the_rest(tmp_path: Path) -> None:
    shelf = side_by_side({silo: upload(float(n)) for n, silo in enumerate(["a", "b", "ab"])})
    assert taken(shelf, ["ab"]).tensors()["ab/b"].tolist() == [2.0] * 3
    write_payload(tmp_path / "x.safetensors", {Exposure.PEER_MODELS: shelf})
    kept = read_payload(tmp_path / "x.safetensors")[Exposure.PEER_MODELS]
    part = taken(kept, ["ab", "a"])
    assert {name: set(t.reshape(-1).tolist()) for name, t in part.tensors().items()} == {
        "a/a": {0.0}, "a/b": {0.0}, "ab/a": {2.0}, "ab/b": {2.0}
    }  # fmt: skip
    assert b"".join(part.chunks(5)) == torch.tensor([0.0] * 7 + [2.0] * 7).numpy().tobytes()
    # The coordinator does not write over a file that is being sent; it knows it by this.
    assert isinstance(part.source, FileSource)
    assert part.source.path == tmp_path / "x.safetensors"


# ---- APPLE


def test_apple_trains_its_core_and_its_relationships_together() -> None:
    side = at(Apple(), BiasSite(name="a", steps=1))
    side.train(0, peers(b=bias_model(1.0)))
    # p = (1/2, 1/2), so the model is at 0.5, where 1 - s = 0.268941. Steps: 0.1 x 2 x 1/2 x 0.268941 for the core,
    # whose learning rate is twice the plan's, 0.1 x 0.1 x 2 x 0.268941 for p_b, whose learning rate is a tenth.
    torch.testing.assert_close(side.upload()[CLASSIFIER].tensors()["bias"], torch.tensor([0.0268941, -0.0268941]))
    relationships = {name: float(value) for name, value in side.memory["relationships"].items()}
    assert relationships == pytest.approx({"a": 0.5, "b": 0.5053788})
    # 0.5 x 0.0268941 + 0.5053788 x 1
    torch.testing.assert_close(side.personal()["bias"], torch.tensor([0.5188259, -0.5188259]))


@pytest.mark.parametrize(("optimizer", "momentum"), [("sgd", 0.0), ("sgd", 0.9), ("adam", 0.0)])
def test_apples_relationships_have_a_learning_rate_of_their_own(optimizer: str, momentum: float) -> None:
    def trained(unit: float, rate: float) -> Tensor:
        others = [{"w": torch.tensor([2.0, -1.0])}, {"w": torch.tensor([0.5, 3.0])}]
        combination = Combination([0.4, 0.3, 0.3], others, torch.device("cpu"), unit=unit)
        steps: Any = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer]
        optimiser = steps(combination.parameters(), lr=rate, **({"momentum": momentum} if momentum else {}))
        for _ in range(5):
            optimiser.zero_grad()
            combination.of({"w": torch.tensor([1.0, 1.0])})["w"].square().sum().backward()
            optimiser.step()
        return combination.relationships.detach()

    torch.testing.assert_close(trained(unit_of_rate(0.1, optimizer), 0.05), trained(1.0, 0.005), rtol=1e-5, atol=1e-6)


def test_apples_penalty_pulls_relationships_back() -> None:
    side = at(Apple(penalty=2.0, penalty_share=1.0, relationship_rate=1.0), BiasSite(name="a", steps=1))
    side.memory["relationships"] = {"a": torch.tensor(0.5), "b": torch.tensor(0.9)}
    side.train(0, peers(b=bias_model(0.0)))
    # With all models 0 only the penalty moves p: 0.9 - 0.1 x 2 (0.9 - 0.5).
    assert float(side.memory["relationships"]["b"]) == pytest.approx(0.82)


def test_apples_penalty_falls_along_a_cosine() -> None:
    assert [penalty_weight(r, 10) for r in (0, 5, 10, 11)] == pytest.approx([1, 0.5, 0, 0])
    assert penalty_weight(0, 0) == 0


def test_newcomers_do_not_change_the_sum_of_relationships() -> None:
    found = with_newcomers({"a": 0.75, "b": 0.25}, list("abcd"))
    assert found == pytest.approx({"a": 0.375, "b": 0.125, "c": 0.25, "d": 0.25})
    assert with_newcomers({"a": 1.0}, list("abc")) == pytest.approx(dict.fromkeys("abc", 1 / 3))


def test_apple_without_peers_is_separate_training() -> None:
    one, other = at(Apple(), SmallSite()), at(Local(), SmallSite())
    one.train(0, {})
    other.train(0, {})
    assert all(torch.equal(one.personal()[name], tensor) for name, tensor in other.personal().items())


def test_apple_keeps_a_core_that_did_not_come_again_where_their_number_is_limited() -> None:
    side = at(Apple(models=1), BiasSite(name="a", steps=1))
    side.train(1, peers(b=bias_model(1.0)))
    side.train(2, peers(c=bias_model(2.0)))
    assert set(side.memory["relationships"]) == {"a", "b", "c"}
    assert side.memory["peers"]["b/bias"].tolist() == [1.0, -1.0]


def test_apples_coordinator_gives_all_others_or_a_few() -> None:
    latest = {silo: upload(1.0) for silo in "abcd"}
    for method, number in ((Apple(), 3), (Apple(models=2), 2), (Apple(models=9), 3)):
        side = coordinator(method, *"abcd")
        kept = side.aggregate(Round(0, latest, latest, MemoryWorkspace()))
        for _ in range(2):
            downloads = side.downloads(1, ["a", "c"], kept)
            got = {name.partition("/")[0] for name in downloads.for_silo("a")[Exposure.PEER_MODELS].tensors()}
            assert len(got) == number
            assert "a" not in got
            assert downloads.for_silo("b") == {}


def test_models_that_reach_single_hospitals_have_to_be_consented_to() -> None:
    assert Exposure.PEER_MODELS in FedFomo().required
    assert Exposure.PEER_RATINGS in FedFomo().required
    assert Exposure.PEER_MODELS in Apple().required
    assert Exposure.MODEL_GRADIENT in Scaffold().required
    assert Exposure.PEER_DERIVED in FedAMP().required
    assert Exposure.SAMPLE_COUNT in FedProx().required
    assert Exposure.SAMPLE_COUNT not in FedDyn().required


@pytest.mark.parametrize("method", AVERAGING, ids=ids)
def test_a_silo_that_joins_late_starts_from_the_global_model(method: Method) -> None:
    side = at(method, SmallSite(steps=0, model=small_model(3)))
    download = controlled(side.site, 2.0, 0.0) if isinstance(method, Scaffold) else peer(of(side.site, 2.0))
    side.finish(download)
    state = side.memory.get(GLOBAL, side.memory[PERSONAL])
    assert only(state, side.site) == 2.0
