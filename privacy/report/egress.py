"""What the kernel let out of a confined silo, held against what its journal tells."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from medsilo.privacy.journal.records import EgressRecord, MessageRecord

_CONNECTION = 16_384
"""The most that beginning and ending a connection takes: TLS's handshake with the certificates, HTTP/2's settings."""
_CALL = 1_024
"""A call's headers and its end, with their frames."""
_MESSAGE = 5 + 9 + 22
"""gRPC's prefix, a frame's header (RFC 9113) and a TLS record's (RFC 8446: header, content type, tag)."""
_FRAME, _FRAME_COSTS = 16_384, 9 + 22
"""A message is cut into frames and records of so many bytes at most."""
_WINDOW, _ANSWER = 8_192, 13 + 17 + 2 * 22
"""For so many bytes received or sent, a window's update and a ping, each in a TLS record."""
_PING_SECONDS, _PING = 10, 17 + 22
"""Pings that keep a connection, and answers to the other side's."""


@dataclass(frozen=True)
class Egress:
    """One confined process, from its first to its last count.

    Attributes:
        address: the only one that could be reached.
        connections, sent, retransmitted, segments, received, refused: the kernel's, as ``EgressRecord`` has them.
        attributed: bytes of the messages that the journal tells of in that time; ``messages``, ``calls``: how many.
        seconds: how long it was.
        interfaces: those of the daemon's network namespace.
    """

    address: str
    connections: int
    sent: int
    retransmitted: int
    segments: int
    received: int
    refused: int
    attributed: int
    messages: int
    calls: int
    seconds: float
    interfaces: tuple[str, ...]

    @property
    def overhead(self) -> int:
        """What left within TCP besides the messages."""
        return self.sent - self.attributed

    @property
    def allowance(self) -> int:
        """The most that TLS, HTTP/2 and gRPC take, by their formats, to carry these messages."""
        return (
            self.connections * _CONNECTION
            + self.calls * _CALL
            + self.messages * _MESSAGE
            + -(-self.attributed // _FRAME) * _FRAME_COSTS
            + -(-(self.received + self.attributed) // _WINDOW) * _ANSWER
            + int(self.seconds / _PING_SECONDS + 1) * _PING
        )

    @property
    def alone(self) -> bool:
        """Whether nothing but loopback was in the namespace."""
        return set(self.interfaces) <= {"lo"}

    @property
    def accounted(self) -> bool:
        """Whether the kernel let out no more than the journal tells of and its carriage takes."""
        return self.alone and self.overhead <= self.allowance


@dataclass
class EgressSums:
    """Takes messages that were sent, and the kernel's counts, in the records' order."""

    _bytes: int = 0
    _messages: int = 0
    _calls: int = 0
    _begun: dict[int, tuple[str, int, int, int]] = field(default_factory=dict)
    _found: dict[int, Egress] = field(default_factory=dict)

    def sent(self, record: MessageRecord) -> None:
        """A message that was sent."""
        self._bytes += record.length
        self._messages += 1
        self._calls += record.frame == 0

    def counted(self, record: EgressRecord) -> None:
        """A count; the last of each confinement is what it comes to."""
        if record.since not in self._begun:
            self._begun[record.since] = (record.time, self._bytes, self._messages, self._calls)
        time, before, messages, calls = self._begun[record.since]
        self._found[record.since] = Egress(
            address=record.address,
            connections=record.connections,
            sent=record.sent,
            retransmitted=record.retransmitted,
            segments=record.segments,
            received=record.received,
            refused=record.refused,
            attributed=self._bytes - before,
            messages=self._messages - messages,
            calls=self._calls - calls,
            seconds=(datetime.fromisoformat(record.time) - datetime.fromisoformat(time)).total_seconds(),
            interfaces=tuple(sorted(record.interfaces)),
        )

    @property
    def all(self) -> list[Egress]:
        """Each confinement, oldest first."""
        return list(self._found.values())

    @property
    def outside(self) -> int:
        """Bytes of messages that were sent while the kernel did not count."""
        return self._bytes - sum(one.attributed for one in self._found.values())
