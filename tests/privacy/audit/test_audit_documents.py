"""The published form of the bundle, and the documented ways to check one without this software."""

from __future__ import annotations

import base64
import copy
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rfc8785
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from jsonschema import Draft202012Validator

from medsilo.privacy.audit.bundle import Selection, export, open_evidence
from medsilo.privacy.audit.verification import verify_evidence
from medsilo.privacy.door.attestation import MOST_CALLS
from medsilo.privacy.journal.checkpoint import cosign
from medsilo.privacy.journal.merkle import leaf_hash
from medsilo.privacy.journal.records import Kind, RefusalRecord, read
from tests.support.evidence.exchanging import Exchange, meet
from tests.support.evidence.tampering import records_of, write_bundle

DOCS = Path(__file__).parents[3] / "docs"
SCHEMA = json.loads((DOCS / "bundle.schema.json").read_text())
VALIDATOR = Draft202012Validator(SCHEMA)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Whole bundles of both sides, and a stretch."""
    folder = tmp_path_factory.mktemp("bundles")
    exchange: Exchange = meet(folder)
    exchange.rounds([0, 1])
    exchange.attest()
    exchange.silo.door.note(RefusalRecord(reason="no", run="run2", plan_sha256="00" * 32, plan={}))
    exchange.silo.door.note(read({"kind": "of-a-later-release", "more": 1}))
    exchange.close()
    stretch = folder / "stretch.json"
    export(exchange.silo.folder, stretch, select=Selection(first_round=1, last_round=1))
    return {
        "silo": exchange.silo.bundle(folder / "silo.json"),
        "coordinator": exchange.coordinator.bundle(folder / "coordinator.json"),
        "stretch": stretch,
    }


@pytest.mark.parametrize("name", ["silo", "coordinator", "stretch"])
def test_real_bundles_have_the_published_form(bundles: dict[str, Path], name: str) -> None:
    Draft202012Validator.check_schema(SCHEMA)
    VALIDATOR.validate(json.loads(bundles[name].read_text()))


def test_attestations_have_the_published_form(bundles: dict[str, Path]) -> None:
    validator = Draft202012Validator({**SCHEMA["$defs"]["attestation"], "$defs": SCHEMA["$defs"]})
    words = [record["attestation"] for record in records_of(bundles["silo"]) if "attestation" in record]
    assert len(words) > 5
    for word in words:
        document = json.loads(base64.b64decode(word["payload"]))
        validator.validate(document)
        assert not validator.is_valid({**document, "more": 1})
        assert not validator.is_valid({**document, "checkpoint": "x"})
    assert SCHEMA["$defs"]["attestation"]["properties"]["exchanges"]["maxItems"] == MOST_CALLS


def without(name: str) -> Callable[[Any], Any]:
    return lambda content: {key: value for key, value in content.items() if key != name}


def having(**changes: Any) -> Callable[[Any], Any]:
    return lambda content: {**content, **changes}


BROKEN_FORMS: list[tuple[str, Callable[[Any], Any]]] = [
    *[("header", without(name)) for name in SCHEMA["$defs"]["header"]["required"]],
    ("header", having(more=1)),
    ("header", having(v=2)),
    ("header", having(size=0)),
    ("header", having(checkpoint="a\n1\n")),
    ("header", having(public_key="00")),
    ("header", having(before=[{"level": 63, "root": "00" * 32}])),
    *[
        ("message", without(name))
        for name in ("index", "time", "self", "sha256", "length", "fields", "classes", "frame")
    ],
    ("message", having(direction="away")),
    ("message", having(call_id="x")),
    ("message", having(length=-1)),
    ("message", having(length=1.5)),
    ("message", having(fields={"nonce": 0})),
    ("message", having(classes={"protocol": 3})),
    ("message", having(round="1")),
    ("message", having(time="2026-01-01")),
    ("message", having(attestation={"payload": ""})),
    ("key", without("origin")),
    ("peer-key", having(public_key=None)),
    ("schema", having(files="AAAA")),
    ("consent", having(consent={})),
    ("run", without("plan")),
    ("refusal", without("reason")),
]


@pytest.mark.parametrize("number", range(len(BROKEN_FORMS)))
def test_broken_forms_do_not(bundles: dict[str, Path], number: int) -> None:
    where, change = BROKEN_FORMS[number]
    content = copy.deepcopy(json.loads(bundles["silo"].read_text()))
    if where == "header":
        content["header"] = change(content["header"])
    else:
        at = next(index for index, record in enumerate(content["records"]) if record["kind"] == where)
        content["records"][at] = change(content["records"][at])
    assert not VALIDATOR.is_valid(content)


def test_every_kind_of_record_that_is_checked_is_described() -> None:
    assert set(SCHEMA["$defs"]) >= set(Kind)


@pytest.mark.parametrize("name", ["silo", "coordinator", "stretch"])
def test_the_script_verifies_by_hand(bundles: dict[str, Path], tmp_path: Path, name: str) -> None:
    """Far from this project: the script alone, in an empty folder."""
    shutil.copy(DOCS / "verify_by_hand.py", tmp_path)
    shutil.copy(bundles[name], tmp_path / "bundle.json")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-I", "verify_by_hand.py", "bundle.json", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    done = run()
    assert done.returncode == 0, done.stderr
    assert ("messages sent have the other side's signed receipt" in done.stdout) == (name != "stretch")
    (key,) = re.findall("Key: ([0-9a-f]{64})", done.stdout)
    assert f"its fingerprint: {verify_evidence(bundles[name]).key}" in done.stdout, "as `audit verify` calls the key"
    assert run(key).returncode == 0
    assert "another key" in run("00" * 32).stderr
    records = records_of(bundles[name])
    at = next(index for index, record in enumerate(records) if record["kind"] == "message")
    records[at]["length"] += 1
    write_bundle(tmp_path / "bundle.json", records, bundles[name])
    done = run()
    assert done.returncode == 1
    assert "NOT SOUND" in done.stderr


def witnessed_by(bundle: Path, target: Path, more: str, *, first: bool = False) -> Path:
    """The bundle, with further signature lines in its checkpoint; ``first``: before the owner's."""
    lines = bundle.read_bytes().split(b"\n")
    header = json.loads(lines[1][9:-1])
    text, own = header["checkpoint"].split("\n\n")
    signed = f"{text}\n\n{more}{own}" if first else f"{text}\n\n{own}{more}"
    lines[1] = b'"header":' + rfc8785.dumps({**header, "checkpoint": signed}) + b","
    target.write_bytes(b"\n".join(lines))
    return target


def a_witness(bundle: Path) -> str:
    """A witness's cosignature line, and one of a kind that nobody knows."""
    note = json.loads(bundle.read_bytes())["header"]["checkpoint"]
    line = cosign(note, "witness.example/w", Ed25519PrivateKey.generate(), 1_700_000_000)
    return f"{line}\n— witness.example/w {base64.b64encode(b'abcd' + bytes(200)).decode()}\n"


@pytest.mark.parametrize("first", [False, True])
def test_evidence_whose_checkpoint_others_have_signed_too_is_sound_here_and_by_hand(
    bundles: dict[str, Path], tmp_path: Path, first: bool
) -> None:
    shutil.copy(DOCS / "verify_by_hand.py", tmp_path)
    path = witnessed_by(bundles["silo"], tmp_path / "bundle.json", a_witness(bundles["silo"]), first=first)
    VALIDATOR.validate(json.loads(path.read_bytes()))
    found = verify_evidence(path)
    assert found.sound, found.problem
    command = [sys.executable, "-I", "verify_by_hand.py", "bundle.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["silo", "stretch", "witnessed"])
def test_the_documented_steps_verify_by_hand(bundles: dict[str, Path], tmp_path: Path, name: str) -> None:
    """Every shell block of the second half of the page, as it stands there."""
    version = (
        subprocess.run(["openssl", "version"], capture_output=True, text=True) if shutil.which("openssl") else None
    )
    if not version.stdout.startswith("OpenSSL 3"):
        pytest.skip("the documented steps need openssl 3")
    shutil.copy(DOCS / "verify_by_hand.py", tmp_path)
    if name == "witnessed":
        bundles = {name: witnessed_by(bundles["silo"], tmp_path / "witnessed.json", a_witness(bundles["silo"]))}
    shutil.copy(bundles[name], tmp_path / "bundle.json")
    blocks = re.findall(r"```sh\n(.*?)```", (DOCS / "audit.md").read_text(), re.DOTALL)
    assert len(blocks) == 4
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    said = [
        subprocess.run(
            ["bash", "-e", "-c", block],
            cwd=tmp_path,
            env={"PATH": path},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for block in blocks
    ]

    assert leaf_hash(next(open_evidence(bundles[name]).lines)).hex() in said[0]
    (root,) = re.findall("root of the records: ([0-9a-f]{64})", said[1])
    assert f"root that was signed: {root}" in said[2]
    assert "Signature Verified Successfully" in said[2]
    assert root in said[3]
