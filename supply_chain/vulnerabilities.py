"""Asks whether vulnerabilities are known of the pinned packages, and says so loudly where nobody answered.

pip-audit, which asks, ends well with "No known vulnerabilities found" also for packages of which it could learn
nothing. Here a package of which nothing was learnt is not checked, and the check has not passed.

python -m supply_chain.vulnerabilities
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from supply_chain.pins import CONSTRAINTS

CLEAN, VULNERABLE, NOT_CHECKED = 0, 1, 3
_LINE = "!" * 78


def verdict(output: str, errors: str) -> tuple[int, str]:
    """Exit code and words, from what pip-audit wrote."""
    try:
        packages: list[Mapping[str, Any]] = json.loads(output)["dependencies"]
    except (ValueError, KeyError, TypeError):
        last = errors.strip().splitlines()[-1:] or ["pip-audit said nothing"]
        return NOT_CHECKED, _loud("no package", f"the service that knows of vulnerabilities did not answer: {last[0]}")
    known = [
        f"{package['name']} {package['version']}: {one['id']}, mended in {', '.join(one['fix_versions']) or 'none yet'}"
        for package in packages
        for one in package.get("vulns", [])
    ]
    skipped = [package for package in packages if "skip_reason" in package]
    checked = len(packages) - len(skipped)
    words = list(known)
    if skipped or not packages:
        why = skipped[0]["skip_reason"] if skipped else "pip-audit was given nothing to check"
        words.append(_loud(f"{len(skipped)} of {len(packages)} packages", why))
    if known:
        return VULNERABLE, "\n".join(words)
    if skipped or not packages:
        return NOT_CHECKED, "\n".join(words)
    return CLEAN, f"no vulnerability is known of {checked} packages"


def _loud(what: str, why: str) -> str:
    return f"{_LINE}\nNOT CHECKED for known vulnerabilities: {what}\nbecause: {why}\n{_LINE}"


def main() -> int:
    """Entry point."""
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(CONSTRAINTS), "--no-deps", "--disable-pip"]
    asked = subprocess.run(
        [*command, "--progress-spinner", "off", "--format", "json"], capture_output=True, text=True, check=False
    )
    code, words = verdict(asked.stdout, asked.stderr)
    print(words)
    return code


if __name__ == "__main__":
    sys.exit(main())
