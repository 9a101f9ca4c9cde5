"""What the kernel let out of a confined silo, held against what its journal tells."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from datetime import datetime

from medsilo.privacy.journal.records import WITNESS_PEER, EgressRecord, MessageRecord

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
_WITNESS_CONNECTION = 4_096
"""The most that beginning and ending a connection to a witness takes, where this side shows no certificate: TLS's
handshake, begun twice, or a proxy's CONNECT and the handshake."""
_RECORD = 22
"""A TLS record's (RFC 8446: header, content type, tag)."""


@dataclass
class Told:
    """What the journal tells of messages that were sent: their bytes, how many they were, in how many calls, and the
    bytes of the heads that stood before them and are on record."""

    attributed: int = 0
    messages: int = 0
    calls: int = 0
    heads: int = 0

    def add(self, record: MessageRecord) -> None:
        """Takes in one that was sent."""
        self.attributed += record.length
        self.messages += 1
        self.calls += record.frame == 0
        self.heads += record.head_length or 0

    def since(self, before: Told) -> Told:
        """What has come since."""
        return Told(*(getattr(self, one.name) - getattr(before, one.name) for one in fields(Told)))

    @classmethod
    def sum(cls, of: Iterable[Told]) -> Told:
        """All together."""
        parts = list(of)
        return cls(*(sum(getattr(part, one.name) for part in parts) for one in fields(Told)))


@dataclass(frozen=True)
class Way:
    """An address that a confined process could reach.

    Attributes:
        address: it; ``witnesses``: the names of those that it leads to, none for the coordinator's.
        connections, sent, retransmitted, segments, received: the kernel's, as ``EgressRecord`` has them.
        attributed: bytes of the messages that the journal tells of as sent there; ``messages``, ``calls``: how many.
        allowance: the most that it takes, by their formats, to carry these: TLS, and HTTP/2 with gRPC, or HTTP/1.1.
    """

    address: str
    witnesses: tuple[str, ...]
    connections: int
    sent: int
    retransmitted: int
    segments: int
    received: int
    attributed: int
    messages: int
    calls: int
    allowance: int

    @property
    def overhead(self) -> int:
        """What left within TCP besides the messages."""
        return self.sent - self.attributed


@dataclass(frozen=True)
class Egress:
    """One confined process, from its first to its last count.

    Attributes:
        ways: the addresses that could be reached, the coordinator's first.
        refused: how often it wanted another.
        seconds: how long it was.
        interfaces: those of the daemon's network namespace.
    """

    ways: tuple[Way, ...]
    refused: int
    seconds: float
    interfaces: tuple[str, ...]

    @property
    def sent(self) -> int:
        """Bytes within TCP that the kernel let out, each once."""
        return sum(way.sent for way in self.ways)

    @property
    def attributed(self) -> int:
        """Those of them that the journal tells of as messages."""
        return sum(way.attributed for way in self.ways)

    @property
    def overhead(self) -> int:
        """What left within TCP besides the messages."""
        return sum(way.overhead for way in self.ways)

    @property
    def allowance(self) -> int:
        """The most that it takes to carry these messages."""
        return sum(way.allowance for way in self.ways)

    @property
    def alone(self) -> bool:
        """Whether nothing but loopback was in the namespace."""
        return set(self.interfaces) <= {"lo"}

    @property
    def accounted(self) -> bool:
        """Whether the kernel let out, to each address, no more than the journal tells of and its carriage takes."""
        return self.alone and all(way.overhead <= way.allowance for way in self.ways)


@dataclass
class EgressSums:
    """Takes messages that were sent, and the kernel's counts, in the records' order."""

    _told: dict[str, Told] = field(default_factory=dict)
    _begun: dict[int, tuple[str, dict[str, Told]]] = field(default_factory=dict)
    _found: dict[int, Egress] = field(default_factory=dict)

    def sent(self, record: MessageRecord) -> None:
        """A message that was sent."""
        self._told.setdefault(record.peer, Told()).add(record)

    def counted(self, record: EgressRecord) -> None:
        """A count; the last of each confinement is what it comes to."""
        if record.since not in self._begun:
            self._begun[record.since] = record.time, {peer: replace(told) for peer, told in self._told.items()}
        time, before = self._begun[record.since]
        told = {peer: now.since(before.get(peer, Told())) for peer, now in self._told.items()}
        seconds = (datetime.fromisoformat(record.time) - datetime.fromisoformat(time)).total_seconds()
        witnesses = []
        for one in record.witnesses:
            names = tuple(str(name) for name in one["names"])
            asked = Told.sum(told.pop(f"{WITNESS_PEER}{name}", Told()) for name in names)
            counts = {name: one[name] for name in ("connections", "sent", "retransmitted", "segments", "received")}
            witnesses.append(
                Way(
                    address=one["address"],
                    witnesses=names,
                    **counts,
                    attributed=asked.attributed,
                    messages=asked.messages,
                    calls=asked.calls,
                    allowance=_carriage_of_questions(asked, one["connections"]),
                )
            )
        rest = Told.sum(told.values())
        coordinator = Way(
            address=record.address,
            witnesses=(),
            connections=record.connections,
            sent=record.sent,
            retransmitted=record.retransmitted,
            segments=record.segments,
            received=record.received,
            attributed=rest.attributed,
            messages=rest.messages,
            calls=rest.calls,
            allowance=_carriage_of_calls(rest, record, seconds),
        )
        self._found[record.since] = Egress(
            (coordinator, *witnesses), record.refused, seconds, tuple(sorted(record.interfaces))
        )

    @property
    def all(self) -> list[Egress]:
        """Each confinement, oldest first."""
        return list(self._found.values())

    @property
    def outside(self) -> int:
        """Bytes of messages that were sent while the kernel did not count."""
        return Told.sum(self._told.values()).attributed - sum(one.attributed for one in self._found.values())


def _carriage_of_calls(told: Told, record: EgressRecord, seconds: float) -> int:
    """The most that TLS, HTTP/2 and gRPC take to carry these messages to the coordinator."""
    return (
        record.connections * _CONNECTION
        + told.calls * _CALL
        + told.messages * _MESSAGE
        + -(-told.attributed // _FRAME) * _FRAME_COSTS
        + -(-(record.received + told.attributed) // _WINDOW) * _ANSWER
        + int(seconds / _PING_SECONDS + 1) * _PING
    )


def _carriage_of_questions(told: Told, connections: int) -> int:
    """The most that TLS and HTTP/1.1 take to carry these questions to witnesses; the heads are known to the byte."""
    records = told.messages + -(-(told.attributed + told.heads) // _FRAME)
    return connections * _WITNESS_CONNECTION + told.heads + records * _RECORD
