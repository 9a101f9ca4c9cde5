"""What is refused, with which words, and that nothing comes of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch

from medsilo.algorithms.tensors import Part
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.identity.authority import create_authority, issue
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.identity.keys import create_keys
from medsilo.protos.medsilo.v1 import coordinator_pb2 as wire
from medsilo.protos.nonces import nonce
from tests.support.network.raw_client import RawClient
from tests.support.runs.federation import Federation
from tests.support.runs.refusals import delivered, refusal, stored_uploads

Make = Callable[..., Federation]


@pytest.fixture
def running(federation: Make) -> Federation:
    """A coordinator whose first round is open for three raw hospitals."""
    one = federation()
    one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    for name in one.silos:
        RawClient(one, name).join()
    one.wait_to_say("coordinator", "round 1 of 3 is open")
    return one


def test_hand_made_messages_are_refused_in_words_and_nothing_is_stored(running: Federation) -> None:
    """One running coordinator, every way of sending it what it must not take."""
    client = RawClient(running, "hospital1")
    wrong_shape = client.model(hidden2__bias=np.zeros(85, np.float32))
    bad = np.zeros(84, np.float32)
    bad[3] = np.nan
    extra = {**client.model(), Exposure.LABEL_COUNTS: Part.of({"counts": torch.zeros(9, dtype=torch.int64)})}
    cases: Mapping[str, tuple[Callable[[], object], grpc.StatusCode, tuple[str, ...]]] = {
        "wrong shape": (
            lambda: client.submit(wrong_shape),
            grpc.StatusCode.INVALID_ARGUMENT,
            ("hidden2.bias", "[85]", "[84]"),
        ),
        "NaN": (
            lambda: client.submit(client.model(hidden2__bias=bad)),
            grpc.StatusCode.INVALID_ARGUMENT,
            ("NaN", "MODEL_PARAMETERS_EXTRACTOR"),
        ),
        "a class that the method does not take": (
            lambda: client.submit(extra, cut=1),
            grpc.StatusCode.INVALID_ARGUMENT,
            ("LABEL_COUNTS", "not asked for"),
        ),
        "a round to come": (
            lambda: client.submit(client.model(), round_number=7),
            grpc.StatusCode.INVALID_ARGUMENT,
            ("round 7", "round 0"),
        ),
        "truncated": (
            lambda: client.submit(client.model(), cut=2),
            grpc.StatusCode.INVALID_ARGUMENT,
            ("bytes short", "MODEL_PARAMETERS_CLASSIFIER"),
        ),
        "an unknown field": (
            lambda: client.unary(
                "GetPlan",
                wire.GetPlanRequest(nonce=nonce(), silo="hospital1", protocol_version=1).SerializeToString()
                + bytes([0x9A, 0x06, 2, 104, 105]),
            ),
            grpc.StatusCode.INVALID_ARGUMENT,
            ("unknown field 99",),
        ),
        "no nonce": (
            lambda: client.unary(
                "GetPlan", wire.GetPlanRequest(silo="hospital1", protocol_version=1).SerializeToString()
            ),
            grpc.StatusCode.INVALID_ARGUMENT,
            ("nonce",),
        ),
        "bytes that are no message": (
            lambda: client.unary("Join", b"\xff\xff\xff\xff"),
            grpc.StatusCode.INVALID_ARGUMENT,
            ("Join",),
        ),
        "hospital 2's certificate claiming to be hospital 3": (
            RawClient(running, "hospital2", claims="hospital3").get_plan,
            grpc.StatusCode.PERMISSION_DENIED,
            ("certificate says hospital2", "message says hospital3"),
        ),
    }
    for what, (action, code, words) in cases.items():
        found, details = refusal(action)
        assert found == code, f"{what}: {found} {details}"
        for word in words:
            assert word in details, f"{what}: {details}"
    assert delivered(running) == 0
    assert stored_uploads(running) == []
    assert len(running.status()["refusals"]) == len(cases)
    refused = [record for record in running.records("coordinator") if record["kind"] == "refusal"]
    assert any("unknown field 99" in record["reason"] for record in refused)


def test_a_repeated_update_gets_the_first_receipt_and_a_past_round_is_over(running: Federation) -> None:
    clients = [RawClient(running, name) for name in running.silos]
    first = clients[0].submit(clients[0].model())
    again = clients[0].submit(clients[0].model())
    assert not first.repeated
    assert again.repeated
    assert again.first == first.attestation
    assert delivered(running) == 1
    for client in clients[1:]:
        client.submit(client.model())
    running.wait_to_say("coordinator", "round 2 of 3 is open")
    assert clients[0].submit(clients[0].model()).first == first.attestation, "of a past round that counted"


def test_an_update_for_a_round_that_ended_without_it_is_refused(federation: Make) -> None:
    one = federation(run={"quorum": 2, "deadline_minutes": 0})
    one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    clients = [RawClient(one, name) for name in one.silos]
    for client in clients:
        client.join()
    for client in clients[:2]:
        client.submit(client.model())
    one.wait_to_say("coordinator", "late: hospital3")
    code, details = refusal(lambda: clients[2].submit(clients[2].model()))
    assert code == grpc.StatusCode.ABORTED
    assert "round 0 has ended without hospital3" in details
    assert not [path for path in stored_uploads(one) if "hospital3" in path.name]


def test_certificates_that_tls_must_not_let_in(running: Federation, tmp_path: Path) -> None:
    create_authority(tmp_path / "ca", "test")
    identity = Identity("test", "silo", "hospital1")
    stranger = create_keys(tmp_path / "stranger", identity)
    issue(tmp_path / "ca", "hospital1", stranger.request, tmp_path / "stranger" / "tls.pem")
    expired = create_keys(tmp_path / "expired", identity)
    issue(running.folder / "ca", "hospital1", expired.request, tmp_path / "expired" / "tls.pem", days=0)
    for keys in ("stranger", "expired"):
        code, _ = refusal(RawClient(running, "hospital1", keys=tmp_path / keys).get_plan)
        assert code == grpc.StatusCode.UNAVAILABLE
    nobody = grpc.secure_channel(
        f"127.0.0.1:{running.port}",
        grpc.ssl_channel_credentials((running.keys("hospital1") / "ca.pem").read_bytes()),
        [("grpc.ssl_target_name_override", "coordinator.coordinator.test")],
    )
    code, _ = refusal(lambda: nobody.unary_unary("/medsilo.v1.CoordinatorService/GetPlan")(b"", timeout=20))
    assert code == grpc.StatusCode.UNAVAILABLE
    assert not [r for r in running.records("coordinator") if r["kind"] == "message" and r["rpc"] == "GetPlan"]


def test_what_is_wrong_at_the_silo_is_said_before_anything_leaves(federation: Make, tmp_path: Path) -> None:
    """Each with its exit code and its words; the address is one where nobody listens, and nobody is called."""
    one = federation()
    keys = one.keys("hospital1")
    create_authority(tmp_path / "ca", "test")

    def attempt(code: int, *words: str) -> None:
        said = one.command("silo", "train", "--config", "hospital1.yaml", expect=code)
        for word in words:
            assert word in said.replace("\n", " "), said

    one.write_silo("hospital1", shard="nowhere.npz")
    attempt(3, "nowhere.npz")
    one.write_silo("hospital1", shrad="hospital1.npz")
    attempt(2, "hospital1.yaml", "shrad", "did you mean `shard`")
    one.write_silo("hospital1", consent=None)
    attempt(4, "PROTOCOL", "IDENTITY", "spiffe://test/coordinator/coordinator")
    one.write_silo("hospital1")
    one.write_consent("hospital1", expires="2020-01-01")
    attempt(4, "ended with 2020-01-01")
    one.write_consent("hospital1")

    original = (keys / "tls.pem").read_bytes()
    issue(tmp_path / "ca", "hospital1", keys / "tls.csr", keys / "tls.pem")
    attempt(5, "tls.pem", "issued by another CA")
    issue(one.folder / "ca", "hospital1", keys / "tls.csr", keys / "tls.pem", days=0)
    attempt(5, "tls.pem", "expired on", "coordinator ca issue")
    shutil.copy(one.keys("hospital2") / "tls.pem", keys / "tls.pem")
    attempt(5, "tls.pem", "not the key")
    shutil.copy(one.keys("hospital2") / "tls.key", keys / "tls.key")
    attempt(5, "spiffe://test/silo/hospital2", "spiffe://test/silo/hospital1")
    (keys / "tls.pem").unlink()
    attempt(5, "tls.pem", "there is no such file", "silo keys")
    (keys / "tls.pem").write_bytes(original)
    (keys / "tls.key").chmod(0o644)
    attempt(5, "tls.key", "chmod 600")
    assert one.records("hospital1") == []


def test_a_plan_outside_the_consent_is_declined_and_the_operator_sees_what_is_missing(federation: Make) -> None:
    one = federation()
    one.write_consent("hospital1", methods=["fedavg"], exposures=["PROTOCOL", "IDENTITY"], rounds=2)
    one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    said = one.command("silo", "train", "--config", "hospital1.yaml", expect=4)
    for word in (
        "method diversifed",
        "MODEL_PARAMETERS_EXTRACTOR",
        "MODEL_PARAMETERS_CLASSIFIER",
        "PEER_DERIVED",
        "3 rounds",
    ):
        assert word in said, said
    assert {name for record in one.messages("hospital1", "sent") for name in record["classes"]} == {
        "PROTOCOL",
        "IDENTITY",
    }
    assert [r for r in one.records("hospital1") if r["kind"] == "refusal"]
    (hospital,) = (silo for silo in one.status()["silos"] if silo["silo"] == "hospital1")
    assert hospital["state"] == "declined"
    assert hospital["missing"] == [
        "method diversifed (or its training)",
        "MODEL_PARAMETERS_EXTRACTOR",
        "MODEL_PARAMETERS_CLASSIFIER",
        "PEER_DERIVED",
        "3 rounds",
    ]


def test_a_run_that_is_only_too_long_is_declined_with_that_reason(federation: Make) -> None:
    one = federation()
    one.write_consent("hospital1", rounds=2)
    one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    assert "3 rounds" in one.command("silo", "train", "--config", "hospital1.yaml", expect=4)
    (hospital,) = (silo for silo in one.status()["silos"] if silo["silo"] == "hospital1")
    assert (hospital["state"], hospital["missing"]) == ("declined", ["3 rounds"])


def test_a_hospital_that_the_run_does_not_name_is_told_so(federation: Make) -> None:
    one = federation(coordinator={"silos": ["hospital1", "hospital2", "hospital4"]})
    one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    said = one.command("silo", "train", "--config", "hospital3.yaml", expect=5)
    assert "hospital3 is not one of this run's hospitals" in said


def test_a_coordinator_of_another_name_is_not_spoken_to(federation: Make) -> None:
    """Whoever answers at the address must show the certificate of the coordinator that the silo names."""
    one = federation()
    one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    one.write_silo("hospital1", coordinator={"address": f"127.0.0.1:{one.port}", "name": "another"})
    one.write_consent("hospital1", coordinator="spiffe://test/coordinator/another")
    said = one.command("silo", "train", "--config", "hospital1.yaml", expect=5)
    assert "cannot show a valid certificate of spiffe://test/coordinator/another" in said.replace("\n", " ")
