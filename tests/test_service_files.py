"""The files for service managers, containers and dashboards fit the commands and the metrics of this release."""

from __future__ import annotations

import json
import re
import shlex
import socket
from configparser import RawConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from medsilo.coordinator.cli import app as coordinator_app
from medsilo.coordinator.pages.page import metrics
from medsilo.privacy.errors import ClockError, ConfigurationError, IdentityError, JournalError
from medsilo.privacy.party import systemd as service_manager
from medsilo.silo.cli import app as silo_app
from medsilo.simulation import demo

SERVICE = Path(__file__).parents[1] / "configs" / "service"
APPS = {"silo": silo_app, "coordinator": coordinator_app}


def assert_is_a_command(words: list[str]) -> None:
    """The command and each of its options exist."""
    name, *rest = words
    options = [word for word in rest if word.startswith("--")]
    said = CliRunner().invoke(APPS[Path(name).name], [rest[0], "--help"]).output
    for option in options:
        assert re.search(rf"{option}\b", said), f"{words}: there is no {option}"


@pytest.mark.parametrize("path", sorted(SERVICE.glob("*.service")), ids=lambda path: path.name)
def test_units_start_commands_that_exist_and_harden_them(path: Path) -> None:
    parser = RawConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(path)
    service = dict(parser["Service"])
    assert_is_a_command(shlex.split(service["ExecStart"]))
    assert service["ProtectSystem"] == "strict"
    assert service["NoNewPrivileges"] == "yes"
    assert service["CapabilityBoundingSet"] == ""
    documented = re.findall(r"^\| (\d+) \|", (SERVICE.parents[1] / "docs" / "exit-codes.md").read_text(), re.MULTILINE)
    assert set(service.get("RestartPreventExitStatus", "").split()) <= set(documented)


@pytest.mark.parametrize("name", ["coordinator", "silo"])
def test_a_daemon_is_started_again_when_only_the_clock_was_wrong_and_not_where_a_person_has_to_decide(
    name: str,
) -> None:
    text = (SERVICE / f"medsilo-{name}.service").read_text()
    held = set(re.search(r"^RestartPreventExitStatus=(.*)$", text, re.MULTILINE)[1].split())  # type: ignore[index]
    assert str(ClockError.exit_code) not in held
    codes = {str(error.exit_code) for error in (ConfigurationError, IdentityError, JournalError)}
    assert codes <= held
    assert re.search(r"^After=.*time-sync\.target", text, re.MULTILINE)
    assert re.search(r"^Wants=.*time-sync\.target", text, re.MULTILINE)


def test_the_compose_file_starts_commands_that_exist() -> None:
    services = yaml.safe_load((SERVICE / "compose.yaml").read_text())["services"]
    for name in ("coordinator", "page"):
        shell = services[name]["command"][-1]
        assert_is_a_command(shlex.split(shell.partition("exec ")[2]))
        assert services[name]["read_only"] is True
        assert services[name]["cap_drop"] == ["ALL"]
    lines = (SERVICE / "Containerfile").read_text().splitlines()
    assert "USER medsilo" in lines, "the image does not run as root"


class Watched:
    """A page's data with everything in it."""

    def look(self, _query: object) -> dict[str, Any]:
        table = {"classes": [{"class": "PROTOCOL"}], "rows": [{"silo": "a", "bytes": [7]}]}
        return {
            "run": "r",
            "round": 2,
            "rounds": 3,
            "finished": False,
            "silos": [
                {
                    "silo": "a",
                    "state": "training",
                    "rounds_delivered": 1,
                    "rounds_late": 0,
                    "changes": [{"norm": 0.5, "score": 1.5, "cosine": 0.25, "unusual": []}],
                }
            ],
            "accuracy": {"a": [[1, 0.5]]},
            "received": table,
            "sent": table,
            "privacy": {"spent": 1.5, "epsilon": 8.0},
            "witnesses": {"university": {"away": None, "time": 1_790_000_000, "size": 3}},
            "refusals": [],
        }


def test_the_dashboard_asks_for_figures_that_there_are() -> None:
    found = {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(metrics(Watched()).decode())  # type: ignore[arg-type]
        for sample in family.samples
    }
    panels = json.loads((SERVICE / "grafana-dashboard.json").read_text())["panels"]
    for panel in panels:
        for target in panel["targets"]:
            (name,) = re.findall(r"medsilo_\w+", target["expr"])
            assert name in found, panel["title"]
            used = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            used |= set(re.findall(r'(\w+)="', target["expr"]))
            assert used <= found[name], panel["title"]


def test_a_service_manager_is_told_that_the_daemon_is_ready_and_alive_as_long_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = tmp_path / "notify"
    alive = [True, True]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(address))
        manager.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", str(address))
        service_manager.notify("READY=1")
        assert manager.recv(100) == b"READY=1"
        monkeypatch.setenv("WATCHDOG_USEC", "20000")
        service_manager.watch(lambda: bool(alive and alive.pop()))
        assert [manager.recv(100), manager.recv(100)] == [b"WATCHDOG=1"] * 2
        manager.settimeout(0.2)
        with pytest.raises(TimeoutError):
            manager.recv(100)
    monkeypatch.delenv("NOTIFY_SOCKET")
    service_manager.notify("READY=1")


def test_make_demo_finds_the_configurations_that_it_copies() -> None:
    """The package is reached by a link, which is not where the configurations stand."""
    assert {"coordinator.yaml", "hospital1.yaml", "hospital2.yaml", "hospital3.yaml"} <= {
        path.name for path in (demo.ROOT / "configs").glob("*.yaml")
    }
