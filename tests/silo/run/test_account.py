"""What a silo believes of a plan's privacy, what its consent says to it, and what the journal is told."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import ValidationError

from medsilo.algorithms.method import Method
from medsilo.algorithms.registry import make
from medsilo.coordinator.config import PrivacyConfig, RunConfig
from medsilo.privacy.budget.accounting import DiscreteLaplace, SharedGaussian, Unit, epsilon
from medsilo.privacy.budget.kept_releases import KeptReleases
from medsilo.privacy.budget.ledger import Budget, Ledger, Purpose, Subject
from medsilo.privacy.budget.noise import NoiseSource
from medsilo.privacy.budget.promise import MetricsPlan, PrivacyPlan
from medsilo.privacy.budget.sealed_keys import SealedKeys, unsealed
from medsilo.privacy.budget.units import Content
from medsilo.privacy.consent.consent import Consent, ConsentFile
from medsilo.privacy.consent.gate import PlanGate
from medsilo.privacy.consent.plan import RunPlan, TrainingPlan
from medsilo.privacy.door.door import Call, Door
from medsilo.privacy.errors import BudgetError, DataError, RefusedError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.journal.journal import Journal, read_records
from medsilo.protos.medsilo.v1 import coordinator_pb2 as wire
from medsilo.protos.nonces import nonce
from medsilo.silo.run.account import Account, budget_of, check_enough, check_promise, metrics_budget_of
from medsilo.silo.training.private_count import PrivateCounts
from tests.support.evidence.charges import replay
from tests.support.hospital.account import mechanism, run_plan


def consent(**privacy: Any) -> ConsentFile:
    content = {"epsilon": 5.0, "delta": 1e-5, **privacy}
    return ConsentFile(None, Consent.model_validate({"methods": ["fedavg"], "rounds": 9, "privacy": content}), "00")


def test_the_coordinators_plan_keeps_its_promise_with_the_least_noise() -> None:
    plan = run_plan()
    check_promise(plan, make("fedavg", {}))
    assert plan.privacy is not None
    assert plan.privacy.steps == 50
    assert 3.99 < epsilon([plan.privacy.training(50)], delta=1e-5) <= 4
    assert RunPlan.from_message(plan.to_message()) == plan
    assert RunPlan.from_message(plan.to_message()).sha256 == plan.sha256


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"noise_multiplier": 0.5}, "promises ε = 4.000 .* but its 50 steps"),
        ({"steps": 49}, "counts 49 steps, but its 5 rounds take 50"),
        ({"sampling_rate": 0.05, "steps": 50}, "take 100"),
        ({"epsilon": 3.0}, "promises ε = 3.000"),
    ],
)
def test_a_plan_that_promises_more_than_it_keeps_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RefusedError, match=words):
        check_promise(run_plan(**changes), make("fedavg", {}))


def test_a_plan_that_exposes_what_has_no_mechanism_is_refused() -> None:
    plan = run_plan()
    asking = plan.model_copy(update={"optional": (Exposure.LOCAL_METRICS,)})
    with pytest.raises(RefusedError, match="LOCAL_METRICS without saying how"):
        check_promise(asking, make("fedavg", {}))
    for releases in (5, 6):
        metrics = MetricsPlan(epsilon=0.1, releases=releases)
        noised = asking.model_copy(update={"privacy": mechanism(plan).model_copy(update={"metrics": metrics})})
        assert RunPlan.from_message(noised.to_message()) == noised
        if releases == 6:
            check_promise(noised, make("fedavg", {}))
        else:
            with pytest.raises(RefusedError, match="counts 5 accuracies, but its 5 rounds and its end take 6"):
                check_promise(noised, make("fedavg", {}))
    with pytest.raises(RefusedError, match="fedproto cannot run with differential privacy: prototypes"):
        check_promise(plan, make("fedproto", {}))


def feddfq() -> Method:
    return make("feddfq", {"selection": "argmin"})


def test_a_plan_with_averages_is_calibrated_for_all_together() -> None:
    plan, method = run_plan("feddfq", parameters={"selection": "argmin"}), feddfq()
    check_promise(plan, method)
    found = mechanism(plan)
    assert [(one.content, one.times) for one in found.releases] == [("identifier", 1), ("choice", 4)]
    assert 3.99 < epsilon(found.events, delta=1e-5) <= 4
    assert found.noise_multiplier > mechanism(run_plan()).noise_multiplier
    assert RunPlan.from_message(plan.to_message()) == plan
    assert RunPlan.from_message(plan.to_message()).sha256 == plan.sha256


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"noise_multiplier": 1.0}, r"4 of the choice \(noise multiplier 1\) cost"),
        ({"times": 3}, "counts 3 noised releases of the choice, but its 5 rounds take 4"),
        (None, "counts 0 noised releases of the choice"),
    ],
)
def test_a_plan_that_hides_what_its_averages_cost_is_refused(changes: dict[str, Any] | None, words: str) -> None:
    plan = run_plan("feddfq", parameters={"selection": "argmin"})
    identifier, choice = mechanism(plan).releases
    releases = (identifier,) if changes is None else (identifier, choice.model_copy(update=changes))
    changed = plan.model_copy(update={"privacy": mechanism(plan).model_copy(update={"releases": releases})})
    with pytest.raises(RefusedError, match=words):
        check_promise(changed, feddfq())


def test_an_average_over_too_few_units_is_refused_at_joining() -> None:
    found = mechanism(run_plan("feddfq", parameters={"selection": "argmin"}))
    check_enough(found, Consent(), 50)
    check_enough(found, consent(least_units=3).consent, 3)
    for file, units in ((Consent(), 49), (consent(least_units=3).consent, 2)):
        with pytest.raises(DataError, match=f"of {units} units .image.*least_units"):
            check_enough(found, file, units)
    check_enough(mechanism(run_plan()), Consent(), 1)


def test_averages_belong_to_what_is_left_of_a_run_and_one_that_is_kept_does_not(tmp_path: Path) -> None:
    plan, method = run_plan("feddfq", parameters={"selection": "argmin"}), feddfq()
    account, ledger, door = opened(tmp_path, plan, BUDGET)
    found = mechanism(plan)
    identifier, choice = found.releases
    assert account._left(method) == [*found.events[:1], identifier.event(1), choice.event(4)]
    account.charge(0, "training", found.training(10), "")
    charge = account.charge(0, "identifier", identifier.event(1), "").charge
    assert account._left(method)[1:] == [identifier.event(1), choice.event(4)], "charged, but it may be lost"
    account.kept.keep(identifier, [0.5], charge=charge)
    account.charge(1, "choice", choice.event(1), "")
    account.charge(1, "choice", choice.event(1), "")  # the round was repeated after a crash
    assert account._left(method) == [found.training(40), choice.event(3)]
    door.journal.close()
    again, _, door = opened(tmp_path, plan.model_copy(update={"run": "another"}), BUDGET)
    assert again._left(method) == [found.training(50), choice.event(4)], "another run sends the same bytes for free"
    assert again.kept.find(identifier) == [0.5]
    ledger.path.unlink()
    assert KeptReleases(Ledger(tmp_path / "ledger", ledger.subject)).find(identifier) is None, "nothing paid for it"
    door.journal.close()


@pytest.mark.parametrize(
    ("file", "unit", "words"),
    [
        (consent(), "image", None),
        (consent(epsilon=3.9), "image", "a privacy loss of ε = .* at δ = 1e-05 .unit image, adjacency zero-out"),
        (consent(delta=1e-7), "image", "`privacy: epsilon: "),
        (consent(unit="patient"), "image", "the image as unit of privacy"),
        (consent(), "patient", "the patient as unit of privacy"),
        (consent(clipping_norm=0.5), "image", "a clipping norm of 1 "),
    ],
)
def test_a_consent_says_what_a_private_plan_lacks(file: ConsentFile, unit: Unit, words: str | None) -> None:
    plan = run_plan(unit=unit)
    found = file.missing_for(plan).privacy
    if words is None:
        assert found == ()
    else:
        with pytest.raises(AssertionError, match=words):
            raise AssertionError("\n".join(found))


def test_a_plan_without_privacy_passes_only_where_it_is_not_demanded() -> None:
    plan = run_plan().model_copy(update={"privacy": None})
    assert "demanded: false" in consent().missing_for(plan).privacy[0]
    assert not consent(demanded=False).missing_for(plan).privacy
    assert not ConsentFile(None, Consent(), "").missing_for(plan).privacy


def test_a_run_stops_before_it_exceeds_its_promise_however_its_rounds_are_repeated(tmp_path: Path) -> None:
    plan, method = run_plan(), make("fedavg", {})
    account, ledger, door = opened(tmp_path, plan, budget_of(Consent(), mechanism(plan)))
    account.check_covers(method)
    charged = 0
    with pytest.raises(BudgetError, match="run r promises ε = 4 "):  # noqa: PT012 the one that is too many
        for number in (*range(5), 5, 6, 7):
            account.charge(number, "training", mechanism(plan).training(10), "")
            charged += 1
    assert charged == 5
    assert 3.9 < ledger.guarantee(1e-5).epsilon <= 4
    door.journal.close()


def test_a_run_that_is_held_to_its_promise_alone_is_told_what_was_spent_before(tmp_path: Path) -> None:
    plan, method = run_plan(), make("fedavg", {})
    promise = budget_of(Consent(), mechanism(plan))
    account, ledger, door = opened(tmp_path, plan, promise)
    assert account.notice() is None
    for number in range(5):
        account.charge(number, "training", mechanism(plan).training(10), "")
    assert account.notice() is None, "that was the run itself"
    door.journal.close()
    again, _, door = opened(tmp_path, plan.model_copy(update={"run": "another"}), promise)
    again.check_covers(method)
    told = again.notice()
    assert told is not None
    assert f"have cost {ledger.guarantee(1e-5)} so far, other runs included" in told
    assert "run another is held to its own promise alone: ε = 4" in told
    door.journal.close()
    bounded, _, door = opened(tmp_path, plan.model_copy(update={"run": "third"}), BUDGET)
    assert bounded.notice() is None, "the budget holds all"
    door.journal.close()


def version(number: int, images: Sequence[int]) -> tuple[str, dict[str, Content]]:
    """A version of a data set: one grey image for each number."""
    pixels = np.full((len(images), 4, 4, 1), 0, np.uint8) + np.array(images, np.uint8)[:, None, None, None]
    return f"{number:064x}", {"train": Content(pixels, None), "test": Content(pixels[:1] + 100, None)}


def test_the_next_version_of_the_images_pays_from_the_same_budget_and_says_so(tmp_path: Path) -> None:
    plan, method = run_plan(), make("fedavg", {})
    account, _, door = opened(tmp_path, plan, BUDGET, version(1, [1, 2]))
    for number in range(5):
        account.charge(number, "training", mechanism(plan).training(10), "")
    door.journal.close()
    further = plan.model_copy(update={"run": "another"})
    corrected, ledger, door = opened(tmp_path, further, BUDGET, version(2, [2, 3]))
    with pytest.raises(BudgetError, match=r"from 3\.997 to ε = 5\..* 5 on data set 0{16} .unit image, split train"):
        corrected.check_covers(method)
    corrected.charge(0, "training", mechanism(plan).training(10), "")
    with pytest.raises(BudgetError, match=r"refused: the privacy budget .* 5 on data set 0{16}"):  # noqa: PT012
        for number in range(1, 5):
            corrected.charge(number, "training", mechanism(plan).training(10), "")
    most = ledger.guarantee(1e-5).epsilon
    assert 4 < most <= 5
    (told,) = [
        r
        for r in read_records(tmp_path / "journal")
        if r["kind"] == "ledger" and r["charge"]["run"] == "another" and r["charge"]["index"] == len(ledger.entries())
    ]
    assert told["spent"]["epsilon"] == ledger.cost(1e-5).epsilon, "what whoever has the journal can add up"
    assert told["unit_spent"] == {**told["spent"], "epsilon": most}
    door.journal.close()
    fresh, _, door = opened(tmp_path, further, BUDGET, version(3, [7, 8]))
    fresh.check_covers(method)
    door.journal.close()


def test_what_was_charged_to_an_earlier_version_of_the_images_is_no_more_to_be_charged(tmp_path: Path) -> None:
    """The shard was corrected in the middle of a run: its rounds that are done are not foreseen again."""
    plan, method = run_plan(), make("fedavg", {})
    account, _, door = opened(tmp_path, plan, BUDGET, version(1, [1, 2]))
    for number in range(3):
        account.charge(number, "training", mechanism(plan).training(10), "")
    door.journal.close()
    corrected, _, door = opened(tmp_path, plan, budget_of(Consent(), mechanism(plan)), version(2, [2, 3]))
    assert corrected._left(method) == [mechanism(plan).training(20)]
    corrected.check_covers(method)
    door.journal.close()


def opened(
    folder: Path, plan: RunPlan, budget: Budget, data: tuple[str, dict[str, Content]] = ("ab" * 32, {})
) -> tuple[Account, Ledger, Door]:
    assert plan.privacy is not None
    journal = Journal(folder / "journal", key=KEY, origin="o")
    door = Door(journal, identity="i", federation="test", gate=PlanGate(Exposure))
    ledger = Ledger(folder / "ledger", Subject(data[0], plan.privacy.unit), data[1])
    return Account(ledger, plan, plan.privacy, budget, door, SealedKeys(folder / "sealed")), ledger, door


KEY = Ed25519PrivateKey.generate()
BUDGET = Budget(5.0, 1e-5)


def test_a_run_is_covered_as_long_as_the_rest_of_it_fits(tmp_path: Path) -> None:
    plan, method = run_plan(), make("fedavg", {})
    account, ledger, door = opened(tmp_path, plan, BUDGET)
    event = mechanism(plan).training(10)
    for number in range(5):
        account.check_covers(method)
        account.charge(number, "training", event, "")
    account.check_covers(method)
    door.journal.close()
    again, _, door = opened(tmp_path, plan.model_copy(update={"run": "another"}), BUDGET)
    with pytest.raises(BudgetError, match=r"run another would bring .* from 3\.997 to ε = 5\..* and the budget is 5\."):
        again.check_covers(method)
    charged = 0
    with pytest.raises(BudgetError, match="refused"):  # noqa: PT012 the one that is too many
        for number in range(5):
            again.charge(number, "training", event, "")
            charged += 1
    assert 0 < charged < 5
    assert ledger.guarantee(1e-5).epsilon <= 5
    door.journal.close()


def test_the_journal_is_told_of_charges_that_a_crash_kept_from_it(tmp_path: Path) -> None:
    plan = run_plan()
    account, ledger, door = opened(tmp_path, plan, BUDGET)
    account.charge(0, "training", mechanism(plan).training(10), "")
    # A crash between the ledger's fsync and the journal's record; and a run of another federation.
    ledger.charge(mechanism(plan).training(10), Purpose("test", "r", plan.sha256.hex(), 1, "training"), BUDGET)
    ledger.charge(mechanism(plan).training(10), Purpose("secret", "their-run", "ff", 0, "training"), BUDGET)
    door.journal.close()
    _, _, door = opened(tmp_path, plan, BUDGET)
    records = list(read_records(tmp_path / "journal"))
    assert epsilon(replay(records)[ledger.subject], delta=1e-5) == ledger.guarantee(1e-5).epsilon
    assert [r["charge"]["round"] for r in records if r["kind"] == "ledger"] == [0, 1, None]
    assert "secret" not in str(records)
    assert "their-run" not in str(records)
    door.journal.close()


def test_what_is_kept_of_the_journal_at_the_start_does_not_grow_with_it(tmp_path: Path) -> None:
    peaks = []
    for length in (200, 4000):
        account, _, door = opened(tmp_path / str(length), run_plan(), BUDGET)
        account.charge(0, "training", mechanism(run_plan()).training(10), "")
        door.journal.append([{"kind": "refusal", "federation": "test", "self": "i", "reason": "any"}] * length)
        parts = account._ledger, account._plan, account._mechanism, BUDGET, door, account._sealed
        Account(*parts)
        tracemalloc.start()
        Account(*parts)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        door.journal.close()
    assert peaks[1] < 1.3 * peaks[0]


def test_a_ledger_from_a_backup_is_refused_by_the_journal(tmp_path: Path) -> None:
    plan = run_plan()
    account, ledger, door = opened(tmp_path, plan, BUDGET)
    account.charge(0, "training", mechanism(plan).training(10), "")
    door.journal.close()
    ledger.path.unlink()
    with pytest.raises(BudgetError, match="an older copy"):
        opened(tmp_path, plan, BUDGET)


def test_without_a_budget_of_its_own_a_silo_keeps_to_the_plans_promise() -> None:
    plan = run_plan()
    assert budget_of(Consent(), mechanism(plan)) == Budget(4.0, 1e-5, of_run=True)
    assert budget_of(consent().consent, mechanism(plan)) == BUDGET


def test_test_images_have_a_budget_of_their_own_or_none() -> None:
    found = mechanism(run_plan())
    assert metrics_budget_of(consent().consent, found) is None
    assert metrics_budget_of(consent(metrics_epsilon=2).consent, found) == Budget(2, 1e-5)
    assert metrics_budget_of(Consent(), found) is None, "the plan promises nothing for them"
    noised = found.model_copy(update={"metrics": MetricsPlan(epsilon=0.1, releases=6)})
    assert metrics_budget_of(Consent(), noised) == Budget(pytest.approx(0.6), 1e-5, of_run=True)


@pytest.mark.parametrize(
    ("ask_for", "epsilon", "good"),
    [([], None, True), (["LOCAL_METRICS"], 2.0, True), (["LOCAL_METRICS"], None, False), ([], 2.0, False)],
)
def test_a_private_run_asks_for_accuracies_only_with_what_they_may_cost(
    ask_for: list[str], epsilon: float | None, good: bool
) -> None:
    privacy = {"epsilon": 4.0, "delta": 1e-5, "sampling_rate": 0.1, "metrics_epsilon": epsilon}
    run = {
        "name": "r",
        "method": {"name": "fedavg"},
        "model": {"name": "lenet5-gn", "input_shape": (3, 28, 28), "classes": 3},
        "rounds": 3,
        "ask_for": ask_for,
        "privacy": privacy,
    }
    if not good:
        with pytest.raises(ValidationError, match="metrics_epsilon"):
            RunConfig.model_validate(run)
        return
    RunConfig.model_validate(run)
    plan = PrivacyConfig.model_validate(privacy).plan(make("fedavg", {}), TrainingPlan(epochs=1), 3)
    assert plan.metrics == (None if epsilon is None else MetricsPlan(epsilon=0.5, releases=4))


@pytest.mark.parametrize(
    ("rounds", "mechanism", "deviation"), [(2, "discrete-laplace", 2.1), (20, "discrete-gaussian", 9.2)]
)
def test_accuracies_have_the_least_noise_that_keeps_to_what_they_may_cost(
    rounds: int, mechanism: str, deviation: float
) -> None:
    """ε = 2 for all: 21 counts, each with its share of it and discrete Laplace noise, would have one of 14.8."""
    config = PrivacyConfig(epsilon=4.0, delta=1e-5, sampling_rate=0.1, metrics_epsilon=2.0)
    plan = config.plan(make("fedavg", {}), TrainingPlan(epochs=1), rounds)
    assert plan.metrics is not None
    assert plan.metrics.mechanism == mechanism
    event = plan.metrics.event(rounds + 1)
    assert epsilon([event], delta=1e-5) <= 2.0 + 1e-9
    source = NoiseSource()
    counts = PrivateCounts(plan.metrics, np.arange(1000), lambda *_: unsealed(), noise=source)
    right = np.arange(1000) < 500
    spread = np.std([1000 * counts.accuracy(right, round_number=0) for _ in range(1500)])
    assert spread == pytest.approx(deviation, rel=0.1)
    again = PrivacyPlan.model_validate_json(plan.model_dump_json())
    assert again == plan


def test_a_plan_from_before_the_discrete_gaussian_has_the_hash_that_it_had() -> None:
    content = MetricsPlan(epsilon=0.5, releases=4).model_dump(mode="json")
    assert content == {"epsilon": 0.5, "releases": 4}
    assert MetricsPlan.model_validate(content).event(1) == DiscreteLaplace(0.5)
    for wrong in ({"mechanism": "discrete-gaussian"}, {"deviation": 3.0}):
        with pytest.raises(ValidationError, match="a deviation belongs to the discrete Gaussian"):
            MetricsPlan.model_validate({**content, **wrong})


def test_accuracies_that_cost_more_than_they_are_said_to_are_refused() -> None:
    plan = run_plan()
    for deviation, good in ((5.0, True), (4.0, False)):
        metrics = MetricsPlan(mechanism="discrete-gaussian", epsilon=2.0, deviation=deviation, releases=6)
        asking = plan.model_copy(update={"privacy": mechanism(plan).model_copy(update={"metrics": metrics})})
        assert RunPlan.from_message(asking.to_message()) == asking
        if good:
            check_promise(asking, make("fedavg", {}))
            continue
        with pytest.raises(RefusedError, match=r"promises ε = 2 .* 6 accuracies, but with noise of deviation 4 .* 2\."):
            check_promise(asking, make("fedavg", {}))


def shared_plan() -> RunPlan:
    """Five rounds of one step, whose noise two of three hospitals have together."""
    base = run_plan()
    content = base.model_dump()
    content["privacy"] |= {"honest": 2, "sampling_rate": 1.0, "steps": 5, "noise_multiplier": 6.0}
    content["training"] |= {"epochs": 1, "optimizer": "sgd"}
    content["secure_aggregation"] = {"minimum": 3, "rounds": 5}
    return RunPlan.model_validate(content)


def test_a_share_of_noise_is_drawn_again_only_where_the_first_cannot_have_left(tmp_path: Path) -> None:
    """Two sums of one round with another share of this hospital in each would have less noise together, at the others'
    cost."""
    plan = shared_plan()
    event = mechanism(plan).training(1)
    account, ledger, door = opened(tmp_path, plan, BUDGET)
    first = account.charge(0, "training", event, "reads")
    door.journal.close()
    account, ledger, door = opened(tmp_path, plan, BUDGET)
    assert account.charge(0, "training", event, "reads") == first, "a crash, and the same again"
    door.journal.close()
    account, ledger, door = opened(tmp_path, plan, BUDGET)
    other = account.charge(0, "training", event, "reads something else")
    assert other.key != first.key, "nothing has left since, which the journal proves"
    assert [entry.sha256 for entry in ledger.entries()] == [other.charge]
    call = Call("SubmitUpdate", "spiffe://test/coordinator/c", "", "update", plan.run, plan.sha256.hex(), 0)
    update = wire.Update(nonce=nonce(), silo="i", plan_sha256=plan.sha256)
    door.release([wire.SubmitUpdateRequest(update=update)], call)
    door.journal.close()
    account, ledger, door = opened(tmp_path, plan, BUDGET)
    with pytest.raises(BudgetError, match="share of the noise of round 1 was drawn before"):
        account.charge(0, "training", event, "reads a third")
    assert len(ledger.entries()) == 1, "and nothing was charged"
    account.charge(1, "training", event, "the next round")
    door.journal.close()


def test_a_share_is_not_drawn_again_for_another_version_of_the_images(tmp_path: Path) -> None:
    plan = shared_plan()
    event = mechanism(plan).training(1)
    account, _, door = opened(tmp_path, plan, BUDGET, version(1, [1, 2]))
    account.charge(0, "training", event, "reads")
    door.journal.close()
    corrected, _, door = opened(tmp_path, plan, BUDGET, version(2, [2, 3]))
    with pytest.raises(BudgetError, match="drawn before"):
        corrected.charge(0, "training", event, "reads")
    door.journal.close()


def test_what_is_left_of_a_run_with_shared_noise_is_its_rounds(tmp_path: Path) -> None:
    plan, method = shared_plan(), make("fedavg", {})
    account, _, door = opened(tmp_path, plan, BUDGET)
    account.charge(0, "training", mechanism(plan).training(1), "")
    assert account._left(method) == [SharedGaussian(6.0, 2, 4)]
    door.journal.close()
