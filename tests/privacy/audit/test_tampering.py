"""Tampering campaign: edits of journals, bundles, receipts and checkpoints, by hundreds, and every one is noticed.

Each edit has a seed; one that goes unnoticed is named by kind and seed. Where an edit cannot be noticed from one side's
evidence alone, whatever is done, the test says so, and shows that the other side's evidence tells.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import rfc8785
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from medsilo.privacy.audit.bundle import Selection, UnreadableError, export
from medsilo.privacy.audit.findings import Verification
from medsilo.privacy.audit.verification import verify_evidence
from medsilo.privacy.identity.envelope import ATTESTATION, seal, to_json
from medsilo.privacy.journal.checkpoint import Checkpoint
from medsilo.privacy.journal.journal import CHECKPOINTS, RECORDS, Journal
from medsilo.privacy.journal.records import RefusalRecord
from tests.support.evidence.exchanging import COORDINATOR, Exchange, Party, copy_of, key_of, meet, origin_of
from tests.support.evidence.tampering import Forger, changed, records_of, resigned, write_bundle

STRANGER = Ed25519PrivateKey.from_private_bytes(b"\x07" * 32)


@dataclass
class Federation:
    """Both sides' closed journals and bundles, and the silo's audit key."""

    silo: Path
    coordinator: Path
    bundle: Path
    coordinators_bundle: Path
    key: Ed25519PrivateKey
    coordinators_key: Ed25519PrivateKey


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """A few rounds with calls that were cut, a repeated update and a restart."""
    folder = tmp_path_factory.mktemp("evidence")
    exchange = meet(folder)
    exchange.rounds([0], chunks=1)
    exchange.cutting("answer", lambda: exchange.submit(1, 1))
    exchange.submit(1, 1, repeated=True)
    exchange.cutting("request", lambda: exchange.get_task(2, 1))
    exchange.silo.restart()
    exchange.in_step = False
    exchange.begin()
    exchange.rounds([2], chunks=1)
    exchange.attest()
    return ended(exchange, folder)


def ended(exchange: Exchange, folder: Path) -> Federation:
    silo, coordinator = exchange.silo, exchange.coordinator
    exchange.close()
    return Federation(
        silo.folder,
        coordinator.folder,
        silo.bundle(folder / "silo.json"),
        coordinator.bundle(folder / "coordinator.json"),
        silo.key,
        coordinator.key,
    )


def verdict(path: Path, **options: Any) -> Verification | None:
    """The result, or None for what is not even evidence."""
    try:
        return verify_evidence(path, **options)
    except UnreadableError:
        return None


def is_noticed(path: Path, **options: Any) -> bool:
    found = verdict(path, **options)
    return found is None or not found.sound


def campaign(edits: int, edit: Callable[[random.Random], bool], kind: str) -> None:
    """Runs an edit with one seed after the other; ``edit`` says whether it was noticed."""
    missed = [seed for seed in range(edits) if not edit(random.Random(f"{kind} {seed}"))]
    assert not missed, f"{kind}: the edits with these seeds went unnoticed: {missed}"


def altered(data: bytes, chance: random.Random) -> bytes:
    """The same bytes, but for something."""
    while True:
        at = chance.randrange(len(data))
        match chance.randrange(6):
            case 0 | 1 | 2:
                found = data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
            case 3:
                found = data[:at] + data[at + chance.randint(1, 50) :]
            case 4:
                found = data[:at] + chance.randbytes(chance.randint(1, 5)) + data[at:]
            case _:
                found = data[:at] + data[at : at + chance.randint(1, 300)] + data[at:]
        if found != data:
            return found


def rearranged(lines: list[bytes], chance: random.Random) -> list[bytes]:
    """Lines dropped, swapped, doubled, moved or cut short; not only the last one lost."""
    while True:
        found = list(lines)
        at, other = chance.randrange(len(found) - 1), chance.randrange(len(found) - 1)
        match chance.randrange(5):
            case 0:
                del found[at]
            case 1:
                found[at], found[other] = found[other], found[at]
            case 2:
                found.insert(other, found[at])
            case 3:
                found.insert(other, found.pop(at))
            case _:
                found[at] = found[at][: chance.randrange(len(found[at]))] + b"\n"
        if found != lines:
            return found


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    return tmp_path / "edited.json"


def test_the_untouched_evidence_is_sound_every_time(federation: Federation) -> None:
    one = federation
    for _ in range(3):
        for mine, theirs in ((one.silo, one.coordinator), (one.bundle, one.coordinators_bundle)):
            for path, peer in ((mine, None), (theirs, None), (mine, theirs), (theirs, mine)):
                found = verify_evidence(path, peer=peer)
                assert found.sound, found.sentences()


def test_edited_bytes_of_a_bundle(federation: Federation, scratch: Path) -> None:
    original = federation.bundle.read_bytes()

    def edit(chance: random.Random) -> bool:
        scratch.write_bytes(altered(original, chance))
        return is_noticed(scratch)

    campaign(350, edit, "bytes of a bundle")


def test_a_bundle_that_is_cut_off(federation: Federation, scratch: Path) -> None:
    original = federation.bundle.read_bytes()

    def edit(chance: random.Random) -> bool:
        scratch.write_bytes(original[: chance.randrange(len(original))])
        return verdict(scratch) is None or is_noticed(scratch)

    campaign(50, edit, "a bundle that is cut off")


def test_records_of_a_bundle_dropped_swapped_doubled_or_moved(federation: Federation, scratch: Path) -> None:
    original = federation.bundle.read_bytes().splitlines(keepends=True)

    def edit(chance: random.Random) -> bool:
        scratch.write_bytes(b"".join([*original[:3], *rearranged(original[3:-1], chance), original[-1]]))
        return is_noticed(scratch)

    campaign(100, edit, "lines of a bundle")


def test_changed_values_in_records(federation: Federation, scratch: Path) -> None:
    """With indexes and the header's count made to fit, as somebody would who knows the form but has no key."""
    original = records_of(federation.bundle)

    def edit(chance: random.Random) -> bool:
        records = list(original)
        at = chance.randrange(len(records))
        match chance.randrange(4):
            case 0 | 1:
                records[at] = changed(records[at], chance)
            case 2:
                records.insert(at, changed(records[at], chance))
            case _:
                del records[at]
        if len(records) != len(original):
            records = [{**record, "index": index} for index, record in enumerate(records)]
        write_bundle(scratch, records, federation.bundle, count=len(records), size=len(records))
        return records == original or is_noticed(scratch)

    campaign(200, edit, "values in records")


def test_other_times_in_records(federation: Federation, scratch: Path) -> None:
    original = records_of(federation.bundle)

    def edit(chance: random.Random) -> bool:
        records = list(original)
        at = chance.randrange(len(records))
        day = chance.randint(1, 28)
        records[at] = {**records[at], "time": f"20{chance.randint(10, 25)}-02-{day:02}T00:00:00.000Z"}
        write_bundle(scratch, records, federation.bundle)
        return is_noticed(scratch)

    campaign(50, edit, "times in records")


def test_edited_bytes_of_a_journals_records(federation: Federation, tmp_path: Path) -> None:
    folder = copy_of(federation.silo, tmp_path / "journal")
    original = (folder / RECORDS).read_bytes()

    def edit(chance: random.Random) -> bool:
        (folder / RECORDS).write_bytes(altered(original, chance))
        return is_noticed(folder)

    campaign(150, edit, "bytes of a journal")


@pytest.mark.parametrize(("name", "kind"), [(RECORDS, "lines of a journal"), (CHECKPOINTS, "lines of checkpoints")])
def test_lines_dropped_swapped_doubled_or_moved(federation: Federation, tmp_path: Path, name: str, kind: str) -> None:
    folder = copy_of(federation.silo, tmp_path / "journal")
    original = (folder / name).read_bytes().splitlines(keepends=True)

    def edit(chance: random.Random) -> bool:
        (folder / name).write_bytes(b"".join(rearranged(original, chance)))
        return is_noticed(folder)

    campaign(50, edit, kind)


def test_edited_checkpoints(federation: Federation, tmp_path: Path) -> None:
    folder = copy_of(federation.silo, tmp_path / "journal")
    original = (folder / CHECKPOINTS).read_bytes()
    whole = verify_evidence(folder).signed

    def edit(chance: random.Random) -> bool:
        (folder / CHECKPOINTS).write_bytes(altered(original, chance))
        # A last line without its end is what a power cut leaves: it counts as not written, and the result says so.
        return is_noticed(folder) or leaves_unsigned(verify_evidence(folder), whole)

    campaign(150, edit, "bytes of checkpoints")


def leaves_unsigned(found: Verification, whole: int) -> bool:
    return found.signed < whole and any(f"newest {whole - found.signed} record" in said for said in found.remarks)


def chained(notes: list[str]) -> bytes:
    """A file of checkpoints, each line with the hash of the one before: no key is needed for that."""
    lines: list[bytes] = []
    for note in notes:
        before = hashlib.sha256(lines[-1]).hexdigest() if lines else ""
        lines.append(rfc8785.dumps({"checkpoint": note, "previous": before}))
    return b"".join(line + b"\n" for line in lines)


def notes_of(folder: Path) -> list[str]:
    return [json.loads(line)["checkpoint"] for line in (folder / CHECKPOINTS).read_bytes().splitlines()]


def test_checkpoints_rewritten_and_chained_anew_without_the_key(federation: Federation, tmp_path: Path) -> None:
    folder = copy_of(federation.silo, tmp_path / "journal")
    original = notes_of(folder)

    def edit(chance: random.Random) -> bool:
        notes = list(original)
        at = chance.randrange(len(notes) - 1)
        origin, size, root = notes[at].split("\n")[:3]
        match chance.randrange(4):
            case 0:
                notes[at] = Checkpoint(origin, int(size), base64.b64decode(root)).sign(STRANGER)
            case 1:
                notes[at] = Checkpoint(origin, int(size), chance.randbytes(32)).sign(STRANGER)
            case 2:
                notes[at] = notes[at][:-3] + ("A" if notes[at][-3] != "A" else "B") + notes[at][-2:]
            case _:
                # One that an attestation shows; a checkpoint that nobody was shown can be left out without a loss.
                shown = [note for note in notes[:-1] if note in shown_notes(federation.bundle)]
                notes.remove(chance.choice(shown))
        (folder / CHECKPOINTS).write_bytes(chained(notes))
        return is_noticed(folder)

    campaign(50, edit, "checkpoints chained anew")


def shown_notes(bundle: Path) -> set[str]:
    return {
        json.loads(base64.b64decode(record["attestation"]["payload"]))["checkpoint"]
        for record in records_of(bundle)
        if record.get("attestation") is not None and record["direction"] == "sent"
    }


def test_receipts_edited_by_the_owner_who_signs_everything_anew(federation: Federation, scratch: Path) -> None:
    """His own signatures fit; the other side's, inside the records, do not."""
    original = records_of(federation.bundle)
    received = [r["index"] for r in original if r["kind"] == "message" and r["direction"] == "received"]
    received = [index for index in received if original[index].get("attestation") is not None]
    forger = Forger(federation.key, original[0]["self"])

    def edit(chance: random.Random) -> bool:
        records = copy.deepcopy(original)
        at = chance.choice(received)
        envelope = records[at]["attestation"]
        match chance.randrange(4):
            case 0:
                payload = json.loads(base64.b64decode(envelope["payload"]))
                payload = changed(payload, chance)
                envelope["payload"] = base64.b64encode(rfc8785.dumps(payload)).decode()
            case 1:
                envelope["signatures"] = changed({"s": envelope["signatures"]}, chance)["s"]
            case 2:
                document = json.loads(base64.b64decode(envelope["payload"]))
                records[at]["attestation"] = to_json(seal(document, ATTESTATION, STRANGER))
            case _:
                records[at]["attestation"] = records[chance.choice([i for i in received if i != at])]["attestation"]
        if records == original:
            return True
        resigned(scratch, forger.rewrite(records), federation.bundle, federation.key)
        return is_noticed(scratch)

    campaign(60, edit, "receipts")


def test_a_past_rewritten_by_its_owner_with_his_key(federation: Federation, scratch: Path) -> None:
    """He has everything but the other side's key: what it has cosigned holds him to his past, with or without it."""
    original = records_of(federation.bundle)
    forger = Forger(federation.key, original[0]["self"])
    # The other side's last words cover everything before the last two records.
    sendings = [r["index"] for r in original[:-2] if r["kind"] == "message"]

    def edit(chance: random.Random) -> bool:
        records = copy.deepcopy(original)
        at = chance.choice(sendings)
        without: frozenset[str] = frozenset()
        match chance.randrange(4):
            case 0:
                without = frozenset({records[at]["call_id"]})
                records = [r for r in records if r.get("call_id") not in without]
            case 1:
                records[at]["sha256"] = chance.randbytes(32).hex()
            case 2:
                records[at]["time"] = "2020-01-01T00:00:00.000Z"
            case _:
                fields = records[at]["fields"]
                name = chance.choice(sorted(fields))
                fields[name] += 1
                records[at]["length"] += 1
                exposure = next(iter(records[at]["classes"]))
                records[at]["classes"][exposure] += 1
        resigned(scratch, forger.rewrite(records, without_calls=without), federation.bundle, federation.key)
        return is_noticed(scratch) and is_noticed(scratch, peer=federation.coordinators_bundle)

    campaign(40, edit, "a past rewritten by its owner")


def test_the_forger_who_changes_nothing_is_believed(federation: Federation, scratch: Path) -> None:
    """So that what is noticed elsewhere is the forgery, and no blunder of the tests' forger."""
    records = records_of(federation.bundle)[:8]  # before the first words of the other side
    forged = Forger(federation.key, records[0]["self"]).rewrite(records)
    resigned(scratch, forged, federation.bundle, federation.key)
    assert verify_evidence(scratch).sound


@pytest.mark.parametrize("what", ["last request", "last answer", "a record of its own"])
def test_what_no_word_of_the_other_side_covers_yet_is_held_by_its_bundle(
    federation: Federation, scratch: Path, what: str
) -> None:
    """The newest records: alone, their owner can write them as he likes. The other side has the messages too.

    A record of his own that he wrote after the last exchange nobody else has seen: this cannot be noticed by anyone.
    """
    records = records_of(federation.bundle)
    if what == "a record of its own":
        party = {name: records[0][name] for name in ("federation", "self", "v")}
        records.append({**party, "kind": "refusal", "time": records[-1]["time"], "reason": "never happened"})
    else:
        at = -1 if what == "last answer" else -2
        records[at] = {**records[at], "sha256": "00" * 32}
    resigned(scratch, records, federation.bundle, federation.key)
    if what == "last request":
        # The answer to it acknowledges other bytes: this is noticed at once.
        assert is_noticed(scratch)
        return
    assert not is_noticed(scratch)
    assert is_noticed(scratch, peer=federation.coordinators_bundle) == (what == "last answer")


def test_everything_signed_with_another_key(federation: Federation, scratch: Path) -> None:
    """A whole made-up journal, the other side's words included. Only who knows a true key can tell."""
    records = records_of(federation.bundle)
    public = STRANGER.public_key().public_bytes_raw().hex()
    resigned(scratch, records, federation.bundle, STRANGER)
    assert is_noticed(scratch)
    records[0]["public_key"] = public
    resigned(scratch, Forger(STRANGER, records[0]["self"]).rewrite(records), federation.bundle, STRANGER)
    assert is_noticed(scratch)  # the coordinator's cosignatures are for another history
    records = records[:8]  # nothing of the coordinator's words
    resigned(scratch, Forger(STRANGER, records[0]["self"]).rewrite(records), federation.bundle, STRANGER)
    assert not is_noticed(scratch)
    assert is_noticed(scratch, key=federation.key.public_key().public_bytes_raw())
    assert is_noticed(scratch, peer=federation.coordinators_bundle)


def test_a_journal_put_back_to_an_earlier_checkpoint(federation: Federation, tmp_path: Path) -> None:
    """Alone it is what it was then. The other side has seen more."""
    folder = copy_of(federation.silo, tmp_path / "journal")
    lines = (folder / RECORDS).read_bytes().splitlines(keepends=True)
    notes = notes_of(folder)
    last_shown = max(int(note.split("\n")[1]) for note in shown_notes(federation.bundle))
    for number, note in enumerate(notes[:-1]):
        size = int(note.split("\n")[1])
        (folder / RECORDS).write_bytes(b"".join(lines[:size]))
        (folder / CHECKPOINTS).write_bytes(chained(notes[: number + 1]))
        alone = verify_evidence(folder)
        assert alone.sound, alone.sentences()
        assert alone.records == size
        compared = verdict(folder, peer=federation.coordinator)
        if compared is None:
            continue  # nothing had been exchanged yet
        # Put back to the very checkpoint that the other side saw last, only the messages since are missing. So does
        # honest evidence look that was made in the middle of a call; therefore it is not broken, but it is told.
        told = [said for said in compared.remarks if "Only newer evidence of" in said]
        assert "later records are withheld or gone" in compared.problem or (told and size >= last_shown)


def test_the_newest_records_of_a_living_journal_are_named_as_not_signed(tmp_path: Path) -> None:
    exchange = meet(tmp_path)
    exchange.rounds([0])
    exchange.get_task(1, 2)
    folder = exchange.silo.folder
    whole = verify_evidence(folder)
    assert whole.sound
    newest = whole.records - whole.signed
    assert newest >= 1
    assert any(f"the newest {newest} record" in said for said in whole.remarks)
    lines = (folder / RECORDS).read_bytes().splitlines(keepends=True)
    (folder / RECORDS).write_bytes(b"".join(lines[:-1]))
    shorter = verify_evidence(folder)
    assert shorter.sound
    assert shorter.records == whole.records - 1
    # Here it is an answer: the coordinator says that it was sent, and that alone does not show that it arrived.
    assert verify_evidence(folder, peer=exchange.coordinator.folder).sound


def test_a_message_withheld_from_the_newest_records_is_missed_by_the_other_side(tmp_path: Path) -> None:
    exchange = meet(tmp_path)
    exchange.rounds([0])
    exchange.cutting("answer", lambda: exchange.submit(1))
    folder = exchange.silo.folder
    lines = (folder / RECORDS).read_bytes().splitlines(keepends=True)
    signed = verify_evidence(folder).signed
    (folder / RECORDS).write_bytes(b"".join(lines[:signed]))
    assert verify_evidence(folder).sound
    found = verify_evidence(folder, peer=exchange.coordinator.folder)
    assert any("has 3 messages that spiffe://test/silo/hospital1 sent after" in said for said in found.remarks)
    exchange.attest(in_step=False)
    found = verify_evidence(folder, peer=exchange.coordinator.folder)
    assert not found.sound


@dataclass
class Fork:
    first: Exchange
    second: Exchange


@pytest.fixture
def fork(tmp_path: Path) -> Iterator[Fork]:
    """A coordinator that keeps two journals with one key, and shows one of them to each of two hospitals."""
    common = Party(COORDINATOR, tmp_path / "common", key_of(200))
    first = meet(tmp_path, coordinator=common)
    second = meet(tmp_path, silo="spiffe://test/silo/hospital2", seed=2, coordinator=common)
    first.rounds([0])
    second.rounds([0])
    common.journal.close()
    for name, exchange in (("one", first), ("other", second)):
        shutil.copytree(common.folder, tmp_path / name)
        exchange.coordinator = Party(COORDINATOR, tmp_path / name, key_of(200))
        # In each of the two, nothing of what is exchanged with the other hospital from here on.
        exchange.coordinator.door.note(RefusalRecord(reason=f"told to the {name} only"))
        exchange.in_step = True
    yield Fork(first, second)
    for exchange in (first, second):
        exchange.close()


def test_a_forked_history(fork: Fork) -> None:
    for exchange in (fork.first, fork.second):
        exchange.rounds([1, 2])
        exchange.attest()
    for exchange, other in ((fork.first, fork.second), (fork.second, fork.first)):
        own = exchange.silo.folder
        assert verify_evidence(own).sound
        assert verify_evidence(other.coordinator.folder).sound
        assert verify_evidence(own, peer=exchange.coordinator.folder).sound
        for found in (
            verify_evidence(own, peer=other.coordinator.folder),
            verify_evidence(other.coordinator.folder, peer=own),
        ):
            assert not found.sound
            assert "history" in found.problem or "withheld" in found.problem + found.peers_problem


def test_a_forked_history_of_which_the_shown_messages_are_copied_over(fork: Fork) -> None:
    """The same messages in both, one record apart: only the roots tell."""
    fork.first.rounds([1, 2])
    fork.first.attest()
    fork.first.silo.journal.close()
    shown = fork.first.coordinator
    shown.journal.close()
    records = [json.loads(line) for line in (shown.folder / RECORDS).read_bytes().splitlines()]
    at = next(index for index, record in enumerate(records) if record.get("reason", "").startswith("told to"))
    records[at]["reason"] = "another thing"
    forged = Forger(shown.key, COORDINATOR).rewrite(records)
    target = fork.first.silo.folder.parent / "forged.json"
    export(shown.folder, target)
    resigned(target, forged, target, shown.key)
    found = verify_evidence(fork.first.silo.folder, peer=target)
    assert not found.sound
    shown.open()
    fork.first.silo.open()


HEADER_CHANGES: list[tuple[str, Callable[[Any], Any]]] = [
    ("v", lambda _: 2),
    ("v", lambda _: True),
    ("party", lambda party: party + "x"),
    ("party", lambda _: COORDINATOR),
    ("federation", lambda _: "other"),
    ("origin", lambda origin: origin + "x"),
    ("origin", lambda _: origin_of(COORDINATOR)),
    ("size", lambda size: size + 1),
    ("size", lambda size: size - 1),
    ("size", lambda _: 2**53 - 1),
    ("first", lambda first: first + 1),
    ("first", lambda first: first - 1),
    ("first", lambda _: 0),
    ("count", lambda count: count + 1),
    ("count", lambda count: count - 1),
    ("before", lambda parts: parts[1:]),
    ("before", lambda parts: parts[::-1] if len(parts) > 1 else [*parts, *parts]),
    ("before", lambda parts: [{**parts[0], "root": "00" * 32}, *parts[1:]]),
    ("before", lambda parts: [{**parts[0], "level": parts[0]["level"] + 1}, *parts[1:]]),
    ("behind", lambda parts: parts[1:]),
    ("behind", lambda parts: [*parts, *parts]),
    ("behind", lambda parts: [{**parts[0], "root": "00" * 32}, *parts[1:]]),
    ("checkpoint", lambda note: note + "— other AAAA\n"),
    ("checkpoint", lambda note: note.replace("\n", "\n\n", 1)),
    ("checkpoint", lambda note: note[:-1]),
    ("public_key", lambda _: STRANGER.public_key().public_bytes_raw().hex()),
    ("public_key", lambda _: None),
    ("schemas", lambda _: []),
    ("schemas", lambda schemas: [*schemas, *schemas]),
    ("schemas", lambda schemas: [[*schemas[0], *schemas[0]]]),
    ("schemas", lambda schemas: [schemas[0][::-1]]),
    ("more", lambda _: 1),
]


@pytest.mark.parametrize("number", range(len(HEADER_CHANGES)))
def test_a_stretch_whose_header_is_altered_in_any_field(federation: Federation, tmp_path: Path, number: int) -> None:
    path = tmp_path / "stretch.json"
    export(federation.silo, path, select=Selection(first_round=1, last_round=1))
    found = verify_evidence(path)
    assert found.sound, found.sentences()
    assert verify_evidence(path, peer=federation.coordinators_bundle).sound
    lines = path.read_bytes().splitlines(keepends=True)
    header = json.loads(lines[1][9:-2])
    name, change = HEADER_CHANGES[number]
    altered_header = {**header, name: change(header.get(name))}
    lines[1] = b'"header":' + rfc8785.dumps(altered_header) + b",\n"
    assert b"".join(lines) != path.read_bytes()
    path.write_bytes(b"".join(lines))
    assert is_noticed(path)


def test_edited_bytes_of_a_stretch(federation: Federation, scratch: Path) -> None:
    export(federation.silo, scratch, select=Selection(first_round=1, last_round=1))
    original = scratch.read_bytes()

    def edit(chance: random.Random) -> bool:
        scratch.write_bytes(altered(original, chance))
        return is_noticed(scratch)

    campaign(150, edit, "bytes of a stretch")


def test_a_stretch_of_a_rewritten_past_differs_from_the_other_side(federation: Federation, tmp_path: Path) -> None:
    """The owner signs a made-up round with his key, and hands out only that round."""
    records = records_of(federation.bundle)
    at = next(r["index"] for r in records if r["kind"] == "message" and r["round"] == 1 and r["direction"] == "sent")
    records[at]["sha256"] = "11" * 32
    key = federation.key
    with Journal(tmp_path / "forged", key=key, origin=records[0]["origin"]) as journal:
        journal.append([{name: value for name, value in r.items() if name not in ("v", "index")} for r in records])
    target = tmp_path / "stretch.json"
    export(tmp_path / "forged", target, select=Selection(first_round=1, last_round=1))
    assert verify_evidence(target).sound
    assert is_noticed(target, peer=federation.coordinators_bundle)


@pytest.fixture(scope="module")
def segmented(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """Journals in several files, of parties that have both changed their keys."""
    folder = tmp_path_factory.mktemp("segmented")
    coordinator = Party(COORDINATOR, folder / "coordinator", key_of(200), segment_bytes=40_000)
    exchange = meet(folder, coordinator=coordinator)
    exchange.silo.segment_bytes = 40_000
    for number, party in enumerate((exchange.silo, exchange.coordinator)):
        exchange.rounds([3 * number, 3 * number + 1])
        exchange.attest()
        exchange.silo.restart()
        party.rotate(folder / f"keys{number}")
        exchange.in_step = False
        exchange.begin()
        exchange.rounds([3 * number + 2])
    exchange.attest()
    return ended(exchange, folder)


def test_several_files_and_changes_of_keys(segmented: Federation, tmp_path: Path) -> None:
    one = segmented
    public = one.key.public_key().public_bytes_raw()
    assert len(list(one.silo.glob("records*.jsonl"))) > 2
    for mine, theirs in ((one.silo, one.coordinator), (one.bundle, one.coordinators_bundle)):
        for path, peer in ((mine, None), (mine, theirs), (theirs, mine)):
            found = verify_evidence(path, peer=peer, key=public if path == mine else None)
            assert found.sound, found.sentences()
    for select in (Selection(first_round=0, last_round=1), Selection(first_round=5, last_round=5)):
        path = tmp_path / "stretch.json"
        export(one.silo, path, select=select)
        assert verify_evidence(path, key=public, peer=one.coordinator).sound
    old = key_of(1).public_key().public_bytes_raw()
    assert is_noticed(one.bundle, key=old)


def test_edited_files_of_a_journal_in_several_files(segmented: Federation, tmp_path: Path) -> None:
    def edit(chance: random.Random) -> bool:
        folder = copy_of(segmented.silo, tmp_path / "journal")
        files = sorted(folder.glob("records*.jsonl"))
        at, other = chance.sample(range(len(files)), 2)
        match chance.randrange(4):
            case 0:
                files[at].unlink()
            case 1:
                content = files[at].read_bytes()
                files[at].write_bytes(files[other].read_bytes())
                files[other].write_bytes(content)
            case 2:
                files[at].write_bytes(altered(files[at].read_bytes(), chance))
            case _:
                shutil.copy(files[at], folder / f"records-{chance.randrange(10**6):012d}.jsonl")
        noticed = is_noticed(folder)
        shutil.rmtree(folder)
        return noticed

    campaign(60, edit, "files of a journal")


def test_a_change_of_keys_that_the_earlier_key_did_not_sign(segmented: Federation, scratch: Path) -> None:
    original = records_of(segmented.bundle)
    at = next(record["index"] for record in original if record["kind"] == "key-rotation")

    def edit(chance: random.Random) -> bool:
        records = copy.deepcopy(original)
        records[at] = changed(records[at], chance)
        resigned(scratch, records, segmented.bundle, segmented.key)
        return is_noticed(scratch)

    campaign(30, edit, "a change of keys")
