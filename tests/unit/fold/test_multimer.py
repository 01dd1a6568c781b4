"""AlphaFold-Multimer: the golden run of the original code, its files in all versions, and when recycling ends."""

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from apps.fold.features.complexes import assemble
from apps.fold.features.sampling import Complex, draw_rows, features_of_complex
from apps.fold.golden import COMPLEX_OUTPUTS, compare, examine
from apps.fold.golden_complex import complex_of
from apps.fold.jax_numbers import JaxNumbers, threefry
from apps.fold.model.config import MULTIMER_PRESETS, MultimerConfig, multimer_preset
from apps.fold.model.folding import Recycled
from apps.fold.model.heads import chain_tm_scores, plddt, predicted_tm_score
from apps.fold.model.multimer import Multimer
from apps.fold.predict import job_of
from apps.fold.subbatch import HEADS, FoldJob, apply_subbatches
from apps.fold.subbatch.planner import planned
from apps.fold.weights import alphafold
from apps.fold.weights.folder import load_folder, save_folder
from apps.fold.weights.source import build, is_multimer, read_weights
from apps.fold.weights.table import name_table
from core.config import UserError
from tests.support.fold import GOLDEN, MULTIMER_GOLDEN
from tests.support.original_complex import chains
from tests.support.original_multimer import RUNS
from tests.support.original_multimer import given as given_chains

# Of each part that only models of complexes have, a key of params.npz.
MATRICES = (
    "~_relative_encoding/position_activations//weights",
    "single_template_embedding/template_pair_embedding_8//weights",
    "single_template_embedding/template_pair_embedding_5//weights",
    "template_embedding_iteration/triangle_multiplication_incoming/projection//weights",
    "evoformer_iteration/outer_product_mean//output_w",
    "k_point_projection/point_projection//weights",
    "quat_rigid/rigid//weights",
)
ORIGINALS = GOLDEN.parent
COMMITTED = ("multimer_v1_3", "multimer_v2_2", "multimer_v3_3")  # of tests/support/original_multimer.py's
SEED = 1  # of the run's key: others need not be tried
OF_VERSION_2 = {"left_norm_input": "layer_norm_input", "center_norm": "center_layer_norm"}


def _arrays() -> dict[str, np.ndarray]:
    with np.load(MULTIMER_GOLDEN / "params.npz") as file:
        return dict(file)


def _copied(folder: Path, parameters: dict[str, np.ndarray]) -> Path:
    for name in ("batch.npz", "out.npz"):
        shutil.copyfile(MULTIMER_GOLDEN / name, folder / name)
    alphafold.write_npz(folder / "params.npz", parameters)
    stored = json.loads((MULTIMER_GOLDEN / "config.json").read_text())
    stored = {name: value for name, value in stored.items() if name != "params_sha256"}
    (folder / "config.json").write_text(json.dumps({**stored, "seed": SEED}))
    return folder


def test_every_output_equals_the_original_s() -> None:
    differences = compare(MULTIMER_GOLDEN)
    assert set(differences) == set(COMPLEX_OUTPUTS)
    assert max(differences.values()) <= 1e-5, differences
    assert all(one.well for one in examine(MULTIMER_GOLDEN).values())


@pytest.mark.parametrize("matrix", MATRICES)
def test_a_hundredth_more_in_a_matrix_is_noticed(tmp_path: Path, matrix: str) -> None:
    parameters = _arrays()
    (name,) = [name for name in parameters if name.endswith(matrix)]
    changed = {**parameters, name: parameters[name] * np.float32(1.01)}
    assert max(compare(_copied(tmp_path, changed)).values()) > 1e-5


def test_in_the_smallest_slices_it_computes_the_same() -> None:
    given = chains()
    config, parameters = alphafold.load_npz(MULTIMER_GOLDEN / "params.npz")
    assert isinstance(config, MultimerConfig)
    config = replace(config, max_msa=6, max_extra_msa=9)
    one = assemble([given["A"], given["B"], given["A"]], config.max_templates).complex
    drawn = draw_rows(one, config, np.random.default_rng(0))
    features = features_of_complex(one, drawn, config).to("cpu", torch.float64)
    model = build(config, parameters, torch.float64, "cpu")
    with torch.inference_mode():
        whole = model.fold([features] * 2)
        plan = planned(job_of(config, [features] * 2, torch.float64, "cpu"), 0)
        assert any(how.rows == 1 for how in plan.choices.values())
        apply_subbatches(model, {name: how for name, how in plan.choices.items() if name != HEADS})
        sliced = model.fold([features] * 2)
    assert whole.num_recycles == sliced.num_recycles == 1
    for name in ("positions_BN373", "pair_BNNZ", "msa_BSND"):
        assert (getattr(whole, name) - getattr(sliced, name)).abs().max() < 1e-9


def test_a_complex_is_planned_with_its_templates_in_slices() -> None:
    job = FoldJob(multimer_preset("model_1_multimer_v3"), 200, 508, 2048, 4, torch.bfloat16, "cuda", 21, hidden=True)
    plan, pairs = planned(job, 0), 200**2 * 128 * 2
    assert plan.choices["template_embedder.pairs"].rows < 200
    assert plan.offload
    assert not planned(job, 2**40).offload
    assert planned(job, 2**40).choices != plan.choices
    whole, name = planned(job, 2**40), "template_embedder.pairs"
    assert plan.peaks[name] < whole.peaks[name] - pairs


def _of_version_2(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same numbers as files of versions 1 and 2 have them: left and right apart."""
    found = {}
    for name, array in arrays.items():
        scope, _, last = name.rpartition("/triangle_multiplication_")
        edges, _, leaf = last.partition("/")
        before = f"{scope}/triangle_multiplication_{edges}"
        kind = leaf.partition("//")[0]
        if not scope or kind not in ("projection", "gate", *OF_VERSION_2):
            found[name] = array
        elif kind in ("projection", "gate"):
            for side, half in zip(("left", "right"), np.split(array, 2, -1)):
                found[f"{before}/{side}_{leaf}"] = half
        else:
            found[f"{before}/{OF_VERSION_2[kind]}//{leaf.partition('//')[2]}"] = array
    return found


def test_versions_1_and_2_compute_the_same_from_their_files(tmp_path: Path) -> None:
    path = _copied(tmp_path, _of_version_2(_arrays()))
    config, _ = read_weights(path / "params.npz")
    assert isinstance(config, MultimerConfig)
    assert not config.fused_products
    assert config.max_msa == multimer_preset("model_1_multimer_v2").max_msa
    assert max(compare(path).values()) <= 1e-5


def test_the_table_names_every_released_array_once() -> None:
    path = GOLDEN.parent / "alphafold_model_1_multimer_v3.json"
    released = {key: tuple(shape) for key, shape in json.loads(path.read_text()).items()}
    config = alphafold.config_of(released)
    assert config == multimer_preset("model_1_multimer_v3")
    sources = [source for entry in name_table(config) for source in entry.sources]
    assert {source.key: source.stored_shape for source in sources} == released
    assert len({(source.key, source.block) for source in sources}) == len(sources)
    with torch.device("meta"):
        model = Multimer(multimer_preset("model_1_multimer_v3"))
    ours = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert {entry.name: entry.shape for entry in name_table(config)} == ours


def test_a_file_s_name_tells_how_many_extra_rows_are_read(tmp_path: Path) -> None:
    for name in ("params_model_4_multimer_v3.npz", "params_model_1_multimer_v3.npz"):
        shutil.copyfile(MULTIMER_GOLDEN / "params.npz", tmp_path / name)
        config, _ = read_weights(tmp_path / name)
        assert config.max_extra_msa == multimer_preset(name[7:-4]).max_extra_msa
    assert len({multimer_preset(name).max_extra_msa for name in MULTIMER_PRESETS}) == 2
    with pytest.raises(UserError, match="model_6"):
        multimer_preset("model_6_multimer")


def test_npz_to_ours_to_npz_is_exact_bit_for_bit(tmp_path: Path) -> None:
    config, parameters = alphafold.load_npz(MULTIMER_GOLDEN / "params.npz")
    save_folder(tmp_path / "ours", config, parameters)
    assert is_multimer(tmp_path / "ours")
    assert is_multimer(MULTIMER_GOLDEN / "params.npz")
    assert not is_multimer(GOLDEN / "params.npz")
    again, parameters = load_folder(tmp_path / "ours")
    assert again == config
    back, before = alphafold.arrays_of(parameters, config), _arrays()
    assert {name: array.tobytes() for name, array in back.items()} == {n: a.tobytes() for n, a in before.items()}


def test_recycling_ends_when_distances_have_settled() -> None:
    """Of three CA one distance changes by 3 Angstrom and one by 1, of nine that count."""
    before, nothing = torch.zeros(1, 3, 3), torch.zeros(0)
    after = before.clone()
    before[0, 1, 0], before[0, 2, 0], after[0, 1, 0], after[0, 2, 0] = 4.0, 4.0, 4.0, 4.0
    after[0, 2, 1] = 3.0  # 3 from the second, 5 from the first
    changed = float(np.sqrt(2 * (3**2 + 1**2) / 9))
    with torch.device("meta"):
        model = Multimer(MultimerConfig())
    last, now = (Recycled(nothing, nothing, nothing, alpha) for alpha in (before, after))
    for tolerance, ends in ((changed + 1e-4, True), (changed - 1e-4, False), (-1.0, False)):
        model.config = replace(MultimerConfig(), recycle_tolerance=tolerance)
        assert model.settled(last, now, torch.ones(1, 3)) is ends
    model.config = replace(MultimerConfig(), recycle_tolerance=changed - 1e-4)
    assert model.settled(last, now, torch.tensor([[1.0, 0.0, 1.0]])) is True  # 1 Angstrom, twice of four
    assert model.settled(None, now, torch.ones(1, 3)) is False  # before the first all are at 0


def test_jax_s_numbers() -> None:
    """Random123's known answer, and jax.random.split(PRNGKey(0)) as jax printed it before it was partitionable."""
    zero = np.zeros(1, np.uint32)
    first, second = threefry(np.zeros((1, 2), np.uint32), zero, zero)
    assert (int(first[0]), int(second[0])) == (0x6B200159, 0x99BA4EFE)
    jax = JaxNumbers(partitionable=False)
    assert jax.split(jax.key(0)).tolist() == [[4146024105, 967050713], [2718843009, 1272950319]]
    for one in (jax, JaxNumbers(partitionable=True)):
        numbers = one.uniform(one.key(3), (4, 5))
        assert np.array_equal(numbers[:2, :3], one.uniform(one.key(3), (2, 3)))
        assert (numbers >= 0).all()
        assert (numbers < 1).all()


@pytest.fixture(params=COMMITTED)
def by_colabfold(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A run by ColabFold's fork, with the parameters of DeepMind's of this name."""
    folder = ORIGINALS / request.param
    for path in (folder / "params.npz", folder / "config.json", *(folder / "colabfold").iterdir()):
        shutil.copyfile(path, tmp_path / path.name)
    return tmp_path


@pytest.mark.parametrize("name", COMMITTED)
def test_all_versions_compute_as_the_original_of_two_and_three_chains(name: str) -> None:
    _is_as_the_run(ORIGINALS / name)


def test_all_versions_compute_as_colabfold_s_fork(by_colabfold: Path) -> None:
    """Its passes have other keys than DeepMind's, so other rows are drawn in them."""
    _is_as_the_run(by_colabfold)


def _is_as_the_run(folder: Path) -> None:
    found = examine(folder)
    assert set(found) == set(COMPLEX_OUTPUTS)
    assert all(one.well for one in found.values()), found
    assert found["num_recycles"].difference == 0


@pytest.mark.parametrize("name", COMMITTED)
def test_features_of_colabfold_s_fork_are_ours_but_for_ties(name: str) -> None:
    """Of rows of one species that are alike to the target it pairs any: its sort keeps no order."""
    with np.load(ORIGINALS / name / "batch.npz") as ours, np.load(ORIGINALS / name / "colabfold" / "batch.npz") as file:
        assert set(ours) == set(file)
        other = [key for key in ours if not np.array_equal(ours[key], file[key])]
        assert set(other) <= {"msa", "deletion_matrix"}
        one, two, chains_N = ours["msa"], file["msa"], ours["asym_id"]
    for chain in np.unique(chains_N):
        alike = [(msa == msa[0])[:, chains_N == chain].sum(1) for msa in (one, two)]
        assert np.array_equal(*alike)
    differ = (one != two).any(1)
    assert 0 < differ.sum() < 3


@pytest.mark.parametrize("name", COMMITTED)
def test_their_features_are_the_original_s_to_the_bit(name: str) -> None:
    with np.load(ORIGINALS / name / "batch.npz") as file:
        theirs = dict(file)
    chains_of = given_chains()
    one = assemble([chains_of[letter] for letter in RUNS[name].chains], 4).complex
    ours = complex_of(theirs)
    for field in fields(Complex):
        mine, other = getattr(one, field.name), getattr(ours, field.name)
        assert mine.dtype == other.dtype, field.name
        assert np.array_equal(mine, other), field.name


@pytest.mark.parametrize("name", COMMITTED)
def test_their_scores_are_the_original_s(name: str) -> None:
    with np.load(ORIGINALS / name / "out.npz") as file:
        out = {key: torch.from_numpy(file[key]) for key in ("predicted_aligned_error/logits", "predicted_lddt/logits")}
        expected = {key: file[key] for key in ("ptm", "iptm", "plddt")}
    with np.load(ORIGINALS / name / "batch.npz") as file:
        chains_N = torch.from_numpy(file["asym_id"].astype(np.int64)) - 1
    logits = out["predicted_aligned_error/logits"].double()
    across, _ = chain_tm_scores(logits, chains_N, chains_N)
    assert float(predicted_tm_score(logits, torch.ones(len(chains_N)))) == pytest.approx(expected["ptm"], rel=1e-5)
    assert float(across.max()) == pytest.approx(expected["iptm"], rel=1e-5)
    assert np.abs(plddt(out["predicted_lddt/logits"]).numpy() - expected["plddt"]).max() < 1e-4
