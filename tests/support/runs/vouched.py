"""Whether two parties have put their signatures to all that went between them, read from their journals alone."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

from tests.support.runs.federation import Federation


def assert_vouched(one: Federation, silo: str) -> None:
    """Every message that arrived has its sender's signature and its receiver's receipt, each for exactly its bytes.

    Of the hospital's last call only the request has a receipt: nothing follows in which more could be said.
    """
    there = f"spiffe://test/silo/{silo}"
    of_silo = one.messages(silo, "sent"), one.messages(silo, "received")
    of_coordinator = tuple(
        [r for r in one.messages("coordinator", direction) if r["peer"] == there] for direction in ("sent", "received")
    )
    last = of_silo[0][-1]["call_id"]
    for own, other, by_silo in ((of_silo, of_coordinator, True), (of_coordinator, of_silo, False)):
        sent = digests(own[0])
        receipts, signatures = words(own[1], "received"), words(other[1], "sent")
        for call_id, arrived in digests(other[1]).items():
            assert arrived == sent[call_id][: len(arrived)]
            if call_id != last or by_silo:
                check(receipts.get(call_id, []), sent[call_id], len(arrived), f"the receipt for call {call_id}")
            if call_id != last:
                check(signatures.get(call_id, []), sent[call_id], len(arrived), f"the signature for call {call_id}")


def digests(records: list[dict[str, Any]]) -> dict[str, list[bytes]]:
    """SHA-256 of each call's messages, in their order."""
    found: dict[str, list[bytes]] = {}
    for record in records:
        found.setdefault(record["call_id"], []).append(bytes.fromhex(record["sha256"]))
    return found


def words(records: list[dict[str, Any]], direction: str) -> dict[str, list[dict[str, Any]]]:
    """What the attestations in these records say of messages in that direction, by call."""
    found: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        if "attestation" in record:
            for exchange in said(record["attestation"])["exchanges"]:
                if exchange["direction"] == direction:
                    found.setdefault(exchange["call_id"], []).append(exchange)
    return found


def said(envelope: dict[str, Any]) -> dict[str, Any]:
    """What a signed document in a record says."""
    document: dict[str, Any] = json.loads(base64.b64decode(envelope["payload"]))
    return document


def check(given: list[dict[str, Any]], sent: list[bytes], arrived: int, what: str) -> None:
    for exchange in given:
        digest = hashlib.sha256(b"".join(sent[: exchange["messages"]])).hexdigest()
        assert exchange["sha256"] == digest, f"{what} is for other bytes"
    counts = [exchange["messages"] for exchange in given]
    assert max(counts, default=0) >= arrived, f"{what} is missing: {arrived} messages arrived, it is for {counts}"
