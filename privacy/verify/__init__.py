"""The verifier: whether a bundle is what its owner signed, and what the other side's signatures confirm.

It imports nothing else of Medsilo; of others ``cryptography`` and ``rfc8785``. ``audit verify`` runs it, and it is
installed by itself as ``medsilo-verify``. ``docs/verifier.md`` says what it checks and what ``audit verify`` adds.
"""

from .reader import Reader, verify_bundle
from .result import BrokenError, EvidenceError, Result, UnreadableError

__all__ = ["BrokenError", "EvidenceError", "Reader", "Result", "UnreadableError", "verify_bundle"]
