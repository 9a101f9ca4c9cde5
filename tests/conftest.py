from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from postgres_cluster import Cluster, find_programs


@pytest.fixture(scope="session")
def postgres() -> Iterator[Cluster]:
    """A PostgreSQL server."""
    programs = find_programs()
    if programs is None:
        pytest.skip("PostgreSQL's server is not installed here (./setup.sh --tests installs it where it can)")
    cluster = Cluster(programs)
    yield cluster
    cluster.remove()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A real browser."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("this needs Chromium, and there is none on this machine (./setup.sh --tests installs it)")
    driver = pytest.importorskip("playwright.sync_api", reason="this needs axe-playwright-python")
    with driver.sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        running = playwright.chromium.launch(executable_path=program, args=flags)
        yield running
        running.close()
