"""Enrolment over real TLS: who gets a certificate, who does not, and what an impostor learns."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from medsilo.coordinator.config import CoordinatorConfig
from medsilo.coordinator.joining.doctor import examine
from medsilo.coordinator.joining.invitations import Invitations
from medsilo.coordinator.joining.setting_up import Federation, invite, set_up
from medsilo.coordinator.service.enrolment import (
    FAILURES,
    PAUSE_SECONDS,
    EnrolmentService,
    Throttle,
    TooManyError,
    serve_enrolment,
)
from medsilo.coordinator.store.store import Store
from medsilo.privacy.consent.gate import PlanGate
from medsilo.privacy.door.door import Door
from medsilo.privacy.errors import ConfigurationError, IdentityError, RefusedError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.files.state_folder import keep_private
from medsilo.privacy.identity.authority import issue
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.identity.invitation import Invitation, new_code
from medsilo.privacy.identity.keys import create_keys, load_audit_key
from medsilo.privacy.journal.journal import Journal, read_records
from medsilo.privacy.journal.key_rotation import rotate
from medsilo.silo.joining.enrolment import enrol, trusted_authority
from medsilo.silo.joining.setting_up import is_enrolled, prepare
from medsilo.silo.state.config import SiloConfig

Stop = Callable[[], object]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Coordinator:
    """A coordinator that enrols on a real port, without rounds."""

    def __init__(self, folder: Path, *, chain: bytes | None = None, key: bytes | None = None) -> None:
        wanted = Federation(
            name="test",
            host="127.0.0.1",
            silos=("hospital1", "hospital2"),
            method="fedavg",
            model="mlp-64",
            shape=(1, 4, 4),
            classes=2,
            rounds=1,
            port=free_port(),
            enrolment_port=free_port(),
        )
        self.config = set_up(wanted, folder / "coordinator.yaml")
        assert self.config.enrolment is not None
        credentials = self.config.open_credentials()
        assert credentials is not None
        self.journal = Journal(
            self.config.journal,
            key=load_audit_key(self.config.keys / "audit.key"),
            origin=self.config.journal_origin,
        )
        door = Door(
            self.journal, identity=self.config.identity.uri, federation="test", gate=PlanGate(frozenset[Exposure]())
        )
        self.store = Store(self.config.database)
        settings = self.config.enrolment
        service = EnrolmentService(self.config, settings, self.config.plan(), self.store, door, credentials)
        shown: Any = credentials
        if chain is not None:
            forged = replace(credentials.current, certificate_pem=chain, private_key_pem=key or b"")
            shown = SimpleNamespace(current=forged)
        self.server = serve_enrolment(service, settings, shown)

    def invite(self, silo: str = "hospital1") -> Invitation:
        return invite(self.config, silo, days=1)

    def calls(self) -> list[dict[str, Any]]:
        return [record for record in read_records(self.config.journal) if record["kind"] == "message"]

    def stop(self) -> None:
        self.server.stop(None).wait()
        self.store.close()
        self.journal.close()


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    one = Coordinator(tmp_path / "coordinator")
    yield one
    one.stop()


def join(invitation: Invitation, folder: Path) -> SiloConfig:
    ca = trusted_authority(invitation)
    config = prepare(invitation, folder / "images.npz", folder)
    enrol(config, invitation, ca, load_audit_key(config.keys / "audit.key"))
    return config


def aged(config: CoordinatorConfig, silo: str, **changes: str) -> None:
    """Changes what the coordinator keeps of a hospital's last invitation."""
    content = json.loads(config.invitations.read_text())
    [one for one in content["invitations"] if one["silo"] == silo][-1].update(changes)
    config.invitations.write_text(json.dumps(content))


def test_an_invited_hospital_gets_its_certificate_and_both_journals_hold_the_exchange(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    invitation = coordinator.invite()
    config = join(invitation, tmp_path / "one")
    found = config.open_credentials()
    assert found is not None
    assert found.current.identity.uri == "spiffe://test/silo/hospital1"
    assert is_enrolled(config, invitation)
    own = [record for record in read_records(config.journal) if record["kind"] == "message"]
    assert [(r["rpc"], r["direction"], set(r["classes"])) for r in own] == [
        ("Enrol", "sent", {"PROTOCOL", "IDENTITY"}),
        ("Enrol", "received", {"PROTOCOL", "IDENTITY"}),
    ]
    assert {r["sha256"] for r in own} == {r["sha256"] for r in coordinator.calls()}
    audit_key = load_audit_key(config.keys / "audit.key").public_key().public_bytes_raw().hex()
    peers = [r for r in read_records(coordinator.config.journal) if r["kind"] == "peer-key"]
    assert [(r["peer"], r["public_key"]) for r in peers] == [("spiffe://test/silo/hospital1", audit_key)]


def test_the_code_stands_nowhere_but_in_the_line(coordinator: Coordinator, tmp_path: Path) -> None:
    invitation = coordinator.invite()
    join(invitation, tmp_path / "one")
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(kept) > 15
    assert [path for path in kept if invitation.code.encode() in path.read_bytes()] == []


def test_a_private_key_does_not_leave_its_folder(coordinator: Coordinator, tmp_path: Path) -> None:
    config = join(coordinator.invite(), tmp_path / "one")
    theirs = b"".join(path.read_bytes() for path in (tmp_path / "coordinator").rglob("*") if path.is_file())
    for name in ("tls.key", "audit.key"):
        body = (config.keys / name).read_text().splitlines()[1]
        assert body.encode() not in theirs


@pytest.mark.parametrize("repeats", [1, 2])
def test_a_wrong_code_gets_nothing_and_leaves_no_record(coordinator: Coordinator, tmp_path: Path, repeats: int) -> None:
    invitation = coordinator.invite()
    for _ in range(repeats):
        with pytest.raises(RefusedError, match="the invitation's code is wrong, or there is none for this hospital"):
            join(replace(invitation, code=new_code()), tmp_path / "one")
    assert coordinator.calls() == []
    join(invitation, tmp_path / "one")


def test_nobody_learns_from_a_refusal_which_hospitals_are_invited(coordinator: Coordinator, tmp_path: Path) -> None:
    invitation = coordinator.invite()
    said = set()
    for name in ("hospital1", "hospital2", "elsewhere"):
        with pytest.raises(RefusedError) as caught:
            join(replace(invitation, silo=name, code=new_code()), tmp_path / name)
        said.add(str(caught.value))
    assert len(said) == 1


def test_an_invitation_is_for_one_hospital(coordinator: Coordinator, tmp_path: Path) -> None:
    invitation = coordinator.invite()
    coordinator.invite("hospital2")
    with pytest.raises(RefusedError, match="code is wrong"):
        join(replace(invitation, silo="hospital2"), tmp_path / "two")


def test_a_used_invitation_is_good_for_the_same_keys_only(coordinator: Coordinator, tmp_path: Path) -> None:
    invitation = coordinator.invite()
    config = join(invitation, tmp_path / "one")
    first = config.tls_files.certificate.read_bytes()
    with pytest.raises(RefusedError, match=r"the invitation was used on .* for other keys"):
        join(invitation, tmp_path / "thief")
    assert not (tmp_path / "thief/state/hospital1/keys/tls.pem").exists()
    assert [record["direction"] for record in coordinator.calls()] == ["received", "sent"], "the hospital's alone"
    config.tls_files.certificate.unlink()
    assert join(invitation, tmp_path / "one").tls_files.certificate.read_bytes() == first
    # What is given again is the same certificate: the CA signed one.
    assert len((tmp_path / "coordinator/ca/issued.jsonl").read_text().splitlines()) == 2


def test_an_expired_invitation_is_good_for_nothing_even_for_the_same_keys(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    invitation = coordinator.invite()
    past = (datetime.now(UTC) - timedelta(seconds=2)).isoformat()
    aged(coordinator.config, "hospital1", expires=past)
    with pytest.raises(RefusedError, match="the invitation expired on"):
        join(invitation, tmp_path / "one")
    second = coordinator.invite()
    join(second, tmp_path / "one")
    aged(coordinator.config, "hospital1", expires=past)
    with pytest.raises(RefusedError, match="the invitation expired on"):
        join(second, tmp_path / "one")


def test_an_invitation_that_was_taken_back_is_good_for_nothing(coordinator: Coordinator, tmp_path: Path) -> None:
    first = coordinator.invite()
    second = coordinator.invite()
    with pytest.raises(RefusedError, match="taken back"):
        join(first, tmp_path / "one")
    assert Invitations(coordinator.config.invitations).revoke("hospital1") == 1
    with pytest.raises(RefusedError, match="taken back"):
        join(second, tmp_path / "one")
    # Who knows the code is told why, and that is on record; nothing was exchanged with the hospital.
    kinds = [record["kind"] for record in read_records(coordinator.config.journal)]
    assert kinds.count("refusal") == 2
    assert coordinator.calls() == []


def test_a_hospital_that_lost_its_audit_key_does_not_come_back_under_its_name(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    join(coordinator.invite(), tmp_path / "one")
    with pytest.raises(RefusedError, match="a party that has lost its key joins under a new name"):
        join(coordinator.invite(), tmp_path / "anew")


def test_an_impostor_with_another_ca_is_sent_nothing(coordinator: Coordinator, tmp_path: Path) -> None:
    impostor = Coordinator(tmp_path / "impostor")
    try:
        theirs = impostor.invite()
        mine = replace(coordinator.invite(), port=theirs.port, enrolment_port=theirs.enrolment_port)
        with pytest.raises(IdentityError, match=r"is not the coordinator of the invitation.*Nothing was sent"):
            join(mine, tmp_path / "one")
        assert impostor.calls() == []
        assert not (tmp_path / "one").exists(), "not even keys were made"
    finally:
        impostor.stop()


@pytest.mark.parametrize("role", ["silo", "coordinator of an own CA"])
def test_an_impostor_that_shows_the_true_ca_besides_its_own_certificate_is_sent_nothing(
    coordinator: Coordinator, tmp_path: Path, role: str
) -> None:
    """The fingerprint is right; but the one who shows it has no coordinator's key that this CA signed for."""
    truth = tmp_path / "coordinator/ca"
    keys = tmp_path / "stolen"
    if role == "silo":
        paths = create_keys(keys, Identity("test", "silo", "hospital2"))
        issue(truth, "hospital2", paths.request, keys / "tls.pem")
    else:
        Coordinator(tmp_path / "elsewhere").stop()
        shutil.copytree(tmp_path / "elsewhere/state/coordinator/keys", keys)
    chain = (keys / "tls.pem").read_bytes() + (truth / "ca.pem").read_bytes()
    impostor = Coordinator(tmp_path / "impostor", chain=chain, key=(keys / "tls.key").read_bytes())
    try:
        assert impostor.config.enrolment is not None
        port = int(impostor.config.enrolment.listen.rpartition(":")[2])
        mine = replace(coordinator.invite(), enrolment_port=port)
        with pytest.raises(IdentityError, match=r"no valid certificate of spiffe://test/coordinator/coordinator"):
            join(mine, tmp_path / "one")
        assert impostor.calls() == []
    finally:
        impostor.stop()


def test_a_message_that_is_none_is_refused_without_a_record(coordinator: Coordinator) -> None:
    invitation = coordinator.invite()
    credentials = grpc.ssl_channel_credentials(trusted_authority(invitation))
    options = [("grpc.ssl_target_name_override", invitation.coordinator_identity.server_name)]
    with grpc.secure_channel(invitation.enrolment_address, credentials, options=options) as channel:
        ask = channel.unary_unary("/medsilo.v1.EnrolmentService/Enrol")
        for data in (
            b"",
            b"\xff\xff",
            b"\x12\x03A B\x18\x01",
            b"\x12\x09hospital1\x18\x01",
            b"\x12\x09hospital1",
            b"\x12\x02\xff\xfe\x18\x01",
            bytes(100_000),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                ask(data, timeout=20)
            assert caught.value.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert coordinator.calls() == []


def test_an_address_that_fails_often_has_to_wait_and_others_do_not() -> None:
    now = 1000.0
    throttle = Throttle(lambda: now)
    for _ in range(FAILURES):
        throttle.check("ipv4:10.0.0.1")
        throttle.failed("ipv4:10.0.0.1")
    with pytest.raises(TooManyError):
        throttle.check("ipv4:10.0.0.1")
    throttle.check("ipv4:10.0.0.2")
    now += PAUSE_SECONDS
    throttle.check("ipv4:10.0.0.1")
    throttle.failed("ipv4:10.0.0.1")
    with pytest.raises(TooManyError):
        throttle.check("ipv4:10.0.0.1")


def test_two_that_use_one_invitation_at_once_do_not_both_get_it(coordinator: Coordinator, tmp_path: Path) -> None:
    invitation = coordinator.invite()
    outcomes: list[str] = []

    def attempt(name: str) -> None:
        try:
            join(invitation, tmp_path / name)
            outcomes.append("enrolled")
        except RefusedError:
            outcomes.append("refused")

    threads = [threading.Thread(target=attempt, args=(f"copy{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["enrolled", "refused", "refused", "refused"]


def test_without_the_cas_key_nobody_enrols(coordinator: Coordinator, tmp_path: Path) -> None:
    config = coordinator.config
    assert config.enrolment is not None
    without = config.model_copy(update={"enrolment": None})
    with pytest.raises(ConfigurationError, match=r"no `enrolment:`.*docs/joining.md"):
        invite(without, "hospital1", days=1)
    (config.enrolment.ca / "ca.key").rename(tmp_path / "safe.key")
    credentials = config.open_credentials()
    assert credentials is not None
    with pytest.raises(IdentityError, match=r"ca\.key: there is no such file.*docs/joining.md"):
        EnrolmentService(config, config.enrolment, None, None, None, credentials)  # type: ignore[arg-type]


def test_what_was_set_up_is_not_overwritten_and_a_half_is_completed(tmp_path: Path) -> None:
    first = Coordinator(tmp_path)
    first.stop()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    text = (tmp_path / "coordinator.yaml").read_text()
    wanted = Federation("test", "127.0.0.1", ("hospital1",), "fedavg", "mlp-64", (1, 4, 4), 2, 1, 7443, 7444)
    with pytest.raises(ConfigurationError, match="exists already and is not overwritten"):
        set_up(wanted, tmp_path / "coordinator.yaml")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    other = tmp_path / "other"
    set_up(wanted, other / "coordinator.yaml")
    (other / "state/coordinator/keys/tls.pem").unlink()
    (other / "state/coordinator/keys/tls.csr").unlink()
    (other / "ca/ca.key").rename(other / "key")
    with pytest.raises(IdentityError):
        set_up(wanted, other / "coordinator.yaml")
    (other / "key").rename(other / "ca/ca.key")
    assert set_up(wanted, other / "coordinator.yaml").open_credentials() is not None
    assert (tmp_path / "coordinator.yaml").read_text() == text


def test_doctor_tells_a_coordinator_that_serves_from_one_that_does_not(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    path = tmp_path / "coordinator/coordinator.yaml"
    coordinator.invite()
    keep_private(coordinator.config.state)

    def found() -> dict[str, tuple[str, str]]:
        return {finding.check: (finding.state, f"{finding.found} {finding.remedy}") for finding in examine(path)[1]}

    serving = found()
    assert serving["enrolment port"][1].startswith("this coordinator answers on")
    assert serving["port"] == ("notice", f"nobody answers on {coordinator.config.listen} coordinator serve")
    assert serving["invitations"] == ("good", "hospital1: open ")
    assert {state for state, _ in serving.values()} == {"good", "notice"}
    coordinator.server.stop(None).wait()
    for path_of_database in coordinator.config.state.glob("coordinator.db*"):
        path_of_database.unlink()  # else the write-ahead log would still hold it all
    assert coordinator.config.enrolment is not None
    (coordinator.config.enrolment.ca / "ca.key").chmod(0o644)
    (coordinator.config.state / "coordinator.db").write_bytes(b"no database" * 100)
    stopped = found()
    assert stopped["enrolment port"][0] == "notice"
    assert "chmod 600" in stopped["CA"][1]
    assert stopped["database"][0] == "bad"
    with socket.create_server(("127.0.0.1", int(coordinator.config.listen.rpartition(":")[2]))) as other:
        threading.Thread(target=lambda: other.accept()[0].close(), daemon=True).start()
        assert found()["port"][0] == "bad"


def test_a_certificate_that_ends_is_renewed_by_another_invitation_even_after_a_change_of_the_audit_key(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    config = join(coordinator.invite(), tmp_path / "one")
    first = config.tls_files.certificate.read_bytes()
    invitation = coordinator.invite()
    assert is_enrolled(config, invitation)
    enrolled = coordinator.config.state / "enrolled/hospital1.pem"
    issue(tmp_path / "coordinator/ca", "hospital1", config.keys / "tls.csr", enrolled, days=20)
    shutil.copy(enrolled, config.tls_files.certificate)
    ending = enrolled.read_bytes()
    assert not is_enrolled(config, invitation), "twenty days before its end a certificate is to be renewed"
    rotate(config.keys, config.journal, origin=config.journal_origin, identity=config.identity)
    renewed = join(invitation, tmp_path / "one").open_credentials()
    assert renewed is not None
    assert renewed.current.certificate_pem not in (first, ending)
    assert renewed.current.private_key_pem == (config.keys / "tls.key").read_bytes()
    assert is_enrolled(config, invitation)


def test_nothing_but_the_message_is_told_when_enrolling(coordinator: Coordinator, tmp_path: Path) -> None:
    """What a server sees of the call besides its bytes: no header of our own, no deadline, no certificate."""
    seen: list[tuple[set[str], object, float | None]] = []

    def look(data: bytes, context: grpc.ServicerContext) -> bytes:
        names = {str(name) for name, _ in context.invocation_metadata()}
        seen.append((names, context.auth_context().get("x509_pem_cert"), context.time_remaining()))
        context.abort(grpc.StatusCode.PERMISSION_DENIED, "seen")
        return b""

    own = coordinator.config.open_credentials()
    assert own is not None
    server = grpc.server(futures.ThreadPoolExecutor(1))
    handler = grpc.unary_unary_rpc_method_handler(look)
    service = grpc.method_handlers_generic_handler("medsilo.v1.EnrolmentService", {"Enrol": handler})
    server.add_generic_rpc_handlers((service,))
    pair = (own.current.private_key_pem, own.current.certificate_pem + own.current.ca_pem)
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()
    with pytest.raises(RefusedError, match="seen"):
        join(replace(coordinator.invite(), enrolment_port=port), tmp_path / "one")
    server.stop(None).wait()
    ((names, certificate, remaining),) = seen
    assert (names, certificate) == ({"user-agent"}, None)
    assert remaining is None or remaining > 10**6, "no deadline travels"
