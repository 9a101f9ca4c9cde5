"""Waiting for the coordinator, with limits that are this side's alone, and calling it again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import grpc
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    sleep_using_event,
    stop_after_delay,
    stop_never,
    wait_exponential_jitter,
)

from medsilo.silo.state.config import SiloConfig
from medsilo.silo.uplink.explaining import UnansweredError, explain

LONGEST_PAUSE_SECONDS: float = 30

T = TypeVar("T")


class Waiting:
    """The call under way: how long it is waited for, that it is made again, and that another thread may cut it short.

    ``notice`` is told before each pause. ``met`` says why no connection comes about, where a relay makes them; empty
    if one does. ``interrupted`` is set while calls are to end at once.
    """

    def __init__(self, config: SiloConfig, notice: Callable[[str], None], met: Callable[[], str]) -> None:
        self._config = config
        self._notice = notice
        self._met = met
        self._moved_at = time.monotonic()
        self._under_way: Any = None
        self.interrupted = threading.Event()

    def interrupt(self) -> None:
        """Cuts the call under way short, from another thread, and those that begin until ``interrupted`` is cleared."""
        self.interrupted.set()
        if (call := self._under_way) is not None:
            call.cancel()

    def moved(self) -> None:
        """Something has left from here, for which the other side may take its time anew."""
        self._moved_at = time.monotonic()

    def begin(self, call: Any) -> Any:
        """Notes the call under way, so that it can be interrupted."""
        self._under_way = call
        self.moved()
        if self.interrupted.is_set():
            call.cancel()
        return call

    def answer(self, call: Any, seconds: float) -> bytes:
        """The answer of a call, waited for so long after the last message was taken from here. The limit is on this
        side alone: a deadline would travel in a header of its own."""
        self.begin(call)
        while True:
            try:
                answer: bytes = call.result(timeout=max(0.0, self._moved_at + seconds - time.monotonic()))
            except grpc.FutureTimeoutError:
                if time.monotonic() < self._moved_at + seconds:
                    continue
                call.cancel()
                raise self._unanswered(seconds) from None
            except grpc.FutureCancelledError:
                raise UnansweredError("the call was cut short") from None
            return answer

    def next_of(self, stream: Any, seconds: float) -> bytes | None:
        """A stream's next message, or None at its end, waited for on this side alone as in ``answer``."""
        late = threading.Event()

        def cut() -> None:
            late.set()
            stream.cancel()

        timer = threading.Timer(seconds, cut)
        timer.daemon = True
        timer.start()
        try:
            found: bytes | None = next(stream, None)
        except grpc.RpcError:
            if late.is_set():
                raise self._unanswered(seconds) from None
            raise
        finally:
            timer.cancel()
        return found

    def _unanswered(self, seconds: float) -> UnansweredError:
        address = self._config.coordinator.address
        return UnansweredError(f"the coordinator at {address} does not answer within {seconds:g} s")

    def persistently(
        self, action: Callable[[int], T], *, check: Callable[[], object], seconds: float | None = None
    ) -> T:
        """What ``action`` gives, which is told which attempt it is: made again, with growing pauses, for ever or for
        ``seconds``, while it fails for a reason that time may mend. ``check`` is called after each such failure, and
        ends it by raising."""
        for attempt in Retrying(
            retry=retry_if_exception_type(UnansweredError),
            wait=wait_exponential_jitter(multiplier=0.2, max=LONGEST_PAUSE_SECONDS if seconds is None else 2),
            stop=stop_never if seconds is None else stop_after_delay(seconds),
            sleep=sleep_using_event(self.interrupted),
            before_sleep=partial(self._before_pause, seconds),
            reraise=True,
        ):
            with attempt:
                try:
                    return action(attempt.retry_state.attempt_number)
                except (grpc.RpcError, UnansweredError) as error:
                    check()
                    self.interrupted.clear()
                    if isinstance(error, UnansweredError):
                        raise
                    explained = explain(error, self._config, self._met())
                    explained.recorded = True  # what the other side refuses, its journal tells
                    raise explained from error
        raise AssertionError("unreachable: the loop ends by returning or raising")

    def _before_pause(self, seconds: float | None, state: RetryCallState) -> None:
        reason = state.outcome.exception() if state.outcome else None
        pause = state.next_action.sleep if state.next_action else 0
        if seconds is None:
            self._notice(f"{reason}; trying again in {pause:.0f} s")
        elif state.attempt_number == 1:  # that it goes on is said once: it has an end, and pauses are short
            self._notice(f"{reason}; trying again for {seconds:.0f} s")
