"""What was found, and the errors that carry it."""

from __future__ import annotations

from dataclasses import dataclass, field


class EvidenceError(Exception):
    """What does not hold, in words."""


class ConsentError(EvidenceError):
    """Something left that no consent, or no plan, on record allowed."""


class UnreadableError(EvidenceError):
    """A file that is no bundle, or is cut off."""


class BrokenError(EvidenceError):
    """Evidence that does not hold. ``index``: the first bad record, or None where no single record is to blame.
    ``until``: where a signature covers several, the last of those among which the bad one is."""

    def __init__(self, index: int | None, what: str, *, until: int | None = None) -> None:
        super().__init__(what if index is None else f"record {index}: {what}")
        self.index = index
        self.until = index if until is None else until
        self.what = what


@dataclass
class Result:
    """What was verified, and found.

    ``problem`` is empty if the evidence is sound; ``index``: the first bad record's; with ``until``, the first and last
    of those among which it is. ``key``: SHA-256 of the public audit key that signed last. ``left``: bytes sent, by
    exposure class. ``kinds``: how many records there are of each kind. ``remarks``: what is in order and should be
    known all the same. ``signed``: records covered by the last checkpoint.
    """

    source: str = ""
    party: str = ""
    federation: str = ""
    key: str = ""
    records: int = 0
    signed: int = 0
    whole: bool = True
    root: str = ""
    first_time: str | None = None
    last_time: str | None = None
    sent: int = 0
    received: int = 0
    refused: int = 0
    acknowledged: int = 0
    left: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    problem: str = ""
    index: int | None = None
    until: int | None = None

    @property
    def sound(self) -> bool:
        """Whether nothing was found against it."""
        return not self.problem

    def verdict(self) -> list[str]:
        """Whether it is sound, in words."""
        if self.problem:
            where = "" if self.index is None else f" The first bad record is number {self.index}."
            if self.until != self.index:
                where = f" The first bad record is one of the numbers {self.index} to {self.until}."
            return [f"The record is NOT sound: {self.problem}.{where}"]
        extent = f"All {self.records} records are" if self.whole else f"The {self.records} records of this range are"
        if self.whole and self.signed < self.records:
            extent = f"The first {self.signed} of {self.records} records are"
        found = [
            f"{extent} in place and unchanged: they give the root that {self.party} signed with the audit key whose "
            f"fingerprint begins with {self.key[:16]}."
        ]
        if self.whole:
            found.append(f"{self.acknowledged} of {self.sent} messages sent have the other side's signed receipt.")
        return found


def count_of(number: int, what: str) -> str:
    """A count in words: "1 record", "2 records"."""
    return f"{number} {what}{'' if number == 1 else 's'}"
