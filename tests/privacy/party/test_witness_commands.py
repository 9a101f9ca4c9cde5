"""A witness that was set up as its page says cosigns, over HTTP and from its own process."""

import http.client
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from typer.testing import CliRunner

from medsilo.coordinator.cli import app as coordinator_app
from medsilo.privacy.identity.cosignature import ED25519, cosigned_at, key_text, read_key
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.identity.keys import create_keys, load_audit_key
from medsilo.privacy.journal.checkpoint import Checkpoint
from medsilo.privacy.journal.merkle import MerkleTree
from medsilo.privacy.witness.protocol import AddCheckpoint, joined
from medsilo.silo.cli import app as silo_app
from tests.support.runs.federation import free_port

ORIGIN = "medsilo/tissue/silo/hospital1"


def typed(*words: str) -> str:
    result = CliRunner().invoke(silo_app, words)
    assert result.exit_code == 0, result.output
    return result.output.strip()


@pytest.fixture
def party(tmp_path: Path) -> Path:
    """A hospital's configuration; its keys are there."""
    create_keys(tmp_path / "state" / "keys", Identity("tissue", "silo", "hospital1"))
    settings = {"federation": "tissue", "name": "hospital1", "state": "state", "shard": "none.npz"}
    path = tmp_path / "hospital1.yaml"
    path.write_text(yaml.safe_dump({**settings, "coordinator": {"address": "127.0.0.1:1"}}))
    return path


@pytest.fixture
def witness(tmp_path: Path, party: Path) -> Path:
    """A witness's configuration, on a port of its own choice."""
    settings = {"name": "ethics.example.org/w", "listen": "127.0.0.1:1", "state": "witness"}
    path = tmp_path / "witness.yaml"
    path.write_text(yaml.safe_dump({**settings, "logs": [typed("witness", "journal-key", "--config", str(party))]}))
    return path


@pytest.fixture
def serving(witness: Path) -> Iterator[int]:
    port = free_port()
    settings = {**yaml.safe_load(witness.read_text()), "listen": f"127.0.0.1:{port}"}
    witness.write_text(yaml.safe_dump(settings))
    typed("witness", "key", "--config", str(witness))
    program = [sys.executable, "-c", "from medsilo.coordinator.cli import main; main()"]
    process = subprocess.Popen([*program, "witness", "serve", "--config", str(witness)], stderr=subprocess.PIPE)
    assert process.stderr is not None
    for line in process.stderr:
        if b"listening on" in line:
            break
    yield port
    process.terminate()
    assert process.wait(30) == 0


def test_keys_are_printed_as_the_specification_has_them_and_stay_the_same(party: Path, witness: Path) -> None:
    journal = read_key(typed("witness", "journal-key", "--config", str(party)))
    public = load_audit_key(party.parent / "state" / "keys" / "audit.key").public_key().public_bytes_raw()
    assert (journal.text, journal.name) == (key_text(ORIGIN, public, ED25519), ORIGIN)
    first = typed("witness", "key", "--config", str(witness))
    assert read_key(first).name == "ethics.example.org/w"
    again = CliRunner().invoke(coordinator_app, ["witness", "key", "--config", str(witness)])
    assert again.output.strip() == first


def test_the_daemon_cosigns_what_the_hospital_signed(party: Path, witness: Path, serving: int) -> None:
    key: Ed25519PrivateKey = load_audit_key(party.parent / "state" / "keys" / "audit.key")
    tree = MerkleTree()
    for number in range(9):
        tree.append(str(number).encode())
    note = Checkpoint(ORIGIN, 9, tree.root()).sign(key)
    asked = http.client.HTTPConnection("127.0.0.1", serving, timeout=30)
    asked.request("POST", "/add-checkpoint", body=b"".join(AddCheckpoint(0, (), note).parts()))
    answer = asked.getresponse()
    line = answer.read().decode().removesuffix("\n")
    assert answer.status == 200
    assert cosigned_at(joined(note, [line]), read_key(typed("witness", "key", "--config", str(witness)))) is not None
