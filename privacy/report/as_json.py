"""A report for machines: one JSON document, whose shape ``docs/report.md`` describes."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict
from io import BytesIO
from typing import Any

from medsilo.privacy.exposure import Exposure
from medsilo.privacy.journal.records import ApprovalRecord, WithdrawalRecord, content
from medsilo.privacy.report.model import Flow, Report, Run
from medsilo.privacy.report.words import TELLING

FORM = "medsilo-report"
VERSION = 1
_PLACE = f"rounds-{secrets.token_hex(16)}-"  # which no text of a report can hold
_OF_EVERY_RECORD = ("v", "index", "federation", "self")


def as_json(report: Report) -> bytes:
    """The report's document. A run may have a hundred thousand rounds: their bytes are written one flow after the
    other, never all of them as objects."""
    rounds: dict[str, Mapping[int, int]] = {}
    telling = [exposure for exposure in TELLING if any(exposure in run.left for run in report.runs)]
    document: dict[str, Any] = {
        "form": FORM,
        "version": VERSION,
        "party": {
            "identity": report.party.uri,
            "role": report.party.role,
            "federation": report.party.federation,
            "audit_key_sha256": report.key_sha256,
        },
        "record": {
            "records": report.records,
            "root_sha256": report.root_sha256,
            "first_time": report.first_time,
            "last_time": report.last_time,
        },
        "verification": asdict(report.verification),
        "synthetic": report.synthetic,
        "limited_to_run": report.limited_to,
        "other_runs": report.other_runs,
        "other_runs_without_privacy": dict(report.plain_elsewhere),
        "bytes_left": report.bytes_left,
        "runs": [_run(report, run, rounds) for run in report.runs],
        "peers": [asdict(peer) for peer in report.peers.values()],
        "witnesses": {name: {"records": size, "at": at} for name, (size, at) in report.witnesses.items()},
        "foreign": dict(report.foreign),
        "consents": [{"time": record["time"], **record["consent"]} for record in report.consents],
        "decisions": [_decision(record) for record in report.decisions],
        "outside_consent": {exposure.value: count for exposure, count in report.outside_consent.items()},
        "withdrawn": report.withdrawn and {"in_force_from": report.withdrawn[0], "at": report.withdrawn[1]},
        "refusals": [asdict(refusal) for refusal in report.refusals],
        "refusals_unlisted": report.refusals_unlisted,
        "privacy_loss": _loss(report),
        "egress": [
            {
                **asdict(one),
                "ways": [{**asdict(way), "overhead": way.overhead} for way in one.ways],
                **{name: getattr(one, name) for name in ("sent", "attributed", "overhead", "allowance", "accounted")},
            }
            for one in report.egress
        ],
        "uncounted": report.uncounted if report.egress else None,
        "rehearsals": [rehearsal.model_dump(mode="json") for rehearsal in report.rehearsals],
        "risks": {exposure.value: report.risk(exposure) for exposure in telling},
    }
    if not report.of_silo:
        document["hospitals"] = _by_name(report.hospitals())
        document["methods"] = _by_name(report.methods())
        document["answers"] = [asdict(answer) for answer in report.answers]
        document["accuracies"] = [asdict(accuracy) for accuracy in report.accuracies]
        document["attendance"] = [asdict(attendance) for attendance in report.attendance]
    written = BytesIO()
    for piece in re.split(f'"({_PLACE}[0-9]+)"', json.dumps(document, indent=2, ensure_ascii=False)):
        if (of := rounds.get(piece)) is None:
            written.write(piece.encode())
        else:
            by_round = ", ".join(f'{{"round": {number + 1}, "bytes": {of[number]}}}' for number in sorted(of))
            written.write(f"[{by_round}]".encode())
    return written.getvalue()


def _run(report: Report, run: Run, rounds: dict[str, Mapping[int, int]]) -> dict[str, Any]:
    return {
        "run": run.name,
        "method": run.method,
        "rounds": run.rounds,
        "plan_sha256": run.plan_sha256,
        "started_from": run.start,
        "what_left": run.statement,
        "masked_sums": [{"round": n + 1, "silos": k} for n, k in sorted(run.masked_sums.items())],
        "mixtures": [
            {
                "round": number + 1,
                "models": one.models,
                "isolation": one.isolation,
                "isolation_over_rounds": one.isolation_over_rounds,
                "rounds": one.rounds,
                "mix_sha256": one.mix_sha256,
            }
            for number, one in sorted(run.helped.found.items())
        ],
        "mixtures_in_words": run.helped.words,
        "consents_sha256": [one["consent"].get("sha256") for one in report.consents if run.name in one["runs"]],
        "bytes_left": run.bytes_left,
        "left": [_flow(flow, rounds) for flow in report.left if flow.run == run.name],
        "came_back": [_flow(flow, rounds) for flow in report.came_back if flow.run == run.name],
    }


def _flow(flow: Flow, rounds: dict[str, Mapping[int, int]]) -> dict[str, Any]:
    """Rounds count from 1. ``rounds``: is given the flow's, by what stands in their place."""
    place = f"{_PLACE}{len(rounds)}"
    rounds[place] = flow.rounds
    return {
        "peer": flow.peer,
        "exposure": flow.exposure.value,
        "bytes": flow.bytes,
        "messages": flow.messages,
        "per_round": place,
        "outside_rounds": flow.bytes - sum(flow.rounds.values()),
        "fields": flow.fields,
        "tensors": [
            {
                "name": name,
                "shape": tensor.shape,
                "dtype": tensor.dtype,
                "first_round": None if tensor.first_round is None else tensor.first_round + 1,
                "last_round": None if tensor.last_round is None else tensor.last_round + 1,
            }
            for name, tensor in flow.tensors.items()
        ],
    }


def _decision(record: ApprovalRecord | WithdrawalRecord) -> dict[str, Any]:
    return {name: value for name, value in content(record).items() if name not in _OF_EVERY_RECORD}


def _loss(report: Report) -> dict[str, Any]:
    return {
        # One number only where it is the whole truth.
        "epsilon": report.privacy[0].most.epsilon
        if len(report.privacy) == 1 and not report.without_privacy() and not report.plain_elsewhere
        else None,
        "statement": " ".join(report.privacy_statements()),
        "accounts": [{**asdict(loss), "left": loss.left} for loss in report.privacy],
    }


def _by_name(table: Mapping[str, Mapping[Exposure, int]]) -> dict[str, dict[str, int]]:
    return {name: {exposure.value: count for exposure, count in row.items()} for name, row in table.items()}
