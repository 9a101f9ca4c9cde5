"""How secret a method's updates can be kept from its coordinator at best."""

from __future__ import annotations

from medsilo.algorithms.method import Method
from medsilo.algorithms.protection.blind import blind_method
from medsilo.algorithms.protection.masked import masked_rounds
from medsilo.privacy.consent.tiers import Tier
from medsilo.privacy.errors import ConfigurationError


def best_tier(method: Method, rounds: int) -> str:
    """The tier of a run of so many rounds, in words: sums go before mixtures, which stand on more."""
    if not method.uploads:
        return "nothing leaves"
    try:
        masked = masked_rounds(method, rounds)
    except ConfigurationError:
        masked = 0
    if masked == rounds:
        return Tier.SUM
    try:
        blind_method(method)
    except ConfigurationError:
        return f"{Tier.SUM}, then {Tier.PLAIN}" if masked else Tier.PLAIN
    return Tier.BLIND
