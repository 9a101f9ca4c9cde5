"""``silo audit open``: exactly which tensors left in a round, from the messages that were kept."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file

from medsilo.algorithms.tensors.transfer import MemorySink, Receiver, read_manifest
from medsilo.privacy.budget.ledger import UPDATE
from medsilo.privacy.door.archive import SentArchive
from medsilo.privacy.errors import DataError, RefusedError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.journal.journal import read_journal, understanding
from medsilo.privacy.journal.records import MessageRecord
from medsilo.protos.medsilo.v1 import coordinator_pb2 as wire
from medsilo.silo.state.config import SiloConfig

_FILE_NAME = re.compile(r"[a-z0-9-]{1,63}-[0-9]{1,9}-[0-9a-f]{32}")


@dataclass(frozen=True)
class OpenedTensor:
    """A tensor that left, and the file where it stands again."""

    exposure: Exposure
    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path


@dataclass(frozen=True)
class OpenedCall:
    """An upload's call; ``problem`` says why nothing, or not all of it, can be shown."""

    run: str
    round: int
    time: str
    call_id: str
    messages: int
    length: int
    tensors: tuple[OpenedTensor, ...]
    problem: str = ""


@dataclass
class _Upload:
    run: str
    round: int
    time: str
    digests: list[str]
    length: int = 0


def open_rounds(config: SiloConfig, folder: Path, *, run: str | None, round_number: int | None) -> list[OpenedCall]:
    """Writes what was uploaded as safetensors files, a file a call and exposure class.

    Every message is held against its hash in the journal first. Raises ``DataError`` if a kept message is not the one
    that the journal has, or no upload fits.
    """
    archive = config.sent_archive
    uploads: dict[str, _Upload] = {}
    with understanding(config.journal):
        for record in read_journal(config.journal):
            if not isinstance(record, MessageRecord) or record.direction != "sent" or record.rpc != UPDATE:
                continue
            if run not in (None, record.run) or round_number not in (None, record.round):
                continue
            name = f"{record.run}-{record.round}-{record.call_id}"
            if record.run is None or record.round is None or not _FILE_NAME.fullmatch(name):
                raise ValueError(f"{name!r:.100} is no run, round and call")
            upload = uploads.setdefault(record.call_id, _Upload(record.run, record.round, record.time, []))
            upload.digests.append(record.sha256)
            upload.length += record.length
    if not uploads:
        raise DataError(f"{config.journal}: no upload of that run and round stands in the journal")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return [_open(call_id, upload, archive, folder) for call_id, upload in uploads.items()]


def _open(call_id: str, upload: _Upload, archive: SentArchive, folder: Path) -> OpenedCall:
    messages = _checked(call_id, upload, archive)
    tensors: list[OpenedTensor] = []
    problem = ""
    try:
        header = next(messages, None)
        if header is None:
            problem = "it was not kept, or deleted since; its record in the journal stands"
        else:
            parts = read_manifest(header.update.parts)
            sink = MemorySink(parts)
            receiver = Receiver(parts, sink)
            for message in messages:
                receiver.take(message.chunk)
            receiver.finish()
            for exposure, part in sink.payload().items():
                path = folder / f"{upload.run}-round{upload.round + 1}-{call_id[:8]}-{exposure}.safetensors"
                save_file({name: tensor.contiguous() for name, tensor in part.tensors().items()}, path)
                tensors += [OpenedTensor(exposure, s.name, s.shape, s.dtype, path) for s in part.specs]
    except RefusedError as error:
        problem = f"only a part of it left: {error}"
    return OpenedCall(
        upload.run, upload.round, upload.time, call_id, len(upload.digests), upload.length, tuple(tensors), problem
    )


def _checked(call_id: str, upload: _Upload, archive: SentArchive) -> Iterator[wire.SubmitUpdateRequest]:
    for data, digest in zip(archive.read(call_id), upload.digests, strict=False):
        if hashlib.sha256(data).hexdigest() != digest:
            raise DataError(f"call {call_id}: a kept message is not the one in the journal")
        yield wire.SubmitUpdateRequest.FromString(data)
