"""Two hospitals hold against each other what one coordinator told them: it is convicted, or it told both the same."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from typer.testing import CliRunner

from medsilo.privacy.audit import testimony
from medsilo.privacy.audit.bundle import Selection, UnreadableError, export
from medsilo.privacy.audit.findings import Verification
from medsilo.privacy.audit.fork_proof import ForkProof, View, read_fork_proof
from medsilo.privacy.audit.testimony import Witness
from medsilo.privacy.audit.verification import verify_evidence
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.door.attestation import Attestation
from medsilo.privacy.errors import JournalError
from medsilo.privacy.identity.envelope import seal, to_json
from medsilo.privacy.identity.keys import _write_audit_public
from medsilo.privacy.journal.checkpoint import Checkpoint
from medsilo.privacy.journal.merkle import EMPTY_ROOT, ProvingTree, leaf_hash, proven_subtrees
from medsilo.privacy.journal.records import RosterRecord, read
from medsilo.privacy.party.audit_commands import audit_app
from medsilo.privacy.party.party import PartyConfig
from medsilo.privacy.secure_aggregation.mask_keys import VOUCHER
from tests.support.evidence.exchanging import COORDINATOR, PLAN, Exchange, Party, key_of

DOCS = Path(__file__).parents[3] / "docs"
HOSPITALS = ("spiffe://test/silo/hospital1", "spiffe://test/silo/hospital2")


def hospital(folder: Path, number: int, coordinator: Party, plan: RunPlan = PLAN) -> Exchange:
    exchange = Exchange(
        Party(HOSPITALS[number], folder / f"hospital{number + 1}", key_of(number + 1)), coordinator, plan
    )
    exchange.begin()
    return exchange


def one_run(folder: Path, *, late: int = 0) -> tuple[Exchange, Exchange]:
    """Three honest rounds with one coordinator; ``late``: records of its own before the second hospital joins."""
    coordinator = Party(COORDINATOR, folder / "coordinator", key_of(200))
    one = hospital(folder, 0, coordinator)
    for number in range(late):
        coordinator.door.note(read({"kind": "padding", "number": number}))
    other = hospital(folder, 1, coordinator)
    for number in range(3):
        one.rounds([number])
        other.rounds([number])
    return one, other


def forked_run(
    folder: Path, *, padding: int = 0, rounds: tuple[int, int] = (2, 2), before: int = 1
) -> tuple[Exchange, Exchange]:
    """A coordinator that goes on with a copy of its journal towards the second hospital after ``before`` rounds;
    ``padding``: records that it writes into the copy first."""
    coordinator = Party(COORDINATOR, folder / "coordinator", key_of(200))
    one, other = hospital(folder, 0, coordinator), hospital(folder, 1, coordinator)
    for exchange in (one, other):
        exchange.rounds(range(before))
    coordinator.journal.close()
    shutil.copytree(coordinator.folder, folder / "copy")
    coordinator.open()
    other.coordinator = Party(COORDINATOR, folder / "copy", coordinator.key)
    for number in range(padding):
        other.coordinator.door.note(read({"kind": "padding", "number": number}))
    one.rounds(range(before, before + rounds[0]))
    other.rounds(range(before, before + rounds[1]))
    return one, other


def bundles(one: Exchange, other: Exchange) -> list[Path]:
    """Both hospitals' evidence."""
    paths = []
    for exchange in (one, other):
        exchange.attest()
        exchange.silo.journal.close()
        paths.append(exchange.silo.bundle(exchange.silo.folder.with_suffix(".json")))
    return paths


def kinds(found: Verification) -> list[str]:
    return [finding.kind for finding in found.findings]


def test_two_hospitals_of_one_honest_run_find_nothing(tmp_path: Path) -> None:
    one, other = one_run(tmp_path)
    early = one.silo.bundle(tmp_path / "early.json")
    paths = bundles(one, other)
    for own, peer in ((paths[0], paths[1]), (paths[1], paths[0]), (early, paths[1]), (paths[1], early)):
        found = verify_evidence(own, peer=peer)
        assert found.sound, found.sentences()
        assert found.peer in HOSPITALS
        assert found.findings == []
        assert found.proof is None
        (remark,) = [remark for remark in found.remarks if "one and the same journal" in remark]
        assert "first 0 records" not in remark


def test_a_hospital_that_joined_late_or_left_early_is_no_finding(tmp_path: Path) -> None:
    coordinator = Party(COORDINATOR, tmp_path / "coordinator", key_of(200))
    one = hospital(tmp_path, 0, coordinator)
    one.rounds([0, 1])
    one.attest()
    other = hospital(tmp_path, 1, coordinator)
    other.rounds([2, 3])
    found = verify_evidence(*bundles(one, other)[:1], peer=other.silo.folder)
    assert found.sound, found.sentences()


@pytest.mark.parametrize(
    ("padding", "rounds"), [(0, (2, 2)), (1, (2, 2)), (3, (1, 4)), (40, (3, 1)), (300, (4, 4))], ids=str
)
def test_a_coordinator_that_keeps_two_journals_is_convicted_by_two_hospitals(
    tmp_path: Path, padding: int, rounds: tuple[int, int]
) -> None:
    one, other = forked_run(tmp_path, padding=padding, rounds=rounds)
    paths = bundles(one, other)
    for path in paths:
        assert verify_evidence(path).sound, "neither hospital sees anything alone"
    for own, peer in (paths, reversed(paths)):
        found = verify_evidence(own, peer=peer)
        assert kinds(found) == ["proof"], found.sentences()
        assert not found.sound
        assert not found.problem, "nothing is wrong with the hospital's own evidence"
        assert COORDINATOR in found.findings[0].what
        assert found.proof is not None
        assert ForkProof.model_validate(found.proof).check().party == COORDINATOR


@pytest.mark.parametrize("changing", [(0,), (1,), (0, 1)], ids=["towards one", "towards the other", "towards both"])
def test_a_coordinator_that_changes_its_key_otherwise_towards_each_is_convicted_all_the_same(
    tmp_path: Path, changing: tuple[int, ...]
) -> None:
    """Each change is signed with the key before, so that both hospitals follow it: to two keys from one."""
    exchanges = forked_run(tmp_path, padding=3, rounds=(0, 0))
    for number, exchange in enumerate(exchanges):
        if number in changing:
            exchange.coordinator.rotate(tmp_path / f"keys{number}")
            exchange.begin()
        exchange.rounds([2, 3])
    first, second = bundles(*exchanges)
    found = verify_evidence(first, peer=second)
    assert found.findings[0].kind == "proof", found.sentences()
    assert not [finding for finding in found.findings[1:] if finding.kind == "proof"]
    proof = ForkProof.model_validate(found.proof)
    assert proof.check().party == COORDINATOR
    proof.write(tmp_path / "proof.json")
    shutil.copy(DOCS / "verify_by_hand.py", tmp_path)
    done = subprocess.run(
        [sys.executable, "-I", "verify_by_hand.py", "proof.json"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_two_changes_of_one_key_are_a_contradiction_before_the_histories_are_seen_to_differ(tmp_path: Path) -> None:
    one, other = forked_run(tmp_path, rounds=(0, 0))
    for number, exchange in enumerate((one, other)):
        exchange.coordinator.rotate(tmp_path / f"keys{number}")
        exchange.silo.door.enrol(COORDINATOR, exchange.coordinator.public, exchange.coordinator.door.rotations())
        exchange.silo.journal.checkpoint()
        exchange.silo.journal.close()
    found = verify_evidence(one.silo.folder, peer=other.silo.folder)
    assert kinds(found) == ["contradiction"], found.sentences()
    assert "has signed two changes of its audit key" in found.findings[0].what


def test_each_of_several_coordinators_is_judged_by_itself(tmp_path: Path) -> None:
    """That one is convicted says nothing of another, nor that another showed both hospitals one journal."""
    parties = (COORDINATOR, "spiffe://test/coordinator/second")
    told = testimony.Testimony(sqlite3.connect(":memory:"))
    for party in parties:
        origin = "medsilo/" + party.removeprefix("spiffe://")
        for side, root in (("own", bytes(32)), ("peer", b"\1" * 32)):
            document = Attestation.model_construct(
                checkpoint=Checkpoint(origin, 5, root).sign(key_of(200)), witnessed=None
            )
            told.checkpoint("own" if side == "own" else "peer", party, Checkpoint("", 0, EMPTY_ROOT), document, 7)
    assert [found.party for party in parties if (found := told.fork(party)) is not None] == list(parties)


def test_a_fork_is_found_wherever_it_lies() -> None:
    """Random histories that differ from one leaf on, seen at random sizes: the proofs of both cover it, so it shows."""
    random.seed(3)
    for _ in range(300):
        size, fork = random.randint(2, 120), random.randint(0, 100)
        fork = min(fork, size - 1)
        known: list[dict[tuple[int, int], bytes]] = []
        extents = []
        for side in range(2):
            leaves = [b"%d" % n if n < fork else b"%d-%d" % (n, side) for n in range(size)]
            tree = ProvingTree(lambda first, count, leaves=leaves: leaves[first : first + count])
            for leaf in leaves:
                tree.append(leaf)
            sizes = sorted(random.sample(range(1, size + 1), random.randint(2, min(6, size))))
            found: dict[tuple[int, int], bytes] = {}
            for first, second in itertools.pairwise(sizes):
                root = tree._root(0, first)
                proven = proven_subtrees(first, root, second, tree.consistency(first, second))
                assert proven[0, first] == root if first & (first - 1) == 0 else True
                assert all(tree._root(*span) == digest for span, digest in proven.items())
                found |= proven
            known.append(found)
            extents.append(sizes[-2])
        differ = any(known[0][span] != known[1][span] for span in known[0].keys() & known[1].keys())
        if fork < min(extents):
            assert differ
        same = [span for span in known[0].keys() & known[1].keys() if span[1] <= fork]
        assert all(known[0][span] == known[1][span] for span in same), "nobody is convicted of what is the same"


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 9, 31])
def test_no_other_proof_gives_other_stretches(count: int) -> None:
    leaves = [b"%d" % n for n in range(count + 5)]
    tree = ProvingTree(lambda first, number: leaves[first : first + number])
    for leaf in leaves:
        tree.append(leaf)
    proof = tree.consistency(count, count + 5)
    root = tree._root(0, count)
    good = proven_subtrees(count, root, count + 5, proof)
    assert good[0, count + 5] == tree.root()
    for broken in (proof[:-1], [*proof, proof[0]]):
        with pytest.raises(ValueError, match="another length"):
            proven_subtrees(count, root, count + 5, broken)
    for first, second in ((0, 5), (5, 5), (6, 5)):
        with pytest.raises(ValueError, match="no proof"):
            proven_subtrees(first, root, second, proof)
    assert good.get((0, 1), leaf_hash(b"0")) == leaf_hash(b"0")


@pytest.fixture
def convicted(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Two bundles and the proof that comes of them."""
    one, other = bundles(*forked_run(tmp_path, padding=7))
    path = tmp_path / "proof.json"
    ForkProof.model_validate(verify_evidence(one, peer=other).proof).write(path)
    return one, other, path


Audit = Callable[..., tuple[int, str]]


@pytest.fixture
def audit() -> Audit:
    def none(_path: Path) -> PartyConfig:
        raise AssertionError

    def run(*words: object) -> tuple[int, str]:
        done = CliRunner().invoke(audit_app(none), ["verify", *map(str, words)])
        return done.exit_code, done.output

    return run


def test_the_command_says_it_in_one_sentence_and_writes_a_proof_that_anyone_can_check(
    convicted: tuple[Path, Path, Path], audit: Audit, tmp_path: Path
) -> None:
    one, other, _ = convicted
    written = tmp_path / "elsewhere" / "proof.json"
    written.parent.mkdir()
    code, said = audit(one, "--peer", other, "--proof", written)
    assert code == 1
    (sentence,) = [line for line in said.splitlines() if line.startswith("PROOF: ")]
    assert "has signed two histories of its journal" in sentence
    assert HOSPITALS[0] in sentence
    assert HOSPITALS[1] in sentence
    assert f"Proof written: {written}" in " ".join(said.split())
    assert written.stat().st_size < 20_000
    for path in (one, other):
        path.unlink()
    code, said = audit(written)
    assert code == 0, said
    assert "PROOF: spiffe://test/coordinator/coordinator has signed two histories" in " ".join(said.split())
    code, said = audit(written, "--json")
    assert json.loads(said)["holds"] is True
    for number, expected in ((200, 0), (201, 1)):
        _write_audit_public(tmp_path / f"{number}.pub", key_of(number))
        assert audit(written, "--key", tmp_path / f"{number}.pub")[0] == expected


def test_there_is_no_proof_where_nothing_is_proven(tmp_path: Path, audit: Audit) -> None:
    one, other = bundles(*one_run(tmp_path))
    code, said = audit(one, "--peer", other, "--proof", tmp_path / "proof.json")
    assert code == 0
    assert "no proof was written" in " ".join(said.split())
    assert not (tmp_path / "proof.json").exists()
    assert audit(one, "--proof", tmp_path / "proof.json")[0] != 0
    (tmp_path / "cut.json").write_text('{"form":"medsilo-two-histories","party":')
    assert audit(tmp_path / "cut.json")[0] == 2


def test_the_proof_is_checked_by_hand(convicted: tuple[Path, Path, Path], tmp_path: Path) -> None:
    far = tmp_path / "far"
    far.mkdir()
    shutil.copy(DOCS / "verify_by_hand.py", far)
    shutil.copy(convicted[2], far / "proof.json")
    command = [sys.executable, "-I", "verify_by_hand.py", "proof.json"]
    done = subprocess.run(command, cwd=far, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "has signed two histories" in done.stdout
    content = json.loads((far / "proof.json").read_text())
    content["views"][1] = content["views"][0]
    (far / "proof.json").write_text(json.dumps(content))
    done = subprocess.run(command, cwd=far, capture_output=True, text=True)
    assert done.returncode == 1
    assert "NOT SOUND" in done.stderr


def test_nobody_makes_a_proof_against_an_honest_party(convicted: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """Every part of the file that is changed takes the proof away, but for whom it was shown to."""
    good = json.loads(convicted[2].read_text())
    other_key = key_of(77).public_key().public_bytes_raw().hex()

    def views(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        changed = json.loads(json.dumps(good))
        change(changed["views"][1])
        return changed

    forged = Checkpoint("medsilo/test/coordinator/coordinator", 50, bytes(32)).sign(Ed25519PrivateKey.generate())
    cases = [
        {**good, "public_key": other_key},
        {**good, "party": HOSPITALS[0]},
        {**good, "views": [good["views"][0], good["views"][0]]},
        views(lambda view: view.update(checkpoint=forged)),
        views(lambda view: view.update(proof=[])),
        views(lambda view: view["proof"].append("00" * 32)),
        views(lambda view: view["proof"].__setitem__(0, "00" * 32)),
        views(lambda view: view.update(root="00" * 32)),
        views(lambda view: view.update(size=view["size"] - 1)),
    ]
    for case in cases:
        with pytest.raises(JournalError):
            ForkProof.model_validate(case).check()
    # Two honest views of one journal prove nothing, however they are put together.
    one, other = bundles(*one_run(tmp_path / "honest"))
    assert verify_evidence(one, peer=other).proof is None
    assert read_fork_proof(one) is None
    for content in ("", "{}", '{"form":"medsilo-two-histories"}', '{"form":"medsilo-two-histories","v":1'):
        path = tmp_path / "bad.json"
        path.write_text(content)
        if "form" in content:
            with pytest.raises(JournalError):
                read_fork_proof(path)
        else:
            assert read_fork_proof(path) is None
    assert View.model_validate(good["views"][0]).size > 0


def test_other_content_in_one_round_is_a_contradiction_with_one_common_model_and_none_else(tmp_path: Path) -> None:
    for name, common, expected in (
        ("common", None, ["contradiction"]),
        ("personal", frozenset(), []),
    ):
        coordinator = Party(COORDINATOR, tmp_path / name / "coordinator", key_of(200))
        one, other = (hospital(tmp_path / name, number, coordinator) for number in range(2))
        for exchange in (one, other):
            if common is not None:
                exchange.common = common
            exchange.rounds([0])
        other.given = b"e" * 100
        for exchange in (one, other):
            exchange.rounds([1])
        first, second = bundles(one, other)
        found = verify_evidence(first, peer=second)
        assert kinds(found) == expected, found.sentences()
        if expected:
            assert "round 2 of run run1" in found.findings[0].what
            assert "PEER_DERIVED" in found.findings[0].what
            assert found.proof is None


def test_a_transfer_that_was_cut_is_held_against_as_much_of_the_other(tmp_path: Path) -> None:
    coordinator = Party(COORDINATOR, tmp_path / "coordinator", key_of(200))
    one, other = (hospital(tmp_path, number, coordinator) for number in range(2))
    one.get_task(0, chunks=1)
    other.get_task(0, chunks=3)
    assert verify_evidence(*bundles(one, other)[:1], peer=other.silo.folder).sound


def test_another_plan_under_the_same_name_is_a_contradiction(tmp_path: Path) -> None:
    coordinator = Party(COORDINATOR, tmp_path / "coordinator", key_of(200))
    one = hospital(tmp_path, 0, coordinator)
    other = hospital(tmp_path, 1, coordinator, PLAN.model_copy(update={"seed": 2}))
    for exchange in (one, other):
        exchange.common = frozenset()
        exchange.rounds([0])
    found = verify_evidence(*bundles(one, other)[:1], peer=other.silo.folder)
    assert kinds(found) == ["contradiction"], found.sentences()
    assert "run run1" in found.findings[0].what


def test_another_key_at_the_same_time_is_a_contradiction_and_a_changed_key_is_none(tmp_path: Path) -> None:
    coordinator = Party(COORDINATOR, tmp_path / "coordinator", key_of(200))
    second = Party(COORDINATOR, tmp_path / "second", key_of(201))
    one, other = hospital(tmp_path, 0, coordinator), hospital(tmp_path, 1, second)
    for number in range(2):
        one.rounds([number])
        other.rounds([number])
    first, peer = bundles(one, other)
    found = verify_evidence(first, peer=peer)
    assert not found.sound
    assert set(kinds(found)) == {"contradiction"}
    # With a signed change both find the way from one key to the other.
    honest = tmp_path / "honest"
    coordinator = Party(COORDINATOR, honest / "coordinator", key_of(200))
    one = hospital(honest, 0, coordinator)
    one.rounds([0])
    early = one.silo.bundle(honest / "early.json")
    coordinator.rotate(honest / "keys")
    for exchange in (one, hospital(honest, 1, coordinator)):
        exchange.coordinator = coordinator
        exchange.begin()
        exchange.rounds([1])
        exchange.attest()
        exchange.silo.journal.close()
    paths = [honest / "hospital1", honest / "hospital2"]
    found = verify_evidence(paths[0], peer=paths[1])
    assert found.sound, found.sentences()
    found = verify_evidence(early, peer=paths[1])
    assert kinds(found) == [], found.sentences()


def rosters(*told: tuple[str, str, list[str], str]) -> testimony.Testimony:
    """Rosters as the journals of both hospitals hold them: (side, party, silos, audit key of each but the party)."""
    found = testimony.Testimony(sqlite3.connect(":memory:"))
    for side, party, silos, key in told:
        documents = [
            {"v": 1, "silo": silo, "audit_key": key if silo != party else "11" * 32, "certificate": ""}
            for silo in silos
        ]
        vouchers = [to_json(seal(document, VOUCHER, key_of(9))) for document in documents]
        found.roster(
            "own" if side == "own" else "peer",
            RosterRecord(
                run="run1",
                plan_sha256="ab" * 32,
                round=4,
                index=7,
                silos=[silo.rpartition("/")[2] for silo in silos],
                statements=[{"voucher": voucher} for voucher in vouchers],
            ),
        )
    return found


def test_other_rosters_of_one_round_and_invented_hospitals_are_contradictions() -> None:
    one = Witness("own", HOSPITALS[0], (bytes.fromhex("11" * 32), bytes.fromhex("22" * 32)))
    other = Witness("peer", HOSPITALS[1], (bytes.fromhex("22" * 32), bytes.fromhex("11" * 32)))
    pair, three = list(HOSPITALS), [*HOSPITALS, "spiffe://test/silo/hospital3"]
    for theirs, key, words in (
        (pair, "22" * 32, []),
        (three, "22" * 32, ["masked round 5 of run run1"]),
        (pair, "33" * 32, ["which is none of that hospital's"]),
    ):
        told = rosters(("own", HOSPITALS[0], pair, "22" * 32), ("peer", HOSPITALS[1], theirs, key))
        found, _ = told.contradictions(one, other)
        assert [finding.kind for finding in found] == ["contradiction"] * len(words)
        assert all(word in finding.what for word, finding in zip(words, found, strict=True))


def test_what_two_hospitals_cannot_compare_is_unreadable(tmp_path: Path) -> None:
    one, other = one_run(tmp_path)
    first, second = bundles(one, other)
    export(other.silo.folder, tmp_path / "part.json", select=Selection(first_round=1, last_round=1))
    with pytest.raises(UnreadableError, match="whole journals"):
        verify_evidence(first, peer=tmp_path / "part.json")
    with pytest.raises(UnreadableError, match="is not the other side"):
        verify_evidence(first, peer=first)
    broken = bytearray(second.read_bytes())
    broken[broken.index(b'"attempt":1') + 10] = ord("2")
    second.write_bytes(broken)
    found = verify_evidence(first, peer=second)
    assert not found.problem
    assert "NOT sound" in found.peers_problem
