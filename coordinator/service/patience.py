"""How long a silo may keep the coordinator waiting in the midst of a stream: a stalled one must not hold a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Patience:
    """Cuts what takes longer than ``seconds``. One thread watches over all streams."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._waiting: dict[object, tuple[float, Callable[[], object]]] = {}
        self._watcher: threading.Thread | None = None

    @contextmanager
    def waiting(self, cut: Callable[[], object]) -> Iterator[None]:
        """Calls ``cut`` once, from another thread, if the block has not ended in time."""
        mark = object()
        with self._lock:
            self._waiting[mark] = (time.monotonic() + self.seconds, cut)
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="patience", daemon=True)
                self._watcher.start()
        try:
            yield
        finally:
            with self._lock:
                self._waiting.pop(mark, None)

    def _watch(self) -> None:
        while True:
            time.sleep(min(1.0, self.seconds / 4))
            now = time.monotonic()
            with self._lock:
                late = [(mark, cut) for mark, (until, cut) in self._waiting.items() if until < now]
                for mark, _ in late:
                    del self._waiting[mark]
                if not self._waiting and not late:
                    self._watcher = None
                    return
            for _, cut in late:
                cut()
