"""Journals of made-up runs, written through the real door."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from medsilo.privacy.budget.promise import PrivacyPlan
from medsilo.privacy.consent.consent import Consent
from medsilo.privacy.consent.gate import PlanGate
from medsilo.privacy.consent.plan import MethodPlan, ModelPlan, RunPlan, TrainingPlan
from medsilo.privacy.door.door import Call, Door
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.journal.journal import Journal
from medsilo.privacy.journal.records import ConsentRecord, RunRecord
from medsilo.privacy.report.builder import build_report
from medsilo.privacy.report.model import Report
from medsilo.protos.medsilo.v1 import coordinator_pb2 as wire
from medsilo.protos.medsilo.v1 import tensor_pb2
from medsilo.protos.nonces import nonce

SILO = Identity("test", "silo", "north")
OTHER = Identity("test", "silo", "south")
COORDINATOR = Identity("test", "coordinator", "hub")
CERTIFICATE = "ab" * 32

Content = Mapping[Exposure, Mapping[str, int]]
"""Names and lengths (in bytes, a multiple of 4) of tensors by class."""

MODELS: Content = {
    Exposure.MODEL_PARAMETERS_EXTRACTOR: {"body.weight": 4000, "body.bias": 40},
    Exposure.MODEL_PARAMETERS_CLASSIFIER: {"head.weight": 400, "head.bias": 8},
}
MIXTURE: Content = {Exposure.PEER_DERIVED: {"body.weight": 4000, "body.bias": 40, "head.weight": 400, "head.bias": 8}}
MIXED_BODIES: Content = {Exposure.PEER_DERIVED: {"body.weight": 4000, "body.bias": 40}}


def plan(run: str, method: str, rounds: int) -> RunPlan:
    return RunPlan(
        federation="test",
        coordinator=COORDINATOR.name,
        run=run,
        method=MethodPlan(name=method, parameters={}),
        model=ModelPlan(name="any", input_shape=(1, 8, 8), classes=2),
        training=TrainingPlan(),
        rounds=rounds,
        seed=1,
        required=(Exposure.PROTOCOL, Exposure.IDENTITY),
        optional=tuple(exposure for exposure in Exposure if exposure not in (Exposure.PROTOCOL, Exposure.IDENTITY)),
    )


class Recorded:
    """One party's journal. A silo's records are of what it sends and gets, a coordinator's the other way about."""

    def __init__(self, folder: Path, party: Identity = SILO) -> None:
        self.folder = folder
        self.party = party
        self._plans: dict[str, str] = {}
        key, origin = Ed25519PrivateKey.from_private_bytes(bytes(32)), f"medsilo/test/{party.role}/{party.name}"
        self.journal = Journal(folder, key=key, origin=origin)
        self.door = Door(self.journal, identity=party.uri, federation="test", gate=PlanGate(Exposure))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.journal.close()

    def consent(self, *exposures: str, synthetic: bool = True, **changes: Any) -> None:
        consent = Consent(
            coordinator=COORDINATOR.uri,
            methods=("diversifed", "fedavg"),
            exposures=("PROTOCOL", "IDENTITY", *exposures),
            rounds=50,
            expires=date(2030, 1, 1),
        )
        data_sha256 = changes.pop("data_sha256", "ef" * 32)
        content = {"sha256": "cd" * 32, **consent.model_dump(mode="json"), **changes}
        self.door.note(ConsentRecord(consent=content, data="tissue", data_sha256=data_sha256, synthetic=synthetic))

    def run(
        self, name: str, method: str = "diversifed", rounds: int = 3, privacy: Mapping[str, Any] | None = None
    ) -> None:
        promise = None if privacy is None else PrivacyPlan.model_validate(privacy)
        chosen = plan(name, method, rounds).model_copy(update={"privacy": promise})
        self._plans[name] = chosen.sha256.hex()
        self.door.note(RunRecord(run=name, plan_sha256=chosen.sha256.hex(), plan=chosen.model_dump(mode="json")))

    def upload(self, run: str, number: int, content: Content, *, silo: Identity = SILO, attempt: int = 1) -> None:
        parts = [self._part(exposure, tensors) for exposure, tensors in content.items()]
        update = wire.Update(nonce=nonce(), silo=silo.name, round=number, parts=parts)
        messages = [wire.SubmitUpdateRequest(update=update)]
        messages += [wire.SubmitUpdateRequest(chunk=chunk) for chunk in self._chunks(content)]
        self._pass("SubmitUpdate", run, number, messages, silo, attempt, outward=self.party.role == "silo")

    def task(self, run: str, number: int, content: Content, *, silo: Identity = SILO) -> None:
        parts = [self._part(exposure, tensors) for exposure, tensors in content.items()]
        task = wire.Task(nonce=nonce(), kind=wire.TASK_KIND_TRAIN, round=number, parts=parts)
        messages = [wire.GetTaskResponse(task=task)]
        messages += [wire.GetTaskResponse(chunk=chunk) for chunk in self._chunks(content)]
        self._pass("GetTask", run, number, messages, silo, 1, outward=self.party.role == "coordinator")

    def ask(self, *, silo: Identity = SILO) -> None:
        messages = [wire.GetPlanRequest(nonce=nonce(), silo=silo.name, protocol_version=1)]
        self._pass("GetPlan", None, None, messages, silo, 1, outward=self.party.role == "silo")

    def join(self, run: str, *, silo: Identity = SILO, synthetic: bool) -> None:
        messages = [wire.JoinRequest(nonce=nonce(), silo=silo.name, accepted=True, synthetic=synthetic)]
        self._pass("Join", run, None, messages, silo, 1, outward=self.party.role == "silo")

    def farewell(self, run: str) -> None:
        self._pass("Withdraw", run, None, [wire.WithdrawRequest(nonce=nonce())], SILO, 1, outward=True)
        self._pass("Attest", run, None, [wire.AttestRequest(nonce=nonce())], SILO, 1, outward=True)

    def report(self, **options: Any) -> Report:
        if options.pop("signed", True):
            self.journal.checkpoint()
        return build_report(self.folder, self.journal.public_key, party=self.party, **options)

    def _pass(
        self,
        rpc: str,
        run: str | None,
        number: int | None,
        messages: Sequence[Any],
        silo: Identity,
        attempt: int,
        *,
        outward: bool,
    ) -> None:
        peer = COORDINATOR if self.party.role == "silo" else silo
        sha256 = self._plans.get(run or "")
        call = Call(rpc, peer.uri, CERTIFICATE, "test", run=run, plan_sha256=sha256, round=number, attempt=attempt)
        if outward:
            self.door.release(messages, call)
            return
        call.round = None
        for message in messages:
            self.door.admit(message.SerializeToString(), type(message), call)
            call.round = number  # known from the first message on, as in the coordinator

    @staticmethod
    def _part(exposure: Exposure, tensors: Mapping[str, int]) -> tensor_pb2.PartManifest:
        specs = [tensor_pb2.TensorSpec(name=name, shape=[length // 4], dtype="F32") for name, length in tensors.items()]
        return tensor_pb2.PartManifest(exposure_class=exposure.number, tensors=specs)

    @staticmethod
    def _chunks(content: Content) -> list[tensor_pb2.TensorChunk]:
        return [
            tensor_pb2.TensorChunk(nonce=nonce(), **{exposure.chunk_field: bytes(sum(tensors.values()))})
            for exposure, tensors in content.items()
        ]


def ordinary(folder: Path) -> Recorded:
    """A silo's three rounds of DiversiFed on synthetic images."""
    recorded = Recorded(folder)
    recorded.consent("MODEL_PARAMETERS", "PEER_DERIVED")
    recorded.ask()
    recorded.run("spring")
    for number in range(3):
        recorded.task("spring", number, MIXTURE if number else {Exposure.INITIAL_MODEL: {"body.weight": 4000}})
        recorded.upload("spring", number, MODELS)
    recorded.upload("spring", 3, {})
    return recorded
