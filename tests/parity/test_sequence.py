"""Attention over shards of a sequence equals attention over the whole: outputs, input gradients, bytes; in fp64."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from core.parallel import ring
from core.parallel.ulysses import HeadCut
from tests.support.sequences import AttentionCase, differences, on_shards

TOLERANCE = 1e-12
FP64 = 8

RING = AttentionCase()
FULL = AttentionCase(causal=False)
GROUPED = {"num_heads": 6, "num_kv_heads": 2}

RINGS = [
    *(replace(RING, length=length) for length in (1, 2, 13, 16)),
    *(replace(FULL, length=length) for length in (2, 13)),
    replace(RING, zigzag=False),
    replace(RING, **GROUPED),
    replace(RING, documents=True),
    replace(RING, padding=True),
    replace(RING, alibi=True),
    replace(RING, alibi=True, documents=True, padding=True, **GROUPED),
    replace(FULL, documents=True),
    replace(FULL, padding=True, alibi=True, **GROUPED),
]


def exchanging(exchange: int, *options: dict[str, Any]) -> list[AttentionCase]:
    return [replace(RING, exchange=exchange, **given) for given in options]


EXCHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"length": 16, "num_heads": 7, "num_kv_heads": 7},
    {"num_heads": 12, "num_kv_heads": 6},
    GROUPED,
    {"num_heads": 9, "num_kv_heads": 3},
    {"num_heads": 5, "num_kv_heads": 1},
    {"documents": True, "padding": True, "alibi": True, "num_heads": 10, "num_kv_heads": 5},
    {"causal": False, "documents": True},
    {"causal": False},
)


def check(ranks, num_ranks: int, cases: list[AttentionCase]) -> None:
    for case, *found in zip(cases, *ranks(num_ranks).run(differences, cases), strict=True):
        for difference, _ in found:
            assert difference <= TOLERANCE, f"{case} differs by {difference:.3g} from one rank"


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_ring(ranks, num_ranks: int) -> None:
    check(ranks, num_ranks, RINGS)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_ulysses(ranks, num_ranks: int) -> None:
    """Heads that do not divide; key/value heads fewer than ranks, whose query heads are then dealt out."""
    check(ranks, num_ranks, exchanging(num_ranks, *EXCHANGES))


def test_rings_of_ranks_that_exchange_heads(ranks) -> None:
    check(ranks, 4, exchanging(2, *EXCHANGES))


def ring_bytes(case: AttentionCase, num_ranks: int, local_length: int, num_kv_heads: int) -> tuple[int, int]:
    """(messages, bytes) of a forward and a backward: keys and values twice, their gradients once."""
    block = 2 * case.batch * local_length * num_kv_heads * case.head_size * FP64
    return 3 * (num_ranks - 1), 3 * (num_ranks - 1) * block


def exchange_bytes(case: AttentionCase, rank: int, num_ranks: int, local_length: int) -> int:
    """Bytes of a forward and a backward: q, k and v there, o back; and the other way round."""
    heads = HeadCut(case.num_heads, case.num_kv_heads, num_ranks)
    every = sum(sum(heads.sizes(r)) for r in range(num_ranks)) + case.num_heads
    own = sum(heads.sizes(rank)) + len(heads.queries(rank))
    return case.batch * local_length * case.head_size * FP64 * (every + num_ranks * own)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_ring_sends_its_closed_form_to_the_byte(ranks, num_ranks: int) -> None:
    cases = [RING, FULL, replace(RING, **GROUPED, length=16)]
    for found in ranks(num_ranks).run(differences, cases):
        for case, (_, sent) in zip(cases, found, strict=True):
            pieces = num_ranks * (2 if case.causal else 1)
            local_length = -(-case.length // pieces) * pieces // num_ranks
            expected = ring_bytes(case, num_ranks, local_length, case.num_kv_heads)
            assert sent == {"send/cp": expected, "recv/cp": expected}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_an_exchange_sends_its_closed_form_to_the_byte(ranks, num_ranks: int) -> None:
    cases = exchanging(num_ranks, *EXCHANGES[:6])
    for rank, found in enumerate(ranks(num_ranks).run(differences, cases)):
        for case, (_, sent) in zip(cases, found, strict=True):
            local_length = -(-case.length // num_ranks)
            assert sent == {"all_to_all/cp": (4, exchange_bytes(case, rank, num_ranks, local_length))}


def test_both_send_the_sum_of_their_closed_forms(ranks) -> None:
    case = replace(RING, exchange=2, length=16, num_heads=8, num_kv_heads=4)
    for rank, ((_, sent),) in enumerate(ranks(4).run(differences, [case])):
        ring = ring_bytes(case, 2, 2 * 4, 2)
        exchange = exchange_bytes(case, rank % 2, 2, 4)
        assert sent == {"send/cp_ring": ring, "recv/cp_ring": ring, "all_to_all/cp_ulysses": (4, exchange)}


@pytest.mark.parametrize("exchange", [1, 2], ids=["ring", "ulysses"])
def test_a_missing_message_is_seen(ranks, exchange: int) -> None:
    collective = "batch_isend_irecv" if exchange == 1 else "all_to_all_single"
    cases = exchanging(exchange, {}, {"causal": False}, GROUPED)
    for found in ranks(2).run(differences, cases, collective):
        for difference, _ in found:
            assert difference > 1e-3


def events(case: AttentionCase) -> list[str]:
    """What a rank does, in order: sends, computes a part, waits."""
    found = []

    def noting(word: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*given: Any) -> Any:
            found.append(word)
            return function(*given)

        return noted

    sends = noting("send", lambda *given: noting("wait", pass_on(*given)))
    pass_on, compute, differentiate = ring.pass_on, ring.partial_attention, ring.partial_gradients
    with (
        patch.object(ring, "pass_on", sends),
        patch.object(ring, "partial_attention", noting("o", compute)),
        patch.object(ring, "partial_gradients", noting("d", differentiate)),
    ):
        on_shards(case)
    return found


def test_messages_travel_while_parts_are_computed(ranks) -> None:
    """Keys and values leave before the product that uses them; gradients are waited for after the next product."""
    forward = ["send", "o", "wait"] * 2 + ["o"]
    backward = ["send", "d", "wait", "send", "d", "wait", "send", "d", "wait", "send", "wait"]
    for found in ranks(3).run(events, FULL):
        assert found == forward + backward
