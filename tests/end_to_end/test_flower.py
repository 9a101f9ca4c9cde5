"""An existing Flower app through the door: real server, real SuperNodes, in an environment of their own."""

from __future__ import annotations

import collections
import hashlib
import json
import os
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from medsilo.privacy.journal.journal import RECORDS, read_records
from tests.support.runs.federation import BIN, PATIENCE, free_port
from tests.support.runs.flower import CONSENT, RECORDS_OF_THE_APP, make_certificate

APP = Path(__file__).parents[1] / "support" / "runs" / "flower_app"


class Recorder:
    """Stands before the server with its certificate, and keeps each request as it came."""

    def __init__(self, folder: Path, target: int) -> None:
        self.requests: list[bytearray] = []
        self._target = target
        self._inner = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._inner.load_cert_chain(folder / "server.pem", folder / "server.key")
        self._outer = ssl.create_default_context(cafile=str(folder / "server.pem"))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                plain, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._pass_on, args=(plain,), daemon=True).start()

    def _pass_on(self, plain: socket.socket) -> None:
        request = bytearray()
        with self._inner.wrap_socket(plain, server_side=True) as near:
            far = self._outer.wrap_socket(
                socket.create_connection(("127.0.0.1", self._target)), server_hostname="localhost"
            )
            with far:
                self.requests.append(request)
                length = None
                while length is None or len(request) < length:
                    data = near.recv(1 << 16)
                    if not data:
                        return
                    request += data
                    far.sendall(data)
                    head, end, _ = request.partition(b"\r\n\r\n")
                    if end:
                        (line,) = (one for one in head.split(b"\r\n") if one.lower().startswith(b"content-length:"))
                        length = len(head) + 4 + int(line.partition(b":")[2])
                while data := far.recv(1 << 16):
                    near.sendall(data)


class Hospital:
    """One hospital: its folder, its door, its SuperNode."""

    def __init__(self, folder: Path, number: int, python: Path, server: int, **flower: Any) -> None:
        self.name = f"hospital{number}"
        self.number = number
        self.listen = free_port()
        self.config = folder / f"{self.name}.yaml"
        self.journal = folder / self.name / "journal"
        settings = {
            "federation": "test",
            "name": self.name,
            "state": self.name,
            "coordinator": {"address": f"localhost:{server}", "name": "superlink"},
            "ca": "server.pem",
            "consent": "consent.yaml",
            "flower": {
                "python": str(python),
                "listen": f"127.0.0.1:{self.listen}",
                "records": RECORDS_OF_THE_APP,
                **flower,
            },
        }
        self.config.write_text(yaml.safe_dump(settings))
        self.silo("keys", "--config", self.config)

    def silo(self, *arguments: object, code: int = 0) -> str:
        done = subprocess.run([BIN / "silo", *map(str, arguments)], capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def records(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        found = (record for record in read_records(self.journal) if record["kind"] == kind)
        return [record for record in found if all(record.get(key) == value for key, value in fields.items())]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts processes that end with the test, each with a log."""
    begun: list[subprocess.Popen[bytes]] = []

    def start(name: str, *command: object, **environment: str) -> subprocess.Popen[bytes]:
        with (tmp_path / f"{name}.log").open("wb") as log:
            begun.append(
                subprocess.Popen(
                    [str(part) for part in command],
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **environment},
                    start_new_session=True,
                )
            )
        return begun[-1]

    yield start
    for process in begun:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until(what: Callable[[], object], folder: Path, processes: Sequence[subprocess.Popen[bytes]] = ()) -> None:
    deadline = time.monotonic() + 3 * PATIENCE  # of seven processes, on a machine that has other tests to run
    while not what():
        ended = [process.args for process in processes if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            logs = "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(folder.glob("*.log")))
            raise AssertionError(f"{'ended: ' + str(ended) if ended else 'it does not come'}\n{logs}")
        time.sleep(0.1)


def answers_at(port: int) -> Callable[[], bool]:
    def answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    return answers


def test_a_flower_app_runs_through_the_door_and_nothing_leaves_beside_it(
    tmp_path: Path, flower_python: Path, begin: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """Two hospitals train and evaluate once. When they evaluate, one's app says more than was declared and the other's
    fails with a file's name in its words; the run completes all the same."""
    programs = flower_python.parent
    make_certificate(tmp_path)
    server, result = free_port(), tmp_path / "result.json"
    (tmp_path / "config.toml").write_text(
        f'[superlink]\ndefault = "test"\n[superlink.test]\naddress = "127.0.0.1:{server}"\n'
        f'root-certificates = "{tmp_path / "server.pem"}"\n'
    )
    flower = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": "",
        "HOME": str(tmp_path),
        "FLWR_HOME": str(tmp_path),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "TINY_RESULT": str(result),
    }
    certificates = ("--ssl-ca-certfile", "server.pem", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key")
    running = [
        begin(
            "superlink",
            programs / "flower-superlink",
            *(tmp_path / part if part.startswith("server") else part for part in certificates),
            *("--host", "127.0.0.1", "--port", server, "--disable-runtime-dependency-installation"),
            **flower,
        )
    ]
    (tmp_path / "consent.yaml").write_text(yaml.safe_dump(CONSENT))
    recorder = Recorder(tmp_path, server)
    hospitals = [Hospital(tmp_path, number, flower_python, recorder.port) for number in (1, 2)]
    doors = [begin(f"door{one.number}", BIN / "silo", "flower", "--config", one.config) for one in hospitals]
    wait_until(answers_at(server), tmp_path, running)
    for one in hospitals:
        wait_until(answers_at(one.listen), tmp_path, doors)
        options = ("--host", "127.0.0.1", "--port", free_port(), "--node-config", f"hospital={one.number}")
        node = (programs / "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{one.listen}", *options)
        running.append(begin(f"node{one.number}", *node, **flower))
    submitted = begin("run", programs / "flwr", "run", APP, "test", **flower)
    wait_until(result.exists, tmp_path, [*running, *doors])
    assert submitted.wait(PATIENCE) == 0
    wait_until(lambda: all(one.records("refusal") or one.number == 2 for one in hospitals), tmp_path)

    for node in running[1:]:
        node.terminate()  # they take their leave, through the door
        node.wait(PATIENCE)
    for door in doors:
        door.terminate()
        assert door.wait(PATIENCE) == 128 + signal.SIGTERM
    recorder.close()

    # FedAvg ran as it is: ones and twos, weighted by 10 and 20 examples.
    assert json.loads(result.read_text()) == {
        "weight": [[pytest.approx(5 / 3)] * 2] * 3,
        "bias": [pytest.approx(5 / 3)] * 2,
    }

    # What came to the server's machine is what the journals say, byte for byte, and nothing else came from the doors.
    seen = collections.Counter()
    for request in recorder.requests:
        head, _, body = bytes(request).partition(b"\r\n\r\n")
        seen[(hashlib.sha256(head + b"\r\n\r\n").hexdigest(), hashlib.sha256(body).hexdigest(), len(body))] += 1
    sent = [record for one in hospitals for record in one.records("message", direction="sent")]
    assert seen == collections.Counter((record["head_sha256"], record["sha256"], record["length"]) for record in sent)
    up = b"".join(map(bytes, recorder.requests))
    assert b"oldest-patient" not in up
    assert b"patient-4711" not in up
    assert b"withheld by the hospital" in up

    for one in hospitals:
        (announced,) = one.records("message", direction="sent", rpc="PushMessages", round=0)
        assert announced["tensors"] == [
            {"class": "MODEL_PARAMETERS_EXTRACTOR", "name": "arrays/weight", "shape": [3, 2], "dtype": "float32"},
            {"class": "MODEL_PARAMETERS_CLASSIFIER", "name": "arrays/bias", "shape": [2], "dtype": "float64"},
        ]
        classes: collections.Counter[str] = collections.Counter()
        for record in one.records("message", direction="sent"):
            classes.update(record["classes"])
        header = 128  # bytes that NumPy's form puts before the numbers
        assert classes["MODEL_PARAMETERS_EXTRACTOR"] == header + 6 * 4
        assert classes["MODEL_PARAMETERS_CLASSIFIER"] == header + 2 * 8
        assert classes["SAMPLE_COUNT"]
        assert one.records("run")[0]["plan"]["method"]["parameters"]["app_sha256"]

    # The undeclared metric is refused, on record, and the error's words are withheld.
    (refused,) = hospitals[0].records("refusal", direction="sent", rpc="PushMessages")
    assert "the metric 'oldest-patient' of record 'metrics' is not declared" in refused["reason"]
    assert not [record for record in hospitals[1].records("refusal") if record["rpc"] == "PushMessages"]

    shown = hospitals[0].silo("audit", "verify", "--config", hospitals[0].config)
    assert "signs no receipts" in shown
    said = hospitals[0].silo("report", "--config", hospitals[0].config, "--format", "json")
    assert "the hospital has declared" in " ".join(said.split())
    records = hospitals[0].journal / RECORDS
    content = bytearray(records.read_bytes())
    content[content.index(b'"SAMPLE_COUNT":') + 20] ^= 1
    records.write_bytes(content)
    hospitals[0].silo("audit", "verify", "--config", hospitals[0].config, code=1)
