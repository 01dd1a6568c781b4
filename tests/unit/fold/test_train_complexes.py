"""What training on complexes learns from: assemblies, paired alignments, labels of all copies, crops of rows."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from apps.fold.features.entries import _listed_operations, _operations, read_entries
from apps.fold.loss.total import LossConfig
from apps.fold.model import residues
from apps.fold.model.network import trainable
from apps.fold.toy import DIMERS, HELDOUT, STRUCTURES
from apps.fold.training.batches import BatchConfig, FoldBatches, iterations_of, stacked, truth_of
from apps.fold.training.complexes import ComplexExample
from apps.fold.training.config import FoldTrainConfig, model_config
from apps.fold.training.dataset import Dataset, Selection, beside, load, prepare
from apps.fold.training.initialise import initialise
from apps.fold.training.objective import Objective
from apps.fold.training.recipes import RECIPES
from core.config import UserError
from tests.support.fold import Complexes, random_parameters, small_multimer

SELECTION = Selection(complexes=True)


def read(structures: Path, cache: Path, alignments: Path | None = None, selection: Selection = SELECTION) -> Dataset:
    there = beside(alignments)
    prepare(structures, there, selection, cache)
    return load(structures, there, selection, cache)


def test_an_assembly_has_the_copies_that_symmetry_makes() -> None:
    (alone,) = read_entries(STRUCTURES / "1a8o.cif")
    first, second = read_entries(STRUCTURES / "1a8o.cif", assembly=True)
    assert (first.name, second.name) == ("1a8o_A", "1a8o_A-2")
    np.testing.assert_array_equal(first.positions, alone.positions)
    x, y, z = np.moveaxis(alone.positions, -1, 0)
    there = second.mask > 0
    mate = np.stack([-y + 41.98, -x + 41.98, -z + 44.46], -1)  # -y+1, -x+1, -z+1/2 of its cell
    np.testing.assert_allclose(second.positions[there], mate[there], atol=1e-4)
    assert len(read_entries(HELDOUT / "1a7g.cif", assembly=True)) == 2
    assert len(read_entries(STRUCTURES / "1ejg.pdb", assembly=True)) == 1


def test_operations_are_listed_as_the_archive_does() -> None:
    assert _listed_operations("1,3-5,P") == ["1", "3", "4", "5", "P"]
    turns = {"1": np.eye(3), "2": np.array([[0, -1, 0], [1, 0, 0], [0, 0, 1.0]])}  # 2: a quarter turn, and a shift
    content = {"_pdbx_struct_oper_list.id": [*turns]}
    for i in range(3):
        content[f"_pdbx_struct_oper_list.vector[{i + 1}]"] = ["0", str(i + 1)]
        for j in range(3):
            content[f"_pdbx_struct_oper_list.matrix[{i + 1}][{j + 1}]"] = [str(turn[i, j]) for turn in turns.values()]
    x = np.array([5.0, 7, 9])

    def moved(expression: str) -> list[list[float]]:
        return [(turn @ x + shift).tolist() for turn, shift in _operations(expression, content)]

    once = [-6.0, 7, 12]
    assert moved("1,2") == moved("(1-2)") == [x.tolist(), once]
    assert moved("(2)(1,2)") == [once, [-6.0, -4, 15]]


def test_the_toys_dimers_are_parts_of_what_the_package_carries() -> None:
    pairs = {
        "1a8o_dimer": [*zip(read_entries(STRUCTURES / "1a8o.cif", assembly=True), (slice(21, 45), slice(24, 45)))],
        "1ubi_dimer": [(read_entries(STRUCTURES / "1ubi.pdb")[0], slice(*at)) for at in ((2, 22), (51, 71))],
    }
    for name, parts in pairs.items():
        chains = read_entries(DIMERS / f"{name}.pdb")
        for chain, (entry, at) in zip(chains, parts, strict=True):
            assert chain.sequence == entry.sequence[at]
            np.testing.assert_array_equal(chain.mask, entry.mask[at])
            np.testing.assert_allclose(chain.positions, entry.positions[at], atol=6e-4)


def test_a_files_chains_are_one_example(tmp_path: Path) -> None:
    """A homodimer, and two chains whose rows of one species are paired."""
    alignments = tmp_path / "alignments"
    alignments.mkdir()
    first, second = (one.sequence for one in read_entries(DIMERS / "1ubi_dimer.pdb"))
    one, other = "A" + first[1:], "C" + second[1:]
    (alignments / "1ubi_dimer_A.a3m").write_text(f">q\n{first}\n>own\n{'W' * len(first)}\n")
    for chain, rows in (("A", (first, one)), ("B", (second, other))):
        name = "tr|A0A146SKV9|A0A146SKV9_FUNHE"
        (alignments / f"1ubi_dimer_{chain}.uniprot.a3m").write_text(f">q\n{rows[0]}\n>{name}\n{rows[1]}\n")
    homo = read(STRUCTURES / "1a8o.cif", tmp_path / "cache")[0]
    hetero = read(DIMERS, tmp_path / "cache", alignments)[1]
    assert isinstance(homo, ComplexExample)
    assert isinstance(hetero, ComplexExample)
    assert homo.complex.asym_id.tolist() == [1] * 70 + [2] * 70
    assert homo.complex.entity_id.tolist() == [1] * 140
    assert homo.complex.sym_id.tolist() == [1] * 70 + [2] * 70
    assert (hetero.complex.asym_id == hetero.complex.entity_id).all()
    letters = ["".join((*residues.RESTYPES, "X", "-")[letter] for letter in row) for row in hetero.complex.msa]
    assert letters == [first + second, one + other, "W" * len(first) + "-" * len(second)]
    chains = read_entries(DIMERS / "1ubi_dimer.pdb")
    np.testing.assert_array_equal(hetero.positions, np.concatenate([chain.positions for chain in chains]))
    assert hetero.resolution == 1.8
    assert read(DIMERS, tmp_path / "cache", alignments)[1].name == "1ubi_dimer"  # pyright: ignore


def test_residues_that_a_pdb_file_leaves_out_leave_a_gap(tmp_path: Path) -> None:
    """As of single chains: what is left on both sides are no neighbours, and no bond is asked for between them."""
    lines = (DIMERS / "1ubi_dimer.pdb").read_text().splitlines(keepends=True)
    entries = read_entries(DIMERS / "1ubi_dimer.pdb")
    first = next(int(line[22:26]) for line in lines if line.startswith("ATOM"))
    missing = {f"A{number:4}" for number in (first + 5, first + 6)}
    folder = tmp_path / "structures"
    folder.mkdir()
    (folder / "gap.pdb").write_text("".join(line for line in lines if line[21:26] not in missing))
    example = read(folder, tmp_path / "cache")[0]
    assert isinstance(example, ComplexExample)
    whole, other = (np.arange(len(entry)) for entry in entries)
    assert example.complex.residue_index.tolist() == [*np.delete(whole, (5, 6)), *other]


def test_what_cannot_be_used_is_left_out_with_a_line(tmp_path: Path) -> None:
    few = Selection(complexes=True, max_chains=1)
    with pytest.raises(UserError, match="its assembly has 2 chains; at most 1"):
        read(DIMERS, tmp_path / "cache", selection=few)
    dataset = read(STRUCTURES, tmp_path / "cache", selection=few)
    assert [chain.name for chain in dataset.chains] == ["1ejg", "1ubi"]
    (line,) = dataset.refused
    assert "1a8o.cif: its assembly has 2 chains" in line
    alignments = tmp_path / "alignments"
    alignments.mkdir()
    (alignments / "1ubi_dimer_B.a3m").write_text(">q\nWWWW\n")
    dataset = read(DIMERS, tmp_path / "cache", alignments)
    assert [chain.num_residues for chain in dataset.chains] == [45, 20]
    assert "1ubi_dimer.pdb, chain B" in dataset.refused[0]


def batches(crop: int = 64, **options) -> FoldBatches:
    return FoldBatches(Complexes(), BatchConfig(global_batch=5, crop=crop, **options), small_multimer(), 3)  # pyright: ignore


def test_a_row_has_the_positions_of_all_copies_of_its_residues() -> None:
    of = batches()
    seen = set()
    for number in range(5):
        row = of.row(0, number)
        kind = next(n for n in range(5) if _is_of(row, Complexes()[n]))
        example = Complexes()[kind]
        one = example.complex
        seen.add(kind)
        for at in range(len(example)):
            places = [
                n
                for n in range(len(example))
                if one.entity_id[n] == one.entity_id[at] and one.residue_index[n] == one.residue_index[at]
            ]
            assert row["copies"][at] == len(places)
            assert one.sym_id[places].tolist() == list(range(1, len(places) + 1))
            for copy, place in enumerate(places):
                mask = row["atom_mask"][at, copy].numpy()
                np.testing.assert_array_equal(mask, example.mask[place] > 0)
                got = row["positions_milli"][at, copy].numpy() / 1000
                np.testing.assert_allclose(got[mask], example.positions[place][mask], atol=6e-4)
            assert not row["atom_mask"][at, len(places) :].any()
    assert seen == set(range(5))


def _is_of(row: dict[str, torch.Tensor], example: ComplexExample) -> bool:
    return row["asym"].tolist() == example.complex.asym_id.tolist() and (
        row["aatype"].tolist() == example.complex.aatype.tolist()
    )


def test_crops_take_all_tensors_from_the_same_residues() -> None:
    whole, cropped = batches(), batches(crop=8)
    for number in range(5):
        row, part = whole.row(1, number), cropped.row(1, number)
        assert len(part["aatype"]) == 8
        ids = list(zip(row["asym"].tolist(), row["residue_index"].tolist()))
        at = [ids.index(one) for one in zip(part["asym"].tolist(), part["residue_index"].tolist())]
        for name in ("aatype", "entity", "sym", "copies", "target", "positions_milli", "atom_mask"):
            assert torch.equal(part[name], row[name][at]), name
        assert torch.equal(
            part["msa"][-1, 0, :, :23].argmax(-1).where(~part["hidden"][0], part["aatype"]), part["aatype"]
        )


def test_labels_are_of_the_copies_that_suit_the_prediction() -> None:
    """Of a prediction that is the experiment with its chains exchanged the truth is that prediction."""
    of = batches()
    rows = [of.row(0, number) for number in range(5)]
    batch = stacked(rows)
    swapped = batch["positions_milli"][:, :, 0].double() / 1000
    for b in range(5):
        for n in range(batch["asym"].shape[1]):
            copies = int(batch["copies"][b, n])
            if copies:
                copy = int(batch["sym"][b, n]) % copies  # each chain where the next one is
                swapped[b, n] = batch["positions_milli"][b, n, copy].double() / 1000
    turned = swapped @ torch.linalg.qr(torch.tensor([[1.0, 2, 3], [0, 1, 4], [5, 6, 0]]).double())[0].T + 7
    truth = truth_of(batch, turned)
    there = truth.atom37_mask_BN37 > 0
    torch.testing.assert_close(truth.atom37_BN373[there].double(), swapped[there], atol=1e-4, rtol=0)
    assert (batch["copies"] > 1).any()


def test_padding_changes_nothing() -> None:
    """A complex has the same loss, part by part, alone and beside a longer one with more copies."""
    of, model = batches(), small_multimer()
    network = trainable(model).double()
    values = random_parameters(model)
    network.load_state_dict({name: value.double() for name, value in values.items()})
    network.eval()
    rows = [of.row(0, number) for number in range(5)]
    objective = Objective(LossConfig(violation=0.1, experimentally_resolved=0.01))

    def parts(some: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        batch = {k: v.double() if v.is_floating_point() else v for k, v in stacked(some).items()}
        with torch.no_grad():
            return objective.parts(network, batch)

    together = parts(rows)
    assert {"interface", "centres", "backbone", "pae", "violation"} <= together.keys()
    assert (together["interface"] > 0).sum() == 4  # one is a chain alone
    for number, row in enumerate(rows):
        for name, value in parts([row]).items():
            torch.testing.assert_close(value[0], together[name][number], rtol=1e-6, atol=1e-7, msg=name)


def test_what_models_of_complexes_do_not_know_is_refused_by_name() -> None:
    config = RECIPES["debug_complexes"]()
    assert config.of_complexes
    with pytest.raises(UserError, match=r"data\.decoys"):
        model_config(replace(config, data=replace(config.data, decoys=0.5)))
    for model in ("debug", "model_1_multimer_v3", "debug_multimer"):
        unread = FoldTrainConfig(model=model).unread()
        assert ("data.max_chains" in unread) == ("loss.interface" in unread) == (model == "debug")


def test_initial_values_do_not_settle() -> None:
    """Ranks recycle equally often: a model in training goes on, whatever its distances say."""
    model = replace(small_multimer(), num_recycles=2, recycle_tolerance=1e9)
    with torch.device("meta"):
        network = trainable(model)
    network.to_empty(device="cpu")
    initialise(network, 0)
    of = FoldBatches(Complexes(), BatchConfig(global_batch=1, crop=8), model, 0)  # pyright: ignore
    step = next(step for step in range(9) if of.num_iterations(step) == 3)
    with torch.no_grad():
        assert network(iterations_of(of.batch(step, 0, 1))).num_recycles == 2
