"""How a call ends that is turned away: a status and words for the caller, a row in the store, a line in the log."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NoReturn

import grpc

from medsilo.coordinator.rounds.rounds import Rounds
from medsilo.coordinator.store.store import Store
from medsilo.privacy.door.door import Call
from medsilo.privacy.door.receipts import OutOfStepError
from medsilo.privacy.errors import IdentityError, LateError, MedsiloError, ReceiptError, RefusedError, StoreError
from medsilo.privacy.files.durable import disk_error
from medsilo.privacy.printable import from_the_other_side

log = logging.getLogger(__name__)


class BusyError(MedsiloError):
    """A silo has too many calls open; it may try again."""


class UnsignedError(MedsiloError):
    """A silo has not yet put its signature to what it sent."""


_TOLD = (IdentityError, RefusedError, ReceiptError, LateError, BusyError, UnsignedError)
"""Errors whose words go to the silo that they are about: they name it, its message and the run, nobody else."""


class Refusals:
    """Of one coordinator. ``rounds`` end where its disk at ``state`` has failed for good."""

    def __init__(self, store: Store, state: Path, rounds: Rounds) -> None:
        self._store = store
        self._state = state
        self._rounds = rounds

    def turn_away(self, error: Exception, rpc: str, call: Call | None, context: grpc.ServicerContext) -> NoReturn:
        """Ends a call that has failed."""
        if (failed := disk_error(error, self._state)) is not None:
            if failed.passes:
                log.error("%s by %s has to wait: %s", rpc, context.peer(), failed)
            else:
                self._rounds.fail(failed)  # the daemon ends, and says why
            context.abort(grpc.StatusCode.UNAVAILABLE, "the coordinator cannot answer now; its log says why")
        if not context.is_active():
            log.info("%s: the caller has gone", rpc)
            context.abort(grpc.StatusCode.CANCELLED, "the caller has gone")
        peer = (call.peer if call else "") or context.peer()
        if not isinstance(error, _TOLD):
            # The words of any other error may name paths, hosts or other hospitals: they stay in the log.
            if isinstance(error, StoreError):
                log.error("%s by %s has to wait: %s", rpc, peer, error)
                context.abort(grpc.StatusCode.UNAVAILABLE, "the coordinator cannot answer now; its log says why")
            log.exception("%s by %s failed", rpc, peer)
            if isinstance(error, OSError):
                context.abort(grpc.StatusCode.UNAVAILABLE, "the coordinator cannot store it; its log says why")
            if isinstance(error, MedsiloError):
                context.abort(grpc.StatusCode.UNAVAILABLE, "the coordinator cannot answer now; its log says why")
            context.abort(grpc.StatusCode.INTERNAL, "the coordinator failed; its log says how")
        code = (
            grpc.StatusCode.PERMISSION_DENIED
            if isinstance(error, IdentityError)
            else grpc.StatusCode.ABORTED
            if isinstance(error, LateError)
            else grpc.StatusCode.INVALID_ARGUMENT
            if isinstance(error, RefusedError)
            else grpc.StatusCode.FAILED_PRECONDITION
            if isinstance(error, (OutOfStepError, UnsignedError))
            else grpc.StatusCode.DATA_LOSS
            if isinstance(error, ReceiptError)
            else grpc.StatusCode.UNAVAILABLE
        )
        words = from_the_other_side(str(error))  # it may quote what came
        log.warning("%s by %s refused: %s", rpc, peer, words)
        try:
            self._store.refuse(peer, rpc, words)
        except MedsiloError:
            log.exception("the refusal could not be stored")  # gRPC would send the words of this error
        context.abort(code, words)
        raise AssertionError("unreachable: abort raises")
