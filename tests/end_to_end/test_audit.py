"""The evidence of real daemons: sound, provable without keys, and of no use to whoever changes it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from federation import Federation
from jsonschema import Draft202012Validator

DOCS = Path(__file__).parents[2] / "docs"


def test_evidence_of_real_daemons(federation: Callable[..., Federation], tmp_path: Path) -> None:
    one = federation(run={"rounds": 2})
    one.run_to_the_end()
    bundles: dict[str, Path] = {}
    for party in ("coordinator", *one.silos):
        command = "coordinator" if party == "coordinator" else "silo"
        bundles[party] = tmp_path / f"{party}.json"
        one.command(command, "audit", "export", "--config", f"{party}.yaml", "--out", str(bundles[party]))
    part = tmp_path / "part.json"
    one.command("silo", "audit", "export", "--config", "hospital1.yaml", "--rounds", "2", "--out", str(part))
    shutil.rmtree(one.folder / "state")  # no keys, no journals, no daemons

    def verify(*words: object, expect: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            one.command("silo", "audit", "verify", *map(str, words), "--json", expect=expect)
        )
        return found

    validator = Draft202012Validator(json.loads((DOCS / "bundle.schema.json").read_text()))
    theirs = bundles["coordinator"]
    for silo in one.silos:
        found = verify(bundles[silo], "--peer", theirs)
        assert found["sound"]
        assert found["acknowledged"] == found["sent"] > 0
        assert found["peer"] == "spiffe://test/coordinator/coordinator"
        assert verify(theirs, "--peer", bundles[silo])["sound"]
    for bundle in (*bundles.values(), part):
        validator.validate(json.loads(bundle.read_text()))
        done = subprocess.run(
            [sys.executable, "-I", DOCS / "verify_by_hand.py", bundle], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    assert verify(part, "--peer", theirs)["whole"] is False

    original = bundles["hospital1"].read_bytes()
    lines = original.splitlines(keepends=True)
    sent = next(number for number, line in enumerate(lines) if b'"direction":"sent"' in line)
    for changed, code in (
        (original.replace(b'"attempt":1', b'"attempt":2', 1), 1),
        (b"".join([*lines[:sent], *lines[sent + 1 :]]), 1),
        (b"".join([*lines[:sent], lines[sent + 1], lines[sent], *lines[sent + 2 :]]), 1),
        (original[:-1], 2),
    ):
        bundles["hospital1"].write_bytes(changed)
        found = verify(bundles["hospital1"], expect=code)
        assert not found["sound"]
        assert found["problem"]
        verify(theirs, "--peer", bundles["hospital1"], expect=code)
