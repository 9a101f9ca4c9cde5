"""Time and memory of ``audit verify``, ``audit export`` and ``report``, by the length of the journal.

A silo and a coordinator exchange messages through their real doors and journals (only fsync is left out), four in ten
of which carry a signed word, as in a run with a small model. Each measurement is a process of its own.

    python benchmarks/audit_verify.py [--records 10000 100000] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
MEASURE = """
import json, resource, sys, time
from pathlib import Path
from medsilo.privacy.journal.journal import current_key
from medsilo.privacy.report.builder import make_report
from medsilo.privacy.audit.bundle import export
from medsilo.privacy.audit.verification import verify_evidence
what, source, other = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
key = current_key(source) if what == "report" else None
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start, used = time.perf_counter(), time.process_time()
if what == "export":
    export(source, Path(other))
elif what == "report":
    assert make_report(source, key=key).verification.sound
else:
    result = verify_evidence(source, peer=Path(other) if other else None)
    assert result.sound, result.problem
print(json.dumps({
    "seconds": round(time.perf_counter() - start, 2),
    "cpu_seconds": round(time.process_time() - used, 2),
    "cpu_seconds_of_second_process": round(sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]), 2),
    "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    "peak_mib_after_imports": round(before / 1024, 1),
}))
"""


def generate(folder: Path, records: int) -> None:
    """Two journals, the silo's of about so many records."""
    sys.path.insert(0, str(REPOSITORY))
    from tests.support.evidence.exchanging import meet

    os.fsync = lambda _file: None  # type: ignore[assignment]
    exchange = meet(folder, rounds=records)
    number = 0
    while len(exchange.silo.journal) < records - 2:
        exchange.get_task(number, chunks=1)
        exchange.submit(number, chunks=3)
        number += 1
    exchange.attest()
    exchange.silo.journal.close()
    exchange.coordinator.journal.close()


def measure(what: str, source: Path, other: Path | str = "") -> dict[str, float]:
    """One measurement in a process of its own."""
    command = [sys.executable, "-c", MEASURE, what, str(source), str(other)]
    done = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=Path, help="a folder for the journals, made once and used again")
    options = parser.parse_args()
    results: dict[str, object] = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": sys.version.split()[0],
    }
    peaks: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for records in options.records:
            folder = (options.keep or Path(scratch)) / str(records)
            if not folder.exists():
                start = time.perf_counter()
                subprocess.run([sys.executable, __file__, "--generate", str(folder), str(records)], check=True)
                print(f"{records} records made in {time.perf_counter() - start:.0f} s", file=sys.stderr)
            silo, coordinator = folder / "hospital1", folder / "coordinator"
            mine, theirs = folder / "hospital1.json", folder / "coordinator.json"
            found = {
                "journal_mib": round(sum(file.stat().st_size for file in silo.glob("records*.jsonl")) / 2**20, 1),
                "export": measure("export", silo, mine),
                "export_peer": measure("export", coordinator, theirs),
                "verify_bundle": measure("verify", mine),
                "verify_journal": measure("verify", silo),
                "verify_with_peer": measure("verify", mine, theirs),
                "report": measure("report", silo),
            }
            for name, one in found.items():
                if isinstance(one, dict):
                    peaks.setdefault(name, []).append(one["peak_mib"])
            results[str(records)] = found
    results["peak_ratios"] = {name: round(values[-1] / values[0], 3) for name, values in peaks.items()}
    text = json.dumps(results, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--generate"]:
        generate(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
