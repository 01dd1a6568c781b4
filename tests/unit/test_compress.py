"""Compressed gradients on one rank: which parameters, in which shape, columns, skipped steps, refusals, the plan."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from apps.llm.__main__ import APP
from core.comm.volume import wire_share
from core.compose import ParallelConfig, parallelize
from core.config import UserError
from core.gemini.config import GeminiConfig
from core.mesh import MeshConfig, build_mesh, gradient_axes, mesh_shape
from core.optim.adam import AdamConfig
from core.optim.build import OptimConfig
from core.parallel.compress import CommConfig, compressed_bytes, compression_of
from core.parallel.feedback import Feedback
from core.parallel.local import LocalTrainingConfig
from core.parallel.powersgd import NEGLIGIBLE, orthonormal, stack_dims
from core.placement.table import placement
from core.runtime import start
from core.train import TrainConfig

POWERSGD = CommConfig("powersgd", rank=2)
ONE_BIT = CommConfig("one_bit", start=9)
LOCAL = CommConfig("zero_one", start=4, local_steps=4, local_start=9)


@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        ((61, 24), 0),
        ((24,), None),
        ((), None),
        ((0, 4), None),
        ((3, 5), None),  # 2 (3 + 5) > 15
        ((8, 16, 16), 1),  # a stack of matrices: 8 (16 + 16) < 8 + 256
        ((64, 64, 3), 0),  # one kernel: 64 + 192 < 64 (64 + 3)
        ((16, 8, 3, 3), 0),
    ],
)
def test_a_parameter_is_seen_as_what_sends_least(shape, dims):
    assert stack_dims(shape, 2) == dims


def test_columns_are_orthonormal_or_zero():
    generator = torch.Generator().manual_seed(0)
    columns = torch.randn(3, 7, 4, generator=generator, dtype=torch.float64)
    columns[1, :, 2] = columns[1, :, 0] - 3 * columns[1, :, 1]  # nothing of its own
    columns[2, :, 0] = 0
    columns[0, :, 3] = columns[0, :, 2] * (1 + 1e-3 * torch.randn(7, generator=generator, dtype=torch.float64))
    found = orthonormal(columns)
    squares = found.mT @ found
    wanted = torch.eye(4, dtype=torch.float64).repeat(3, 1, 1)
    wanted[1, 2, 2] = wanted[2, 0, 0] = 0
    torch.testing.assert_close(squares, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(found @ (found.mT @ columns), columns, rtol=0, atol=3 * NEGLIGIBLE)
    assert orthonormal(torch.full((1, 3, 2), torch.inf)).eq(0).all()


def compression(model: nn.Module, comm: CommConfig = POWERSGD) -> Feedback:
    with start("cpu", 0):
        mesh = build_mesh(MeshConfig().resolve(1), "cpu")
        made = compression_of(comm, mesh, placement(model, None, mesh), torch.float64, torch.device("cpu"))
    assert made is not None
    return made


def test_a_skipped_step_leaves_everything_as_it_was():
    model = nn.Linear(9, 8, bias=False, dtype=torch.float64)
    plain, skipping = compression(model), compression(model)
    for step in range(4):
        grad = torch.randn(8, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        bad = skipping.reduce({"weight": grad.clone().fill_(torch.inf)})["weight"]
        assert not bad.isfinite().all()
        skipping.discard()
        scale = 2.0**step  # errors are in units of the gradient without it
        (want,), (found,) = (c.reduce({"weight": grad * s}, s).values() for c, s in ((plain, 1.0), (skipping, scale)))
        torch.testing.assert_close(found / scale, want, rtol=1e-12, atol=1e-14)
        plain.commit()
        skipping.commit()
    assert plain.steps == skipping.steps == 4
    # Nothing is lost: what came out and what is left add up to what came in.
    grads = [torch.randn(8, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(step)) for step in range(4)]
    again, out = compression(model), torch.zeros(8, 9, dtype=torch.float64)
    for grad in grads:
        out += again.reduce({"weight": grad.clone()})["weight"]
        again.commit()
    given = torch.stack(grads).sum(0)
    torch.testing.assert_close(out + again.errors["weight"], given)
    assert again.errors["weight"].norm() > 0.1 * given.norm()


def test_rows_that_were_never_seen_stay_zero():
    made = compression(nn.Embedding(11, 6, dtype=torch.float64))
    for step in range(3):
        grad = torch.zeros(11, 6, dtype=torch.float64)
        grad[step : step + 4] = torch.randn(4, 6, dtype=torch.float64)
        found = made.reduce({"weight": grad})["weight"]
        made.commit()
        assert found[step + 4 :].eq(0).all()
        assert found[: step + 4].ne(0).any()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"zero": 2, "reduce_each": True},
            "powersgd with reduce_each: a step's gradient .*; use no --reduce-each, or no",
        ),
        ({"gemini": GeminiConfig("1GiB")}, "with gemini.budget=1GiB: parameters and gradients are moved"),
        ({"local": LocalTrainingConfig("parameter_server")}, "with local.async=parameter_server"),
        ({"mesh": MeshConfig(pp=2)}, "with mesh.pp=2: stages .* use --mesh.pp 1"),
        ({"mesh": MeshConfig(ep=2)}, "with mesh.ep=2: experts"),
        ({"noise_scale": True}, "with noise_scale: no rank has"),
        ({"optim": OptimConfig("hessian_free")}, "with optim.name=hessian_free: it solves"),
        ({"comm": ONE_BIT, "zero": 3}, "one_bit with zero=3: .* use --zero 0, 1 or 2"),
        ({"comm": ONE_BIT, "optim": OptimConfig("muon")}, "with optim.name=muon: it sends the momenta of adam, adamw"),
        ({"comm": CommConfig("zero_one", start=9), "optim": OptimConfig("lamb")}, "zero_one with optim.name=lamb"),
        ({"comm": ONE_BIT, "optim": AdamConfig(amsgrad=True)}, "one_bit with optim.amsgrad=True of adam"),
        ({"comm": ONE_BIT, "optim": AdamConfig(weight_decay=0.1)}, "one_bit with optim.weight_decay=0.1"),
        ({"comm": LOCAL, "mesh": MeshConfig(cp=2)}, "local_steps=4 with mesh.cp=2: ranks that share .* --mesh.cp 1"),
        (
            {"comm": CommConfig("powersgd", rank=10**9)},
            "no parameter .* with comm.rank=1000000000; give a lower --comm.rank",
        ),
    ],
)
def test_what_it_does_not_go_with_is_refused_by_name(options, said):
    def spread() -> None:
        config = TrainConfig(**{"comm": POWERSGD} | options)
        with start("cpu", 0) as runtime:
            parallelize(nn.Linear(9, 8), runtime.mesh(config.mesh), config)

    with pytest.raises(UserError, match=said):
        spread()


def test_a_model_of_vectors_is_refused():
    with start("cpu", 0) as runtime, pytest.raises(UserError, match=r"no parameter of this model is a matrix"):
        parallelize(nn.LayerNorm(9), runtime.mesh(MeshConfig()), ParallelConfig(comm=POWERSGD))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rank": 0}, "comm.rank=0; give a number of columns, at least 1"),
        ({"start": -1}, "comm.start=-1"),
        ({"report_every": -1}, "comm.report_every=-1"),
        ({"density": 0.0}, "comm.density=0.0; give a share above 0 and at most 1"),
        ({"density": 1.5}, "comm.density=1.5"),
        ({"compress": "one_bit"}, "one_bit with comm.start=0: .* or --comm.settled 0.96"),
        ({"compress": "zero_one", "settled": 0.9}, "zero_one with comm.start=0: .* such as 16"),
        ({"settled": 1.0}, "comm.settled=1.0; give a share"),
        ({"local_steps": 0}, "comm.local_steps=0; give a number, at least 1"),
        ({"local_each": 0}, "comm.local_each=0"),
        (vars(LOCAL) | {"local_start": None}, "local_steps=4 without comm.local_start: .* give --comm.local-start"),
        (vars(LOCAL) | {"local_start": 3}, "local_start=3 with comm.start=4, .* give --comm.local-start 4 or more"),
    ],
)
def test_numbers_are_checked(options, said):
    with pytest.raises(UserError, match=said):
        replace(POWERSGD, **options)


OF_LOCAL_STEPS = "--comm.compress zero_one --comm.start 3 --comm.local-start 4 --comm.local-steps 4"
PLAN = ["plan", "--recipe", "debug", "--nproc", "2", "--comm.compress", "powersgd"]


@pytest.mark.parametrize("name", ["top_k", "random_k"])
def test_a_sparse_step_sends_a_share_and_keeps_the_rest(name):
    """What is left is at most (1 - density) of what was given, squared: of random places on average."""
    made, model = CommConfig(name, density=0.25), nn.Linear(40, 30, bias=False, dtype=torch.float64)
    kept = []
    for step in range(20):
        made_anew = compression(model, made)
        made_anew.steps = step
        given = torch.randn(30, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        found = made_anew.reduce({"weight": given.clone()})["weight"]
        made_anew.commit()
        assert int((found != 0).sum()) == 300
        assert torch.equal(found + made_anew.errors["weight"], given)
        kept.append(float(made_anew.errors["weight"].square().sum() / given.square().sum()))
    assert max(kept) < 0.5 if name == "top_k" else abs(sum(kept) / 20 - 0.75) < 0.02


@pytest.mark.parametrize(
    "words",
    [
        *("--zero 0", "--mesh.tp 2 --nproc 4 --zero 2 --microbatch 2", "--comm.compress top_k --zero 1"),
        *(pytest.param(words, marks=pytest.mark.soak) for words in ("--zero 1", "--zero 2", "--zero 3")),
        pytest.param("--comm.compress random_k --zero 0", marks=pytest.mark.soak),
        pytest.param("--zero 1 --nproc 4096 --data.global-batch 4096", marks=pytest.mark.soak),
        "--comm.compress one_bit --comm.start 3 --zero 1",
        pytest.param(
            "--comm.compress one_bit --comm.start 3 --zero 2 --nproc 4096 --data.global-batch 4096",
            marks=pytest.mark.soak,
        ),
        "--comm.compress zero_one --comm.start 3 --zero 1",
        f"{OF_LOCAL_STEPS} --zero 0",
        *(pytest.param(f"{OF_LOCAL_STEPS} {words}", marks=pytest.mark.soak) for words in ("--zero 1", "--zero 2")),
        pytest.param("--comm.compress zero_one --comm.start 3 --zero 2 --mesh.tp 2 --nproc 4", marks=pytest.mark.soak),
    ],
)
def test_a_plan_is_what_a_rank_has_and_sends(words, capsys):
    """To the byte, but for the fullest moment."""
    assert APP.dispatch([*PLAN, "--gpu", "A100", "--check", *words.split()]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 4096])
def test_signs_are_a_bit_of_each_element_there_and_back(ranks):
    """2 (n - 1) / n d / 8 bytes over the link, where rows divide; of ragged ones the largest share of each rank."""
    model = nn.Linear(1024, 12 * 4096, bias=False, device="meta")
    mesh = mesh_shape(MeshConfig(dp_replicate=ranks).resolve(ranks))
    axis = "+".join(gradient_axes(mesh))
    sent = compressed_bytes(placement(model, None, mesh), ONE_BIT, mesh)
    elements, means = 1024 * 12 * 4096, 2 * ranks * 4
    assert dict(sent) == {("all_to_all", axis): elements // 8, ("all_gather", axis): elements // 8 + means}
    wire = sum(n * wire_share(operation, ranks) for (operation, _), n in sent.items())
    assert wire == pytest.approx(2 * (ranks - 1) / ranks * elements / 8 + means * (ranks - 1) / ranks)
    ragged = nn.Linear(7, 13, device="meta")
    rows = -(-13 // ranks)
    sent = compressed_bytes(placement(ragged, None, mesh), ONE_BIT, mesh)
    assert sent["all_to_all", axis] == ranks * (-(-7 * rows // 8) + -(-rows // 8))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 4096])
def test_thin_matrices_are_as_large_on_any_number_of_ranks(ranks):
    model = nn.Linear(1024, 4096, bias=False, device="meta")
    mesh = mesh_shape(MeshConfig(dp_replicate=ranks).resolve(ranks))
    sent = compressed_bytes(placement(model, None, mesh), POWERSGD, mesh)
    assert dict(sent) == {("all_reduce", "+".join(gradient_axes(mesh))): 4 * POWERSGD.rank * (1024 + 4096)}


def test_a_plan_prices_the_link(capsys):
    slow = ["--gpu", "A100", "--bandwidth-gb-s", "0.0125"]
    seconds = []
    for words in (PLAN, PLAN[:5]):
        assert APP.dispatch([*words, *slow]) == 0
        seconds.append(float(capsys.readouterr().out.split(" s communicating")[0].split()[-1]))
    assert seconds[0] < seconds[1] / 4
