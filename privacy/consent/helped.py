"""What a hospital has looked at where it helped to open blind mixtures, or did not, as its journal tells it."""

from __future__ import annotations

from dataclasses import dataclass, field

from medsilo.privacy.journal.records import MixRecord, Record, RefusalRecord
from medsilo.privacy.pages.wording import number_of

NOT_OPENED = "opened by the coordinator's weights"
"""In a refusal: what the round is not, where a silo does not help."""


@dataclass
class Help:
    """What a silo's journal tells of its help with one run's mixtures: by round (from 0) what it found of the weights
    before it helped, and the reason of the last refusal."""

    found: dict[int, MixRecord] = field(default_factory=dict)
    refused: str | None = None

    def take(self, record: Record) -> None:
        """Takes a record of the run."""
        match record:
            case MixRecord():
                self.found[record.round] = record
            case RefusalRecord() if NOT_OPENED in record.reason:
                self.refused = record.reason

    @property
    def words(self) -> str:
        """In plain words; empty where there is nothing to say."""
        said = []
        if self.found:
            last = self.found.values()
            times = number_of(len(self.found), "round")
            models = [one.models for one in last if one.models is not None]
            least = f"Each held {min(models)} models or more, beside its recipient's own. " if models else ""
            now, together = (max(one.isolation for one in last), max(one.isolation_over_rounds for one in last))
            said.append(
                f"This hospital helped to open the mixtures of {times} of training. {least}In what any other hospital "
                f"got, this hospital's model stood out at most {now:.2g} times (1: one of two in equal parts), in the "
                f"last rounds together at most {together:.2g} times."
            )
        if self.refused is not None:
            said.append(f"It refused to help; last: {self.refused}.")
        return " ".join(said)
