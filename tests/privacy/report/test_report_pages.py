"""The report's files: the page is whole and accessible, the PDF opens and holds the same, the JSON keeps its shape."""

from __future__ import annotations

import io
import itertools
import json
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from pypdf import PdfReader

from medsilo.privacy.exposure import Exposure
from medsilo.privacy.journal.records import ApprovalRecord, RefusalRecord
from medsilo.privacy.pages.plots import Strip, bars_by_round
from medsilo.privacy.report.format import Format
from medsilo.privacy.report.model import Report, SharedAccuracy
from medsilo.privacy.report.writing import make_document, to_html, to_json, to_pdf, write_report
from tests.support.evidence.recorded import COORDINATOR, MODELS, OTHER, SILO, Recorded, ordinary

HOSTILE = '<script>alert(1)</script> #image("x") `code` {{ 7*7 }} $x^2$ \N{RIGHT-TO-LEFT OVERRIDE}txt\x1b[31m &amp; “ü”'
VOID = {"meta", "br", "wbr", "rect", "line"}


@pytest.fixture(scope="module")
def silo(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """A silo's report with something in every section, hostile words among it."""
    with ordinary(tmp_path_factory.mktemp("silo")) as recorded:
        recorded.consent("MODEL_PARAMETERS", "SAMPLE_COUNT", "PEER_DERIVED")
        recorded.run("autumn", method="fedavg", rounds=120)
        for number in range(120):
            recorded.upload("autumn", number, {**MODELS, Exposure.SAMPLE_COUNT: {"samples": 8}})
        recorded.door.note(RefusalRecord(run="autumn", peer=COORDINATOR.uri, rpc="GetTask", reason=HOSTILE))
        recorded.door.note(ApprovalRecord(run="spring", plan_sha256="12" * 32))
        return recorded.report()


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Report:
    with Recorded(tmp_path_factory.mktemp("coordinator"), COORDINATOR) as recorded:
        recorded.run("spring")
        for hospital in (SILO, OTHER):
            recorded.upload("spring", 0, MODELS, silo=hospital)
        return recorded.report(accuracies=[SharedAccuracy("spring", 2, 0.7)])


@pytest.fixture(params=["silo", "coordinator"])
def report(request: pytest.FixtureRequest) -> Report:
    found: Report = request.getfixturevalue(request.param)
    return found


class Reader(HTMLParser):
    """Checks nesting, and keeps what the tests ask for."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, *tags: str) -> list[tuple[str, dict[str, str | None]]]:
        return [element for element in self.elements if element[0] in tags]


class TestPage:
    def test_is_whole_and_asks_for_nothing_from_elsewhere(self, report: Report) -> None:
        page = to_html(report).decode()
        read = Reader(page)
        assert read.all("html")[0][1]["lang"] == "en"
        assert not read.all("script", "link", "iframe", "object", "embed", "img", "form", "base")
        for _, attributes in read.elements:
            assert not [name for name in attributes if name.startswith("on") or name in ("src", "action", "style")]
            assert (attributes.get("href") or "#").startswith("#")
        style = page[page.index("<style>") : page.index("</style>")]
        assert "url(" not in style
        assert "@import" not in style

    def test_has_headings_in_order_and_links_that_lead_somewhere(self, report: Report) -> None:
        read = Reader(to_html(report).decode())
        levels = [int(tag[1]) for tag, _ in read.all("h1", "h2", "h3", "h4")]
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
        names = [attributes["id"] for _, attributes in read.elements if "id" in attributes]
        assert len(names) == len(set(names))
        assert {attributes["href"] for _, attributes in read.all("a")} <= {f"#{name}" for name in names}

    def test_has_tables_with_captions_and_headers_and_pictures_with_words(self, report: Report) -> None:
        page = to_html(report).decode()
        read = Reader(page)
        tables = len(read.all("table"))
        assert tables == len(read.all("caption")) > 5
        assert all(attributes["scope"] in ("col", "row") for _, attributes in read.all("th"))
        pictures = read.all("svg")
        assert pictures
        for _, attributes in pictures:
            assert attributes["role"] == "img"
            names = str(attributes["aria-labelledby"]).split()
            assert set(names) <= {str(a.get("id")) for _, a in read.all("title", "desc")}

    def test_shows_hostile_words_as_words(self, silo: Report) -> None:
        page = to_html(silo).decode()
        assert "<script" not in page
        assert "{{ 7*7 }}" in page
        assert "\N{RIGHT-TO-LEFT OVERRIDE}" not in page
        assert "\x1b" not in page
        assert "“ü”" in page


class TestPaper:
    def test_opens_is_tagged_and_holds_what_the_page_holds(self, report: Report) -> None:
        reader = PdfReader(io.BytesIO(to_pdf(report)))
        document = make_document(report)
        assert reader.metadata is not None
        assert reader.metadata.title == document.title
        assert reader.trailer["/Root"]["/MarkInfo"]["/Marked"]  # type: ignore[index]
        assert reader.trailer["/Root"]["/Lang"] == "en"  # type: ignore[index]
        first = "".join(reader.pages[0].extract_text().split())
        for answer in document.answers:
            assert "".join(answer.question.split()) in first
            assert "".join(answer.verdict.split()) in first
        for warning in document.warnings:
            assert "".join(warning.split()) in first
        everything = "".join("".join(page.extract_text() for page in reader.pages).split())
        for section in document.sections:
            assert "".join(section.title.split()) in everything
        assert report.root_sha256 in everything
        assert report.key_sha256 in everything

    def test_shows_hostile_words_as_words(self, silo: Report) -> None:
        text = "".join(page.extract_text() for page in PdfReader(io.BytesIO(to_pdf(silo))).pages)
        assert "<script>alert(1)</script>" in text
        assert "$x^2$" in text


class TestMachines:
    def test_the_json_has_the_shape_that_the_documentation_describes(self, report: Report) -> None:
        content = json.loads(to_json(report))
        described = (Path(__file__).parents[3] / "docs" / "report.md").read_text()
        for key in content:
            assert f"`{key}`" in described, key
        for run in content["runs"]:
            assert set(run) == {
                "run", "method", "rounds", "plan_sha256", "what_left", "masked_sums", "consents_sha256", "bytes_left",
                "left", "started_from", "mixtures", "mixtures_in_words",
                "came_back",
            }  # fmt: skip
            for flow in run["left"] + run["came_back"]:
                assert set(flow) == {
                    "peer", "exposure", "bytes", "messages", "per_round", "outside_rounds", "fields", "tensors",
                }  # fmt: skip
                assert flow["bytes"] == flow["outside_rounds"] + sum(one["bytes"] for one in flow["per_round"])
        assert content["privacy_loss"]["epsilon"] is None
        assert (content["form"], content["version"]) == ("medsilo-report", 1)

    def test_the_same_journal_gives_the_same_files_to_the_byte(self, report: Report, tmp_path: Path) -> None:
        for folder in ("one", "two"):
            written = write_report(report, tmp_path / folder, Format)
            assert [path.name for path in written] == ["report.html", "report.pdf", "report.json"]
        for path in written:
            assert path.read_bytes() == (tmp_path / "one" / path.name).read_bytes()


class TestPictures:
    def test_many_rounds_share_bars_and_no_byte_is_lost(self, silo: Report) -> None:
        document = make_document(silo)
        (section,) = [section for section in document.sections if section.anchor == "rounds"]
        data: Any = [block.blocks[0] for block in section.blocks if block.kind == "fold"]  # type: ignore[union-attr]
        longest = max(data, key=lambda table: len(table.rows))
        assert longest.rows[0][0] == "1–3"
        assert len(longest.rows) == 40
        (run,) = [run for run in silo.runs if run.name == "autumn"]
        column = longest.columns.index("Model: feature part")
        shown = sum(int(row[column].replace("\N{NO-BREAK SPACE}", "")) for row in longest.rows)
        assert shown == run.left[Exposure.MODEL_PARAMETERS_EXTRACTOR].bytes

    def test_small_and_large_kinds_are_both_visible(self) -> None:
        strips = [Strip("large", True, [10**9, 10**9]), Strip("small", True, [3, 0])]
        svg = ElementTree.fromstring(bars_by_round(strips, ["1", "2"], unit="Round", identifier="x"))
        bars = [float(bar.attrib["height"]) for bar in svg.iter("{http://www.w3.org/2000/svg}rect")]
        assert len(bars) == 3
        assert min(bars) == max(bars)
        assert "small (bytes): 3 bytes, once" in "".join(svg.itertext())

    @pytest.mark.parametrize("rounds", [1, 7, 38, 40, 41])
    def test_the_axis_has_even_steps_and_ends_with_the_last_round(self, rounds: int) -> None:
        labels = [str(number + 1) for number in range(rounds)]
        svg = bars_by_round([Strip("one", True, [1] * rounds)], labels, unit="Round", identifier="x")
        told = [
            int(text.text or "")
            for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
            if text.get("text-anchor") == "middle"
        ]
        assert told[-1] == rounds
        assert len({after - before for before, after in itertools.pairwise(told)}) <= 1


@pytest.mark.parametrize("width", [1200, 360])
def test_axe_finds_nothing_and_nothing_is_cut_off(browser: Any, report: Report, width: int, tmp_path: Path) -> None:
    """On a desk and on a phone, details open and closed; the page asks for no other file."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    path = tmp_path / "report.html"
    path.write_bytes(to_html(report))
    page = browser.new_page(viewport={"width": width, "height": 800})
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    for state in ("closed", "open"):
        if state == "open":
            page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
        found = axe.run(page).response["violations"]
        assert [(one["id"], one["impact"], one["nodes"][0]["html"]) for one in found] == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert asked == [path.as_uri()]
    page.close()


def test_on_paper_the_page_shows_its_folded_tables(browser: Any, silo: Report, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_bytes(to_html(silo))
    page = browser.new_page()
    page.goto(path.as_uri())
    text = "".join(sheet.extract_text() for sheet in PdfReader(io.BytesIO(page.pdf(prefer_css_page_size=True))).pages)
    page.close()
    assert "chunk.model_parameters_extractor" in text
    assert "118–120" in text
