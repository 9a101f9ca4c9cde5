"""A silo's masks in one run: its keys, the rosters that it masked for, and what it refuses to mask for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import Tensor

from medsilo.algorithms.protection.masked import (
    digest,
    encode_upload,
    masked_payload,
    noised_upload,
    silos_may_change,
)
from medsilo.algorithms.registry import make
from medsilo.algorithms.tensors import Payload
from medsilo.privacy.budget.accounting import WEAK_EPSILON
from medsilo.privacy.budget.shared_noise import MOST_SILOS
from medsilo.privacy.consent.consent import Consent
from medsilo.privacy.consent.plan import RunPlan, SecureAggregationPlan
from medsilo.privacy.consent.withdrawal import MaskedSum
from medsilo.privacy.door.door import Door
from medsilo.privacy.errors import RefusedError
from medsilo.privacy.identity.certificates import Credentials
from medsilo.privacy.journal.records import RefusalRecord, RosterRecord
from medsilo.privacy.secure_aggregation.mask_keys import CertifiedKey, Occasion, Roster, certify, vouch
from medsilo.protos.medsilo.v1 import journal_pb2


class Masking:
    """Masks a silo's updates of one run.

    A key lives in memory alone, until the coordinator has acknowledged what was masked with it; a silo that starts
    again states a new one. ``consents``: all that hold at the moment, for the file may be changed while the run goes
    on. ``earlier``: all sums, of this and other runs, that this silo has masked an update for, as its journal tells.
    In one run it masks for one set of silos: two sums that differ by a few silos give away what those sent, exactly
    where the coordinator hands out the same models twice, and their number of images in any case.
    (That sets which differ by many are refused too is no accident: with sums over {1 … 7}, {1, 2, 3} and {4, 5, 6}
    nobody but 7 could see what is taken from whom.) Where single updates have a bound, silos may change in a run, but
    never for the same update; nor, for what other runs sent may have no bound, between runs from the same models.
    """

    def __init__(
        self,
        plan: RunPlan,
        masks: SecureAggregationPlan,
        *,
        credentials: Credentials,
        audit_key: Ed25519PrivateKey,
        consents: Callable[[], Iterable[Consent]],
        door: Door,
        earlier: Iterable[MaskedSum],
    ) -> None:
        self._plan = plan
        self._masks = masks
        self._credentials = credentials
        self._audit_key = audit_key
        self._voucher = vouch(credentials, audit_key)
        self._consents = consents
        self._door = door
        self._earlier = list(earlier)
        self._may_change = silos_may_change(plan, make(plan.method.name, plan.method.parameters))
        self._key: tuple[int, X25519PrivateKey, CertifiedKey] | None = None

    def statement(self, round_number: int, received_sha256: bytes) -> CertifiedKey | None:
        """The statement of this silo's present key for a round; the same until an update was masked with it.

        ``received_sha256``: of the models that it was given to train from.
        """
        if self._key is None or self._key[0] != round_number:
            private = X25519PrivateKey.generate()
            stated = certify(
                private,
                self._occasion(round_number),
                received_sha256,
                identity=self._credentials.identity,
                audit_key=self._audit_key,
                voucher=self._voucher,
            )
            self._key = (round_number, private, stated)
        return self._key[2]

    def used(self) -> None:
        """The update that was masked with the present key has been acknowledged: the key goes."""
        self._key = None

    def mask(
        self,
        round_number: int,
        keys: Sequence[journal_pb2.MaskKey],
        upload: Payload,
        noised: Mapping[str, Tensor] | None = None,
    ) -> tuple[Roster, Payload]:
        """An update under masks for the roster of these mask keys, which is in the journal before. ``noised``: its
        whole numbers, where noise is shared out.

        Raises ``RefusedError``, which is a record too, for a roster that this silo does not mask for, ``TrainingError``
        for an update that does not fit the sum's range.
        """
        if self._key is None or self._key[0] != round_number:
            raise RefusedError(f"no mask key was stated for round {round_number + 1}")
        _, private, own = self._key
        try:
            roster = Roster.read(keys, self._occasion(round_number), ca_pem=self._credentials.ca_pem)
            roster.check(own, minimum=self._masks.minimum, audit_keys={})
            for demanded in (consent.secure_aggregation for consent in self._consents()):
                if demanded is not None:
                    roster.check(own, minimum=demanded.minimum, audit_keys=demanded.audit_keys)
            if self._plan.trust is not None and len(roster) > MOST_SILOS:
                raise RefusedError(f"it has {len(roster)} silos, and noise is shared out among {MOST_SILOS} at most")
            silos = frozenset(roster.silos)
            wanted = MaskedSum(self._plan.run, self._plan.sha256.hex(), round_number, silos, own.received_sha256)
            self._check_earlier(wanted)
        except RefusedError as error:
            raise self._refused(round_number, "masked for the coordinator's roster", error) from None
        covered = self._cover(round_number, roster, own, private, upload, noised)
        record = RosterRecord(
            **self._about(round_number),
            **roster.describe(),
            received_sha256=own.received_sha256,
            statements=roster.statements(),
        )
        self._door.note(record)
        self._earlier.append(wanted)
        return roster, covered

    def received(self, given: Payload) -> str:
        """SHA-256 (hex) of what this silo trains its next round from, which must be the same for all of a roster."""
        return digest(given).hex()

    def opened(self, round_number: int, given: Payload) -> Payload:
        """What came with a task, as the method knows it."""
        del round_number
        return given

    def begun(self, initial: Mapping[str, Tensor]) -> None:
        """What the run starts from has come."""

    def settled(self, round_number: int) -> None:
        """A round is trained, and kept."""

    def _cover(
        self,
        round_number: int,
        roster: Roster,
        own: CertifiedKey,
        private: X25519PrivateKey,
        upload: Payload,
        noised: Mapping[str, Tensor] | None,
    ) -> Payload:
        """An update as it may leave for a roster that has been checked."""
        del round_number
        if self._plan.trust is None:
            _, numbers = encode_upload(upload, self._masks, len(roster))
        else:
            numbers = noised_upload(upload, noised or {})
        return masked_payload(upload, roster.mask(own, private, numbers))

    def _refused(self, round_number: int, what: str, error: RefusedError) -> RefusedError:
        """The error of a refusal that is on record. ``what``: the round is not."""
        refusal = f"round {round_number + 1} is not {what}: {error}"
        about = self._about(round_number)
        self._door.note(RefusalRecord(**about, peer=self._plan.coordinator_identity.uri, reason=refusal))
        refused = RefusedError(refusal)
        refused.recorded = True
        return refused

    def _about(self, round_number: int) -> dict[str, Any]:
        return {"run": self._plan.run, "plan_sha256": self._plan.sha256.hex(), "round": round_number}

    def _check_earlier(self, wanted: MaskedSum) -> None:
        for before in self._earlier:
            if before.silos == wanted.silos:
                continue
            same_run, same_models = before.run == wanted.run, before.received_sha256 == wanted.received_sha256
            if same_run and before.round == wanted.round:
                what, remedy = "masked the same update", ""
            elif self._may_change and before.plan_sha256 == wanted.plan_sha256:
                continue
            elif same_run:
                what = f"masked its update of round {before.round + 1}"
                what += " (which began with the same models)" if same_models else ""
                remedy = (
                    ", and numbers of images. One run has masked sums of one set of silos, unless it has differential "
                    f"privacy (ε of at most {WEAK_EPSILON:g}) and silos count alike; for other silos, begin a new run"
                )
            elif same_models:
                what = f"masked an update of run {before.run}, which began with the same models,"
                remedy = ". A run with another `seed` begins with others"
            else:
                continue
            raise RefusedError(
                f"it asks for the sum of {', '.join(sorted(wanted.silos))}, and this silo has {what} for "
                f"{', '.join(sorted(before.silos))} before: the difference of the two sums would give away single "
                f"updates{remedy}"
            )

    def _occasion(self, round_number: int) -> Occasion:
        return Occasion(self._plan.federation, self._plan.run, self._plan.sha256, round_number)
