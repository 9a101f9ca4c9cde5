"""Reads recorded HTTP/2 connections strictly: every byte is accounted for, or the reading fails."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PUSH_PROMISE, CONTINUATION = 0x0, 0x1, 0x5, 0x9
PADDED = 0x8
KNOWN = range(10)
"""Frame types of RFC 9113; whatever else there is could carry bytes past us."""


def read_streams(data: bytes, *, from_client: bool) -> list[list[tuple[int, str]]]:
    """(length, SHA-256) of the gRPC messages of each stream, streams in their order.

    Fails for a byte that belongs to no frame, a frame type that HTTP/2 does not define, a compressed message, and
    one that is cut short. Streams without messages are left out.
    """
    streams: dict[int, bytearray] = {}
    opened: set[int] = set()
    for kind, flags, stream, payload in frames(data, from_client=from_client):
        assert kind in KNOWN, f"a frame of the unknown type {kind}"
        assert kind != PUSH_PROMISE, "a pushed stream"
        if kind == HEADERS:
            opened.add(stream)
        if kind != DATA:
            continue
        assert stream in opened, f"data on stream {stream}, which has no headers"
        if flags & PADDED:
            padding = payload[0]
            assert not any(payload[len(payload) - padding :]), "padding that is not zeros"
            payload = payload[1 : len(payload) - padding]
        streams.setdefault(stream, bytearray()).extend(payload)
    return [found for _, content in sorted(streams.items()) if (found := list(_messages(bytes(content))))]


def frames(data: bytes, *, from_client: bool) -> Iterator[tuple[int, int, int, bytes]]:
    """(type, flags, stream, payload) of each frame."""
    position = 0
    if from_client:
        assert data.startswith(PREFACE), "not HTTP/2"
        position = len(PREFACE)
    while position < len(data):
        assert position + 9 <= len(data), f"{len(data) - position} bytes that are no frame"
        length = int.from_bytes(data[position : position + 3], "big")
        stream = int.from_bytes(data[position + 5 : position + 9], "big") & 0x7FFFFFFF
        end = position + 9 + length
        assert end <= len(data), f"a frame of {length} bytes is cut short"
        yield data[position + 3], data[position + 4], stream, data[position + 9 : end]
        position = end


def _messages(content: bytes) -> Iterator[tuple[int, str]]:
    position = 0
    while position < len(content):
        assert position + 5 <= len(content), f"{len(content) - position} bytes that are no message"
        assert content[position] == 0, "a compressed message"
        length = int.from_bytes(content[position + 1 : position + 5], "big")
        start, position = position + 5, position + 5 + length
        assert position <= len(content), f"a message of {length} bytes is cut short"
        yield length, hashlib.sha256(content[start:position]).hexdigest()
