"""The gates in doors: a silo's decides message by message whether bytes may leave, on the consent as it is now.

A consent lives on while a run goes on: it is withdrawn, it expires, its file is changed, its rounds are used up. The
gate looks before every message, which costs two calls to ``stat`` and a comparison of dates.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import date
from pathlib import Path

from medsilo.privacy.consent.consent import Consent, ConsentFile, Missing, today
from medsilo.privacy.consent.early_end import Cause
from medsilo.privacy.consent.plan import Proposal
from medsilo.privacy.consent.withdrawal import EndedError
from medsilo.privacy.errors import ConfigurationError, ConsentError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.identity.identity import Identity

_SETTLING_SECONDS = 0.2
"""A file that is being written is read again after this time, until it has not changed."""

Changed = Callable[[ConsentFile, str | None], object]


class ConsentGate:
    """Lets pass what the consent allows, as long as it lasts.

    Before a plan is joined only PROTOCOL and IDENTITY pass; afterwards the plan's classes, as far as the consent
    holds them. A consent file that is changed on the way takes effect at the next message where it allows less, and
    at the next start where it allows more.

    Args:
        file: the consent as it was read when this gate was made: more than that never passes.
        coordinator: who gets what leaves.
        plan: the run that is joined.
        withdrawal: a file that exists while the consent is withdrawn.
        changed: called with a changed consent file, and with what is wrong with it if it cannot be used.
        rounds: rounds of the run for which something was sent already.
        earlier_rounds: how many rounds of other runs with this coordinator something was sent for.
        day: tells the day, UTC.
    """

    def __init__(
        self,
        file: ConsentFile,
        coordinator: Identity,
        plan: Proposal | None = None,
        *,
        withdrawal: Path | None = None,
        changed: Changed = lambda _file, _problem: None,
        rounds: Iterable[int] = (),
        earlier_rounds: int = 0,
        day: Callable[[], date] = today,
    ) -> None:
        self.file = file
        self.coordinator = coordinator
        self.plan = plan
        self._withdrawal = withdrawal
        self._changed = changed
        self._rounds = set(rounds)
        self._earlier_rounds = earlier_rounds
        self._steps: dict[int, int] = {}
        self._day = day
        self._lock = threading.RLock()
        self._holding = 0
        self._current = file
        self._problem: str | None = None
        self._mark = self._first_mark()

    def joining(self, plan: Proposal, *, rounds: Iterable[int], earlier_rounds: int = 0) -> ConsentGate:
        """The gate of a run."""
        return ConsentGate(
            self.file,
            self.coordinator,
            plan,
            withdrawal=self._withdrawal,
            changed=self._changed,
            rounds=rounds,
            earlier_rounds=earlier_rounds,
            day=self._day,
        )

    def allowed(self) -> frozenset[Exposure]:
        """The classes that may leave now."""
        asked = {Exposure.PROTOCOL, Exposure.IDENTITY}
        if self.plan:
            asked.update(self.plan.required, self.plan.optional)
        if self._accuracies_cost_too_much():
            asked.discard(Exposure.LOCAL_METRICS)
        return frozenset(asked) & self.file.consent.classes & self._current.consent.classes

    def check(self, classes: Iterable[Exposure]) -> None:
        """Raises ``ConsentError`` if a class may not leave; ``EndedError`` if nothing may any more."""
        with self._lock:
            self._check_withdrawal()
            self._read_again()
            self._check_lasting()
            missing = self._current.missing_to_ask(self.coordinator, day=self._day())
            allowed = self.allowed()
            lacking = tuple(exposure for exposure in classes if exposure not in allowed)
            if missing or lacking:
                everything = Missing(lacking or missing.classes, None, missing.coordinator, None, missing.expired)
                raise self._current.refusal(everything, "this message")

    def check_witness(self, key: str, classes: Iterable[Exposure]) -> None:
        """Raises as ``check`` does if bytes of these classes may not go to the witness of that key."""
        with self._lock:
            self._check_withdrawal()
            self._read_again()
            self._check_lasting()
            for consent in self.consents:
                if consent.witnesses is None or key not in consent.witnesses.keys:
                    raise ConsentError(
                        f"refused: the consent in {self.file.path} does not name this witness (`witnesses: keys: "
                        f"[{key}]`)"
                    )
                if extra := set(classes) - consent.classes:
                    names = ", ".join(sorted(extra))
                    raise ConsentError(f"refused: the consent in {self.file.path} lacks {names} (under `exposures:`)")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Meanwhile the consent is the one that the journal told of last: what is decided here is recorded before a
        file that has been changed since is read, and recorded."""
        with self._lock:
            self._read_again()
            self._holding += 1
            try:
                yield
            finally:
                self._holding -= 1

    def begin_round(self, number: int) -> None:
        """Counts a round of the run, once however often it is tried.

        Raises ``EndedError`` if the consent's rounds are used up.
        """
        with self._lock:
            self.check(())
            planned = None if self.plan is None else self.plan.rounds
            if number in self._rounds or (planned is not None and number >= planned):
                return
            most = min(self.file.consent.rounds, self._current.consent.rounds)
            if len(self._rounds) >= most:
                raise EndedError(
                    Cause.ROUNDS,
                    f"refused: the consent in {self.file.path} allows {most} rounds of one run, and the hospital has "
                    f"taken part in {len(self._rounds)}; nothing of round {number + 1} is sent",
                )
            taken = self._earlier_rounds + len(self._rounds)
            total = min((t for c in self.consents if (t := c.total_rounds) is not None), default=None)
            if total is not None and taken >= total:
                raise EndedError(
                    Cause.ROUNDS,
                    f"refused: the consent in {self.file.path} allows {total} rounds of all runs together, and the "
                    f"hospital has taken part in {taken}; nothing of round {number + 1} is sent",
                )
            self._rounds.add(number)

    def begin_steps(self, round_number: int, steps: int) -> None:
        """Counts steps of local training that are about to be taken in a round.

        Raises ``EndedError`` if they are more than the consent allows in a round.
        """
        with self._lock:
            self.check(())
            taken = self._steps.get(round_number, 0) + steps
            most = min(consent.training.steps for consent in self.consents)
            if taken > most:
                raise EndedError(
                    Cause.NARROWED,
                    f"refused: the consent in {self.file.path} allows {most} steps of training in a round "
                    f"(`training: steps:`), and round {round_number + 1} goes on to {taken}; nothing of it is sent",
                )
            self._steps[round_number] = taken

    @property
    def consents(self) -> tuple[Consent, Consent]:
        """As it was read first, and as it is now; of each bound the smaller holds."""
        return self.file.consent, self._current.consent

    def _accuracies_cost_too_much(self) -> bool:
        """Whether the consent gives less for the run's noised accuracies than when it began."""
        before, now = (consent.privacy for consent in self.consents)
        if self.plan is None or self.plan.privacy is None or before is None or now is None:
            return False
        return (now.metrics_epsilon or 0.0) < (before.metrics_epsilon or 0.0)

    def _check_withdrawal(self) -> None:
        if self._withdrawal is not None and self._withdrawal.exists():
            raise EndedError(Cause.WITHDRAWN, "the hospital has withdrawn its consent; nothing more is sent")

    def _check_lasting(self) -> None:
        if self._problem is not None:
            raise EndedError(
                Cause.NARROWED,
                f"refused: the consent file was changed and cannot be used, so nothing is sent: {self._problem}",
            )
        day = self._day()
        for file in (self._current, self.file):
            if expired := file.missing_to_ask(self.coordinator, day=day).expired:
                raise EndedError(Cause.EXPIRED, str(file.refusal(Missing(expired=expired), "this message")))
        if self.plan is not None and self._current.sha256 != self.file.sha256:
            missing = self._current.missing_for(self.plan, day=day)
            lowered = self._current.consent.lowered_from(self.file.consent, self.plan)
            # Rounds end it when they are reached.
            missing = dataclasses.replace(missing, rounds=None, total_rounds=None, privacy=missing.privacy + lowered)
            if missing:
                error = self._current.refusal(missing, f"run {self.plan.run} any more")
                raise EndedError(Cause.NARROWED, str(error))

    def _read_again(self) -> None:
        path = self.file.path
        if path is None or self._holding or (mark := _mark(path)) == self._mark:
            return
        before = self._current.sha256, self._problem
        self._current, self._problem = _settled(path)
        self._mark = mark
        if (self._current.sha256, self._problem) != before:
            self._changed(self._current, self._problem)

    def _first_mark(self) -> tuple[int, ...] | None:
        """The mark of the file as it was read; an empty one if it has changed since."""
        path = self.file.path
        if path is None:
            return None
        mark = _mark(path)
        return mark if mark and _digest(path) == self.file.sha256 else ()


class FarewellGate:
    """Lets a withdrawal pass, which ends what there was consent to: PROTOCOL and IDENTITY, nothing else."""

    held = nullcontext

    def check(self, classes: Iterable[Exposure]) -> None:
        """Raises ``EndedError`` for any other class."""
        if extra := set(classes) - {Exposure.PROTOCOL, Exposure.IDENTITY}:
            raise EndedError(Cause.WITHDRAWN, f"the consent has ended; {', '.join(sorted(extra))} is not sent")


class WitnessGate:
    """A hospital's gate towards one witness, by its key (``name+hash+key``)."""

    def __init__(self, gate: ConsentGate, key: str) -> None:
        self._gate = gate
        self._key = key
        self.held = gate.held

    def check(self, classes: Iterable[Exposure]) -> None:
        """Raises ``ConsentError`` for what the consent does not let go there."""
        self._gate.check_witness(self._key, classes)


class PlanGate:
    """What the coordinator may send: the plan's downlink, and nothing that silos were not told of."""

    def __init__(self, downlink: Iterable[Exposure]) -> None:
        self._allowed = frozenset(downlink) | {Exposure.PROTOCOL, Exposure.IDENTITY}

    held = nullcontext

    def check(self, classes: Iterable[Exposure]) -> None:
        """Raises ``ConsentError`` for a class outside the plan."""
        extra = [exposure for exposure in classes if exposure not in self._allowed]
        if extra:
            raise ConsentError(f"the plan does not announce {', '.join(extra)}; it is not sent")


def _mark(path: Path) -> tuple[int, ...] | None:
    """What tells cheaply that a file was changed; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _settled(path: Path) -> tuple[ConsentFile, str | None]:
    """A changed file's consent, read when it has stopped changing; consent to nothing, and why, if it is unusable."""
    while True:
        before = _digest(path)
        time.sleep(_SETTLING_SECONDS)
        problem = None
        try:
            found = ConsentFile.read(path)
        except ConfigurationError as error:
            found, problem = ConsentFile(path, Consent(), before or ""), str(error)
        except OSError as error:
            found, problem = ConsentFile(path, Consent(), ""), f"{path}: cannot be read: {error}"
        if (before or "") == found.sha256 == (_digest(path) or ""):
            return found, problem
