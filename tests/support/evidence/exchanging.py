"""Two parties in one process that exchange messages through real doors into real journals, as the daemons do."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from google.protobuf.message import Message

from medsilo.privacy.audit.bundle import export
from medsilo.privacy.consent.gate import PlanGate
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.door.door import Call, Door
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.identity.keys import create_keys, load_audit_key
from medsilo.privacy.journal.journal import SEGMENT_BYTES, Journal
from medsilo.privacy.journal.key_rotation import rotate
from medsilo.privacy.journal.records import ConsentRecord, RunRecord
from medsilo.protos.medsilo.v1 import coordinator_pb2 as wire
from medsilo.protos.medsilo.v1 import tensor_pb2
from medsilo.protos.nonces import nonce

FEDERATION = "test"
SILO = "spiffe://test/silo/hospital1"
COORDINATOR = "spiffe://test/coordinator/coordinator"
CERTIFICATE = "ab" * 32
M = TypeVar("M", bound=Message)

PLAN = RunPlan.model_validate(
    {
        "federation": FEDERATION,
        "coordinator": "coordinator",
        "run": "run1",
        "method": {"name": "fedavg", "parameters": {"mu": 0.5}},
        "model": {"name": "small", "input_shape": (1, 8, 8), "classes": 2},
        "training": {},
        "rounds": 1000,
        "seed": 1,
        "required": ["MODEL_PARAMETERS_EXTRACTOR"],
        "optional": ["LOCAL_METRICS"],
        "downlink": ["PEER_DERIVED"],
    }
)
CONSENT: dict[str, Any] = {
    "sha256": "cd" * 32,
    "coordinator": COORDINATOR,
    "methods": ["fedavg"],
    "exposures": ["PROTOCOL", "IDENTITY", "MODEL_PARAMETERS", "LOCAL_METRICS"],
    "rounds": 1000,
    "expires": None,
}


def key_of(seed: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32)


def origin_of(identity: str) -> str:
    return "medsilo/" + identity.removeprefix("spiffe://")


@dataclass
class Party:
    """A party with its open journal."""

    identity: str
    folder: Path
    key: Ed25519PrivateKey
    segment_bytes: int = SEGMENT_BYTES

    def __post_init__(self) -> None:
        self.open()

    def open(self) -> None:
        self.journal = Journal(
            self.folder, key=self.key, origin=origin_of(self.identity), segment_bytes=self.segment_bytes
        )
        self.door = Door(self.journal, identity=self.identity, federation=FEDERATION, gate=PlanGate(Exposure))

    def restart(self) -> None:
        self.journal.close()
        self.open()

    def rotate(self, keys: Path) -> None:
        """Changes the audit key, as ``keys --rotate`` does; ``keys``: a new folder."""
        self.journal.close()
        identity = Identity.parse(self.identity)
        path = create_keys(keys, identity).audit_key
        path.write_bytes(self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        rotate(keys, self.folder, origin=origin_of(self.identity), identity=identity)
        self.key = load_audit_key(path)
        self.open()

    @property
    def public(self) -> bytes:
        return self.key.public_key().public_bytes_raw()

    @property
    def name(self) -> str:
        return self.identity.rpartition("/")[2]

    def bundle(self, path: Path) -> Path:
        export(self.folder, path)
        return path


class CutError(Exception):
    """The network went away."""


@dataclass
class Exchange:
    """A silo and a coordinator, and the calls that the silo makes.

    ``cut``: what the next call loses: ``request`` (nothing arrives), ``answer`` (it is given and lost), ``middle``
    (of a stream of messages only the first arrives).
    """

    silo: Party
    coordinator: Party
    plan: RunPlan = PLAN
    cut: str = ""
    in_step: bool = False
    given: bytes = b"d" * 100
    """What is in each chunk of a task."""
    common: frozenset[Exposure] = frozenset({Exposure.PEER_DERIVED})
    consent: Mapping[str, Any] = field(default_factory=lambda: CONSENT)

    def begin(self) -> None:
        """A session of the silo, up to its joining."""
        self.silo.door.note(
            ConsentRecord(
                consent={**self.consent, "rounds": self.plan.rounds},
                data="shard",
                data_sha256="ef" * 32,
                synthetic=True,
            )
        )
        self.get_plan()
        self.silo.door.note(RunRecord(**self.summary()))
        self.join()

    def summary(self) -> dict[str, Any]:
        plan = self.plan
        return {"run": plan.run, "plan_sha256": plan.sha256.hex(), "plan": plan.model_dump(mode="json")}

    def get_plan(self) -> None:
        with self._call("GetPlan") as (mine, theirs):
            request = wire.GetPlanRequest(nonce=nonce(), silo=self.silo.name, protocol_version=1)
            self._up([request], mine, theirs)
            answer = wire.GetPlanResponse(
                nonce=nonce(),
                plan=self.plan.to_message(),
                coordinator_audit_key=self.coordinator.public,
                rotations=self.coordinator.door.rotations(),
            )
            self._down([answer], mine, theirs)
            self.silo.door.enrol(COORDINATOR, answer.coordinator_audit_key, answer.rotations)

    def join(self) -> None:
        silo = self.silo.door
        with self._call("Join") as (mine, theirs):
            request = wire.JoinRequest(
                nonce=nonce(),
                silo=self.silo.name,
                plan_sha256=self.plan.sha256,
                audit_key=self.silo.public,
                accepted=True,
                rotations=silo.rotations(),
                seen=silo.receipt_state(COORDINATOR).seen.size,
            )
            self._up([request], mine, theirs)
            self.coordinator.door.enrol(self.silo.identity, request.audit_key, request.rotations)
            word = self.coordinator.door.attest(self.silo.identity, since=request.seen)
            self._down([wire.JoinResponse(nonce=nonce(), attestation=word)], mine, theirs)
            silo.check_receipt(mine)
        self.in_step = True

    def get_task(self, round_number: int, chunks: int = 1) -> None:
        self._keep_step()
        with self._call("GetTask") as (mine, theirs):
            request = wire.GetTaskRequest(
                nonce=nonce(),
                silo=self.silo.name,
                plan_sha256=self.plan.sha256,
                attestation=self.silo.door.attest(COORDINATOR),
            )
            self._up([request], mine, theirs)
            mine.round = theirs.round = round_number
            mine.common = theirs.common = self.common
            word = self.coordinator.door.attest(self.silo.identity)
            task = wire.Task(nonce=nonce(), kind=wire.TASK_KIND_TRAIN, round=round_number, attestation=word)
            answers = [wire.GetTaskResponse(task=task)]
            answers += [wire.GetTaskResponse(chunk=_chunk(peer_derived=self.given)) for _ in range(chunks)]
            self._down(answers, mine, theirs)
            self.silo.door.check_receipt(mine)

    def submit(self, round_number: int, chunks: int = 2, *, repeated: bool = False) -> None:
        """``repeated``: the coordinator has the update already, reads the header only and says so."""
        self._keep_step()
        with self._call("SubmitUpdate", round_number) as (mine, theirs):
            header = wire.Update(
                nonce=nonce(),
                silo=self.silo.name,
                plan_sha256=self.plan.sha256,
                round=round_number,
                attestation=self.silo.door.attest(COORDINATOR),
            )
            requests = [wire.SubmitUpdateRequest(update=header)]
            requests += [
                wire.SubmitUpdateRequest(chunk=_chunk(model_parameters_extractor=b"u" * 100)) for _ in range(chunks)
            ]
            self._up(requests, mine, theirs, only=1 if repeated else None)
            word = self.coordinator.door.attest(self.silo.identity)
            answer = wire.SubmitUpdateResponse(nonce=nonce(), attestation=word, repeated=repeated)
            self._down([answer], mine, theirs)
            if not repeated:
                self.silo.door.check_receipt(mine)
        self.silo.journal.checkpoint()

    def attest(self, *, in_step: bool = True) -> None:
        silo = self.silo.door
        with self._call("Attest") as (mine, theirs):
            request = wire.AttestRequest(
                nonce=nonce(),
                silo=self.silo.name,
                plan_sha256=self.plan.sha256,
                seen=silo.receipt_state(COORDINATOR).seen.size,
                attestation=silo.attest(COORDINATOR) if in_step and self.in_step else None,
            )
            self._up([request], mine, theirs)
            word = self.coordinator.door.attest(self.silo.identity, since=request.seen)
            self._down([wire.AttestResponse(nonce=nonce(), attestation=word)], mine, theirs)
            silo.check_receipt(mine)
        self.in_step = True

    def rounds(self, numbers: Iterable[int], *, chunks: int = 2) -> None:
        for number in numbers:
            self.get_task(number, chunks)
            self.submit(number, chunks)

    def close(self) -> None:
        self.silo.journal.close()
        self.coordinator.journal.close()

    def cutting(self, what: str, call: Callable[[], object]) -> None:
        """Makes a call that is cut."""
        self.cut = what
        try:
            call()
        except CutError:
            self.in_step = False
        else:
            raise AssertionError("the call was not cut")

    def _keep_step(self) -> None:
        if not self.in_step:
            cut, self.cut = self.cut, ""
            self.attest(in_step=False)
            self.cut = cut

    @contextmanager
    def _call(self, rpc: str, round_number: int | None = None) -> Iterator[tuple[Call, Call]]:
        plan = {"run": self.plan.run, "plan_sha256": self.plan.sha256.hex()} if rpc != "GetPlan" else {}
        mine = Call(rpc, COORDINATOR, CERTIFICATE, f"{rpc} in a test", round=round_number, **plan)  # type: ignore[arg-type]
        theirs = Call(rpc, self.silo.identity, CERTIFICATE, f"{rpc} in a test", **plan)  # type: ignore[arg-type]
        try:
            yield mine, theirs
        finally:
            self.silo.door.ended(mine)
            self.coordinator.door.ended(theirs)

    def _up(self, messages: Sequence[Message], mine: Call, theirs: Call, *, only: int | None = None) -> None:
        cut = self.cut if self.cut in ("request", "middle") else ""
        if cut:
            self.cut, only = "", 0 if cut == "request" else 1
        for number, message in enumerate(messages):
            (data,) = self.silo.door.release([message], mine)
            if only is None or number < only:
                self.coordinator.door.admit(data, type(message), theirs)
        if cut:
            raise CutError

    def _down(self, messages: Sequence[Message], mine: Call, theirs: Call) -> None:
        cut, self.cut = self.cut, ""
        for message in messages:
            (data,) = self.coordinator.door.release([message], theirs)
            if not cut:
                self.silo.door.admit(data, type(message), mine)
        if cut:
            raise CutError


def _chunk(**content: bytes) -> tensor_pb2.TensorChunk:
    return tensor_pb2.TensorChunk(nonce=nonce(), **content)


def meet(
    folder: Path, *, silo: str = SILO, seed: int = 1, coordinator: Party | None = None, rounds: int = 1000
) -> Exchange:
    """Two parties that have just met."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = PLAN.model_copy(update={"rounds": rounds})
    coordinator = coordinator or Party(COORDINATOR, folder / "coordinator", key_of(200))
    exchange = Exchange(Party(silo, folder / silo.rpartition("/")[2], key_of(seed)), coordinator, plan)
    coordinator.door.note(RunRecord(**exchange.summary()))
    exchange.begin()
    return exchange


def two_rounds(folder: Path) -> Exchange:
    """Two rounds that both sides have signed for; the journals are closed."""
    exchange = meet(folder)
    exchange.rounds([0, 1])
    exchange.attest()
    exchange.close()
    return exchange


def copy_of(journal: Path, target: Path) -> Path:
    shutil.copytree(journal, target)
    return target
