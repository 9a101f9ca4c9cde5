"""A run's account with the privacy ledger: what it may still cost, what is charged, what the journal is told."""

from __future__ import annotations

from typing import Any

from algorithms.method import Method
from algorithms.private_methods import planned_averages, planned_steps, refusal
from privacy.accounting import Event, SampledGaussian, epsilon, shown
from privacy.consent import LEAST_UNITS, Consent
from privacy.door import Call, Door
from privacy.errors import BudgetError, DataError, RefusedError
from privacy.exposure import Exposure
from privacy.journal import read_records
from privacy.kept_releases import KeptReleases
from privacy.ledger import Budget, Entry, Ledger, Purpose, Run, Subject, charges, describe_spent, told_of
from privacy.plan import PrivacyPlan, RunPlan

_ROUNDING = 1e-3


def check_promise(plan: RunPlan, method: Method) -> None:
    """Raises ``RefusedError`` for a plan whose privacy is not what it says: nothing in it is taken on trust."""
    found = plan.privacy
    if found is None:
        return
    if (reason := refusal(method)) is not None:
        raise RefusedError(f"the plan promises differential privacy, but {reason}")
    if Exposure.LOCAL_METRICS in plan.optional and found.metrics is None:
        raise RefusedError(
            "the plan promises differential privacy, and asks for LOCAL_METRICS without saying how they are noised"
        )
    if found.metrics is not None and found.metrics.releases < plan.rounds + 1:
        raise RefusedError(
            f"the plan counts {found.metrics.releases} accuracies, but its {plan.rounds} rounds and its end "
            f"take {plan.rounds + 1}"
        )
    needed = planned_steps(method, plan.training, plan.rounds, found.sampling_rate)
    if found.steps < needed:
        raise RefusedError(f"the plan counts {found.steps} steps, but its {plan.rounds} rounds take {needed}")
    for average in planned_averages(method, plan.rounds):
        release, times = found.release(average.content), average.times(plan.rounds)
        if release is None or release.times < times:
            raise RefusedError(
                f"the plan counts {release.times if release else 0} noised releases of the {average.content}, but its "
                f"{plan.rounds} rounds take {times}"
            )
    cost = epsilon(found.events, delta=found.delta)
    if cost > found.epsilon + _ROUNDING:
        besides = "".join(
            f", {release.times} of the {release.content} (noise multiplier {release.noise_multiplier:g})"
            for release in found.releases
        )
        raise RefusedError(
            f"the plan promises {found.guarantee}, but its {found.steps} steps (sampling rate {found.sampling_rate:g}, "
            f"noise multiplier {found.noise_multiplier:g}){besides} cost {shown(cost)}"
        )


def check_enough(plan: PrivacyPlan, consent: Consent, units: int) -> None:
    """Raises ``DataError`` for a plan with averages over fewer units than the hospital wants behind one."""
    least = consent.privacy.least_units if consent.privacy is not None else LEAST_UNITS
    if plan.releases and units < least:
        raise DataError(
            f"the run asks for averages over this silo's images ({', '.join(one.content for one in plan.releases)}); "
            f"they are of {units} units ({plan.unit}), and with fewer than {least} no average leaves (`privacy: "
            "least_units` in the consent)"
        )


def budget_of(consent: Consent, plan: PrivacyPlan) -> Budget:
    """The budget of a consent; where it has no privacy section, the run's own promise, for its own charges alone."""
    if consent.privacy is None:
        return Budget(plan.epsilon, plan.delta, of_run=True)
    return Budget(consent.privacy.epsilon, consent.privacy.delta)


def metrics_budget_of(consent: Consent, plan: PrivacyPlan) -> Budget | None:
    """The budget of a consent for the test images, or the run's promise for them; None where there is none."""
    if consent.privacy is None:
        promised = plan.metrics
        return None if promised is None else Budget(promised.epsilon * promised.releases, plan.delta, of_run=True)
    allowed = consent.privacy.metrics_epsilon
    return Budget(allowed, consent.privacy.delta) if allowed is not None else None


class Account:
    """One run's charges to the ledger of a silo's images.

    Raises ``BudgetError`` if the ledger is damaged, or older than the journal.
    """

    def __init__(self, ledger: Ledger, plan: RunPlan, mechanism: PrivacyPlan, budget: Budget, door: Door) -> None:
        self._ledger = ledger
        self._plan = plan
        self._mechanism = mechanism
        self._budget = budget
        self._door = door
        self.kept = KeptReleases(ledger)
        self._purpose: Run = (plan.federation, plan.run, plan.sha256.hex())
        self._catch_up()

    def check_covers(self, method: Method) -> None:
        """Raises ``BudgetError`` if what is left of the run would overspend the budget; nothing is charged yet."""
        left = self._left(method)
        if not left:
            return
        budget, delta, run = self._budget, self._budget.delta, self._bounded
        after = self._ledger.spending(delta, extra=left, run=run)
        if after.epsilon > budget.epsilon:
            spent = self._ledger.spending(delta, run=run)
            bound = f"the run promises {budget.epsilon:g}" if budget.of_run else f"the budget is {budget.epsilon:g}"
            raise BudgetError(
                f"refused: run {self._plan.run} would bring the privacy loss of these images from "
                f"{shown(spent.epsilon)} to {after.guarantee}, and {bound}.{told_of(after)} Nothing was charged, and "
                f"nothing is trained or sent. If the hospital agrees, {'set' if budget.of_run else 'raise'} `privacy: "
                "epsilon` in the consent; `silo budget` shows what was spent on what"
            )

    def notice(self) -> str | None:
        """What to say at joining of a run that is held to its own promise, though these images have been paid for
        before; None where there is nothing to say."""
        if not self._budget.of_run:
            return None
        delta = self._budget.delta
        before, own = self._ledger.spending(delta), self._ledger.spending(delta, run=self._purpose)
        if before.epsilon <= own.epsilon:
            return None
        return (
            f"these images have cost {before.guarantee} so far, other runs included.{told_of(before)} The consent "
            f"names no budget for all runs (`privacy: epsilon`), so run {self._plan.run} is held to its own promise "
            f"alone: ε = {self._budget.epsilon:g}"
        )

    @property
    def _bounded(self) -> Run | None:
        """The run whose charges the budget is on; None for all."""
        return self._purpose if self._budget.of_run else None

    def _left(self, method: Method) -> list[Event]:
        """What is still to be charged for the run; a round that was repeated after a crash, or charged to an earlier
        version of the data set, counts once."""
        plan, mechanism = self._plan, self._mechanism
        charged: dict[tuple[int, str], int] = {}
        for entry in self._ledger.of_run(self._purpose):
            event = entry.event
            steps = event.steps if isinstance(event, SampledGaussian) else 0
            charged[entry.purpose.round, entry.purpose.phase] = steps
        found: list[Event] = []
        steps = planned_steps(method, plan.training, plan.rounds, mechanism.sampling_rate) - sum(charged.values())
        if steps > 0:
            found.append(mechanism.training(steps))
        for average in planned_averages(method, plan.rounds):
            release = mechanism.release(average.content)
            assert release is not None, "check_promise comes first"
            done = sum(phase == average.content for _, phase in charged)
            if average.lasting:
                done = self.kept.find(release) is not None
            if (times := average.times(plan.rounds) - done) > 0:
                found.append(release.event(times))
        return found

    def charge(self, round_number: int, phase: str, event: Event) -> str:
        """Charges a training before its first step, or an average before it is drawn (see ``Ledger.charge``), and tells
        the journal; returns the charge's hash."""
        entry = self._ledger.charge(event, Purpose(*self._purpose, round_number, phase), self._budget)
        delta, subject = self._budget.delta, self._ledger.subject
        events = [one.event for one in self._ledger.entries()[: entry.index]]
        spent = epsilon(events, delta=delta, adjacency=subject.adjacency)
        told = {"spent": describe_spent(spent, delta)}
        if (most := self._ledger.spending(delta)).inherited:
            # Beside what the account's own charges come to, which whoever has the journal can add up.
            told["unit_spent"] = describe_spent(most.epsilon, delta)
        self._door.note("ledger", charge=entry.describe(), **told)
        return entry.sha256

    def paid_by(self, call: Call) -> list[dict[str, Any]]:
        """The charges behind what a call sends: an update's round's."""
        if call.rpc != "SubmitUpdate":
            return []
        return [entry.describe() for entry in self._own() if entry.purpose.round == call.round]

    def _own(self) -> list[Entry]:
        return self._ledger.counting(self._purpose)

    def _catch_up(self) -> None:
        """Tells the journal of charges that it does not know: of a crash in between, or of another federation's runs.

        Of the latter it tells only what they cost: the journal is shown to this federation.
        """
        records = list(read_records(self._door.journal.directory))
        self._ledger.check_holds(records)
        known = {c["index"] for c in charges(records) if Subject.read(c) == self._ledger.subject}
        for entry in self._ledger.entries():
            if entry.index not in known:
                told = entry.describe()
                if entry.purpose.federation != self._plan.federation:
                    told.update(federation=None, run=None, plan_sha256=None, round=None, phase=None)
                self._door.note("ledger", charge=told)
