"""``silo doctor``: everything that would keep a hospital from training is found, with what to do about it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from medsilo.algorithms.datasets import ImageDataset, ImageSplit, save_npz
from medsilo.privacy.consent.plan import RunPlan, WeightsPlan
from medsilo.privacy.errors import NotReadyError
from medsilo.privacy.identity.authority import create_authority, issue
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.identity.keys import create_keys, load_audit_key
from medsilo.privacy.journal.journal import Journal
from medsilo.privacy.party import examination
from medsilo.privacy.party.examination import Finding, check_disk, show
from medsilo.silo.joining.doctor import check_data, check_weights, examine, skew_finding

PLAN = RunPlan.model_validate(
    {
        "federation": "test",
        "coordinator": "coordinator",
        "run": "run1",
        "method": {"name": "fedavg", "parameters": {}},
        "model": {"name": "mlp-64", "input_shape": (1, 4, 4), "classes": 3},
        "training": {},
        "rounds": 1,
        "seed": 1,
        "required": ["PROTOCOL", "IDENTITY"],
        "optional": [],
        "downlink": ["PEER_DERIVED"],
    }
)


def images(*labels: int, side: int = 4, names: int = 3, patients: bool = False) -> ImageDataset:
    split = ImageSplit(
        np.zeros((len(labels), side, side, 1), np.uint8),
        np.array(labels, np.int64),
        np.array(["p"] * len(labels)) if patients else None,
    )
    return ImageDataset("test", "made for a test", False, tuple(f"class {n}" for n in range(names)), split, None, split)


@pytest.fixture
def hospital(tmp_path: Path) -> Path:
    """A hospital with everything in place, but for a coordinator; returns its configuration."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    create_authority(tmp_path / "ca", "test")
    keys = tmp_path / "state/keys"
    paths = create_keys(keys, Identity("test", "silo", "hospital1"))
    issue(tmp_path / "ca", "hospital1", paths.request, keys / "tls.pem")
    shutil.copy(tmp_path / "ca/ca.pem", keys / "ca.pem")
    save_npz(tmp_path / "images.npz", images(0, 1, 2))
    (tmp_path / "consent.yaml").write_text(
        "coordinator: spiffe://test/coordinator/coordinator\nmethods: [fedavg]\n"
        "exposures: [PROTOCOL, IDENTITY]\nrounds: 1\nexpires: 2999-12-31\n"
    )
    path = tmp_path / "hospital1.yaml"
    path.write_text(
        f"federation: test\nname: hospital1\ncoordinator: {{address: 127.0.0.1:{port}}}\nstate: state\n"
        "shard: images.npz\nconsent: consent.yaml\n"
    )
    (tmp_path / "state/plan.json").write_text(json.dumps(PLAN.model_dump(mode="json")))
    (tmp_path / "state/plan.json").chmod(0o600)
    (tmp_path / "state").chmod(0o700)
    return path


def found(path: Path) -> dict[str, Finding]:
    """The worst finding of each check."""
    order = ("good", "notice", "bad")
    _, findings = examine(path)
    return {finding.check: finding for finding in sorted(findings, key=lambda one: order.index(one.state))}


def test_with_everything_in_place_only_the_coordinator_that_is_away_is_to_be_mended(hospital: Path) -> None:
    findings = found(hospital)
    assert {check for check, finding in findings.items() if finding.state == "bad"} == {"address"}
    assert "cannot be reached (Connection refused)" in findings["address"].found
    assert findings["run"].state == findings["consent"].state == "good"
    assert not (hospital.parent / "state/journal").exists(), "looking leaves no trace while nothing is asked"


def _expire(folder: Path, days: int) -> None:
    issue(folder / "ca", "hospital1", folder / "state/keys/tls.csr", folder / "state/keys/tls.pem", days=days)


def _damage_journal(folder: Path) -> None:
    key = load_audit_key(folder / "state/keys/audit.key")
    with Journal(folder / "state/journal", key=key, origin="medsilo/test/silo/hospital1") as journal:
        journal.append([{"kind": "note", "self": "spiffe://test/silo/hospital1", "federation": "test"}])
    records = folder / "state/journal/records.jsonl"
    records.write_bytes(records.read_bytes().replace(b'"note"', b'"nota"'))


def _edit(name: str, before: str, after: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text((folder / name).read_text().replace(before, after))


@pytest.mark.parametrize(
    ("damage", "check", "state", "words"),
    [
        (_edit("hospital1.yaml", "shard:", "shart:"), "configuration", "bad", "did you mean `shard`"),
        (lambda f: (f / "state/keys/audit.key").chmod(0o640), "keys", "bad", "chmod 600"),
        (lambda f: (f / "state/keys/tls.key").chmod(0o644), "keys", "bad", "tls.key"),
        (lambda f: (f / "state/keys/tls.key").chmod(0o644), "certificate", "bad", "chmod 600"),
        (lambda f: (f / "state/keys/tls.pem").unlink(), "certificate", "bad", "coordinator ca issue hospital1"),
        (lambda f: _expire(f, 0), "certificate", "bad", "If that is wrong, put the clock right"),
        (lambda f: _expire(f, 10), "certificate", "notice", "9 days"),
        (_edit("hospital1.yaml", "name: hospital1", "name: hospital2"), "certificate", "bad", "correct `name`"),
        (_edit("hospital1.yaml", "127.0.0.1:", "no-such-host.invalid:"), "address", "bad", "cannot be resolved"),
        (lambda f: (f / "images.npz").unlink(), "images", "bad", "there is no such file"),
        (lambda f: (f / "images.npz").write_bytes(b"PK"), "images", "bad", "not a readable .npz"),
        (lambda f: (f / "consent.yaml").write_text(""), "consent", "bad", "agrees to nothing yet"),
        (lambda f: (f / "consent.yaml").unlink(), "consent", "bad", "there is no such file"),
        (_edit("consent.yaml", "2999-12-31", "2020-01-01"), "consent", "bad", "expired on 2020-01-01"),
        (lambda f: (f / "state/withdrawal.json").write_text("{}"), "consent", "notice", "withdrawn"),
        (_edit("consent.yaml", "expires: 2999-12-31\n", ""), "consent", "notice", "without an end"),
        (_edit("consent.yaml", "[fedavg]", "[local]"), "run", "notice", "method fedavg"),
        (_edit("consent.yaml", "[fedavg]", "[fedavg, fedprux]"), "consent", "notice", "did you mean fedprox?"),
        (_edit("consent.yaml", "[PROTOCOL", "[MASKED_UPDATE, PROTOCOL"), "masks", "notice", "could invent hospitals"),
        (lambda f: (f / "state/keys/tls.pem").unlink(), "certificate", "bad", "invitation (`silo init`)"),
        (_damage_journal, "journal", "bad", "journal"),
    ],
)
def test_what_is_amiss_is_found_and_named(
    hospital: Path, damage: Callable[[Path], object], check: str, state: str, words: str
) -> None:
    damage(hospital.parent)
    finding = found(hospital)[check]
    assert finding.state == state, finding
    assert words in f"{finding.found} {finding.remedy}"
    assert finding.declines == (words in ("withdrawn", "method fedavg"))


def test_images_that_do_not_fit_the_run_are_found(tmp_path: Path) -> None:
    path = tmp_path / "images.npz"
    for dataset, words in (
        (images(0, 1, 2, side=5), "they are 1×5×5, and run run1 trains on 1×4×4"),
        (images(0, 1, 3, names=4), "a label is 3, and run run1 has 3 classes, from 0"),
        (images(0, 1, 1), "no training images of: class 2"),
    ):
        save_npz(path, dataset)
        assert words in [finding.found for finding in check_data(path, PLAN)]
    one_sided = dataclasses.replace(images(0, 1, 2), test=images(0, 0).test)
    save_npz(path, one_sided)
    assert "no test images of: class 1, class 2" in [finding.found for finding in check_data(path, PLAN)]
    save_npz(path, images(0, 1, 2, patients=True))
    (finding,) = check_data(path, PLAN)
    assert finding.found.endswith("3 of 3 classes, 1 patients, at most 3 images of one")


def test_weights_that_the_hospital_is_to_bring_are_looked_for(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(b"weights")
    digest = hashlib.sha256(b"weights").hexdigest()
    given = WeightsPlan(sha256=digest, tensors_sha256="0" * 64, source="somewhere", brought=True)
    plan = PLAN.model_copy(update={"model": PLAN.model.model_copy(update={"weights": given})})
    assert check_weights([], PLAN) == []
    assert [finding.state for finding in check_weights([tmp_path], plan)] == ["good"]
    (missing,) = check_weights([], plan)
    assert missing.state == "bad"
    assert digest in missing.found


@pytest.mark.parametrize(("seconds", "state"), [(0.0, "good"), (-59.0, "good"), (61.0, "bad"), (-3600.0, "bad")])
def test_clocks_that_differ_by_more_than_a_minute_are_to_be_set(seconds: float, state: str) -> None:
    assert skew_finding(seconds).state == state


@pytest.mark.parametrize(("free", "state"), [(100 << 20, "bad"), (1 << 30, "notice"), (100 << 30, "good")])
def test_a_disk_that_fills_up_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, state: str) -> None:
    monkeypatch.setattr(examination.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    assert check_disk(tmp_path / "not/made/yet").state == state


def test_the_exit_says_whether_something_is_to_be_mended(capsys: pytest.CaptureFixture[str]) -> None:
    fine, wrong = Finding("disk", "notice", "[little]"), Finding("images", "bad", "gone", "bring them [back]")
    show("hospital1", [fine], Console(width=200))
    assert "ready" in capsys.readouterr().out
    show("hospital1", [fine, Finding("run", "notice", "not covered", declines=True)], Console(width=200))
    assert "in order, and takes no part as its consent is" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(NotReadyError, match="images") as caught:
        show("hospital1", [fine, wrong], Console(width=200), as_json=True)
    assert caught.value.exit_code == 14
    assert json.loads(capsys.readouterr().out) == {
        "party": "hospital1",
        "ready": False,
        "findings": [
            {"check": "disk", "state": "notice", "found": "[little]", "remedy": "", "declines": False},
            {"check": "images", "state": "bad", "found": "gone", "remedy": "bring them [back]", "declines": False},
        ],
    }
