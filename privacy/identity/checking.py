"""Signatures and canonical form, checked here or in a second process.

Ed25519 and the one spelling of JSON take more than half of the time in which evidence is verified, and nothing that is
read needs their outcome until the verdict. ``with_second_process`` therefore lets a second process (this module as a
program) check them while this one reads on. If anything at all does not hold there, or the process is lost, what it
found counts for nothing: all is read again with every check in its place, so that the verdict is the same to the word.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from struct import Struct
from typing import Any, TypeVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from medsilo.privacy.files.canonical import read_canonical, read_unchecked

BEFORE_SECOND = 5000
"""So many checks are made here first: a short journal is verified before another process would have begun."""
_PIPE_BYTES = 1 << 20  # what Linux allows everybody; with less, either process often waits for the other
_FRAME = Struct(">III")
"""Before each check: the lengths of public key, signature and data. Without a key, the data is to be canonical JSON."""
_BATCH_BYTES = 1 << 18
_Found = TypeVar("_Found")


def check_signature(public_key: bytes, signature: bytes, data: bytes) -> None:
    """Raises ``InvalidSignature`` if an Ed25519 signature does not hold, ``ValueError`` for what is no public key."""
    _loaded(public_key).verify(signature, data)


@lru_cache(maxsize=1024)
def _loaded(public_key: bytes) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(public_key)


class Checks:
    """Checks in their place: what does not hold raises at once."""

    def signature(self, public_key: bytes, signature: bytes, data: bytes) -> None:
        """As ``check_signature``."""
        check_signature(public_key, signature, data)

    def document(self, data: bytes) -> Any:
        """As ``read_canonical``."""
        return read_canonical(data)


HERE = Checks()


class _SecondProcess(Checks):
    """Hands checks on, from the ``BEFORE_SECOND``-th on; raises ``OSError`` if the process is gone."""

    def __init__(self) -> None:
        self._made = 0
        self._handed_on = 0
        self._batch: list[bytes] = []
        self._bytes = 0
        self._process: subprocess.Popen[bytes] | None = None

    def signature(self, public_key: bytes, signature: bytes, data: bytes) -> None:
        if self._is_here() or not public_key:
            check_signature(public_key, signature, data)
        else:
            self._hand_on(public_key, signature, data)

    def document(self, data: bytes) -> Any:
        if self._is_here():
            return read_canonical(data)
        self._hand_on(b"", b"", data)
        return read_unchecked(data)

    def held(self) -> bool:
        """Whether all that was handed on has held; nothing more can be checked afterwards."""
        if not self._handed_on:
            return True
        try:
            self._write()
            assert self._process is not None
            answer, _ = self._process.communicate()
        except OSError:
            return False
        return self._process.returncode == 0 and answer == str(self._handed_on).encode()

    def close(self) -> None:
        """Ends the process, whatever it was at."""
        if self._process is not None:
            self._process.kill()
            with suppress(OSError):
                self._process.communicate()

    def _is_here(self) -> bool:
        self._made += self._made <= BEFORE_SECOND
        return self._made <= BEFORE_SECOND

    def _hand_on(self, public_key: bytes, signature: bytes, data: bytes) -> None:
        self._batch += _FRAME.pack(len(public_key), len(signature), len(data)), public_key, signature, data
        self._handed_on += 1
        self._bytes += len(data)
        if self._bytes >= _BATCH_BYTES:
            self._write()

    def _write(self) -> None:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "medsilo.privacy.identity.checking"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pipesize=_PIPE_BYTES,
            )
        assert self._process.stdin is not None
        self._process.stdin.write(b"".join(self._batch))
        self._batch.clear()
        self._bytes = 0


def with_second_process(attempt: Callable[[Checks], _Found]) -> _Found:
    """What ``attempt`` comes to with its checks made here; where there is a second core, sooner.

    It may be called twice, and begins anew each time.
    """
    if sys.executable and _cores() > 1:
        second = _SecondProcess()
        try:
            found = attempt(second)
            if second.held():
                return found
        except Exception:
            if second.held():
                raise
        finally:
            second.close()
    return attempt(HERE)


def _cores() -> int:
    # Auditors have other systems than hospitals, which do not all tell which cores a process may use.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _main() -> None:
    """Checks what comes in until it ends, then says how much that was; ends early at what does not hold."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who began this process says what Ctrl-C means
    count = 0
    incoming = open(0, "rb", buffering=_BATCH_BYTES)  # noqa: SIM115 until the process ends
    while head := incoming.read(_FRAME.size):
        public_key, signature, data = map(incoming.read, _FRAME.unpack(head))
        try:
            if public_key:
                check_signature(public_key, signature, data)
            else:
                read_canonical(data)
        except (InvalidSignature, ValueError):
            sys.exit(1)
        count += 1
    sys.stdout.write(str(count))


if __name__ == "__main__":
    _main()
