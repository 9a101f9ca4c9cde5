"""The verifier by itself: what it imports, how long it is, and that its wheel runs where nothing else of Medsilo is."""

from __future__ import annotations

import ast
import io
import shutil
import subprocess
import sys
import tokenize
import zipfile
from pathlib import Path

import pytest

from tests.support.evidence.exchanging import two_rounds
from tests.support.evidence.vectors import FOLDER, LIST, applied

VERIFY = Path(__file__).parents[3] / "privacy" / "verify"
MODULES = sorted(VERIFY.glob("*.py"))
MOST_LINES = 1600


def lines_of_code(source: str) -> int:
    """Lines but for blank ones, comments and docstrings."""
    strings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            strings.update(range(node.lineno, (node.end_lineno or 0) + 1))
    nothing = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in nothing:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - strings)


def test_it_is_short_enough_to_be_read() -> None:
    assert sum(lines_of_code(path.read_text()) for path in MODULES) < MOST_LINES


def test_it_imports_the_standard_library_cryptography_and_rfc8785_alone() -> None:
    allowed = {*sys.stdlib_module_names, "cryptography", "rfc8785"}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= allowed, path
            if isinstance(node, ast.ImportFrom):
                assert node.level == 1 or (node.level == 0 and (node.module or "").split(".")[0] in allowed), path


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel installs."""
    folder = tmp_path_factory.mktemp("wheel")
    # Made of a copy: a build leaves its own folder beside the source.
    shutil.copytree(VERIFY, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    make = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*make, "-w", folder, folder / "source"], check=True, capture_output=True)
    (wheel,) = folder.glob("medsilo_verify-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def run(installed: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """The command, with the wheel in front and no folder of Medsilo in reach."""
    program = f"import sys; sys.path.insert(0, {str(installed)!r}); from medsilo_verify.__main__ import main; main()"
    command = [sys.executable, "-I", "-c", program, *map(str, words)]
    return subprocess.run(command, cwd=installed, capture_output=True, text=True)


def test_the_wheel_says_what_is_sound_and_what_is_not(installed: Path, tmp_path: Path) -> None:
    found = run(installed, FOLDER / "hospital.json")
    assert found.returncode == 0, found.stderr
    assert "9 of 9 messages sent have the other side's signed receipt." in found.stdout
    assert "Left, of MODEL_PARAMETERS_EXTRACTOR: " in found.stdout
    path = tmp_path / "bundle.json"
    path.write_bytes(applied((FOLDER / "hospital.json").read_bytes(), [[60_000 % 50_000, 1, "MQ=="]]))
    assert run(installed, path).returncode == 1
    path.write_bytes(b"nothing")
    assert run(installed, path).returncode == 2


def test_the_wheel_holds_evidence_against_a_key(installed: Path, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    exchange = two_rounds(tmp_path)
    bundle = exchange.silo.bundle(tmp_path / "bundle.json")
    for party, code in ((exchange.silo, 0), (exchange.coordinator, 1)):
        public = party.key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        (tmp_path / "audit.pub").write_bytes(public)
        assert run(installed, bundle, "--key", tmp_path / "audit.pub").returncode == code
    (tmp_path / "audit.pub").write_text("no key")
    assert run(installed, bundle, "--key", tmp_path / "audit.pub").returncode == 2


def test_the_wheel_asks_for_two_packages(installed: Path) -> None:
    (metadata,) = installed.glob("*.dist-info/METADATA")
    asked = [line.split(": ")[1] for line in metadata.read_text().splitlines() if line.startswith("Requires-Dist")]
    assert sorted(name.split(">")[0] for name in asked) == ["cryptography", "rfc8785"]
    assert not list(installed.glob("**/*.html")), "the page is written out by `audit verifier`"
    assert (FOLDER / LIST).exists()
