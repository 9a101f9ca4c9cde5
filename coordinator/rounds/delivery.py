"""One update, from its header to its receipt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from medsilo.algorithms.tensors import TensorSpec
from medsilo.algorithms.tensors.files import PayloadWriter
from medsilo.algorithms.tensors.transfer import MemorySink, Receiver, check_finite, check_parts, read_manifest
from medsilo.coordinator.rounds.comparing import norm_of_change
from medsilo.coordinator.rounds.rounds import Rounds
from medsilo.privacy.errors import RefusedError
from medsilo.privacy.exposure import Exposure
from medsilo.protos.medsilo.v1 import coordinator_pb2 as wire
from medsilo.protos.medsilo.v1 import tensor_pb2


class Delivery:
    """An update that a silo has begun to send: ``take`` its chunks, ``finish``, and ``accept`` it with a receipt.

    ``earlier`` is the receipt of an equal update that was accepted before, and then nothing else is to be done. Leaving
    the ``with`` block before ``accept`` leaves nothing on disk. Raises ``RefusedError`` for an update that is not the
    silo's to send or is not what it was asked for, ``LateError`` for one that comes too late.
    """

    def __init__(self, rounds: Rounds, silo: str, header: wire.Update) -> None:
        self._rounds = rounds
        self._silo = silo
        self._round = header.round
        self._roster_sha256 = header.roster_sha256
        self._open_files = ExitStack()
        self._is_mine = False
        self.earlier = rounds.earlier_receipt(silo, self._round, self._roster_sha256)
        if self.earlier is not None:
            return
        parts = read_manifest(header.parts)
        expected = rounds.expected_parts(silo, self._round)
        if Exposure.LOCAL_METRICS not in parts:
            expected.pop(Exposure.LOCAL_METRICS, None)
        check_parts(parts, expected)
        large = dict(parts)
        measured = large.pop(Exposure.LOCAL_METRICS, None)
        self._metrics = MemorySink({} if measured is None else {Exposure.LOCAL_METRICS: measured})
        path = rounds.new_upload_path(silo, self._round)
        self._has_file = bool(large)
        self._writer = self._open_files.enter_context(PayloadWriter(path, large, spares=rounds.spares))
        self._receiver = Receiver(parts, _Split(parts, self._writer, self._metrics))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open_files.close()
        if self._is_mine:
            self._writer.path.unlink(missing_ok=True)

    def take(self, chunk: tensor_pb2.TensorChunk) -> None:
        """The next chunk; raises ``RefusedError`` for one that is not due, or whose numbers are not finite."""
        self._receiver.take(chunk)

    def finish(self) -> None:
        """Checks the whole update and makes it durable; raises ``RefusedError`` for one that is incomplete, holds
        numbers that are not finite, or lies further from what the silo was sent than the run allows."""
        self._receiver.finish()
        written = self._writer.payload()
        check_finite({exposure: written[exposure] for exposure in self._receiver.unchecked})
        limit = self._rounds.config.run.max_update_norm
        if limit is not None and written:
            norm = norm_of_change(written, self._rounds.beginning(self._silo, self._round))
            if norm > limit:
                # A round that has ended meanwhile is the better reason.
                self._rounds.earlier_receipt(self._silo, self._round, self._roster_sha256)
                raise RefusedError(
                    f"round {self._round + 1}: {self._silo}'s update changes the model by {norm:.6g} (Euclidean norm), "
                    f"and this run's limit is {limit:.6g}; it is not used. If the training was as it should be, ask "
                    "the coordinator's operator to raise `run.max_update_norm`, and start the silo again"
                )
        if self._has_file:
            self._is_mine = True
            self._writer.commit()

    def accept(self, receipt: Mapping[str, Any]) -> bool:
        """Counts the update, now that it is durable; False where an equal one was accepted meanwhile, whose receipt
        is then ``earlier``."""
        self._is_mine = False  # from here on the database may name the file
        accepted = self._rounds.accept(
            self._silo,
            self._round,
            file=self._writer.path if self._has_file else None,
            receipt=receipt,
            metrics=self._metrics.payload(),
            roster_sha256=self._roster_sha256,
        )
        if accepted is receipt:
            return True
        self._writer.path.unlink(missing_ok=True)
        self.earlier = accepted
        return False


class _Split:
    """Sends metrics to memory and everything else to the file."""

    def __init__(
        self, parts: Mapping[Exposure, Sequence[TensorSpec]], writer: PayloadWriter, metrics: MemorySink
    ) -> None:
        self._sinks = [
            (metrics if exposure == Exposure.LOCAL_METRICS else writer, sum(spec.nbytes for spec in specs))
            for exposure, specs in parts.items()
        ]

    def write(self, data: bytes) -> None:
        while self._sinks[0][1] == 0:
            self._sinks.pop(0)
        sink, left = self._sinks[0]
        sink.write(data)
        self._sinks[0] = (sink, left - len(data))
