"""How long the verifier takes for a bundle of some size: its HTML page in headless Chromium without a network, the
package, and ``audit verify``.

    python benchmarks/verifier.py [MEGABYTES]
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from playwright.sync_api import sync_playwright

from medsilo.privacy.audit.verification import verify_evidence
from medsilo.privacy.audit.verifier_page import verifier_page
from medsilo.privacy.verify import verify_bundle
from tests.support.evidence.exchanging import meet

FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]


def make_bundle(folder: Path, size: int) -> Path:
    """A hospital's bundle of as many rounds as it takes."""
    exchange = meet(folder, rounds=100_000)
    number = 0
    while sum(path.stat().st_size for path in exchange.silo.folder.glob("records*.jsonl")) < size:
        exchange.rounds(range(number, number + 10))
        number += 10
    exchange.attest()
    exchange.close()
    return exchange.silo.bundle(folder / "bundle.json")


def in_browser(page_file: Path, bundle: Path) -> tuple[float, float]:
    """Seconds from choosing the file until the verdict stands there, and of them the processors' in all the browser's
    processes."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=program, args=FLAGS)
        page = running.new_context(offline=True).new_page()
        page.goto(page_file.as_uri())
        used, begun = processors(), time.perf_counter()
        page.set_input_files("#file", bundle)
        page.wait_for_selector("article[data-verdict=sound]", timeout=600_000)
        found = time.perf_counter() - begun, processors() - used
        running.close()
    return found


def processors() -> float:
    """Processor seconds of this process's children so far."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return sum(one.user + one.system for one in times)


def here(verify: Callable[[], bool]) -> tuple[float, float]:
    """The same in this process (``audit verify`` has a second one, which is not counted)."""
    used, begun = time.process_time(), time.perf_counter()
    assert verify()
    return time.perf_counter() - begun, time.process_time() - used


def main() -> None:
    size = int(float(sys.argv[1] if len(sys.argv) > 1 else "10") * 1_000_000)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bundle = make_bundle(folder, size)
        page_file = folder / "verifier.html"
        page_file.write_bytes(verifier_page())
        found = verify_bundle(bundle)
        print(f"{bundle.stat().st_size:,} bytes, {found.records:,} records, {found.acknowledged:,} receipts")
        ways: dict[str, Callable[[], tuple[float, float]]] = {
            "page": lambda: in_browser(page_file, bundle),
            "package": lambda: here(lambda: verify_bundle(bundle).sound),
            "audit verify": lambda: here(lambda: verify_evidence(bundle).sound),
        }
        for what, run in ways.items():
            taken = [run() for _ in range(3)]
            said = ", ".join(f"{seconds:.2f} s ({busy:.2f} s of processor)" for seconds, busy in taken)
            print(f"{what}: {said}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
