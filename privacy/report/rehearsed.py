"""The last rehearsals' results, as a silo keeps them for its report (``silo rehearse``)."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from medsilo.privacy.budget.accounting import Guarantee
from medsilo.privacy.errors import DataError

VERDICT = {
    "broken": "more could be learnt than the plan promises",
    "not refuted": "nothing was found against the promise",
    "cannot tell": "too few images to refute the promise",
    "no promise": "the plan promises no differential privacy",
}


class Rehearsed(BaseModel):
    """A rehearsal's result: the part of ``silo rehearse --json`` that the report tells.

    ``claimed``: what the rehearsed round costs by the plan's own account.
    """

    model_config = ConfigDict(frozen=True)

    run: str
    plan_sha256: str
    made: datetime
    verdict: str
    unit: str
    canaries: int
    epsilon_lower_bound: float = Field(ge=0)
    delta: float
    confidence: float
    claimed: Guarantee | None

    def __str__(self) -> str:
        what = (
            f"Rehearsal of {self.run}'s first round, made here on {self.made:%Y-%m-%d %H:%M} UTC with the plan "
            f"{self.plan_sha256[:16]}…: {VERDICT.get(self.verdict, self.verdict)}. From guesses which of "
            f"{self.canaries} {self.unit}s were used follows, with {self.confidence:.0%} confidence, that what the "
            f"training tells is at least ε = {self.epsilon_lower_bound:.3f} at δ = {self.delta:g}"
        )
        promise = "" if self.claimed is None else f"; the plan's account of that round is {self.claimed}"
        return f"{what}{promise}. A low bound is no proof of safety."


def read_rehearsals(folder: Path) -> list[Rehearsed]:
    """The last result of each run that was rehearsed, by the run's name.

    Raises ``DataError`` for a file that cannot be read.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append(Rehearsed.model_validate_json(path.read_bytes()))
        except (OSError, ValidationError) as error:
            reason = str(error).splitlines()[0]
            raise DataError(
                f"{path}: cannot be read as a rehearsal's result ({reason}); rehearse again, or delete it"
            ) from None
    return found
