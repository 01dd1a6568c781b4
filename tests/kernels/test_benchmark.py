"""The kernel benchmark refuses to report on a family that computes something else."""

import sys
from dataclasses import replace

import pytest
import torch

from benchmarks import kernels, liger
from benchmarks.gpu import checks
from benchmarks.gpu.protocol import Where
from core.config import UserError
from core.kernels import specs
from core.kernels.spec import outputs_of

SPEC = specs()["softmax"]


def test_a_red_family_is_not_timed() -> None:
    kernels.check_green(SPEC)
    with pytest.raises(UserError, match=r"softmax is off by 0.001.*no result"):
        kernels.check_green(replace(SPEC, function=lambda **inputs: SPEC.reference(**inputs) * 1.001))


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about the interpreter; runs where there is no CUDA device")
def test_a_check_on_a_gpu_is_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry of the protocol's command a."""
    [row] = checks.check("softmax", Where("cpu", quick=True))
    assert 0 < row.numbers["error"].value <= 1
    off = replace(SPEC, function=lambda **inputs: SPEC.function(**inputs) * 1.001)
    monkeypatch.setattr(checks, "specs", lambda: {"softmax": off})
    with pytest.raises(AssertionError, match=r"float32, .* times what is allowed"):
        list(checks.check("softmax", Where("cpu", quick=True)))


def test_a_row_is_a_share_of_the_nearer_bound() -> None:
    roofline = kernels.Roofline(bandwidth=100.0, flops={torch.float32: 10.0})
    assert roofline.seconds(200, 10, torch.float32) == 2.0
    assert roofline.seconds(100, 50, torch.float32) == 5.0


def test_every_pass_is_measured() -> None:
    case = {"B": 1, "S": 2, "H": 1, "L": 2, "N": 8, "bias": True}
    roofline = kernels.Roofline(1e9, {torch.float32: 1e9})
    rows = list(kernels.rows_of(SPEC, case, torch.float32, roofline, compiled=False))
    assert [r.case["pass"] for r in rows if r.case["contender"] == "ours"] == ["forward", "backward"]
    assert all(r.numbers["time"].value > 0 for r in rows)


def test_a_loss_that_makes_its_gradients_in_the_forward_is_timed_as_a_whole() -> None:
    spec, case = specs()["linear_cross_entropy"], {"N": 5, "D": 4, "V": 7}
    rows = list(kernels.rows_of(spec, case, torch.float32, kernels.Roofline(1e9, {torch.float32: 1e9}), compiled=False))
    assert [r.case["pass"] for r in rows] == ["both"]


def test_a_contender_that_fails_is_named_and_the_others_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**inputs: object) -> None:
        raise RuntimeError("no engine\nand more")

    monkeypatch.setattr(kernels, "peers_of", lambda spec, inputs: {"broken": broken, "again": SPEC.reference})
    case, roofline = {"B": 1, "S": 2, "H": 1, "L": 2, "N": 8}, kernels.Roofline(1e9, {torch.float32: 1e9})
    said: list[str] = []
    rows = list(kernels.rows_of(SPEC, case, torch.float32, roofline, False, said.append))
    assert {r.case["contender"] for r in rows} >= {"ours", "again"}
    assert said == ["broken failed: softmax, B=1 S=2 H=1 L=2 N=8: RuntimeError: ['no engine']"]
    with pytest.raises(RuntimeError, match="no engine"):
        list(kernels.rows_of(SPEC, case, torch.float32, roofline, False))


def test_a_family_that_is_not_there_is_named() -> None:
    assert set(kernels.chosen(["softmax", "rope"])) == {"softmax", "rope"}
    with pytest.raises(UserError, match=r"--family sofmax: no kernel has that name; the families are .*softmax"):
        kernels.chosen(["sofmax"])


def test_scores_that_take_many_gigabytes_are_not_made() -> None:
    spec = specs()["attention"]
    sizes = [kernels.scores_bytes(spec, spec.inputs(c, torch.bfloat16, "meta", torch.Generator())) for c in spec.timed]
    assert sizes[0] <= kernels.SCORES_BYTES < sizes[1]


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_an_update_is_timed_without_copies(name: str) -> None:
    spec = specs()[name]
    inputs = kernels.inputs_of(spec, {"shapes": ((3, 4),)}, torch.float32)
    before = inputs["param_0"].clone()
    for function in kernels.contenders(spec, inputs, compiled=False).values():
        function(**inputs)
    assert not torch.equal(inputs["param_0"], before)


def test_gradients_are_checked_too() -> None:
    """A function that is right forward and off backward."""

    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, dy):  # pyright: ignore
            return dy * 1.001

    with pytest.raises(UserError, match=r"softmax is off by"):
        kernels.check_green(replace(SPEC, function=lambda **inputs: Off.apply(SPEC.reference(**inputs))))


def row(kernel: str, case: str, dtype: str, numbers: dict[str, float], **more: str) -> kernels.Row:
    described = {"kernel": kernel, "case": case, "dtype": dtype, "bound": "memory", "pass": "forward"}
    units = {name: kernels.Number(value, "") for name, value in numbers.items()}
    return kernels.Row(described | {"contender": "ours"} | more, units)


def test_targets_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = [
        row("softmax", "N=1", "bfloat16", {"time": 1.0, "share": 0.9}),
        row("softmax", "N=1", "bfloat16", {"time": 1.0, "share": 0.5}, contender="eager"),
        row("softmax", "N=1", "float32", {"time": 1.0, "share": 0.5}),
        row("int8_matmul", "M=4096", "bfloat16", {"time": 1.0, "share": 0.5}, bound="arithmetic"),
        row("gated_output", "N=1", "bfloat16", {"time": 1.0, "share": 0.5}),
        row("attention", "K=64 causal=True", "bfloat16", {"time": 1.0, "share": 0.7}, bound="arithmetic"),
        row("attention", "K=128", "bfloat16", {"time": 1.0, "share": 0.4}, bound="arithmetic", **{"pass": "backward"}),
        row("attention", "K=32 bias=H", "bfloat16", {"time": 2.0, "share": 0.1}, bound="arithmetic"),
        row(
            "attention", "K=32 bias=H", "bfloat16", {"time": 1.0, "share": 0.2}, bound="arithmetic",
            contender=kernels.WITHOUT_BIAS,
        ),
        row("adafactor", "shapes=((4096, 4096),)", "float32", {"time": 100.0, "share": 0.7}),
    ]  # fmt: skip
    monkeypatch.setattr(kernels, "device", lambda: torch.device("cuda"))
    found = {t.what: (t.wanted, t.reached, t.met) for t in kernels.targets(figures)}
    assert found == {
        "softmax forward, N=1: share of the copy's bandwidth": (0.85, 0.9, True),
        "attention forward, K=64 causal=True: share of the matrix products' rate": (0.6, 0.7, True),
        "attention backward, K=128: share of the matrix products' rate": (0.45, 0.4, False),
        "attention forward, K=32 bias=H: share of the speed without bias": (1 / 1.3, 0.5, False),
        "adafactor forward, shapes=((4096, 4096),): 0.12 ms": (1.0, pytest.approx(1.2), True),
    }
    monkeypatch.setattr(kernels, "device", lambda: torch.device("cpu"))
    assert kernels.targets(figures) == []


def test_the_loss_needs_a_tenth_of_the_memory_of_all_logits() -> None:
    """Counted without a GPU, at the sizes of GPT-2 to Llama 3, beside the gradients: a target on every machine."""
    reached = kernels.targets(kernels.peak_rows(torch.bfloat16))
    assert len(reached) == len(specs()["linear_cross_entropy"].timed)
    assert all(t.met for t in reached), reached


def test_with_many_tokens_the_gradients_count_too() -> None:
    """128,256 words, and 16,384 tokens: a tenth with the gradients of x and the weight in both counts."""
    peaks = kernels.peaks_of_loss({"N": 16_384, "D": 4096, "V": 128_256}, torch.bfloat16)
    assert peaks["ours"] < kernels.PEAK_SHARE * peaks["eager"], peaks


def test_first_cases_come_first() -> None:
    order = [spec.timed.index(case) for spec, case in kernels._in_turn(on_gpu=True, quick=False)]
    assert order == sorted(order)
    assert len(order) == sum(len(spec.timed) for spec in specs().values())


def test_every_family_has_a_size_for_a_cpu() -> None:
    timed = kernels._in_turn(on_gpu=False, quick=False)
    assert [spec.name for spec, _ in timed] == list(specs())
    assert set(kernels.ON_CPU) == set(specs())
    for spec, case in timed:
        traffic = spec.traffic(case, torch.float32)
        assert traffic.forward_flops + traffic.backward_flops < 10e9, spec.name
        assert 1e6 <= traffic.forward_bytes + traffic.backward_bytes < 200e6, spec.name


@pytest.mark.skipif(torch.cuda.is_available(), reason="times the sizes for a CPU; runs where there is no CUDA device")
@pytest.mark.parametrize("name", list(specs()))
def test_every_family_is_timed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What --quick runs: rows of every pass, ours and on a CPU SDPA beside it."""
    monkeypatch.setattr(kernels, "seconds_of", lambda run: (run(), 1.0)[1])
    ((spec, case),) = ((s, c) for s, c in kernels._in_turn(on_gpu=False, quick=True) if s.name == name)
    rows = list(kernels.rows_of(spec, case, torch.float32, kernels.Roofline(1e9, {torch.float32: 1e9}), compiled=False))
    passes = {r.case["pass"] for r in rows if r.case["contender"] == "ours"}
    assert passes == ({"both"} if name in kernels.TOGETHER else {"forward", "backward"} if spec.grads else {"forward"})
    assert ("SDPA" in {r.case["contender"] for r in rows}) == (name == "attention")


class LigerStandIn:
    """Liger's operators by torch: as they are called, with as many arguments as they take."""

    def __getattr__(self, name: str) -> type:
        return type(name, (), {"apply": staticmethod(getattr(self, f"_{name.removesuffix('Function')}"))})

    @staticmethod
    def _LigerRMSNorm(x, weight, eps, offset, casting_mode, in_place, row_mode=None):
        assert (offset, in_place) == (0.0, False)
        return specs()["rms_norm"].reference(x, weight, eps=eps)

    @staticmethod
    def _LigerFusedAddRMSNorm(x, residual, weight, eps, offset=0.0, casting_mode="llama", in_place=False):
        return specs()["rms_norm"].reference(x, weight, eps=eps, residual=residual)

    @staticmethod
    def _LigerLayerNorm(x, weight, bias, eps):
        return specs()["layer_norm"].reference(x, weight, bias, eps)

    @staticmethod
    def _LigerGroupNorm(x, weight, bias, num_channels, num_groups, eps):
        assert num_channels == x.shape[1]
        return specs()["group_norm"].reference(x, num_groups, weight, bias, eps=eps)

    @staticmethod
    def _LigerSiLUMul(gate, up, gate_multiplier=1.0, down_multiplier=1.0):
        return specs()["swiglu"].reference(gate, up)

    @staticmethod
    def _LigerRope(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim):
        assert (position_ids, unsqueeze_dim, rotary_dim) == (None, 1, 2 * cos.shape[-1])
        found = specs()["rope"].reference(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return tuple(x.transpose(1, 2) for x in found)

    @staticmethod
    def _LigerFusedLinearCrossEntropy(
        x, weight, target, bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction
    ):
        assert (bias, ce_weight, reduction) == (None, None, "sum")
        options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": lse_square_scale}
        return specs()["linear_cross_entropy"].reference(x, weight, target, **options), None


@pytest.mark.parametrize("name", sorted(liger._MAKERS))
def test_liger_is_asked_for_the_same(name: str) -> None:
    """Of the cases that are timed at least one; of the tests' each that Liger is asked for gives the reference's."""
    spec, asked = specs()[name], 0
    for case in spec.cases:
        inputs = spec.inputs(case, torch.float32, "cpu", torch.Generator().manual_seed(0))
        function = liger.liger(LigerStandIn(), name, inputs)
        if function is not None:
            asked += 1
            wanted, found = (outputs_of(f(**inputs)) for f in (spec.reference, function))
            for a, b in zip(wanted, found, strict=True):
                torch.testing.assert_close(a, b)
    assert asked > 0
    timed = [spec.inputs(case, torch.bfloat16, "meta", torch.Generator()) for case in spec.timed]
    assert any(liger.liger(LigerStandIn(), name, inputs) for inputs in timed)


def test_peers_that_are_not_installed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = specs()["rms_norm"]
    inputs = spec.inputs({"B": 1, "L": 2, "N": 8, "weight": True}, torch.float32, "cpu", torch.Generator())
    assert kernels.absent_peers() == [], "on a CPU none is asked"
    monkeypatch.setattr(kernels, "device", lambda: torch.device("cuda"))
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    assert kernels.absent_peers() == [liger.ABSENT]
    assert "Liger" not in kernels.peers_of(spec, inputs)
    monkeypatch.setattr(liger, "operators", LigerStandIn)
    assert kernels.absent_peers() == []
    assert "Liger" in kernels.peers_of(spec, inputs)
    assert "Liger" not in kernels.peers_of(specs()["attention"], {"q": torch.empty(1)})
