"""``audit verify``: whether a journal, or a bundle of it, is what its owner signed, and agrees with the other side's.

It needs neither keys nor daemons: what it checks with is in the evidence. It reads record by record, and its memory
does not grow with the journal's length but with the number of calls whose receipts are still due.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from privacy.bundle import UnreadableError, open_evidence
from privacy.comparison import Comparison, comparing
from privacy.envelope import key_id
from privacy.errors import MedsiloError
from privacy.evidence_reader import EvidenceReader
from privacy.findings import Verification


def verify_evidence(path: str | Path, *, peer: str | Path | None = None, key: bytes | None = None) -> Verification:
    """Verifies a bundle or a journal's folder, and against the other side's if ``peer`` is given.

    Args:
        path: the bundle, or the folder.
        peer: the other side's.
        key: the public audit key (Ed25519, 32 bytes) that the owner is known to have now.

    Raises ``UnreadableError`` for what is no evidence at all, or cannot be compared; everything else is in the result.
    """
    try:
        own = EvidenceReader(open_evidence(Path(path)), "own")
        if peer is None:
            return own.verify(key)
        other = EvidenceReader(open_evidence(Path(peer)), "peer")
        with comparing() as comparison:
            return _verify_both(own, other, comparison, key)
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


def _compare(comparison: Comparison, own: EvidenceReader, peer: EvidenceReader) -> None:
    """The two-sided difference, into the own result."""
    mine, theirs = own.extent(), peer.extent()
    result, other = own.result, peer.result
    if result.federation != other.federation:
        raise UnreadableError(
            f"{other.source}: is of the federation {other.federation}, the other evidence of {result.federation}"
        )
    if not mine.whole and not theirs.whole:
        raise UnreadableError(
            f"{other.source}: two stretches cannot be compared; one bundle must be of a whole journal"
        )
    if result.party == other.party or not comparison.exchanged():
        raise UnreadableError(
            f"{other.source}: {other.party} is not the other side: {result.party} has exchanged nothing with it"
        )
    result.peer = other.party
    for knows, known in ((own, peer), (peer, own)):
        key = knows.key_of(known.result.party)
        if known.result.whole and key is not None and key not in [one for _, one in known.keys]:
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
        result.times = comparison.times(mine, theirs, result.records)
        own.contradict_times()
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
