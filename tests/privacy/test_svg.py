"""What every picture of a page promises, whatever it shows."""

from __future__ import annotations

from xml.etree import ElementTree

from medsilo.privacy.pages.svg import PRINTED, Drawing

SVG = "{http://www.w3.org/2000/svg}"


def drawn(words: str) -> str:
    drawing = Drawing(100, 50, words, identifier="here", description=words, **PRINTED)
    with drawing.group(words, class_=words):
        drawing.text(0, 1.25, words, bold=words, text_anchor="end")
    return drawing.end()


def test_a_picture_is_named_and_described_for_screen_readers() -> None:
    picture = ElementTree.fromstring(drawn("Bytes by round"))
    named = {element.get("id"): element.text for element in picture if element.get("id")}
    assert picture.get("role") == "img"
    assert [named[place] for place in str(picture.get("aria-labelledby")).split()] == ["Bytes by round"] * 2


def test_no_name_that_somebody_else_chose_becomes_an_element_or_an_attribute() -> None:
    name = '"><script>alert(1)</script>&'
    picture = ElementTree.fromstring(drawn(name))
    assert {element.tag for element in picture.iter()} == {
        SVG + tag for tag in ("svg", "title", "desc", "g", "text", "tspan")
    }
    (text,) = picture.iter(SVG + "text")
    assert "".join(text.itertext()) == 2 * name
    assert text.attrib == {"x": "0", "y": "1.2", "text-anchor": "end"}
    (group,) = picture.iter(SVG + "g")
    assert group.attrib == {"class": name}
