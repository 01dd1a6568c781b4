"""The list of mutations that `make soak` runs is up to date: each text stands in its file once, each test is there."""

import dataclasses
import re
from pathlib import Path

import pytest

from tests.soak.mutations import MUTATIONS, Mutation
from tests.soak.seen import Seen, keep, kept, key_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what)
def test_it_can_be_made(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.new != mutation.old
    assert mutation.tests
    for test in mutation.tests:
        file, _, name = test.partition("::")
        source = (ROOT / file).read_text()
        assert not name or re.search(rf"^def {name.partition('[')[0]}\(", source, re.MULTILINE), test


def test_no_two_have_one_name() -> None:
    assert len({mutation.what for mutation in MUTATIONS}) == len(MUTATIONS)


def test_what_was_seen_is_of_the_mutations_as_they_are() -> None:
    """And of the tests beside them; `make soak` sees those anew of which the text or the test is another now."""
    named = {mutation.what: mutation for mutation in MUTATIONS}
    for what, entry in kept().items():
        assert what in named, f"{what}: an entry of a mutation that is no more"
        assert entry["key"] == key_of(named[what]), f"{what}: run `make soak`, and commit tests/soak/mutations.json"
        assert any(str(entry["by"]).startswith(test.partition("[")[0]) for test in named[what].tests), what


def test_what_was_seen_is_kept_entry_by_entry(tmp_path: Path) -> None:
    file, (first, second) = tmp_path / "seen.json", MUTATIONS[:2]
    keep(first, Seen("a", 1), file)
    keep(second, Seen("b", 2), file)
    keep(first, Seen("c", 3), file)
    assert {what: entry["by"] for what, entry in kept(file).items()} == {first.what: "c", second.what: "b"}
    changed = dataclasses.replace(first, new=first.new + " ")
    assert kept(file)[first.what]["key"] == key_of(first) != key_of(changed)
