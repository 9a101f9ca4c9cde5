"""What a run's rounds leave on disk: updates, downloads, a method's memory; read back, and removed in time."""

from __future__ import annotations

import re
import secrets
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from medsilo.algorithms.method import Memory
from medsilo.algorithms.tensors import FileSource, Part, Payload
from medsilo.algorithms.tensors.files import PROCESS, Spares, read_payload, write_payload
from medsilo.coordinator.store.records import EVERYONE
from medsilo.privacy.exposure import Exposure


class RoundFiles:
    """The files of one run. The database names them by their paths below the state folder, ``state``.

    ``lock`` is held by whoever hands files out or takes them away.
    """

    def __init__(self, state: Path, run: str, *, spares: int, lock: threading.Condition) -> None:
        self._state = state
        self.folder = state / "runs" / run
        self.initial = self.folder / "initial.safetensors"
        self.spares = Spares(self.folder / "spare", most=spares)
        self._lock = lock
        self._readers: Counter[Path] = Counter()
        for partial in self.folder.glob("round-*/.*.partial"):
            partial.unlink()

    def of_round(self, number: int) -> Path:
        """A round's folder."""
        return self.folder / f"round-{number:06d}"

    def new_upload_path(self, silo: str, number: int) -> Path:
        """Where an upload is to lie; never twice the same, so that two at once do not touch each other's."""
        return self.of_round(number) / f"upload-{silo}-{secrets.token_hex(8)}.safetensors"

    def name(self, path: Path) -> str:
        """A file as the database names it."""
        return str(path.relative_to(self._state))

    def read(self, name: str) -> Payload:
        """The file of that name in the database."""
        return read_payload(self._state / name)

    def payloads(self, names: Mapping[str, str]) -> dict[str, Payload]:
        """The files of these names, by silo."""
        return {silo: self.read(names[silo]) for silo in sorted(names)}

    def delete(self, names: Iterable[str]) -> None:
        """Deletes files that the database does not name any more."""
        for name in names:
            (self._state / name).unlink(missing_ok=True)

    def delete_updates_of(self, silo: str) -> None:
        """Deletes all updates of a silo, those too that no database names."""
        pattern = re.compile(rf"upload-{re.escape(silo)}-[0-9a-f]{{16}}\.safetensors")
        for path in self.folder.glob("round-*/upload-*"):
            if pattern.fullmatch(path.name):
                path.unlink(missing_ok=True)

    def keep_download(self, silo: str, payload: Payload, number: int) -> dict[str, str]:
        """Where each part of a download lies; a part that is still in memory is written first."""
        found = {}
        for exposure, part in payload.items():
            if isinstance(part.source, FileSource):
                path = part.source.path
            else:
                whose = "everyone" if silo == EVERYONE else f"silo-{silo}"
                path = self.of_round(number) / f"download-{whose}-{exposure}-{PROCESS}.safetensors"
                write_payload(path, {exposure: part})
            found[exposure.value] = self.name(path)
        return found

    def read_download(self, names: Mapping[str, str]) -> Payload:
        """A download of which ``keep_download`` told."""
        found = {}
        for exposure, name in names.items():
            (part,) = self.read(name).values()
            found[Exposure(exposure)] = part
        return found

    def keep_memory(self, memory: Memory, number: int) -> str | None:
        """Writes what a method remembers; returns the file's name."""
        if not memory:
            return None
        path = self.of_round(number) / f"memory-{PROCESS}.safetensors"
        flat = {f"{group}/{name}": tensor for group, state in memory.items() for name, tensor in state.items()}
        write_payload(path, {Exposure.PROTOCOL: Part.of(flat)})
        return self.name(path)

    def read_memory(self, name: str) -> Memory:
        """What ``keep_memory`` wrote."""
        memory: Memory = {}
        for part in self.read(name).values():
            for flat, tensor in part.tensors().items():
                group, _, key = flat.partition("/")
                memory.setdefault(group, {})[key] = tensor
        return memory

    @contextmanager
    def reading(self, paths: Iterable[Path]) -> Iterator[None]:
        """Keeps files as they are while somebody reads them; with the lock held it begins."""
        counted = Counter(paths)
        self._readers.update(counted)
        try:
            yield
        finally:
            with self._lock:
                self._readers -= counted  # keeps no path that nobody reads any more

    def forget(self, up_to: int, needed: Collection[str]) -> None:
        """Removes the tensors of rounds up to this one, but for those of these names."""
        kept = {self._state / name for name in needed}
        for folder in self.folder.glob("round-*"):
            if int(folder.name.removeprefix("round-")) > up_to:
                continue
            for path in folder.iterdir():
                if path in kept:
                    continue
                with self._lock:
                    # A file that a slow silo is still being sent must not be written over under its hands; one of a
                    # silo that withdrew just now is gone.
                    if self._readers[path] == 0 and path.exists():
                        self.spares.give(path)
            if not any(folder.iterdir()):
                folder.rmdir()
