"""What training learns from, and what it does to a batch: draws, crops, padding, the average, a seed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from apps.fold.features.alignment import Alignment, single_sequence
from apps.fold.features.entries import read_entries
from apps.fold.loss.total import LossConfig
from apps.fold.model import residues
from apps.fold.model.alphafold import AlphaFold
from apps.fold.toy import DEMO_WEIGHTS, NOTE
from apps.fold.training.batches import BatchConfig, FoldBatches, delete_blocks, shuffled_sequence, stacked
from apps.fold.training.config import FoldTrainConfig, model_config
from apps.fold.training.dataset import Dataset, Example, Listed, Selection, _load, beside, clusters_of, load, prepare
from apps.fold.training.initialise import initialise
from apps.fold.training.objective import Objective, confidence_alone
from apps.fold.training.recipes import RECIPES
from apps.fold.weights.folder import load_folder, read_note
from apps.fold.weights.table import name_table
from core.config import UserError
from tests.support.checkpoints import flipped
from tests.support.fold import Chains, random_parameters, small_model

DEMO = Path(__file__).parents[3] / "apps" / "fold" / "demo"
F64 = torch.float64


def _batches(**options) -> FoldBatches:
    return FoldBatches(Chains(), BatchConfig(**{"global_batch": 6, "crop": 9, **options}), small_model(), seed=3)


def test_a_row_depends_on_the_step_and_its_number_alone() -> None:
    batches = _batches()
    for step in (0, 5):
        rows = [batches.row(step, row) for row in range(6)]
        for ranks in (1, 2, 3):
            for rank in range(ranks):
                got = batches.batch(step, rank, ranks)
                want = stacked(rows[rank * 6 // ranks : (rank + 1) * 6 // ranks])
                assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_chain_is_drawn_anew_in_every_step_and_row() -> None:
    class One(Chains):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, number: int) -> Example:
            return super().__getitem__(4)

    batches = FoldBatches(One(), BatchConfig(global_batch=2, crop=99), small_model(), seed=3)  # pyright: ignore
    shown = [batches.row(step, row)["msa"][-1].sum((0, 1)).tolist() for step in range(4) for row in range(2)]
    hidden = [batches.row(step, row)["hidden"].tolist() for step in range(4) for row in range(2)]
    assert len({str(one) for one in hidden}) == 8
    assert len({str(one) for one in shown}) > 4


def test_an_epoch_has_one_chain_of_each_cluster(tmp_path: Path) -> None:
    chains = Chains()
    listed = tuple(Listed(f"{n}abc_A", 7, 1, 0, tmp_path, 0) for n in range(5))
    (tmp_path / "clusters").write_text("2ABC_A 0abc_A 9XYZ_B\n4ABC_A\n3ABC_A 1ABC_A\n")
    clusters = clusters_of(Dataset(listed, ()), tmp_path / "clusters")
    assert sorted(clusters) == [(0, 2), (1, 3), (4,)]
    seen = []

    class Watched(Chains):
        def __getitem__(self, number: int) -> Example:
            seen.append(number)
            return chains[number]

    config = BatchConfig(global_batch=3, crop=9)
    batches = FoldBatches(Watched(), config, small_model(), 3, clusters)  # pyright: ignore[reportArgumentType]
    for step in range(12):
        batches.batch(step, 0, 1)
        assert sorted(next(c for c in range(3) if n in sorted(clusters)[c]) for n in seen[-3:]) == [0, 1, 2]
    assert set(seen) == {0, 1, 2, 3, 4}
    for text, said in (("1abc_A\n1abc_A 2abc_A\n", "1ABC_A is in two clusters"), ("9xyz_A\n", "names none of the 5")):
        (tmp_path / "clusters").write_text(text)
        with pytest.raises(UserError, match=said):
            clusters_of(Dataset(listed, ()), tmp_path / "clusters")
    with pytest.raises(UserError, match="a file with a cluster of chains a line"):
        clusters_of(Dataset(listed, ()), tmp_path / "nowhere")


def test_recycling_is_drawn_from_the_step_and_takes_every_count() -> None:
    model = replace(small_model(), num_recycles=3)
    batches = FoldBatches(Chains(), BatchConfig(global_batch=4, crop=9), model, seed=0)
    counts = [batches.num_iterations(step) for step in range(60)]
    assert set(counts) == {1, 2, 3, 4}
    for step in (0, 1, 2):
        assert {batches.batch(step, rank, 2)["msa"].shape[1] for rank in (0, 1)} == {counts[step]}


def test_every_chain_once_an_epoch_and_crops_are_stretches_of_it() -> None:
    chains, batches = Chains(), _batches(global_batch=1)
    seen = []
    for step in range(2 * len(chains)):
        row = batches.row(step, 0)
        index = row["residue_index"].numpy()
        assert len(index) <= 9
        assert (np.diff(index) == 1).all()
        match = [n for n in range(len(chains)) if _is_part(row, index, chains[n])]
        assert len(match) == 1
        seen.append(match[0])
    assert sorted(seen[: len(chains)]) == sorted(seen[len(chains) :]) == list(range(len(chains)))


def _is_part(row: dict[str, torch.Tensor], index: np.ndarray, example: Example) -> bool:
    if index[-1] >= len(example.entry):
        return False
    atoms = (example.entry.positions * example.entry.mask[..., None])[index]
    return np.allclose(row["positions_milli"].numpy() / 1000, atoms, atol=6e-4)


def test_what_is_hidden_is_what_may_differ() -> None:
    batch = _batches().batch(0, 0, 1)
    shown = batch["msa"][:, -1, :, :, :23].argmax(-1)
    differs = (shown != batch["letters"]) & (batch["msa_mask"][:, -1] > 0)
    assert (batch["hidden"] | ~differs).all()
    share = batch["hidden"].sum() / batch["msa_mask"][:, -1].sum()
    assert 0.03 < share < 0.35
    assert differs.sum() > 0.5 * batch["hidden"].sum()


def test_a_share_of_zero_hides_nothing() -> None:
    batches = FoldBatches(Chains(), BatchConfig(), replace(small_model(), hidden_share=0.0), seed=3)
    for row in range(3):
        made = batches.row(0, row)
        assert not made["hidden"].any()
        assert torch.equal(made["msa"][-1, :, :, :23].argmax(-1), made["letters"])
    with pytest.raises(UserError, match="hidden_share=1"):
        replace(small_model(), hidden_share=1.0)


def test_padding_changes_nothing() -> None:
    """A row has the same loss, part by part, alone and beside a longer one with more rows of the MSA."""
    batches, model = _batches(crop=64), small_model()
    network = AlphaFold(model).double()
    network.load_state_dict({k: v.double() for k, v in random_parameters(model).items()})
    network.eval()
    rows = [batches.row(0, row) for row in range(4)]
    assert len({len(row["aatype"]) for row in rows}) > 1
    assert len({row["letters"].shape[0] for row in rows}) > 1
    config = LossConfig(experimentally_resolved=0.01, violation=1.0)
    with torch.no_grad():
        together = Objective(config).parts(network, _wide(stacked(rows)))
        for number, row in enumerate(rows):
            alone = Objective(config).parts(network, _wide(stacked([row])))
            for name, part in alone.items():
                assert part.item() == pytest.approx(together[name][number].item(), rel=1e-10, abs=1e-12), name


def _wide(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: v.to(F64) if v.is_floating_point() else v for k, v in batch.items()}


def test_a_row_counts_by_the_root_of_its_residues_and_decoys_teach_confidence_alone() -> None:
    model = small_model()
    network = AlphaFold(model)
    network.load_state_dict(random_parameters(model))
    network.eval()
    batch = stacked([_batches().row(0, 0)])
    objective = Objective(LossConfig())
    with torch.no_grad():
        parts = objective.parts(network, batch)
        total = sum(getattr(LossConfig(), name) * part.item() for name, part in parts.items())
        root = batch["mask"].sum().sqrt().item()
        assert objective(network, batch).item() == pytest.approx(root * total, rel=1e-5)
        decoy = objective.parts(network, batch | {"taught": torch.tensor([False])})
    assert {name for name, part in decoy.items() if part.item() != 0} == {"plddt", "pae"}


def test_where_confidence_alone_learns_its_heads_have_gradients_and_the_loss_has_its_parts() -> None:
    model = replace(small_model(), heads=replace(small_model().heads, pae_bins=8))
    network = AlphaFold(model)
    network.load_state_dict(random_parameters(model))
    confidence_alone(network)
    batch = stacked([_batches().row(0, 0)])
    value = Objective(LossConfig(), "confidence")(network, batch)
    value.backward()
    learned = {name for name, p in network.named_parameters() if p.grad is not None and p.grad.any()}
    assert learned == {
        name for name, _ in network.named_parameters() if name.startswith(("heads.plddt.", "heads.pae."))
    }
    with torch.no_grad():
        parts = Objective(LossConfig()).parts(network, batch)
    confidence = 0.01 * parts["plddt"].item() + 0.1 * parts["pae"].item()
    assert value.item() == pytest.approx(batch["mask"].sum().sqrt().item() * confidence, rel=1e-5)
    assert not any(module.training for module in network.modules())


def test_blocks_are_deleted_and_the_query_stays() -> None:
    letters = np.arange(200, dtype=np.uint8)[:, None].repeat(3, 1) % 21
    letters[:, 1] = np.arange(200)
    alignment = Alignment(letters, np.zeros(letters.shape, np.int32), tuple(map(str, range(200))))
    sizes = []
    for seed in range(30):
        left = delete_blocks(alignment, np.random.default_rng(seed))
        rows = left.letters[:, 1]
        assert rows[0] == 0
        assert left.names == tuple(map(str, rows))
        gone = np.setdiff1d(np.arange(200), rows)
        runs = np.split(gone, np.nonzero(np.diff(gone) > 1)[0] + 1)
        assert len(runs) <= 5
        sizes.append(len(rows))
    assert 20 < np.mean(sizes) < 80  # of 200, five blocks of 60 leave (1 - 0.3)^5 = 0.17 and what overhangs the end
    alone = single_sequence("MKT")
    assert len(delete_blocks(alone, np.random.default_rng(0))) == 1


def test_a_shuffled_sequence_keeps_its_letters_and_the_coordinates() -> None:
    example = Chains()[0]
    other = shuffled_sequence(example, np.random.default_rng(0))
    assert sorted(other.entry.sequence) == sorted(example.entry.sequence)
    assert other.entry.sequence != example.entry.sequence
    assert np.array_equal(other.alignment.letters[0], single_sequence(other.entry.sequence).letters[0])
    assert np.array_equal(other.entry.positions, example.entry.positions)
    row = _batches(decoys=0.99).row(0, 0)
    assert not row["taught"]
    assert (row["atom_mask"].numpy() <= residues.ATOM37_MASK[row["aatype"].numpy()]).all()


def test_parameters_follow_from_the_seed_and_their_names() -> None:
    models = [AlphaFold(small_model()) for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2)):
        torch.manual_seed(len(models))
        initialise(model, seed)
    first, again, other = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(first[name], again[name]) for name in first)
    differing = {name for name in first if not torch.equal(first[name], other[name])}
    assert "blocks.0.pair.transition.up.weight" in differing
    assert len({tuple(first[f"blocks.{n}.pair.transition.up.weight"].flatten()[:3].tolist()) for n in (0, 1)}) == 2
    weight = first["input_embedder.msa.weight"]
    assert weight.std().item() == pytest.approx(weight.shape[1] ** -0.5, rel=0.1)


def test_a_folder_of_structures_with_faults(tmp_path: Path) -> None:
    folder, alignments, cache = tmp_path / "structures", tmp_path / "alignments", tmp_path / "cache"
    folder.mkdir()
    alignments.mkdir()
    (folder / "1ubi.pdb").write_bytes((DEMO / "structures" / "1ubi.pdb").read_bytes())
    (folder / "1a8o.cif").write_bytes((DEMO / "structures" / "1a8o.cif").read_bytes())
    (folder / "bad.cif").write_text("nonsense")
    (folder / "short.pdb").write_text("\n".join((DEMO / "structures" / "1ubi.pdb").read_text().splitlines()[:0]))
    sequence = read_entries(folder / "1a8o.cif")[0].sequence
    (alignments / "1a8o_A.a3m").write_text(f">q\n{sequence}\n>other\n{'A' * len(sequence)}\n")
    (alignments / "1ubi.a3m").write_text(">q\nMKTAYW\n")
    selection = Selection()
    for share in ((0, 2), (1, 2)):
        prepare(folder, beside(alignments), selection, cache, share)
    dataset = load(folder, beside(alignments), selection, cache)
    assert [(chain.name, chain.num_rows) for chain in dataset.chains] == [("1a8o_A", 2)]
    assert len(dataset.refused) == 3
    assert all("\n" not in line for line in dataset.refused)
    assert any("1ubi.pdb, chain A" in line and "query of 6 residues" in line for line in dataset.refused)
    stamps = {path: path.stat().st_mtime_ns for path in cache.rglob("*.npz")}
    prepare(folder, beside(alignments), selection, cache)
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.npz")} == stamps
    for file in (dataset.chains[0].file, dataset.chains[0].file.with_name("index.json")):
        for at in (0, 100, file.stat().st_size // 2, file.stat().st_size - 1):
            _load.cache_clear()
            with flipped(file, at, 1), pytest.raises(UserError, match=rf"{file.name} of the cache .*remove"):
                load(folder, beside(alignments), selection, cache)[0]
    (alignments / "1ubi.a3m").unlink()  # other contents, another place in the cache
    prepare(folder, beside(alignments), selection, cache)
    assert len(load(folder, beside(alignments), selection, cache)) == 2
    prepare(folder, beside(None), Selection(max_resolution=0.5), cache)
    with pytest.raises(UserError, match=r"no chain .* can be used"):
        load(folder, beside(None), Selection(max_resolution=0.5), cache)


def test_an_entry_has_its_whole_sequence() -> None:
    entry = read_entries(DEMO / "structures" / "1a8o.cif")[0]
    assert entry.resolution == pytest.approx(1.7)
    assert entry.sequence.startswith("MDIRQGPKEPFRDYVDRFYKTLRAEQASQEVKNWMTETLLVQNANPDCKTILKALGPGATLEEMMTACQG")
    assert entry.mask[0, residues.ATOM37.index("SD")] == 1  # selenomethionine's selenium
    assert entry.num_seen == 70
    pdb = read_entries(DEMO / "structures" / "1ubi.pdb")[0]
    assert (pdb.name, len(pdb), pdb.resolution) == ("1ubi_A", 76, 1.8)


CIF = """data_1abc
_reflns.d_resolution_high 2.5
loop_
_entity_poly.entity_id
_entity_poly.type
1 polypeptide(L)
2 polydeoxyribonucleotide
loop_
_entity_poly_seq.entity_id
_entity_poly_seq.num
_entity_poly_seq.mon_id
1 1 GLY
1 2 MSE
1 3 ALA
1 3 SER
1 4 XYZ
2 1 DA
loop_
_atom_site.label_atom_id
_atom_site.label_alt_id
_atom_site.label_comp_id
_atom_site.label_entity_id
_atom_site.label_seq_id
_atom_site.auth_asym_id
_atom_site.Cartn_x
_atom_site.Cartn_y
_atom_site.Cartn_z
_atom_site.occupancy
_atom_site.pdbx_PDB_model_num
CA . MSE 1 2 Q 1.0 2.0 3.0 1.0 1
SE . MSE 1 2 Q 4.0 5.0 6.0 1.0 1
CA B ALA 1 3 Q 0.0 0.0 2.0 0.6 1
CA A ALA 1 3 Q 0.0 0.0 1.0 0.4 1
CA C SER 1 3 Q 0.0 0.0 3.0 0.7 1
OG C SER 1 3 Q 0.0 1.0 3.0 0.7 1
P  . DA  2 1 R 7.0 7.0 7.0 1.0 1
O  . HOH 3 . Q 8.0 8.0 8.0 1.0 1
CA . GLY 1 1 Q 9.0 9.0 9.0 1.0 2
"""


def test_what_was_not_seen_is_masked_and_the_best_place_counts(tmp_path: Path) -> None:
    (tmp_path / "1abc.cif").write_text(CIF)
    (entry,) = read_entries(tmp_path / "1abc.cif")
    assert (entry.name, entry.sequence, entry.resolution, entry.num_seen) == ("1abc_Q", "GMAX", 2.5, 2)
    assert entry.mask[0].sum() == entry.mask[3].sum() == 0
    assert entry.positions[1, residues.CA].tolist() == [1, 2, 3]
    assert entry.positions[1, residues.ATOM37.index("SD")].tolist() == [4, 5, 6]
    assert entry.positions[2, residues.CA].tolist() == [0, 0, 2]
    assert entry.mask[2].sum() == 1, "no atom of the serine that is in the alanine's place"


def test_recipes_are_models_that_training_feeds() -> None:
    for name, recipe in RECIPES.items():
        config = recipe()
        model = model_config(config, None if config.is_preset else load_folder(DEMO_WEIGHTS)[0])
        assert model.templates is None or config.of_complexes, name
        assert name_table(model)
    assert model_config(RECIPES["initial_training"]()).max_extra_msa == 1024
    with pytest.raises(UserError, match=r"has templates; give --data\.templates"):
        model_config(FoldTrainConfig(model="model_1_ptm"))
    assert isinstance(Chains()[0], Example)


def test_the_toy_that_is_carried_is_of_the_recipe() -> None:
    config, stored = RECIPES["tiny"](), load_folder(DEMO_WEIGHTS)[0]
    assert stored == model_config(config)
    assert read_note(DEMO_WEIGHTS) == config.note == NOTE
