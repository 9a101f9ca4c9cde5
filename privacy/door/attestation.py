"""The attestation: one party's signed document on what it has exchanged with another."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from securesystemslib import dsse

from medsilo.privacy.errors import ReceiptError
from medsilo.privacy.files.configuration import StrictModel
from medsilo.privacy.identity.checking import HERE, Checks
from medsilo.privacy.identity.envelope import ATTESTATION, unseal
from medsilo.privacy.journal.checkpoint import MOST_SIGNS
from medsilo.privacy.journal.records import HASH, Direction

MOST_CALLS = 500
"""Calls in one attestation; what is left waits for the next."""
MOST_SHOWN = 4
"""Other hospitals' words in one attestation."""
SHOWN_SINCE = 2
"""The protocol version whose parties know them."""
_Hex32 = Field(pattern=HASH)


class Exchange(StrictModel):
    """One call's messages in one direction, as the signer has them."""

    rpc: str = Field(max_length=100)
    call_id: str = Field(pattern=r"^[0-9a-f]{32}$")
    direction: Direction
    messages: int = Field(ge=1)
    length: int = Field(ge=0)
    sha256: str = _Hex32
    """Over the SHA-256 digests of the messages, in order."""
    last_index: int = Field(ge=0)
    """Record of the last of them in the signer's journal."""


class Consistency(StrictModel):
    """RFC 6962 proof that the signer's journal continues the one of ``size`` records that the other side saw last."""

    size: int = Field(ge=0)
    proof: tuple[Annotated[str, _Hex32], ...] = Field(max_length=128)


class Witnessed(StrictModel):
    """The other side's last checkpoint that the signer has verified, and the signer's line under it (C2SP
    tlog-cosignature)."""

    size: int = Field(ge=1)
    cosignature: str = Field(max_length=1000)


class Shown(StrictModel):
    """What another hospital was shown of the signer's journal, in that hospital's own signed word."""

    party: str = Field(max_length=1000)
    """The hospital's identity: spiffe://FEDERATION/silo/NAME."""
    public_key: str = _Hex32
    """Its audit key, as the signer knows it."""
    checkpoint: str = Field(max_length=MOST_SIGNS)
    """The signer's, as it was shown to that hospital."""
    cosignature: str = Field(max_length=1000)
    """That hospital's line under it (C2SP tlog-cosignature)."""
    proof: tuple[Annotated[str, _Hex32], ...] = Field(max_length=128)
    """RFC 6962 proof that the checkpoint of the attestation continues it."""


class Attestation(StrictModel):
    """The document in an attestation's envelope: what the signer has received from, and sent to, the other side."""

    v: Literal[1] = 1
    by: str
    """A party's identity: spiffe://FEDERATION/ROLE/NAME."""
    to: str
    """A party's identity: spiffe://FEDERATION/ROLE/NAME."""
    exchanges: tuple[Exchange, ...] = Field(max_length=MOST_CALLS)
    checkpoint: str = Field(max_length=MOST_SIGNS)
    """The signer's own."""
    consistency: Consistency
    witnessed: Witnessed | None = None
    shown: tuple[Shown, ...] = Field(default=(), max_length=MOST_SHOWN)
    """Of a coordinator: what it has shown to other hospitals (since version 2 of the protocol)."""

    def content(self) -> dict[str, Any]:
        """It as JSON; what an earlier release does not know is not in it where it is not used."""
        return self.model_dump(mode="json", exclude=set() if self.shown else {"shown"})


def parse(envelope: dsse.Envelope, key: bytes | None = None, checks: Checks = HERE) -> Attestation:
    """The attestation in an envelope; raises ``ReceiptError``. ``key``: whose signature is to be on it."""
    try:
        if key is None:
            return Attestation.model_validate(json.loads(envelope.payload))
        return Attestation.model_validate(unseal(envelope, ATTESTATION, key, checks=checks))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ReceiptError(f"an attestation cannot be used: {where}: {first['msg']}") from None
