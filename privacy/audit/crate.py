"""The evidence as an RO-Crate: a folder that says, in terms of W3C PROV, what was done, by whom, and what shows it.

Needs the package ``rocrate`` (the extra ``crate``).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from medsilo.privacy.audit.bundle import open_evidence, sha256_of
from medsilo.privacy.errors import ConfigurationError
from medsilo.privacy.identity.envelope import key_id
from medsilo.privacy.journal.records import (
    KeyRecord,
    KeyRotationRecord,
    MessageRecord,
    PeerKeyRecord,
    Record,
    RunRecord,
    read,
    round_of,
    run_of,
)
from medsilo.privacy.verify.bundle import Header

SCHEMA = "bundle.schema.json"
_PROV = "http://www.w3.org/ns/prov#"
_METADATA = "ro-crate-metadata.json"
_REPORTS = ("report.html", "report.pdf", "report.json")


@dataclass
class _Span:
    """What was exchanged in a run, or in one of its rounds."""

    begun: str
    ended: str
    peers: set[str] = field(default_factory=set)
    sent: dict[str, int] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)

    def take(self, record: Record) -> None:
        self.ended = record.time
        if isinstance(record, MessageRecord):
            self.peers.add(record.peer)
            classes = self.sent if record.direction == "sent" else self.received
            for name, count in record.classes.items():
                classes[name] = classes.get(name, 0) + count

    def describe(self) -> str:
        def told(classes: Mapping[str, int]) -> str:
            return ", ".join(f"{count} bytes of {name}" for name, count in sorted(classes.items())) or "nothing"

        return f"Sent: {told(self.sent)}. Received: {told(self.received)}."


@dataclass
class _Story:
    """What the records tell. ``rounds``: by run, counted from 0. ``keys``: audit keys (hex) by party."""

    party: str
    runs: dict[str, _Span] = field(default_factory=dict)
    rounds: dict[str, dict[int, _Span]] = field(default_factory=dict)
    plans: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    keys: dict[str, list[str]] = field(default_factory=dict)

    def take(self, record: Record) -> None:
        match record:
            case KeyRecord() | KeyRotationRecord():
                self.keys.setdefault(self.party, []).append(record.public_key)
            case PeerKeyRecord():
                self.keys.setdefault(record.peer, []).append(record.public_key)
            case RunRecord():
                self.plans[record.run] = record.plan
        run = run_of(record)
        if run is None:
            return
        time, number = record.time, round_of(record)
        self.runs.setdefault(run, _Span(time, time)).take(record)
        if number is not None:
            self.rounds.setdefault(run, {}).setdefault(number, _Span(time, time)).take(record)


def write_crate(folder: Path, bundle: Path, *, reports: Path | None = None) -> Path:
    """Writes a crate with a bundle, its JSON Schema and the report's files that there are; returns the folder.

    ``reports``: where a report's files may be. Raises ``ConfigurationError`` if ``rocrate`` is not installed, or the
    folder holds something else; ``UnreadableError`` for what is no bundle.
    """
    try:
        crate_class: Any = import_module("rocrate.rocrate").ROCrate
    except ImportError:
        raise ConfigurationError(
            "--ro-crate needs the package rocrate: pip install 'medsilo[crate]' (or leave the option out)"
        ) from None
    if folder.exists() and any(folder.iterdir()) and not (folder / _METADATA).exists():
        raise ConfigurationError(f"{folder}: holds other files; give a new folder for the crate")
    evidence = open_evidence(bundle)
    header = evidence.header
    if header is None:
        raise ConfigurationError(f"{bundle}: a crate is made of a bundle")
    story = _read(header, (read(json.loads(line)) for line in evidence.lines))
    crate: Any = crate_class(version="1.1")
    crate.metadata.extra_terms.update({"prov": _PROV})
    crate.name = f"Evidence of {header.party}"
    crate.description = (
        f"What {header.party} sent and received in the federation {header.federation}: records {header.first} to "
        f"{header.first + header.count - 1} of its journal of {header.size}, which prove themselves."
    )
    agents = _add_agents(crate, story)
    activities = _add_activities(crate, story, agents)
    owner = agents[header.party]
    journal = _entity(
        crate,
        "#journal",
        {
            "@type": ["CreativeWork", "prov:Entity"],
            "name": f"Journal {header.origin}",
            "description": header.checkpoint,
            "prov:wasAttributedTo": owner,
            "prov:wasGeneratedBy": activities,
        },
    )
    with as_file(files("medsilo.privacy.audit") / SCHEMA) as schema:
        described = _add_file(crate, schema, "The bundle's form (JSON Schema)", "application/schema+json")
        proof = {"prov:wasAttributedTo": owner, "prov:wasDerivedFrom": journal}
        crate.mainEntity = _add_file(
            crate, bundle, "Evidence bundle", "application/json", **proof, conformsTo=described
        )
        for path in [reports / name for name in _REPORTS] if reports is not None else []:
            if path.is_file():
                name = f"Report of what left ({path.suffix[1:].upper()})"
                _add_file(crate, path, name, _MEDIA[path.suffix], **proof)
        crate.write(folder)
    return folder


_MEDIA = {".html": "text/html", ".pdf": "application/pdf", ".json": "application/json"}


def _read(header: Header, records: Iterable[Record]) -> _Story:
    story = _Story(header.party)
    for record in records:
        story.take(record)
    if header.public_key is not None:
        story.keys.setdefault(header.party, []).append(header.public_key)
    return story


def _add_file(crate: Any, path: Path, name: str, media: str, **more: Any) -> Any:
    properties = {
        "@type": ["File", "prov:Entity"],
        "name": name,
        "encodingFormat": media,
        "contentSize": str(path.stat().st_size),
        "sha256": sha256_of(path),
        **more,
    }
    return crate.add_file(path, dest_path=path.name, properties=properties)


def _entity(crate: Any, identifier: str, properties: Mapping[str, Any]) -> Any:
    model = import_module("rocrate.model.contextentity").ContextEntity
    return crate.add(model(crate, identifier, properties=dict(properties)))


def _add_agents(crate: Any, story: _Story) -> dict[str, Any]:
    parties = {story.party, *story.keys, *itertools.chain.from_iterable(run.peers for run in story.runs.values())}
    found = {}
    for party in sorted(parties):
        keys = [
            _entity(
                crate,
                f"#key-{key_id(bytes.fromhex(public))}",
                {
                    "@type": "PropertyValue",
                    "name": "Audit key (Ed25519)",
                    "propertyID": "key id: SHA-256 of the public key",
                    "value": key_id(bytes.fromhex(public)),
                    "description": f"public key {public}",
                },
            )
            for public in dict.fromkeys(story.keys.get(party, ()))
        ]
        found[party] = _entity(
            crate,
            party,
            {"@type": ["Organization", "prov:Agent"], "name": party.rpartition("/")[2], "identifier": keys or party},
        )
    return found


def _add_activities(crate: Any, story: _Story, agents: Mapping[str, Any]) -> list[Any]:
    found = []
    for run, whole in story.runs.items():
        plan = story.plans.get(run)
        method = f" (method {plan['method']['name']})" if plan else ""
        activity = _activity(crate, f"#run-{run}", f"Run {run}{method}", whole, story.party, agents)
        found.append(activity)
        for number, span in sorted(story.rounds.get(run, {}).items()):
            name = f"Round {number + 1}" if not plan or number < plan["rounds"] else "End"
            part = _activity(crate, f"#run-{run}-round-{number + 1}", f"{name} of run {run}", span, story.party, agents)
            part["isPartOf"] = activity
            found.append(part)
    return found


def _activity(crate: Any, identifier: str, name: str, span: _Span, party: str, agents: Mapping[str, Any]) -> Any:
    return _entity(
        crate,
        identifier,
        {
            "@type": ["Action", "prov:Activity"],
            "name": name,
            "description": span.describe(),
            "prov:startedAtTime": span.begun,
            "prov:endedAtTime": span.ended,
            "prov:wasAssociatedWith": [agents[party], *(agents[peer] for peer in sorted(span.peers))],
        },
    )
