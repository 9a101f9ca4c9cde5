"""Who gets through real mutual TLS on loopback, with this project's certificates and gRPC's own checks."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest

from medsilo.privacy.identity.authority import create_authority, issue
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.identity.keys import create_keys

COORDINATOR = Identity("test", "coordinator", "c")
HOSPITAL = Identity("test", "silo", "hospital1")
WAY = "/test.Echo/Echo"


class Pair(NamedTuple):
    key: bytes
    certificate: bytes


class Authority:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pem = create_authority(folder, "test").read_bytes()
        self._count = 0

    def enrol(self, identity: Identity, *, days: int = 365) -> Pair:
        self._count += 1
        folder = self.folder / str(self._count)
        paths = create_keys(folder, identity)
        issue(self.folder, identity.name, paths.request, folder / "tls.pem", role=identity.role, days=days)
        return Pair(paths.tls_key.read_bytes(), (folder / "tls.pem").read_bytes())


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Another CA that calls its federation by the same name."""
    return Authority(tmp_path_factory.mktemp("stranger"))


def who(_: bytes, context: grpc.ServicerContext) -> bytes:
    return b" ".join(context.auth_context()["x509_subject_alternative_name"])


def start(authority: Authority, pair: Pair) -> tuple[grpc.Server, int]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    handler = grpc.method_handlers_generic_handler("test.Echo", {"Echo": grpc.unary_unary_rpc_method_handler(who)})
    server.add_generic_rpc_handlers((handler,))
    credentials = grpc.ssl_server_credentials([pair], root_certificates=authority.pem, require_client_auth=True)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    return server, port


@pytest.fixture(scope="module")
def port(authority: Authority) -> Iterator[int]:
    server, port = start(authority, authority.enrol(COORDINATOR))
    yield port
    server.stop(None)


def ask(port: int, roots: bytes, pair: Pair | None, name: str = COORDINATOR.server_name) -> bytes:
    credentials = grpc.ssl_channel_credentials(roots, *(pair or (None, None)))
    options = [("grpc.ssl_target_name_override", name), ("grpc.enable_retries", 0)]
    with grpc.secure_channel(f"127.0.0.1:{port}", credentials, options=options) as channel:
        answer: bytes = channel.unary_unary(WAY)(b"", timeout=20)
        return answer


def refused(port: int, roots: bytes, pair: Pair | None, name: str = COORDINATOR.server_name) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        ask(port, roots, pair, name)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    return str(caught.value.details())


def test_a_silo_with_its_certificate_gets_through_and_is_known_by_its_uri(authority: Authority, port: int) -> None:
    assert ask(port, authority.pem, authority.enrol(HOSPITAL)) == HOSPITAL.uri.encode()


def test_without_a_certificate_nobody_gets_through(authority: Authority, port: int) -> None:
    refused(port, authority.pem, None)


def test_with_another_cas_certificate_nobody_gets_through(authority: Authority, stranger: Authority, port: int) -> None:
    refused(port, authority.pem, stranger.enrol(HOSPITAL))


def test_with_an_expired_certificate_nobody_gets_through(authority: Authority, port: int) -> None:
    refused(port, authority.pem, authority.enrol(HOSPITAL, days=0))


def test_a_coordinators_certificate_does_not_do_for_a_silo(authority: Authority, port: int) -> None:
    refused(port, authority.pem, authority.enrol(Identity("test", "coordinator", "other")))


def test_without_tls_nobody_gets_through(port: int) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(WAY)(b"", timeout=20)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("name", ["other.coordinator.test", "c.coordinator.other", "coordinator.test", "127.0.0.1"])
def test_a_silo_does_not_talk_to_a_coordinator_of_another_name(authority: Authority, port: int, name: str) -> None:
    details = refused(port, authority.pem, authority.enrol(HOSPITAL), name)
    assert "Hostname Verification Check failed" in details


def test_a_silo_does_not_talk_to_a_coordinator_of_another_ca(
    authority: Authority, stranger: Authority, port: int
) -> None:
    details = refused(port, stranger.pem, authority.enrol(HOSPITAL))
    assert "CERTIFICATE_VERIFY_FAILED" in details


@pytest.mark.parametrize(
    ("identity", "days", "words"),
    [
        (COORDINATOR, 0, "certificate has expired"),
        (Identity("test", "silo", "c"), 365, "unsupported certificate purpose"),
    ],
)
def test_a_silo_does_not_talk_to_a_server_with_a_wrong_certificate(
    authority: Authority, identity: Identity, days: int, words: str
) -> None:
    server, port = start(authority, authority.enrol(identity, days=days))
    try:
        details = refused(port, authority.pem, authority.enrol(HOSPITAL))
    finally:
        server.stop(None)
    assert "CERTIFICATE_VERIFY_FAILED" in details
    assert words in details
