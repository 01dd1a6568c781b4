import json

import pytest
import torch

from core.config import UserError
from core.weights import Weights, save_weights


def some_tensors():
    return {f"t{i}": torch.arange(10.0) + i for i in range(5)} | {
        "b": torch.ones(3, 2).bfloat16(),
        "s": torch.tensor(1),
    }


def test_shards(tmp_path):
    """Each file within the limit, except that a tensor larger than it has its own; nothing else left in the folder."""
    tensors = some_tensors() | {"large": torch.zeros(100)}
    save_weights(tensors.items(), tmp_path, max_shard_bytes=90)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert {p.name for p in tmp_path.iterdir()} == {*files, "model.safetensors.index.json"}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    for file in files:
        held = [tensors[name].nbytes for name, where in index["weight_map"].items() if where == file]
        assert sum(held) <= 90 or len(held) == 1
    back = Weights(tmp_path)
    assert set(back) == set(tensors)
    assert all(torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype for name, tensor in tensors.items())


def test_fewer_shards_replace_more(tmp_path):
    save_weights(some_tensors().items(), tmp_path, max_shard_bytes=50)
    save_weights({"only": torch.ones(2)}.items(), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    assert list(Weights(tmp_path)) == ["only"]


def test_interrupted_write_leaves_the_old(tmp_path):
    save_weights({"old": torch.ones(2)}.items(), tmp_path)

    def fails():
        yield "new", torch.zeros(2)
        yield "newer", torch.zeros(2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_weights(fails(), tmp_path, max_shard_bytes=1)
    assert list(Weights(tmp_path)) == ["old"]


def test_stream_is_not_held(tmp_path):
    """No more than one shard of the stream is alive at a time."""
    import weakref

    alive, most = weakref.WeakSet(), 0

    def stream():
        nonlocal most
        for i in range(6):
            tensor = torch.full((10,), float(i))
            alive.add(tensor)
            most = max(most, len(alive))
            yield f"t{i}", tensor
            del tensor

    save_weights(stream(), tmp_path, max_shard_bytes=80)
    assert most <= 4  # two of the shard being written, one of the next, one in the generator's hands


def test_reads_only_what_is_used(tmp_path):
    """A slice of a mapped file costs its pages, not the file."""
    save_weights({"big": torch.zeros(64 << 20, dtype=torch.uint8)}.items(), tmp_path)

    def resident_bytes():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident_bytes()
    part = Weights(tmp_path)["big"][1000:2000].clone()
    assert resident_bytes() - before < 8 << 20
    assert part.shape == (1000,)


def broken(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        Weights(tmp_path)
    assert "\n" not in str(error.value)
    assert name.split(".index")[0] in str(error.value)
    (tmp_path / name).unlink()


def test_broken_folders(tmp_path):
    with pytest.raises(UserError, match="holds no weights"):
        Weights(tmp_path)
    save_weights(some_tensors().items(), tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    for content in (whole[:-1], whole[:9], b"", b"\x80\x04N."):
        broken(tmp_path, "model.safetensors", content)
    for content in (b"not a pickle", b"hello", b"", b"[].,0\n"):
        broken(tmp_path, "pytorch_model.bin", content)
    index = "model.safetensors.index.json"
    broken(tmp_path, index, b"{}")
    broken(tmp_path, index, b'{"weight_map": {"a": "../../etc/passwd"}}')
    (tmp_path / index).write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    with pytest.raises(UserError, match=r"lacks the shards model-00001-of-00002"):
        Weights(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(whole)
    with pytest.raises(UserError, match=r"lacks a, which the index promises"):
        Weights(tmp_path)


def test_pickle_does_not_execute(tmp_path):
    """A pickle that would create a file is refused, and the file is not there."""

    class Harm:
        def __reduce__(self):
            return open, (str(tmp_path / "harm"), "w")

    torch.save({"a": Harm()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin"):
        Weights(tmp_path)
    assert not (tmp_path / "harm").exists()


def test_only_its_own_files_are_replaced(tmp_path):
    """Adapters and other models that lie beside the weights stay."""
    for name in ("model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        (tmp_path / name).write_text("old")
    others = ["model_ema.safetensors", "model-lora.safetensors", "model2.safetensors", "model-00001.safetensors.bak"]
    for name in others:
        (tmp_path / name).write_text("mine")
    save_weights([("w", torch.ones(3))], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, "model.safetensors"])
    assert {(tmp_path / name).read_text() for name in others} == {"mine"}
