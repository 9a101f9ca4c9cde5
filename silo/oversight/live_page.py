"""``silo page``: what has left the building, what would leave next, the budget, and a button to withdraw.

In a process of its own and on loopback only: the daemon that trains opens no port, and nobody outside this machine can
ask for the page.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from medsilo.privacy.errors import MedsiloError
from medsilo.privacy.exposure import MEANING, Exposure
from medsilo.privacy.files.state_folder import keep_private
from medsilo.privacy.journal.tail import JournalTail
from medsilo.privacy.pages.plots import Strip, bars_by_round, spending
from medsilo.privacy.pages.wording import readable_bytes
from medsilo.privacy.party.page_server import Content, PageServer, open_token
from medsilo.privacy.party.witness_status import witness_gauges, witness_lines
from medsilo.privacy.report.model import BEFORE
from medsilo.privacy.report.words import NAME, TELLING
from medsilo.privacy.witness.status import read_status
from medsilo.silo.oversight.budget import lines, read_accounts
from medsilo.silo.oversight.consent import consent_content, take_back, tell_coordinator
from medsilo.silo.preview import inspection
from medsilo.silo.state.config import SiloConfig
from medsilo.silo.state.plans import known_plan

_HOST = "127.0.0.1"
_INSPECTED_SECONDS = 20.0
_NEWEST = 20


log = logging.getLogger(__name__)


def serve_page(config: SiloConfig, port: int, ready: Callable[[str, Path], None]) -> None:
    """Serves until SIGTERM or Ctrl-C. ``ready`` is told the address and the token's file once the page can be opened.

    Raises ``ConfigurationError`` for a port that cannot be had.
    """
    keep_private(config.state)
    place = config.keys / "page.token"
    token = open_token(place)
    view = View(config)
    content = Content(
        title=f"Silo {config.name}",
        template="what_left.html",
        look=view.look,
        metrics=lambda: metrics(view),
        actions={"withdraw": lambda: _withdraw(config)},
    )
    hosts = frozenset(f"{name}:{port}" for name in (_HOST, "localhost"))
    server = PageServer(content, jinja2.PackageLoader("medsilo.silo.oversight"), token=token, hosts=hosts)
    server.serve(_HOST, port, None, lambda: ready(f"http://{_HOST}:{port}/?token={token}", place))


class View:
    """The page's data; the journal is followed as it grows."""

    def __init__(self, config: SiloConfig) -> None:
        self._config = config
        self._tail = JournalTail(config.journal)
        self._reading = threading.Lock()
        self._next: tuple[float, dict[str, Any]] | None = None

    def look(self, _query: Mapping[str, str]) -> dict[str, Any]:
        """What there is to see now."""
        config = self._config
        with self._reading:
            self._tail.update()
            runs = [_run(self._tail, run) for run in self._tail.runs()]
            outside = _run(self._tail, BEFORE)
            refused = [
                {
                    "at": r.time[:19].replace("T", " "),
                    "rpc": r.rpc or "plan",  # declining a run is no refusal of a message
                    "reason": r.reason,
                    "direction": r.direction or "",
                }
                for r in self._tail.refusals[-_NEWEST:]
            ]
            if self._next is None or time.monotonic() > self._next[0]:
                self._next = (time.monotonic() + _INSPECTED_SECONDS, _next(config))
            coming = self._next[1]
        accounts = read_accounts(config, course=True)
        return {
            "silo": config.name,
            "coordinator": config.coordinator_identity.uri,
            "consent": consent_content(config),
            "runs": runs,
            "outside": outside,
            "refused": refused,
            "witnesses": (witnesses := read_status(config.state)),
            "witnessed": witness_lines(witnesses),
            "coming": coming,
            "accounts": [
                {
                    "split": account.subject.split,
                    "data": account.subject.data_sha256[:16],
                    "unit": account.subject.unit,
                    "spent": None if account.spent is None else account.spent.epsilon,
                    "budget": account.budget,
                    "lines": lines(account),
                    "picture": spending(account.course, account.budget, identifier=f"account{number}"),
                }
                for number, account in enumerate(accounts)
            ],
        }


def _withdraw(config: SiloConfig) -> str:
    take_back(config, "by the button of the silo's page")
    try:
        told = tell_coordinator(config, log.info)
    except MedsiloError as error:
        told = f"The coordinator could not be told: {error} (`silo consent withdraw` tries again)"
    return f"Withdrawn: nothing leaves any more. {told}".strip()


def _run(tail: JournalTail, run: str) -> dict[str, Any]:
    rounds = tail.by_round(run, "sent")
    total: Counter[str] = Counter()
    for sums in tail.by_class(run, "sent").values():
        total.update(sums)
    order = [e for e in (*TELLING, *(e for e in Exposure if e not in TELLING)) if total.get(e.value)]
    planned = tail.planned.get(run)
    labels = [str(number + 1) if planned is None or number < planned else "end" for number in rounds]
    strips = [
        Strip(NAME[e], e in TELLING, [counts.get(e.value, 0) for counts in rounds.values()])
        for e in order
        if e in TELLING
    ]
    return {
        "run": run,
        "rounds": len(rounds) - labels.count("end"),
        "classes": [
            {
                "class": e.value,
                "name": NAME[e],
                "meaning": MEANING[e],
                "bytes": total[e.value],
                "readable": readable_bytes(total[e.value]),
                "telling": e in TELLING,
            }
            for e in order
        ],
        "picture": bars_by_round(strips, labels, unit="round", identifier=f"run-{run}") if strips and labels else "",
    }


def _next(config: SiloConfig) -> dict[str, Any]:
    """What the next round would take out, as ``silo inspect`` finds it; in words why that cannot be said."""
    try:
        plan = known_plan(config)
        found = inspection.inspect(config, plan)
    except MedsiloError as error:
        return {"run": None, "why_not": str(error), "content": [], "missing": [], "besides": ""}
    return {
        "run": plan.run,
        "method": plan.method.name,
        "why_not": f"Nothing more of run {plan.run}: it has ended." if found.ended else None,
        "missing": found.missing.lines(),
        "besides": found.besides,
        "content": [
            {
                "class": one.exposure.value,
                "name": NAME[one.exposure],
                "meaning": MEANING[one.exposure],
                "bytes": one.bytes,
                "readable": readable_bytes(one.bytes),
                "leaves": one.leaves,
                "loss": str(one.loss) if one.exposure in TELLING else "",
            }
            for one in found.content
        ],
    }


def metrics(view: View) -> bytes:
    """The figures in Prometheus' text form, for who watches the hospital's machines."""
    data = view.look({})
    registry = CollectorRegistry()
    sent = Gauge(
        "medsilo_sent_bytes",
        "Bytes of an exposure class that left; outside runs: run is empty.",
        ["run", "class"],
        registry=registry,
    )
    for run in [data["outside"], *data["runs"]]:
        for one in run["classes"]:
            sent.labels(run["run"], one["class"]).set(one["bytes"])
    spent = Gauge("medsilo_epsilon_spent", "Privacy loss of a data set.", ["data", "split"], registry=registry)
    for account in data["accounts"]:
        if account["spent"] is not None:
            spent.labels(account["data"], account["split"]).set(account["spent"])
    in_force = Gauge("medsilo_consent_in_force", "1 while the consent lets something leave.", registry=registry)
    in_force.set(data["consent"]["state"] == "in force")
    witness_gauges(data["witnesses"], registry)
    return generate_latest(registry)
