"""The masked round that is open: which silos have stated a mask key, and who masks with whom.

Keys come when silos have trained, so that a silo that drops out in training is in no roster. Once a roster is fixed the
round's silos stay the same: what is done again is done with the same silos and fresh masks, or the round is given up.
Silos mask for one set of silos in a run (``medsilo.silo.run.masking``), so the first roster's are the whole run's,
which waits for them, unless single updates have a bound.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from medsilo.privacy.secure_aggregation.mask_keys import CertifiedKey, Roster


@dataclass(frozen=True, slots=True)
class MaskedRound:
    """``silos``: whose sum it is to be; None until a roster is fixed. ``offers``: keys that updates can be masked with,
    by silo. ``roster``: the one that silos mask for now.
    """

    number: int
    silos: tuple[str, ...] | None = None
    offers: tuple[CertifiedKey, ...] = ()
    roster: Roster | None = None

    def with_offer(self, key: CertifiedKey) -> MaskedRound:
        """The same with a silo's key in place of an earlier one."""
        others = (offer for offer in self.offers if offer.silo != key.silo)
        return replace(self, offers=tuple(sorted((*others, key), key=lambda offer: offer.silo)))

    def without_offer(self, silo: str) -> MaskedRound:
        """The same when a silo's key has masked an update: it masks one."""
        return replace(self, offers=tuple(offer for offer in self.offers if offer.silo != silo))

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

    def is_complete(self, delivered: Collection[str]) -> bool:
        """Whether all of the roster have delivered for it."""
        return self.roster is not None and all(silo in delivered for silo in self.roster.silos)

    def next_silos(
        self, participants: Collection[str], *, minimum: int, quorum: int, overdue: bool
    ) -> tuple[str, ...] | None:
        """The silos of the next roster, if it can be fixed: the earlier ones again; at first all that take part, or
        when the round is overdue those that are there, if they are enough."""
        if self.roster is not None:
            return None
        offered = {offer.silo for offer in self.offers}
        if self.silos is not None:
            return self.silos if offered.issuperset(self.silos) else None
        there = tuple(sorted(offered.intersection(participants)))
        whole = len(there) == len(participants)
        enough = len(there) >= minimum and (whole or (overdue and len(there) >= quorum))
        return there if enough else None

    def keys_of(self, silos: Iterable[str]) -> tuple[CertifiedKey, ...]:
        """The keys that these silos stated last."""
        wanted = set(silos)
        return tuple(offer for offer in self.offers if offer.silo in wanted)
