"""What a run's rounds decide, as a state machine: events in, decisions out. It holds no clock, thread or file.

A method of ``Machine`` takes a state and an event and gives a ``Step``: the decisions, which whoever drives the machine
carries out in their order, and the state that holds once all of them are on disk. After a crash, or where a database
does not say whether it has kept a change, the state is made anew from what is stored (``Machine.restored``). So all
orders of events and crashes can be tried: ``tests/coordinator/rounds/test_every_order.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from medsilo.coordinator.rounds.masked_round import MaskedRound
from medsilo.privacy.consent.early_end import EarlyEnd, EndReason
from medsilo.privacy.errors import LateError, MedsiloError, RefusedError
from medsilo.privacy.secure_aggregation.mask_keys import CertifiedKey, Roster
from medsilo.protos.medsilo.v1 import coordinator_pb2 as wire


@dataclass(frozen=True)
class Rules:
    """What the plan and the configuration say of rounds.

    Attributes:
        run: the run's name.
        silos: all that may take part.
        rounds: how many the plan has.
        start_with: how many silos the first round waits for; None for all.
        quorum: how many must deliver before a round may end at its deadline; None for all.
        minimum: the fewest silos of a masked sum; None without masks.
        is_masked: whether a round's updates come under masks.
        binds: whether all masked sums are of the same silos.
        all_bound: whether with them the rounds in between, too, are of these silos alone.
        draw: the silos of a round, of the members (sorted) and its number.
        roster: makes a roster of mask keys.
    """

    run: str
    silos: frozenset[str]
    rounds: int
    start_with: int | None
    quorum: int | None
    minimum: int | None
    is_masked: Callable[[int], bool]
    binds: bool
    draw: Callable[[Sequence[str], int], tuple[str, ...]]
    roster: Callable[[Iterable[CertifiedKey]], Roster] = Roster
    all_bound: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    """A round: which silos were asked, and which of them have delivered. Number ``rounds`` is the fetching of the
    end."""

    number: int
    asked: frozenset[str]
    delivered: frozenset[str] = frozenset()
    closed: bool = False


@dataclass(frozen=True, slots=True)
class State:
    """Where a run stands.

    ``bound``: the silos of all masked sums, once the first roster is fixed. ``closing``: the round's updates are being
    aggregated. ``overdue``: the open round's deadline has passed.
    """

    members: frozenset[str] = frozenset()
    withdrawn: frozenset[str] = frozenset()
    finished: bool = False
    early_end: EarlyEnd | None = None
    bound: tuple[str, ...] | None = None
    round: Round | None = None
    masks: MaskedRound | None = None
    closing: bool = False
    overdue: bool = False

    @property
    def number(self) -> int:
        """The current round; the number of rounds when the run has ended."""
        return self.round.number if self.round else 0

    @property
    def next_number(self) -> int:
        """The round that is open, or is to be opened next."""
        return self.number + (1 if self.round is not None and self.round.closed else 0)

    @property
    def is_done(self) -> bool:
        """Whether every participant has fetched the run's end."""
        return self.finished and self.round is not None and self.round.asked <= self.round.delivered


@dataclass(frozen=True, slots=True)
class Stored:
    """What the database says of a run. ``first_roster``: the silos of its first masked sum; ``roster``: those of the
    last round's, if that is fixed."""

    accepted: frozenset[str]
    withdrawn: frozenset[str]
    finished: bool
    early_end: EarlyEnd | None
    round: Round | None
    first_roster: tuple[str, ...] | None
    roster: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class OpenRound:
    """To be written: a round begins."""

    number: int
    silos: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FinishRun:
    """To be written: the run has ended, for these silos to fetch; ``early``: before its plan's last round, and in one
    with it that the round ``closes``, which is open and comes to nothing."""

    silos: tuple[str, ...]
    early: EarlyEnd | None = None
    closes: int | None = None


@dataclass(frozen=True, slots=True)
class AdmitToEnd:
    """To be written: one more silo may fetch the end."""

    silo: str


@dataclass(frozen=True, slots=True)
class WriteWithdrawal:
    """To be written: a silo's part has ended; ``open_round`` goes on without it. Then its updates are deleted."""

    silo: str
    open_round: int | None


@dataclass(frozen=True, slots=True)
class FixRoster:
    """To be written: these silos mask for each other, once and for all."""

    number: int
    silos: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RestartRound:
    """To be written: what was delivered in a masked round counts for nothing. Then it is deleted."""

    number: int


@dataclass(frozen=True, slots=True)
class WriteDelivery:
    """To be written: a silo's update, whose file is durable, with its receipt; then the receipt is given."""

    number: int
    silo: str


@dataclass(frozen=True, slots=True)
class Aggregate:
    """To be done: the aggregate of these silos' updates; of none where a masked round is given up. Then ``closed``."""

    number: int
    silos: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CloseRound:
    """To be written: a round has ended, with what was made of it."""

    number: int


@dataclass(frozen=True, slots=True)
class GiveEarlierReceipt:
    """To be answered: the receipt of the silo's accepted update of that round; the new file is deleted."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """To be answered: why not; the file is deleted."""

    error: MedsiloError


Decision = (
    OpenRound
    | FinishRun
    | AdmitToEnd
    | WriteWithdrawal
    | FixRoster
    | RestartRound
    | WriteDelivery
    | Aggregate
    | CloseRound
    | GiveEarlierReceipt
    | Refuse
)


@dataclass(frozen=True, slots=True)
class Step:
    """Decisions, and the state that holds once they have been carried out."""

    decisions: tuple[Decision, ...]
    state: State


@dataclass(frozen=True)
class Order:
    """A silo's next task."""

    kind: wire.TaskKind
    round: int
    roster: tuple[CertifiedKey, ...] = ()


class Machine:
    """Decides for one run; see the module."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    def restored(self, stored: Stored) -> Step:
        """Where the run stands by what is stored. Of a masked round whose roster is fixed all deliver again: mask keys
        are in memory alone."""
        state = State(
            members=(stored.accepted - stored.withdrawn) & self.rules.silos,
            withdrawn=stored.withdrawn,
            finished=stored.finished,
            early_end=stored.early_end,
            bound=stored.first_roster if self.rules.binds else None,
            round=stored.round,
        )
        opened = stored.round
        if opened is None or opened.closed or not self._is_masked(opened.number):
            return Step((), state)
        masks = MaskedRound(opened.number, silos=stored.roster)
        if stored.roster is None:
            return Step((), replace(state, masks=masks))
        return self._mask_again(replace(state, masks=masks))

    def joined(self, state: State, silo: str, *, has_withdrawn: bool) -> Step:
        """A silo has accepted the plan, which is stored already; ``has_withdrawn``: and a withdrawal after that."""
        if has_withdrawn:
            return Step((), state)
        state = replace(state, members=state.members | {silo}, withdrawn=state.withdrawn - {silo})
        end = state.round
        if not state.finished or end is None or silo in end.asked:
            return Step((), state)
        return Step((AdmitToEnd(silo),), replace(state, round=replace(end, asked=end.asked | {silo})))

    def comes_too_late(self, state: State, silo: str) -> bool:
        """Whether the masked sums that are left are of others."""
        return state.bound is not None and silo not in state.bound and self._is_of_bound(state.next_number)

    def withdrawn(self, state: State, silo: str) -> Step:
        """A silo has taken its consent back. The open round goes on without it; a round that is being closed comes to
        its end before."""
        left = state.round
        # Who has fetched the end stays in its list.
        if left is None or silo not in left.asked or left.closed or (state.finished and silo in left.delivered):
            open_round = None
        else:
            open_round = left.number
            left = replace(left, asked=left.asked - {silo}, delivered=left.delivered - {silo})
        state = replace(state, members=state.members - {silo}, withdrawn=state.withdrawn | {silo}, round=left)
        return Step((WriteWithdrawal(silo, open_round),), state)

    def key_stated(self, state: State, silo: str, key: CertifiedKey) -> Step:
        """A silo that has trained states its mask key; one that has lost the key that others count on makes all mask
        again."""
        masks, current = state.masks, state.round
        if masks is None or current is None or silo not in current.asked or masks.number != key.round or state.closing:
            return Step((), state)
        state = replace(state, masks=masks.with_offer(key))
        if silo not in current.delivered and masks.has_lost_its_key(silo, key):
            return self._mask_again(state)
        return Step((), state)

    def order(self, state: State, silo: str, key: CertifiedKey | None = None) -> Order | None:
        """The silo's next task; None where it is to wait. ``key``: the mask key that it states."""
        current = state.round
        if current is None or current.closed or state.closing:
            return None
        if silo not in current.asked or silo in current.delivered:
            # A silo that asks again after the end has lost the answer: the end is told as often as it is asked.
            return Order(wire.TASK_KIND_FINISH, current.number) if state.finished else None
        if (masks := state.masks) is not None and key is not None and key.round == masks.number:
            # It has trained, and waits to hear with whom to mask.
            due = masks.roster if masks.is_due(silo, key) else None
            return Order(wire.TASK_KIND_MASK, current.number, tuple(due.keys.values())) if due else None
        return Order(wire.TASK_KIND_FINISH if state.finished else wire.TASK_KIND_TRAIN, current.number)

    def offered(
        self, state: State, silo: str, number: int, roster_sha256: bytes = b"", *, before: bool | None = None
    ) -> GiveEarlierReceipt | Refuse | None:
        """What to answer to an update whose header has come; None if it is to be taken.

        ``roster_sha256``: what a masked update was masked for. ``before``: whether the silo delivered that round, where
        it is an earlier one; None if it was not asked.
        """
        opened = state.round if state.round is not None and state.round.number == number else None
        if opened is not None:
            before = silo in opened.delivered if silo in opened.asked else None
        if before is None:
            return Refuse(
                RefusedError(
                    f"round {number} is not one that {silo} was asked to train; the run is in round {state.number}"
                )
            )
        if opened is not None and state.masks is not None and not state.masks.is_for(roster_sha256):
            return Refuse(LateError(f"round {number} is done again with fresh masks; this update is not used"))
        if before:
            return GiveEarlierReceipt()
        if opened is None or opened.closed or state.closing:
            return Refuse(
                LateError(
                    f"round {number} has ended without {silo}; the run is in round {state.number}, and this update is "
                    "not used"
                )
            )
        return None

    def delivered(
        self, state: State, silo: str, number: int, roster_sha256: bytes = b"", *, before: bool | None = None
    ) -> Step:
        """A complete, checked and durable update is there; arguments as of ``offered``."""
        if silo in state.withdrawn:
            error = RefusedError(f"{silo} has withdrawn from run {self.rules.run}; this update is not used")
            return Step((Refuse(error),), state)
        answer = self.offered(state, silo, number, roster_sha256, before=before)
        if answer is not None or state.round is None:
            return Step((answer,) if answer else (), state)
        current = replace(state.round, delivered=state.round.delivered | {silo})
        masks = state.masks.without_offer(silo) if state.masks is not None else None
        return Step((WriteDelivery(number, silo),), replace(state, round=current, masks=masks))

    def deadline(self, state: State) -> tuple[int, bool] | None:
        """The round whose deadline runs, and whether from when its roster was fixed on instead of from its opening."""
        current, masks = state.round, state.masks
        if current is None or current.closed or state.finished or state.overdue:
            return None
        if masks is not None and state.bound is not None:
            return None  # nothing is done without one of these
        return current.number, masks is not None and masks.silos is not None

    def deadline_passed(self, state: State) -> Step:
        """The deadline of ``deadline`` has passed."""
        return Step((), replace(state, overdue=True))

    def due(self, state: State) -> Step | None:
        """What the run does next by itself; None if it waits for somebody."""
        if state.finished or state.closing:
            return None
        if self._is_deserted(state):
            return self._end_early(state)
        current, masks = state.round, state.masks
        if current is None:
            here = len(self.rules.silos) - len(state.withdrawn)
            if len(state.members) < min(self.rules.start_with or here, here):
                return None
        if current is None or current.closed:
            return self._open_next(state)
        if masks is None:
            if not self._may_close(state, current):
                return None
            return Step((Aggregate(current.number, tuple(sorted(current.delivered))),), replace(state, closing=True))
        is_lost = self._is_lost(state, masks, current)
        if not is_lost and (silos := self._next_roster(state, masks, current)):
            return self._fix_roster(state, masks, silos)
        is_complete = masks.is_complete(current.delivered)
        if not is_lost and not is_complete:
            return None
        summed = masks.silos if is_complete and masks.silos is not None else ()
        return Step((Aggregate(current.number, summed),), replace(state, closing=True))

    def closed(self, state: State, *, used: bool) -> Step:
        """What ``Aggregate`` asked for has been computed; ``used``: of any update."""
        decisions: tuple[Decision, ...] = ()
        if state.masks is not None and not used:
            decisions, state = (again := self._mask_again(state)).decisions, again.state
        assert state.round is not None
        after = replace(state, round=replace(state.round, closed=True), masks=None, closing=False, overdue=False)
        return Step((*decisions, CloseRound(state.round.number)), after)

    def chosen(self, state: State, number: int) -> tuple[str, ...]:
        """The silos of a round that is to be opened."""
        if state.bound is not None and self._is_of_bound(number):
            return state.bound
        return self.rules.draw(sorted(state.members), number)

    def _is_masked(self, number: int) -> bool:
        return self.rules.minimum is not None and self.rules.is_masked(number)

    def _is_of_bound(self, number: int) -> bool:
        """Whether a round is of the silos of the masked sums."""
        return self._is_masked(number) or (self.rules.all_bound and number < self.rules.rounds)

    def _mask_again(self, state: State) -> Step:
        assert state.masks is not None
        assert state.round is not None
        state = replace(
            state, masks=replace(state.masks, roster=None), round=replace(state.round, delivered=frozenset())
        )
        return Step((RestartRound(state.number),), state)

    def _open_next(self, state: State) -> Step | None:
        number = 0 if state.round is None else state.round.number + 1
        if number == self.rules.rounds:
            silos = tuple(sorted(state.members))
            return Step((FinishRun(silos),), replace(state, finished=True, round=Round(number, frozenset(silos))))
        silos = self.chosen(state, number)
        masks = None
        if self.rules.minimum is not None and self._is_masked(number):
            if len(silos) < self.rules.minimum:
                return None
            masks = MaskedRound(number)
        opened = replace(state, round=Round(number, frozenset(silos)), masks=masks, overdue=False)
        return Step((OpenRound(number, silos),), opened)

    def _fix_roster(self, state: State, masks: MaskedRound, silos: tuple[str, ...]) -> Step:
        first = masks.silos is None
        masks = replace(masks, silos=silos, roster=self.rules.roster(masks.keys_of(silos)))
        bound = silos if self.rules.binds and state.bound is None else state.bound
        state = replace(state, masks=masks, bound=bound, overdue=state.overdue and not first)
        return Step((FixRoster(masks.number, silos),), state)

    def _next_roster(self, state: State, masks: MaskedRound, current: Round) -> tuple[str, ...] | None:
        quorum = self.rules.quorum
        return masks.next_silos(
            current.asked,
            minimum=self.rules.minimum or 0,
            quorum=quorum or 0,
            overdue=quorum is not None and state.overdue and state.bound is None,
        )

    def _is_lost(self, state: State, masks: MaskedRound, current: Round) -> bool:
        """Whether a masked round can come to no sum: its silos cannot be others once a roster is fixed."""
        silos = masks.silos or state.bound
        if silos is None:
            return len(current.asked) < (self.rules.minimum or 0)
        if not current.asked.issuperset(silos):
            return True
        if state.bound is not None:
            return False  # it waits for them: the next round would need the same silos
        return self.rules.quorum is not None and state.overdue and not masks.is_complete(current.delivered)

    def _may_close(self, state: State, current: Round) -> bool:
        asked, delivered, quorum = len(current.asked), len(current.delivered), self.rules.quorum
        return delivered == asked or (quorum is not None and state.overdue and delivered >= min(quorum, asked))

    def _is_deserted(self, state: State) -> bool:
        """Whether all hospitals have withdrawn: before the start all that may take part, later all that did; of a
        masked run, one without whom there is no further sum."""
        if self._lacks_a_masker(state):
            return True
        if state.members or not state.withdrawn:
            return False
        return state.round is not None or state.withdrawn >= self.rules.silos

    def _lacks_a_masker(self, state: State) -> bool:
        """Whether masked rounds are left, and too few hospitals for a sum, or not those of the sums before."""
        if self.rules.minimum is None or not self._is_of_bound(state.next_number):
            return False
        left = self.rules.silos - state.withdrawn
        return len(left) < self.rules.minimum or not left.issuperset(state.bound or ())

    def _end_early(self, state: State) -> Step:
        current = state.round
        is_open = current is not None and not current.closed
        early = EarlyEnd(state.number if is_open else state.next_number, self._why_early(state))
        silos = tuple(sorted(state.members))
        after = replace(
            state,
            finished=True,
            early_end=early,
            round=Round(self.rules.rounds, frozenset(silos)),
            masks=None,
            overdue=False,
        )
        return Step((FinishRun(silos, early, closes=state.number if is_open else None),), after)

    def _why_early(self, state: State) -> EndReason:
        if not state.members:
            return EndReason.WITHDRAWN
        if not state.withdrawn.intersection(state.bound or ()):
            return EndReason.TOO_FEW_FOR_MASKS
        return EndReason.WITHDRAWN_FROM_MASKS
