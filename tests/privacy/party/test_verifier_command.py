"""``audit verifier``: the page as a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from medsilo.privacy.audit.verifier_page import verifier_page
from medsilo.privacy.errors import MedsiloError
from medsilo.privacy.party.audit_commands import audit_app
from medsilo.privacy.party.party import PartyConfig


def test_the_page_is_written_without_a_configuration(tmp_path: Path) -> None:
    app = audit_app(lambda _config: PartyConfig(federation="test", name="hospital1", state=tmp_path))
    done = CliRunner().invoke(app, ["verifier", str(tmp_path / "verifier.html")])
    assert done.exit_code == 0
    assert (tmp_path / "verifier.html").read_bytes() == verifier_page()
    done = CliRunner().invoke(app, ["verifier", str(tmp_path / "nowhere" / "verifier.html")])
    assert isinstance(done.exception, MedsiloError)
    assert "cannot be written" in str(done.exception)


def test_the_page_in_the_documentation_is_this_releases(request: pytest.FixtureRequest) -> None:
    assert (request.config.rootpath / "docs" / "offline-verifier.html").read_bytes() == verifier_page()
