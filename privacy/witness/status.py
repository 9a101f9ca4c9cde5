"""What a party keeps of its witnesses in its state folder, for whoever looks at it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

STATUS = "witnesses.json"
"""What each witness has cosigned last, and who is away."""


def read_status(folder: Path) -> dict[str, dict[str, Any]]:
    """What each witness of a party has cosigned last (``size``, ``time`` in seconds since 1970), and why it is
    ``away``, by its name; empty where nothing is known."""
    try:
        found = json.loads((folder / STATUS).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
