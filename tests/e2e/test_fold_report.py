"""The report of a prediction, in Chromium without a network: what it shows is what was predicted."""

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from apps.fold.output.confidence import Folded
from apps.fold.output.files import write_mmcif
from apps.fold.output.report import AlignmentPicture, add_relaxed, write_report
from tests.support.browser import browser_with, require_browser
from tests.support.clashes import chain

require_browser()
FLAGS = ["--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"]
NAME = "</script><b>dimer</b>"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two chains of crambin beside each other, relaxed, too."""
    folder, one = tmp_path_factory.mktemp("report"), chain("1ejg.pdb")
    both = np.concatenate([one.positions, one.positions + 20 * one.mask[..., None]])
    count = len(one)
    pae = np.add.outer(np.arange(2 * count), np.arange(2 * count)) / 8.0
    found = Folded(
        2 * one.sequence,
        both,
        np.concatenate([one.mask, one.mask]),
        np.linspace(30, 99, 2 * count),
        pae.astype(np.float32),
        0.5,
        None,
        (count, count),
        0.75,
        np.array([[0.9, 0.3], [0.3, 0.8]]),
    )
    write_mmcif(folder / "x.cif", found, "dimer", "dimer")
    letters = np.zeros((5, 2 * count), np.uint8)
    letters[3:, count:] = 21
    alignment = AlignmentPicture(letters, Counter({"HUMAN": 2, "MOUSE": 1}))
    text = (folder / "x.cif").read_text()
    write_report(folder / "x.html", found, text, NAME, "model_1, seed 0", alignment, "not for science")
    add_relaxed(folder / "x.html", "\n".join(line for line in text.splitlines() if " SG " not in line) + "\n")
    return folder / "x.html"


def test_the_report_shows_the_prediction_without_a_network(report: Path) -> None:
    asked, errors = [], []
    with browser_with(*FLAGS) as browser:
        page = browser.new_page(viewport={"width": 900, "height": 900})
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.goto(report.as_uri())
        page.wait_for_selector("body[data-ready]")
        assert page.inner_text("#name") == NAME
        assert page.inner_text("#note") == "not for science"
        scores = page.inner_text("#scores")
        for part in ("64.5", "0.500", "0.750", "92", "residues in 2 chains", "none"):
            assert part in scores, part
        assert page.evaluate("document.body.dataset.atoms") == str(2 * 326)
        assert page.locator("#view canvas").count() > 0
        page.select_option("#which", "relaxed")
        assert page.evaluate("document.body.dataset.atoms") == str(2 * 320)
        page.select_option("#colour", "chain")
        assert page.inner_text("#legend").split() == ["chain", "A", "chain", "B"]
        page.select_option("#style", "both")
        box = page.locator("#pae").bounding_box()
        assert box is not None
        scale = box["width"] / 586
        place = {"x": (26 + 560 * 60.5 / 92) * scale, "y": 560 * 10.5 / 92 * scale}
        page.locator("#pae").hover(position=place)
        said = page.inner_text("#pair")
        found = re.fullmatch(r"aligned on A (\w)11, scored B (\w)15: (\d+\.\d) Å", said)
        assert found is not None, said
        assert float(found[3]) == pytest.approx(70 / 8, abs=0.13)
        page.locator("#pae").click(position=place)
        assert page.locator("#tables table").count() == 4
        assert "0.900" in page.inner_text("#tables")
        assert "rows of several chains" in page.inner_text("#coverage")
        assert page.locator("#pairing rect").count() == 2
        browser.close()
    assert asked == [report.as_uri()]
    assert errors == []


def test_a_name_cannot_end_its_place_in_the_page(report: Path) -> None:
    text = report.read_text()
    assert text.count("</script>") == text.count("<script")
    data = re.search(r'id="data">(.*?)</script>', text)
    assert data is not None
    assert json.loads(data[1])["name"] == NAME
