"""That the journals, and the reports made from them, say what was on the wire: all of it and nothing else."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from medsilo.privacy.exposure import Exposure
from medsilo.privacy.pages.wording import grouped
from tests.support.network.proxy import Proxy
from tests.support.runs.checks import assert_journals_have_what_was_on_the_wire, calls
from tests.support.runs.federation import BIG, Federation, without_signatures
from tests.support.runs.vouched import assert_vouched, said

Make = Callable[..., Federation]


def test_every_message_stands_in_both_journals_call_by_call_and_both_have_signed_for_it(federation: Make) -> None:
    """Each hospital's records against the coordinator's of that hospital: same calls, messages, lengths, hashes."""
    one = federation()
    coordinator = one.start_coordinator()
    # Recording comes before sending: with nobody listening there would be records of messages that never left.
    one.wait_to_say("coordinator", "listening")
    one.finish(*[one.start_silo(name) for name in one.silos], coordinator)
    for name in one.silos:
        for own, others in (("sent", "received"), ("received", "sent")):
            assert calls(one, name, own) == calls(one, "coordinator", others, peer=name)
        assert_vouched(one, name)
        for record in one.records(name):
            if record["kind"] == "message":
                assert record["length"] == sum(record["fields"].values()) == sum(record["classes"].values())
    peers = {record["peer"] for record in one.records("coordinator") if record["kind"] == "message"}
    assert peers == {f"spiffe://test/silo/{name}" for name in one.silos}


def test_the_report_names_every_class_with_its_bytes_as_a_page_and_as_json(federation: Make) -> None:
    one = federation(run={"rounds": 1})
    one.run_to_the_end()
    for name in one.silos:
        one.command("silo", "report", "--config", f"{name}.yaml", "--out", f"report-{name}")
        page = (one.folder / f"report-{name}" / "report.html").read_text()
        content = json.loads((one.folder / f"report-{name}" / "report.json").read_text())
        expected: dict[tuple[str, str], int] = {}
        for record in one.messages(name, "sent"):
            for exposure, count in record["classes"].items():
                key = (record["run"] or "", exposure)
                expected[key] = expected.get(key, 0) + count
        assert {
            (run["run"], flow["exposure"]): flow["bytes"] for run in content["runs"] for flow in run["left"]
        } == expected
        for (_, exposure), count in expected.items():
            assert f"<code>{exposure}</code>" in page.replace("<wbr>", "")
            assert f'<td class="number">{grouped(count)}</td>' in page
        (peer,) = content["peers"]
        assert peer["identity"] == "spiffe://test/coordinator/coordinator"
        assert peer["identity"] in page
        (certificate,) = peer["certificates"]
        assert certificate in page


def test_separate_training_sends_no_tensor_in_either_direction_but_the_start(federation: Make) -> None:
    one = federation(run={"method": {"name": "local"}, "rounds": 2}, exposures=["PROTOCOL", "IDENTITY"])
    one.run_to_the_end()
    for name in one.silos:
        sent = one.messages(name, "sent")
        assert not [field for record in sent for field in record["fields"] if field.startswith("chunk")]
        assert not [record for record in sent if record.get("tensors")]
        assert max(without_signatures(record) for record in sent) < 200
        told = {key for record in sent if "attestation" in record for key in said(record["attestation"])}
        assert told == {"v", "by", "to", "exchanges", "checkpoint", "consistency", "witnessed"}
        assert max(record["length"] for record in sent) < 4000
        came = {exposure for record in one.messages(name, "received") for exposure in record["classes"]}
        assert came == {"PROTOCOL", "IDENTITY", Exposure.INITIAL_MODEL}


@pytest.fixture
def island() -> Iterator[str]:
    """A network namespace with nothing but its own loopback."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    name = f"medsilo{os.getpid()}-island"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"this machine allows no network namespaces: {made.stderr}")
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """This thread, and the threads that it starts, in another network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/thread-self/ns/net").open() as here, (Path("/run/netns") / namespace).open() as there:
        assert libc.setns(there.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
        try:
            yield
        finally:
            assert libc.setns(here.fileno(), 0) == 0, os.strerror(ctypes.get_errno())


def counters(namespace: str) -> dict[str, int]:
    """The kernel's counts of what the namespace's sockets did, for example ``Tcp/ActiveOpens``."""
    content = subprocess.run(
        ["ip", "netns", "exec", namespace, "cat", "/proc/self/net/snmp", "/proc/self/net/snmp6"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    found: dict[str, int] = {}
    names: list[str] = []
    for line in content.splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            found[first] = int(rest[0])
        elif rest[0].lstrip("-").isdigit():
            found.update({f"{first[:-1]}/{name}": int(value) for name, value in zip(names, rest, strict=True)})
        else:
            names = rest
    return found


@pytest.mark.root
def test_every_sent_byte_is_in_the_journal_and_there_is_no_other_connection(federation: Make, island: str) -> None:
    """Coordinator, hospitals and recording proxies on a host with nothing but loopback, which counts connections.

    Every byte on every connection belongs to an HTTP/2 frame; the messages in them are the journals', in their order.
    """
    one = federation(insecure=True, run={"rounds": 2, "model": BIG})
    with inside(island):
        proxies = {name: Proxy(one.port) for name in one.silos}
    prefix = ("hosted", island, "20", "30")
    try:
        for name, proxy in proxies.items():
            one.write_silo(name, port=proxy.port)
        coordinator = one.start_coordinator(prefix=prefix)
        one.wait_to_say("coordinator", "listening")
        before = counters(island)
        one.finish(*[one.start_silo(name, prefix=prefix) for name in one.silos], coordinator)
        after = counters(island)
        connections = [connection for proxy in proxies.values() for connection in proxy.connections]
        # Each connection is two: to the proxy, and from it.
        assert after["Tcp/ActiveOpens"] - before["Tcp/ActiveOpens"] == 2 * len(connections)
        for datagrams in ("Udp/OutDatagrams", "Udp6OutDatagrams", "UdpLite/OutDatagrams"):
            assert after.get(datagrams, 0) == 0, f"{datagrams}: a name was looked up, or worse"
        for name, proxy in proxies.items():
            assert_journals_have_what_was_on_the_wire(one, name, proxy)
            for direction in ("sent", "received"):
                assert max(map(len, calls(one, name, direction).values())) > 3, "nothing was cut into several messages"
    finally:
        for proxy in proxies.values():
            proxy.close()
