"""What witnesses that neither party runs say of a journal: ``audit verify --witness``.

Their cosignatures stand in the journal's own records, where the owner has put them. So a journal can leave them out,
and then lacks them; it cannot make them up, and what was cosigned it cannot change.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from medsilo.privacy.audit.findings import Finding, Verification
from medsilo.privacy.audit.signed_tree import SignedTree
from medsilo.privacy.audit.times import TOLERANCE_SECONDS, Clockwork, moment
from medsilo.privacy.identity.cosignature import (
    CosignatureError,
    Cosigned,
    Policy,
    contradicting,
    cosigned_at,
    listed,
    missing,
    read_key,
    standing,
    stretches,
    words_of,
)
from medsilo.privacy.journal.records import CosignedRecord
from medsilo.privacy.verify.result import BrokenError, count_of


@dataclass(frozen=True)
class Asked:
    """What evidence is held against: a policy, and notes that its witnesses gave to whoever verifies (``seen``: the
    last checkpoint that each has cosigned). Raises ``CosignatureError`` for a note that none of them has signed."""

    policy: Policy
    seen: tuple[str, ...] = ()

    def words(self) -> list[Cosigned]:
        """What these notes say."""
        found = []
        for note in self.seen:
            if not (words := words_of(note, self.policy.keys)):
                raise CosignatureError("what was given as a witness's own word is signed by none of the policy's")
            found += words
        return found


class Witnesses:
    """Follows one journal's cosignatures. ``asked``: None where no witness's word is asked for; then only what the
    journal itself says of witnesses is checked. ``first``: index of the first record.
    """

    def __init__(self, asked: Asked | None, first: int) -> None:
        self._asked = asked
        self._clock = Clockwork(first, trusted=True)
        self._words: list[Cosigned] = []
        self._told = [] if asked is None else asked.words()
        self._sizes = {word.size for word in self._told}
        self._roots: dict[int, bytes] = {}
        self._last = ""

    def line(self, time: str, tree: SignedTree) -> None:
        """Takes the next record's time; the record is in the tree."""
        if self._asked is not None:
            self._clock.take(time)
            self._last = time
            self._note_root(tree)

    def take(self, record: CosignedRecord) -> None:
        """Takes the record taken last, which says that a checkpoint of the journal was cosigned; raises ``BrokenError``
        if it was not."""
        try:
            for key in map(read_key, record.witnesses):
                if cosigned_at(record.checkpoint, key) is None:
                    raise CosignatureError(f"it names the witness {key.name:.200}, who has not cosigned it")
            self._take_note(record.checkpoint)
        except CosignatureError as error:
            raise BrokenError(record.index, str(error)) from None

    def end(self, checkpoint: str, tree: SignedTree) -> None:
        """Takes a bundle's own checkpoint, which has been checked, once all its records are in the tree."""
        self._note_root(tree)
        try:
            self._take_note(checkpoint)
        except CosignatureError as error:
            raise BrokenError(None, str(error)) from None

    def conclude(self, result: Verification, tree: SignedTree) -> None:
        """Says what came of it, once the journal has been read."""
        if self._asked is None:
            return
        policy, size = self._asked.policy, tree.size
        told = [word for word in self._told if word.origin == tree.origin and self._roots.get(word.size) == word.root]
        for word in told:
            self._clock.signed(word.witness, word.size, word.time)
        late = self._late(policy)
        against = contradicting(self._told, tree.origin, self._roots, size)
        found = standing(policy, [*self._words, *told])
        last = datetime.fromisoformat(self._last).astimezone(UTC).timestamp()
        wanting = missing(policy, found, last_time=last)
        result.findings += [Finding("witness", what) for what in (*against, *wanting, *late)]
        result.witnessed = {
            "needed": policy.needed,
            "covered": found.covered,
            "time": found.time,
            "last": {name: {"size": seen, "time": time} for name, (seen, time) in sorted(found.last.items())},
        }
        if found.covered:
            names = listed(sorted(found.last))
            result.remarks.append(
                f"The first {found.covered} records existed before {moment(found.time)}, by the word of "
                f"{names} ({policy.needed} asked for)."
            )
        if size > found.covered:
            result.remarks.append(
                f"Records {found.covered} to {size - 1} no witness that counts is known to have seen."
            )
        self._tell_times(result)
        if not self._told:
            result.remarks.append(
                "Whether later records were withheld, only the witnesses know: ask each for the last checkpoint that "
                "it has cosigned, and give it with --seen."
            )

    def _late(self, policy: Policy) -> list[str]:
        """Records that witnesses had first seen longer after their own time than a policy allows: they were written
        later than they say, or witnesses were away. In words."""
        if policy.fresh_seconds is None:
            return []
        late = []
        for first, end, time in stretches(policy, self._words):
            for index, written in self._clock.earlier(first, end, time - policy.fresh_seconds - TOLERANCE_SECONDS):
                late.append((index, written, time))
        if not late:
            return []
        index, written, time = late[0]
        return [
            f"{count_of(len(late), 'record')} had been seen by {policy.needed} witnesses only more than "
            f"{policy.fresh_seconds / 3600:g} hours after their own time: written later than they say, or the "
            f"witnesses were away. The first is record {index}: it says {moment(written)}, and was seen by "
            f"{moment(time)}"
        ]

    def _note_root(self, tree: SignedTree) -> None:
        if tree.size in self._sizes:
            self._roots[tree.size] = tree.records.root()

    def _take_note(self, note: str) -> None:
        """Takes what the policy's witnesses have put under a checkpoint of the journal."""
        for word in () if self._asked is None else words_of(note, self._asked.policy.keys):
            self._words.append(word)
            self._clock.signed(word.witness, word.size, word.time)

    def _tell_times(self, result: Verification) -> None:
        if not self._clock.heard:
            return
        times = self._clock.conclude()
        if times.contradicted:
            what = (
                f"the times of {times.contradicted} records are not those of the witnesses; the first is record "
                f"{times.first_contradicted}: {times.contradiction}"
            )
            result.findings.append(Finding("witness", what, times.first_contradicted))
        result.remarks.append(f"By the witnesses' clocks: {times.sentence() or 'no time is bounded from both sides.'}")
