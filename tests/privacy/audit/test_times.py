"""A record's time is its owner's word; what the other side has signed around it says whether it can be true."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from medsilo.privacy.audit.bundle import Selection, export
from medsilo.privacy.audit.times import TOLERANCE_SECONDS, Clockwork
from medsilo.privacy.audit.verification import verify_evidence
from medsilo.privacy.journal import journal as journal_module
from medsilo.privacy.journal.records import RunRecord
from medsilo.privacy.party.audit_commands import audit_app
from medsilo.privacy.party.party import PartyConfig
from medsilo.privacy.report.builder import make_report
from medsilo.privacy.report.page_one import answers, warnings
from tests.support.evidence.exchanging import CONSENT, COORDINATOR, SILO, Exchange, Party, key_of, meet

YEAR = timedelta(days=365)
_shift = [timedelta(0)]


class Planted(datetime):
    """A clock that is set otherwise while one of the parties looks at it."""

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return datetime.now(tz) + _shift[0]


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "datetime", Planted)


def live_at(party: Party, shift: timedelta) -> None:
    """From now on the party writes its records, and signs, by a clock that is so much ahead."""

    def by_its_clock(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def called(*arguments: Any, **options: Any) -> Any:
            before, _shift[0] = _shift[0], shift
            try:
                return method(*arguments, **options)
            finally:
                _shift[0] = before

        return called

    for name in ("append", "cosign", "checkpoint"):
        setattr(party.journal, name, by_its_clock(getattr(party.journal, name)))


def parted(folder: Path, silos: timedelta, coordinators: timedelta = timedelta(0)) -> Exchange:
    """Two rounds of two parties that live by these clocks from their first record on."""
    folder.mkdir(parents=True, exist_ok=True)
    one, other = Party(SILO, folder / "hospital1", key_of(1)), Party(COORDINATOR, folder / "coordinator", key_of(200))
    live_at(one, silos)
    live_at(other, coordinators)
    exchange = Exchange(one, other)
    other.door.note(RunRecord(**exchange.summary()))
    exchange.begin()
    exchange.rounds([0, 1])
    exchange.attest()
    exchange.close()
    return exchange


def test_honest_times_are_confirmed_by_the_other_sides_signatures(tmp_path: Path) -> None:
    exchange = parted(tmp_path, timedelta(0))
    for party, other in ((exchange.silo, exchange.coordinator), (exchange.coordinator, exchange.silo)):
        for peer in (None, other.folder):
            found = verify_evidence(party.folder, peer=peer)
            assert found.sound, found.sentences()
            times = found.times
            assert times.signed
            assert times.contradicted == 0
            assert times.first_contradicted is None
            assert times.confirmed + times.unconfirmed == found.records
            # Open are the first, before the other side had signed anything, and the last, which it has not seen.
            assert times.confirmed > found.records / 2
            assert f"{times.confirmed} confirmed" in " ".join(found.sentences())


@pytest.mark.parametrize("shift", [-YEAR, YEAR], ids=["last year", "next year"])
def test_a_silo_that_writes_other_dates_throughout_is_contradicted(tmp_path: Path, shift: timedelta) -> None:
    """No date is out of its order, and no signature fails: the coordinator's signed times alone tell."""
    exchange = parted(tmp_path, shift)
    for peer in (None, exchange.coordinator.folder):
        found = verify_evidence(exchange.silo.folder, peer=peer)
        assert not found.sound
        assert not found.problem, "every record is as it was signed"
        (finding,) = found.findings
        assert finding.kind == "contradiction"
        assert found.times.contradicted > found.records / 2
        assert finding.index == found.times.first_contradicted
        assert COORDINATOR in finding.what


def test_clocks_that_are_a_little_apart_contradict_nobody(tmp_path: Path) -> None:
    exchange = parted(tmp_path, timedelta(seconds=TOLERANCE_SECONDS - 30))
    for party in (exchange.silo, exchange.coordinator):
        found = verify_evidence(party.folder)
        assert found.sound, found.sentences()
        assert found.times.contradicted == 0


@pytest.mark.parametrize("expires_in", [-30, 30], ids=["ended since", "in force"])
def test_whether_a_consent_had_ended_is_judged_by_the_other_sides_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expires_in: int
) -> None:
    monkeypatch.setitem(CONSENT, "expires", f"{datetime.now(UTC) + timedelta(days=expires_in):%Y-%m-%d}")
    exchange = parted(tmp_path, -YEAR)
    found = verify_evidence(exchange.silo.folder, peer=exchange.coordinator.folder)
    outlived = [finding for finding in found.findings if "the consent had ended" in finding.what]
    assert len(outlived) == (expires_in < 0)
    assert not found.sound
    # With the right clock the same consent is one that has simply expired, by the silo's own word, or is in force.
    honest = verify_evidence(parted(tmp_path / "honest", timedelta(0)).silo.folder)
    assert honest.sound == (expires_in > 0), honest.sentences()


def test_one_hospitals_wrong_clock_does_not_contradict_a_coordinator_whom_others_confirm(tmp_path: Path) -> None:
    coordinator = Party(COORDINATOR, tmp_path / "coordinator", key_of(200))
    right = meet(tmp_path, coordinator=coordinator)
    wrong = Exchange(Party("spiffe://test/silo/hospital2", tmp_path / "hospital2", key_of(2)), coordinator)
    live_at(wrong.silo, -YEAR)
    wrong.begin()
    for number in range(3):
        wrong.rounds([number])
        right.rounds([number])
    right.attest()
    wrong.close()
    right.silo.journal.close()
    found = verify_evidence(coordinator.folder)
    assert found.sound, found.sentences()
    assert found.times.confirmed > found.records / 2
    assert found.times.alone == [wrong.silo.identity]
    assert f"The clock of {wrong.silo.identity} contradicts times that others confirm" in " ".join(found.sentences())
    assert not verify_evidence(wrong.silo.folder).sound
    assert verify_evidence(right.silo.folder).sound


def test_one_hospital_that_confirms_a_coordinators_wrong_dates_silences_none_of_several_that_do_not(
    tmp_path: Path,
) -> None:
    """Whoever writes other dates needs one friend among the hospitals, or invents one."""
    coordinator = Party(COORDINATOR, tmp_path / "coordinator", key_of(200))
    live_at(coordinator, -YEAR)
    honest = [
        Exchange(
            Party(f"spiffe://test/silo/hospital{number}", tmp_path / f"hospital{number}", key_of(number)), coordinator
        )
        for number in (1, 2)
    ]
    friend = Exchange(Party("spiffe://test/silo/friend", tmp_path / "friend", key_of(9)), coordinator)
    live_at(friend.silo, -YEAR)
    coordinator.door.note(RunRecord(**friend.summary()))
    for exchange in (friend, *honest):
        exchange.begin()
    for number in range(3):
        for exchange in (*honest, friend):
            exchange.rounds([number])
    for exchange in (*honest, friend):
        exchange.attest()
    coordinator.journal.close()
    found = verify_evidence(coordinator.folder)
    assert not found.sound
    assert found.times.contradicted > found.records / 2
    assert not set(found.times.alone) & {exchange.silo.identity for exchange in honest}


def test_a_stretch_has_no_signed_times_and_is_held_against_the_other_sides_journal(tmp_path: Path) -> None:
    for shift in (timedelta(0), -YEAR):
        exchange = parted(tmp_path / str(shift.days), shift)
        path = tmp_path / f"{shift.days}.json"
        export(exchange.silo.folder, path, select=Selection(first_round=1, last_round=1))
        alone = verify_evidence(path)
        assert alone.times.unconfirmed == alone.records
        found = verify_evidence(path, peer=exchange.coordinator.folder)
        assert not found.times.signed, found.sentences()
        assert found.sound == (not shift), found.sentences()
        assert (found.times.contradicted if shift else found.times.confirmed) > 0


def test_each_record_is_bounded_by_what_stands_before_and_after_it() -> None:
    start = datetime(2026, 3, 1, tzinfo=UTC)

    def at(minutes: float) -> str:
        moment = start + timedelta(minutes=minutes)
        return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def seconds(minutes: float) -> int:
        return int((start + timedelta(minutes=minutes)).timestamp())

    clock = Clockwork(first=100)
    for minutes in (0, 1, 30, 31):  # the third is far ahead of what follows
        clock.take(at(minutes))
    clock.signed("c", 102, seconds(2))  # brought by record 103, for the first two: nothing is known to be before them
    for minutes in (3, 20, 5, -40):
        clock.take(at(minutes))
    clock.signed("c", 107, seconds(6))
    clock.take(at(7))
    found = clock.conclude()
    # 103 says minute 31 and was seen at 6; 105 says 20; 107 says -40 and follows what was signed at 6. 102 says 30.
    assert (found.confirmed, found.contradicted, found.unconfirmed) == (2, 4, 3)
    assert found.first_contradicted == 102
    assert "had been seen by c at 2026-03-01 00:06:00 UTC" in found.contradiction
    assert found.widest == 240


def test_the_command_says_and_writes_it(tmp_path: Path) -> None:
    def none(_path: Path) -> PartyConfig:
        raise AssertionError

    exchange = parted(tmp_path, -YEAR)
    done = CliRunner().invoke(audit_app(none), ["verify", str(exchange.silo.folder)])
    assert done.exit_code == 1
    said = " ".join(done.output.split())
    assert "CONTRADICTION: the times of" in said
    assert "give or take 5 minutes" in said
    assert "NOT sound" not in said
    done = CliRunner().invoke(audit_app(none), ["verify", str(exchange.silo.folder), "--json"])
    assert '"first_contradicted"' in done.output
    assert '"tolerance_seconds": 300' in done.output


def test_a_report_says_that_the_times_are_contradicted_and_not_that_something_was_changed(tmp_path: Path) -> None:
    exchange = parted(tmp_path, -YEAR)
    report = make_report(exchange.silo.folder, key=exchange.silo.public)
    assert report.verification.sound
    (said,) = report.verification.contradicted
    assert said.startswith("CONTRADICTION: the times of")
    assert said in warnings(report)
    assert not any("NOT sound" in warning for warning in warnings(report))
    (answer,) = [answer for answer in answers(report) if answer.question == "Is the record sound?"]
    assert answer.tone == "attention"


@pytest.mark.parametrize("expires", ["9999-12-31", "9999-12-30", "0001-01-01"])
def test_a_consent_may_end_on_any_day_that_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expires: str
) -> None:
    """Some write the last one for "never"."""
    monkeypatch.setitem(CONSENT, "expires", expires)
    exchange = parted(tmp_path, timedelta(0))
    found = verify_evidence(exchange.silo.folder)
    if expires > "2000":
        assert found.sound, found.sentences()
    else:
        assert "it left after the consent had expired" in found.problem
