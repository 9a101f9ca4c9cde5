"""The documentation builds as a site, and a link that leads nowhere ends `make docs` and `make check`."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def build(target: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What `make TARGET` does to build the site, done in ``folder``."""
    plan = subprocess.run(
        ["make", "--dry-run", f"BIN={Path(sys.executable).parent}", target], cwd=ROOT, capture_output=True, text=True
    )
    [line] = [line for line in plan.stdout.splitlines() if "mkdocs" in line]
    return subprocess.run(["env", *shlex.split(line)], cwd=folder, env=os.environ, capture_output=True, text=True)


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    return tmp_path


def test_the_site_builds_without_a_warning(pages: Path) -> None:
    built = build("check", pages)

    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    assert (pages / "build" / "site" / "index.html").exists()


@pytest.mark.parametrize("target", ["check", "docs"])
@pytest.mark.parametrize("link", ["../README.md", "nowhere.md", "faq.md#no-such-heading"])
def test_a_link_that_leads_nowhere_ends_the_build(target: str, link: str, pages: Path) -> None:
    with (pages / "docs" / "index.md").open("a") as index:
        index.write(f"\n[here]({link})\n")

    built = build(target, pages)

    assert built.returncode != 0
    assert link.partition("#")[0] in built.stderr
