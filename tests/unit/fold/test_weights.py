"""Names, shapes and values of weights: the released lists, round trips, and what is refused."""

import json
import re
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch

from apps.fold.model.alphafold import AlphaFold
from apps.fold.model.config import PRESETS, preset, tiny
from apps.fold.weights import alphafold, openfold
from apps.fold.weights.folder import load_folder, read_note, save_folder
from apps.fold.weights.source import read_weights
from apps.fold.weights.table import name_table
from core.config import UserError
from tests.support.fold import GOLDEN, random_parameters

DATA = GOLDEN.parent


def _shapes(name: str) -> dict[str, tuple[int, ...]]:
    return {key: tuple(shape) for key, shape in json.loads((DATA / f"{name}.json").read_text()).items()}


@pytest.mark.parametrize("name", ["model_1_ptm", "model_3"])
def test_the_table_names_every_released_array_once(name: str) -> None:
    released = _shapes(f"alphafold_{name}")
    config = alphafold.config_of(released)
    assert config == preset(name)
    sources = [source for entry in name_table(config) for source in entry.sources]
    assert {source.key: source.stored_shape for source in sources} == released
    assert len({(source.key, source.block) for source in sources}) == len(sources)
    with torch.device("meta"):
        model = AlphaFold(config)
    ours = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert {entry.name: entry.shape for entry in name_table(config)} == ours


def test_the_table_names_every_tensor_of_openfold_once() -> None:
    released = {}
    for name, shape in _shapes("openfold_model_1_ptm").items():
        blocks = 48 if name.startswith("evoformer.blocks") else 4 if name.startswith("extra_msa_stack") else 1
        for number in range(blocks):
            replaced = re.sub(r"^(evoformer|extra_msa_stack)\.blocks\.0\.", rf"\1.blocks.{number}.", name)
            released[replaced] = torch.empty(shape, device="meta")
    config = openfold.config_of(released)
    assert config == preset("model_1_ptm")
    sources = [source for entry in name_table(config) for source in entry.sources]
    assert {source.openfold: source.our_shape for source in sources} == {n: tuple(t.shape) for n, t in released.items()}
    assert len({source.openfold for source in sources}) == len(sources) == 5046


def test_parameter_counts_are_the_released_ones() -> None:
    counts = {}
    for name in PRESETS:
        counts[name] = sum(prod(entry.shape) for entry in name_table(preset(name)))
    assert counts["model_1_ptm"] == 93_237_338
    assert round(counts["model_1"] / 1e6, 3) == 93.229
    assert round(counts["model_3"] / 1e6, 3) == 92.900


def test_npz_to_ours_to_npz_is_exact_bit_for_bit(tmp_path: Path) -> None:
    config, parameters = alphafold.load_npz(GOLDEN / "params.npz")
    save_folder(tmp_path / "ours", config, parameters)
    config, parameters = load_folder(tmp_path / "ours")
    alphafold.write_npz(tmp_path / "back.npz", alphafold.arrays_of(parameters, config))
    with np.load(GOLDEN / "params.npz") as before, np.load(tmp_path / "back.npz") as after:
        assert sorted(before.files) == sorted(after.files)
        for name in before.files:
            assert before[name].dtype == after[name].dtype
            assert before[name].tobytes() == after[name].tobytes(), name


def _as_openfold(old_names: bool) -> dict[str, torch.Tensor]:
    config, parameters = alphafold.load_npz(GOLDEN / "params.npz")
    tensors = {}
    for entry in name_table(config):
        rows = parameters[entry.name].split([source.our_shape[0] for source in entry.sources])
        tensors |= {source.openfold: part.clone() for source, part in zip(entry.sources, rows)}
    return {_old(name): value for name, value in tensors.items()} if old_names else tensors


def _old(name: str) -> str:
    """The name that the first release gave a tensor."""
    name = name.replace("template_embedder.template_single_embedder", "template_angle_embedder")
    name = name.removeprefix("template_embedder.")
    if re.match(r"(evoformer|extra_msa_stack)\.blocks", name):
        name = name.replace(".pair_stack.", ".core.")
        name = re.sub(r"\.(msa_transition|outer_product_mean)\.", r".core.\1.", name)
    return re.sub(r"(ipa\.linear_k?[qv]+_points)\.linear", r"\1", name)


@pytest.mark.parametrize("wrapped", [lambda t: t, lambda t: {"ema": {"params": t}}, lambda t: {"state_dict": t}])
@pytest.mark.parametrize("old_names", [False, True])
def test_openfold_files_in_every_form(tmp_path: Path, wrapped, old_names: bool) -> None:
    tensors = _as_openfold(old_names)
    if "state_dict" in wrapped({}):
        tensors = {f"model.{name}": value for name, value in tensors.items()}
    torch.save(wrapped(tensors), tmp_path / "openfold.pt")
    config, parameters = openfold.load_pt(tmp_path / "openfold.pt")
    expected_config, expected = alphafold.load_npz(GOLDEN / "params.npz")
    assert config == expected_config
    assert expected.keys() == parameters.keys()
    assert all(torch.equal(parameters[name], expected[name]) for name in expected)


def test_what_is_wrong_with_weights_is_named(tmp_path: Path) -> None:
    with np.load(GOLDEN / "params.npz") as file:
        arrays = dict(file)
    name = "alphafold/alphafold_iteration/evoformer/prev_pair_norm//scale"

    def said(changed: dict[str, np.ndarray], file: str = "params.npz") -> str:
        np.savez(tmp_path / file, **changed)
        with pytest.raises(UserError) as refusal:
            read_weights(tmp_path / file)
        assert "\n" not in str(refusal.value)
        return str(refusal.value)

    assert name in said({key: value for key, value in arrays.items() if key != name})
    assert "something//else" in said({**arrays, "something//else": np.zeros(3)})
    letters = said({**arrays, name: np.full(arrays[name].shape, "x")})
    assert name in letters
    assert "no numbers" in letters
    assert "[17]" in said({**arrays, name: np.zeros(17, np.float32)})
    multimer = "alphafold/alphafold_iteration/evoformer/~_relative_encoding/position_activations//weights"
    assert "output_linear" in said({**arrays, multimer: np.zeros((73, 128), np.float32)})
    assert "AlphaFold" in said({"weight": np.zeros(3)})
    pickled = np.array([{"a": 1}], dtype=object)
    assert "cannot be read" in said({"weight": pickled})

    half = (GOLDEN / "params.npz").read_bytes()[:100_000]
    (tmp_path / "half.npz").write_bytes(half)
    (tmp_path / "half.pt").write_bytes(half)
    for other in ("other.txt", "text.npz", "text.pt"):
        (tmp_path / other).write_text("hello")
    for path in ("half.npz", "half.pt", "other.txt", "nowhere.npz", "text.npz", "text.pt"):
        with pytest.raises(UserError, match=re.escape(path)) as refusal:
            read_weights(tmp_path / path)
        assert "load it unsafely" not in str(refusal.value)


def test_an_openfold_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    torch.save({"model": torch.nn.Linear(2, 2)}, tmp_path / "whole.pt")
    with pytest.raises(UserError, match=r"it holds torch\.nn\.modules\.linear\.Linear, which is no tensor") as refusal:
        read_weights(tmp_path / "whole.pt")
    assert "weights_only" not in str(refusal.value), "no advice to run what it holds"


def test_a_folder_keeps_what_the_arrays_do_not_say(tmp_path: Path) -> None:
    config = tiny(templates=False)
    parameters = random_parameters(config)
    save_folder(tmp_path, config, parameters)
    again, read = load_folder(tmp_path)
    assert again == config
    assert all(torch.equal(read[name], value) for name, value in parameters.items())
    assert read_note(tmp_path) == ""
    save_folder(tmp_path, config, parameters, "of this machine only")
    assert load_folder(tmp_path)[0] == config
    assert read_note(tmp_path) == "of this machine only"
    stored = json.loads((tmp_path / "config.json").read_text())
    stored["model"]["mystery"] = 1
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(UserError, match="mystery"):
        load_folder(tmp_path)
