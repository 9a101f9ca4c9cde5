"""Holds ``constraints.txt`` to pin every package that commands, checks and tests need, at what is installed.

python -m supply_chain.pins [--write]
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
INSTALLERS = {"pip"}
"""Comes with Python's ``venv``; pinned, it would replace itself while it installs."""


def declared() -> list[Requirement]:
    """What ``pyproject.toml`` asks for, the tests' and checks' tools included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [Requirement(text) for text in [*project["dependencies"], *project["optional-dependencies"]["dev"]]]


def installed(requirements: Iterable[Requirement]) -> dict[str, tuple[str, str]]:
    """Everything that requirements need in this environment, step by step: canonical name to (name, version).

    Raises ``PackageNotFoundError`` for one that is not installed.
    """
    found: dict[str, tuple[str, str]] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(requirement, "") for requirement in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = str(canonicalize_name(requirement.name))
        if name in INSTALLERS:
            continue
        package = distribution(name)
        found[name] = (package.metadata["Name"], package.version)
        for wanted in {"", *requirement.extras}:
            if (name, wanted) not in seen:
                seen.add((name, wanted))
                waiting += [(Requirement(text), wanted) for text in package.requires or []]
    return found


def pinned(text: str) -> dict[str, tuple[str, str]]:
    """A constraints file's pins: canonical name to (name, version); raises ``ValueError`` for any other line."""
    found = {}
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        requirement = Requirement(line)
        versions = list(requirement.specifier)
        if len(versions) != 1 or versions[0].operator != "==" or "*" in versions[0].version:
            raise ValueError(f"{line!r} is not a pin; write NAME==VERSION")
        found[str(canonicalize_name(requirement.name))] = (requirement.name, versions[0].version)
    return found


def differences(needed: Mapping[str, tuple[str, str]], pins: Mapping[str, tuple[str, str]]) -> list[str]:
    """What is wrong with the pins, in words. A local version (``2.15.0+cpu``) is the pinned one of another build."""
    wrong = []
    for key, (name, version) in sorted(needed.items()):
        if key not in pins:
            wrong.append(f"{name} {version} is needed and not pinned")
        elif pins[key][1] != version.partition("+")[0]:
            wrong.append(f"{name} is pinned at {pins[key][1]}, and {version} is installed")
    return wrong


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="add what is missing, at the version that is installed")
    write = parser.parse_args().write
    try:
        needed = installed(declared())
    except PackageNotFoundError as error:
        print(f"{error.name} is needed and not installed; run ./setup.sh")
        return 1
    pins = pinned(CONSTRAINTS.read_text())
    wrong = differences(needed, pins)
    if wrong and write:
        merged = {**pins, **{key: (name, version.partition("+")[0]) for key, (name, version) in needed.items()}}
        CONSTRAINTS.write_text("".join(f"{name}=={version}\n" for _, (name, version) in sorted(merged.items())))
    print("\n".join(wrong) if wrong else f"{CONSTRAINTS.name} pins all {len(needed)} packages")
    return int(bool(wrong) and not write)


if __name__ == "__main__":
    sys.exit(main())
