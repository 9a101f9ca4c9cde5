"""What a journal tells of the privacy ledger, held against itself: charges, what was voided, and what all have cost."""

from __future__ import annotations

from medsilo.privacy.budget.ledger import LASTING, UPDATE, Charges, Replayed
from medsilo.privacy.journal.records import Json, LedgerRecord, MessageRecord, VoidRecord
from medsilo.privacy.pages.wording import shown
from medsilo.privacy.verify.result import BrokenError, count_of


class Spending:
    """Takes the records that tell of charges, in their order."""

    def __init__(self) -> None:
        self._charges = Charges()
        self._charged: dict[str, tuple[int, Json]] = {}
        """Charges by their hash: the record that told of each when it was made, and what that says."""
        self._failed: set[str] = set()
        """Those whose training failed by what came out of it."""
        self._last_update = -1
        """The last record of an update that was sent."""

    def message(self, record: MessageRecord) -> None:
        """Takes a message, which may name what paid for it; raises ``ValueError`` for what is no charge."""
        if record.rpc == UPDATE and record.direction == "sent":
            self._last_update = record.index
        for charge in record.ledger:
            self._charges.add(charge)

    def charged(self, record: LedgerRecord) -> None:
        """Takes a charge; raises ``ValueError`` for what is none."""
        charge = record.charge
        self._charges.add(charge)
        if record.spent is not None:
            self._charges.say(charge, record.spent, record.index, of_unit=record.unit_spent)
            self._charged[charge["sha256"]] = record.index, charge
        if record.failed:
            self._failed.add(charge["sha256"])

    def voided(self, record: VoidRecord) -> str:
        """Takes a charge that counts no more, and says so. It may only where nothing that it paid for can have left
        (see ``Account``); raises ``BrokenError`` where that is not so."""
        charge = record.charge
        told, made = self._charged.get(charge["sha256"], (None, None))
        if told is None or (told, made) != (record.charged, charge):
            raise BrokenError(record.index, "it voids a charge, and the journal does not tell that this one was made")
        if charge["sha256"] in self._failed:
            raise BrokenError(
                record.index, f"it voids the charge of record {told}, whose training failed by its outcome"
            )
        if self._last_update > told:
            raise BrokenError(
                record.index,
                f"it voids the charge of record {told}, but record {self._last_update} sent an update since",
            )
        if charge["event"]["kind"] in LASTING:
            raise BrokenError(record.index, "it voids the charge of an average, which may be kept and sent in any run")
        self._charges.void(charge, record.index)
        return (
            f"Charge {charge['index']} of data set {charge['data_sha256'][:16]} ({charge['split']} split, round "
            f"{charge['round'] + 1} of run {charge['run']}) was voided: no update was sent between record {told}, "
            f"which tells of it, and record {record.index}."
        )

    def recount(self) -> list[str]:
        """Adds the charges up again and says what they come to; raises ``BrokenError`` where the journal says something
        else."""
        try:
            accounts = self._charges.replay()
        except (ValueError, ArithmeticError, MemoryError) as error:
            raise BrokenError(None, f"the privacy ledger's charges cannot be added up ({error!s:.200})") from None
        return [sentence for account in accounts for sentence in _recounted(account)]


def _recounted(account: Replayed) -> list[str]:
    said, record = account.said
    whose = f"data set {account.subject.data_sha256[:16]} ({account.subject.split} split)"
    found = []
    if account.spent is None:
        why = (
            f"charge {', '.join(map(str, account.untold))} is not told of here"
            if account.untold
            else "they are of too many kinds"
        )
        found.append(f"The privacy loss of {whose} cannot be recomputed: {why}.")
    elif not account.agrees:
        raise BrokenError(
            record,
            f"it says that the charges for {whose} come to ε = {shown(said)}; recomputed, the "
            f"{count_of(account.charges, 'charge')} come to {account.spent}",
        )
    else:
        found.append(
            f"The privacy loss of {whose}, recomputed from {count_of(account.charges, 'charge')}, is "
            f"{account.spent}, as the journal says."
        )
    if account.of_unit is not None:
        found.append(
            f"With charges for other versions, units or splits, the {account.subject.unit} of {whose} that has "
            f"cost most has cost ε = {shown(account.of_unit)}: so the journal says. Which charges those are "
            "only the ledger tells."
        )
    return found
