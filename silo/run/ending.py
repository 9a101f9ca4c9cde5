"""How a hospital's part in a run ends before the run does: record, signed withdrawal, and the coordinator is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from medsilo.privacy.consent.early_end import Cause
from medsilo.privacy.consent.gate import FarewellGate
from medsilo.privacy.consent.withdrawal import EndedError, History, Part, SignedWithdrawal, timestamp
from medsilo.privacy.door.door import Door
from medsilo.privacy.errors import ConsentError, DiskError, IdentityError, JournalError, JournalInUseError, MedsiloError
from medsilo.privacy.identity.envelope import from_json, to_json
from medsilo.privacy.identity.keys import load_audit_key
from medsilo.privacy.journal.journal import Journal
from medsilo.privacy.journal.records import WithdrawalRecord
from medsilo.privacy.report.words import updates_arrived
from medsilo.silo.state.config import SiloConfig
from medsilo.silo.state.withdrawal_request import WithdrawalRequest
from medsilo.silo.uplink.uplink import Uplink

TELLING_SECONDS = 10.0
"""How long an ending silo tries to tell the coordinator."""


class Ending:
    """Ends a silo's part. ``uplink``: None where there is none yet; it is made if the coordinator is to be told."""

    def __init__(
        self,
        config: SiloConfig,
        door: Door,
        key: Ed25519PrivateKey,
        uplink: Uplink | None,
        notice: Callable[[str], None],
    ) -> None:
        self._config = config
        self._door = door
        self._key = key
        self._uplink = uplink
        self._notice = notice

    def conclude(self, error: ConsentError) -> ConsentError:
        """Records the end and tells the coordinator, as far as there was a part to end; the error that says so."""
        cause = error.cause if isinstance(error, EndedError) else Cause.NARROWED
        history = History.read(self._config.journal)
        part = history.last
        if cause == Cause.WITHDRAWN:
            if history.withdrawal is None:
                self._record(part, cause)
        elif part is None or part.ended:
            return error
        elif part.withdrawal is None:
            self._record(part, cause)
        if part is None:
            return error
        part = History.read(self._config.journal).parts[part.plan_sha256]
        told = f"{self._config.coordinator_identity.uri} has been told." if part.told else self._tell(part)
        return EndedError(cause, f"{error}\n{describe(part)}\n{told}")

    def _record(self, part: Part | None, cause: Cause) -> None:
        config = self._config
        asked = WithdrawalRequest.read(config.withdrawal) if cause == Cause.WITHDRAWN else None
        signed = SignedWithdrawal(
            federation=config.federation,
            silo=config.identity.uri,
            coordinator=config.coordinator_identity.uri,
            run=part.run if part else None,
            plan_sha256=part.plan_sha256 if part else None,
            rounds_acknowledged=tuple(sorted(part.acknowledged)) if part else (),
            reason=cause,
            at=timestamp(),
        )
        self._door.note(
            WithdrawalRecord(
                run=signed.run,
                plan_sha256=signed.plan_sha256,
                rounds_acknowledged=list(signed.rounds_acknowledged),
                cause=cause.value,
                reason=asked.reason if asked and asked.reason else cause.value,
                statement=to_json(signed.sign(self._key)),
            )
        )
        self._door.journal.checkpoint()

    def _tell(self, part: Part) -> str:
        assert part.withdrawal is not None
        coordinator = self._config.coordinator_identity.uri
        mine = None
        try:
            envelope = from_json(part.withdrawal.statement)
            uplink = self._uplink
            if uplink is None:
                uplink = mine = Uplink(self._config, self._config.open_credentials(), self._door, notice=self._notice)
            uplink.use(self._door.through(FarewellGate()), None)
            uplink.withdraw(part.run, bytes.fromhex(part.plan_sha256), envelope, seconds=TELLING_SECONDS)
        except (JournalError, DiskError):
            raise
        except MedsiloError as error:
            again = "silo consent withdraw" if self._config.withdrawal.exists() else "silo train"
            return f"{coordinator} could NOT be told: {error}\nNothing is sent all the same; `{again}` tries again."
        finally:
            if mine is not None:
                mine.close()
        return f"{coordinator} has been told."


def conclude_alone(config: SiloConfig, error: ConsentError, notice: Callable[[str], None]) -> ConsentError:
    """``Ending.conclude`` while no daemon runs; raises ``JournalInUseError`` if one does."""
    with own_journal(config) as (door, key):
        return Ending(config, door, key, None, notice).conclude(error)


@contextmanager
def own_journal(config: SiloConfig) -> Iterator[tuple[Door, Ed25519PrivateKey]]:
    """The journal, opened for a command that sends nothing but a withdrawal."""
    key = load_audit_key(config.keys / "audit.key")
    with Journal(config.journal, key=key, origin=config.journal_origin) as journal:
        yield Door(journal, identity=config.identity.uri, federation=config.federation, gate=FarewellGate()), key


def refuse_withdrawn(config: SiloConfig, notice: Callable[[str], None]) -> ConsentError:
    """The error of a silo that is started while its consent is withdrawn; what a crash left undone is done first."""
    error = EndedError(
        Cause.WITHDRAWN,
        "the hospital has withdrawn its consent; nothing is sent. To take part again, look at the consent file and run "
        "`silo consent give`",
    )
    try:
        return conclude_alone(config, error, notice)
    except (IdentityError, JournalInUseError):
        return error


def describe(part: Part) -> str:
    """How a part ended, for people: rounds are counted from 1."""
    assert part.withdrawal is not None
    rounds = part.withdrawal.rounds_acknowledged
    unlearned = "; models made of the others stay as they are (nothing was unlearned)" if rounds else ""
    return (
        f"The hospital's part in run {part.run} has ended ({part.withdrawal.cause}); "
        f"{updates_arrived(rounds)}{unlearned}."
    )
