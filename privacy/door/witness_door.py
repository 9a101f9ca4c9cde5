"""The door to witnesses: what is asked of one is text, and passes byte for byte as all that leaves does."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable

from medsilo.privacy.door.door import Call, Door, Gate
from medsilo.privacy.errors import ConsentError, MedsiloError
from medsilo.privacy.exposure import SCHEMA_SHA256, Exposure
from medsilo.privacy.identity.cosignature import NoteKey
from medsilo.privacy.journal.records import WITNESS_PEER, MessageRecord, RefusalRecord
from medsilo.privacy.printable import printable
from medsilo.privacy.witness.protocol import PATH, AddCheckpoint
from medsilo.protos.medsilo.v1 import witness_pb2
from medsilo.protos.nonces import NONCE_BYTES

_QUESTION = witness_pb2.AddCheckpoint.DESCRIPTOR
_PARTS = ("old_size", "consistency", "checkpoint")


class WitnessDoor:
    """A party's door to one witness. ``gate``: decides what may leave. ``run``, ``plan_sha256``: in which run it is."""

    def __init__(self, door: Door, gate: Gate, key: NoteKey, *, run: str | None, plan_sha256: str | None) -> None:
        self._door = door
        self._gate = gate
        self._peer = f"{WITNESS_PEER}{key.name}"
        self._run, self._plan_sha256 = run, plan_sha256

    def check(self) -> None:
        """Raises ``ConsentError`` if nothing may go there now."""
        self._gate.check([Exposure.CHECKPOINT])

    def release(
        self, question: AddCheckpoint, certificate_sha256: str, head: Callable[[int], bytes]
    ) -> tuple[bytes, Call]:
        """The exact bytes to send, recorded and durable, and the call that they are of. ``head``: what goes before them
        on the wire, by how many they are; it is in what is returned.

        Raises ``ConsentError`` if they may not leave; then that is a record.
        """
        call = Call(
            PATH,
            self._peer,
            certificate_sha256,
            "having a checkpoint cosigned",
            run=self._run,
            plan_sha256=self._plan_sha256,
            call_id=secrets.token_hex(NONCE_BYTES),
        )
        parts = question.parts()
        data = b"".join(parts)
        with self._gate.held():
            try:
                self.check()
            except ConsentError as error:
                self.refuse(data, call, "sent", error)
                error.recorded = True
                raise
            begin = head(len(data))
            self._door.note(
                MessageRecord(
                    **call.describe(),
                    direction="sent",
                    frame=0,
                    message_type=_QUESTION.full_name,
                    schema_sha256=SCHEMA_SHA256,
                    sha256=hashlib.sha256(data).hexdigest(),
                    length=len(data),
                    fields={name: len(part) for name, part in zip(_PARTS, parts, strict=True)},
                    classes={Exposure.CHECKPOINT.value: len(data)},
                    ledger=[],
                    head_sha256=hashlib.sha256(begin).hexdigest(),
                    head_length=len(begin),
                )
            )
        return begin + data, call

    def refuse(self, data: bytes, call: Call, direction: str, error: MedsiloError) -> None:
        """Records that a question, or a witness's answer, was refused, and why."""
        self._door.note(
            RefusalRecord(
                **call.describe(),
                direction="sent" if direction == "sent" else "received",
                sha256=hashlib.sha256(data).hexdigest(),
                length=len(data),
                reason=printable(str(error), lines=True),
            )
        )
