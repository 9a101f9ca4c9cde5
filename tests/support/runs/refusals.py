"""What a refused message leaves behind, and what it does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from tests.support.network.raw_client import HalfSent, HandMade
from tests.support.runs.federation import Federation


def refusal(action: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        action()
    return caught.value.code(), caught.value.details() or ""


def delivered(one: Federation) -> int:
    return sum(silo["rounds_delivered"] for silo in one.status()["silos"])


def stored_uploads(one: Federation) -> list[Path]:
    return [p for p in (one.folder / "state/coordinator/runs").rglob("*") if "upload" in p.name]


def stall(one: Federation, client: HandMade, messages: list[bytes], first: int) -> HalfSent:
    """An upload of which the coordinator has the first messages."""

    def there() -> int:
        return len([r for r in one.messages("coordinator", "received") if r["rpc"] == "SubmitUpdate"])

    before = there()
    half = client.half(messages, first)
    one.wait_for("the upload's first messages", lambda: there() == before + first)
    return half
