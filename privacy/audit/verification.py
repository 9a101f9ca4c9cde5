"""``audit verify``: whether a journal, or a bundle of it, is what its owner signed, and agrees with the other side's.

It needs neither keys nor daemons: what it checks with is in the evidence. It reads record by record, and its memory
does not grow with the journal's length but with the number of calls whose receipts are still due.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from medsilo.privacy.audit.bundle import UnreadableError, open_evidence, read_evidence
from medsilo.privacy.audit.comparison import Comparison, comparing
from medsilo.privacy.audit.findings import Finding, Verification
from medsilo.privacy.audit.fork_proof import ForkProof, View
from medsilo.privacy.audit.reader import Along, EvidenceReader
from medsilo.privacy.audit.testimony import ForkFound, Testimony
from medsilo.privacy.audit.witnesses import Asked
from medsilo.privacy.door.attestation import Attestation
from medsilo.privacy.errors import JournalError, MedsiloError
from medsilo.privacy.files.canonical import read_canonical
from medsilo.privacy.identity.checking import Checks, with_second_process
from medsilo.privacy.identity.envelope import from_json, key_id
from medsilo.privacy.identity.identity import is_silo
from medsilo.privacy.journal.checkpoint import Checkpoint, read_note, verify
from medsilo.privacy.journal.merkle import EMPTY_ROOT
from medsilo.privacy.journal.records import MessageRecord, read


def verify_evidence(
    path: str | Path,
    *,
    peer: str | Path | None = None,
    key: bytes | None = None,
    along: Along | None = None,
    witnesses: Asked | None = None,
) -> Verification:
    """Verifies a bundle or a journal's folder, and against the other side's if ``peer`` is given.

    Args:
        path: the bundle, or the folder.
        peer: the other side's; or, of a hospital, another hospital's, to hold against each other what both were told.
        key: the public audit key (Ed25519, 32 bytes) that the owner is known to have now.
        along: called whenever the reading begins, with the tree over the records so far; gives who takes each record of
            ``path`` as it is read. What was taken is as sound as the result of the last reading.
        witnesses: whose cosignatures the evidence in ``path`` is to have.

    Raises ``UnreadableError`` for what is no evidence at all, or cannot be compared; everything else is in the result.

    >>> from medsilo import load_audit_public, verify_evidence
    >>> key = load_audit_public("demo/state/hospital1/keys/audit.pub")
    >>> verify_evidence("demo/hospital1-evidence.json", peer="demo/coordinator-evidence.json", key=key).sound
    True
    """
    return with_second_process(lambda checks: _verify(Path(path), peer, key, checks, along, witnesses))


def _verify(
    path: Path,
    peer: str | Path | None,
    key: bytes | None,
    checks: Checks,
    along: Along | None,
    asked: Asked | None,
) -> Verification:
    try:
        own = EvidenceReader(open_evidence(path), "own", checks=checks, along=along, asked=asked)
        if peer is None:
            return own.verify(key)
        other = EvidenceReader(open_evidence(Path(peer)), "peer", checks=checks)
        with comparing() as database:
            if all(is_silo(reader.announced) for reader in (own, other)) and own.announced != other.announced:
                return _verify_witnesses(own, other, Testimony(database), key)
            return _verify_both(own, other, Comparison(database), key)
    except OSError as error:
        raise UnreadableError(f"{error.filename or path}: cannot be read: {error.strerror}") from None
    except sqlite3.Error as error:
        raise MedsiloError(f"the comparison needs space for temporary files: {error}") from None


def _verify_both(own: EvidenceReader, other: EvidenceReader, comparison: Comparison, key: bytes | None) -> Verification:
    own.compare_with(comparison, other.announced)
    result = own.verify(key)
    if result.problem:
        return result
    other.compare_with(comparison, result.party)
    theirs = other.verify(None)
    if not theirs.problem:
        _compare(comparison, own, other)
    else:
        where = "" if theirs.index is None else f" (its record {theirs.index})"
        result.peers_problem = f"the other side's evidence {theirs.source} is NOT sound: {theirs.problem}{where}."
    return result


def _verify_witnesses(
    own: EvidenceReader, other: EvidenceReader, testimony: Testimony, key: bytes | None
) -> Verification:
    """Two hospitals, who have exchanged nothing with each other: what both were told by the same third party."""
    own.testify(testimony)
    result = own.verify(key)
    if result.problem:
        return result
    other.testify(testimony)
    theirs = other.verify(None)
    if theirs.problem:
        where = "" if theirs.index is None else f" (its record {theirs.index})"
        result.peers_problem = f"the other evidence {theirs.source} is NOT sound: {theirs.problem}{where}."
        return result
    if result.federation != theirs.federation:
        raise UnreadableError(
            f"{theirs.source}: is of the federation {theirs.federation}, the other evidence of {result.federation}"
        )
    if not (result.whole and theirs.whole):
        raise UnreadableError(
            f"{theirs.source}: two hospitals' evidence is compared in bundles of whole journals, not of ranges"
        )
    parties = testimony.met()
    if not parties:
        raise UnreadableError(
            f"{theirs.source}: {result.party} and {theirs.party} have exchanged with nobody in common"
        )
    result.peer = theirs.party
    for party in parties:
        if (fork := testimony.fork(party)) is not None:
            result.findings.append(_conviction(fork, own, other, testimony))
            continue
        result.remarks.append(
            f"{result.party} and {theirs.party} were shown one and the same journal of {party} in all that its signed "
            f"checkpoints and their proofs tell to both: its first {testimony.agreed(party)} records."
        )
    found, remarks = testimony.contradictions(own.witness(), other.witness())
    result.findings += found
    result.remarks += remarks
    return result


def _conviction(fork: ForkFound, own: EvidenceReader, other: EvidenceReader, testimony: Testimony) -> Finding:
    """Makes a proof of what was found, and tries it."""
    views = [_view(reader, fork.party, index) for reader, index in ((own, fork.own), (other, fork.peer))]
    one, another = (
        next((key for key in testimony.shown[reader.side, fork.party].keys if _holds(view.checkpoint, key)), b"")
        for reader, view in zip((own, other), views, strict=True)
    )
    said = f"it was shown to {own.result.party} (record {fork.own}) and to {other.result.party} (record {fork.peer})"
    chain = testimony.public_key(fork.party, one, another)
    if chain is None:
        what = (
            f"there are two different histories of the journal of {fork.party}, signed with keys that no signed change "
            f"joins; either it has two, or one of the hospitals has made up its evidence: {said}"
        )
        return Finding("contradiction", what, fork.own, fork.peer)
    first, rotations = chain
    proof = ForkProof(
        party=fork.party, public_key=first.hex(), rotations=tuple(map(dict, rotations)), views=(views[0], views[1])
    )
    if own.result.proof is None:
        own.result.proof = proof.model_dump(mode="json")
    return Finding("proof", f"{proof.check().sentence()}; {said}", fork.own, fork.peer)


def _holds(note: str, key: bytes) -> bool:
    try:
        verify(note, key)
    except JournalError:
        return False
    return True


def _view(reader: EvidenceReader, party: str, index: int) -> View:
    """What the party was shown in a record, read once more from its evidence."""
    before = Checkpoint("", 0, EMPTY_ROOT)
    for record in map(read, read_evidence(reader.result.source)):
        if not isinstance(record, MessageRecord) or record.direction != "received" or record.peer != party:
            continue
        if record.attestation is None:
            continue
        document = Attestation.model_validate(read_canonical(from_json(record.attestation).payload))
        if record.index == index:
            return View(
                shown_to=reader.result.party,
                checkpoint=document.checkpoint,
                size=before.size,
                root=before.root.hex(),
                proof=document.consistency.proof,
            )
        before = read_note(document.checkpoint)
    raise UnreadableError(f"{reader.result.source}: has changed while it was read")


def _compare(comparison: Comparison, own: EvidenceReader, peer: EvidenceReader) -> None:
    """The two-sided difference, into the own result."""
    mine, theirs = own.extent(), peer.extent()
    result, other = own.result, peer.result
    if result.federation != other.federation:
        raise UnreadableError(
            f"{other.source}: is of the federation {other.federation}, the other evidence of {result.federation}"
        )
    if not mine.whole and not theirs.whole:
        raise UnreadableError(f"{other.source}: two ranges cannot be compared; one bundle must be of a whole journal")
    if result.party == other.party or not comparison.exchanged():
        raise UnreadableError(
            f"{other.source}: {other.party} is not the other side: {result.party} has exchanged nothing with it"
        )
    result.peer = other.party
    for knows, known in ((own, peer), (peer, own)):
        key = knows.key_of(known.result.party)
        if known.result.whole and key is not None and key not in known.keys:
            result.problem = (
                f"{knows.result.party} knows {known.result.party} by the audit key {key_id(key)[:16]}…, and its "
                f"evidence is signed with {known.result.key[:16]}…"
            )
            return
    difference = comparison.differ(mine, theirs)
    if difference is not None:
        if difference.others:
            result.peers_problem = f"{difference.what}."
        else:
            result.problem, result.index, result.until = difference.what, difference.index, difference.index
        return
    if not own.heard:
        result.tell_times(comparison.times(mine, theirs, result.records))
    result.remarks.append(f"The journals of {result.party} and {other.party} agree on every message that both have.")
    lost = comparison.not_arrived(mine, theirs) if theirs.whole else 0
    if lost:
        result.remarks.append(
            f"{other.party} has no record of {lost} of the messages that {result.party} sent: not arrived, refused, or "
            "newer than its evidence."
        )
    for receiver, sender in ((mine, theirs), (theirs, mine)):
        newer = comparison.newer(receiver, sender)
        if newer:
            messages = f"{newer} message{'s' * (newer != 1)}"
            result.remarks.append(
                f"{receiver.party} has {messages} that {sender.party} sent after it had signed the last record that is "
                f"here, or while it did. Only newer evidence of {sender.party} shows whether each is on its record: "
                "export that again."
            )
