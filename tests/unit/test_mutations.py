"""The list of mutations that `make soak` runs is up to date: each text stands in its file once, each test is there."""

import re
from pathlib import Path

import pytest

from tests.soak.mutations import MUTATIONS, Mutation

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
