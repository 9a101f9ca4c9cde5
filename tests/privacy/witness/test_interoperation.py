"""With a witness that shares no code with this project: Go's own implementation of notes and of trees."""

from __future__ import annotations

import http.client
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from medsilo.privacy.audit.verification import verify_evidence
from medsilo.privacy.audit.witnesses import Asked
from medsilo.privacy.consent.gate import PlanGate
from medsilo.privacy.door.witnessing import Witnessing
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.identity.cosignature import ED25519, Policy, key_text, read_key
from medsilo.privacy.witness.config import WitnessAddress
from medsilo.privacy.witness.link import WitnessLink
from medsilo.privacy.witness.protocol import AddCheckpoint
from tests.support.evidence.exchanging import CONSENT, Exchange, Party, key_of, origin_of
from tests.support.evidence.witnessed import WITNESS, Clocks, World
from tests.support.runs.federation import free_port

GO_CODE = Path("/usr/share/gocode")
SOURCE = Path(__file__).parents[2] / "support" / "interop" / "witness.go"
SEED = bytes([7]) * 32


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The witness, built of Debian's golang-golang-x-mod-dev."""
    if shutil.which("go") is None or not (GO_CODE / "src" / "golang.org" / "x" / "mod" / "sumdb" / "note").exists():
        pytest.skip("needs Go and its module x/mod (Debian: golang-go golang-golang-x-mod-dev)")
    built = tmp_path_factory.mktemp("go") / "witness"
    environment = {**os.environ, "GO111MODULE": "off", "GOPATH": str(GO_CODE), "GOCACHE": str(built.parent / "cache")}
    subprocess.run(["go", "build", "-o", str(built), str(SOURCE)], check=True, env=environment)
    return built


@pytest.fixture
def exchange(tmp_path: Path) -> Exchange:
    coordinator = Party("spiffe://test/coordinator/coordinator", tmp_path / "coordinator", key_of(200))
    return Exchange(Party("spiffe://test/silo/hospital1", tmp_path / "hospital1", key_of(1)), coordinator)


@pytest.fixture
def go_witness(program: Path, exchange: Exchange) -> Iterator[WitnessAddress]:
    log = key_text(origin_of(exchange.silo.identity), exchange.silo.public, ED25519)
    port = free_port()
    words = [str(program), "serve", f"127.0.0.1:{port}", "go.example.org/w", SEED.hex(), log]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    key = process.stdout.readline().strip()
    yield WitnessAddress(url=f"http://127.0.0.1:{port}", key=key)
    process.kill()
    process.wait()


def test_a_journal_is_cosigned_round_by_round_by_a_witness_of_go(
    exchange: Exchange, go_witness: WitnessAddress, tmp_path: Path
) -> None:
    key = go_witness.key
    exchange.consent = {
        **CONSENT,
        "exposures": [*CONSENT["exposures"], "CHECKPOINT"],
        "witnesses": {"keys": [key], "needed": 1, "fresh_hours": None},
    }
    exchange.begin()
    for number in range(6):
        exchange.rounds([number])
        showing = Witnessing(
            [WitnessLink(go_witness)], exchange.silo.door, lambda _key: PlanGate([Exposure.CHECKPOINT]), tmp_path
        )
        showing.close()  # which waits for the last checkpoint's cosignature
    exchange.attest()
    exchange.silo.journal.close()
    records = [r for r in exchange.silo.journal.records() if r["kind"] == "cosigned"]
    assert [r["witnesses"] for r in records] == [[key]] * 6
    found = verify_evidence(exchange.silo.folder, witnesses=Asked(Policy((read_key(key),), 1)))
    assert found.sound, found.sentences()
    assert found.witnessed is not None
    assert found.witnessed["covered"] > 40


def test_go_refuses_a_second_history_as_our_witness_does(exchange: Exchange, go_witness: WitnessAddress) -> None:
    exchange.begin()

    def ask(question: AddCheckpoint) -> int:
        connection = http.client.HTTPConnection(go_witness.address, timeout=30)
        connection.request("POST", "/add-checkpoint", body=b"".join(question.parts()))
        return connection.getresponse().status

    journal = exchange.silo.journal
    size = len(journal)
    assert ask(AddCheckpoint(0, (), journal.checkpoint())) == 200
    exchange.rounds([0])
    proof = tuple(journal.consistency(size, len(journal)))
    note = journal.checkpoint()
    assert ask(AddCheckpoint(size, (bytes(32), *proof[1:]), note)) == 422
    assert ask(AddCheckpoint(0, (), note)) == 409
    assert ask(AddCheckpoint(size, proof, note)) == 200


def test_go_checks_what_our_witness_has_cosigned(program: Path, tmp_path: Path) -> None:
    clocks = Clocks()
    with clocks.set():
        world = World(tmp_path / "world", clocks).begin()
        for number in range(5):
            world.round(number)
    party = world.exchanges[0].silo
    log = key_text(origin_of(party.identity), party.public, ED25519)
    notes = [r["checkpoint"] for r in party.journal.records() if r["kind"] == "cosigned"]
    assert len(notes) == 5
    times = []
    words = [str(program), "verify", log, WITNESS.text]
    for note in notes:
        checked = subprocess.run(words, input=note, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr
        times.append(int(checked.stdout))
        damaged = note.replace("\n", "\n1", 1)
        assert subprocess.run(words, input=damaged, capture_output=True, text=True).returncode != 0
    assert times == sorted(times)
    assert times[-1] == int(clocks.true)
