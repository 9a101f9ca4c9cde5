"""What the coordinator sees of a hospital besides its messages, and a hospital of the others: constants, or nothing."""

from __future__ import annotations

import getpass
import platform
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import hpack
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from medsilo.privacy.consent.early_end import Cause
from medsilo.privacy.consent.withdrawal import SignedWithdrawal
from medsilo.privacy.identity.envelope import seal, to_message
from medsilo.privacy.identity.keys import load_audit_key
from medsilo.protos.medsilo.v1 import coordinator_pb2 as wire
from medsilo.protos.nonces import nonce
from tests.support.network.raw_client import HandMade, RawClient
from tests.support.network.tls_proxy import Opened, TlsProxy
from tests.support.network.wire_reader import CONTINUATION, DATA, HEADERS, frames
from tests.support.runs.federation import Federation
from tests.support.runs.refusals import refusal

Make = Callable[..., Federation]
SETTINGS, RST_STREAM, PING, WINDOW_UPDATE = 4, 3, 6, 8
PRIORITY_FLAG = 0x20


def requests(opened: Opened) -> Iterator[dict[str, str]]:
    """The headers of each request on a connection."""
    decoder = hpack.Decoder()
    for kind, flags, _, payload in frames(bytes(opened.up), from_client=True):
        assert kind != CONTINUATION, "headers in several frames"
        if kind == HEADERS:
            pairs = decoder.decode(payload[5:] if flags & PRIORITY_FLAG else payload)
            assert len(dict(pairs)) == len(pairs), "a header twice"
            yield {str(name): str(value) for name, value in pairs}


def test_the_headers_of_every_call_are_the_same_and_tell_nothing_of_the_hospital(federation: Make) -> None:
    """A real daemon and a real coordinator, with a reader in the middle of their TLS connection.

    Every call there is: joining, two rounds, a long poll that is cut by a withdrawal, and the withdrawal.
    """
    one = federation(run={"rounds": 3})
    proxy = TlsProxy(one, "hospital1")
    one.write_silo("hospital1", port=proxy.port)
    coordinator = one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    first, second, third = (one.start_silo(name) for name in one.silos)
    one.wait_to_say("coordinator", "round 2 of 3 is open")
    second.kill()
    second.wait()
    one.wait_for("a long poll", lambda: sum(r["rpc"] == "GetTask" for r in one.messages("hospital1", "sent")) > 2)
    words = one.start("silo", "consent", "withdraw", "--yes", "--config", "hospital1.yaml")
    one.ends_with(first, 4)
    one.finish(words, one.start_silo("hospital2"), third, coordinator)
    proxy.close()

    agent = re.compile(rf"grpc-python/{re.escape(grpc.__version__)} grpc-c/\d+\.\d+\.\d+ \({sys.platform}; chttp2\)")
    called = set()
    for opened in proxy.connections:
        assert (opened.name, opened.protocol) == ("coordinator.coordinator.test", "h2")
        for headers in requests(opened):
            assert agent.fullmatch(headers.pop("user-agent"))
            called.add(headers.pop(":path").rpartition("/")[2])
            assert headers == {
                ":authority": "coordinator.coordinator.test",
                ":method": "POST",
                ":scheme": "https",
                "content-type": "application/grpc",
                "te": "trailers",
                "grpc-accept-encoding": "identity",
            }
    assert called == {"GetPlan", "Join", "GetTask", "SubmitUpdate", "Withdraw", "Attest"}
    for opened in proxy.connections:
        check_frames(opened, one)


def check_frames(opened: Opened, one: Federation) -> None:
    """Besides headers and messages a silo sends numbers that HTTP/2 needs, and no text."""
    rest = b""
    for kind, _, _, payload in frames(bytes(opened.up), from_client=True):
        assert kind in (DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE), f"a frame of type {kind}"
        if kind in (RST_STREAM, PING, WINDOW_UPDATE):
            assert len(payload) in (4, 8)
        if kind == RST_STREAM:
            assert int.from_bytes(payload) in (0, 8), "no error, or cancelled"
        if kind not in (DATA, HEADERS):
            rest += payload
    certificate = x509.load_der_x509_certificate(opened.certificate or b"")
    (name,) = certificate.subject
    assert name.value == "hospital1"
    rest += b"".join("".join(headers.values()).encode() for headers in requests(opened))
    for secret in (
        socket.gethostname(),
        getpass.getuser(),
        platform.python_version(),
        platform.release(),
        time.tzname[0],
        str(one.folder),
    ):
        assert secret.encode() not in rest


def test_what_a_hospital_is_refused_with_names_no_other_hospital(federation: Make) -> None:
    one = federation(run={"quorum": 2, "deadline_minutes": 0})
    one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    clients = {name: HandMade(one, name) for name in one.silos}
    client = clients["hospital1"]
    told: list[str] = []

    def turned_away(action: Callable[[], object]) -> None:
        told.append(refusal(action)[1])

    good = client.constant(1.0)
    header, *chunks = client.frames(good, 0)
    turned_away(lambda: client.submit(good))
    turned_away(RawClient(one, "hospital1", claims="elsewhere").get_plan)
    turned_away(lambda: client.unary("Withdraw", wire.WithdrawRequest(nonce=nonce(), silo="hospital1")))
    for other in clients.values():
        other.join()
    one.wait_to_say("coordinator", "round 1 of")
    for name in ("hospital2", "hospital3"):
        clients[name].submit(clients[name].constant(2.0))
    one.wait_to_say("coordinator", "late: hospital1")
    for action in (
        lambda: client.submit(good),
        lambda: client.submit(good, round_number=2),
        lambda: client.submit(client.constant(float("nan")), round_number=1),
        lambda: client.send([header, header]),
        lambda: client.send(chunks),
        lambda: client.unary("Join", b"\xff\xff"),
        lambda: client.unary("Join", wire.JoinRequest(nonce=nonce(), silo="hospital1", plan_sha256=bytes(32))),
    ):
        turned_away(action)
    stalled = [client.half([], 0) for _ in range(12)]
    one.wait_for("a busy hospital", lambda: "calls open already" in one.said("coordinator"))
    turned_away(client.get_plan)
    for call in stalled:
        call.give_up()
    assert len(set(told)) > 8
    for text in told:
        assert "hospital2" not in text, text
        assert "hospital3" not in text, text
        assert str(one.folder) not in text, text


@pytest.mark.parametrize("change", ["another key", "another hospital", "another run", "another document"])
def test_nobody_can_withdraw_for_a_hospital(federation: Make, change: str) -> None:
    """Whoever has a hospital's TLS key has not its audit key; and a signed word counts for what it says only."""
    one = federation()
    one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    client = RawClient(one, "hospital1")
    key = load_audit_key(one.keys("hospital1") / "audit.key")
    client.join()
    fields: dict[str, Any] = {
        "federation": "test",
        "silo": "spiffe://test/silo/hospital1",
        "coordinator": "spiffe://test/coordinator/coordinator",
        "run": "test",
        "plan_sha256": client.plan.sha256.hex(),
        "rounds_acknowledged": (),
        "reason": Cause.WITHDRAWN,
        "at": "2031-06-30T12:00:00Z",
    }

    def withdraw(envelope: Any) -> None:
        request = wire.WithdrawRequest(
            nonce=nonce(),
            silo="hospital1",
            plan_sha256=client.plan.sha256,
            statement=to_message(envelope),
            seen=client.seen,
        )
        client.unary("Withdraw", request)

    wrong = {
        "another key": SignedWithdrawal(**fields).sign(Ed25519PrivateKey.generate()),
        "another hospital": SignedWithdrawal(**{**fields, "silo": "spiffe://test/silo/hospital2"}).sign(key),
        "another run": SignedWithdrawal(**{**fields, "run": "other"}).sign(key),
        "another document": seal({"v": 1}, "application/vnd.medsilo.attestation+json", key),
    }[change]
    code, details = refusal(lambda: withdraw(wrong))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "withdrawal" in details
    assert one.status()["silos"][0]["state"] == "joined"
    withdraw(SignedWithdrawal(**fields).sign(key))
    assert one.status()["silos"][0]["state"] == "withdrawn"
    assert refusal(lambda: client.submit(client.model()))[1].startswith("hospital1 has withdrawn")
