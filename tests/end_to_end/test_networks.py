"""Hospital networks: a proxy that wants a password, IPv6, a coordinator that moves."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from tests.support.network.connect_proxy import ConnectProxy
from tests.support.network.rough_link import RoughHosts
from tests.support.runs.checks import (
    assert_nothing_lost,
)
from tests.support.runs.federation import Federation, Process, free_port

Make = Callable[..., Federation]
PASSWORD = "se%cret: @wört"


@pytest.fixture
def proxy() -> Iterator[ConnectProxy]:
    proxy = ConnectProxy(login=f"hospital:{PASSWORD}")
    yield proxy
    proxy.close()


def write_login(path: Path, login: str) -> None:
    path.touch(mode=0o600)
    path.write_text(login + "\n")


def test_a_run_through_a_proxy_with_a_password_that_is_nowhere_written(federation: Make, proxy: ConnectProxy) -> None:
    """Three daemons over mutual TLS; the proxy cuts all connections on the way."""
    one = federation()
    for name in one.silos:
        login = f"hospital:{'wrong' if name == 'hospital2' else PASSWORD}"
        write_login(one.folder / f"{name}.login", login)
        through = {"url": f"http://127.0.0.1:{proxy.port}", "credentials": f"{name}.login"}
        one.write_silo(name, proxy=through)
    coordinator = one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    one.ends_with(one.start_silo("hospital2"), 5)
    assert proxy.statuses == [407], "a wrong password is tried once: more would lock the account"
    assert f"the proxy at 127.0.0.1:{proxy.port} does not accept the name and password" in one.said("hospital2")
    write_login(one.folder / "hospital2.login", f"hospital:{PASSWORD}")
    silos = [one.start_silo(name) for name in one.silos]
    one.wait_to_say("coordinator", "round 2 of 3 is open")
    proxy.cut()
    one.finish(*silos, coordinator)

    assert_nothing_lost(one)
    assert len(proxy.requests) >= 7, "one refused, three and their successors"
    for request in proxy.requests:
        asked, *headers = request.decode().split("\r\n")
        assert asked == f"CONNECT 127.0.0.1:{one.port} HTTP/1.1"
        assert [header.partition(":")[0] for header in headers] == ["Host", "User-Agent", "Proxy-Authorization"]
        assert headers[:2] == [f"Host: 127.0.0.1:{one.port}", "User-Agent: grpc-httpcli/0.0"]
    secrets = [PASSWORD.encode(), *(request.split()[-1] for request in proxy.requests)]
    for file in one.folder.rglob("*"):
        if file.is_file() and file.suffix != ".login":
            assert not any(secret in file.read_bytes() for secret in secrets), file


def add_address(one: Federation, address: str) -> None:
    """The coordinator's certificate once more, with an IP address among its names."""
    path = one.keys("coordinator") / "tls.pem"
    old = x509.load_pem_x509_certificate(path.read_bytes())
    key = load_pem_private_key((one.folder / "ca" / "ca.key").read_bytes(), password=None)
    names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    builder = (
        x509.CertificateBuilder()
        .subject_name(old.subject)
        .issuer_name(old.issuer)
        .public_key(old.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(old.not_valid_before_utc)
        .not_valid_after(datetime.now(UTC) + timedelta(days=1))
    )
    for extension in old.extensions:
        value = extension.value
        if isinstance(value, x509.SubjectAlternativeName):
            value = x509.SubjectAlternativeName([*names, x509.IPAddress(ip_address(address))])
        builder = builder.add_extension(value, extension.critical)
    path.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))  # type: ignore[arg-type]


def test_a_coordinator_that_moves_to_ipv6_goes_on_where_it_was(federation: Make) -> None:
    """After a move the hospitals change one line. The certificate's name is the coordinator's, whatever its address:
    the same one holds on an IPv4 address, on an IPv6 address, and with an address among its names that is neither.
    """
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    one = federation(run={"rounds": 4})
    coordinator = one.start_coordinator()
    silos = [one.start_silo(name) for name in one.silos]
    one.wait_to_say("coordinator", "round 2 of 4 is open")
    coordinator.kill()
    coordinator.wait()

    port = free_port()
    one.write("coordinator.yaml", {**one.coordinator_config, "listen": f"[::]:{port}"})
    add_address(one, "2001:db8::5")
    moved = one.start_coordinator()
    for silo in silos:
        silo.terminate()
        silo.wait()
        one.processes.remove(silo)
    for name, host in zip(one.silos, ("[::1]", "localhost", "127.0.0.1"), strict=True):
        one.write_silo(name, coordinator={"address": f"{host}:{port}"})
    one.finish(*[one.start_silo(name) for name in one.silos], moved)

    assert "round 2 of 4 is open" in one.said("coordinator")
    assert_nothing_lost(one)


@pytest.fixture
def hosts() -> Iterator[RoughHosts]:
    if not RoughHosts.possible():
        pytest.skip("bad networks need root, iproute2 and /dev/net/tun")
    hosts = RoughHosts(["hospital1", "hospital2", "hospital3"])
    yield hosts
    hosts.close()


@pytest.mark.root
def test_connections_that_die_without_a_word_are_noticed_and_nothing_is_lost(
    federation: Make, hosts: RoughHosts
) -> None:
    """Three hospitals, 100 ms and 2 % of the packets away. One's network drops everything, with no word to either end;
    another's NAT forgets a connection sooner than it is asked whether it lives (2 s here, 20 s in practice)."""
    one = federation(run={"rounds": 2}, coordinator={"listen": "0.0.0.0:7443"})

    def start(party: str, *command: str) -> Process:
        return one.start(*command, "--config", f"{party}.yaml", prefix=("hosted", hosts.namespaces[party], "2", "2"))

    for name, link in hosts.links.items():
        link.delay, link.loss = 0.05, 0.02
        one.write_silo(name, coordinator={"address": f"{hosts.addresses[name][0]}:7443"})
    hosts.links["hospital2"].forgets = 1.0
    coordinator = start("coordinator", "coordinator", "serve", "--until-done")
    one.wait_to_say("coordinator", "listening")
    others = [start(name, "silo", "train") for name in ("hospital2", "hospital3")]
    one.wait_to_say("coordinator", "hospital2 has joined")
    one.wait_to_say("coordinator", "hospital3 has joined")
    late = start("hospital1", "silo", "train")
    one.wait_to_say("coordinator", "hospital1 has joined")
    hosts.links["hospital1"].down = True
    one.wait_to_say("hospital1", "does not answer")
    one.wait_to_say("hospital2", "does not answer")
    hosts.links["hospital1"].down = False
    one.finish(late, *others, coordinator)

    assert_nothing_lost(one)
