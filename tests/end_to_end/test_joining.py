"""From nothing to the first round with real processes: the README's four commands, and what may go wrong on the way."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from medsilo.algorithms.datasets import ImageDataset, load_npz, save_npz
from medsilo.protos.versions import OLDEST_VERSION, PROTOCOL_VERSION
from tests.support.daemons.forked import Forked
from tests.support.runs.federation import PATIENCE, free_port

README = Path(__file__).parents[2] / "README.md"
SECTION = "## Four commands"


class Machines:
    """A coordinator's machine and hospitals' machines: folders."""

    def __init__(self, folder: Path, shard: ImageDataset) -> None:
        self.folder = folder
        self.port, self.enrolment_port = free_port(), free_port()
        self.images = folder / "images.npz"
        save_npz(self.images, shard)
        self.running: list[Forked] = []

    def start(self, machine: str, words: list[str]) -> Forked:
        self.running.append(Forked(words, self.place(machine), self.folder / f"{machine}.log"))
        return self.running[-1]

    def command(self, machine: str, *words: str, expect: int = 0) -> str:
        """Runs a command to its end; returns what it said."""
        said = self.folder / "command.out"
        said.unlink(missing_ok=True)
        code = Forked(words, self.place(machine), said).wait(PATIENCE)
        assert code == expect, f"{words}: {code}\n{said.read_text()}\n{self.said('coordinator')}"
        return said.read_text()

    def place(self, machine: str) -> Path:
        (self.folder / machine).mkdir(exist_ok=True)
        return self.folder / machine

    def said(self, machine: str) -> str:
        path = self.folder / f"{machine}.log"
        return path.read_text() if path.exists() else ""

    def wait_to_say(self, machine: str, text: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while text not in self.said(machine):
            assert time.monotonic() < deadline, f"{machine} did not say {text!r}:\n{self.said(machine)}"
            assert all(process.poll() in (None, 0) for process in self.running), self.said(machine)
            time.sleep(0.02)

    def begin(self, *more: str) -> str:
        """A served federation; the invitation of hospital1."""
        ports = ["--port", str(self.port), "--enrolment-port", str(self.enrolment_port)]
        words = ["--federation", "tissue", "--host", "127.0.0.1", "--invite", "hospital1", *ports, *more]
        said = self.command("coordinator", "coordinator", "init", *words)
        self.start("coordinator", ["coordinator", "serve", "--config", "coordinator.yaml"])
        self.wait_to_say("coordinator", "listening on")
        return invitation_in(said)

    def invite(self) -> str:
        return invitation_in(
            self.command("coordinator", "coordinator", "invite", "hospital1", "-c", "coordinator.yaml")
        )

    def end(self) -> None:
        for process in self.running:
            if process.poll() is None:
                process.kill()
                process.wait()


def invitation_in(said: str) -> str:
    (line,) = [line for line in said.splitlines() if line.startswith("medsilo:1/")]
    return line


@pytest.fixture
def machines(tmp_path: Path, shards: list[ImageDataset]) -> Iterator[Machines]:
    one = Machines(tmp_path, shards[0])
    yield one
    one.end()


def test_the_four_commands_of_the_readme_lead_to_the_first_round(machines: Machines) -> None:
    section = README.read_text().partition(SECTION)[2].partition("\n## ")[0]
    commands = [
        shlex.split(line, comments=True)
        for block in re.findall(r"^```\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
        if line.startswith(("coordinator ", "silo "))
    ]
    init, serve, join, train = commands
    assert [words[:2] for words in commands] == [
        ["coordinator", "init"],
        ["coordinator", "serve"],
        ["silo", "init"],
        ["silo", "train"],
    ]
    init[init.index("--host") + 1] = "127.0.0.1"
    ports = ["--port", str(machines.port), "--enrolment-port", str(machines.enrolment_port)]
    said = machines.command("coordinator", *init, *ports)
    machines.start("coordinator", serve)
    machines.wait_to_say("coordinator", "listening on")
    looked = machines.command("coordinator", "coordinator", "doctor", "--config", "coordinator.yaml")
    assert looked.count("this coordinator answers on") == 2
    machines.command("another", *init, *ports)
    assert "another program (another coordinator?) does" in machines.command("another", *serve, expect=1)
    assert join[2].startswith("medsilo:1/")
    join[2] = invitation_in(said)
    join[join.index("--data") + 1] = str(machines.images)
    assert "hospital1: ready" in machines.command("hospital", *join)
    told = machines.command("hospital", "silo", "report", "--config", "hospital1.yaml", "--format", "json")
    assert "for nothing else yet" in told
    assert "plain text" not in told, "what enrolled it was encrypted, though no certificate is on record yet"
    machines.start("hospital", train)
    machines.wait_to_say("coordinator", "round 1 of 10 has ended with 1 update (")
    assert "asks nobody for accuracies" in machines.command(
        "coordinator", "coordinator", "results", "--config", "coordinator.yaml"
    )
    assert "ssl" not in machines.said("coordinator"), "the doctor's visit is no failed handshake"
    machines.end()
    verified = machines.command("hospital", "silo", "audit", "verify", "--config", "hospital1.yaml")
    assert "are in place and unchanged" in verified
    report = machines.command("hospital", "silo", "report", "--config", "hospital1.yaml", "--format", "json")
    assert "hospital1" in report
    looked = machines.command("hospital", "silo", "doctor", "--config", "hospital1.yaml", "--json", expect=14)
    content = json.loads(looked.partition("\nerror:")[0])
    assert [finding["check"] for finding in content["findings"] if finding["state"] == "bad"] == ["address"]


def test_a_slip_in_a_name_is_told_where_it_is_and_nothing_is_begun(machines: Machines) -> None:
    wanted = ["coordinator", "init", "--federation", "tissue", "--host", "127.0.0.1", "--invite", "hospital1"]
    said = machines.command("coordinator", *wanted, "--model", "diversified-cnn", expect=2)
    assert "--model: model 'diversified-cnn' is not known; use one of diversifed-cnn" in said
    said = machines.command("coordinator", *wanted, "--method", "fedprux", expect=2)
    assert "--method: method 'fedprux' is not known; did you mean 'fedprox'?" in said
    said = machines.command("coordinator", *wanted, "--shape", "28x28x3", expect=2)
    assert "28x28x3 would be 28 channels; they come first: --shape 3,28,28" in said
    assert not (machines.place("coordinator") / "coordinator.yaml").exists()
    few = machines.command("few", *wanted, "--method", "diversifed")
    assert "Note: diversifed does nothing with fewer than three silos" in few
    machines.command("coordinator", *wanted)
    path = machines.place("coordinator") / "coordinator.yaml"
    good = path.read_text()
    for key, right, wrong in (("run.method", "name: fedavg", "name: fedavk"), ("run.model", "diversifed-cnn", "cnn")):
        path.write_text(good.replace(right, wrong, 1))
        said = machines.command("coordinator", "coordinator", "serve", "--config", "coordinator.yaml", expect=2)
        assert f"coordinator.yaml: `{key}`: " in said
    for command in ("silo", "coordinator", "simulation"):
        protocol = f"protocol version {PROTOCOL_VERSION} (from {OLDEST_VERSION} on)"
        assert machines.command("coordinator", command, "--version") == f"{command} {version('medsilo')}, {protocol}\n"


def test_who_may_not_enrol_is_told_why_and_leaves_nothing_half_done(machines: Machines) -> None:
    line = machines.begin()
    words = ["--data", str(machines.images)]
    *front, code, expires = line.split("/")
    wrong = "/".join([*front, code[::-1].translate(str.maketrans("a", "b")), expires])
    said = machines.command("one", "silo", "init", wrong, *words, expect=6)
    assert "does not enrol this hospital: the invitation's code is wrong" in said
    # The same folder, with the right one.
    said = machines.command("one", "silo", "init", line, *words)
    assert "Nothing is agreed to yet" in said
    assert "hospital1: to be mended" in said
    said = machines.command("thief", "silo", "init", line, *words, expect=6)
    assert "was used on" in said
    assert "hospital1.yaml and the keys stay" in said
    late = machines.invite()
    kept = machines.place("coordinator") / "state/coordinator/invitations.json"
    content = json.loads(kept.read_text())
    content["invitations"][-1]["expires"] = "2026-01-01T00:00:00Z"
    kept.write_text(json.dumps(content))
    assert "expired on 2026-01-01" in machines.command("late", "silo", "init", late, *words, expect=6)
    back = machines.invite()
    machines.command("coordinator", "coordinator", "invite", "hospital1", "--revoke", "-c", "coordinator.yaml")
    assert "taken back" in machines.command("late", "silo", "init", back, *words, expect=6)
    listed = machines.command("coordinator", "coordinator", "invite", "--list", "-c", "coordinator.yaml")
    assert re.findall(r"hospital1 +│ ([a-z ]*[a-z])", listed) == ["used", "expired", "taken back"]
    # With nothing agreed to, the hospital is known and nothing of it leaves.
    said = machines.command("one", "silo", "train", "--config", "hospital1.yaml", expect=4)
    assert "What needs it is not sent" in said


def test_who_tries_an_enrolled_hospitals_invitations_does_it_no_harm(machines: Machines) -> None:
    """Not with the one that was used, nor with another that was lost on its way."""
    line = machines.begin("--rounds", "1")
    words = ["--data", str(machines.images), "--yes-to", "fedavg"]
    machines.command("hospital", "silo", "init", line, *words)
    assert "was used on" in machines.command("thief", "silo", "init", line, *words, expect=6)
    lost = machines.invite()
    assert "was enrolled with the audit key" in machines.command("thief", "silo", "init", lost, *words, expect=6)
    trained = machines.start("hospital", ["silo", "train", "--config", "hospital1.yaml"])
    assert trained.wait(PATIENCE) == 0, machines.said("hospital")
    for place, party, config in (("hospital", "silo", "hospital1"), ("coordinator", "coordinator", "coordinator")):
        out = str(machines.folder / f"{party}.json")
        machines.command(place, party, "audit", "export", "--config", f"{config}.yaml", "--out", out)
    own, other = (str(machines.folder / f"{party}.json") for party in ("silo", "coordinator"))
    assert "agree on every message" in machines.command("hospital", "silo", "audit", "verify", own, "--peer", other)
    records = json.loads((machines.folder / "coordinator.json").read_text())["records"]
    refused = [record for record in records if record["kind"] == "refusal"]
    assert [(record["rpc"], record["direction"]) for record in refused] == [("Enrol", "received")] * 2
    assert "was used on" in refused[0]["reason"]
    assert "was enrolled with the audit key" in refused[1]["reason"]


def test_somebody_in_between_with_another_certificate_is_found_out(machines: Machines) -> None:
    """Another federation of the same names, at the address that the hospital reaches."""
    line = machines.begin()
    impostor = Machines(machines.place("between"), load_npz(machines.images))
    try:
        theirs = impostor.begin()
        address = "/".join(theirs.split("/")[1:3])
        diverted = "/".join([*line.split("/")[:1], address, *line.split("/")[3:]])
        said = machines.command("hospital", "silo", "init", diverted, "--data", str(machines.images), expect=5)
        assert "is not the coordinator of the invitation" in said
        assert "Nothing was sent" in said
        assert list(machines.place("hospital").iterdir()) == []
        assert "enrol" not in impostor.said("coordinator").partition("listening on")[2]
    finally:
        impostor.end()
    machines.command("hospital", "silo", "init", line, "--data", str(machines.images))


def test_an_enrolment_that_was_killed_goes_on_with_the_same_command(machines: Machines) -> None:
    """Killed again and again, each time a few steps on disk later than the last."""
    line = machines.begin()
    # The last word tells the harness whose state folder it is whose steps count.
    shutil.copy(machines.images, machines.place("hospital") / "hospital1.npz")
    words = ["silo", "init", line, "--yes-to", "fedavg", "--data", "hospital1.npz"]
    killed = 0
    for at in range(1, 200, 3):
        said = machines.folder / "killed.out"
        command = ["deadly", f"kill:disk:{at}:before", *words]
        code = Forked(command, machines.place("hospital"), said).wait(PATIENCE)
        if code == 0:
            break
        assert code == -9, said.read_text()
        killed += 1
    assert killed > 5
    assert "hospital1: ready" in machines.command("hospital", *words)
    machines.command("hospital", "silo", "doctor", "--config", "hospital1.yaml")
    for party, config in (("hospital", "hospital1"), ("coordinator", "coordinator")):
        folder = machines.place(party) / "state" / config / "keys"
        assert not list(folder.parent.rglob("*.partial")), "nothing half made is left"
    assert "are in place and unchanged" in machines.command(
        "hospital", "silo", "audit", "verify", "--config", "hospital1.yaml"
    )


def test_at_a_terminal_it_asks_for_what_it_needs(machines: Machines) -> None:
    line = machines.begin()
    program = [sys.executable, "-c", "from medsilo.silo.cli import main; main()", "init"]
    own, other = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(README.parent), "COLUMNS": "200"}
    process = subprocess.Popen(
        program, cwd=machines.place("hospital"), stdin=other, stdout=other, stderr=other, env=environment
    )
    os.close(other)
    said = ""
    answers = [
        ("The invitation, one line", line),
        ("The hospital's images", "nowhere.npz"),
        ("there is no such file", ""),
        ("The hospital's images", str(machines.images)),
        ("Does hospital1 agree", "y"),
    ]
    seen = 0
    for question, answer in answers:
        said, seen = _read_until(own, said, seen, question)
        if answer:
            os.write(own, f"{answer}\n".encode())
    said, seen = _read_until(own, said, seen, "silo train --config")
    os.close(own)
    assert process.wait(PATIENCE) == 0
    for exposure, leaves in (
        ("MODEL_PARAMETERS_EXTRACTOR", "yes"),
        ("SAMPLE_COUNT", "yes"),
        ("PEER_DERIVED", "no: made"),
    ):
        assert re.search(rf"{exposure} +│ {leaves}", said), "what would leave is shown before it is asked about"
    consent = (machines.place("hospital") / "hospital1.consent.yaml").read_text()
    assert "at the terminal, with `silo init`" in " ".join(consent.split("\n# "))


def _read_until(terminal: int, said: str, seen: int, text: str) -> tuple[str, int]:
    deadline = time.monotonic() + PATIENCE
    while text not in said[seen:]:
        assert time.monotonic() < deadline, said
        if select.select([terminal], [], [], 1)[0]:
            said += os.read(terminal, 65536).decode(errors="replace")
    return said, said.index(text, seen) + len(text)
