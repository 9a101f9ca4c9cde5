"""Runs as a CycloneDX bill of materials: models, the data they were trained on, and what that follows from.

Needs the package ``cyclonedx-python-lib`` (the extra ``bom``), which has no model cards yet: what a card would say
stands in properties, each beside the records that prove it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from medsilo.privacy.audit.bundle import sha256_of
from medsilo.privacy.dossier.draft import Draft, Topic
from medsilo.privacy.errors import ConfigurationError
from medsilo.privacy.report.model import BEFORE, Run

_SPACE = uuid.UUID("7a0c3d2e-41a3-5e0f-9a43-1d0a6f0e9b11")
"""Of the names from which serial numbers are made."""
_NEVER = datetime(1970, 1, 1, tzinfo=UTC)


def make_bom(draft: Draft, models: Mapping[str, Path], *, version: str) -> bytes:
    """CycloneDX 1.6, as JSON. The same record gives the same bytes.

    ``models``: the file that each run left. ``version``: Medsilo's own. Raises ``ConfigurationError`` if the package is
    not installed.
    """
    try:
        model: Any = import_module("cyclonedx.model")
        component: Any = import_module("cyclonedx.model.component")
        bom_class: Any = import_module("cyclonedx.model.bom").Bom
        output: Any = import_module("cyclonedx.output.json")
    except ImportError:
        raise ConfigurationError(
            "--bom needs the package cyclonedx-python-lib: pip install 'medsilo[bom]' (or leave the option out)"
        ) from None
    kinds = component.ComponentType

    def part(kind: Any, name: str, of: str, facts: Iterator[tuple[str, str]], file: Path | None = None) -> Any:
        digests = [model.HashType(alg=model.HashAlgorithm.SHA_256, content=sha256_of(file))] if file else []
        properties = [model.Property(name=f"medsilo:{key}", value=value) for key, value in facts]
        return component.Component(
            type=kind, name=name, version=of, bom_ref=f"{kind.value}:{name}:{of}", hashes=digests, properties=properties
        )

    report = draft.report
    bom = bom_class(serial_number=uuid.uuid5(_SPACE, report.root_sha256))
    bom.metadata.timestamp = datetime.fromisoformat(report.last_time) if report.last_time else _NEVER
    bom.metadata.tools.components.add(part(kinds.APPLICATION, "medsilo", version, iter(())))
    whole = {"party": report.party.uri, "record_root_sha256": report.root_sha256, "records": str(report.records)}
    for key, value in whole.items():
        bom.metadata.properties.add(model.Property(name=f"medsilo:{key}", value=value))
    data = [part(kinds.DATA, "training-images", of, _of_data(draft, of)) for of in draft.data_sets]
    for one in data:
        bom.components.add(one)
    for run in report.runs:
        if run.name == BEFORE or run.plan is None or not draft.has("run", run.name):
            continue
        file = models.get(run.name)
        made = part(
            kinds.MACHINE_LEARNING_MODEL, run.plan["model"]["name"], run.name, _of_model(draft, run, file), file
        )
        bom.components.add(made)
        bom.register_dependency(made, data)
    return str(output.JsonV1Dot6(bom).output_as_string(indent=2)).encode()


def _of_model(draft: Draft, run: Run, file: Path | None) -> Iterator[tuple[str, str]]:
    yield "method", str(run.method)
    yield "plan_sha256", str(run.plan_sha256)
    yield "plan_citation", _citation(draft, ("run", run.name))
    if draft.has("sent", run.name):
        yield "what_left", f"{run.statement}; {run.bytes_left} bytes"
        yield "what_left_citation", _citation(draft, ("sent", run.name))
    if run.start is not None:
        yield "started_from", run.start
    if file is not None:
        yield "file", "the hash is of the file in the hospital's state folder, which is in no record"


def _of_data(draft: Draft, digest: str) -> Iterator[tuple[str, str]]:
    yield "data_sha256", digest
    yield "data_citation", _citation(draft, ("data", digest))


def _citation(draft: Draft, topic: Topic) -> str:
    return json.dumps(draft.citation(topic).to_json())
