"""The masked round that is open: which silos have stated a mask key, and who masks with whom.

Keys come when silos have trained, so that a silo that drops out in training is in no roster. Once a roster is fixed the
round's silos stay the same: what is done again is done with the same silos and fresh masks, or the round is given up.
Silos mask for one set of silos in a run (``medsilo.silo.run.masking``), so the first roster's are the whole run's,
which waits for them, unless single updates have a bound.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from medsilo.privacy.secure_aggregation.mask_keys import CertifiedKey, Roster


@dataclass
class MaskedRound:
    """``silos``: whose sum it is to be, and ``fixed_at`` since when (UTC, ISO 8601); None until a roster is fixed.

    ``offers``: keys that updates can be masked with, by silo. ``roster``: the one that silos mask for now.
    """

    number: int
    minimum: int
    silos: tuple[str, ...] | None = None
    fixed_at: str | None = None
    offers: dict[str, CertifiedKey] = field(default_factory=dict)
    roster: Roster | None = None

    def has_lost_its_key(self, silo: str, key: CertifiedKey) -> bool:
        """Whether the roster counts on another key of the silo than the one that it states now."""
        mine = self.roster.keys.get(silo) if self.roster else None
        return mine is not None and mine.digest != key.digest

    def is_due(self, silo: str, key: CertifiedKey) -> bool:
        """Whether a silo with that key is to mask for the roster."""
        return self.roster is not None and silo in self.roster.keys and not self.has_lost_its_key(silo, key)

    def is_for(self, roster_sha256: bytes) -> bool:
        """Whether an update was masked for the present roster."""
        return self.roster is not None and self.roster.sha256 == roster_sha256

    def ready(self, participants: Collection[str], *, quorum: int, overdue: bool) -> tuple[str, ...] | None:
        """The silos of the next roster, if it can be fixed: the earlier ones again; at first all that take part, or
        when the round is overdue those that are there, if they are enough."""
        if self.roster is not None:
            return None
        if self.silos is not None:
            return self.silos if set(self.silos) <= set(self.offers) else None
        there = tuple(sorted(set(participants) & set(self.offers)))
        whole = len(there) == len(participants)
        enough = len(there) >= self.minimum and (whole or (overdue and len(there) >= quorum))
        return there if enough else None

    def fix(self, silos: tuple[str, ...]) -> Roster:
        """Fixes the roster of these silos with the keys that they stated last."""
        self.silos = silos
        self.roster = Roster(self.offers[silo] for silo in silos)
        return self.roster
