"""A page that is served."""

from __future__ import annotations

import shutil

from tests.support.runs.federation import Federation, free_port


def start_page(one: Federation) -> tuple[str, str]:
    """The coordinator's page: its address and its token."""
    address = f"127.0.0.1:{free_port()}"
    shutil.copy(one.folder / "coordinator.yaml", one.folder / "page.yaml")
    one.start("coordinator", "page", "--listen", address, "--config", "page.yaml")
    one.wait_to_say("page", "The page is at")
    return f"https://{address}", (one.keys("coordinator") / "page.token").read_text().strip()
