"""The words of an error reach a silo only if they are about that silo and its message."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from medsilo.coordinator.service.service import BusyError, CoordinatorService
from medsilo.privacy.errors import (
    ConfigurationError,
    ConsentError,
    DataError,
    IdentityError,
    JournalError,
    LateError,
    RefusedError,
    StoreError,
)

SECRET = "/srv/state/hospital7: connection to db.example:5432 refused"


class Aborted(Exception):  # noqa: N818 what gRPC's own abort does
    pass


class Context:
    """As much of a call's context as turning away needs."""

    def __init__(self) -> None:
        self.told: tuple[grpc.StatusCode, str] | None = None

    def is_active(self) -> bool:
        return True

    def peer(self) -> str:
        return "ipv4:10.0.0.1:5"

    def auth_context(self) -> dict[str, Any]:
        return {}

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.told = (code, details)
        raise Aborted


def answer(error: Exception, *, store_fails: bool = False) -> tuple[grpc.StatusCode, str]:
    def refuse(*_: str) -> None:
        if store_fails:
            raise ConfigurationError(SECRET)

    plan = SimpleNamespace(run="r", sha256=bytes(32), method=SimpleNamespace(name="fedavg"))
    service = CoordinatorService(
        SimpleNamespace(federation="test", message_seconds=300, state=Path("state")),  # type: ignore[arg-type]
        SimpleNamespace(plan=plan, fail=lambda _: None),  # type: ignore[arg-type]
        SimpleNamespace(refuse=refuse, check_serving=lambda: None),  # type: ignore[arg-type]
        SimpleNamespace(journal=SimpleNamespace(public_key=b""), ended=lambda _: None),  # type: ignore[arg-type]
        None,
    )

    def handle(*_: Any) -> bytes:
        raise error

    context = Context()
    with pytest.raises(Aborted):
        service._guard("Join", handle)(b"", context)  # type: ignore[arg-type]
    assert context.told is not None
    return context.told


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, SECRET, str(Path("/srv/state"))),
        JournalError(SECRET),
        ConfigurationError(SECRET),
        DataError(SECRET),
        ConsentError(SECRET),
        StoreError(SECRET),
        ValueError(SECRET),
        KeyError("hospital7"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_goes_wrong_inside_the_coordinator_is_told_in_constant_words(error: Exception) -> None:
    _, details = answer(error)
    assert details in (
        "the coordinator cannot store it; its log says why",
        "the coordinator cannot answer now; its log says why",
        "the coordinator failed; its log says how",
    )


@pytest.mark.parametrize("kind", [RefusedError, IdentityError, LateError, BusyError])
def test_what_is_about_the_silo_itself_is_told_in_words(kind: type[Exception]) -> None:
    assert answer(kind("tensor a is missing"))[1] == "tensor a is missing"


def test_a_store_that_fails_while_a_refusal_is_noted_adds_no_words_of_its_own() -> None:
    assert answer(RefusedError("tensor a is missing"), store_fails=True)[1] == "tensor a is missing"
