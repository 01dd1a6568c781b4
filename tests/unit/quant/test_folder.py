"""Quantized folders: written whole or not at all, loaded by memory map, refused in one line where they are damaged."""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from core.config import UserError
from core.files import signed, stamp
from core.models import families, load_pretrained, save_pretrained
from core.quant import (
    Architecture,
    QuantizedWeight,
    is_quantized,
    load_quantized,
    quantize,
    quantize_folder,
    save_quantized,
    stored_bytes,
)
from core.trace.account import MemoryAccount
from core.weights import Weights, save_weights
from tests.support.checkpoints import flipped, flips
from tests.support.full_disk import limited_files
from tests.unit.quant.models import FAMILIES, UNet, decoder, saved, tokens, unet_inputs

ALL = {"embeddings": True, "head": True}
OF_UNET = Architecture(lambda folder: on_meta(UNet))


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def parts(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, QuantizedWeight):
            found |= {f"{name}.{part}": tensor for part, tensor in parameter.parts.items()}
        else:
            found[name] = parameter.detach()
    return found


def same(a: nn.Module, b: nn.Module) -> bool:
    first, second = parts(a), parts(b)
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) and first[name].dtype == second[name].dtype for name in first
    )


@pytest.mark.parametrize(
    "options", [{"scheme": "int8"}, {"scheme": "int4", "group_size": 32, "symmetric": True} | ALL], ids=str
)
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_is_exact(family: str, options: dict, tmp_path: Path) -> None:
    """From a checkpoint in shards, in memory, while loading, through a folder and through another: the same bits."""
    plain = saved(tmp_path / "plain", family, max_shard_bytes=20_000)
    wanted = quantize(plain, **options)
    quantize_folder(tmp_path / "plain", tmp_path / "quantized", **options, max_shard_bytes=10_000)
    assert len(list((tmp_path / "quantized").glob("quantized-*.safetensors"))) > 1
    for model in (
        load_quantized(tmp_path / "quantized", packed=False),
        load_quantized(tmp_path / "plain", **options, packed=False),
    ):
        assert same(model, wanted)
        assert model.config == wanted.config
        assert (model.head.weight is model.embedding.tokens.weight) is model.config.tied_head
        assert torch.equal(model(tokens()), wanted(tokens()))
        assert not model.training
        assert not any(parameter.requires_grad for parameter in model.parameters())
    save_quantized(model, tmp_path / "again", tmp_path / "quantized")
    assert same(load_quantized(tmp_path / "again"), wanted)
    assert (tmp_path / "again" / "tokenizer.json").read_text() == "{}"


def test_gains_of_columns_are_kept(tmp_path: Path) -> None:
    """Where columns differ much, llm.int8 stores what each stands for; a folder without it is refused."""
    plain = decoder()
    with torch.no_grad():
        plain.blocks[0].mlp.up.weight[:, 3] /= 100
    save_pretrained(plain, plain.config, tmp_path / "plain")
    wanted = quantize(copy.deepcopy(plain), "llm.int8")
    quantize_folder(tmp_path / "plain", tmp_path / "q", "llm.int8")
    name = "blocks.0.mlp.up.weight"
    described = json.loads((tmp_path / "q" / "quantization.json").read_text())["weights"]
    assert [weight for weight, says in described.items() if "gain" in says] == [name]
    for model in (load_quantized(tmp_path / "q"), load_quantized(tmp_path / "plain", "llm.int8")):
        assert same(model, wanted)
        assert torch.equal(model(tokens()), wanted(tokens()))
    stored = {n: t.clone() for n, t in Weights(tmp_path / "q", "quantized").items() if n != f"{name}.gain"}
    save_weights(stored.items(), tmp_path / "q", stem="quantized")
    with pytest.raises(UserError, match=r"quantized\.safetensors is (damaged|truncated)"):
        load_quantized(tmp_path / "q")
    content = json.loads((tmp_path / "q" / "quantization.json").read_text())
    files = {"quantized.safetensors": stamp(tmp_path / "q" / "quantized.safetensors")}
    del content["crc32"]
    (tmp_path / "q" / "quantization.json").write_bytes(signed(content | {"files": files}))
    with pytest.raises(UserError, match=r"lacks blocks\.0\.mlp\.up\.weight\.gain"):
        load_quantized(tmp_path / "q")


def test_what_lies_in_the_folder(tmp_path: Path) -> None:
    saved(tmp_path / "plain")
    assert quantize_folder(tmp_path / "plain", tmp_path / "out" / "q", "int8") == tmp_path / "out" / "q"
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"q"}
    names = {"quantized.safetensors", "quantization.json", "config.json", "generation_config.json", "tokenizer.json"}
    assert {p.name for p in (tmp_path / "out" / "q").iterdir()} == names
    assert is_quantized(tmp_path / "out" / "q")
    assert not is_quantized(tmp_path / "plain")
    assert not is_quantized(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"holds no weights; expected model\.safetensors"):
        load_pretrained(tmp_path / "out" / "q")  # nobody takes it for plain weights


def test_any_module(tmp_path: Path) -> None:
    """With buffers, by its own names."""
    torch.manual_seed(0)
    model = nn.Sequential(UNet(), nn.BatchNorm2d(4)).eval()
    save_weights(model.state_dict().items(), tmp_path / "plain")
    architecture = Architecture(lambda folder: on_meta(lambda: nn.Sequential(UNet(), nn.BatchNorm2d(4))))
    quantize_folder(tmp_path / "plain", tmp_path / "q", "int4", architecture=architecture)
    wanted = quantize(model, "int4").requires_grad_(False)  # torch folds products of weights that learn otherwise
    loaded = load_quantized(tmp_path / "q", architecture=architecture, packed=False)
    assert same(loaded, wanted)
    x, time, text = unet_inputs()
    assert torch.equal(loaded[1](loaded[0](x, time, text)), wanted[1](wanted[0](x, time, text)))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    state = UNet().state_dict()
    for change, said in (
        (lambda s: s.pop("up.weight"), r"lacks up\.weight; give the checkpoint of this very model"),
        (lambda s: s.update(more=torch.ones(1)), "holds what the model does not know: more"),
        (lambda s: s.update({"up.bias": torch.ones(3)}), r"up\.bias is \[3\], and the model's is \[16\]"),
    ):
        changed = dict(state)
        change(changed)
        save_weights(changed.items(), tmp_path)
        with pytest.raises(UserError, match=said):
            quantize_folder(tmp_path, tmp_path / "q", "int8", architecture=OF_UNET)
        assert not (tmp_path / "q").exists()


def test_loading_reads_nothing_and_holds_nothing(tmp_path: Path) -> None:
    """The weights are the mapped file; the model does not outlive being dropped by a copy of it."""
    saved(tmp_path / "plain", dim=96, ffn_dim=384)
    quantize_folder(tmp_path / "plain", tmp_path / "q", "int8", **ALL)
    with MemoryAccount() as account:
        model = load_quantized(tmp_path / "q", packed=False)
    held = {id(t.untyped_storage()) for t in parts(model).values()}
    assert account.peak_bytes <= stored_bytes(model)
    assert len(held) <= len(parts(model))
    with open("/proc/self/maps") as maps:
        assert "quantized.safetensors" in maps.read()


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_peak_memory_while_loading(scheme: str, tmp_path: Path) -> None:
    """The quantized model and one tensor of the checkpoint, and not the checkpoint."""
    plain = saved(tmp_path / "plain", dim=192, ffn_dim=768, num_layers=8, vocab_size=4000, max_shard_bytes=1 << 20)
    plain_bytes, largest = stored_bytes(plain), max(p.nbytes for p in plain.parameters())
    del plain
    with MemoryAccount() as account:
        model = load_quantized(tmp_path / "plain", scheme, **ALL, packed=False)
    assert account.peak_bytes <= 1.25 * stored_bytes(model) + largest + (3 << 19)  # rounding it takes copies of slabs
    assert account.peak_bytes < 0.6 * plain_bytes
    with MemoryAccount() as account:
        quantize_folder(tmp_path / "plain", tmp_path / "q", scheme, **ALL, max_shard_bytes=1 << 19)
    assert account.peak_bytes <= (1 << 19) + 2 * largest + (3 << 19)  # a shard, a tensor and its parts, slabs


def test_progress_counts_the_checkpoint(tmp_path: Path) -> None:
    model = saved(tmp_path / "plain")
    seen = []
    quantize_folder(tmp_path / "plain", tmp_path / "q", "int8", progress=lambda name, done: seen.append((name, done)))
    assert [name for name, _ in seen] == [name for name, _ in model.named_parameters()]
    assert seen[-1][1] == sum(p.nbytes for p in model.parameters())


def test_nothing_half_written(tmp_path: Path) -> None:
    saved(tmp_path / "plain")

    def stop(name: str, num_bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_folder(tmp_path / "plain", tmp_path / "q", "int8", progress=stop)
    assert [p.name for p in tmp_path.iterdir()] == ["plain"]
    quantize_folder(tmp_path / "plain", tmp_path / "q", "int8")
    for target in (tmp_path / "q", tmp_path / "plain"):
        before = sorted(p.name for p in target.iterdir())
        with pytest.raises(UserError, match="exists already; choose another folder"):
            quantize_folder(tmp_path / "plain", target, "int8")
        assert sorted(p.name for p in target.iterdir()) == before


def test_folders_that_are_not_what_is_asked_for(tmp_path: Path) -> None:
    saved(tmp_path / "plain")
    quantize_folder(tmp_path / "plain", tmp_path / "q", "int8")
    for call, said in (
        (lambda: load_quantized(tmp_path / "plain"), r"holds no quantization\.json; quantize a checkpoint first, or"),
        (lambda: load_quantized(tmp_path / "q", "int8"), "is quantized already; leave the scheme out"),
        (lambda: load_quantized(tmp_path / "q", head=True), "embeddings, head and skip are for quantizing"),
        (lambda: quantize_folder(tmp_path / "q", tmp_path / "r", "int8"), "is quantized already; give the folder of"),
        (lambda: quantize_folder(tmp_path / "no", tmp_path / "r", "int8"), r"cannot read .*config\.json"),
        (lambda: quantize_folder(tmp_path / "plain", tmp_path / "r", "int3"), "no quantization scheme 'int3'"),
        (lambda: quantize_folder(tmp_path / "plain", tmp_path / "r", "int4", group_size=40), "group_size=40"),
        (lambda: quantize_folder(tmp_path / "plain", tmp_path / "r", "int8", skip=("x",)), "skip='x' matches no"),
    ):
        with pytest.raises(UserError, match=said) as raised:
            call()
        assert "\n" not in str(raised.value)
        assert not (tmp_path / "r").exists()
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config | {"model_type": "t5"}))
    known = ", ".join(families.FAMILIES)
    with pytest.raises(UserError, match=f"model_type is 't5', known are {known}; give an architecture"):
        quantize_folder(tmp_path / "plain", tmp_path / "r", "int8")


def test_damaged_folders(tmp_path: Path) -> None:
    saved(tmp_path / "plain")
    folder = quantize_folder(tmp_path / "plain", tmp_path / "q", "int4", **ALL)
    weights, description = folder / "quantized.safetensors", folder / "quantization.json"
    whole, written, tensors = weights.read_bytes(), description.read_bytes(), load_file(weights)
    described = {name: value for name, value in json.loads(written).items() if name != "crc32"}
    codes = "blocks.0.mlp.up.weight.codes"

    def with_tensors(change: Callable[[dict], object]) -> None:
        changed = dict(tensors)
        change(changed)
        save_file(changed, weights)

    def with_weight(**change: object) -> None:
        name = codes.removesuffix(".codes")
        changed = described["weights"] | {name: described["weights"][name] | change}
        describe(weights=changed)

    def describe(**change: object) -> None:
        """Right checksums of whatever the folder holds, so that what is behind them is asked."""
        files = {"files": {weights.name: stamp(weights)}} if weights.is_file() else {}
        description.write_bytes(signed(described | files | change))

    damages = (
        (lambda: weights.write_bytes(whole[:-1]), "is truncated or not a file of weights"),
        (lambda: weights.write_bytes(b"\x80\x04N."), "is truncated or not a file of weights"),
        (weights.unlink, r"quantized\.safetensors is missing; copy the folder again"),
        (lambda: with_tensors(lambda t: t.pop(codes)), rf"lacks {codes}"),
        (lambda: with_tensors(lambda t: t.update({codes: t[codes][:1].clone()})), r"is uint8 \[1, 32\], and should be"),
        (lambda: with_tensors(lambda t: t.update({codes: t[codes].float()})), "is float32"),
        (lambda: with_tensors(lambda t: t.update(more=torch.ones(1))), "holds what the model does not know: more"),
        (lambda: description.write_text("{"), "cannot read"),
        (lambda: description.write_text("[]"), "is not a JSON object"),
        (lambda: describe(format=3), "has format 3; this version reads 2"),
        (lambda: description.write_bytes(signed({"weights": {}})), "has format None; this version reads 2"),
        (lambda: describe(format=1), "has checksums, and says that it has format 1"),
        (lambda: describe(weights={"a": 1}), "does not describe quantized weights"),
        (lambda: with_weight(shape=[3, 4]), "and should be"),
        (lambda: with_weight(shape=[96, 96]), "should be|config.json says"),
        (lambda: with_weight(scheme={"name": "int4"}), "is no description of a scheme"),
        (lambda: with_weight(dtype="int64"), "does not describe quantized weights"),
    )
    for damage, said in damages:
        weights.write_bytes(whole)
        description.write_bytes(written)
        damage()
        if weights.is_file() and weights.read_bytes() != whole:
            with pytest.raises(UserError, match=r"quantized\.safetensors is (damaged|truncated|too long)"):
                load_quantized(folder, packed=False)
            describe()
        with pytest.raises(UserError, match=said) as raised:
            load_quantized(folder, packed=False)
        assert "\n" not in str(raised.value)


def test_no_flipped_byte_is_accepted(tmp_path: Path) -> None:
    saved(tmp_path / "plain")
    folder = quantize_folder(tmp_path / "plain", tmp_path / "q", "int4", **ALL, max_shard_bytes=1 << 13)
    files = sorted([*folder.glob("quantized*"), folder / "quantization.json"])
    assert len(files) > 3
    for path, at, mask in flips(files, 16, seed=0):
        with flipped(path, at, mask), pytest.raises(UserError, match=re.escape(path.name)) as raised:
            load_quantized(folder, packed=False)
        assert "\n" not in str(raised.value)
    load_quantized(folder, packed=False)


def test_folders_without_checksums_are_read_with_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "plain")
    folder = quantize_folder(tmp_path / "plain", tmp_path / "q", "int8")
    description = folder / "quantization.json"
    described = json.loads(description.read_text())
    del described["crc32"], described["files"]
    description.write_text(json.dumps(described | {"format": 1}))
    load_quantized(folder, packed=False)
    assert "has no checksums, so damage in it is not seen" in capsys.readouterr().err


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    saved(tmp_path / "plain")
    for room in (100, 10_000):
        with pytest.raises(OSError, match="File too large") as caught, limited_files(room):
            quantize_folder(tmp_path / "plain", tmp_path / "q", "int8")
        assert str(tmp_path) in str(caught.value.filename)
        assert [path.name for path in tmp_path.iterdir()] == ["plain"]


def test_weights_can_be_gone_through_without_holding_them(tmp_path: Path) -> None:
    save_weights({f"t{i}": torch.full((1 << 20,), float(i)) for i in range(4)}.items(), tmp_path)

    def mappings() -> int:
        with open("/proc/self/maps") as maps:
            return maps.read().count(str(tmp_path))

    before = mappings()
    weights = Weights(tmp_path, hold=False)
    assert list(weights) == ["t0", "t1", "t2", "t3"]
    assert mappings() == before
    tensor = weights["t2"]
    assert mappings() > before
    assert float(tensor[-1]) == 2.0
    del tensor
    assert mappings() == before
