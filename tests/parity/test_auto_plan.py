"""A plan is what its ranks do: bytes of every collective over every axis, and the most memory at once."""

from collections import Counter
from typing import Any

import pytest
import torch

from core.auto import parallelize, plan_of
from core.auto.readable import PEAK_WITHIN
from core.comm.volume import count_volume, wire_share
from core.compat import own_part
from core.trace.account import MemoryAccount
from tests.support.auto_models import MODELS
from tests.support.spread import FREE, SLOW, case_of, mesh_of
from tests.support.zoo import in_fp64


def stepped(name: str, sizes: tuple[int, ...]) -> dict[str, Any]:
    """What a rank of a step sends and holds, and what its plan says."""
    case = case_of(name)
    mesh = mesh_of(sizes)
    torch.manual_seed(0)
    with in_fp64():
        model, inputs = case.make().double().train(), case.inputs(0)
        parallelize(model, inputs, mesh=mesh, links=[FREE], speed=SLOW, state=0.0)
        case.loss(model(**inputs)).backward()  # what a first step alone makes is there
        model.zero_grad()
        with count_volume(mesh) as volume, MemoryAccount() as account:
            account.add(own_part(parameter) for parameter in model.parameters())
            account.add(model.buffers())
            case.loss(model(**inputs)).backward()
    plan = plan_of(model)
    sent = Counter({key: num * wire_share(key[0], volume.sizes[key[1]]) for key, num in volume.bytes.items()})
    return {
        "sent": {key: num for key, num in sent.items() if num},
        "planned": plan.sent(mesh.get_coordinate()),
        "peak": account.peak_bytes,
        "planned_peak": plan.account.peak_bytes,
        "uneven": plan.sent() != plan.sent(mesh.get_coordinate()),
    }


FEW = (("resnet", (2,)),)
STEPS = [
    *FEW,
    *((name, (2, 2)) for name in ("gpt2", "bert", "t5", "unet")),
    *((name, (3,)) for name in ("gpt2", "vit")),
]
STEPS += [(name, (2,)) for name in MODELS if (name, (2,)) not in FEW]


@pytest.mark.parametrize(
    ("name", "sizes"), [pytest.param(*s, marks=() if s in FEW else pytest.mark.soak, id=str(s)) for s in STEPS]
)
def test_a_step_sends_and_holds_what_is_planned(ranks, name: str, sizes: tuple[int, ...]) -> None:
    found = ranks(4 if len(sizes) == 2 else sizes[0]).run(stepped, name, sizes)
    print([round(of["planned_peak"] / of["peak"], 3) for of in found])
    for of in found:
        assert of["planned"]
        assert of["sent"] == pytest.approx(of["planned"])
        least, most = PEAK_WITHIN
        assert least * of["planned_peak"] <= of["peak"] <= most * of["planned_peak"]
