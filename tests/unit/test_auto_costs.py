"""Costs of collectives: the closed forms, and the bytes that a counter sees on ranks."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import core.auto
from core.auto.costs import COLLECTIVES, Link, bytes_sent, messages_sent, seconds_of
from core.comm import collectives
from core.comm.volume import count_volume
from core.config import UserError
from core.mesh import MeshConfig, build_mesh

LINK = Link(latency_s=2.0, bytes_per_s=4.0)


@pytest.mark.parametrize(
    ("collective", "sent", "messages"),
    [
        ("all_gather", 45.0, 3),
        ("reduce_scatter", 45.0, 3),
        ("all_reduce", 90.0, 6),
        ("all_to_all", 11.25, 3),
        ("broadcast", 60.0, 3),
        ("send", 60.0, 1),
    ],
)
def test_sixty_bytes_over_four_ranks(collective: str, sent: float, messages: int) -> None:
    assert bytes_sent(collective, 60, 4) == sent
    assert messages_sent(collective, 4) == messages
    assert seconds_of(collective, 60, 4, LINK) == messages * 2.0 + sent / 4.0


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_one_rank_sends_nothing(collective: str) -> None:
    assert bytes_sent(collective, 60, 1) == seconds_of(collective, 60, 1, LINK) == 0


def test_a_link_without_end_costs_its_latency() -> None:
    assert seconds_of("all_gather", 60, 4, Link(1.5, math.inf)) == 4.5


@pytest.mark.parametrize(
    ("refused", "says"),
    [
        (lambda: bytes_sent("allgather", 1, 2), "no collective is called 'allgather'; choose from all_gather, reduce"),
        (lambda: bytes_sent("all_gather", -1, 2), "-1 bytes has no cost; give a number that is 0 or more"),
        (lambda: bytes_sent("all_gather", math.nan, 2), "nan bytes"),
        (lambda: seconds_of("all_gather", 1, 0, LINK), "over 0 ranks; give 1 or more"),
        (lambda: Link(math.nan, 1), "latency_s=nan of a link"),
        (lambda: Link(0, 0), "bytes_per_s=0 of a link"),
        (lambda: Link(0, math.nan), "bytes_per_s=nan of a link"),
    ],
)
def test_what_has_no_cost_is_refused(refused, says: str) -> None:
    with pytest.raises(UserError) as refusal:
        refused()
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


def counted() -> dict[str, float]:
    """Bytes over the wire by the counter, of each collective on a tensor of 8 x 3 doubles that two ranks share."""
    mesh = build_mesh(MeshConfig(tp=2).resolve(2), "cpu")
    axis, full = mesh["tp"], torch.ones(8, 3, dtype=torch.float64)
    group, half = axis.get_group(), full[:4].clone()
    run = {
        "all_gather": lambda: collectives.all_gather(half, 0, axis),
        "reduce_scatter": lambda: collectives.reduce_scatter(full, 0, axis),
        "all_reduce": lambda: collectives.all_reduce(full, axis),
        "all_to_all": lambda: collectives.all_to_all([half[:2], half[2:]], [(2, 3), (2, 3)], axis),
        "broadcast": lambda: dist.broadcast(full, src=0, group=group),
        "send": lambda: dist.send(full, 1, group=group) if dist.get_rank() == 0 else dist.recv(full, 0, group=group),
    }
    found = {}
    for name, collective in run.items():
        with count_volume(mesh) as volume:
            collective()
        found[name] = volume.wire_bytes
    return found


def test_the_counter_sees_the_bytes_that_the_costs_name(ranks) -> None:
    first, _ = ranks(2).run(counted)
    assert first == {collective: bytes_sent(collective, 8 * 3 * 8, 2) for collective in COLLECTIVES}


def test_what_the_documents_take_from_the_package() -> None:
    assert core.auto.Link is Link
    with pytest.raises(UserError, match=r"takes the module, .*; give model, not model.parameters\(\)"):
        core.auto.clip_grad_norm_(nn.Linear(2, 2).parameters(), 1.0)  # pyright: ignore[reportArgumentType]
