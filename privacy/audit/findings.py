"""What ``audit verify`` has found: the result, in fields and in words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from medsilo.privacy.audit.times import Times
from medsilo.privacy.verify.reader import MOST_REMARKS
from medsilo.privacy.verify.result import Result, count_of


@dataclass
class Finding:
    """What two parties' evidence shows against a third, or one's against the other.

    ``kind``: "proof" where signatures of one party cannot both be honest; "contradiction" where one party's word stands
    against another's, and somebody does not tell the truth, or has a clock that is wrong. ``index``: of the own record
    that shows it; ``peers_index``: of the other side's. "witness" where the word of a witness that was asked for is
    wanting, or stands against the evidence.
    """

    kind: Literal["proof", "contradiction", "witness"]
    what: str
    index: int | None = None
    peers_index: int | None = None

    def sentence(self) -> str:
        """It in words."""
        return f"{self.kind.upper()}: {self.what}."


@dataclass
class Verification(Result):
    """What was verified, and found, by the verifier and by what `audit verify` adds to it.

    ``key``: SHA-256 of the public audit key that signed last. ``signed``: records covered by the last checkpoint;
    ``unsigned``: newer ones in a journal's folder.
    ``remarks``: what is in order and should be known all the same. ``problem`` is empty if the evidence is sound;
    ``index``: the first bad record's; with ``until``, the first and last of those among which it is. ``peer``: the
    other side's identity, if it was compared; ``peers_problem``: why it could not be, because its own evidence is not
    sound or ends too early, while nothing was found against this one. ``times``: what the other side's signed times say
    of the records'. ``findings``: what is proven, or contradicted, while the evidence itself is as it was signed;
    ``proof``: of a finding that is proven, what anyone can check (``ForkProof``). ``witnessed``: how it stands with the
    witnesses that were asked for (``covered`` records, by ``time``, and each one's ``last`` size and time).

    >>> from medsilo import verify_evidence
    >>> verify_evidence("demo/hospital1-evidence.json").problem
    ''
    """

    unsigned: int = 0
    peer: str | None = None
    peers_problem: str = ""
    times: Times = field(default_factory=Times)
    findings: list[Finding] = field(default_factory=list)
    proof: dict[str, Any] | None = None
    witnessed: dict[str, Any] | None = None

    @property
    def sound(self) -> bool:
        """Whether nothing was found: against it, against the other side's, or against who spoke to both."""
        return not self.problem and not self.peers_problem and not self.findings

    def tell_times(self, times: Times) -> None:
        """Takes what others' times say of the records', and makes a finding of those that are contradicted."""
        self.times = times
        if times.contradicted:
            what = (
                f"the times of {count_of(times.contradicted, 'record')} are not those of whom {self.party} "
                f"exchanged them with; one of the clocks is wrong, or was set wrong. The first is record "
                f"{times.first_contradicted}: {times.contradiction}"
            )
            self.findings.append(Finding("contradiction", what, times.first_contradicted))
        for peer in times.alone[:MOST_REMARKS]:
            self.remarks.append(f"The clock of {peer} contradicts times that others confirm: it counts for nothing.")

    def sentences(self) -> list[str]:
        """The result in words."""
        if self.problem:
            return [*self.verdict(), *self.remarks]
        return [
            *self.verdict(),
            *([f"NOT compared: {self.peers_problem}"] if self.peers_problem else []),
            *(finding.sentence() for finding in self.findings),
            *([sentence] if (sentence := self.times.sentence()) else []),
            *self.remarks,
        ]
