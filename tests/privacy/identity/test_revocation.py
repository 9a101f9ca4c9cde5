"""The CA's revocation list: what stands in it, who believes it, and that a damaged or older one takes nothing back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cryptography import x509

from medsilo.privacy.errors import IdentityError
from medsilo.privacy.identity.authority import create_authority, issue
from medsilo.privacy.identity.endpoint import TlsFiles
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.identity.keys import create_keys
from medsilo.privacy.identity.revocation import LIST, LiveCredentials, revoke

HOSPITAL = Identity("test", "silo", "hospital1")
COORDINATOR = Identity("test", "coordinator", "coordinator")


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    create_authority(tmp_path / "ca", "test")
    return tmp_path / "ca"


def enrol(ca: Path, folder: Path, identity: Identity, *, days: int = 365) -> bytes:
    paths = create_keys(folder, identity)
    issue(ca, identity.name, paths.request, folder / "tls.pem", role=identity.role, days=days)
    (folder / "ca.pem").write_bytes((ca / "ca.pem").read_bytes())
    return (folder / "tls.pem").read_bytes()


@pytest.fixture
def live(ca: Path, tmp_path: Path) -> LiveCredentials:
    enrol(ca, tmp_path / "coordinator", COORDINATOR)
    return LiveCredentials(TlsFiles.beside(tmp_path / "coordinator"), COORDINATOR)


def put(ca: Path, live: LiveCredentials) -> Path:
    path = live._files.revoked
    assert path is not None
    path.write_bytes((ca / LIST).read_bytes())
    return path


def test_what_was_issued_is_revoked_and_what_is_issued_afterwards_counts(
    ca: Path, tmp_path: Path, live: LiveCredentials
) -> None:
    old = enrol(ca, tmp_path / "h1", HOSPITAL)
    other = enrol(ca, tmp_path / "h2", Identity("test", "silo", "hospital2"))
    assert live.identify(old) == HOSPITAL
    (serial,) = revoke(ca, "hospital1")
    assert int(serial, 16) == x509.load_pem_x509_certificate(old).serial_number
    assert live.identify(old) == HOSPITAL, "as long as the coordinator does not have the list"
    put(ca, live)
    with pytest.raises(IdentityError, match=r"of spiffe://test/silo/hospital1 was revoked on \d{4}-"):
        live.identify(old)
    assert live.identify(other).name == "hospital2"
    issue(ca, "hospital1", tmp_path / "h1" / "tls.csr", tmp_path / "h1" / "tls.pem")
    assert live.identify((tmp_path / "h1" / "tls.pem").read_bytes()) == HOSPITAL


def test_one_certificate_of_several_is_revoked_by_its_serial_number(
    ca: Path, tmp_path: Path, live: LiveCredentials
) -> None:
    old = enrol(ca, tmp_path / "h1", HOSPITAL)
    issue(ca, "hospital1", tmp_path / "h1" / "tls.csr", tmp_path / "h1" / "tls.pem")
    revoke(ca, "hospital1", serial=f"{x509.load_pem_x509_certificate(old).serial_number:X}")
    put(ca, live)
    with pytest.raises(IdentityError, match="revoked"):
        live.identify(old)
    assert live.identify((tmp_path / "h1" / "tls.pem").read_bytes()) == HOSPITAL


@pytest.mark.parametrize("name", ["hospital9", "coordinator"])
def test_nobody_is_revoked_by_a_name_that_got_no_certificate(ca: Path, live: LiveCredentials, name: str) -> None:
    with pytest.raises(IdentityError, match="no certificate was issued to spiffe://test/silo/"):
        revoke(ca, name)
    assert not (ca / LIST).exists()


@pytest.mark.parametrize("change", ["older", "of another CA", "damaged", "empty", "gone", "a certificate"])
def test_a_list_that_cannot_be_used_takes_nothing_back(
    ca: Path, tmp_path: Path, live: LiveCredentials, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    old, second = (enrol(ca, tmp_path / n, Identity("test", "silo", n)) for n in ("hospital1", "hospital2"))
    revoke(ca, "hospital1")
    earlier = (ca / LIST).read_bytes()
    revoke(ca, "hospital2")
    path = put(ca, live)
    create_authority(tmp_path / "stranger", "test")
    enrol(tmp_path / "stranger", tmp_path / "x", Identity("test", "silo", "hospital3"))
    revoke(tmp_path / "stranger", "hospital3")
    live.current  # noqa: B018 takes the list up
    content = {
        "older": earlier,
        "of another CA": (tmp_path / "stranger" / LIST).read_bytes(),
        "damaged": path.read_bytes()[:-60],
        "empty": b"",
        "a certificate": old,
    }
    path.write_bytes(content[change]) if change != "gone" else path.unlink()
    for pem in (old, second):
        with pytest.raises(IdentityError, match="was revoked"):
            live.identify(pem)
    assert "what was read before counts on" in caplog.text
    if change not in ("older", "gone"):
        with pytest.raises(IdentityError, match="revocation list"):
            LiveCredentials(TlsFiles.beside(tmp_path / "coordinator"), COORDINATOR)


def test_a_renewed_certificate_is_taken_up_and_a_damaged_one_is_not(
    ca: Path, tmp_path: Path, live: LiveCredentials, caplog: pytest.LogCaptureFixture
) -> None:
    before = live.current
    path = tmp_path / "coordinator" / "tls.pem"
    issue(ca, "coordinator", tmp_path / "coordinator" / "tls.csr", path, role="coordinator")
    renewed = live.current
    assert renewed.certificate_sha256 != before.certificate_sha256
    path.write_bytes(b"half of a certif")
    os.utime(path, ns=(1, 1))
    assert live.current == renewed
    assert "what was read before counts on" in caplog.text


def test_a_certificate_whose_time_has_not_come_or_is_over_is_refused_on_every_call(
    ca: Path, tmp_path: Path, live: LiveCredentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an open connection TLS has no second look; each call has."""
    from datetime import UTC, datetime, timedelta

    from medsilo.privacy.identity import certificates as pki

    pem = enrol(ca, tmp_path / "h1", HOSPITAL, days=30)
    now = datetime.now(UTC)
    for days, words in ((-2, "is valid only from"), (40, "expired on")):

        class Clock(datetime):
            shift = timedelta(days=days)

            @classmethod
            def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
                return now + cls.shift

        monkeypatch.setattr(pki, "datetime", Clock)
        with pytest.raises(IdentityError, match=words):
            live.identify(pem)
