from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import medsilo.privacy.environment  # noqa: F401 before a test imports gRPC itself
from tests.support.postgres_cluster import Cluster, find_programs

# Several tests run at once, many of them with processes of their own; threads that wait for each other without a core
# would take one from the others. Before anything imports PyTorch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

SLOW = ("end_to_end", "docs", "simulation")
"""Folders of tests that start processes and wait for them."""


@pytest.fixture(autouse=True)
def own_umask() -> Iterator[None]:
    """Commands and daemons that a test calls in this process make files for its account alone, for good."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long begin first, so that none is under way alone when all others are done. Flower's processes,
    which give a task up when they get no processor for a while, come when the other daemons are done."""
    tests = Path(__file__).parent

    def place(item: pytest.Item) -> tuple[int, bool]:
        folder = item.path.relative_to(tests).parts[0]
        flower = item.path.name == "test_flower.py"
        return SLOW.index(folder) + flower if folder in SLOW else len(SLOW), flower

    items.sort(key=place)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Cluster]:
    """A PostgreSQL server."""
    programs = find_programs()
    if programs is None:
        pytest.skip("PostgreSQL's server is not installed here (./setup.sh --tests installs it where it can)")
    cluster = Cluster(programs)
    yield cluster
    cluster.remove()


@pytest.fixture(scope="session")
def flower_python() -> Path:
    """The interpreter of Flower's own environment, which is made once beside the one that runs the tests.

    ``FLOWER_PYTHON`` names another, to try another release of Flower.
    """
    if (chosen := os.environ.get("FLOWER_PYTHON")) is not None:
        return Path(chosen)
    requirements = Path(__file__).parent / "support" / "runs" / "flower_app" / "environment.txt"
    folder = Path(sys.prefix) / f"flower-{hashlib.sha256(requirements.read_bytes()).hexdigest()[:12]}"
    python = folder / "bin" / "python"
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another of pytest's processes may be making it
        if not (folder / "ready").exists():
            # As pinned: flwr 1.42.0 asks for a newer certifi than there was to be had, and for tools that nothing here
            # uses; what is missing would show when the processes start.
            install = [
                sys.executable,
                "-m",
                "pip",
                "--python",
                python,
                "install",
                "--quiet",
                "--no-deps",
                "--no-compile",
            ]
            for command in (
                [sys.executable, "-m", "venv", "--clear", "--without-pip", folder],
                [*install, "--disable-pip-version-check", "--only-binary", ":all:", "--requirement", requirements],
            ):
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    pytest.fail(f"NOT TESTED: Flower's environment could not be made in {folder}\n{done.stderr}")
            (folder / "ready").touch()
    return python


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
