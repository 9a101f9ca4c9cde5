"""The long form: ``python -m tests.fuzzing --inputs 1000000 --out docs/results/fuzzing.json``."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.fuzzing.parsers import PARSERS
from tests.fuzzing.running import MEMORY, SECONDS, examine_apart


def main() -> int:
    command = argparse.ArgumentParser(prog="python -m tests.fuzzing", description="Damaged input for every parser.")
    command.add_argument("--inputs", type=int, default=1_000_000, help="how many for each parser")
    command.add_argument("--parser", action="append", choices=sorted(PARSERS), help="only this one; may be repeated")
    command.add_argument("--seed", type=int, default=1)
    command.add_argument("--seconds", type=float, help="most seconds for each parser, whatever --inputs says")
    command.add_argument("--out", type=Path, help="results, as JSON; those of other parsers in the file are kept")
    command.add_argument(
        "--failures", type=Path, default=Path("fuzzing-failures"), help="inputs that fail are kept here"
    )
    command.add_argument("--input", type=Path, help="give one kept input to the one --parser, and see what it raises")
    given = command.parse_args()
    if given.input is not None:
        if not given.parser or len(given.parser) != 1:
            command.error("--input needs one --parser")
        with tempfile.TemporaryDirectory() as folder:
            PARSERS[given.parser[0]](Path(folder)).read(given.input.read_bytes())
        return 0
    names = given.parser or list(PARSERS)
    columns = (TextColumn("{task.description:18}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    failed = False
    with Progress(*columns) as progress:
        for name in names:
            task = progress.add_task(name, total=given.inputs)
            outcome = examine_apart(
                name,
                given.inputs,
                seed=given.seed,
                keep=given.failures,
                told=lambda count, task=task: progress.update(task, completed=count),
                seconds=given.seconds,
            )
            failed = failed or bool(outcome.failures)
            rate = outcome.inputs / max(outcome.seconds, 1e-9)
            progress.console.print(
                f"{name}: {outcome.inputs:,} inputs, {outcome.taken:,} taken, {outcome.refused:,} refused, "
                f"{len(outcome.failures)} failures, slowest {outcome.slowest * 1000:.0f} ms, "
                f"grown {outcome.grown:.0f} MiB, {rate:,.0f}/s"
            )
            for failure in outcome.failures:
                progress.console.print(f"  input {failure.index}: {failure.error} ({failure.where})", markup=False)
            if given.out is not None:
                _write(given.out, given.seed, {name: outcome.describe()})
    return 1 if failed else 0


def _write(path: Path, seed: int, found: dict[str, object]) -> None:
    results = json.loads(path.read_text()) if path.exists() else {"parsers": {}}
    for entry in found.values():
        entry.update(seed=seed, on=f"{datetime.now(UTC):%Y-%m-%d}")  # type: ignore[attr-defined]
    results.update(python=platform.python_version(), seconds_limit=SECONDS, memory_limit_mib=MEMORY >> 20)
    results["parsers"] = {**results["parsers"], **found}
    path.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    sys.exit(main())
