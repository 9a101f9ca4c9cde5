"""A hospital and a coordinator with real journals and doors, and a network between them that may cut any call.

What daemons do is reduced to the protocol: who attests when, what is refused, and when both exchange what they know.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from medsilo.privacy.consent.gate import PlanGate
from medsilo.privacy.door.door import Call, Door
from medsilo.privacy.door.receipts import OutOfStepError, ReceiptState
from medsilo.privacy.errors import ReceiptError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.journal.journal import Journal, read_records
from medsilo.protos.medsilo.v1 import coordinator_pb2 as wire
from medsilo.protos.medsilo.v1 import journal_pb2, tensor_pb2
from medsilo.protos.nonces import nonce

SILO = "spiffe://test/silo/a"
COORDINATOR = "spiffe://test/coordinator/c"
Answers = Generator[bytes | None, None, None]


class UnsignedError(Exception):
    """The coordinator turns a call away: the hospital has not signed for earlier ones."""


class CutError(Exception):
    """The call was cut."""


class Party:
    """One side: its journal's folder, key and door."""

    def __init__(self, folder: Path, uri: str, key: Ed25519PrivateKey | None = None) -> None:
        self.uri = uri
        self.key = key or Ed25519PrivateKey.generate()
        self.folder = folder
        self._copies = 0
        self._open()

    def _open(self) -> None:
        self.journal = Journal(self.folder, key=self.key, origin="medsilo/" + self.uri.removeprefix("spiffe://"))
        self.door = Door(self.journal, identity=self.uri, federation="test", gate=PlanGate(Exposure))

    def with_(self, peer: str) -> ReceiptState:
        return self.door.receipt_state(peer)

    def snapshot(self) -> Path:
        """A copy of the journal as it lies on disk now."""
        self._copies += 1
        copy = self.folder.with_name(f"{self.folder.name.partition('-')[0]}-{self._copies}")
        shutil.copytree(self.folder, copy)
        return copy

    def restart(self, folder: Path | None = None) -> None:
        """Killed (no last checkpoint) and started again; from another copy of the journal if one is given."""
        found = folder or self.snapshot()
        self.journal.close()
        self.folder = found
        self._open()

    def records(self, direction: str | None = None) -> list[dict[str, Any]]:
        return [
            record
            for record in read_records(self.folder)
            if record["kind"] == "message" and direction in (None, record["direction"])
        ]

    def refusals(self) -> list[dict[str, Any]]:
        return [record for record in read_records(self.folder) if record["kind"] == "refusal"]


class Line:
    """What the two do with each other."""

    def __init__(self, folder: Path) -> None:
        self.silo = Party(folder / "silo", SILO)
        self.coordinator = Party(folder / "coordinator", COORDINATOR)
        self.in_step = False
        self.lingering: list[Answers] = []
        self.last_call = ""

    def close(self) -> None:
        self.notice_all()
        for party in (self.silo, self.coordinator):
            party.journal.close()

    # What the hospital does. Each returns whether the call was answered in full.

    def join(self) -> bool:
        """Asks for the plan and joins."""
        self.in_step = False
        plan = self._call(
            "GetPlan",
            [wire.GetPlanRequest(nonce=nonce(), silo="a")],
            lambda data: self._serve_plan(data),
            wire.GetPlanResponse,
        )
        response = wire.GetPlanResponse.FromString(plan[0])
        self.silo.door.enrol(COORDINATOR, response.coordinator_audit_key, response.rotations)
        request = wire.JoinRequest(
            nonce=nonce(),
            silo="a",
            audit_key=self.silo.journal.public_key,
            rotations=self.silo.door.rotations(),
            seen=self.silo.with_(COORDINATOR).seen.size,
            accepted=True,
        )
        self._call("Join", [request], self._serve_join, wire.JoinResponse)
        self.in_step = True
        return True

    def exchange(self, *, attested: bool = False, arrives: bool = True, answered: bool = True) -> bool:
        """An Attest call, with the hospital's own word if ``attested``."""
        request = wire.AttestRequest(
            nonce=nonce(),
            silo="a",
            seen=self.silo.with_(COORDINATOR).seen.size,
            attestation=self.silo.door.attest(COORDINATOR) if attested else None,
        )
        up, down = (1, 1) if answered else (int(arrives), 0)
        return self._try("Attest", [request], self._serve_attest, wire.AttestResponse, up, down)

    def task(self, chunks: int = 1, *, up: int = 1, down: int | None = None, lingers: bool = False) -> bool:
        """A GetTask call. ``up``, ``down``: how many messages arrive before the cut; None for all of them."""
        if not self._keep_step():
            return False
        request = wire.GetTaskRequest(nonce=nonce(), silo="a", attestation=self.silo.door.attest(COORDINATOR))

        def serve(messages: Iterator[bytes]) -> Answers:
            return self._serve_task(messages, chunks)

        return self._try("GetTask", [request], serve, wire.GetTaskResponse, up, down, lingers, 1 + chunks)

    def upload(self, chunks: int = 1, *, up: int | None = None, answered: bool = True, lingers: bool = False) -> bool:
        """A SubmitUpdate call, of which ``up`` messages arrive before the cut; None for all of them."""
        if not self._keep_step():
            return False
        header = wire.Update(nonce=nonce(), silo="a", attestation=self.silo.door.attest(COORDINATOR))
        messages = [wire.SubmitUpdateRequest(update=header), *(upload_chunk() for _ in range(chunks))]
        whole = up is None or up > chunks
        arrive = 1 + chunks if up is None else up
        down = 1 if whole and answered else 0
        return self._try("SubmitUpdate", messages, self._serve_upload, wire.SubmitUpdateResponse, arrive, down, lingers)

    def part(self) -> None:
        """The last signatures of a session."""
        if not self.in_step:
            assert self.exchange()
        assert self.exchange(attested=True), "the last exchange was refused"

    def restart_silo(self, folder: Path | None = None) -> None:
        self.silo.restart(folder)
        self.in_step = False

    def restart_coordinator(self, folder: Path | None = None) -> None:
        self.lingering.clear()
        self.coordinator.restart(folder)

    # Calls that were cut at the hospital's end, and of which the coordinator does not know it yet.

    def late(self, number: int) -> None:
        """More of such a call happens at the coordinator; what it answers is lost, and so is a refusal."""
        if self.lingering:
            handling = self.lingering[number % len(self.lingering)]
            try:
                next(handling)
            except (StopIteration, UnsignedError, ReceiptError):
                self.lingering.remove(handling)

    def notice_all(self) -> None:
        """The coordinator learns that these calls were cut."""
        for handling in self.lingering:
            handling.close()
        self.lingering.clear()

    def _keep_step(self) -> bool:
        return self.in_step or self.exchange()

    def _try(
        self,
        rpc: str,
        messages: list[Any],
        serve: Any,
        kind: type[Any],
        up: int,
        down: int | None,
        lingers: bool = False,
        expected: int = 1,
    ) -> bool:
        try:
            self._call(rpc, messages, serve, kind, up, down, lingers, expected)
        except (CutError, UnsignedError, OutOfStepError):
            self.in_step = False
            return False
        self.in_step = True
        return True

    def _call(
        self,
        rpc: str,
        messages: list[Any],
        serve: Any,
        kind: type[Any],
        up: int | None = None,
        down: int | None = None,
        lingers: bool = False,
        expected: int = 1,
    ) -> list[bytes]:
        """The answers. The coordinator takes ``up`` messages; then ``down`` answers come back, or the call is cut."""
        call = Call(rpc, COORDINATOR, "", "a test")
        down = expected if down is None else min(down, expected)
        answers: list[bytes] = []
        try:
            sent = self.silo.door.release(messages, call)
            self.last_call = call.call_id or ""
            up = len(sent) if up is None else min(up, len(sent))
            handling: Answers = serve(iter(sent))
            for _ in range(up):
                next(handling)
            while up == len(sent) and len(answers) < down:
                if (data := next(handling)) is not None:
                    self.silo.door.admit(data, kind, call)
                    answers.append(data)
                    if len(answers) == 1 and rpc != "GetPlan":
                        self.silo.door.check_receipt(call)
            if len(answers) == expected:
                handling.close()
                return answers
            if lingers:
                self.lingering.append(handling)
            else:
                handling.close()
            raise CutError
        finally:
            self.silo.door.ended(call)

    # What the coordinator does: a step for each message that comes in, and one for each that goes out.

    def _handle(self, rpc: str) -> Call:
        return Call(rpc, SILO, "", "a test")

    def _check_signed(self) -> None:
        if self.coordinator.with_(SILO).unsigned():
            raise UnsignedError

    def _serve_plan(self, messages: Iterator[bytes]) -> Answers:
        door, call = self.coordinator.door, self._handle("GetPlan")
        try:
            door.admit(next(messages), wire.GetPlanRequest, call)
            yield None
            response = wire.GetPlanResponse(
                nonce=nonce(), coordinator_audit_key=door.journal.public_key, rotations=door.rotations()
            )
            yield door.release([response], call)[0]
        finally:
            door.ended(call)

    def _serve_join(self, messages: Iterator[bytes]) -> Answers:
        door, call = self.coordinator.door, self._handle("Join")
        try:
            request = door.admit(next(messages), wire.JoinRequest, call)
            door.enrol(SILO, request.audit_key, request.rotations)
            yield None
            word = door.attest(SILO, since=request.seen)
            yield door.release([wire.JoinResponse(nonce=nonce(), attestation=word)], call)[0]
        finally:
            door.ended(call)

    def _serve_attest(self, messages: Iterator[bytes]) -> Answers:
        door, call = self.coordinator.door, self._handle("Attest")
        try:
            request = door.admit(next(messages), wire.AttestRequest, call)
            if request.HasField("attestation"):
                self._check_signed()
            yield None
            word = door.attest(SILO, since=request.seen)
            yield door.release([wire.AttestResponse(nonce=nonce(), attestation=word)], call)[0]
        finally:
            door.ended(call)

    def _serve_task(self, messages: Iterator[bytes], chunks: int) -> Answers:
        door, call = self.coordinator.door, self._handle("GetTask")
        try:
            door.admit(next(messages), wire.GetTaskRequest, call)
            self._check_signed()
            yield None
            task = wire.Task(nonce=nonce(), attestation=door.attest(SILO))
            yield door.release([wire.GetTaskResponse(task=task)], call)[0]
            for _ in range(chunks):
                yield door.release([download_chunk()], call)[0]
        finally:
            door.ended(call)

    def _serve_upload(self, messages: Iterator[bytes]) -> Answers:
        door, call = self.coordinator.door, self._handle("SubmitUpdate")
        try:
            door.admit(next(messages), wire.SubmitUpdateRequest, call)
            self._check_signed()
            yield None
            for data in messages:
                door.admit(data, wire.SubmitUpdateRequest, call)
                yield None
            response = wire.SubmitUpdateResponse(nonce=nonce(), attestation=door.attest(SILO))
            yield door.release([response], call)[0]
        finally:
            door.ended(call)

    # What has to hold in the end.

    def assert_vouched(self) -> None:
        """Both have put their signature, under the right hashes, to every message that arrived.

        Reads nothing but the journals. After ``part``: its request has a receipt, its answer nothing yet.
        """
        for own, other in ((self.silo, self.coordinator), (self.coordinator, self.silo)):
            sent = digests(own.records("sent"))
            received = digests(other.records("received"))
            receipts, signatures = words(own, "received"), words(other, "sent")
            for call_id, arrived in received.items():
                assert arrived == sent[call_id][: len(arrived)]
                if call_id != self.last_call:
                    check(receipts, call_id, sent[call_id], len(arrived), f"a receipt for {own.uri}")
                    check(signatures, call_id, sent[call_id], len(arrived), f"the signature of {own.uri}")
                elif own is self.silo:
                    check(receipts, call_id, sent[call_id], len(arrived), f"a receipt for {own.uri}")


def digests(records: list[dict[str, Any]]) -> dict[str, list[bytes]]:
    """SHA-256 of each call's messages."""
    found: dict[str, list[bytes]] = {}
    for record in records:
        found.setdefault(record["call_id"], []).append(bytes.fromhex(record["sha256"]))
    return found


def words(holder: Party, direction: str) -> dict[str, list[dict[str, Any]]]:
    """What the other side says in the attestations that the holder has of it, by call."""
    found: dict[str, list[dict[str, Any]]] = {}
    for record in holder.records("received"):
        if "attestation" in record:
            for exchange in document_of(record["attestation"])["exchanges"]:
                if exchange["direction"] == direction:
                    found.setdefault(exchange["call_id"], []).append(exchange)
    return found


def document_of(envelope: Any) -> dict[str, Any]:
    """What an envelope says, as a message or as it stands in a record."""
    from medsilo.privacy.identity.envelope import from_json, from_message

    opened = from_message(envelope) if isinstance(envelope, journal_pb2.Envelope) else from_json(envelope)
    found: dict[str, Any] = json.loads(opened.payload)
    return found


def check(given: dict[str, list[dict[str, Any]]], call_id: str, sent: list[bytes], arrived: int, what: str) -> None:
    for exchange in given.get(call_id, []):
        count = exchange["messages"]
        assert exchange["sha256"] == hashlib.sha256(b"".join(sent[:count])).hexdigest()
    counts = [exchange["messages"] for exchange in given.get(call_id, [])]
    assert max(counts, default=0) >= arrived, f"{what} is missing: call {call_id}, {arrived} messages, has {counts}"


def upload_chunk() -> wire.SubmitUpdateRequest:
    return wire.SubmitUpdateRequest(chunk=tensor_pb2.TensorChunk(nonce=nonce(), prototypes=b"12345678"))


def download_chunk() -> wire.GetTaskResponse:
    return wire.GetTaskResponse(chunk=tensor_pb2.TensorChunk(nonce=nonce(), peer_derived=b"12345678"))
