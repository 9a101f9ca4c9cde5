"""TLS 1.3 alone, on every port and from either side: with TLS 1.2 a client's certificate could be read on the way."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from medsilo.privacy.errors import UnreachableError
from medsilo.privacy.identity.certificates import fingerprint
from medsilo.privacy.identity.invitation import Invitation, new_code
from medsilo.silo.flower.upstream import Upstream
from tests.support.runs.federation import Federation, free_port
from tests.support.runs.flower import make_certificate

Make = Callable[..., Federation]
V1_2, V1_3 = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3
NAME = "coordinator.coordinator.test"
ALL_SUITES = "ALL:@SECLEVEL=0"


def agreed(port: int, version: ssl.TLSVersion, one: Federation, *, party: str | None) -> str | None:
    """What a client that speaks only ``version`` agrees on with a port; None if it is turned away."""
    context = ssl.create_default_context(cafile=str(one.folder / "ca" / "ca.pem"))
    context.minimum_version = context.maximum_version = version
    context.set_ciphers(ALL_SUITES)
    context.set_alpn_protocols(["h2", "http/1.1"])
    if party is not None:
        context.load_cert_chain(one.keys(party) / "tls.pem", one.keys(party) / "tls.key")
    with socket.create_connection(("127.0.0.1", port), timeout=20) as plain:
        try:
            with context.wrap_socket(plain, server_hostname=NAME) as secured:
                return secured.version()
        except OSError:
            return None


def test_every_port_of_the_coordinator_turns_away_who_speaks_only_tls_1_2(federation: Make) -> None:
    enrolment, page = free_port(), free_port()
    one = federation(
        forked=False, coordinator={"enrolment": {"listen": f"127.0.0.1:{enrolment}", "host": "127.0.0.1", "ca": "ca"}}
    )
    one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    shutil.copy(one.folder / "coordinator.yaml", one.folder / "page.yaml")
    one.start("coordinator", "page", "--listen", f"127.0.0.1:{page}", "--config", "page.yaml")
    one.wait_to_say("page", "The page is at")

    for port in (one.port, enrolment, page):
        for party in ("hospital1", None):
            assert agreed(port, V1_2, one, party=party) is None, port
        assert agreed(port, V1_3, one, party="hospital1") == "TLSv1.3", port
    openssl = ["openssl", "s_client", "-connect", f"127.0.0.1:{one.port}", "-tls1_2", "-cipher", ALL_SUITES]
    said = subprocess.run([*openssl, "-psk", "00"], input=b"", capture_output=True).stdout.decode()
    assert "Cipher is (NONE)" in said


class OldServer:
    """Shows a certificate to whoever calls, in TLS of one version, and keeps every byte that comes.

    ``agreed``: the versions of finished handshakes, ``failed``: what became of the others.
    """

    def __init__(self, certificate: Path, key: Path, *, ca: Path | None, version: ssl.TLSVersion) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, key)
        self._context.minimum_version = self._context.maximum_version = version
        self._context.set_ciphers(ALL_SUITES)
        self._context.set_alpn_protocols(["h2"])
        if ca is not None:
            self._context.load_verify_locations(ca)
            self._context.verify_mode = ssl.CERT_REQUIRED
        self.received = bytearray()
        self.agreed: list[str | None] = []
        self.failed: list[str] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                plain, _ = self._listening.accept()
                with plain:
                    plain.settimeout(20)
                    self._shake_hands(plain)

    def _shake_hands(self, plain: socket.socket) -> None:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        handshake = self._context.wrap_bio(incoming, outgoing, server_side=True)
        while True:
            try:
                handshake.do_handshake()
            except ssl.SSLWantReadError:
                with contextlib.suppress(OSError):
                    plain.sendall(outgoing.read())
                    if data := plain.recv(1 << 16):
                        self.received += data
                        incoming.write(data)
                        continue
                self.failed.append("cut")
            except ssl.SSLError as error:
                with contextlib.suppress(OSError):
                    plain.sendall(outgoing.read())
                self.failed.append(error.reason)
            else:
                self.agreed.append(handshake.version())
                with contextlib.suppress(OSError):
                    plain.sendall(outgoing.read())
            return


@pytest.fixture
def serve() -> Iterator[Callable[..., OldServer]]:
    made: list[OldServer] = []

    def make(certificate: Path, key: Path, *, ca: Path | None = None, version: ssl.TLSVersion = V1_2) -> OldServer:
        made.append(OldServer(certificate, key, ca=ca, version=version))
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.mark.parametrize("version", [V1_2, V1_3])
def test_a_silo_shows_its_certificate_only_in_tls_1_3(
    federation: Make, serve: Callable[..., OldServer], version: ssl.TLSVersion
) -> None:
    """In the coordinator's place stands a server with the coordinator's own key that speaks one version."""
    one = federation(forked=False)
    keys = one.keys("coordinator")
    server = serve(keys / "tls.pem", keys / "tls.key", ca=one.folder / "ca" / "ca.pem", version=version)
    one.write_silo("hospital1", port=server.port)
    one.start_silo("hospital1")
    one.wait_for("handshakes", lambda: bool(server.agreed or server.failed))
    one.wait_to_say("hospital1", "does not answer")
    doctor = one.command("silo", "doctor", "--config", "hospital1.yaml", expect=14 if version == V1_2 else 0)

    if version == V1_3:
        assert set(server.agreed) == {"TLSv1.3"}, "the check below could not fail"
    else:
        assert not server.agreed
        assert "no TLS 1.3 handshake" in doctor
        assert NAME.encode() in server.received, "what comes is kept"
    assert b"hospital1" not in server.received


def test_whoever_speaks_only_tls_1_2_is_no_coordinator_to_enrol_with(
    federation: Make, serve: Callable[..., OldServer]
) -> None:
    one = federation(forked=False)
    keys = one.keys("coordinator")
    chain = one.folder / "chain.pem"
    chain.write_bytes((keys / "tls.pem").read_bytes() + (one.folder / "ca" / "ca.pem").read_bytes())
    server = serve(chain, keys / "tls.key")
    invitation = Invitation(
        host="127.0.0.1",
        port=one.port,
        enrolment_port=server.port,
        federation="test",
        coordinator="coordinator",
        silo="hospital1",
        ca_sha256=fingerprint((one.folder / "ca" / "ca.pem").read_bytes()),
        code=new_code(),
        expires=datetime.now(UTC) + timedelta(days=1),
    )
    said = one.command("silo", "init", invitation.line, "--data", "hospital1.npz", "--yes-to", "fedavg", expect=15)

    assert "does not complete a TLS 1.3 handshake" in said
    assert server.failed
    assert not server.agreed


def test_the_door_for_flower_apps_calls_no_server_that_speaks_only_tls_1_2(
    tmp_path: Path, serve: Callable[..., OldServer]
) -> None:
    make_certificate(tmp_path)
    for version in (V1_2, V1_3):
        server = serve(tmp_path / "server.pem", tmp_path / "server.key", version=version)
        upstream = Upstream(f"localhost:{server.port}", "1.42.0", ca=tmp_path / "server.pem", insecure=False)
        if version == V1_3:
            assert upstream.connect().socket.version() == "TLSv1.3"
        else:
            with pytest.raises(UnreachableError):
                upstream.connect()


@pytest.mark.parametrize("before", ["import grpc", "import medsilo, os; os.environ['GRPC_SSL_CIPHER_SUITES'] = 'ALL'"])
def test_a_process_in_which_grpc_would_speak_tls_1_2_opens_no_connection_and_no_port(before: str) -> None:
    """Its environment has to be in order before gRPC is loaded; what the user's own says does not count."""
    use = "from medsilo.silo.uplink.channel import channel_credentials as c; c(b''); print('opened')"

    def run(words: str, suites: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "GRPC_SSL_CIPHER_SUITES": suites}
        return subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, env=environment)

    assert "gRPC was loaded before Medsilo" in run(f"{before}; {use}", "ECDHE-ECDSA-AES128-GCM-SHA256").stderr
    assert run(use, "ECDHE-ECDSA-AES128-GCM-SHA256").stdout == "opened\n"
