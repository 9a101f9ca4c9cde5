"""Who may call what: a table, complete, and held."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from medsilo.coordinator.service.service import ALLOWED_ROLE, SERVICE, CoordinatorService
from medsilo.privacy.exposure import SCHEMA_FILES
from medsilo.privacy.identity.identity import ROLES, Identity

RPCS = {
    (service.full_name, method.name)
    for file in SCHEMA_FILES
    for service in file.services_by_name.values()
    for method in service.methods
}


def test_every_rpc_of_every_service_stands_in_the_table_with_a_role() -> None:
    assert {name for service, name in RPCS if service == SERVICE.full_name} == set(ALLOWED_ROLE)
    # Who enrols has no certificate yet, and proves an invitation instead (tests/coordinator/service/test_enrolment.py).
    assert {found for found in RPCS if found[0] != SERVICE.full_name} == {("medsilo.v1.EnrolmentService", "Enrol")}
    assert set(ALLOWED_ROLE.values()) <= set(ROLES)


class _AbortedError(Exception):
    pass


class _Context:
    def is_active(self) -> bool:
        return True

    def peer(self) -> str:
        return "ipv4:10.0.0.1:5"

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_pem_cert": [b"pem"]}

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.told = (code, details)
        raise _AbortedError


@pytest.mark.parametrize("rpc", sorted(ALLOWED_ROLE))
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("federation", ["test", "another"])
def test_an_rpc_is_for_its_role_and_federation_alone_and_looks_at_the_certificate_first(
    rpc: str, role: Any, federation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medsilo.coordinator.service.service.fingerprint", lambda _: "ab" * 32)
    plan = SimpleNamespace(run="r", sha256=bytes(32), method=SimpleNamespace(name="fedavg"))
    reached: list[str] = []
    service = CoordinatorService(
        SimpleNamespace(federation="test", message_seconds=300, state=Path("state")),  # type: ignore[arg-type]
        SimpleNamespace(plan=plan),  # type: ignore[arg-type]
        SimpleNamespace(refuse=lambda *_: None, check_serving=lambda: None),  # type: ignore[arg-type]
        SimpleNamespace(journal=SimpleNamespace(public_key=b""), ended=lambda _: None),  # type: ignore[arg-type]
        SimpleNamespace(identify=lambda _: Identity(federation, role, "a")),  # type: ignore[arg-type]
    )

    def handle(*_: Any) -> bytes:
        reached.append(rpc)
        return b""

    context = _Context()
    guarded = service._guard(rpc, handle)
    if role == ALLOWED_ROLE[rpc] and federation == "test":
        guarded(b"", context)  # type: ignore[arg-type]
        assert reached == [rpc]
    else:
        with pytest.raises(_AbortedError):
            guarded(b"", context)  # type: ignore[arg-type]
        assert reached == []
        assert context.told[0] == grpc.StatusCode.PERMISSION_DENIED
