"""`fold predict --compile`: graphs that serve any length and all blocks, and give what the eager model does."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from apps.fold import predict, train
from apps.fold.compiled import compile_operations
from apps.fold.model.alphafold import AlphaFold
from apps.fold.model.config import ModelConfig, tiny
from apps.fold.model.evoformer import EvoformerBlock
from apps.fold.subbatch import HEADS, FoldJob, How, apply_subbatches, least_bytes, plan_subbatches
from core.config import UserError
from tests.support.fold import random_features, random_parameters, randomise


def _model(blocks: int, extra: int) -> AlphaFold:
    config = tiny(templates=False)
    stacks = {"evoformer": blocks, "extra": extra}
    config = replace(config, **{name: replace(getattr(config, name), num_blocks=n) for name, n in stacks.items()})
    model = AlphaFold(config).eval()
    model.load_state_dict(random_parameters(config))
    return model


def _folded(model: AlphaFold, config: ModelConfig, residues: int, share: float) -> Tensor:
    features = replace(random_features(residues, rows=5, extra=4, templates=0), templates=None)
    job = FoldJob(config, residues, 5, 4, iterations=1, hidden=True)
    plan = plan_subbatches(job, int(share * least_bytes(job)))
    apply_subbatches(model, {name: how for name, how in plan.choices.items() if name != HEADS})
    with torch.inference_mode():
        return model.fold([features]).pair_BNNZ


@pytest.mark.parametrize("extra", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_graphs_serve_any_length_any_slices_and_all_blocks(extra: int) -> None:
    made = []

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> Callable[..., object]:
        made.append(graph)
        return graph

    torch._dynamo.reset()
    for blocks, residues in ((1, 12), (2, 17)):
        model = _model(blocks, extra)
        expected = [_folded(model, model.config, residues, share) for share in (1.5, 100)]
        compile_operations(model, backend)
        for share, want in zip((1.5, 100), expected, strict=True):
            assert torch.equal(_folded(model, model.config, residues, share), want)
        if blocks == 1:
            first = len(made)  # whole operations, and the first in slices
    assert first > 5
    assert len(made) <= first + 2, "slices of one row may have graphs of their own, but no length, slice or block"


@pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="no C++ compiler; ends where Debian's g++ is",
)
def test_compiled_operations_compute_the_same() -> None:
    """By inductor: one of a block's, in slices, in place; its bias and its edges."""
    config = tiny()
    block = randomise(EvoformerBlock(config.msa_dim, config.pair_dim, config.evoformer)).eval()
    assert isinstance(block, EvoformerBlock)
    some = nn.ModuleList([block.pair.starting])
    z, mask = torch.randn(1, 10, 10, config.pair_dim), torch.ones(1, 10, 10)  # a single row had a graph of its own

    def found() -> Tensor:
        apply_subbatches(some, {"*": How("rows", 4)})
        with torch.inference_mode():
            return some[0](z.clone(), mask)

    torch._dynamo.reset()
    want = found()
    compile_operations(some)
    got = found()
    assert "compiled" in vars(some[0]), "it was the compiled one that ran"
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert not torch.equal(got, z)


def test_no_compiler_is_said_in_one_line(tmp_path: Path) -> None:
    import torch._inductor.config as inductor

    (tmp_path / "in.fasta").write_text(">a\nMKTAYWC\n")
    for command, arguments in (
        (predict.main, [str(tmp_path / "in.fasta"), "--compile", "--device", "cpu", "--out", str(tmp_path / "out")]),
        (train.main, ["--recipe", "debug", "--compile", "--device", "cpu", "--out", str(tmp_path / "run")]),
    ):
        said = pytest.raises(UserError, match=r"compile needs a C\+\+ compiler on a CPU.*apt-get install g\+\+")
        with inductor.patch({"cpp.cxx": ("no-such-compiler",)}), said as caught:
            command(arguments)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
