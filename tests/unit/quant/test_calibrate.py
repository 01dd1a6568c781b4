"""4 bits by what the weights meet: GPTQ as the paper writes it, and which inputs belong to which weight."""

import copy

import pytest
import torch
from torch import Tensor, nn

from core.config import UserError
from core.kernels.quantized_matmul import dequantize_int4, quantize_int4
from core.models import Decoder
from core.nn.attention import StepContext
from core.quant import QuantizedWeight, Scheme, gptq, quantize
from core.quant.calibrate import calls_of, moments
from core.quant.choose import choose
from core.quant.gptq import Moments, Steps
from tests.unit.quant.models import FAMILIES, UNet, decoder, unet_inputs

ALL = {"embeddings": True, "head": True}


def inputs(rows: int, columns: int, seed: int = 0) -> Tensor:
    """[N, I], correlated: a few directions are much longer than the others."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    return (
        torch.randn(rows, columns, generator=generator, dtype=torch.float64)
        * (torch.arange(1, columns + 1) ** -0.7)
        @ mixing
    )


def weight(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(7))


def textbook(w_OI: Tensor, hessian_II: Tensor, steps: Steps) -> Tensor:
    """Optimal brain quantization in the order of the columns (Frantar et al. 2023, equation 2), without Cholesky.

    The values that the codes stand for. The inverse loses a row and a column each time one is rounded.
    """
    columns = w_OI.shape[1]
    damped = hessian_II + 0.01 * hessian_II.diagonal().mean() * torch.eye(columns)
    inverse, w_OI, values = torch.linalg.inv(damped), w_OI.double().clone(), []
    for column in range(columns):
        if column % steps.group == 0:
            stop = min(column + steps.group, columns)
            cost = torch.stack([damped[i:, i:].inverse()[0, 0] for i in range(column, stop)]) ** -1
            group = torch.zeros(len(w_OI), steps.group).index_copy_(
                1, torch.arange(stop - column), w_OI[:, : stop - column].float()
            )
            cost = torch.cat((cost, torch.zeros(steps.group - len(cost)))).float()
            found = gptq.int4_steps(group[:, None], steps.symmetric, steps.scale_bits, steps.shares, cost)
            scale, zero = (each[:, 0].double() for each in found)
        code = ((w_OI[:, 0] / scale).round() + zero).clamp(0, 15)
        values.append((code - zero) * scale)
        lost = (w_OI[:, 0] - values[-1]) / inverse[0, 0]
        w_OI = (w_OI - lost[:, None] * inverse[0])[:, 1:]
        inverse = (inverse - inverse[:, :1] @ inverse[:1] / inverse[0, 0])[1:, 1:]
    return torch.stack(values, 1)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("columns", [64, 70, 31])
def test_gptq_is_the_papers(columns: int, symmetric: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gptq, "_SWEEPS", 0)
    monkeypatch.setattr(gptq, "_SLAB", 3 * columns)
    steps = Steps(32, symmetric, 8 if symmetric else 5, (1.0, 0.9))
    x_NI, w_OI = inputs(200, columns), weight(7, columns)
    hessian_II = x_NI.T @ x_NI
    parts = gptq.gptq(w_OI, Moments(hessian_II), steps)
    assert [part.dtype for part in parts if part is not None] == [torch.uint8, torch.bfloat16, torch.uint8][
        : len(parts) - symmetric
    ]
    torch.testing.assert_close(
        dequantize_int4(*parts, columns, torch.float64), textbook(w_OI, hessian_II, steps), rtol=0, atol=0
    )


def error(parts: tuple, w_OI: Tensor, hessian_II: Tensor) -> float:
    lost_OI = dequantize_int4(*parts, w_OI.shape[1]).double() - w_OI
    return float(((lost_OI @ hessian_II) * lost_OI).sum())


def test_products_change_less_and_less_again_with_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    x_NI, w_OI = inputs(500, 150), weight(40, 150)
    hessian_II, steps = x_NI.T @ x_NI, Steps(64, False, 5, (1.0, 0.9, 0.8))
    nearest = error(quantize_int4(w_OI, 64, False, 5, steps.shares), w_OI, hessian_II)
    errors = []
    for sweeps in (0, 1, 3):
        monkeypatch.setattr(gptq, "_SWEEPS", sweeps)
        errors.append(error(gptq.gptq(w_OI, Moments(hessian_II), steps), w_OI, hessian_II))
    assert errors[0] < 0.5 * nearest
    assert errors[2] < errors[1] < 0.97 * errors[0]


def test_uncorrelated_inputs_leave_the_nearest_steps() -> None:
    w_OI, steps = weight(9, 70), Steps(32, False, 5, (1.0, 0.9))
    expected = quantize_int4(w_OI, 32, False, 5, steps.shares)
    for hessian_II in (3.0 * torch.eye(70), torch.zeros(70, 70)):
        for found, wanted in zip(gptq.gptq(w_OI, Moments(hessian_II), steps), expected, strict=True):
            assert torch.equal(found, wanted)


def test_what_earlier_layers_lost_is_made_good() -> None:
    """Inputs that come changed: the rounded weight does to them what the plain one does to the plain inputs."""
    x_NI, w_OI, steps = inputs(500, 64), weight(16, 64), Steps(32, False, 5, (1.0,))
    changed_NI = x_NI @ (torch.eye(64, dtype=torch.float64) + 0.2 * inputs(64, 64, 3) / 64**0.5)
    hessian_II = changed_NI.T @ changed_NI

    def miss(known: Moments) -> float:
        rounded_OI = dequantize_int4(*gptq.gptq(w_OI, known, steps), 64, torch.float64)
        return float((changed_NI @ rounded_OI.T - x_NI @ w_OI.T.double()).norm())

    assert miss(Moments(hessian_II, x_NI.T @ changed_NI)) < 0.2 * miss(Moments(hessian_II))


# --- models -----------------------------------------------------------------------------------------------------------


def texts(rows: int = 24, seed: int = 0) -> Tensor:
    """ids that repeat themselves, so that directions of the states differ in length."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 61, (rows, 1), generator=generator) * torch.arange(1, 17) % 61


def missed(model: Decoder, plain: Decoder, ids: Tensor) -> float:
    with torch.no_grad():
        wanted = plain(ids)
        return float((model(ids) - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_results_change_less(family: str, tied: bool) -> None:
    """Of blocks alone, where the head plays no part, once."""
    plain = decoder(family, tied_head=tied)
    batches = list(texts().split(8))
    for options in ({}, ALL) if tied else (ALL,):
        nearest = quantize(copy.deepcopy(plain), "int4", **options)
        found = quantize(copy.deepcopy(plain), "int4", calibration=batches, **options)
        names = {name for name, p in nearest.named_parameters() if isinstance(p, QuantizedWeight)}
        assert names == {name for name, p in found.named_parameters() if isinstance(p, QuantizedWeight)}
        assert missed(found, plain, texts(seed=1)) < (0.85 if options else 0.65) * missed(nearest, plain, texts(seed=1))


class NoChain(Decoder):
    """The same function, but no block is seen to read what the one before wrote."""

    def forward(self, input_ids_BL: Tensor) -> Tensor:
        positions = self.default_positions(input_ids_BL, None)
        x_BLD = embedded_BLD = self.embedding(input_ids_BL, positions)
        for block in self.blocks:
            x_BLD = block(self.between(x_BLD, embedded_BLD), positions, None, None, StepContext())
        return self.head(self.norm(x_BLD))

    def between(self, x_BLD: Tensor, embedded_BLD: Tensor) -> Tensor:
        return x_BLD.clone()


def test_block_by_block_is_the_model_as_one() -> None:
    plain = decoder("opt")
    other = NoChain(plain.config)
    other.load_state_dict(plain.state_dict())
    batches = list(texts().split(8))
    seen = []
    for model in (copy.deepcopy(plain), other):
        found = quantize(model, "int4", group_size=32, calibration=batches)
        seen.append([p.matrix() for p in found.parameters() if isinstance(p, QuantizedWeight)])
    assert len(seen[0]) == 8
    for a, b in zip(*seen, strict=True):
        assert torch.equal(a, b)


class Skipping(NoChain):
    """Each block reads the embeddings, too: the list's modules do not follow each other."""

    def between(self, x_BLD: Tensor, embedded_BLD: Tensor) -> Tensor:
        return x_BLD + embedded_BLD


@pytest.mark.parametrize("kind", [Decoder, Skipping])
def test_moments_are_of_the_plain_and_of_the_rounded_stream(kind: type[Decoder]) -> None:
    model, plain, ids = kind(decoder("opt").config), kind(decoder("opt").config), texts()
    for each in (model, plain):
        each.load_state_dict(decoder("opt").state_dict())
    items, order = choose(model), []
    for item, known in moments(model, calls_of(ids.split(8)), items):
        order.append(item.name)
        module, _ = item.holders[0]
        twin = dict(plain.named_modules())[item.name.removesuffix(".weight")]
        rounded, before = caught(model, module, ids), caught(plain, twin, ids)
        torch.testing.assert_close(known.hessian_II, rounded.T @ rounded, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(known.cross_II, before.T @ rounded, rtol=1e-4, atol=1e-3)
        with torch.no_grad():
            item.weight.mul_(0.9)  # stands for rounding
    parts = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
    assert order == [f"blocks.{n}.{part}.weight" for n in (0, 1) for part in parts]


def caught(model: nn.Module, module: nn.Module, ids: Tensor) -> Tensor:
    found = []
    handle = module.register_forward_pre_hook(lambda module, args: found.append(args[0]))
    with torch.no_grad():
        model(ids)
    handle.remove()
    return found[0].flatten(0, 1).double()


def test_embeddings_are_told_by_gradients_and_the_head_by_its_inputs() -> None:
    """A tied weight's Hessian is the sum of the two, each of mean 1. The first is the Fisher information, sampled."""
    model, ids = decoder("opt"), texts(800)[:, :4]
    items = choose(model, skip=["blocks"], **ALL)
    known = {item.name: found for item, found in moments(model, calls_of(ids.split(50)), items)}
    assert set(known) == {"embedding.tokens.weight", "embedding.positions.weight"}
    states = caught(model, model.head, ids)
    head_II = states.T @ states
    fisher_II = known["embedding.tokens.weight"].hessian_II - head_II / head_II.diagonal().mean()
    assert abs(float(fisher_II.diagonal().mean()) - 1) < 1e-6

    def likeness(matrix_II: Tensor) -> float:
        return float(torch.cosine_similarity(fisher_II.flatten(), matrix_II.flatten(), 0))

    assert likeness(fisher_of(model, ids)) > 0.97
    assert likeness(torch.eye(48, dtype=torch.float64)) < 0.9
    assert likeness(head_II) < 0.9


def fisher_of(model: Decoder, ids: Tensor) -> Tensor:
    """At the embedding's results, as an expectation: each token at each place, by its probability.

    Texts are one of 61, so that each is looked at once, and counts as often as it is there.
    """
    ids, times = ids.unique(dim=0, return_counts=True)
    x = model.embedding.tokens(ids).detach().requires_grad_()
    handle = model.embedding.tokens.register_forward_hook(lambda module, args, out: x)
    log_p_BLV = model(ids).log_softmax(2)
    handle.remove()
    fisher_II = torch.zeros(48, 48, dtype=torch.float64)
    for place in range(ids.shape[1]):
        for token in range(61):
            log_p_B = log_p_BLV[:, place, token]
            (g,) = torch.autograd.grad((log_p_B * (log_p_B / 2).exp().detach()).sum(), x, retain_graph=True)
            g = (times.sqrt()[:, None, None] * g).flatten(0, 1).double()
            fisher_II += g.T @ g
    return fisher_II


def test_layers_of_transformers_too() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 128}
    opt = OPTForCausalLM(OPTConfig(**sizes, max_position_embeddings=32, word_embed_proj_dim=64, dropout=0.5))
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=64, n_layer=2, n_head=2, n_positions=32))
    for plain in (opt, gpt2):  # GPT-2's weights stand as [in, out]
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        batches = [{"input_ids": ids} for ids in texts().split(8)]
        nearest, found = (
            quantize(copy.deepcopy(plain), "int4", calibration=given, **ALL).eval() for given in (None, batches)
        )
        plain.eval()
        with torch.no_grad():
            wanted = plain(texts(seed=1)).logits
            misses = [float((model(texts(seed=1)).logits - wanted).norm()) for model in (found, nearest)]
        assert misses[0] < 0.8 * misses[1]


def test_what_no_input_comes_to_takes_the_nearest_step() -> None:
    """Convolutions, and attention that takes its weights without calling their modules."""
    plain = UNet()
    found = quantize(copy.deepcopy(plain), "int4", calibration=[unet_inputs()])
    nearest = quantize(copy.deepcopy(plain), "int4")
    same = {
        name: torch.equal(a.matrix(), b.matrix())
        for (name, a), b in zip(found.named_parameters(), nearest.parameters())
        if isinstance(a, QuantizedWeight)
    }
    assert same.pop("time.2.weight") is False
    assert same.pop("time.0.weight") is False
    assert len(same) >= 3
    assert all(same.values())


class Experts(nn.Module):
    """Each row goes through the expert that its first element says: rounding the layer before sends some elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x_NI: Tensor) -> Tensor:
        x_NI = self.first(x_NI)
        which_N = (x_NI[:, 0] > 0).long() + (x_NI[:, 0] > 0.4).long()
        return torch.cat([e(x_NI[which_N == n]) for n, e in enumerate(self.experts) if bool((which_N == n).any())])


def test_experts_are_told_by_the_tokens_that_come_to_them() -> None:
    torch.manual_seed(0)
    model, batches = Experts(), [torch.randn(rows, 32) for rows in (1, 40, 3, 2)]
    known = {}
    for item, found in moments(model, calls_of(batches), choose(model)):
        known[item.name] = found
        with torch.no_grad():
            item.weight.mul_(0.8)
    assert next(iter(known)) == "first.weight"
    # In the plain model other rows may come to an expert; here its sums are then those of the rows that came.
    x_NI = model.first(torch.cat(batches)).detach()
    which_N = (x_NI[:, 0] > 0).long() + (x_NI[:, 0] > 0.4).long()
    for number in range(3):
        expected = x_NI[which_N == number].double()
        assert len(expected) > 0
        found = known[f"experts.{number}.weight"].hessian_II
        torch.testing.assert_close(found, expected.T @ expected, rtol=1e-4, atol=1e-4)


def test_bad_input() -> None:
    ids = texts()
    for model, given, options, says in (
        (decoder(), [], {}, "holds no batch"),
        (decoder(), [ids], {"scheme": "int8"}, "calibration is for int4, and int8 was asked for"),
        (nn.Sequential(nn.Embedding(61, 32), nn.Linear(32, 32)).half(), [ids], {"skip": ["0"]}, "not finite"),
    ):
        if says == "not finite":
            model[0].weight.data.fill_(torch.inf)
        with pytest.raises(UserError, match=says):
            quantize(model, **({"scheme": "int4"} | options), calibration=given)
    model = decoder()
    with torch.no_grad():
        next(iter(model.blocks)).mlp.up.weight.fill_(torch.nan)
    with pytest.raises(UserError, match=r"blocks\.0\.mlp\.up\.weight holds values that are not finite"):
        quantize(model, "int4", calibration=[ids])

    class Silent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = decoder()

        def forward(self, ids: Tensor) -> dict:
            return {"states": self.inner(ids)}

    with pytest.raises(UserError, match="the model gives dict, and embeddings are calibrated by logits"):
        quantize(Silent(), "int4", calibration=[ids], embeddings=True)


def test_the_model_is_left_as_it_was_but_for_its_weights() -> None:
    model, calls = decoder("llama").train(), []
    before = {name: p.requires_grad for name, p in model.named_parameters() if "norm" in name}
    quantize(
        model, "int4", calibration=[texts()], progress=lambda name, num_bytes: calls.append((name, num_bytes)), **ALL
    )
    assert model.training
    assert before == {name: p.requires_grad for name, p in model.named_parameters() if "norm" in name}
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert len(calls) == sum(isinstance(p, QuantizedWeight) for p in model.parameters())
    assert calls[-1][1] == sum(p.numel() * 4 for p in model.parameters() if isinstance(p, QuantizedWeight))
    assert Scheme("int4") == next(p.scheme for p in model.parameters() if isinstance(p, QuantizedWeight))
