"""``coordinator page``: the live page and figures for Prometheus, in a process of its own that can change nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jinja2
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from medsilo.coordinator.config import CoordinatorConfig
from medsilo.coordinator.pages.overview import Overview
from medsilo.coordinator.store.store import Store
from medsilo.privacy.errors import ConfigurationError
from medsilo.privacy.files.state_folder import keep_private
from medsilo.privacy.identity.endpoint import split_address
from medsilo.privacy.party.page_server import Content, PageServer, open_token, tls_context
from medsilo.privacy.party.witness_status import witness_gauges

_STATES = ("not joined yet", "declined", "joined", "training", "delivered", "fetching the end", "done", "withdrawn")


def serve_page(config: CoordinatorConfig, listen: str, token_file: Path | None, ready: Callable[[Path], None]) -> None:
    """Serves until SIGTERM or Ctrl-C. ``ready`` is told the token's file once the page can be opened.

    Raises ``ConfigurationError`` for an address that cannot be had, ``IdentityError`` for certificates that cannot be
    used.
    """
    try:
        host, port = split_address(listen)
    except ValueError as error:
        raise ConfigurationError(f"--listen {listen}: {error}") from None
    files = config.tls_files
    keep_private(config.state)
    place = token_file or config.keys / "page.token"
    token = open_token(place)
    context = tls_context(certificate=files.certificate, key=files.key, ca=files.ca)
    store = Store(config.database)
    overview = Overview(config, store)
    content = Content(
        title=f"Federation {config.federation}",
        template="overview.html",
        look=overview.look,
        metrics=lambda: metrics(overview),
    )
    server = PageServer(
        content, jinja2.PackageLoader("medsilo.coordinator.pages"), token=token, credentials=config.open_credentials()
    )
    try:
        server.serve(host.strip("[]"), port, context, lambda: ready(place))
    finally:
        store.close()


def metrics(overview: Overview) -> bytes:
    """The run's figures in Prometheus' text form."""
    data = overview.look({})
    registry = CollectorRegistry()

    def gauge(name: str, said: str, *labels: str) -> Gauge:
        return Gauge(f"medsilo_{name}", said, [*labels, "run"], registry=registry)

    run = data["run"]
    gauge("round", "The run's present round, from 1; 0 before the first.").labels(run).set(data["round"] or 0)
    gauge("rounds", "How many rounds the run has.").labels(run).set(data["rounds"])
    gauge("finished", "1 once the run has ended.").labels(run).set(data["finished"])
    state = gauge("silo_state", "1 for the state that a silo is in.", "silo", "state")
    delivered = gauge("silo_rounds_delivered", "Rounds that a silo delivered in time.", "silo")
    late = gauge("silo_rounds_late", "Rounds that ended without a silo's update.", "silo")
    accuracy = gauge("silo_accuracy", "A silo's last shared accuracy on its own test images, 0 to 1.", "silo")
    norm = gauge("silo_change_norm", "Euclidean norm of a silo's last change of the model.", "silo")
    score = gauge("silo_change_score", "Robust z-score of that norm among its round's.", "silo")
    cosine = gauge("silo_change_cosine", "Median cosine of that change with each other silo's.", "silo")
    unusual = gauge("silo_change_unusual", "1 where that change is unusual for its round.", "silo")
    for silo in data["silos"]:
        for one in _STATES:
            state.labels(silo["silo"], one, run).set(silo["state"] == one)
        delivered.labels(silo["silo"], run).set(silo["rounds_delivered"])
        late.labels(silo["silo"], run).set(silo["rounds_late"])
        if points := data["accuracy"][silo["silo"]]:
            accuracy.labels(silo["silo"], run).set(points[-1][1])
        if silo["changes"]:
            last = silo["changes"][-1]
            unusual.labels(silo["silo"], run).set(bool(last["unusual"]))
            for figure, found in ((norm, last["norm"]), (score, last["score"]), (cosine, last["cosine"])):
                if found is not None:
                    figure.labels(silo["silo"], run).set(found)
    exposed = gauge("exposed_bytes", "Bytes of an exposure class that passed.", "silo", "direction", "class")
    for direction in ("received", "sent"):
        table = data[direction]
        for row in table["rows"]:
            for one, count in zip(table["classes"], row["bytes"], strict=True):
                exposed.labels(row["silo"], direction, one["class"], run).set(count)
    if data["privacy"]:
        gauge("epsilon_spent", "Privacy loss so far of a silo in every round.").labels(run).set(
            data["privacy"]["spent"]
        )
        gauge("epsilon_planned", "Privacy loss that the plan allows.").labels(run).set(data["privacy"]["epsilon"])
    gauge("refusals", "Requests turned away, of the newest twenty.").labels(run).set(len(data["refusals"]))
    witness_gauges(data["witnesses"], registry)
    return generate_latest(registry)
