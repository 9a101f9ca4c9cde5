"""Revoked and renewed certificates on living connections; streams that stall, crumble, are packed or played again."""

from __future__ import annotations

import contextlib
import resource
import shutil
import socket
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import psutil

from medsilo.algorithms.tensors.transfer import chunk_message
from medsilo.coordinator.service.service import CALLS_PER_SILO
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.identity.authority import issue
from medsilo.privacy.identity.certificates import fingerprint
from medsilo.protos.medsilo.v1 import coordinator_pb2 as wire
from medsilo.protos.nonces import nonce
from tests.support.network.raw_client import SERVICE, HandMade, RawClient
from tests.support.runs.checks import assert_nothing_lost
from tests.support.runs.federation import PATIENCE, Federation
from tests.support.runs.refusals import delivered, refusal, stall, stored_uploads

Make = Callable[..., Federation]


def renew(one: Federation, party: str) -> str:
    """A new certificate for a party's key, put in its place; returns its fingerprint."""
    keys = one.keys(party)
    role = "coordinator" if party == "coordinator" else "silo"
    issue(one.folder / "ca", party, keys / "tls.csr", keys / "tls.pem", role=role)  # type: ignore[arg-type]
    return fingerprint((keys / "tls.pem").read_bytes())


def test_revoked_and_renewed_certificates_count_at_once_and_on_open_connections(federation: Make) -> None:
    one = federation()
    coordinator = one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    first, second = HandMade(one, "hospital1"), RawClient(one, "hospital2")
    first.join()
    second.join()
    silo = one.start_silo("hospital3")
    one.wait_to_say("coordinator", "round 1 of 3 is open")
    half = first.half(first.frames(first.constant(1.0)), 1)

    said = one.command("coordinator", "ca", "revoke", "hospital1")
    assert "revoked: certificate" in said
    shutil.copy(one.folder / "ca" / "ca.crl", one.keys("coordinator") / "ca.crl")
    code, details = refusal(first.get_plan)
    assert (code, "was revoked on" in details) == (grpc.StatusCode.PERMISSION_DENIED, True), details
    code, details = refusal(half.go_on)
    assert (code, "was revoked on" in details) == (grpc.StatusCode.PERMISSION_DENIED, True), details
    assert delivered(one) <= 1, "hospital 3's; the update that was under way counts for nothing"
    second.get_plan()

    # A certificate that is issued afterwards counts; so does the list, whatever becomes of its file.
    renew(one, "hospital1")
    RawClient(one, "hospital1").get_plan()
    for damage in (lambda path: path.write_bytes(b"-----BEGIN"), lambda path: path.unlink()):
        damage(one.keys("coordinator") / "ca.crl")
        assert refusal(first.get_plan)[0] == grpc.StatusCode.PERMISSION_DENIED
    one.wait_to_say("coordinator", "the revocation list is gone")

    # The coordinator's own new certificate is shown to new connections and told to hospitals, without a restart.
    shown = renew(one, "coordinator")
    answer = wire.GetPlanResponse.FromString(RawClient(one, "hospital2").get_plan())
    assert fingerprint(answer.coordinator_certificate) == shown

    # A hospital's daemon takes up its new certificate by itself; the old one is revoked meanwhile.
    renewed = renew(one, "hospital3")
    coordinator.kill()
    coordinator.wait()
    one.processes.remove(coordinator)
    one.start_coordinator()
    one.wait_for(
        "hospital 3 with its new certificate",
        lambda: any(r["peer_certificate_sha256"] == renewed for r in one.messages("coordinator", "received")),
    )
    assert silo.poll() is None


def test_many_who_connect_at_the_same_moment_do_not_end_the_coordinator(federation: Make) -> None:
    """They need no certificate for it: gRPC dies of a certificate that is handed to it anew at every connection."""
    one = federation()
    coordinator = one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])

    def connect(_: int) -> bool:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", one.port)) as plain,
            context.wrap_socket(plain),
        ):
            return True
        return False

    with ThreadPoolExecutor(32) as crowd:
        met = sum(crowd.map(connect, range(3000)))
    assert coordinator.poll() is None, one.said("coordinator")
    assert met > 2000
    one.finish(*[one.start_silo(name) for name in one.silos], coordinator)


def test_connections_that_take_every_file_that_the_coordinator_may_open_cost_time_and_nothing_else(
    federation: Make,
) -> None:
    one = federation(run={"rounds": 6})
    coordinator = one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    allowed = psutil.Process(coordinator.pid).num_fds() + 60
    resource.prlimit(coordinator.pid, resource.RLIMIT_NOFILE, (allowed, allowed))
    silos = [one.start_silo(name) for name in one.silos]
    one.wait_to_say("coordinator", "round 2 of 6 is open")
    with contextlib.ExitStack() as taken:
        for _ in range(400):
            taken.enter_context(socket.create_connection(("127.0.0.1", one.port)))
        one.wait_to_say("coordinator", "Too many open files")
    one.finish(*silos, coordinator)
    assert_nothing_lost(one)


def test_streams_that_stall_crumble_or_are_packed_come_to_nothing_and_hold_nothing(federation: Make) -> None:
    one = federation(coordinator={"message_seconds": 2})
    one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    clients = [HandMade(one, name) for name in one.silos]
    for client in clients:
        client.join()
    one.wait_to_say("coordinator", "round 1 of")
    client, other, _ = clients
    good = client.constant(1.0)

    # All the threads that a hospital can have, each with an upload that goes no further.
    calls = [stall(one, client, client.frames(good), 1) for _ in range(CALLS_PER_SILO)]
    ended = []
    threads = [threading.Thread(target=lambda call=call: ended.append(refusal(call.go_on_never)[0])) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert ended == [grpc.StatusCode.CANCELLED] * CALLS_PER_SILO
    assert "no message went through for 2 s; the call is cut" in one.said("coordinator")
    client.get_plan()

    def crumbs() -> None:
        crumb = chunk_message(wire.SubmitUpdateRequest, Exposure.MODEL_PARAMETERS_EXTRACTOR, bytes(4), nonce())
        client.send([*client.frames(good)[:1], crumb.SerializeToString()])

    def packed() -> None:
        method = client.channel.unary_unary(f"{SERVICE}/GetPlan")
        request = wire.GetPlanRequest(
            nonce=nonce(),
            silo=client.name,
            protocol_version=1,
        )
        method(request.SerializeToString() + bytes(1 << 24), compression=grpc.Compression.Gzip, timeout=20)

    def too_large() -> None:
        client.unary("GetPlan", wire.GetPlanRequest(nonce=nonce(), silo="x" * (5 << 20)).SerializeToString())

    def other_order() -> None:
        header, *chunks = client.frames(good)
        client.send([header, *reversed(chunks)])

    def played_again() -> None:
        request = wire.AttestRequest(nonce=nonce(), silo=client.name, plan_sha256=client.plan.sha256, seen=client.seen)
        data = request.SerializeToString()
        client.unary("Attest", data)
        client.unary("Attest", data)

    def anothers_header() -> None:
        client.send([other.header(good, attestation=None)])

    cases = {
        crumbs: (grpc.StatusCode.INVALID_ARGUMENT, "only the last may have fewer"),
        packed: (grpc.StatusCode.UNIMPLEMENTED, "gzip"),
        too_large: (grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max"),
        other_order: (grpc.StatusCode.INVALID_ARGUMENT, "is not what the manifest announced next"),
        played_again: (grpc.StatusCode.INVALID_ARGUMENT, "a message was played again, or a nonce reused"),
        anothers_header: (grpc.StatusCode.PERMISSION_DENIED, "the message says hospital2"),
    }
    wrong = []
    for attack, (code, words) in cases.items():
        found, details = refusal(attack)
        if found != code or words not in details:
            wrong.append(f"{attack.__name__}: {found} {details}")
    assert wrong == []
    assert delivered(one) == 0
    assert stored_uploads(one) == []
