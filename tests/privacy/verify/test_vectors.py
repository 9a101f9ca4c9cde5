"""The published vectors: the package and the HTML page find in every one what is expected, to the word."""

from __future__ import annotations

import base64
import collections
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from medsilo.privacy.audit.verification import verify_evidence
from medsilo.privacy.audit.verifier_page import verifier_page
from medsilo.privacy.journal.records import Kind
from medsilo.privacy.verify import verify_bundle
from tests.support.evidence import vectors
from tests.support.evidence.tampering import records_of
from tests.support.evidence.vectors import EXPECTED, FOLDER, FORM, LIST, applied, finding_of, is_expected

VECTORS: list[dict[str, Any]] = json.loads((FOLDER / LIST).read_text())["vectors"]
SOUND = sorted(path for path in FOLDER.glob("*.json") if path.name not in (LIST, "keys.json"))
IN_PAGE = """
async ({ bundles, vectors, form }) => {
  const bytes = (text) => Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));
  const whole = Object.fromEntries(Object.entries(bundles).map(([name, text]) => [name, bytes(text)]));
  const found = [];
  for (const { bundle, edits, key } of vectors) {
    let content = whole[bundle];
    for (const [offset, gone, come] of edits)
      content = concat(content.subarray(0, offset), bytes(come), content.subarray(offset + gone));
    const { unreadable, problem, index, until } = await verifyBundle(content, key || null);
    const said = problem.startsWith(form) ? form : problem;
    found.push(unreadable ? { unreadable: true } : { problem: said, index, until });
  }
  return found;
}
"""


@pytest.fixture(scope="module")
def page(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The verifier's page as a file, in a browser without a network."""
    path = tmp_path_factory.mktemp("stick") / "verifier.html"
    path.write_bytes(verifier_page())
    context = browser.new_context(offline=True)
    opened = context.new_page()
    opened.goto(path.as_uri())
    yield opened
    context.close()


def test_there_are_vectors_of_every_kind_of_tampering_and_sound_bundles_of_every_kind_of_record() -> None:
    assert len(VECTORS) >= 500
    assert {vector["kind"] for vector in VECTORS} == set(EXPECTED)
    assert {record["kind"] for path in SOUND for record in records_of(path)} == set(Kind)
    contents = {
        applied((FOLDER / f"{v['bundle']}.json").read_bytes(), v["edits"]) + v.get("key", "").encode() for v in VECTORS
    }
    assert len(contents) == len(VECTORS), "no vector stands there twice"


@pytest.mark.parametrize("path", SOUND, ids=lambda path: path.stem)
def test_the_bundles_are_sound_by_the_package_and_by_audit_verify(path: Path) -> None:
    assert verify_bundle(path).problem == ""
    found = verify_evidence(path)
    assert found.sound, found.sentences()


def test_the_package_finds_in_every_vector_what_is_expected(tmp_path: Path) -> None:
    target = tmp_path / "bundle.json"
    wrong = []
    for number, vector in enumerate(VECTORS):
        target.write_bytes(applied((FOLDER / f"{vector['bundle']}.json").read_bytes(), vector["edits"]))
        if (finding := finding_of(target, vector.get("key"))) != vector["finding"]:
            wrong.append((number, vector["kind"], finding, vector["finding"]))
    assert not wrong


def test_what_is_expected_is_what_the_kind_of_tampering_is_to_be_found_by() -> None:
    """Written by hand: a finding by another check, or none, was not put down as the expected one."""
    assert not [v for v in VECTORS if not is_expected(v["kind"], v["finding"]) or v["finding"].get("problem") == ""]
    # These words tell kinds apart: few findings of one kind would do for any other.
    narrow = [kind for kind, words in EXPECTED.items() if len(words) == 1]
    assert len(narrow) > 15


def test_audit_verify_finds_the_same_in_a_sample_of_every_kind(tmp_path: Path) -> None:
    """It runs the same checks first, and adds others."""
    chance = random.Random(1)
    by_kind = collections.defaultdict(list)
    for vector in VECTORS:
        if "unreadable" not in vector["finding"] and vector["bundle"] != "every-kind":  # which has a ledger
            by_kind[vector["kind"]].append(vector)
    target = tmp_path / "bundle.json"
    for kind, some in by_kind.items():
        vector = chance.choice(some)
        target.write_bytes(applied((FOLDER / f"{vector['bundle']}.json").read_bytes(), vector["edits"]))
        found = verify_evidence(target, key=bytes.fromhex(vector["key"]) if "key" in vector else None)
        problem = FORM if found.problem.startswith(FORM) else found.problem
        assert {"problem": problem, "index": found.index, "until": found.until} == vector["finding"], kind


def test_the_page_finds_in_every_vector_what_is_expected(page: Any) -> None:
    bundles = {path.stem: base64.b64encode(path.read_bytes()).decode() for path in SOUND}
    sound = [{"bundle": path.stem, "edits": []} for path in SOUND]
    found = page.evaluate(IN_PAGE, {"bundles": bundles, "vectors": [*sound, *VECTORS], "form": FORM})
    assert found[: len(SOUND)] == [{"problem": "", "index": None, "until": None}] * len(SOUND)
    wrong = [
        (number, vector["kind"], said, vector["finding"])
        for number, (vector, said) in enumerate(zip(VECTORS, found[len(SOUND) :], strict=True))
        if said != vector["finding"]
    ]
    assert not wrong


def test_the_page_shows_what_was_found_and_asks_nobody(page: Any, tmp_path: Path) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.set_input_files("#file", FOLDER / "hospital.json")
    page.wait_for_selector("article[data-verdict=sound]")
    text = page.inner_text("article")
    found = verify_bundle(FOLDER / "hospital.json")
    for said in (found.party, "9 of 9 messages", *found.left, f"{sum(found.left.values()):,} bytes"):
        assert said in text
    assert " ".join(found.key[at : at + 4] for at in range(0, 64, 4)) in text
    vector = next(v for v in VECTORS if v["kind"] == "a length" and v["bundle"] == "hospital")
    path = tmp_path / "<img src=x onerror=alert(1)>.json"
    path.write_bytes(applied((FOLDER / "hospital.json").read_bytes(), vector["edits"]))
    page.set_input_files("#file", path)
    page.wait_for_selector("article[data-verdict=broken]")
    assert vector["finding"]["problem"] in page.inner_text("article")
    assert page.query_selector("article img") is None, "what others wrote is shown as text"
    path.write_bytes(b"nothing")
    page.set_input_files("#file", path)
    page.wait_for_selector("article[data-verdict=unreadable]")
    assert not [url for url in asked if not url.startswith("file:")]


def test_the_page_may_open_nothing(page: Any) -> None:
    blocked = "url => fetch(url).then(() => 'reached', () => 'blocked')"
    assert page.evaluate(blocked, "data:text/plain,x") == "blocked", "no network is needed to see that it may not"
    policy = page.get_attribute("meta[http-equiv=Content-Security-Policy]", "content")
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy


def test_the_page_is_accessible(page: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page.set_input_files("#file", FOLDER / "every-kind.json")
    page.wait_for_selector("article[data-verdict=sound]")
    assert page.evaluate("document.activeElement.textContent") == "Sound", "where a screen reader goes on"
    found = axe.Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


def test_the_list_is_the_one_that_its_command_makes() -> None:
    assert vectors.published(list(vectors.vectors(FOLDER))) == (FOLDER / LIST).read_text()
