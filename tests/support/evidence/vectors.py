"""The published vectors: sound bundles, and tampered ones with the finding that is expected of each.

    python -m tests.support.evidence.vectors [--bundles]

writes ``docs/vectors/tampered.json`` from the bundles beside it: always the same, its seeds are the kinds' names. With
``--bundles`` the bundles are made anew (their keys are the tests', their nonces and times are not the same again).

A tampered bundle is a sound one with bytes replaced: ``[offset, how many go, what comes]``, from the last to the
first. Every kind of tampering has words here, written by hand, of which one must be in the finding: a vector that is
found by another check than its own is not published, and ends the command.
"""

from __future__ import annotations

import base64
import copy
import difflib
import hashlib
import json
import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import rfc8785
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from medsilo.privacy.audit.bundle import Selection, export
from medsilo.privacy.budget.accounting import SampledGaussian
from medsilo.privacy.budget.ledger import Budget, Ledger, Purpose, Subject, describe_spent
from medsilo.privacy.journal.records import (
    ApprovalRecord,
    CosignedRecord,
    EgressRecord,
    ForeignPeerRecord,
    LedgerRecord,
    MixRecord,
    RefusalRecord,
    RosterRecord,
    VoidRecord,
    WithdrawalRecord,
)
from medsilo.privacy.verify import Result, UnreadableError, verify_bundle
from tests.support.evidence.exchanging import COORDINATOR, SILO, Party, key_of, meet
from tests.support.evidence.tampering import Forger, Record, changed, records_of, resigned, write_bundle

FOLDER = Path(__file__).parents[3] / "docs" / "vectors"
LIST = "tampered.json"
STRANGER = Ed25519PrivateKey.from_private_bytes(b"\x07" * 32)
OWNER, PEER = key_of(1), key_of(200)
Splice = list[Any]
Vector = dict[str, Any]
Edit = Callable[[random.Random, Path, Path], None]
"""Writes the tampered form of a bundle (the second) to a file (the third)."""

# The words of which one must be in the findings of a kind; "unreadable" for what is no bundle any more.
FORM = "it is not in the form of a record"
NOT_SIGNED = "is not the one that was signed"
NOT_FOR = "is not for the bytes"
EXPECTED: Mapping[str, Sequence[str]] = {
    "cut off": ("unreadable",),
    "not as it was exported": ("unreadable",),
    "another spelling of the same content": (FORM,),
    "a byte of a record": (FORM, NOT_SIGNED, "unreadable", "is not in the form 2026"),
    "a record left out": ("calls itself record",),
    "a record moved": ("calls itself record",),
    "a record doubled": ("calls itself record",),
    "a record left out, the rest numbered anew": (
        NOT_SIGNED,
        NOT_FOR,
        "another was due",
        "is not in the journal",
        "has signed for no more than",
        "before its audit key is known",
        "does not begin with its public key",
        "before there was a consent",
        "for no run that was joined",
        "which is not in the journal",
        "does not join",
        "before there is one",
        "which was not sent to it",
        "it was not shown from here",
        "records, not from",
        "had not shown",
        "is not the one over its records",
        "signature does not hold",
    ),
    "a time": (NOT_SIGNED,),
    "a hash of bytes": (NOT_SIGNED, NOT_FOR),
    "a length": ("unaccounted for",),
    "bytes of a field": ("unaccounted for", "not those of its fields"),
    "bytes moved to another class": ("not those of its fields",),
    "the other party": (
        "its attestation is by",
        "came from",
        "which is not in the journal",
        NOT_SIGNED,
        "the consent is for",
        "another was due",
        "has signed for no more",
        "audit key is known",
    ),
    "whose journal it is": ("in a journal of",),
    "a header's word": (
        "unreadable",
        "does not hold together",
        "its header names",
        "is not the one over its records",
        "it announces",
        NOT_SIGNED,
        "checkpoint cannot be used",
        "signature does not hold",
        "calls itself record",
        "is not in the journal",
        "perfect subtree",
    ),
    "a checkpoint signed by a stranger": ("was not signed with this key",),
    "a checkpoint's signature": ("signature does not hold", "cannot be used"),
    "another owner's key given": ("the one that was given",),
    "a signed record in another form": (FORM,),
    "a signed record that contradicts itself": (
        "unaccounted for",
        "not those of its fields",
        "is not in the schema",
        "no message",
        "does not have the hash",
        "cannot be read",
        "was GetPlan before",
        "which this release does not know",
        "another was due",
        "not one of its owner",
        "is not in the journal",
        " bytes",
        "has signed for no more than",
    ),
    "a consent that did not allow it": (
        "left without consent",
        "the consent is for",
        "after the consent had expired",
        "the consent does not hold it",
        "before there was a consent",
        "without a consent that is in force",
        "for no run that was joined",
        "after the consent was withdrawn",
        "which the run's plan does not announce",
    ),
    "a start from hospitals' models without consent": ("the consent does not hold it",),
    "more rounds than were consented to": ("the consent holds",),
    "a roster that gives single updates away": ("gives single updates away",),
    "the owner rewrites a message and signs anew": (NOT_FOR,),
    "the owner rewrites what only the root covers, and signs anew": ("is not for this checkpoint",),
    "the owner leaves out a call, and signs anew": (
        "which was not sent to it by",
        "was not shown from here",
        "is not for this checkpoint",
        "is not in the journal",
        NOT_SIGNED,
        "records, not from",
        "had not shown",
        "before its audit key is known",
        "for no run that was joined",
    ),
    "the owner leaves out a receipt, and signs anew": ("given no receipt for it",),
    "the other side's words": ("the signature does not hold for the audit key", "is not a DSSE envelope"),
    "the other side's words, signed by a stranger": ("the signature does not hold for the audit key",),
    "the other side's words from another message": (
        "another was due",
        "does not continue",
        "records, not from",
        "rewritten or put back",
    ),
    "the other side's journal put back": ("rewritten or put back", "does not continue", "records, not from"),
    "the other side owns to less": ("which owns up to",),
    "the other side acknowledges other bytes": (NOT_FOR,),
    "the other side acknowledges what was not sent": ("which was not sent to it by",),
    "the other side's words in another form": ("an attestation cannot be used",),
    "the other side's words for somebody else": ("an attestation by",),
    "the owner's words leave out a call": ("leaves out call",),
    "a change of keys": (
        "the signature does not hold",
        "is not a DSSE envelope",
        "for another key",
        "64 hexadecimal digits",
        "is of type",
        "is not one of",
        NOT_SIGNED,
    ),
    "a segment": ("does not join the segment", "names another segment", "out of its place", "checkpoint", NOT_SIGNED),
    "a checkpoint for witnesses": ("checkpoint", NOT_SIGNED),
    "another key of the other party": ("has another audit key without a signed change",),
    "a key for whom signs nothing": ("was said to sign nothing", "from receipts, with which was exchanged"),
}


def main() -> None:
    """The command."""
    FOLDER.mkdir(exist_ok=True)
    if "--bundles" in sys.argv[1:]:
        for path in FOLDER.glob("*.json"):
            path.unlink()
        make_bundles(FOLDER)
    (FOLDER / LIST).write_text(published(list(vectors(FOLDER))))


def published(found: Sequence[Vector]) -> str:
    """The list, one vector a line."""
    lines = ",\n".join(json.dumps(vector, ensure_ascii=False, separators=(",", ":")) for vector in found)
    return f'{{"v":1,"vectors":[\n{lines}\n]}}\n'


def make_bundles(folder: Path) -> None:
    """Sound bundles; every kind of record is in one of them."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        exchange = meet(scratch / "plain")
        exchange.rounds([0, 1], chunks=1)
        exchange.attest()
        roster = RosterRecord(
            run="run1", plan_sha256="ab" * 32, round=0, silos=["a", "b", "c"], roster_sha256="cd" * 32
        )
        exchange.coordinator.door.note(roster)
        exchange.close()
        exchange.silo.bundle(folder / "hospital.json")
        exchange.coordinator.bundle(folder / "coordinator.json")
        export(exchange.silo.folder, folder / "range.json", select=Selection(first_round=1, last_round=1))
        records = records_of(folder / "hospital.json")[:8]
        forged = Forger(OWNER, SILO).rewrite(records)
        resigned(folder / "begun.json", forged, folder / "hospital.json", OWNER)

        exchange = meet(scratch / "cut")
        exchange.rounds([0], chunks=1)
        exchange.cutting("answer", lambda: exchange.submit(1, 1))
        exchange.submit(1, 1, repeated=True)
        exchange.cutting("request", lambda: exchange.get_task(2, 1))
        exchange.attest(in_step=False)
        exchange.close()
        exchange.silo.bundle(folder / "cut-calls.json")

        exchange = meet(scratch / "kinds")
        exchange.rounds([0], chunks=1)
        exchange.attest()
        note = exchange.silo.door.note
        note(ApprovalRecord(run="run1", plan_sha256=exchange.plan.sha256.hex(), approved_at="2026-01-01T00:00:00Z"))
        note(RefusalRecord(reason="a run of another coordinator", run="run2", plan_sha256="00" * 32))
        ledger = Ledger(scratch / "ledger", Subject("ab" * 32, "image"))
        purpose = Purpose("test", "run1", "cd" * 32, 0, "training")
        charge = ledger.charge(SampledGaussian(0.2, 2, 200), purpose, Budget(50.0, 1e-5)).describe()
        spent = describe_spent(ledger.cost(1e-5).epsilon, 1e-5)
        told = note(LedgerRecord(charge=charge, spent=spent))
        note(VoidRecord(charge=charge, charged=told))
        note(ForeignPeerRecord(peer="spiffe://test/coordinator/flower", protocol="Flower"))
        plan = exchange.plan.sha256.hex()
        note(
            MixRecord(
                run="run1",
                plan_sha256=plan,
                round=0,
                roster_sha256="cd" * 32,
                mix_sha256="ef" * 32,
                models=4,
                isolation=0.5,
                isolation_over_rounds=0.5,
                rounds=1,
            )
        )
        counts = {"sent": 10, "retransmitted": 0, "segments": 1, "received": 10, "refused": 0, "connections": 1}
        began = note(EgressRecord(since=len(exchange.silo.journal), address="192.0.2.1:443", interfaces={}, **counts))
        note(EgressRecord(since=began, address="192.0.2.1:443", interfaces={"tap0": 60}, **counts))
        shown = exchange.silo.journal.checkpoint()
        note(CosignedRecord(checkpoint=shown, witnesses=[], away={"ethics.example.org": "it does not answer"}))
        note(WithdrawalRecord(run="run1", plan_sha256=exchange.plan.sha256.hex(), cause="withdrawn by the hospital"))
        exchange.close()
        exchange.silo.bundle(folder / "every-kind.json")

        coordinator = Party(COORDINATOR, scratch / "rotated" / "coordinator", PEER, segment_bytes=30_000)
        exchange = meet(scratch / "rotated", coordinator=coordinator)
        exchange.silo.segment_bytes = 30_000
        for number, party in enumerate((exchange.silo, exchange.coordinator)):
            exchange.rounds([number], chunks=1)
            exchange.attest()
            exchange.silo.restart()
            party.rotate(scratch / f"keys{number}")
            exchange.in_step = False
            exchange.begin()
        exchange.rounds([2], chunks=1)
        exchange.attest()
        rotated = exchange.silo.key
        exchange.close()
        exchange.silo.bundle(folder / "changed-keys.json")
        raw = rotated.private_bytes_raw().hex()
        (folder / "keys.json").write_text(json.dumps({"changed-keys": raw}) + "\n")


def finding_of(path: Path, key: str | None = None) -> dict[str, Any]:
    """What the verifier finds, as vectors have it: without what stands in brackets behind a record's wrong form,
    which is Python's own words."""
    try:
        found: Result = verify_bundle(path, key=bytes.fromhex(key) if key else None)
    except UnreadableError:
        return {"unreadable": True}
    problem = FORM if found.problem.startswith(FORM) else found.problem
    return {"problem": problem, "index": found.index, "until": found.until}


def is_expected(kind: str, finding: Mapping[str, Any]) -> bool:
    """Whether a finding is one that a kind of tampering is to be found by."""
    if finding.get("unreadable"):
        return "unreadable" in EXPECTED[kind]
    return any(words in finding["problem"] for words in EXPECTED[kind])


def splices(before: bytes, after: bytes) -> list[Splice]:
    """What makes the one of the other: from the last place to the first."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    starts = [0]
    for line in old:
        starts.append(starts[-1] + len(line))
    found: list[Splice] = []
    # Records that were numbered anew are the same lines but for that.
    alike = [[re.sub(rb'"index":[0-9]+,', b"", line, count=1) for line in lines] for lines in (old, new)]
    for _, a, b, c, d in difflib.SequenceMatcher(None, *alike, autojunk=False).get_opcodes():
        pairs = [(old[a + n], new[c + n], starts[a + n]) for n in range(b - a)] if b - a == d - c else []
        for one, other, start in pairs or [(b"".join(old[a:b]), b"".join(new[c:d]), starts[a])]:
            if one == other:
                continue
            head = next(
                (n for n, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other))
            )
            rest, new_rest = one[head:], other[head:]
            tail = 0
            while tail < min(len(rest), len(new_rest)) and rest[-1 - tail] == new_rest[-1 - tail]:
                tail += 1
            gone, come = rest[: len(rest) - tail], new_rest[: len(new_rest) - tail]
            found.append([start + head, len(gone), base64.b64encode(come).decode()])
    return found[::-1]


def applied(content: bytes, edits: Sequence[Splice]) -> bytes:
    """A sound bundle with the bytes replaced."""
    for offset, gone, come in edits:
        content = content[:offset] + base64.b64decode(come) + content[offset + gone :]
    return content


def vectors(folder: Path) -> Iterator[Vector]:
    """Every vector; raises ``ValueError`` for one that is not found by what its kind is to be found by."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name) / "tampered.json"
        seen: set[bytes] = set()
        for kind, bundle, count, edit in tampering():
            base, made, tries = folder / f"{bundle}.json", 0, 0
            while made < count:
                tries += 1
                if tries > 50 * count:
                    raise ValueError(f"{kind} of {bundle}: {made} different ones of {count}")
                chance = random.Random(f"{kind} {bundle} {tries}")
                edit(chance, base, scratch)
                content = scratch.read_bytes()
                if content == base.read_bytes() or content in seen:
                    continue
                seen.add(content)
                finding = finding_of(scratch)
                if finding.get("problem") == "" or not is_expected(kind, finding):
                    raise ValueError(f"{kind} of {bundle}, try {tries}: found by {finding}")
                edits = splices(base.read_bytes(), content)
                if applied(base.read_bytes(), edits) != content:
                    raise ValueError(f"{kind} of {bundle}, try {tries}: the edits do not give it")
                made += 1
                yield {"kind": kind, "bundle": bundle, "edits": edits, "finding": finding}
        for bundle in ("hospital", "coordinator", "range"):
            key = STRANGER.public_key().public_bytes_raw().hex()
            finding = finding_of(folder / f"{bundle}.json", key)
            kind = "another owner's key given"
            if not is_expected(kind, finding):
                raise ValueError(f"{kind} of {bundle}: found by {finding}")
            yield {"kind": kind, "bundle": bundle, "edits": [], "key": key, "finding": finding}


def tampering() -> Iterator[tuple[str, str, int, Edit]]:
    """Every kind with the bundle that it is done to, how many of it, and the edit."""
    for bundle in ("hospital", "coordinator", "range", "changed-keys"):
        yield "cut off", bundle, 6, _cut
        yield "a byte of a record", bundle, 10, _byte
        yield "another spelling of the same content", bundle, 5, _respelled
        yield "a record left out", bundle, 4, _lines("drop")
        yield "a record moved", bundle, 5, _lines("move")
        yield "a record doubled", bundle, 4, _lines("double")
        yield "a time", bundle, 6, _field("time")
        yield "a hash of bytes", bundle, 8, _field("sha256")
        yield "a length", bundle, 6, _field("length")
        yield "bytes of a field", bundle, 6, _field("fields")
        yield "bytes moved to another class", bundle, 6, _field("classes")
        yield "whose journal it is", bundle, 4, _field("self")
        yield "the other party", bundle, 4, _field("peer")
        yield "a checkpoint signed by a stranger", bundle, 1, _stranger
        yield "a checkpoint's signature", bundle, 4, _signature
        yield "a header's word", bundle, 14, _header
        yield "not as it was exported", bundle, 4, _frame
    for bundle in ("hospital", "changed-keys", "every-kind", "cut-calls"):
        yield "a record left out, the rest numbered anew", bundle, 12, _renumbered
    yield "a signed record in another form", "begun", 30, _of_list(WRONG_FORMS)
    yield "a signed record that contradicts itself", "begun", 18, _of_list(CONTRADICTING)
    yield "a consent that did not allow it", "begun", 9, _of_list(NOT_ALLOWED)
    yield "a start from hospitals' models without consent", "begun", 1, _start_of_hospitals
    yield "more rounds than were consented to", "hospital", 2, _rounds
    yield "a roster that gives single updates away", "coordinator", 3, _rosters
    yield "the owner rewrites a message and signs anew", "hospital", 16, _forged("message")
    yield "the owner rewrites what only the root covers, and signs anew", "hospital", 10, _forged("root")
    yield "the owner leaves out a call, and signs anew", "hospital", 5, _forged("call")
    for bundle in ("hospital", "coordinator"):
        yield "the other side's words", bundle, 16, _words("edited")
        yield "the other side's words, signed by a stranger", bundle, 4, _words("stranger")
        yield "the other side's words from another message", bundle, 6, _words("moved")
        yield "the other side's journal put back", bundle, 5, _words("put back")
        yield "the other side owns to less", bundle, 2, _words("less")
        yield "the other side acknowledges other bytes", bundle, 6, _words("other bytes")
        yield "the other side acknowledges what was not sent", bundle, 4, _words("not sent")
        yield "the other side's words in another form", bundle, 10, _words("form")
        yield "the other side's words for somebody else", bundle, 4, _words("for another")
    yield "the owner's words leave out a call", "hospital", 4, _left_out
    yield "the owner leaves out a receipt, and signs anew", "hospital", 2, _unreceipted
    yield "a change of keys", "changed-keys", 16, _rotation
    yield "a segment", "changed-keys", 8, _segment
    yield "a checkpoint for witnesses", "every-kind", 6, _cosigned
    yield "another key of the other party", "hospital", 2, _other_key
    yield "a key for whom signs nothing", "hospital", 2, _foreign


def _pieces(base: Path) -> list[bytes]:
    return base.read_bytes().splitlines(keepends=True)


def _cut(chance: random.Random, base: Path, target: Path) -> None:
    content = base.read_bytes()
    target.write_bytes(content[: chance.randrange(len(content))])


def _frame(chance: random.Random, base: Path, target: Path) -> None:
    content = base.read_bytes()
    edits = [
        (b'{\n"header"', b'{ \n"header"'),
        (b'"records":[\n', b'"records": [\n'),
        (b"\n]}\n", b"\n]}\n\n"),
        (b"\n]}\n", b"\n]}"),
        (b"{\n", b"[\n"),
        (b'"header":{', b'"Header":{'),
    ]
    old, new = chance.choice(edits)
    at = content.rindex(old) if old == b"\n]}\n" else content.index(old)
    target.write_bytes(content[:at] + new + content[at + len(old) :])


def _byte(chance: random.Random, base: Path, target: Path) -> None:
    """A hexadecimal digit somewhere in a record's hashes or signatures, or any letter: one bit is another."""
    lines = _pieces(base)
    at = chance.randrange(3, len(lines) - 1)
    line = bytearray(lines[at])
    place = chance.choice([n for n, byte in enumerate(line[:-2]) if byte in b'{}":,'])
    line[place] ^= 1 << chance.randrange(7)
    lines[at] = bytes(line)
    target.write_bytes(b"".join(lines))


def _respelled(chance: random.Random, base: Path, target: Path) -> None:
    lines = _pieces(base)
    at = chance.randrange(3, len(lines) - 1)
    comma = b"," if lines[at].endswith(b",\n") else b""
    record = json.loads(lines[at].rstrip(b",\n"))
    match chance.randrange(5):
        case 0:
            text = json.dumps(record)
        case 1:
            text = json.dumps(dict(reversed(record.items())), separators=(",", ":"))
        case 2:
            text = (
                rfc8785.dumps(record)
                .decode()
                .replace('"index":', '"index":0', 1)
                .replace('"index":00', '"index":0.0', 1)
            )
        case 3:
            text = rfc8785.dumps(record).decode().replace('"kind"', '"\\u006bind"', 1)
        case _:
            text = rfc8785.dumps(record).decode()
            text = f'{{"v":1,{text[1:]}'
    lines[at] = text.encode() + comma + b"\n"
    target.write_bytes(b"".join(lines))


def _lines(what: str) -> Edit:
    def edit(chance: random.Random, base: Path, target: Path) -> None:
        lines = [line.rstrip(b",\n") for line in _pieces(base)]
        head, records = lines[:3], lines[3:-1]
        at, other = chance.sample(range(len(records) - 1), 2)
        if what == "drop":
            del records[at]
        elif what == "double":
            records.insert(at, records[at])
        else:
            records.insert(other, records.pop(at))
        body = b",\n".join(records)
        target.write_bytes(b"{\n" + head[1] + b',\n"records":[\n' + body + b"\n]}\n")

    return edit


def _field(name: str) -> Edit:
    def edit(chance: random.Random, base: Path, target: Path) -> None:
        records = records_of(base)
        at = chance.choice([n for n, record in enumerate(records) if record["kind"] == "message" or name == "time"])
        if name == "self":
            at = chance.randrange(1, len(records))
        record = records[at] = copy.deepcopy(records[at])
        match name:
            case "time":
                record["time"] = f"20{chance.randint(10, 25)}-02-{chance.randint(1, 28):02}T00:00:00.000Z"
            case "sha256":
                record["sha256"] = chance.randbytes(32).hex()
            case "length":
                record["length"] += chance.randint(1, 9)
            case "fields":
                record["fields"][chance.choice(sorted(record["fields"]))] += chance.randint(1, 9)
            case "classes":
                record["classes"]["LABEL_COUNTS"] = record["classes"].pop(chance.choice(sorted(record["classes"])))
            case "peer":
                record["peer"] += chance.choice("abc")
            case _:
                record["self"] += chance.choice("abc")
        write_bundle(target, records, base)

    return edit


def _renumbered(chance: random.Random, base: Path, target: Path) -> None:
    records = records_of(base)
    # What comes last, and is in nobody's way, shows in the root alone.
    del records[chance.randrange(len(records))]
    records = [{**record, "index": index} for index, record in enumerate(records)]
    write_bundle(target, records, base, count=len(records), size=len(records))


def _with_header(base: Path, target: Path, **changes: Any) -> None:
    write_bundle(target, records_of(base), base, **changes)


def _header_of(base: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(base.read_bytes().splitlines()[1][9:-1])
    return found


def _header(chance: random.Random, base: Path, target: Path) -> None:
    header = _header_of(base)
    name = chance.choice(sorted(header))
    old = header[name]
    if name == "public_key":
        new: Any = None if old else OWNER.public_key().public_bytes_raw().hex()
    elif isinstance(old, int):
        new = chance.choice([old + 1, old - 1, 0, 2**53 - 1, -1, str(old)])
    elif name == "checkpoint":
        new = chance.choice([old[:-1], old.replace("\n", "\n\n", 1), old + "— other AAAA\n", old + "x\n", "", 5])
    elif isinstance(old, str):
        new = chance.choice([old + "x", "", None, COORDINATOR if name == "party" else "other"])
    elif name == "schemas":
        new = chance.choice([[], [*old, *old] or [["AAAA"]], [["not base64"]], None])
    else:
        more = {"level": chance.randrange(4), "root": "00" * 32}
        new = chance.choice([old[1:], [*old, more], [more, *old[1:]], None])
    _with_header(base, target, **{name: new})


def _stranger(chance: random.Random, base: Path, target: Path) -> None:
    from medsilo.privacy.journal.checkpoint import read_note

    _with_header(base, target, checkpoint=read_note(_header_of(base)["checkpoint"]).sign(STRANGER))


def _signature(chance: random.Random, base: Path, target: Path) -> None:
    note = _header_of(base)["checkpoint"]
    head, _, encoded = note.rstrip("\n").rpartition(" ")
    blob = bytearray(base64.b64decode(encoded))
    blob[chance.randrange(4, len(blob))] ^= 1 << chance.randrange(8)
    _with_header(base, target, checkpoint=f"{head} {base64.b64encode(blob).decode()}\n")


def _of_list(changes: Sequence[tuple[int, dict[str, Any]]]) -> Edit:
    """One of a list of changes of the first records, signed by their owner."""

    def edit(chance: random.Random, base: Path, target: Path) -> None:
        records = records_of(base)
        at, change = chance.choice(changes)
        records[at] = {**records[at], **change}
        resigned(target, Forger(OWNER, SILO).rewrite(records), base, OWNER)

    return edit


# The first records of a hospital: key, schema, consent, request and answer for the plan, the peer's key, run, joining.
WRONG_FORMS: list[tuple[int, dict[str, Any]]] = [
    (0, {"public_key": "00"}),
    (0, {"public_key": None}),
    (0, {"public_key": "AB" * 32}),
    (3, {"call_id": "00"}),
    (3, {"call_id": "AB" * 16}),
    (3, {"direction": "away"}),
    (3, {"direction": None}),
    (3, {"frame": True}),
    (3, {"frame": -1}),
    (3, {"frame": "0"}),
    (3, {"length": -1}),
    (3, {"length": 1.5}),
    (3, {"length": "31"}),
    (3, {"sha256": "xy" * 32}),
    (3, {"sha256": "00"}),
    (3, {"schema_sha256": ""}),
    (3, {"peer": None}),
    (3, {"peer": 5}),
    (3, {"rpc": None}),
    (3, {"message_type": None}),
    (3, {"fields": []}),
    (3, {"classes": None}),
    (3, {"round": "1"}),
    (3, {"plan_sha256": 1}),
    (3, {"run": 5}),
    (4, {"frame": None}),
    (5, {"public_key": 5}),
    (5, {"public_key": "00" * 31}),
    (5, {"rotations": None}),
    (2, {"consent": {}}),
    (2, {"consent": None}),
    (6, {"plan": {}, "plan_sha256": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"}),
    (7, {"sha256": "0" * 63}),
    (7, {"length": True}),
    (7, {"round": 0.5}),
    (0, {"kind": None}),
    (3, {"kind": 7}),
]
CONTRADICTING: list[tuple[int, dict[str, Any]]] = [
    (0, {"origin": "medsilo/test/silo/other"}),
    (1, {"files": []}),
    (1, {"files": ["AAAA"]}),
    (1, {"files": ["not base64"]}),
    (1, {"kind": "note"}),
    (3, {"frame": 1}),
    (3, {"length": 10**15}),
    (3, {"fields": {"nonce": 18, "silo": 11}}),
    (3, {"fields": {"nonce": 18, "silo": 11, "more": 2}}),
    (3, {"fields": {"nonce": 18, "silo": 11, "protocol_version": True}}),
    (3, {"fields": {"nonce.x": 18, "silo": 11, "protocol_version": 2}}),
    (3, {"classes": {"PROTOCOL": 31}}),
    (3, {"message_type": "medsilo.v1.Nothing"}),
    (3, {"v": 2}),
    (3, {"v": True}),
    (4, {"rpc": "Join"}),
    (6, {"plan_sha256": "00" * 32}),
    (3, {"fields": {"nonce": 0}}),
    (1, {"schema_sha256": "00" * 32}),
    (4, {"frame": 2}),
]
_ALLOWS: dict[str, Any] = {
    "sha256": "cd" * 32,
    "coordinator": COORDINATOR,
    "methods": ["fedavg"],
    "rounds": 1000,
    "expires": None,
    "exposures": ["PROTOCOL", "IDENTITY", "MODEL_PARAMETERS", "LOCAL_METRICS"],
}
NOT_ALLOWED: list[tuple[int, dict[str, Any]]] = [
    (2, {"consent": {**_ALLOWS, "exposures": ["PROTOCOL"]}}),
    (2, {"consent": {**_ALLOWS, "exposures": []}}),
    (2, {"consent": {**_ALLOWS, "exposures": ["PROTOCOL", "IDENTITY"]}}),
    (2, {"consent": {**_ALLOWS, "coordinator": COORDINATOR + "2"}}),
    (2, {"consent": {**_ALLOWS, "expires": "2020-01-01"}}),
    (2, {"consent": {**_ALLOWS, "methods": ["other"]}}),
    (2, {"kind": "note"}),
    (2, {"consent": {**_ALLOWS, "methods": []}}),
    (4, {"kind": "withdrawal", "cause": "withdrawn by the hospital"}),
    (5, {"kind": "withdrawal", "cause": "consent expired"}),
]


def _start_of_hospitals(chance: random.Random, base: Path, target: Path) -> None:
    """The plan does not ask for what its start needs."""
    del chance
    records = records_of(base)
    plan = records[6]["plan"]
    weights = {"sha256": "ab" * 32, "tensors_sha256": "cd" * 32, "source": "an earlier run", "public": False}
    plan = {**plan, "model": {**plan["model"], "weights": weights}}
    records[6] = {**records[6], "plan": plan, "plan_sha256": hashlib.sha256(rfc8785.dumps(plan)).hexdigest()}
    _owner_signs(records, base, target)


def _rounds(chance: random.Random, base: Path, target: Path) -> None:
    records = records_of(base)
    allowed = chance.randrange(2)
    records[2] = {**records[2], "consent": {**records[2]["consent"], "rounds": allowed}}
    # Before what is wrong shows, the coordinator has cosigned another past: he sets its words aside.
    _owner_signs(records, base, target)


def _owner_signs(records: list[Record], base: Path, target: Path, **options: Any) -> None:
    owner, key = (COORDINATOR, PEER) if base.stem == "coordinator" else (SILO, OWNER)
    forged = Forger(key, owner).rewrite(records, **options)
    resigned(target, forged, base, key)


def _rosters(chance: random.Random, base: Path, target: Path) -> None:
    records = records_of(base)
    at = next(n for n, record in enumerate(records) if record["kind"] == "roster")
    more = {**records[at], "silos": chance.sample(["a", "b", "c", "d", "e", "f"], 4)}
    records.append(more)
    _owner_signs(records, base, target)


def _forged(what: str) -> Edit:
    def edit(chance: random.Random, base: Path, target: Path) -> None:
        records = copy.deepcopy(records_of(base))
        messages = [n for n, record in enumerate(records[:-2]) if record["kind"] == "message"]
        without: frozenset[str] = frozenset()
        match what:
            case "message":
                records[chance.choice(messages[2:])]["sha256"] = chance.randbytes(32).hex()
            case "root":
                at = chance.choice(messages[:-6])
                name = chance.choice(["time", "purpose", "peer_certificate_sha256"])
                records[at][name] = "2020-01-01T00:00:00.000Z" if name == "time" else chance.randbytes(32).hex()
            case _:
                without = frozenset({records[chance.choice(messages)]["call_id"]})
                records = [record for record in records if record.get("call_id") not in without]
        _owner_signs(records, base, target, without_calls=without)
        found = verify_bundle(target)
        if found.index is not None:  # what stands behind it is not looked at, and is left out
            _owner_signs(records[: found.index + 1], base, target, without_calls=without)

    return edit


def _documents(records: Sequence[Record], direction: str) -> list[int]:
    return [n for n, r in enumerate(records) if r.get("attestation") is not None and r.get("direction") == direction]


def _document(record: Record) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(base64.b64decode(record["attestation"]["payload"]))
    return found


def _words(what: str) -> Edit:
    """What the other side has signed, or would have: its owner signs all else anew."""

    def edit(chance: random.Random, base: Path, target: Path) -> None:
        from medsilo.privacy.identity.envelope import ATTESTATION, seal, to_json

        records = copy.deepcopy(records_of(base))
        signer = OWNER if base.stem == "coordinator" else PEER
        places = _documents(records, "received")
        at = chance.choice(places[1:])
        if what == "less":
            at = next(n for n in places if any(map(_is_long, _document(records[n])["exchanges"])))
        document = _document(records[at])
        match what:
            case "edited":
                where = chance.choice(["payload", "signatures"])
                envelope = records[at]["attestation"]
                if where == "payload":
                    envelope["payload"] = base64.b64encode(rfc8785.dumps(changed(document, chance))).decode()
                else:
                    blob = bytearray(base64.b64decode(envelope["signatures"][0]["sig"]))
                    blob[chance.randrange(64)] ^= 1 << chance.randrange(8)
                    envelope["signatures"][0]["sig"] = base64.b64encode(blob).decode()
            case "stranger":
                records[at]["attestation"] = to_json(seal(document, ATTESTATION, STRANGER))
            case "moved":
                other = chance.choice([n for n in places if n != at])
                records[at]["attestation"] = records[other]["attestation"]
            case _:
                _say_otherwise(what, document, chance)
                records[at]["attestation"] = to_json(seal(document, ATTESTATION, signer))
        _owner_signs(records[: at + 1], base, target)

    return edit


def _is_long(exchange: Mapping[str, Any]) -> bool:
    return exchange["direction"] == "sent" and exchange["messages"] > 1


def _say_otherwise(what: str, document: dict[str, Any], chance: random.Random) -> None:
    """The other side signs something else."""
    exchanges = document["exchanges"]
    if what == "put back":
        origin, size, *_ = document["checkpoint"].split("\n")
        key = OWNER if origin.endswith("hospital1") else PEER
        from medsilo.privacy.journal.checkpoint import Checkpoint

        less = chance.choice([int(size), max(int(size) - chance.randint(1, 9), 1)])
        document["checkpoint"] = Checkpoint(origin, less, chance.randbytes(32)).sign(key)
    elif what == "less":
        one = next(filter(_is_long, exchanges))
        one["messages"], one["sha256"] = one["messages"] - 1, chance.randbytes(32).hex()
    elif what == "other bytes":
        chance.choice([one for one in exchanges if one["direction"] == "received"])["sha256"] = chance.randbytes(
            32
        ).hex()
    elif what == "not sent":
        one = chance.choice([one for one in exchanges if one["direction"] == "received"])
        exchanges.append({**one, "call_id": chance.randbytes(16).hex()})
    elif what == "for another":
        document[chance.choice(["by", "to"])] += chance.choice("xyz")
    else:
        name, value = chance.choice(WRONG_WORDS)
        (exchanges[0] if name in exchanges[0] else document)[name] = value


WRONG_WORDS: list[tuple[str, Any]] = [
    ("v", 7),
    ("v", True),
    ("by", 7),
    ("to", None),
    ("exchanges", 7),
    ("exchanges", [{}]),
    ("exchanges", None),
    ("checkpoint", "x" * 17_000),
    ("consistency", 7),
    ("consistency", {}),
    ("consistency", {"size": 0, "proof": ["00"]}),
    ("consistency", {"size": -1, "proof": []}),
    ("more", 1),
    ("witnessed", {"size": 0, "cosignature": ""}),
    ("witnessed", {"size": 1, "more": 1}),
    ("rpc", None),
    ("rpc", "x" * 200),
    ("messages", 0),
    ("messages", True),
    ("messages", "1"),
    ("length", -1),
    ("direction", "away"),
    ("call_id", "00"),
    ("sha256", ""),
    ("last_index", None),
]


def _left_out(chance: random.Random, base: Path, target: Path) -> None:
    records = copy.deepcopy(records_of(base))
    at = chance.choice(_documents(records, "sent"))
    listed = _document(records[at])["exchanges"]
    call = chance.choice(listed)["call_id"]
    _owner_signs(records[: at + 1], base, target, without_calls=frozenset({call}))


def _unreceipted(chance: random.Random, base: Path, target: Path) -> None:
    """The other side answers, and acknowledges nothing of what was sent; that is where the evidence ends."""
    from medsilo.privacy.identity.envelope import ATTESTATION, seal, to_json

    records = copy.deepcopy(records_of(base))
    at = chance.choice([n for n in _documents(records, "received") if records[n]["rpc"] == "Join"] + [14])
    document = _document(records[at])
    document["exchanges"] = [one for one in document["exchanges"] if one["direction"] == "sent"]
    document["witnessed"] = None
    records[at]["attestation"] = to_json(seal(document, ATTESTATION, PEER))
    _owner_signs(records[: at + 1], base, target)


def _rotated_key() -> Ed25519PrivateKey:
    kept = json.loads((FOLDER / "keys.json").read_text())
    return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(kept["changed-keys"]))


def _rotation(chance: random.Random, base: Path, target: Path) -> None:
    records = records_of(base)
    at = next(n for n, record in enumerate(records) if record["kind"] == "key-rotation")
    part = chance.choice(["public_key", "statement"])
    records[at] = {**records[at], part: changed({part: records[at][part]}, chance)[part]}
    resigned(target, records, base, _rotated_key())


def _segment(chance: random.Random, base: Path, target: Path) -> None:
    records = records_of(base)
    at = next(n for n, record in enumerate(records) if record["kind"] == "segment")
    name = chance.choice(["first", "records", "sha256", "checkpoint"])
    records[at] = {**records[at], name: changed({name: records[at][name]}, chance)[name]}
    resigned(target, records, base, _rotated_key())


def _cosigned(chance: random.Random, base: Path, target: Path) -> None:
    """Witnesses were shown another history, or one that they could not have been shown."""
    from medsilo.privacy.journal.checkpoint import Checkpoint, read_note

    records = records_of(base)
    at = next(n for n, record in enumerate(records) if record["kind"] == "cosigned")
    true = read_note(records[at]["checkpoint"])
    match chance.randrange(3):
        case 0:
            note = Checkpoint(true.origin, true.size, chance.randbytes(32)).sign(OWNER)
        case 1:
            note = true.sign(STRANGER)
        case _:
            note = Checkpoint(true.origin, true.size + chance.randint(2, 99), true.root).sign(OWNER)
    records[at] = {**records[at], "checkpoint": note}
    _owner_signs(records, base, target)


def _other_key(chance: random.Random, base: Path, target: Path) -> None:
    records = records_of(base)[:8]
    again = {**records[5], "public_key": chance.randbytes(32).hex()}
    resigned(target, Forger(OWNER, SILO).rewrite([*records, again]), base, OWNER)


def _foreign(chance: random.Random, base: Path, target: Path) -> None:
    records = records_of(base)[:8]
    excuse = {**records[5], "kind": "foreign-peer", "protocol": "Flower"}
    at = chance.choice([2, 8])
    records.insert(at, excuse)
    resigned(target, Forger(OWNER, SILO).rewrite(records), base, OWNER)


if __name__ == "__main__":
    main()
