"""Witnesses' daemons beside a federation's, and the configurations that name them."""

from __future__ import annotations

import subprocess
import urllib.request
from typing import Any

import yaml

from tests.support.runs.federation import Federation, free_port


class Witness:
    """A witness's daemon. ``name``: of its configuration and its key. ``secure``: it speaks TLS, with a certificate
    that it has signed itself."""

    def __init__(self, one: Federation, name: str, *, secure: bool = False) -> None:
        self.name, self.port, self.secure, self._one = name, free_port(), secure, one
        if secure:
            self._make_certificate()
        one.write(f"{name}.yaml", {**self._settings, "logs": self._logs})
        self.key = one.command("silo", "witness", "key", "--config", f"{name}.yaml").strip()

    @property
    def _settings(self) -> dict[str, Any]:
        tls = {"tls": {"certificate": f"{self.name}.pem", "key": f"{self.name}-tls.key"}} if self.secure else {}
        return {
            "name": f"{self.name}.example.org",
            "listen": f"127.0.0.1:{self.port}",
            "state": f"state/{self.name}",
            **tls,
        }

    @property
    def _logs(self) -> list[str]:
        one = self._one
        parties = [("silo", name) for name in one.silos] + [("coordinator", "coordinator")]
        return [
            one.command(program, "witness", "journal-key", "--config", f"{name}.yaml").strip()
            for program, name in parties
        ]

    @property
    def address(self) -> dict[str, str]:
        if self.secure:
            return {"url": f"https://127.0.0.1:{self.port}", "key": self.key, "ca": f"{self.name}.pem"}
        return {"url": f"http://127.0.0.1:{self.port}", "key": self.key}

    def _make_certificate(self) -> None:
        made = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", f"{self.name}-tls.key")
        named = ("-subj", f"/CN={self.name}", "-addext", "subjectAltName=IP:127.0.0.1", "-out", f"{self.name}.pem")
        command = ["openssl", "req", "-x509", *made, *named]
        subprocess.run(command, cwd=self._one.folder, check=True, capture_output=True)

    def start(self) -> None:
        self._one.start("silo", "witness", "serve", "--config", f"{self.name}.yaml")
        self._one.wait_to_say(self.name, "listening on")

    def last(self, origin: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/checkpoint/{origin}", timeout=30) as answer:
            return str(answer.read().decode())


def name_witnesses(one: Federation, witnesses: list[Witness]) -> None:
    addresses = [witness.address for witness in witnesses]
    one.coordinator_config["witnesses"] = addresses
    one.write("coordinator.yaml", one.coordinator_config)
    for name in one.silos:
        settings = yaml.safe_load((one.folder / f"{name}.yaml").read_text())
        one.write(f"{name}.yaml", {**settings, "witnesses": addresses})
        one.write_consent(
            name,
            exposures=[*one.exposures, "CHECKPOINT"],
            witnesses={"keys": [witness.key for witness in witnesses]},
        )
