"""What a call to the coordinator that failed means."""

from __future__ import annotations

import re
from http import HTTPStatus

import grpc

from medsilo.privacy.errors import IdentityError, LateError, MedsiloError, ReceiptError, RefusedError
from medsilo.silo.state.config import SiloConfig
from medsilo.silo.uplink.channel import said

_TRANSIENT = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
)

_PROXY_ANSWER = re.compile(r"HTTP proxy returned response code (\d+)")
_PROXY_BUSY = (408, 425, 429, 500, 502, 503, 504)
_NOT_REACHED = ("Failed to connect to remote host", "DNS resolution failed")


class UnansweredError(MedsiloError):
    """A call failed for a reason that time may mend."""


def explain(error: grpc.RpcError, config: SiloConfig, met: str = "") -> MedsiloError:
    """The error that a failed call to the coordinator is to this silo, in words that say what to do. ``met``: why a
    relay has no connection, of which gRPC knows only that it ended."""
    code, details = error.code(), said(error)
    address = config.coordinator.address
    if code == grpc.StatusCode.UNAVAILABLE and met:
        whom = f"the coordinator at {address}" if config.proxy is None else f"the proxy at {config.proxy.address}"
        return UnansweredError(f"{whom} does not answer (UNAVAILABLE: the relay cannot connect: {met})")
    if code == grpc.StatusCode.UNAVAILABLE and (proxied := _explain_proxy(details, config)) is not None:
        return proxied
    if code == grpc.StatusCode.PERMISSION_DENIED:
        return IdentityError(f"the coordinator at {address} refuses this silo: {details}")
    if code == grpc.StatusCode.INVALID_ARGUMENT:
        return RefusedError(f"the coordinator at {address} refuses: {details}")
    if code == grpc.StatusCode.ABORTED:
        return LateError(details)
    if code == grpc.StatusCode.DATA_LOSS:
        return ReceiptError(f"the coordinator at {address} does not accept this silo's word on its journal: {details}")
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return RefusedError(f"what answers at {address} is not a Medsilo coordinator: {details}")
    if "CERTIFICATE_VERIFY_FAILED" in details or "Hostname Verification Check failed" in details:
        return IdentityError(
            f"what answers at {address} cannot show a valid certificate of "
            f"{config.coordinator_identity.uri}: {details}\nCheck the address, `federation`, "
            f"`coordinator: name` and {config.tls_files.ca}, and with the coordinator's operator that its "
            "certificate has not expired"
        )
    if code in _TRANSIENT:
        # A server that turns a certificate away closes the connection without a word.
        hint = "; if this goes on, it may not accept this silo's certificate" if "Socket closed" in details else ""
        through = "" if config.proxy is None else f", through the proxy at {config.proxy.address},"
        return UnansweredError(f"the coordinator at {address}{through} does not answer ({code.name}: {details}{hint})")
    return RefusedError(f"the coordinator at {address} answered {code.name}: {details}")


def _explain_proxy(details: str, config: SiloConfig) -> MedsiloError | None:
    """What the hospital's proxy has to do with a call that failed; None for nothing."""
    proxy = config.proxy
    if proxy is None:
        return None
    address = config.coordinator.address
    if any(words in details for words in _NOT_REACHED):
        return UnansweredError(f"the proxy at {proxy.address} does not answer: {details}")
    if (found := _PROXY_ANSWER.search(details)) is None:
        return None
    status = int(found[1])
    if status == HTTPStatus.PROXY_AUTHENTICATION_REQUIRED:
        # Not tried again: many wrong passwords lock an account.
        wrong = (
            f"does not accept the name and password in {proxy.credentials} (HTTP 407); put them right"
            if proxy.credentials
            else "asks for a name and password (HTTP 407); put them into a file, named as `credentials` of `proxy`"
        )
        return IdentityError(f"the proxy at {proxy.address} {wrong}, and the same command goes on")
    if status in _PROXY_BUSY:
        return UnansweredError(f"the proxy at {proxy.address} does not reach {address} (HTTP {status})")
    return RefusedError(
        f"the proxy at {proxy.address} does not let this machine through to {address} (HTTP {status}); whoever "
        "runs the proxy has to allow CONNECT to that host and port"
    )
