"""A silo's masks in one run: its keys, the rosters that it masked for, and what it refuses to mask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from algorithms.masked_methods import encode_upload, masked_payload
from algorithms.tensors import Payload
from privacy.consent import Consent
from privacy.door import Door
from privacy.errors import RefusedError
from privacy.mask_keys import CertifiedKey, Occasion, Roster, certify, vouch
from privacy.pki import Credentials
from privacy.plan import RunPlan, SecureAggregationPlan
from protos.medsilo.v1 import journal_pb2


class Masking:
    """Masks a silo's updates of one run.

    A key lives in memory alone, until the coordinator has acknowledged what was masked with it; a silo that starts
    again states a new one. ``masked_for``: by round, the silos that this one has masked that round's update for, as its
    journal tells: the same update is never masked for others as well, because the difference of two sums would give
    away the silos between them.
    """

    def __init__(
        self,
        plan: RunPlan,
        masks: SecureAggregationPlan,
        *,
        credentials: Credentials,
        audit_key: Ed25519PrivateKey,
        consent: Consent,
        door: Door,
        masked_for: Mapping[int, frozenset[str]],
    ) -> None:
        self._plan = plan
        self._masks = masks
        self._credentials = credentials
        self._audit_key = audit_key
        self._voucher = vouch(credentials, audit_key)
        demanded = consent.secure_aggregation
        self._minimum = max(masks.minimum, demanded.minimum if demanded else 0)
        self._audit_keys = demanded.audit_keys if demanded else {}
        self._door = door
        self._masked_for = dict(masked_for)
        self._key: tuple[int, X25519PrivateKey, CertifiedKey] | None = None

    def statement(self, round_number: int, received_sha256: bytes) -> CertifiedKey:
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

    def mask(self, round_number: int, keys: Sequence[journal_pb2.MaskKey], upload: Payload) -> tuple[Roster, Payload]:
        """An update under masks for the roster of these mask keys, which is in the journal before.

        Raises ``RefusedError``, which is a record too, for a roster that this silo does not mask for, ``TrainingError``
        for an update that does not fit the sum's range.
        """
        if self._key is None or self._key[0] != round_number:
            raise RefusedError(f"no mask key was stated for round {round_number + 1}")
        _, private, own = self._key
        about = {"run": self._plan.run, "plan_sha256": self._plan.sha256.hex(), "round": round_number}
        try:
            roster = Roster.read(keys, self._occasion(round_number), ca_pem=self._credentials.ca_pem)
            roster.check(own, minimum=self._minimum, audit_keys=self._audit_keys)
            self._check_only_roster(round_number, roster)
        except RefusedError as error:
            refusal = f"round {round_number + 1} is not masked for the coordinator's roster: {error}"
            self._door.note("refusal", **about, peer=self._plan.coordinator_identity.uri, reason=refusal)
            refused = RefusedError(refusal)
            refused.recorded = True
            raise refused from None
        _, numbers = encode_upload(upload, self._masks, len(roster))
        self._door.note("roster", **about, **roster.describe(), statements=roster.statements())
        self._masked_for[round_number] = frozenset(roster.silos)
        return roster, masked_payload(upload, roster.mask(own, private, numbers))

    def _check_only_roster(self, round_number: int, roster: Roster) -> None:
        before = self._masked_for.get(round_number)
        if before is not None and before != set(roster.silos):
            raise RefusedError(
                f"it asks for the update of {', '.join(roster.silos)}, and this silo has masked the same update for "
                f"{', '.join(sorted(before))} before: the difference of the two sums would give away single updates"
            )

    def _occasion(self, round_number: int) -> Occasion:
        return Occasion(self._plan.federation, self._plan.run, self._plan.sha256, round_number)
