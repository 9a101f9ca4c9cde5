"""What the other side writes is read, and does nothing else: real escape sequences in both directions, to terminals,
logs, tables and pages."""

from __future__ import annotations

import re
import ssl
import urllib.request
from collections.abc import Callable, Iterator
from concurrent import futures

import grpc
import pytest

from tests.support.network.raw_client import RawClient
from tests.support.runs.federation import PATIENCE, Federation
from tests.support.runs.pages import start_page
from tests.support.runs.refusals import refusal

Make = Callable[..., Federation]
FORGED = "2031-01-01 00:00:00 INFO    all is well"
HOSTILE = f"\x1b[2J\x1b[31mred\x1b]0;title\x07\r\n{FORGED}\nmodel\u202egnp.exe\u200b\x9b2J\x7f"
"""Clears the screen, colours it, names the window, begins lines of a log, turns the direction of writing."""


def assert_only_read(shown: str) -> None:
    assert "alliswell" in re.sub(r"[\s│]", "", shown), "what was said is shown, in a table's cell on several lines"
    assert {one for one in shown if not one.isprintable()} <= {"\n"}
    assert not [line for line in shown.splitlines() if line.lstrip().startswith(("2031", "all is well"))]


@pytest.fixture
def refusing() -> Iterator[Callable[[grpc.StatusCode], int]]:
    """A coordinator that answers every call with such words; its port, by the status."""
    servers: list[grpc.Server] = []

    def make(code: grpc.StatusCode) -> int:
        def refuse(_request: bytes, context: grpc.ServicerContext) -> bytes:
            context.abort(code, HOSTILE)
            return b""

        class Refusals(grpc.GenericRpcHandler):
            def service(self, _details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
                return grpc.unary_unary_rpc_method_handler(refuse)

        servers.append(grpc.server(futures.ThreadPoolExecutor(max_workers=4)))
        servers[-1].add_generic_rpc_handlers((Refusals(),))
        port = servers[-1].add_insecure_port("127.0.0.1:0")
        servers[-1].start()
        return int(port)

    yield make
    for server in servers:
        server.stop(grace=None).wait()


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize(
    "code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.PERMISSION_DENIED]
)
def test_a_coordinators_words_do_nothing_in_a_hospital(
    federation: Make, refusing: Callable[[grpc.StatusCode], int], code: grpc.StatusCode, form: str
) -> None:
    one = federation(insecure=True)
    one.write_silo("hospital1", port=refusing(code))
    silo = one.start("silo", "train", "--log", form, "--config", "hospital1.yaml")
    if code != grpc.StatusCode.UNAVAILABLE:
        one.ends_with(silo, 5 if code == grpc.StatusCode.PERMISSION_DENIED else 6)
    one.wait_to_say("hospital1", "all is well")
    assert_only_read(one.said("hospital1"))
    silo.kill()
    silo.wait()
    assert_only_read(one.command("silo", "doctor", "--config", "hospital1.yaml", expect=14))


def test_a_hospitals_words_do_nothing_at_the_coordinator(federation: Make) -> None:
    one = federation()
    one.start_coordinator()
    one.wait_to_say("coordinator", "listening")

    _, told = refusal(RawClient(one, "hospital1", claims=HOSTILE).get_plan)

    assert_only_read(told)
    assert_only_read(one.said("coordinator"))
    assert_only_read(one.command("coordinator", "status", "--config", "coordinator.yaml"))
    (kept,) = one.status()["refusals"]
    assert_only_read(kept["reason"])
    assert_only_read(asked_page(one))


def asked_page(one: Federation) -> str:
    address, token = start_page(one)
    context = ssl.create_default_context(cafile=str(one.folder / "ca" / "ca.pem"))
    context.check_hostname = False
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, context=context, timeout=PATIENCE) as answer:
        page: str = answer.read().decode()
    return page
