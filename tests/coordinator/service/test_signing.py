"""What nothing follows is signed all the same, so that evidence of it can be had while the coordinator serves."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from medsilo.coordinator import daemon
from medsilo.privacy.audit.verification import verify_evidence
from medsilo.privacy.consent.gate import PlanGate
from medsilo.privacy.door.door import Door
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.journal.journal import Journal
from medsilo.privacy.journal.records import RefusalRecord


def test_the_newest_records_are_signed_without_another_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "_IDLE_SECONDS", 0.05)
    stopped = threading.Event()
    origin = "medsilo/test/coordinator/c"
    with Journal(tmp_path, key=Ed25519PrivateKey.generate(), origin=origin) as journal:
        door = Door(journal, identity="spiffe://test/coordinator/c", federation="test", gate=PlanGate(Exposure))
        signing = threading.Thread(target=daemon._sign_when_idle, args=(journal, door, stopped))
        signing.start()
        try:
            for _ in range(2):
                door.note(RefusalRecord(reason="a test"))
                deadline = time.monotonic() + 60
                while journal.signed < len(journal):
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                found = verify_evidence(tmp_path)
                assert (found.problem, found.unsigned) == ("", 0)
        finally:
            stopped.set()
            signing.join()
