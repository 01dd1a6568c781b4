"""docs/architecture.md is true: its picture is the import contract, and its glossary is short, one meaning a word."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
MOST_WORDS = 25


def drawn_layers(page: str) -> list[set[str]]:
    """The rooms of each line of the picture, from the top: names stand before column 40, their description behind."""
    picture = page.split("```\n")[1]
    return [set(line[:40].split()) for line in picture.splitlines() if not line.startswith(" ")]


def contract_layers() -> list[set[str]]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    return [{name.strip().removeprefix("core.") for name in layer.split("|")} for layer in layers]


def glossary(page: str) -> list[str]:
    """Every word that the glossary explains."""
    table = re.search(r"## Glossary\n.*?\|---\|---\|\n(.*?)\n\n", page, re.DOTALL)
    assert table is not None
    rows = [line.split("|")[1] for line in table[1].splitlines()]
    return [word.strip() for row in rows for word in row.split(",")]


def test_the_picture_is_the_import_contract() -> None:
    assert drawn_layers(PAGE) == contract_layers()


def test_every_room_of_core_is_drawn() -> None:
    rooms = {
        path.stem for path in (ROOT / "core").iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert set.union(*drawn_layers(PAGE)) == rooms - {"__init__"}


def test_the_glossary_is_short() -> None:
    words = glossary(PAGE)
    assert 10 < len(words) <= MOST_WORDS
    assert len(set(words)) == len(words)


@pytest.mark.parametrize(
    ("old", "new"), [("\ngemini  ", "\nGemini  "), ("\ncompose  ", "\n\ncompose  "), ("nn   optim", "nn  ")]
)
def test_another_picture_is_seen(old: str, new: str) -> None:
    assert old in PAGE
    assert drawn_layers(PAGE.replace(old, new)) != contract_layers()
