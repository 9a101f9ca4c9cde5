"""The hospital's proxy: what is configured is used, what is not is not, and no password is shown."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import ValidationError

from medsilo.coordinator.config import CoordinatorConfig, EnrolmentConfig
from medsilo.privacy.consent.gate import PlanGate
from medsilo.privacy.door.door import Door
from medsilo.privacy.errors import ConfigurationError, IdentityError, MedsiloError, RefusedError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.identity.authority import create_authority, issue
from medsilo.privacy.identity.endpoint import split_address
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.identity.keys import create_keys
from medsilo.privacy.journal.journal import Journal
from medsilo.silo.state.config import SiloConfig
from medsilo.silo.uplink.uplink import Uplink
from tests.support.network.connect_proxy import ConnectProxy

SECRET = "Se%cret"
Say = Callable[[str], None]


class GaveUpError(Exception):
    """The test has seen what it wanted."""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(**changes: Any) -> Path:
        content = {
            "federation": "test",
            "name": "hospital1",
            "coordinator": {"address": "127.0.0.1:1"},
            "state": "state",
            "shard": "shard.npz",
            **changes,
        }
        path = tmp_path / "hospital1.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    return write


@pytest.fixture
def call(tmp_path: Path, write: Callable[..., Path]) -> Callable[..., None]:
    """Asks for the plan as `silo train` does; ``notice`` is told before each pause."""
    identity = Identity("test", "silo", "hospital1")
    create_authority(tmp_path / "ca", "test")
    keys = tmp_path / "state" / "keys"
    issue(tmp_path / "ca", "hospital1", create_keys(keys, identity).request, keys / "tls.pem")
    (keys / "ca.pem").write_bytes((tmp_path / "ca" / "ca.pem").read_bytes())
    key = Ed25519PrivateKey.generate()

    def call(notice: Say, **changes: Any) -> None:
        config = SiloConfig.read(write(**changes))
        with Journal(config.journal, key=key, origin=config.journal_origin) as journal:
            door = Door(journal, identity=config.identity.uri, federation="test", gate=PlanGate(Exposure))
            uplink = Uplink(config, config.open_credentials(), door, notice=notice)
            try:
                uplink.get_plan()
            finally:
                uplink.close()

    return call


@pytest.fixture
def proxy() -> Iterator[ConnectProxy]:
    proxy = ConnectProxy()
    yield proxy
    proxy.close()


def at(proxy: ConnectProxy, credentials: Path | None = None) -> dict[str, Any]:
    return {
        "url": f"http://127.0.0.1:{proxy.port}/",
        **({"credentials": str(credentials)} if credentials is not None else {}),
    }


def test_a_proxy_that_the_environment_names_is_not_followed(
    proxy: ConnectProxy, call: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, f"http://hospital:{SECRET}@127.0.0.1:{proxy.port}")
    # With these two gRPC goes through a proxy even where `grpc.enable_http_proxy` is off.
    monkeypatch.setenv("GRPC_ADDRESS_HTTP_PROXY", f"127.0.0.1:{proxy.port}")
    monkeypatch.setenv("GRPC_ADDRESS_HTTP_PROXY_ENABLED_ADDRESSES", "127.0.0.0/8,192.0.2.0/24")
    said: list[str] = []

    def give_up(text: str) -> None:
        said.append(text)
        if "environment" not in text:
            raise GaveUpError

    with pytest.raises(GaveUpError):
        call(give_up)
    assert "the coordinator at 127.0.0.1:1 does not answer" in said[-1]
    assert proxy.requests == []

    monkeypatch.setattr(Uplink, "get_plan", lambda _: None)
    call(give_up, coordinator={"address": "192.0.2.1:7443"})
    assert said[-1].startswith("grpc_proxy, https_proxy, http_proxy, HTTPS_PROXY, GRPC_ADDRESS_HTTP_PROXY in the")
    assert "not followed" in said[-1]
    assert SECRET not in "".join(said)


def test_no_proxy_in_the_environment_leads_no_silo_past_its_proxy(
    proxy: ConnectProxy, call: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("no_grpc_proxy", "127.0.0.1")
    proxy.refuses = 403
    with pytest.raises(RefusedError):
        call(lambda _: None, proxy=at(proxy))
    assert len(proxy.requests) == 1


def test_what_a_proxy_refuses_is_said_with_its_name_and_what_passes_is_tried_again(
    proxy: ConnectProxy, call: Callable[..., None], tmp_path: Path
) -> None:
    login = tmp_path / "login"
    login.touch(mode=0o600)
    login.write_text(f"hospital:{SECRET}\n")
    said: list[str] = []
    proxy.refuses = 503

    def then_refuse(text: str) -> None:
        said.append(text)
        proxy.refuses = 403

    name = f"the proxy at 127.0.0.1:{proxy.port}"
    with pytest.raises(RefusedError, match=rf"{name} does not let .* 127.0.0.1:1 \(HTTP 403\)"):
        call(then_refuse, proxy=at(proxy, login))
    assert any(f"{name} does not reach 127.0.0.1:1 (HTTP 503)" in text for text in said)
    proxy.refuses = 407
    with pytest.raises(IdentityError, match=f"{name} does not accept the name and password in {login}") as caught:
        call(said.append, proxy=at(proxy, login))
    with pytest.raises(IdentityError, match=f"{name} asks for a name and password"):
        call(said.append, proxy=at(proxy))
    assert SECRET not in "".join([str(caught.value), *said])


def test_a_proxy_that_is_not_there_is_named_and_tried_again(call: Callable[..., None]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    said: list[str] = []

    def give_up(text: str) -> None:
        said.append(text)
        if len(said) == 2:
            raise GaveUpError

    with pytest.raises(GaveUpError):
        call(give_up, proxy={"url": f"http://127.0.0.1:{port}"})
    assert f"the proxy at 127.0.0.1:{port} does not answer" in said[-1]


def test_what_stands_in_a_proxys_place_and_is_none_is_named(call: Callable[..., None]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            client, _ = listener.accept()
            client.close()

        threading.Thread(target=hang_up, daemon=True).start()
        port = listener.getsockname()[1]

        def give_up(text: str) -> None:
            raise GaveUpError(text)

        with pytest.raises(GaveUpError, match=f"through the proxy at 127.0.0.1:{port}, does not answer"):
            call(give_up, proxy={"url": f"http://127.0.0.1:{port}"})


@pytest.mark.parametrize(
    ("content", "mode", "complaint"),
    [
        (f"hospital:{SECRET}\n", 0o644, "others can read"),
        (f"hospital:{SECRET}\nmore:{SECRET}\n", 0o600, "should be one line"),
        (f"{SECRET}\n", 0o600, "should be one line"),
        (f"hospital:{SECRET}\udcff", 0o600, "not UTF-8"),
        (None, 0, "cannot be read"),
    ],
)
def test_credentials_that_others_can_read_or_that_are_none_are_refused_unsent(
    proxy: ConnectProxy, call: Callable[..., None], tmp_path: Path, content: str | None, mode: int, complaint: str
) -> None:
    login = tmp_path / "login"
    if content is not None:
        login.write_bytes(content.encode(errors="surrogateescape"))
        login.chmod(mode)
    with pytest.raises(IdentityError, match=complaint) as caught:
        call(lambda _: None, proxy=at(proxy, login))
    assert str(login) in str(caught.value)
    assert SECRET not in str(caught.value)
    assert proxy.requests == []


@pytest.mark.parametrize(
    ("proxy", "complaint"),
    [
        ({"url": f"http://hospital:{SECRET}@proxy.example:3128"}, "no name and password"),
        ({"url": f"hospital:{SECRET}@proxy.example:3128"}, "should be http://"),
        (f"http://hospital:{SECRET}@proxy.example:3128", "should hold the key `url`"),
        ({"url": "https://proxy.example:3128"}, "should begin with http://"),
        ({"url": "http://proxy.example"}, "should be http://host:port"),
        ({"url": "http://proxy.example:3128/x"}, "should be http://host:port"),
        ({}, "`proxy.url` is missing"),
    ],
)
def test_a_proxy_that_is_written_wrongly_is_explained_without_showing_a_password(
    write: Callable[..., Path], proxy: object, complaint: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        SiloConfig.read(write(proxy=proxy))
    assert complaint in str(caught.value)
    assert SECRET not in str(caught.value)


def test_plain_text_and_a_proxy_do_not_go_together(write: Callable[..., Path]) -> None:
    with pytest.raises(ConfigurationError, match="would read everything"):
        SiloConfig.read(write(insecure=True, proxy={"url": "http://127.0.0.1:3128"}))


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("::1:7443", r"in brackets"),
        ("2001:db8::5", r"in brackets"),
        ("[2001:db8::5]", r"in brackets"),
        ("[2001:db8::zz]:7443", "is not an IP address"),
        ("[127.0.0.1]:7443", "is not an IP address"),
        ("300.1.1.1:7443", "is not an IP address"),
        ("https://coordinator.example.org:7443", "without https://"),
        ("coordinator.example.org", "should be host:port"),
        ("coordinator.example.org:0", "should be host:port"),
        ("über.example.org:7443", "is not a host name"),
    ],
)
def test_an_address_that_is_written_wrongly_is_explained(
    write: Callable[..., Path], tmp_path: Path, address: str, complaint: str
) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        SiloConfig.read(write(coordinator={"address": address}))
    path = tmp_path / "coordinator.yaml"
    path.write_text(yaml.safe_dump({"listen": address}))
    with pytest.raises(MedsiloError, match=rf"`listen`: .*{complaint}"):
        CoordinatorConfig.read(path)


@pytest.mark.parametrize("address", ["[::1]:7443", "[2001:db8::5]:7443", "10.0.0.1:7443", "node_1.example.org:7443"])
def test_every_kind_of_address_is_taken(write: Callable[..., Path], address: str) -> None:
    assert SiloConfig.read(write(coordinator={"address": address})).coordinator.address == address


def test_an_ipv6_address_without_quotes_gets_a_hint(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.yaml"
    path.write_text("federation: test\nlisten: [::]:7443\n")
    with pytest.raises(ConfigurationError, match="needs quotes"):
        CoordinatorConfig.read(path)


def test_an_address_is_split_into_what_sockets_take() -> None:
    assert split_address("[2001:db8::5]:7443") == ("2001:db8::5", 7443)
    assert split_address("coordinator.example.org:7443") == ("coordinator.example.org", 7443)


@pytest.mark.parametrize(
    ("listen", "host"), [(":7444", "10.0.0.1"), ("0.0.0.0:7444", "10.0.0.300"), ("[::]:7444", "a/b")]
)
def test_where_hospitals_enrol_is_checked_as_other_addresses_are(tmp_path: Path, listen: str, host: str) -> None:
    with pytest.raises(ValidationError, match=r"should be host:port|is not an IP address|is not a host name"):
        EnrolmentConfig(listen=listen, host=host, ca=tmp_path)
