"""``silo inspect``: what would leave in the first round, message by message, without sending anything."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError

from algorithms.datasets import load_npz
from algorithms.method import LOCAL_METRICS
from algorithms.models import build, state_of
from algorithms.registry import make
from algorithms.tensors import Part, Payload
from algorithms.transfer import CHUNK, chunk_message, manifest
from privacy.configuration import explain
from privacy.consent import ConsentFile, Missing
from privacy.door import NONCE_BYTES
from privacy.errors import ConfigurationError
from privacy.exposure import Exposure, attribute, field_exposure
from privacy.plan import RunPlan
from protos.medsilo.v1 import coordinator_pb2 as wire
from silo.config import SiloConfig
from silo.training import LocalSite
from silo.uplink import WAIT_SECONDS

_UPDATE = wire.SubmitUpdateRequest.DESCRIPTOR.full_name


@dataclass(frozen=True)
class Leaving:
    """One kind of content of a round's update. ``leaves`` is whether the consent lets it out."""

    exposure: Exposure
    tensors: tuple[tuple[str, tuple[int, ...], str], ...]
    bytes: int
    fields: dict[str, int]
    leaves: bool


@dataclass(frozen=True)
class Inspection:
    """What a silo would send in the first round, and whether its consent covers the run.

    ``asking``: bytes of one request for a task; a silo asks at least once a round, and again while it waits.
    ``other_rounds``: classes that do not leave in the first round but, as the method's phases have it, in another.
    """

    plan: RunPlan
    messages: int
    asking: int
    content: tuple[Leaving, ...]
    missing: Missing
    other_rounds: tuple[Exposure, ...]

    @property
    def total(self) -> int:
        """Bytes of one round's update, gRPC's own framing apart."""
        return sum(item.bytes for item in self.content if item.leaves)


def read_plan(path: Path) -> RunPlan:
    """A plan as ``coordinator plan`` prints it; raises ``ConfigurationError`` naming what is wrong with the file."""
    try:
        return RunPlan.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigurationError(f"{path}: there is no such file") from None
    except ValidationError as error:
        raise ConfigurationError("\n".join(f"{path}: {line}" for line in explain(error, RunPlan))) from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: is not a plan ({error}); make one with `coordinator plan`") from None


def known_plan(config: SiloConfig) -> RunPlan:
    """The plan that this silo saw last; raises ``ConfigurationError`` if it has seen none."""
    seen = sorted(config.runs.glob("*/plan.json"), key=lambda path: path.stat().st_mtime)
    if not seen:
        raise ConfigurationError(
            "this silo has not seen a plan yet; ask the coordinator's operator for the output of `coordinator plan` "
            "and give it with --plan"
        )
    return read_plan(seen[-1])


def inspect(config: SiloConfig, plan: RunPlan) -> Inspection:
    """Builds a round's update exactly as training would, from the starting model, and attributes its bytes.

    What is left out are the signed receipts in its header, whose length depends on what there is to acknowledge.
    """
    consent = ConsentFile.read(config.consent)
    dataset = load_npz(config.shard)
    model = build(plan.model, seed=plan.seed, trusted=config.trusted_models)
    site = LocalSite(config.name, dataset, model, plan, device=torch.device("cpu"))
    method = make(plan.method.name, plan.method.parameters)
    half = method.silo_half(site)
    half.begin(state_of(model))
    half.rehearse()
    payload = dict(half.upload())
    if Exposure.LOCAL_METRICS in set(plan.optional) & consent.consent.classes:
        payload[Exposure.LOCAL_METRICS] = Part.of({spec.name: torch.zeros(()) for spec in LOCAL_METRICS})
    missing = consent.missing_for(plan)
    fields: dict[str, int] = {}
    classes: dict[Exposure, int] = {}
    messages = 0
    for message in _messages(config.name, plan, payload):
        attribution = attribute(message.SerializeToString(), message.DESCRIPTOR)
        messages += 1
        for field, count in attribution.fields.items():
            fields[field] = fields.get(field, 0) + count
        for exposure, count in attribution.classes.items():
            classes[exposure] = classes.get(exposure, 0) + count
    allowed = consent.consent.classes
    content = tuple(
        Leaving(
            exposure,
            tuple((s.name, s.shape, s.dtype) for s in payload[exposure].specs) if exposure in payload else (),
            count,
            {name: size for name, size in fields.items() if field_exposure(_UPDATE, name) == exposure},
            exposure in allowed and not missing,
        )
        for exposure, count in sorted(classes.items(), key=lambda item: list(Exposure).index(item[0]))
    )
    asking = wire.GetTaskRequest(
        nonce=bytes(NONCE_BYTES),
        silo=config.name,
        plan_sha256=plan.sha256,
        wait_seconds=WAIT_SECONDS,
        holds_model=True,
    )
    other_rounds = tuple(exposure for exposure in plan.required if exposure in method.uploads - set(classes))
    return Inspection(plan, messages, asking.ByteSize(), content, missing, other_rounds)


def _messages(silo: str, plan: RunPlan, payload: Payload) -> Iterable[wire.SubmitUpdateRequest]:
    blank = bytes(NONCE_BYTES)
    yield wire.SubmitUpdateRequest(
        update=wire.Update(nonce=blank, silo=silo, plan_sha256=plan.sha256, parts=manifest(payload))
    )
    for exposure, part in payload.items():
        for data in part.chunks(CHUNK):
            yield chunk_message(wire.SubmitUpdateRequest, exposure, data, blank)
