"""Noised releases that are kept, so that the same bytes can be sent again: that tells nothing new, and costs nothing.

Each is a file beside the ledger, for one version of a data set, unit and split, one content and one mechanism. It names
the charge that paid for it, and counts only as long as the ledger holds that charge.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from medsilo.privacy.budget.ledger import Ledger
from medsilo.privacy.budget.promise import ReleasePlan
from medsilo.privacy.errors import BudgetError
from medsilo.privacy.files.canonical import write_canonical
from medsilo.privacy.files.durable import write_atomically


class KeptReleases:
    """The releases that are kept of one ledger's data. Files lie in the folder ``released`` of the ledger's."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.folder = ledger.folder / "released"

    def find(self, release: ReleasePlan) -> list[float] | None:
        """The numbers that were released, if they were; raises ``BudgetError`` for a file that cannot be read."""
        name = self._name(release)
        path = self.folder / name
        try:
            content = json.loads(path.read_bytes())
            if content["name"] != name or not all(type(number) is float for number in content["numbers"]):
                raise ValueError("it is not what its name says")
            numbers, charge = list(content["numbers"]), content["charge"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BudgetError(
                f"{path}: cannot be read ({error}); delete it, and the next release of the {release.content} is drawn "
                "and charged anew"
            ) from None
        return numbers if charge in {entry.sha256 for entry in self._ledger.entries()} else None

    def keep(self, release: ReleasePlan, numbers: Sequence[float], *, charge: str) -> None:
        """Makes a release durable; ``charge``: the hash of the ledger's line that paid for it."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        name = self._name(release)
        content = {"name": name, "charge": charge, "numbers": [float(number) for number in numbers]}
        write_atomically(self.folder / name, json.dumps(content).encode())

    def _name(self, release: ReleasePlan) -> str:
        mechanism = {"bound": release.bound, "noise_multiplier": release.noise_multiplier}
        key = write_canonical({**self._ledger.subject.describe(), "content": release.content, **mechanism})
        return f"{release.content}-{hashlib.sha256(key).hexdigest()}.json"
