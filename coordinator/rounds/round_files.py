"""What a round leaves on disk, read back."""

from __future__ import annotations

from pathlib import Path

from medsilo.algorithms.method import Downloads, Memory
from medsilo.algorithms.tensors import Payload
from medsilo.algorithms.tensors.files import read_payload
from medsilo.coordinator.store.records import EVERYONE


def named(downloads: Downloads) -> dict[str, Payload]:
    named = dict(downloads.own)
    if downloads.everyone is not None:
        named[EVERYONE] = downloads.everyone
    return named


def read_memory(path: Path) -> Memory:
    memory: Memory = {}
    for part in read_payload(path).values():
        for name, tensor in part.tensors().items():
            group, _, key = name.partition("/")
            memory.setdefault(group, {})[key] = tensor
    return memory
