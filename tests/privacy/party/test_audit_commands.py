"""``audit verify`` and ``audit export`` on the command line: exit codes, words, JSON."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from typer.testing import CliRunner

from medsilo.privacy.audit.findings import Verification
from medsilo.privacy.errors import ConfigurationError, IdentityError
from medsilo.privacy.party.audit_commands import audit_app
from medsilo.privacy.party.party import PartyConfig
from tests.support.evidence.exchanging import COORDINATOR, SILO, Exchange, key_of, two_rounds


def write_public(path: Path, key: Ed25519PrivateKey) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return path


@pytest.fixture(scope="module")
def exchange(tmp_path_factory: pytest.TempPathFactory) -> Exchange:
    return two_rounds(tmp_path_factory.mktemp("commands"))


class Audit:
    """The commands of a silo whose configuration is any file."""

    def __init__(self, exchange: Exchange, state: Path) -> None:
        self._party = PartyConfig(federation="test", name="hospital1", state=state)
        write_public(self._party.keys / "audit.pub", exchange.silo.key)
        self._party.journal.symlink_to(exchange.silo.folder)

    def __call__(self, *words: object) -> Any:
        return CliRunner().invoke(audit_app(lambda _config: self._party), [str(word) for word in words])


@pytest.fixture
def audit(exchange: Exchange, tmp_path: Path) -> Audit:
    return Audit(exchange, tmp_path / "state")


def test_sound_evidence_ends_with_0(audit: Audit, exchange: Exchange, tmp_path: Path) -> None:
    mine, theirs = exchange.silo.bundle(tmp_path / "a.json"), exchange.coordinator.bundle(tmp_path / "b.json")
    key = write_public(tmp_path / "audit.pub", exchange.silo.key)
    for words in (
        ("--config", "any"),
        (mine,),
        (exchange.silo.folder,),
        (mine, "--peer", theirs),
        ("--config", "any", "--peer", theirs),
        (mine, "--peer", exchange.coordinator.folder),
        (mine, "--key", key),
    ):
        done = audit("verify", *words)
        assert done.exit_code == 0, done.output
        assert "in place and unchanged" in done.output
        assert ("agree on every message" in done.output) == ("--peer" in words)


def test_broken_evidence_ends_with_1_and_says_where(audit: Audit, exchange: Exchange, tmp_path: Path) -> None:
    bundle = exchange.silo.bundle(tmp_path / "a.json")
    lines = bundle.read_bytes().splitlines(keepends=True)
    lines[6] = lines[6].replace(b'"sent"', b'"Sent"')
    bundle.write_bytes(b"".join(lines))
    done = audit("verify", bundle)
    assert done.exit_code == 1
    assert "NOT sound" in done.output
    assert "first bad record is number 3" in done.output
    # Here it is the other side's: nothing is said against the own.
    done = audit("verify", exchange.coordinator.folder, "--peer", bundle)
    assert done.exit_code == 1
    assert "are in place and unchanged" in done.output
    assert "NOT compared: the other side's evidence" in done.output
    assert "The record is NOT sound" not in done.output


def test_where_a_signature_covers_several_records_no_single_one_is_blamed(
    audit: Audit, exchange: Exchange, tmp_path: Path
) -> None:
    bundle = exchange.silo.bundle(tmp_path / "a.json")
    before, purpose, after = bundle.read_text().rpartition('"purpose":"')
    bundle.write_text(before + purpose + "!" + after[1:])
    said = audit("verify", bundle).output
    found = re.search(r"one of the records (\d+) to (\d+) is not the one that was signed", said)
    assert found, said
    assert f"The first bad record is one of the numbers {found[1]} to {found[2]}" in " ".join(said.split())


def test_another_key_ends_with_1(audit: Audit, exchange: Exchange, tmp_path: Path) -> None:
    bundle = exchange.silo.bundle(tmp_path / "a.json")
    other = write_public(tmp_path / "other.pub", key_of(9))
    done = audit("verify", bundle, "--key", other)
    assert done.exit_code == 1
    assert "the one that was given" in done.output.replace("\n", " ")


@pytest.mark.parametrize("content", [b"", b"{}", b"\x00\xff", b'{\n"header":{},\n"records":[\n', None])
def test_what_is_no_evidence_ends_with_2(audit: Audit, tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "file.json"
    if content is not None:
        path.write_bytes(content)
    for words in ((path,), (path, "--json"), (tmp_path, "--json")):
        done = audit("verify", *words)
        assert done.exit_code == 2, done.output
        assert "Traceback" not in done.output


def test_a_bundle_that_is_cut_off_ends_with_2(audit: Audit, exchange: Exchange, tmp_path: Path) -> None:
    bundle = exchange.silo.bundle(tmp_path / "a.json")
    bundle.write_bytes(bundle.read_bytes()[:-10])
    done = audit("verify", bundle)
    assert done.exit_code == 2
    assert "cut off" in done.output


def test_json_has_one_shape_whatever_was_found(audit: Audit, exchange: Exchange, tmp_path: Path) -> None:
    names = {"sound", "readable", *Verification("x").__dict__}
    bundle = exchange.silo.bundle(tmp_path / "a.json")
    found = json.loads(audit("verify", bundle, "--json").output)
    assert set(found) == names
    assert (found["sound"], found["readable"], found["party"], found["whole"]) == (True, True, SILO, True)
    assert found["records"] == found["signed"] == len(bundle.read_bytes().splitlines()) - 4
    assert (found["acknowledged"], found["problem"], found["index"]) == (found["sent"], "", None)
    found = json.loads(audit("verify", bundle, "--peer", exchange.coordinator.folder, "--json").output)
    assert found["peer"] == COORDINATOR
    bundle.write_bytes(bundle.read_bytes().replace(b'"frame":0', b'"frame":1', 1))
    found = json.loads(audit("verify", bundle, "--json").output)
    assert set(found) == names
    assert (found["sound"], found["readable"], found["index"]) == (False, True, 3)
    found = json.loads(audit("verify", tmp_path / "gone", "--json").output)
    assert set(found) == names
    assert (found["sound"], found["readable"]) == (False, False)
    assert found["problem"]


def test_nothing_in_evidence_steers_the_terminal(audit: Audit, tmp_path: Path) -> None:
    path = tmp_path / "\x1b[31mred.json"
    path.write_bytes(b"x")
    assert "\x1b" not in audit("verify", path).output


def test_what_to_verify_has_to_be_said(audit: Audit, exchange: Exchange, tmp_path: Path) -> None:
    assert isinstance(audit("verify").exception, ConfigurationError)
    path = tmp_path / "no.pub"
    path.write_bytes(b"rubbish")
    assert isinstance(audit("verify", exchange.silo.folder, "--key", path).exception, IdentityError)


def test_export_writes_what_verify_accepts(audit: Audit, tmp_path: Path) -> None:
    done = audit("export", "--config", "any")
    assert done.exit_code == 0
    assert (tmp_path / "state" / "hospital1-evidence.json").exists()
    for words in (("--rounds", "2"), ("--rounds", "1-2"), ("--run", "run1"), ("--run", "run1", "--rounds", "1")):
        path = tmp_path / "part.json"
        done = audit("export", "--config", "any", "--out", path, *words)
        assert done.exit_code == 0, done.output
        assert audit("verify", path).exit_code == 0
    folder = tmp_path / "crate"
    assert audit("export", "--config", "any", "--ro-crate", folder).exit_code == 0
    assert audit("verify", folder / "hospital1-evidence.json").exit_code == 0


@pytest.mark.parametrize("rounds", ["0", "-1", "x", "2-", "3-1", "1-x", "²", "1.5", "9" * 20, "1-2-3", ""])
def test_rounds_that_make_no_sense(audit: Audit, rounds: str) -> None:
    done = audit("export", "--config", "any", f"--rounds={rounds}")
    assert isinstance(done.exception, ConfigurationError), done.output


def test_rounds_or_runs_that_there_are_not(audit: Audit) -> None:
    for words in (("--rounds", "7"), ("--run", "other")):
        done = audit("export", "--config", "any", *words)
        assert isinstance(done.exception, ConfigurationError)
        assert "that run and those rounds" in str(done.exception)


@pytest.mark.parametrize("crate", [False, True], ids=["alone", "with a crate"])
def test_what_is_exported_into_the_state_folder_is_for_this_account_alone(
    audit: Audit, tmp_path: Path, crate: bool
) -> None:
    before = os.umask(0)
    try:
        words = ("--ro-crate", tmp_path / "crate") if crate else ()
        assert audit("export", "--config", "any", *words).exit_code == 0
        assert os.umask(0) == 0, "the rest of the process is as it was"
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "state" / "hospital1-evidence.json").stat().st_mode) == 0o600
    if crate:
        assert stat.S_IMODE((tmp_path / "crate" / "ro-crate-metadata.json").stat().st_mode) == 0o666
