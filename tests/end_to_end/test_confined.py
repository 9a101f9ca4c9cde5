"""A confined silo: the kernel lets nothing out but what the journal tells of, and says how much that was."""

from __future__ import annotations

import ctypes
import http.server
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import yaml

from medsilo.algorithms.datasets import ImageDataset
from tests.support.network.connect_proxy import ConnectProxy
from tests.support.runs.blind import blind
from tests.support.runs.federation import BIG, PATIENCE, Federation, Process
from tests.support.runs.masked import masked
from tests.support.runs.witness_daemon import Witness, name_witnesses

Make = Callable[..., Federation]


def _allowed() -> bool:
    child = os.fork()
    if not child:
        os._exit(bool(ctypes.CDLL(None).unshare(0x10000000 | 0x40000000)))
    return os.waitpid(child, 0)[1] == 0


pytestmark = pytest.mark.skipif(not _allowed(), reason="this machine lets no account make a network namespace")


@pytest.fixture
def elsewhere() -> Iterator[tuple[str, list[bytes]]]:
    """An address of this machine that is no loopback address of a namespace, and what was posted to it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(("198.51.100.1", 9))  # sends nothing: it says which address this machine would use
            host = str(asking.getsockname()[0])
        except OSError:
            pytest.skip("this machine has no address besides loopback")
    posted: list[bytes] = []

    class Taking(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *arguments: Any) -> None:
            del format, arguments

    with http.server.ThreadingHTTPServer((host, 0), Taking) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"{host}:{server.server_port}", posted
        server.shutdown()


def run(one: Federation, *, prefix: tuple[str, ...] = (), confined: bool = True) -> dict[str, Any]:
    """A run to its end, hospital1 confined; its report."""
    processes: list[Process] = [one.start_coordinator()]
    words = ("--confined",) * confined
    processes.append(one.start("silo", "train", *words, "--config", "hospital1.yaml", prefix=prefix))
    processes += [one.start_silo(name) for name in one.silos[1:]]
    one.finish(*processes)
    one.command("silo", "report", "--config", "hospital1.yaml")
    path = one.folder / "state" / "hospital1" / "report" / "report.json"
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


def plain(make: Make, **options: Any) -> Federation:
    return make(**options)


def of_several_messages(make: Make, **options: Any) -> Federation:
    return make(run={"model": BIG, "rounds": 2}, **options)


def private(make: Make, **options: Any) -> Federation:
    settings = {
        "training": {"epochs": 1, "batch_size": 32, "learning_rate": 0.001},
        "rounds": 2,
        "ask_for": [],
        "privacy": {"epsilon": 4.0, "delta": 1e-5, "clipping_norm": 1.0, "sampling_rate": 0.25},
    }
    classes = ("PROTOCOL", "IDENTITY", "MODEL_PARAMETERS", "PEER_DERIVED", "SAMPLE_COUNT")
    one = make(run=settings, exposures=classes, **options)
    for name in one.silos:
        one.write_consent(name, privacy={"epsilon": 9.0, "delta": 1e-5})
    return one


@pytest.mark.parametrize("kind", [plain, of_several_messages, private, masked, blind])
def test_the_kernel_let_out_what_the_journal_tells_of_and_its_carriage(
    federation: Make, kind: Callable[..., Federation]
) -> None:
    one = kind(federation)
    report = run(one)
    (egress,) = report["egress"]
    counts = [record for record in one.records("hospital1") if record["kind"] == "egress"]
    assert counts[0]["sent"] == counts[0]["connections"] == 0
    assert [record["sent"] for record in counts] == sorted(record["sent"] for record in counts)
    assert all("witnesses" not in record for record in counts)
    assert [way["address"] for way in egress["ways"]] == [f"127.0.0.1:{one.port}"]
    assert egress["attributed"] == report["bytes_left"] == sum(r["length"] for r in one.messages("hospital1", "sent"))
    assert report["uncounted"] == 0
    assert egress["interfaces"] == ["lo"]
    assert egress["refused"] == 0
    assert 0 < egress["overhead"] <= egress["allowance"]
    assert egress["accounted"]
    print(kind.__name__, egress)  # noqa: T201 for docs/operating.md
    assert "proven by the kernel" in (one.folder / "state" / "hospital1" / "report" / "report.html").read_text()
    one.command("silo", "audit", "verify", "--config", "hospital1.yaml")
    one.command("silo", "dossier", "--config", "hospital1.yaml", "--bom", "bom.json")
    dossier = one.folder / "state" / "hospital1" / "dossier" / "dossier.json"
    for cited in (dossier, one.folder / "bom.json"):
        one.command("silo", "audit", "show", "--cited", str(cited), "--config", "hospital1.yaml")
    kernels = [s for s in json.loads(dossier.read_bytes())["statements"] if "kernel_bytes" in s.get("figures", {})]
    assert {one["figures"]["kernel_bytes"] for one in kernels} == {egress["sent"]}


def test_a_coordinator_that_comes_late_is_reached(federation: Make, shards: list[ImageDataset]) -> None:
    one = federation(shards=shards[:1], run={"rounds": 1})
    silo = one.start("silo", "train", "--confined", "--config", "hospital1.yaml")
    one.wait_to_say("hospital1", "does not answer")
    said = " ".join(one.said("hospital1").split())
    assert f"the coordinator at 127.0.0.1:{one.port} does not answer (UNAVAILABLE: the relay cannot connect: " in said
    assert "Connection refused" in said
    assert "certificate" not in said
    one.finish(one.start_coordinator(), silo)
    last = [record for record in one.records("hospital1") if record["kind"] == "egress"][-1]
    assert last["sent"] > 0
    assert last["refused"] == 0


def test_witnesses_are_reached_and_each_address_is_held_against_what_went_there(
    federation: Make, shards: list[ImageDataset]
) -> None:
    one = federation(shards=shards[:2], run={"rounds": 2})
    plain, secure, away = Witness(one, "plain"), Witness(one, "secure", secure=True), Witness(one, "away")
    name_witnesses(one, [plain, secure, away])
    plain.start()
    secure.start()
    report = run(one)
    sent = one.messages("hospital1", "sent")
    # What is away was not asked: what does not leave is no record.
    assert {r["peer"] for r in sent if r["peer"].startswith("witness:")} == {
        "witness:plain.example.org",
        "witness:secure.example.org",
    }
    status = json.loads((one.folder / "state" / "hospital1" / "witnesses.json").read_text())
    assert [status[f"{name}.example.org"]["away"] is None for name in ("plain", "secure", "away")] == [
        True,
        True,
        False,
    ]
    assert "Connection refused" in status["away.example.org"]["away"]
    (egress,) = report["egress"]
    print(egress)  # noqa: T201 for docs/operating.md
    assert egress["accounted"]
    assert egress["attributed"] == report["bytes_left"] == sum(r["length"] for r in sent)
    assert (report["uncounted"], egress["refused"]) == (0, 0)
    ways = {way["address"]: way for way in egress["ways"]}
    to = {name: ways[f"127.0.0.1:{port}"] for name, port in (("coordinator", one.port), ("plain", plain.port))}
    to |= {"secure": ways[f"127.0.0.1:{secure.port}"], "away": ways[f"127.0.0.1:{away.port}"]}
    for name in ("plain", "secure", "away"):
        asked = [r for r in sent if r["peer"] == f"witness:{name}.example.org"]
        assert to[name]["witnesses"] == [f"{name}.example.org"]
        assert to[name]["attributed"] == sum(r["length"] for r in asked)
        assert to[name]["messages"] == to[name]["connections"] == len(asked)
    # Without TLS there is nothing on the wire but what is on record, to the byte.
    assert to["plain"]["overhead"] == sum(r["head_length"] for r in sent if r["peer"] == "witness:plain.example.org")
    assert 0 < to["secure"]["overhead"] <= to["secure"]["allowance"]
    assert to["away"]["sent"] == to["away"]["connections"] == 0
    assert 0 < to["coordinator"]["overhead"] <= to["coordinator"]["allowance"]
    one.command("silo", "audit", "verify", "--config", "hospital1.yaml", "--witness", plain.key)


def test_by_a_proxy_what_went_to_witnesses_is_counted_apart(federation: Make, shards: list[ImageDataset]) -> None:
    one = federation(shards=shards[:1], run={"rounds": 1})
    witness = Witness(one, "here", secure=True)
    name_witnesses(one, [witness])
    witness.start()
    proxy = ConnectProxy()
    try:
        settings = yaml.safe_load((one.folder / "hospital1.yaml").read_text())
        address = f"127.0.0.1:{proxy.port}"
        one.write("hospital1.yaml", {**settings, "proxy": {"url": f"http://{address}"}})
        report = run(one)
    finally:
        proxy.close()
    (egress,) = report["egress"]
    assert [(way["address"], way["witnesses"]) for way in egress["ways"]] == [
        (address, []),
        (address, ["here.example.org"]),
    ]
    asked = [r for r in one.messages("hospital1", "sent") if r["peer"].startswith("witness:")]
    assert egress["ways"][1]["attributed"] == sum(r["length"] for r in asked) > 0
    assert egress["accounted"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_both_processes(federation: Make, shards: list[ImageDataset], number: int) -> None:
    one = federation(shards=shards[:1])
    silo = one.start("silo", "train", "--confined", "--config", "hospital1.yaml")
    one.wait_to_say("hospital1", "does not answer")
    (daemon,) = psutil.Process(silo.pid).children()
    os.kill(silo.pid or 0, number)
    assert silo.wait(PATIENCE) == 128 + number
    daemon.wait(PATIENCE)


def test_a_leak_is_stopped_and_shows_in_the_report(
    federation: Make, shards: list[ImageDataset], elsewhere: tuple[str, list[bytes]]
) -> None:
    address, posted = elsewhere
    one = federation(shards=shards[:2])
    report = run(one, prefix=("leaking", address))
    assert posted == []
    assert "the leak was stopped: " in one.said("hospital1")
    (egress,) = report["egress"]
    assert egress["refused"] > 0
    assert egress["accounted"]
    page = (one.folder / "state" / "hospital1" / "report" / "report.html").read_text()
    assert "Something tried to, and the kernel stopped it" in page


def test_without_confinement_the_same_leak_is_out_and_nothing_is_proven(
    federation: Make, shards: list[ImageDataset], elsewhere: tuple[str, list[bytes]]
) -> None:
    address, posted = elsewhere
    one = federation(shards=shards[:2])
    report = run(one, prefix=("leaking", address), confined=False)
    assert posted == [b"p" * 1000]
    assert report["egress"] == []
    assert "by the kernel" not in (one.folder / "state" / "hospital1" / "report" / "report.html").read_text()
