"""An invitation: what the line holds, and what can be proven with its code and with nothing else."""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from medsilo.privacy.errors import ConfigurationError, RefusedError
from medsilo.privacy.identity.envelope import countersign, seal
from medsilo.privacy.identity.invitation import ENROLMENT, Invitation, Statement, new_code

INVITATION = Invitation(
    host="coordinator.example.org",
    port=7443,
    enrolment_port=7444,
    federation="tissue",
    coordinator="coordinator",
    silo="hospital1",
    ca_sha256="ab" * 32,
    code="abcdefghijklmnopqrstuvwxyz",
    expires=datetime(2031, 5, 1, 12, 30, 59, tzinfo=UTC),
)
LINE = (
    "medsilo:1/coordinator.example.org:7443/7444/tissue/coordinator/hospital1/"
    + "ab" * 32
    + "/abcdefghijklmnopqrstuvwxyz/20310501T123059Z"
)
REQUEST = b"a certificate request"


def public_key(invitation: Invitation) -> bytes:
    return invitation.key.public_key().public_bytes_raw()


def test_what_is_invited_stands_in_the_line_and_comes_back_from_it() -> None:
    assert INVITATION.line == LINE
    assert Invitation.parse(LINE) == INVITATION
    assert INVITATION.address == "coordinator.example.org:7443"


def test_a_line_that_a_mail_program_broke_is_still_one() -> None:
    broken = f"  {LINE[:70]}\r\n   {LINE[70:140]}\n{LINE[140:]} \n"
    assert Invitation.parse(broken) == INVITATION
    assert Invitation.parse(f"'{LINE}'") == INVITATION


def test_an_ipv6_address_comes_back() -> None:
    invitation = replace(INVITATION, host="2001:db8::5")
    assert invitation.enrolment_address == "[2001:db8::5]:7444"
    assert Invitation.parse(invitation.line) == invitation


@pytest.mark.parametrize(
    "line",
    [
        "",
        "https://example.org",
        LINE[:-9],
        LINE.rpartition("/")[0],
        LINE.replace("7443", "70000"),
        LINE.replace("ab" * 32, "ab" * 31),
        LINE.replace("hospital1", "Hospital 1!"),
        LINE.replace("abcdefghij", "abcdefghi0"),
        LINE.replace("coordinator.example.org", "-o.example.org"),
        LINE + "/more",
    ],
)
def test_what_is_no_whole_invitation_is_named_as_such(line: str) -> None:
    with pytest.raises(ConfigurationError, match=r"is not an invitation|the invitation is damaged"):
        Invitation.parse(line)


def test_codes_have_128_random_bits() -> None:
    codes = {new_code() for _ in range(50)}
    assert len(codes) == 50
    # 26 letters of five bits each: the last holds three bits and two zeros.
    assert {len(code) for code in codes} == {26}
    assert all(Invitation.parse(replace(INVITATION, code=code).line).code == code for code in codes)


def test_the_code_gives_its_key_by_hkdf_bound_to_the_invited_hospital() -> None:
    """RFC 5869, with the standard library: extract with a salt of zeros, expand one block."""
    number = 0
    for letter in INVITATION.code:
        number = number << 5 | "abcdefghijklmnopqrstuvwxyz234567".index(letter)
    extracted = hmac.digest(bytes(32), (number >> 2).to_bytes(16), "sha256")
    expanded = hmac.digest(extracted, b"medsilo enrolment spiffe://tissue/silo/hospital1\x01", "sha256")
    assert INVITATION.key.private_bytes_raw() == expanded
    assert replace(INVITATION, silo="hospital2").key.private_bytes_raw() != expanded


def test_a_statement_names_the_request_and_both_keys() -> None:
    audit_key = Ed25519PrivateKey.generate()
    envelope = Statement.sign(INVITATION, REQUEST, audit_key)
    assert Statement.open(envelope, public_key(INVITATION)) == Statement(
        silo="spiffe://tissue/silo/hospital1",
        coordinator="spiffe://tissue/coordinator/coordinator",
        ca_sha256="ab" * 32,
        request_sha256=hashlib.sha256(REQUEST).hexdigest(),
        audit_key=audit_key.public_key().public_bytes_raw().hex(),
    )
    assert INVITATION.code.encode() not in envelope.payload


def test_a_statement_by_another_code_is_refused() -> None:
    envelope = Statement.sign(INVITATION, REQUEST, Ed25519PrivateKey.generate())
    for other in (replace(INVITATION, code=new_code()), replace(INVITATION, silo="hospital2")):
        with pytest.raises(RefusedError, match="the invitation's code is wrong"):
            Statement.open(envelope, public_key(other))


def test_another_request_or_audit_key_cannot_be_put_into_a_statement() -> None:
    mine, theirs = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    for changed in ({"request_sha256": "00" * 32}, {"audit_key": theirs.public_key().public_bytes_raw().hex()}):
        envelope = Statement.sign(INVITATION, REQUEST, mine)
        envelope.payload = json.dumps(
            {**json.loads(envelope.payload), **changed}, sort_keys=True, separators=(",", ":")
        ).encode()
        countersign(envelope, theirs)
        with pytest.raises(RefusedError):
            Statement.open(envelope, public_key(INVITATION))


def test_an_audit_key_that_has_not_signed_is_not_enrolled() -> None:
    """Else a hospital could enrol another one's audit key as its own."""
    theirs = Ed25519PrivateKey.generate().public_key().public_bytes_raw().hex()
    whole = Statement.open(
        Statement.sign(INVITATION, REQUEST, Ed25519PrivateKey.generate()), public_key(INVITATION)
    ).model_dump()
    envelope = seal({**whole, "audit_key": theirs}, ENROLMENT, INVITATION.key)
    with pytest.raises(RefusedError):
        Statement.open(envelope, public_key(INVITATION))
