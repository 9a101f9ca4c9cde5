"""A run's account with the privacy ledger: what it may still cost, what is charged, what the journal is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from medsilo.algorithms.method import Method
from medsilo.algorithms.protection.private import planned_averages, planned_steps, refusal, reporting_refusal
from medsilo.privacy.budget.accounting import Event, SampledGaussian, SharedGaussian, epsilon
from medsilo.privacy.budget.kept_releases import KeptReleases
from medsilo.privacy.budget.ledger import (
    LASTING,
    UPDATE,
    Budget,
    Entry,
    Ledger,
    Purpose,
    Run,
    Subject,
    describe_spent,
    told_of,
)
from medsilo.privacy.budget.promise import PrivacyPlan
from medsilo.privacy.budget.sealed_keys import Paid, SealedKeys
from medsilo.privacy.consent.consent import LEAST_UNITS, Consent
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.door.door import Call, Door
from medsilo.privacy.errors import BudgetError, DataError, RefusedError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.journal.journal import read_journal
from medsilo.privacy.journal.records import LedgerRecord, MessageRecord, VoidRecord, charges_of
from medsilo.privacy.pages.wording import shown
from medsilo.silo.state.config import SiloConfig

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
    if Exposure.LOCAL_METRICS in plan.optional and (reason := reporting_refusal(method)) is not None:
        raise RefusedError(f"the plan asks for LOCAL_METRICS, but {reason}")
    if found.metrics is not None and found.metrics.releases < plan.training_rounds + 1:
        raise RefusedError(
            f"the plan counts {found.metrics.releases} accuracies, but its {plan.training_rounds} rounds and its end "
            f"take {plan.training_rounds + 1}"
        )
    if found.metrics is not None and found.metrics.deviation is not None:
        cost = epsilon([found.metrics.event(found.metrics.releases)], delta=found.delta)
        if cost > found.metrics.epsilon + _ROUNDING:
            raise RefusedError(
                f"the plan promises ε = {found.metrics.epsilon:g} at δ = {found.delta:g} for its "
                f"{found.metrics.releases} accuracies, but with noise of deviation "
                f"{found.metrics.deviation:g} they cost {shown(cost)}"
            )
    needed = planned_steps(method, plan.training, plan.training_rounds, found.sampling_rate)
    if found.steps < needed:
        raise RefusedError(f"the plan counts {found.steps} steps, but its {plan.training_rounds} rounds take {needed}")
    for average in planned_averages(method, plan.training_rounds):
        release, times = found.release(average.content), average.times(plan.training_rounds)
        if release is None or release.times < times:
            raise RefusedError(
                f"the plan counts {release.times if release else 0} noised releases of the {average.content}, but its "
                f"{plan.training_rounds} rounds take {times}"
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
        if promised is None:
            return None
        return Budget(epsilon([promised.event(promised.releases)], delta=plan.delta), plan.delta, of_run=True)
    allowed = consent.privacy.metrics_epsilon
    return Budget(allowed, consent.privacy.delta) if allowed is not None else None


class Account:
    """One run's charges to the ledger of a silo's images. ``sealed``: where the keys are of what is charged.

    Raises ``BudgetError`` if the ledger is damaged, or older than the journal.
    """

    def __init__(
        self,
        ledger: Ledger,
        plan: RunPlan,
        mechanism: PrivacyPlan,
        budget: Budget,
        door: Door,
        sealed: SealedKeys,
    ) -> None:
        self._ledger = ledger
        self._sealed = sealed
        self._taken_up: set[int] = set()
        """Charges that this process has made or gone on with: a second training of one name is another release."""
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
            steps = event.releases if isinstance(event, SharedGaussian) else steps
            charged[entry.purpose.round, entry.purpose.phase] = steps
        found: list[Event] = []
        steps = planned_steps(method, plan.training, plan.training_rounds, mechanism.sampling_rate) - sum(
            charged.values()
        )
        if steps > 0:
            found.append(mechanism.training(steps))
        for average in planned_averages(method, plan.training_rounds):
            release = mechanism.release(average.content)
            assert release is not None, "check_promise comes first"
            done = sum(phase == average.content for _, phase in charged)
            if average.lasting:
                done = self.kept.find(release) is not None
            if (times := average.times(plan.training_rounds) - done) > 0:
                found.append(release.event(times))
        return found

    def charge(self, round_number: int, phase: str, event: Event, reads: str) -> Paid:
        """Charges a training before its first step, or an average before it is drawn (see ``Ledger.charge``), and tells
        the journal.

        ``reads``: the hash of all that the release is made from, besides what it draws. What was charged before a crash
        and reads the same goes on under its key, at no cost. Where it does not, or the key is gone, the earlier charge
        is voided if the journal proves that nothing has left since; else both count.
        """
        subject, purpose = self._ledger.subject, Purpose(*self._purpose, round_number, phase)
        earlier = [
            entry
            for entry in self._own()
            if (entry.purpose, entry.event) == (purpose, event) and entry.index not in self._taken_up
        ]
        key = self._sealed.find(subject, purpose)
        for entry in earlier:
            if key is not None and (entry.seal, reads) == (key.sha256, key.reads):
                self._taken_up.add(entry.index)
                return Paid(entry.sha256, key.key)
        if earlier and event.kind not in LASTING:
            self._void(earlier)
        if isinstance(event, SharedGaussian):
            self._check_first(purpose)
        key = self._sealed.seal(subject, purpose, reads)
        entry = self._ledger.charge(event, purpose, self._budget, seal=key.sha256)
        self._taken_up.add(entry.index)
        self._door.note(LedgerRecord(charge=entry.describe(), **self._spent(entry)))
        return Paid(entry.sha256, key.key)

    def _check_first(self, purpose: Purpose) -> None:
        """Raises ``BudgetError`` where noise of this round may have left before. Two sums of a round, with another
        share of this hospital in each, have less noise together than either, and the others pay for one alone."""
        if any(entry.purpose == purpose for entry in self._ledger.of_run(self._purpose)):
            raise BudgetError(
                f"refused: this hospital's share of the noise of round {purpose.round + 1} was drawn before, and may "
                "have left; it cannot be drawn again, for the other hospitals' sakes. The run ends here; begin a new "
                "one, with another name"
            )

    def failed(self) -> None:
        """Tells the journal that the newest round's training failed by what came out of it: whoever leads the run may
        see that it did, so its charges are never voided."""
        begun = [entry for entry in self._own() if entry.index in self._taken_up]
        for entry in begun:
            if entry.purpose.round == begun[-1].purpose.round:
                self._door.note(LedgerRecord(charge=entry.describe(), failed=True))

    def _void(self, earlier: list[Entry]) -> None:
        """Voids the charges of which the journal told when they were made, and after which no update was sent, nor a
        training failed that they paid for."""
        told: dict[str, int] = {}
        for record in read_journal(self._door.journal.directory):
            match record:
                case MessageRecord() if record.rpc == UPDATE and record.direction == "sent":
                    told.clear()
                case LedgerRecord() if record.spent is not None:
                    told[record.charge["sha256"]] = record.index
                case LedgerRecord() if record.failed:
                    told.pop(record.charge["sha256"], None)
        for entry in earlier:
            if entry.sha256 in told:
                number = self._door.note(VoidRecord(charge=entry.describe(), charged=told[entry.sha256]))
                self._ledger.void(entry, party=self._door.identity, record=number)

    def _spent(self, entry: Entry) -> dict[str, Any]:
        """What all charges up to one have cost, as far as this journal proves that one of them does not count; and
        beside it, which whoever has the journal can add up, what the most-spent image has where others count in."""
        delta, adjacency = self._budget.delta, self._ledger.subject.adjacency
        told = self._ledger.entries(voided=True)[: entry.index]
        voids = {index for index, void in self._ledger.voids().items() if void.party == self._door.identity}
        events = [one.event for one in told if one.index not in voids]
        spent = epsilon(events, delta=delta, adjacency=adjacency)
        found = {"spent": describe_spent(spent, delta)}
        if (most := self._ledger.spending(delta)).inherited:
            found["unit_spent"] = describe_spent(max(most.epsilon, spent), delta)
        return found

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
        by_hash: dict[str, Mapping[str, Any]] = {}
        voided: dict[str, int] = {}
        for record in read_journal(self._door.journal.directory):  # in which messages name the same charges many times
            for charge in charges_of(record):
                by_hash[charge["sha256"]] = charge
            if isinstance(record, VoidRecord):
                voided[record.charge["sha256"]] = record.index
        self._ledger.check_holds(by_hash.values())
        known = {charge["index"] for charge in by_hash.values() if Subject.read(charge) == self._ledger.subject}
        entries = self._ledger.entries(voided=True)
        for entry in entries:
            if entry.index not in known:
                told = entry.describe()
                if entry.purpose.federation != self._plan.federation:
                    told.update(federation=None, run=None, plan_sha256=None, round=None, phase=None)
                self._door.note(LedgerRecord(charge=told))
        self._catch_up_with_voids(voided, {entry.sha256: entry for entry in entries})

    def _catch_up_with_voids(self, proven: dict[str, int], entries: dict[str, Entry]) -> None:
        """Voids what the journal says is voided: a crash may have come in between. The other way round is no accident.

        Raises ``BudgetError`` for a charge that the ledger says is voided by this journal, which does not say so.
        """
        for index, void in self._ledger.voids().items():
            if void.party == self._door.identity and proven.get(void.charge) != void.record:
                raise BudgetError(
                    f"{self._ledger.path}: charge {index} is voided by record {void.record} of this journal, which is "
                    "no such record: one of them is an older copy, or was changed. What these images have cost is not "
                    "known, and nothing is trained on them. `silo audit verify` says whether the journal is whole; "
                    "look where the newest of the other one was moved to. Only if it is lost, take it from a backup"
                )
        for sha256, number in proven.items():
            if sha256 in entries:
                self._ledger.void(entries[sha256], party=self._door.identity, record=number)


def sealed_keys(config: SiloConfig, plan: RunPlan) -> SealedKeys:
    """Beside what is kept of the run: who takes that away takes them along, and trains anew under new ones."""
    return SealedKeys(config.runs / plan.run / "sealed")
