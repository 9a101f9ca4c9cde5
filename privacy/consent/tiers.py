"""What of a hospital's models a run lets whom learn: plain, masked sums, blind mixtures."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from medsilo.privacy.consent.plan import SecureAggregationPlan


class Tier(StrEnum):
    """How a method's updates reach the coordinator, the least secret first."""

    PLAIN = "plain"
    SUM = "masked sum"
    BLIND = "blind mixture"


LEARNS: Mapping[Tier, Mapping[str, str]] = {
    Tier.PLAIN: {
        "the coordinator": "this hospital's model of every round, as far as the method sends it",
        "another hospital": "what the method gives it of others' models",
        "a hospital that works with the coordinator": "this hospital's model of every round",
    },
    Tier.SUM: {
        "the coordinator": "sums of all hospitals' updates, and no single one",
        "another hospital": "what the method makes of the sums, and gives to all",
        "hospitals that work with the coordinator": "the sum of the others' updates: where these are all but this "
        "hospital, its update",
    },
    Tier.BLIND: {
        "the coordinator, whatever it does": "for each two hospitals how far what the method compares lies apart, and "
        "the weights of all mixtures, which it chooses within the hospitals' rules; no model",
        "another hospital": "its own mixture, and all weights: so also who is close to whom",
        "the coordinator with up to four hospitals that keep to the protocol": "their mixtures, and of this hospital "
        "the sketch of what the method compares",
        "the coordinator with a hospital that does not": "no claim: assume this hospital's model",
    },
}
"""By tier, who learns what; differential privacy, where a run has it, bounds what all of it tells of patients."""


def tier_of(masks: SecureAggregationPlan | None) -> Tier:
    """Of a plan's masked rounds: the others, if there are any, are plain."""
    if masks is None:
        return Tier.PLAIN
    return Tier.BLIND if masks.mode == "blind" else Tier.SUM


def learns(masks: SecureAggregationPlan | None, rounds: int) -> list[str]:
    """Who learns what in a run of so many rounds, a sentence each tier."""
    found = [tier_of(masks)]
    if masks is not None and masks.rounds < rounds:
        found.append(Tier.PLAIN)
    lines = []
    for place, tier in enumerate(found):
        part = "first" if place == 0 else "after"
        when = "" if len(found) == 1 or masks is None else f", {part} {masks.rounds} rounds"
        said = "; ".join(f"{who}: {what}" for who, what in LEARNS[tier].items())
        lines.append(f"Who learns what ({tier}{when}): {said}.")
    return lines
