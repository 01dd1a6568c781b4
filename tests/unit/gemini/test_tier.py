"""Sizes as users write them, and the account of the device."""

import pytest

from core.config import UserError, in_words
from core.gemini.tier import DeviceTier, HostTier, OverBudget, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"), [("10GiB", 10 * 2**30), ("800 MB", 800 * 10**6), ("1.5kib", 1536), ("4096", 4096), ("7B", 7)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "ten GB", "0", "-1GB", "3 parsecs", "1e999GB", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="give one such as 10GiB"):
        parse_bytes(text)


def test_in_words() -> None:
    assert [in_words(n) for n in (12, 2048, 1.5 * 2**30)] == ["12 bytes", "2 KiB", "1.5 GiB"]


def test_the_account() -> None:
    tier = DeviceTier(100)
    tier.take(40, "a")
    tier.set_other(50)
    with pytest.raises(OverBudget):
        tier.take(11, "b")
    tier.give(40)
    tier.take(50, "b")
    with pytest.raises(OverBudget):
        tier.set_other(51)
    assert (tier.current_bytes, tier.room_bytes, tier.peak_bytes) == (50, 0, 100)


def test_the_account_of_the_host() -> None:
    tier = HostTier(100)
    tier.require(100)
    with pytest.raises(UserError, match="at least 101 bytes"):
        tier.require(101)
    tier.note(90)
    tier.note(40)
    assert tier.peak_bytes == 90
    with pytest.raises(OverBudget):
        tier.note(101)
    HostTier(None).require(10**15)
