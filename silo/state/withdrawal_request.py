"""What ``silo consent withdraw`` leaves in the state folder; a daemon looks for it before every message."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from medsilo.privacy.files.durable import write_atomically


@dataclass(frozen=True)
class WithdrawalRequest:
    """When the consent was taken back, and why; ``reason`` stays in the hospital."""

    at: str
    reason: str

    @classmethod
    def read(cls, path: Path) -> WithdrawalRequest | None:
        """None where there is none; its being there is what counts, whatever it holds."""
        try:
            content = json.loads(path.read_bytes())
            return cls(str(content["at"]), str(content["reason"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError):
            return cls("", "")

    def write(self, path: Path) -> None:
        """Durable when this returns: from here on nothing leaves."""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(path, json.dumps({"at": self.at, "reason": self.reason}).encode())
