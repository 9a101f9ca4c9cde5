"""The schema that a journal's messages were attributed with, as the journal keeps it: of whatever version it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from medsilo.privacy.errors import JournalError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.verify import EvidenceError, schema


class StoredSchema(schema.StoredSchema):
    """As the verifier reads it, of classes that this release knows; raises ``JournalError`` where that says more than
    ``EvidenceError``."""

    def __init__(self, stored: Sequence[str]) -> None:
        try:
            super().__init__(stored)
        except EvidenceError as error:
            raise JournalError(str(error)) from None
        self._exposures: dict[tuple[str, str], Exposure] = {}

    def exposure(self, message_type: str, path: str) -> Exposure:
        """The class of a field path; raises ``JournalError`` if the schema gives it none."""
        found = self._exposures.get((message_type, path))
        if found is None:
            (name,) = self.classes(message_type, {path: 1})
            found = self._exposures[message_type, path] = Exposure(name)
        return found

    def classes(self, message_type: str, fields: Mapping[str, Any]) -> dict[str, int]:
        """As the verifier's; raises ``JournalError`` as well for a class that this release does not know."""
        try:
            found = super().classes(message_type, fields)
        except EvidenceError as error:
            raise JournalError(str(error)) from None
        for name in found:
            if name not in Exposure.__members__:
                raise JournalError(
                    f"a field of {message_type:.200} has the exposure class {name:.100}, which this release does not "
                    "know"
                )
        return found
