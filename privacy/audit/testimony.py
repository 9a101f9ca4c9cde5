"""What two hospitals were told by the same coordinator, held against each other.

Neither has exchanged anything with the other. But each holds what the third party signed for it: the checkpoints of its
journal, each with the proof that it continues the one before. Such a proof binds the signer to hashes over ranges
of its journal; two that differ over one range are of two histories, and both are signed. Plans, rosters, audit keys
and what was handed out are each hospital's own word: where these differ, somebody does not tell the truth.

All is kept in a database on disk, however long the journals are.
"""

from __future__ import annotations

import sqlite3
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from medsilo.privacy.audit.comparison import Side
from medsilo.privacy.audit.findings import Finding
from medsilo.privacy.audit.times import moment
from medsilo.privacy.exposure import STARTS
from medsilo.privacy.files.canonical import read_canonical
from medsilo.privacy.identity.envelope import from_json, key_id, to_json
from medsilo.privacy.journal.checkpoint import read_note, time_of
from medsilo.privacy.journal.key_rotation import successors
from medsilo.privacy.journal.merkle import proven_subtrees
from medsilo.privacy.journal.records import MessageRecord, RosterRecord, RunRecord
from medsilo.privacy.verify.attestation import Attestation
from medsilo.privacy.verify.signed import Checkpoint

_SCHEMA = """
CREATE TABLE subtree (side, party, start, end, hash, position, PRIMARY KEY (side, party, start, end)) WITHOUT ROWID;
CREATE TABLE told (side, what, subject, value, said, position, PRIMARY KEY (side, what, subject, value)) WITHOUT ROWID;
"""
_REMEMBERED = 256
"""Ranges that a proof may name again; that they are written twice costs time and nothing else."""
_PLAN, _ROSTER, _MEMBER, _GIVEN = "plan", "roster", "member", "given"

_FORK = """
    SELECT a.position, b.position FROM subtree a JOIN subtree b
        ON b.side = 'peer' AND b.party = a.party AND b.start = a.start AND b.end = a.end AND b.hash != a.hash
    WHERE a.side = 'own' AND a.party = ? ORDER BY a.end, a.end - a.start LIMIT 1
"""
_SAME_ROOT = """
    SELECT MAX(a.end) FROM subtree a JOIN subtree b ON b.side = 'peer' AND b.party = a.party AND b.start = 0
        AND b.end = a.end WHERE a.side = 'own' AND a.party = ? AND a.start = 0
"""
_DIFFERENT = """
    SELECT a.subject, a.said, b.said, a.position, b.position FROM told a JOIN told b
        ON b.side = 'peer' AND b.what = a.what AND b.subject = a.subject AND b.value != a.value
    WHERE a.side = 'own' AND a.what = ? ORDER BY a.position, b.position LIMIT 1
"""
_TWICE = """
    SELECT a.subject, a.said, b.said, a.position, b.position FROM told a JOIN told b
        ON b.side = a.side AND b.what = a.what AND b.subject = a.subject AND b.value != a.value
    WHERE a.side = ? AND a.what = ? ORDER BY a.position, b.position LIMIT 1
"""


@dataclass
class _Shown:
    """What one hospital has of one third party. ``covered``: every record of its journal before that one lies in a
    range whose hash is known. ``keys``: its audit keys in their order, each with the first and last time that it
    signed with it. ``rotations``: the signed changes between them."""

    covered: int
    keys: dict[bytes, tuple[int, int]]
    rotations: list[Mapping[str, Any]]


@dataclass(frozen=True)
class Witness:
    """One hospital, as far as the comparison needs it. ``keys``: its own audit keys."""

    side: Side
    party: str
    keys: tuple[bytes, ...]


@dataclass(frozen=True)
class ForkFound:
    """A party that signed two histories, and the records, own and peer's, that hold what it signed."""

    party: str
    own: int
    peer: int


class Testimony:
    """Takes what each of the two says as it is read, then says where they differ."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        for statement in _SCHEMA.split(";"):
            connection.execute(statement)
        self._connection = connection
        self._recent: OrderedDict[tuple[str, str, int, int], None] = OrderedDict()
        self.shown: dict[tuple[Side, str], _Shown] = {}

    def checkpoint(self, side: Side, party: str, before: Checkpoint, document: Attestation, index: int) -> None:
        """Takes a party's signed checkpoint, and the proof that it continues ``before``; both have been checked."""
        shown = self._of(side, party)
        note = read_note(document.checkpoint)
        found = {(0, note.size): note.root}
        if 0 < before.size < note.size:
            proof = [bytes.fromhex(node) for node in document.consistency.proof]
            found |= proven_subtrees(before.size, before.root, note.size, proof)
            shown.covered = before.size
        rows = []
        for (start, end), root in found.items():
            name = (side, party, start, end)
            if name in self._recent:
                self._recent.move_to_end(name)
                continue
            self._recent[name] = None
            rows.append((side, party, start, end, root, index))
        while len(self._recent) > _REMEMBERED:
            self._recent.popitem(last=False)
        self._connection.executemany("INSERT OR IGNORE INTO subtree VALUES (?, ?, ?, ?, ?, ?)", rows)
        if document.witnessed is not None and shown.keys:
            key, time = next(reversed(shown.keys)), time_of(document.witnessed.cosignature)
            first = shown.keys[key][0]
            shown.keys[key] = (min(first, time) if first else time, time)

    def key(self, side: Side, party: str, key: bytes, rotations: Sequence[Mapping[str, Any]]) -> None:
        """Takes an audit key by which a party came to be known, and the signed changes that led to it."""
        shown = self._of(side, party)
        shown.keys.setdefault(key, (0, 0))
        shown.rotations += rotations

    def plan(self, side: Side, record: RunRecord) -> None:
        """Takes a run that was joined."""
        digest = record.plan_sha256
        self._told(side, _PLAN, record.run, digest, f"{digest[:16]}…", record.index)

    def roster(self, side: Side, record: RosterRecord) -> None:
        """Takes a roster, whose statements have been checked."""
        names = ", ".join(sorted(record.silos))
        subject = f"round {record.round + 1} of run {record.run} (plan {record.plan_sha256[:16]}…)"
        self._told(side, _ROSTER, subject, names, names, record.index)
        for one in record.statements:
            voucher = read_canonical(from_json(one["voucher"]).payload)
            self._told(side, _MEMBER, voucher["silo"], voucher["audit_key"], subject, record.index)

    def given(self, side: Side, record: MessageRecord) -> None:
        """Takes the record of a message with content that all hospitals of a round are given alike."""
        content = record.content
        if record.direction != "received" or not isinstance(content, dict):
            return
        if content["class"] in STARTS:
            when = "start"
        elif record.round is not None:
            when = f"round {record.round + 1}"
        else:
            return
        subject = f"{when} of run {record.run} (plan {(record.plan_sha256 or '')[:16]}…), {content['class']}"
        digest = content["sha256"]
        # Of a transfer that was cut, its beginning can be held against the other one's.
        self._told(
            side, _GIVEN, f"{subject}, the first {content['bytes']} bytes", digest, f"{digest[:16]}…", record.index
        )

    def met(self) -> list[str]:
        """The parties whose words both have."""
        own, peers = ({party for side, party in self.shown if side == wanted} for wanted in ("own", "peer"))
        return sorted(own & peers)

    def fork(self, party: str) -> ForkFound | None:
        """Where a party has signed two histories: the first place where they differ; None if it has not."""
        found = self._connection.execute(_FORK, (party,)).fetchone()
        return None if found is None else ForkFound(party, *found)

    def agreed(self, party: str) -> int:
        """Of how many records of a party's journal, from the first, both were shown the same."""
        covered = min(self.shown["own", party].covered, self.shown["peer", party].covered)
        return max(covered, self._connection.execute(_SAME_ROOT, (party,)).fetchone()[0] or 0)

    def public_key(self, party: str, own: bytes, peer: bytes) -> tuple[bytes, list[Mapping[str, Any]]] | None:
        """The earliest key from which signed changes lead to both keys, and these changes; None if there is none."""
        statements = self._rotations(party)
        for first in dict.fromkeys([*self.shown["own", party].keys, *self.shown["peer", party].keys]):
            keys, used = successors(map(from_json, statements), party, first)
            if own in keys and peer in keys:
                return first, [to_json(statement) for statement in used]
        return None

    def _rotations(self, party: str) -> list[Mapping[str, Any]]:
        """The signed changes of a party's key that either has been shown, each once."""
        found: list[Mapping[str, Any]] = []
        for shown in (self.shown["own", party], self.shown["peer", party]):
            found += [statement for statement in shown.rotations if statement not in found]
        return found

    def contradictions(self, own: Witness, peer: Witness) -> tuple[list[Finding], list[str]]:
        """Where one's word stands against the other's, or against the third party's; and remarks."""
        found: list[Finding] = []
        remarks: list[str] = []
        for what, words in (
            (_PLAN, "say that {subject} has the plan {own} and {peer}"),
            (_ROSTER, "masked {subject} together with {own} and with {peer}"),
            (_GIVEN, "were given different content in {subject}: SHA-256 {own} and {peer}"),
        ):
            row = self._connection.execute(_DIFFERENT, (what,)).fetchone()
            if row is not None and not (what == _PLAN and self._share_a_plan(row[0])):
                told = words.format(subject=_run(what, row[0]), own=row[1], peer=row[2])
                found.append(_contradiction(f"{own.party} and {peer.party} {told}", own, peer, row[3], row[4]))
        for one in (own, peer):
            row = self._connection.execute(_TWICE, (one.side, _GIVEN)).fetchone()
            if row is not None:
                found.append(
                    Finding(
                        "contradiction",
                        f"{one.party} was given two different contents in {row[0]}: SHA-256 {row[1]} (record {row[3]}) "
                        f"and {row[2]} (record {row[4]})",
                        row[3] if one is own else None,
                        None if one is own else row[3],
                    )
                )
        for one, other in ((own, peer), (peer, own)):
            for value, subject, position in self._connection.execute(
                "SELECT value, said, position FROM told WHERE side = ? AND what = ? AND subject = ? ORDER BY position",
                (one.side, _MEMBER, other.party),
            ):
                if bytes.fromhex(value) not in other.keys:
                    found.append(
                        Finding(
                            "contradiction",
                            f"in {subject} {one.party} masked its update with a hospital that went by the name of "
                            f"{other.party} and by the audit key {key_id(bytes.fromhex(value))[:16]}… (record "
                            f"{position}), which is none of that hospital's",
                            position if one is own else None,
                            None if one is own else position,
                        )
                    )
                    break
        for party in self.met():
            self._compare_keys(party, own, peer, found, remarks)
        return found, remarks

    def _compare_keys(self, party: str, own: Witness, peer: Witness, found: list[Finding], remarks: list[str]) -> None:
        mine, theirs = self.shown["own", party].keys, self.shown["peer", party].keys
        if not mine or not theirs:
            return
        one, other = next(reversed(mine)), next(reversed(theirs))
        if common := set(mine) & set(theirs):
            statements = [from_json(statement) for statement in self._rotations(party)]
            led = [successors(statements, party, key)[0] for key in (one, other)]
            if one not in led[1] and other not in led[0]:
                found.append(
                    Finding(
                        "contradiction",
                        f"{party} has signed two changes of its audit key {key_id(min(common))[:16]}…, or of one that "
                        f"came of it: {own.party} knows it by {key_id(one)[:16]}… now, {peer.party} by "
                        f"{key_id(other)[:16]}…, and neither was changed to the other",
                    )
                )
            return
        keys = f"{own.party} knows {party} by the audit key {key_id(one)[:16]}…, {peer.party} by {key_id(other)[:16]}…"
        # After a change of keys nothing is signed with the earlier one.
        (a, b), (c, d) = mine[one], theirs[other]
        if a and c and a < d and c < b:
            found.append(
                Finding(
                    "contradiction",
                    f"{keys}, and no signed change leads from one to the other: it signed with both at the same time "
                    f"(between {moment(max(a, c))} and {moment(min(b, d))})",
                )
            )
            return
        remarks.append(
            f"{keys}. If the key was changed between the two, newer evidence of both shows it; until then what {party} "
            "signed for them cannot be held against each other."
        )

    def _share_a_plan(self, run: str) -> bool:
        """Whether both have a plan of the run in common: one of them may have had another before, or after."""
        query = "SELECT 1 FROM told a JOIN told b USING (what, subject, value) WHERE a.side = 'own' AND b.side = 'peer'"
        return (
            self._connection.execute(f"{query} AND a.what = ? AND a.subject = ?", (_PLAN, run)).fetchone() is not None
        )

    def _told(self, side: Side, what: str, subject: str, value: str, said: str, index: int) -> None:
        self._connection.execute(
            "INSERT OR IGNORE INTO told VALUES (?, ?, ?, ?, ?, ?)", (side, what, subject, value, said, index)
        )

    def _of(self, side: Side, party: str) -> _Shown:
        return self.shown.setdefault((side, party), _Shown(0, {}, []))


def _run(what: str, subject: str) -> str:
    return f"run {subject}" if what == _PLAN else subject


def _contradiction(what: str, own: Witness, peer: Witness, index: int, peers_index: int) -> Finding:
    where = f"record {index} of {own.party}, record {peers_index} of {peer.party}"
    return Finding("contradiction", f"{what} ({where})", index, peers_index)
