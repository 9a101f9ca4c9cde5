"""What `silo predict` writes of pictures that somebody else has named."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from medsilo.silo.cli import app
from medsilo.silo.model import kept_models, prediction


def test_names_of_pictures_are_no_formulas_and_steer_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "hospital1.yaml"
    config.write_text(
        "federation: test\nname: hospital1\ncoordinator: {address: 'localhost:1'}\nstate: state\nshard: images.npz\n"
    )
    names = ["=HYPERLINK(A1).png", "\x1b[2J.png", "plain.png"]

    def classify(*_: Any, **__: Any) -> list[prediction.Prediction]:
        return [prediction.Prediction(name, 0, "@class", 0.5, None) for name in names]

    monkeypatch.setattr(kept_models, "find_model", lambda *_: SimpleNamespace(words="the newest", trained=True))
    monkeypatch.setattr(prediction, "load_kept", lambda *_, **__: SimpleNamespace(classify=classify))
    done = CliRunner().invoke(app, ["predict", "--config", str(config), "--images", str(tmp_path)])
    assert done.exit_code == 0, done.output
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [row["image"] for row in rows] == ["'=HYPERLINK(A1).png", r"\x1b[2J.png", "plain.png"]
    assert {row["name"] for row in rows} == {"'@class"}
    assert "\x1b" not in done.output
