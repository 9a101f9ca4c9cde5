"""The live pages, in a real browser over real daemons: who may see them, that they follow a run, that the button
works."""

from __future__ import annotations

import json
import shutil
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, pkcs12

from medsilo.privacy.exposure import Exposure
from medsilo.privacy.identity.authority import issue_to_operator
from medsilo.privacy.report.as_json import as_json
from medsilo.privacy.report.builder import make_report
from medsilo.silo.oversight.live_page import View
from medsilo.silo.state.config import SiloConfig
from tests.support.runs.federation import PATIENCE, Federation, free_port
from tests.support.runs.pages import start_page

Make = Callable[..., Federation]


def assert_accessible(page: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(page).response["violations"]
    assert [(one["id"], one["impact"], one["nodes"][0]["html"]) for one in found] == []


def ask(url: str, one: Federation, *, certificate: Path | None = None, headers: dict[str, str] | None = None) -> int:
    """The status of an answer."""
    context = ssl.create_default_context(cafile=str(one.folder / "ca" / "ca.pem"))
    context.check_hostname = False  # the certificate names the coordinator, not this machine's address
    if certificate is not None:
        context.load_cert_chain(certificate)
    request = urllib.request.Request(url, headers=headers or {})
    try:
        with urllib.request.urlopen(request, context=context, timeout=PATIENCE) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_the_coordinators_page_follows_a_run(federation: Make, browser: Any) -> None:
    one = federation(run={"rounds": 3})
    coordinator = one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    address, token = start_page(one)
    context = browser.new_context(ignore_https_errors=True)
    page = context.new_page()
    page.set_default_timeout(1000 * PATIENCE)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    page.fill("#token", "something else")
    page.click("button")
    page.wait_for_selector("text=That is not this page's token.")
    assert_accessible(page)
    page.fill("#token", token)
    page.click("button")
    page.wait_for_selector("text=waiting for silos: 0 of 3 have joined")
    one.finish(*[one.start_silo(name) for name in one.silos], coordinator)
    # Nobody loads the page anew: it is told.
    page.wait_for_selector("strong:text-is('ended')")
    page.wait_for_selector("strong:text-is('3 of 3')")
    page.wait_for_selector("svg text:text-is('end')", state="attached")  # the picture comes with a later look
    assert page.locator("svg title", has_text="Accuracy by round").count() == 1
    assert page.locator("svg text:text-is('end')").count() == 1, "accuracies of the run's end are not a fourth round's"
    (own,) = View(SiloConfig.read(one.folder / "hospital1.yaml")).look({})["runs"]
    assert own["rounds"] == 3
    assert ">end<" in own["picture"]
    drawn = page.locator("svg g title", has_text="is pulled to").count()
    drawn += page.locator("svg g title", has_text="is pushed from").count()
    assert drawn == 6, "each of three hospitals has two others"
    differing = page.locator("[aria-label='Table: how updates differ'] tbody tr")
    told = {row["silo"]: row["changes"][-1] for row in one.status()["silos"]}
    assert differing.all_inner_texts() == [
        "\t".join([name, "3", f"{last['norm']:.4g}", f"{last['score']:+.1f}", f"{last['cosine']:+.2f}", "no"])
        for name, last in told.items()
    ]
    assert_accessible(page)
    page.emulate_media(color_scheme="dark")
    assert_accessible(page)
    colours = "[...document.querySelectorAll('svg g:has(.line)')].map((one) => getComputedStyle(one).color)"
    assert len(set(page.evaluate(colours))) == 3, "each hospital's line and name have a colour of their own"
    page.set_viewport_size({"width": 360, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert_accessible(page)
    assert {url.partition("//")[2].partition("/")[0] for url in asked if not url.startswith("data:")} == {
        address.removeprefix("https://")
    }, "nothing comes from anywhere else"
    # The same bytes as in the journal.
    found = json.loads(page.evaluate("fetch('data.json').then((answer) => answer.text())"))
    classes = [entry["class"] for entry in found["received"]["classes"]]
    sums: dict[str, dict[str, int]] = {}
    for record in one.messages("coordinator", "received"):
        if record["run"] == "test":
            counts = sums.setdefault(record["peer"].rpartition("/")[2], {})
            for name, count in record["classes"].items():
                counts[name] = counts.get(name, 0) + count
    assert {row["silo"]: dict(zip(classes, row["bytes"], strict=True)) for row in found["received"]["rows"]} == sums
    context.close()


def test_the_coordinators_page_is_for_its_token_and_for_operators_alone(federation: Make) -> None:
    one = federation()
    one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    address, token = start_page(one)
    issue_to_operator(one.folder / "ca", "jane", one.folder / "jane.p12", password="a password")
    key, certificate, _ = pkcs12.load_key_and_certificates((one.folder / "jane.p12").read_bytes(), b"a password")
    assert key is not None
    assert certificate is not None
    (one.folder / "jane.pem").write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) + certificate.public_bytes(Encoding.PEM)
    )
    (one.folder / "silo.pem").write_bytes(
        (one.keys("hospital1") / "tls.key").read_bytes() + (one.keys("hospital1") / "tls.pem").read_bytes()
    )
    for path in ("/", "/middle", "/data.json", "/metrics", "/changes"):
        assert ask(address + path, one) == 401, path
        assert ask(address + path, one, certificate=one.folder / "silo.pem") == 401, "a hospital is no operator"
        assert ask(address + path, one, headers={"Authorization": "Bearer wrong"}) == 401, path
    for path in ("/", "/middle", "/data.json", "/metrics"):
        assert ask(address + path, one, certificate=one.folder / "jane.pem") == 200, path
        assert ask(address + path, one, headers={"Authorization": f"Bearer {token}"}) == 200, path
    assert token not in one.everything_said()
    (one.keys("coordinator") / "page.token").chmod(0o644)
    said = one.command("coordinator", "page", "--listen", "127.0.0.1:1", "--config", "page.yaml", expect=5)
    assert "others can read this token" in said


def test_the_silos_page_shows_what_left_and_takes_the_consent_back(federation: Make, browser: Any) -> None:
    one = federation(run={"rounds": 100})
    one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    first = one.start_silo("hospital1")
    others = [one.start_silo(name) for name in one.silos[1:]]
    one.wait_for("a round", lambda: len(one.messages("hospital1", "sent")) > 10)
    for process in others:  # the round waits for them, and hospital1 with it
        process.kill()
        process.wait()
    port = free_port()
    shutil.copy(one.folder / "hospital1.yaml", one.folder / "silopage.yaml")
    one.start("silo", "page", "--port", str(port), "--config", "silopage.yaml")
    one.wait_to_say("silopage", "Its token is in")
    url = one.said("silopage").split("this machine: ")[1].split()[0]
    site = f"http://127.0.0.1:{port}"
    token = url.partition("token=")[2]
    bearer = {"Authorization": f"Bearer {token}"}
    assert ask(site, one) == 401
    assert ask(site, one, headers=bearer) == 200
    assert ask(site, one, headers={**bearer, "Host": f"rebound.example:{port}"}) == 421
    forged = urllib.request.Request(
        f"{site}/do/withdraw", data=b"", headers={**bearer, "Origin": "https://elsewhere.example"}
    )
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(forged, timeout=PATIENCE)
    assert not (one.folder / "state" / "hospital1" / "withdrawal.json").exists()
    page = browser.new_page()
    page.set_default_timeout(1000 * PATIENCE)
    page.goto(url)
    assert "token" not in page.url
    page.wait_for_selector("text=Model: feature part")
    page.wait_for_selector("text=In each round of run test (diversifed):")
    page.wait_for_selector("text=Each also carries signed receipts")
    assert_accessible(page)
    page.check("#sure")
    page.click("#withdraw")
    page.wait_for_selector("text=Withdrawn: nothing leaves any more.")
    assert page.url == f"{site}/", "what it said is not in the address"
    page.wait_for_selector("strong:text-is('withdrawn')")
    one.ends_with(first, 4)
    last = one.messages("hospital1", "sent")[-1]
    assert last["rpc"] in ("Withdraw", "Attest")
    # Every byte that left, those of joining and of the withdrawal too, as the report has it.
    report = make_report(one.folder / "state" / "hospital1" / "journal")
    told = json.loads(as_json(report))
    left = {
        run["run"]: {c: sum(f["bytes"] for f in run["left"] if f["exposure"] == c) for c in Exposure}
        for run in told["runs"]
    }
    page.reload()
    found = json.loads(page.evaluate("fetch('data.json').then((answer) => answer.text())"))
    shown = {run["run"]: {c["class"]: c["bytes"] for c in run["classes"]} for run in [found["outside"], *found["runs"]]}
    assert shown == {run: {str(c): count for c, count in counts.items() if count} for run, counts in left.items()}
    assert set(shown) == {"", "test"}
    metrics = page.evaluate("fetch('metrics').then((answer) => answer.text())")
    for run, counts in shown.items():
        for name, count in counts.items():
            assert f'medsilo_sent_bytes{{class="{name}",run="{run}"}} {float(count)}' in metrics
    assert told["withdrawn"]["at"] >= told["withdrawn"]["in_force_from"]
    page.emulate_media(color_scheme="dark")
    assert_accessible(page)
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.locator("th .below >> visible=true").count() > 0, "each kind's description stands below it"
    assert_accessible(page)
    page.close()
