"""What must be true of a run of daemons, whatever happened in it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from safetensors.torch import load_file

from medsilo.coordinator.config import CoordinatorConfig
from medsilo.privacy.audit.verification import verify_evidence
from medsilo.privacy.identity.keys import load_audit_key
from tests.support.network.proxy import Proxy
from tests.support.network.wire_reader import read_streams
from tests.support.runs.federation import Federation
from tests.support.runs.vouched import assert_vouched


def assert_journals_sound(one: Federation, *parties: str) -> None:
    """``parties``: whose; all of them by default."""
    for party in parties or ("coordinator", *one.silos):
        key = load_audit_key(one.keys(party) / "audit.key").public_key().public_bytes_raw()
        found = verify_evidence(one.folder / "state" / party / "journal", key=key)
        assert found.sound, found.problem
        assert found.records == found.signed > 0


def assert_both_sides_agree(one: Federation) -> None:
    """What either side recorded as sent, the other recorded as received: same bytes, same number of times."""

    def tell(records: list[dict[str, Any]]) -> Counter[tuple[str, int]]:
        return Counter((record["sha256"], record["length"]) for record in records)

    up = sum((tell(one.messages(name, "sent")) for name in one.silos), Counter())
    down = sum((tell(one.messages(name, "received")) for name in one.silos), Counter())
    assert up == tell(one.messages("coordinator", "received"))
    assert down == tell(one.messages("coordinator", "sent"))


def assert_models_are(one: Federation, expected: dict[str, dict[str, torch.Tensor]]) -> None:
    for name in one.silos:
        model = load_file(one.run_folder(name) / "model.safetensors")
        assert set(model) == set(expected[name])
        for key, tensor in model.items():
            assert torch.equal(tensor, expected[name][key]), f"{name}: {key} differs"


def assert_models_are_nearly(
    one: Federation, expected: dict[str, dict[str, torch.Tensor]], *, by: float = 1e-4
) -> None:
    """Under masks: sums are of multiples of 2^-32, and from there Adam, whose steps do not become smaller with the
    gradient, makes up to a few 10^-6; a tenth of one of its steps is 10^-4. Masks that do not cancel make 10^9."""
    for name in one.silos:
        for key, tensor in load_file(one.run_folder(name) / "model.safetensors").items():
            assert torch.allclose(tensor, expected[name][key], rtol=0, atol=by), f"{name}: {key}"


def assert_signed(one: Federation) -> None:
    for name in one.silos:
        assert_vouched(one, name)


def assert_every_round_counted_once(one: Federation) -> None:
    status = one.status()
    rounds = CoordinatorConfig.read(one.folder / "coordinator.yaml").run.exchanges
    assert status["finished"]
    assert [silo["rounds_delivered"] for silo in status["silos"]] == [rounds] * len(one.silos)


Call = list[tuple[int, str]]


def calls(one: Federation, party: str, direction: str, *, peer: str | None = None) -> dict[str, Call]:
    """A party's calls in the order of their records: length and SHA-256 of each message, by call id."""
    found: dict[str, Call] = {}
    for record in one.messages(party, direction):
        if peer is None or record["peer"].endswith(f"/{peer}"):
            messages = found.setdefault(record["call_id"], [])
            assert record["frame"] == len(messages)
            messages.append((record["length"], record["sha256"]))
    return found


def assert_journals_have_what_was_on_the_wire(one: Federation, name: str, proxy: Proxy) -> None:
    """Every byte belongs to an HTTP/2 frame; the messages are those of the silo's journal and of the coordinator's, in
    their order."""
    for direction, others, side in (("sent", "received", "up"), ("received", "sent", "down")):
        on_the_wire = [
            messages
            for connection in proxy.connections
            for messages in read_streams(bytes(getattr(connection, side)), from_client=side == "up")
        ]
        assert on_the_wire == list(calls(one, name, direction).values())
        theirs = calls(one, "coordinator", others)
        assert on_the_wire == [theirs[call_id] for call_id in calls(one, name, direction)]


def assert_nothing_lost(one: Federation) -> None:
    assert_every_round_counted_once(one)
    assert_journals_sound(one)
    assert_models_are(one, one.simulate())
    assert_signed(one)
