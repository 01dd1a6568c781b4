"""Structure files read and written, and templates of them."""

import gzip
import json
import random
import re
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from apps.fold.features.entries import read_entries
from apps.fold.features.sequences import chain_id
from apps.fold.features.structures import Chain, read_mmcif, read_structure, structure_of
from apps.fold.features.templates import align, features_of_templates, read_templates
from apps.fold.model import residues
from apps.fold.model.rigid import Frames
from apps.fold.model.torsions import atom37_of_atom14, atoms_of_frames, frames_of_torsions
from apps.fold.output.confidence import Folded
from apps.fold.output.files import fits_pdb, write_confidence, write_mmcif, write_pdb
from apps.fold.output.interfaces import ipsae, pdockq2
from apps.fold.output.plots import plot, plot_coverage, plot_pairing, rows_of_several
from apps.fold.toy import STRUCTURES
from apps.fold.training.dataset import structure_files
from core.config import UserError

SEQUENCE = "MKTAYIAKQRQISFWXVHCDEGLNP"


def _folded(sequence: str = SEQUENCE, seed: int = 0) -> Folded:
    generator = torch.Generator().manual_seed(seed)
    N = len(sequence)
    lookup = {letter: i for i, letter in enumerate(residues.RESTYPES)}
    aatype = torch.tensor([lookup.get(letter, 20) for letter in sequence])
    angle = 6.3 * torch.rand(N, 7, generator=generator)
    frames = Frames(torch.eye(3).expand(N, 3, 3), 3.8 * torch.arange(N)[:, None] * torch.tensor([1.0, 0.3, -0.2]))
    groups = frames_of_torsions(aatype, frames, torch.stack([angle.sin(), angle.cos()], -1))
    positions = atom37_of_atom14(aatype, atoms_of_frames(aatype, groups)).numpy()
    mask = residues.ATOM37_MASK[aatype]
    plddt = 100 * torch.rand(N, generator=generator).numpy()
    pae = (31 * torch.rand(N, N, generator=generator)).numpy()
    distances = torch.softmax(torch.randn(N, N, 64, generator=generator), -1).numpy()
    return Folded(sequence, positions, mask, plddt, pae, 0.5, distances)


@pytest.mark.parametrize(("name", "entry"), [("a b", "a_b"), ("日本語", "model"), ("caf\u00e9-1", "caf_-1")])
def test_an_entry_is_named_as_the_format_takes_it(name: str, entry: str, tmp_path: Path) -> None:
    write_mmcif(tmp_path / "a.cif", _folded(), name, "a title")
    read = read_mmcif(tmp_path / "a.cif")
    assert read["data_"] == entry
    assert read["_entry.id"] == [entry]


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_a_title_in_either_encoding(encoding: str, tmp_path: Path) -> None:
    path, title = tmp_path / "a.cif", "a caf\u00e9 in Z\u00fcrich"
    write_mmcif(path, _folded(), "a", title)
    path.write_bytes(path.read_text("utf-8").encode(encoding))
    assert read_mmcif(path)["_struct.title"] == [title]


@pytest.mark.parametrize("suffix", [".cif", ".pdb"])
def test_what_is_written_is_read_again(tmp_path: Path, suffix: str) -> None:
    folded, path = _folded(), tmp_path / f"a{suffix}"
    if suffix == ".cif":
        write_mmcif(path, folded, "a", "a title, with 'quotes'")
    else:
        write_pdb(path, folded, "a title " * 12)
    (chain,) = read_structure(path)
    seen = [i for i, letter in enumerate(SEQUENCE) if letter != "X"]  # X has no atoms to write
    assert chain.name == "A"
    assert chain.sequence == SEQUENCE.replace("X", "")
    assert chain.numbers == tuple(str(i + 1) for i in seen)
    assert np.abs(chain.positions - folded.positions[seen]).max() < 1e-3
    assert np.array_equal(chain.mask, folded.mask[seen])
    assert np.abs(chain.b_factors - folded.plddt[seen]).max() < 0.01


def test_the_mmcif_has_what_viewers_colour_by(tmp_path: Path) -> None:
    from Bio.PDB.MMCIF2Dict import MMCIF2Dict

    folded = _folded()
    write_mmcif(tmp_path / "a.cif", folded, "a", "title")
    read = MMCIF2Dict(str(tmp_path / "a.cif"))
    with_atoms = [f"{value:.2f}" for value, letter in zip(folded.plddt, SEQUENCE, strict=True) if letter != "X"]
    assert read["_ma_qa_metric_local.metric_value"] == with_atoms
    assert read["_ma_qa_metric_global.metric_value"] == [f"{folded.mean_plddt:.2f}"]
    assert read["_entity_poly.pdbx_seq_one_letter_code_can"] == [SEQUENCE]
    assert read["_entity_poly.pdbx_seq_one_letter_code"] == [SEQUENCE.replace("X", "(UNK)")]
    assert read["_entity_poly_seq.mon_id"][15] == "UNK"
    assert len(set(read["_atom_site.id"])) == len(read["_atom_site.id"]) == int(folded.mask.sum())


def _complex() -> Folded:
    """Chains of two entities, the second one twice."""
    one, count = _folded(), len(SEQUENCE)
    three = replace(
        one,
        sequence=SEQUENCE[:5] + SEQUENCE[5:] + SEQUENCE[5:],
        **{name: np.concatenate([x, x[5:]]) for name in ("positions", "mask", "plddt") for x in [getattr(one, name)]},
        pae=None,
        distances=None,
        lengths=(5, count - 5, count - 5),
    )
    assert len(three.plddt) == sum(three.lengths)
    return three


PARENTS = {
    "_entity_poly.entity_id": "_entity.id",
    "_entity_poly_seq.entity_id": "_entity.id",
    "_entity_poly_seq.mon_id": "_chem_comp.id",
    "_struct_asym.entity_id": "_entity.id",
    "_pdbx_poly_seq_scheme.asym_id": "_struct_asym.id",
    "_pdbx_poly_seq_scheme.mon_id": "_chem_comp.id",
    "_ma_target_entity.entity_id": "_entity.id",
    "_ma_target_entity.data_id": "_ma_data.id",
    "_ma_target_entity_instance.asym_id": "_struct_asym.id",
    "_ma_target_entity_instance.entity_id": "_entity.id",
    "_ma_software_group.software_id": "_software.pdbx_ordinal",
    "_ma_qa_metric.software_group_id": "_ma_software_group.group_id",
    "_ma_qa_metric_global.metric_id": "_ma_qa_metric.id",
    "_ma_qa_metric_local.metric_id": "_ma_qa_metric.id",
    "_ma_qa_metric_local.label_asym_id": "_struct_asym.id",
    "_ma_model_list.data_id": "_ma_data.id",
    "_ma_model_group_link.group_id": "_ma_model_group.id",
    "_ma_model_group_link.model_id": "_ma_model_list.ordinal_id",
    "_ma_data_group.data_id": "_ma_data.id",
    "_ma_protocol_step.software_group_id": "_ma_software_group.group_id",
    "_ma_protocol_step.input_data_group_id": "_ma_data_group.group_id",
    "_ma_protocol_step.output_data_group_id": "_ma_data_group.group_id",
    "_atom_site.label_asym_id": "_struct_asym.id",
    "_atom_site.label_entity_id": "_entity.id",
    "_atom_site.label_comp_id": "_chem_comp.id",
    "_atom_site.type_symbol": "_atom_type.symbol",
    "_atom_site.pdbx_PDB_model_num": "_ma_model_list.ordinal_id",
}
"""Items of ModelCIF's dictionary and those whose values theirs have to be, as it links them."""


def test_what_the_mmcif_refers_to_is_in_it(tmp_path: Path) -> None:
    from Bio.PDB.MMCIF2Dict import MMCIF2Dict

    write_mmcif(tmp_path / "a.cif", _complex(), "a", "title")
    read = MMCIF2Dict(str(tmp_path / "a.cif"))
    for child, parent in PARENTS.items():
        assert set(read[child]) <= set(read[parent]), child
    assert read["_entity.pdbx_number_of_molecules"] == ["1", "2"]
    assert read["_entity_poly.pdbx_strand_id"] == ["A", "B,C"]
    assert len(read["_pdbx_poly_seq_scheme.seq_id"]) == len(_complex().sequence)
    glycine = read["_chem_comp.id"].index("GLY")
    assert read["_chem_comp.formula_weight"][glycine] == "75.067"  # as the PDB's Chemical Component Dictionary has it


def test_modelcif_and_gemmi_read_it(tmp_path: Path) -> None:
    gemmi = pytest.importorskip("gemmi", reason="the dev extra installs it")
    reader = pytest.importorskip("modelcif.reader", reason="the dev extra installs it")
    found, path = _complex(), tmp_path / "a.cif"
    write_mmcif(path, found, "a", "a title, with 'quotes'")
    with open(path) as file:
        (system,) = reader.read(file)
    assert system.title == "a title, with 'quotes'"
    assert [(asym.id, len(asym.entity.sequence)) for asym in system.asym_units] == [
        (chain, length) for chain, length in zip("ABC", found.lengths)
    ]
    ((model,),) = system.model_groups
    assert len(model._atoms) == int(found.mask.sum())
    of_residues = [metric.value for metric in model.qa_metrics if hasattr(metric, "residue")]
    (whole,) = (metric.value for metric in model.qa_metrics if not hasattr(metric, "residue"))
    with_atoms = found.plddt[found.mask.any(1)]
    np.testing.assert_allclose([whole, *of_residues], [found.mean_plddt, *with_atoms], atol=0.006)
    assert [(type(step).__name__, step.software[0].name) for step in system.protocols[0].steps] == [
        ("ModelingStep", "Megalith")
    ]
    structure = gemmi.read_structure(str(path))
    there = [sum(letter != "X" for letter in found.sequence[rows]) for rows in found.chain_rows()]
    assert [(chain.name, len(chain)) for chain in structure[0]] == list(zip("ABC", there))
    assert [entity.polymer_type for entity in structure.entities] == 2 * [gemmi.PolymerType.PeptideL]


def test_confidences_and_plots(tmp_path: Path) -> None:
    folded = _folded()
    write_confidence(tmp_path, "r", folded, {"model": "m"})
    numbers = json.loads((tmp_path / "r_confidence.json").read_text())
    assert (numbers["model"], numbers["ptm"], len(numbers["plddt"])) == ("m", 0.5, len(SEQUENCE))
    (schema,) = json.loads((tmp_path / "r_pae.json").read_text())
    assert np.abs(np.array(schema["predicted_aligned_error"]) - folded.pae).max() <= 0.0501
    assert schema["max_predicted_aligned_error"] == 31.75
    assert np.load(tmp_path / "r_pae.npz")["pae"].shape == (25, 25)
    assert np.load(tmp_path / "r_distogram.npz")["edges"].shape == (63,)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot(tmp_path, "r", folded, "日本語")  # no font here may have these
    assert (tmp_path / "r_plddt.png").stat().st_size > 5000
    assert (tmp_path / "r_pae.png").stat().st_size > 5000
    assert (tmp_path / "r_structure.png").stat().st_size > 5000


def _pixels(path: Path) -> np.ndarray:
    from matplotlib.image import imread

    return np.asarray(imread(path))[..., :3]


def _has_colour(path: Path, colour: str) -> bool:
    wanted = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return bool((np.abs(_pixels(path) - wanted).max(-1) < 0.01).any())


@pytest.mark.parametrize(("plddt", "colour"), [(95.0, "#0053d6"), (40.0, "#ff7d45")])
def test_a_structure_has_the_colour_of_its_confidence(plddt: float, colour: str, tmp_path: Path) -> None:
    folded = replace(_folded(), plddt=np.full(len(SEQUENCE), plddt, np.float32), pae=None)
    plot(tmp_path, "r", folded, "title")
    path = tmp_path / "r_structure.png"
    other = {"#0053d6": "#ff7d45", "#ff7d45": "#0053d6"}[colour]
    assert _has_colour(path, colour)
    assert not _has_colour(path, other)


def test_chains_are_marked_in_the_plot_of_the_pae(tmp_path: Path) -> None:
    folded = _folded()
    plot(tmp_path, "one", folded, "title")
    plot(tmp_path, "two", replace(folded, lengths=(10, 15)), "title")
    changed = np.abs(_pixels(tmp_path / "one_pae.png") - _pixels(tmp_path / "two_pae.png")).max(-1) > 0.1
    assert changed.any(1).mean() > 0.5, "a line from top to bottom"
    assert changed.any(0).mean() > 0.5, "and one across"


def test_rows_and_pairs_of_an_alignment_are_drawn(tmp_path: Path) -> None:
    letters = np.full((4, 9), residues.GAP, np.uint8)
    letters[0], letters[1, :4], letters[2, 4:], letters[3, 3:5] = 1, 1, 1, 1
    assert rows_of_several(letters != residues.GAP, (4, 5)).tolist() == [True, False, False, True]
    plot_coverage(tmp_path, letters, (4, 5), "title")
    assert _has_colour(tmp_path / "coverage.png", "#0053d6")
    plot_coverage(tmp_path, letters, (9,), "title")
    assert not _has_colour(tmp_path / "coverage.png", "#0053d6"), "a single chain has no rows of several"
    plot_pairing(tmp_path, Counter({"HUMAN": 3, "MOUSE": 1}), "title")
    assert _has_colour(tmp_path / "pairing.png", "#65cbf3")


PDB = """\
MODEL        1
HETATM    1  N   MSE A  10      11.104   6.134  -6.504  1.00  0.00           N
HETATM    2  CA  MSE A  10      11.639   6.071  -5.147  1.00 20.00           C
HETATM    3  C   MSE A  10      12.000   7.000  -4.000  1.00  0.00           C
HETATM    4 SE   MSE A  10      13.000   7.500  -4.500  1.00  0.00          SE
ATOM      5  N   ALA A  10A     14.000   8.000  -3.000  1.00  0.00           N
ATOM      6  CA AALA A  10A     15.000   8.100  -2.000  0.30  0.00           C
ATOM      7  CA BALA A  10A     16.000   8.200  -1.000  0.70 30.00           C
ATOM      8  N   LYS A  12      17.000   8.000   0.000  1.00  0.00           N
ATOM      9  CA  LYS A  12      18.000   8.000   1.000  1.00  0.00           C
ATOM     12  N  BSER A  13      19.000   8.500   1.000  0.60  0.00           N
ATOM     13  CA BSER A  13      20.000   8.500   1.000  0.60 40.00           C
ATOM     14  OG BSER A  13      21.000   8.500   1.000  0.60  0.00           O
ATOM     10  N  AGLY A  13      19.000   8.000   1.000  0.40  0.00           N
ATOM     11  CA AGLY A  13      20.000   8.000   1.000  0.40  0.00           C
HETATM   10  O   HOH A 201      30.000  30.000  30.000  1.00  0.00           O
ATOM     11  P    DA B   1      40.000  30.000  30.000  1.00  0.00           P
ENDMDL
MODEL        2
ATOM      1  N   GLY A   1      11.104   6.134  -6.504  1.00  0.00           N
ENDMDL
END
"""


_SITE = (
    "group_PDB id type_symbol label_atom_id label_alt_id label_comp_id label_asym_id label_seq_id pdbx_PDB_ins_code "
    "Cartn_x Cartn_y Cartn_z occupancy B_iso_or_equiv auth_seq_id auth_asym_id pdbx_PDB_model_num"
)


def _as_mmcif(pdb: str) -> str:
    """The same atoms, those of one name in one place below each other."""
    rows, model = [], "1"
    for line in pdb.splitlines():
        model = line.split()[1] if line.startswith("MODEL") else model
        if not line.startswith(("ATOM", "HETATM")):
            continue
        columns = ((0, 6), (6, 11), (76, 78), (12, 16), (16, 17), (17, 20), (21, 22), (22, 26), (26, 27))
        columns += ((30, 38), (38, 46), (46, 54), (54, 60), (60, 66), (22, 26), (21, 22))
        values = [line[a:b].strip() or ("." if a == 16 else "?") for a, b in columns]
        rows.append(" ".join([*values, model]))
    atoms = [(r[15], r[14], r[8], r[16], r[3]) for r in map(str.split, rows)]
    rows = [row for _, row in sorted(zip(atoms, rows), key=lambda one: atoms.index(one[0]))]
    return "\n".join(["data_x", "loop_", *(f"_atom_site.{name}" for name in _SITE.split()), *rows, "#", ""])


@pytest.mark.parametrize("suffix", [".pdb", ".cif"])
def test_what_experiments_leave_in_files(tmp_path: Path, suffix: str) -> None:
    """Selenomethionine, an insertion code, alternate locations, also of residues, missing atoms, water, several models.

    The mmCIF has atom by atom what is in one place, as real ones do.
    """
    (tmp_path / f"x{suffix}").write_text(PDB if suffix == ".pdb" else _as_mmcif(PDB))
    (chain,) = read_structure(tmp_path / f"x{suffix}")
    assert chain.sequence == "MAKS"
    assert chain.numbers == ("10", "10A", "12", "13")
    assert chain.positions[0, residues.ATOM37.index("SD")].tolist() == [13.0, 7.5, -4.5]
    assert chain.positions[1, residues.CA].tolist() == pytest.approx([16, 8.2, -1], abs=1e-4)
    assert chain.b_factors[1] == 30
    assert chain.positions[3, residues.CA].tolist() == [20, 8.5, 1]
    assert chain.mask.sum(-1).tolist() == [4, 2, 2, 3]


def test_numbers_of_residues_behind_9999(tmp_path: Path) -> None:
    """Hybrid-36, as gemmi reads it (but for small letters, which it takes for capitals), with insertion codes, also of
    water; what is no number is said with its line."""
    import gemmi

    given = {"  10 ": "9999 ", "  10A": "A000 ", "  12 ": "A000B", "  13 ": "ZZZZ ", " 201 ": "zzzz "}
    text = PDB[: PDB.index("MODEL        2")] + "END\n"
    for number, other in given.items():
        text = text.replace(f" A{number}", f" A{other}")
    (tmp_path / "x.pdb").write_text(text)
    (chain,) = read_structure(tmp_path / "x.pdb")
    read = [str(residue.seqid) for residue in gemmi.read_pdb_string(text)[0]["A"]]
    assert chain.numbers == ("9999", "10000", "10000B", "1223055")
    assert list(chain.numbers) == list(dict.fromkeys(read))  # that of water it takes for ZZZZ
    assert chain.sequence == "MAKS"
    (tmp_path / "x.pdb").write_text(text.replace("ZZZZ", "a000"))
    assert read_structure(tmp_path / "x.pdb")[0].numbers[3] == "1223056"
    assert len(read_entries(tmp_path / "x.pdb")[0].sequence) == 4
    for wrong in ("****", "0xff", "12 4", "A00 ", "    ", "a00A"):
        (tmp_path / "x.pdb").write_text(PDB.replace(" A  12 ", f" A{wrong} "))
        with pytest.raises(
            UserError, match=rf"its line 9: '{re.escape(wrong)}' is no number of a residue, which"
        ) as said:
            read_structure(tmp_path / "x.pdb")
        assert "\n" not in str(said.value)


def test_what_is_damaged_is_said(tmp_path: Path) -> None:
    """Whichever way it is read: as a structure, or as an entry with its sequence."""
    whole = (STRUCTURES / "1a8o.cif").read_text()
    assert "19.594 32.367" in whole
    (tmp_path / "a.cif").write_text(whole.replace(" 1.00 ", " ? ").replace(" 0.50 ", " ? "))
    assert len(read_structure(tmp_path / "a.cif")[0]) == 70, "occupancies may be missing"
    for changed, said in (
        (whole[: whole.index("19.594 32.367") + 3000], r"its last atom, number \d+, is cut off"),
        (whole.replace("19.594 32.367", "nan 32.367"), "chain A has coordinates that are not finite"),
        (whole.replace("19.594 32.367", "? 32.367"), "'\\?'"),
        (whole[: whole.index("loop_\n_atom_site.")], "lacks _atom_site.label_atom_id"),
        (whole.replace("_atom_site.label_atom_id", "_atom_site.other"), "lacks _atom_site.label_atom_id"),
    ):
        (tmp_path / "a.cif").write_text(changed)
        for read in (read_structure, read_entries):
            with pytest.raises(UserError, match=said) as refusal:
                read(tmp_path / "a.cif")
            assert "\n" not in str(refusal.value)
    for changed, said in (
        (whole.replace("_atom_site.label_entity_id", "_atom_site.other"), "it lacks _atom_site.label_entity_id"),
        (whole.replace("_entity_poly_seq.num", "_entity_poly_seq.other"), "it lacks _entity_poly_seq.num"),
        (whole.replace("\n1 2  ASP n", "\n1 x  ASP n"), "'x'"),
    ):
        assert changed != whole
        (tmp_path / "a.cif").write_text(changed)
        with pytest.raises(UserError, match=said):
            read_entries(tmp_path / "a.cif")
    (tmp_path / "b.pdb").write_text(PDB.replace("11.104", "   nan"))
    with pytest.raises(UserError, match="chain A has coordinates that are not finite"):
        read_structure(tmp_path / "b.pdb")


def _same(path: Path, whole: list[Chain]) -> bool:
    """Whether the file is read as the whole one is; False where it is refused."""
    try:
        found = read_structure(path)
    except UserError as error:
        if not re.search(r"cut off|no protein chain|cannot be read", str(error)):
            raise
        return False
    assert [chain.sequence for chain in found] == [chain.sequence for chain in whole]
    assert all(np.array_equal(a.positions, b.positions) for a, b in zip(found, whole))
    return True


@pytest.mark.parametrize(("name", "most"), [("1ubi.pdb", 2), ("1ejg.pdb", 3), ("1a8o.cif", 24)])
def test_a_file_that_was_cut_off_is_refused(tmp_path: Path, name: str, most: int) -> None:
    """Cut at 60 places within lines and at 60 ends of lines: refused, or all of the structure was there already."""
    content, whole = (STRUCTURES / name).read_bytes(), read_structure(STRUCTURES / name)
    ends = [at + 1 for at, byte in enumerate(content) if byte == ord("\n")]
    draw = random.Random(name)
    places = [*draw.sample(range(1, len(content) - 90), 60), *draw.sample(ends[:-2], 60)]
    accepted = 0
    for at in places:
        (tmp_path / name).write_bytes(content[:at])
        accepted += _same(tmp_path / name, whole)
    assert accepted <= most


def test_atoms_alone_are_refused_where_a_line_was_cut(tmp_path: Path) -> None:
    """What `grep ATOM` leaves has no end; an atom's line has."""
    lines = [line for line in (STRUCTURES / "1ubi.pdb").read_text().splitlines() if line.startswith("ATOM")][:40]
    text = "\n".join(line.rstrip() for line in lines)
    for whole in (text, f"{text}\n", "\n".join(line[:66] for line in lines)):
        (tmp_path / "a.pdb").write_text(whole)
        assert len(read_structure(tmp_path / "a.pdb")[0]) == 5
    for length in range(1, 78):
        (tmp_path / "a.pdb").write_text("\n".join([*lines[:-1], lines[-1][:length]]))
        with pytest.raises(UserError, match="cut off"):
            read_structure(tmp_path / "a.pdb")


def test_an_mmcif_without_marks_between_its_categories(tmp_path: Path) -> None:
    """Some programs write none: then the chains that are announced have to be there."""
    announced = "data_x\nloop_\n_struct_asym.id\nA\n{}"
    atoms = "\n".join(line for line in _as_mmcif(PDB).splitlines()[1:] if line != "#") + "\n"
    (tmp_path / "a.cif").write_text(announced.format("B\n") + atoms)
    assert read_structure(tmp_path / "a.cif")[0].sequence == "MAKS"
    (tmp_path / "a.cif").write_text(announced.format("B\nC\n") + atoms)
    with pytest.raises(UserError, match="announces chain C"):
        read_structure(tmp_path / "a.cif")


@pytest.mark.parametrize("name", ["1ubi.pdb", "1a8o.cif"])
def test_packed_structures_are_read(tmp_path: Path, name: str) -> None:
    """As the PDB gives them."""
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress((STRUCTURES / name).read_bytes()))
    assert _same(tmp_path / f"{name}.gz", read_structure(STRUCTURES / name))
    (entry,), (expected,) = read_entries(tmp_path / f"{name}.gz"), read_entries(STRUCTURES / name)
    assert (entry.name, entry.sequence, entry.resolution) == (expected.name, expected.sequence, expected.resolution)
    assert structure_files(tmp_path) == [tmp_path / f"{name}.gz"]
    if name.endswith(".cif"):
        assert structure_of("1a8o", tmp_path) == tmp_path / f"{name}.gz"


def test_what_is_no_structure_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.cif").write_text("nonsense")
    water = next(line for line in PDB.splitlines() if "HOH" in line)
    (tmp_path / "water.pdb").write_text(f"{water}\nEND\n")
    (tmp_path / "empty.pdb").write_text("")
    for name in ("x.cif", "water.pdb", "empty.pdb", "none.pdb"):
        with pytest.raises(UserError, match=name):
            read_structure(tmp_path / name)


def test_alignment_of_sequences() -> None:
    assert align("MKTAYIAKQR", "MKTAYIAKQR").tolist() == [[i, i] for i in range(10)]
    pairs = align("MKTAYIAKQRQISFVK", "TAYIAQRQISF")  # ends are free, one residue is missing
    assert pairs[0].tolist() == [2, 0]
    assert pairs[-1].tolist() == [13, 10]
    assert len(pairs) == 11


def test_a_structure_as_its_own_template(tmp_path: Path) -> None:
    folded = _folded()
    write_mmcif(tmp_path / "a.cif", folded, "a", "title")
    sequence = "GG" + SEQUENCE.replace("X", "") + "A"
    t = features_of_templates(read_templates([tmp_path / "a.cif"], sequence))
    assert t is not None
    assert t.aatype_BTN[0, 0, [0, 1, -1]].tolist() == [21, 21, 21]
    letters = "".join((residues.RESTYPES + "X-")[i] for i in t.aatype_BTN[0, 0])
    assert letters == f"--{SEQUENCE.replace('X', '')}-"
    assert t.backbone_mask_BTN[0, 0].tolist() == [0, 0, *[1] * 24, 0]
    beta = folded.positions[1, residues.CB]
    assert np.abs(t.pseudo_beta_BTN3[0, 0, 3].numpy() - beta).max() < 1e-3
    assert t.torsion_mask_BTNA[0, 0, :2].sum() == 0
    assert t.torsion_mask_BTNA[0, 0, 2, 2] == 1
    with pytest.raises(UserError, match="no template"):
        read_templates([tmp_path / "a.cif"], "WWW")
    assert features_of_templates(read_templates([], sequence)) is None


def test_interfaces_by_their_definitions() -> None:
    """Two chains and a far one, residue by residue."""
    one = replace(_folded(), lengths=(4, len(SEQUENCE) - 7, 3), iptm=0.4, chain_pairs=np.eye(3))
    assert one.pae is not None
    pae, rows = one.pae.astype(np.float64), one.chain_rows()
    slots = [residues.CA if letter == "G" else residues.CB for letter in one.sequence]
    beta = np.stack([one.positions[i, slot] for i, slot in enumerate(slots)])
    quality, certain = pdockq2(one), ipsae(one)
    near_ones = 0
    for a, b in ((0, 1), (1, 0), (0, 2), (1, 2), (2, 1)):
        first, second = range(*rows[a].indices(99)), range(*rows[b].indices(99))
        near = [(i, j) for i in first for j in second if np.linalg.norm(beta[i] - beta[j]) <= 8]
        near_ones += len(near)
        expected = 0.0
        if near:
            inside = {("a", i) for i, _ in near} | {("b", j) for _, j in near}
            x = np.mean([1 / (1 + (pae[i, j] / 10) ** 2) for i, j in near]) * np.mean([one.plddt[i] for _, i in inside])
            expected = 1.31 / (1 + np.exp(-0.075 * (x - 84.733))) + 0.005
        assert quality[a, b] == pytest.approx(expected, rel=1e-6)
        scores = [0.0]
        for i in first:
            sure = [pae[i, j] for j in second if pae[i, j] < 10]
            d0 = max(1.0, 1.24 * (max(len(sure), 26) - 15) ** (1 / 3) - 1.8)
            scores += [float(np.mean([1 / (1 + (error / d0) ** 2) for error in sure]))] if sure else []
        assert certain[a, b] == pytest.approx(max(scores), rel=1e-9)
    assert near_ones > 0
    assert one.confidence == pytest.approx(80 * 0.4 + 20 * 0.5)


def test_chains_of_any_number_are_written_and_read_again(tmp_path: Path) -> None:
    one = replace(_folded("MGA" * 70), lengths=(3,) * 70)
    write_mmcif(tmp_path / "a.cif", one, "a", "70 chains")
    chains = read_structure(tmp_path / "a.cif")
    assert [chain.name for chain in chains] == [chain_id(number) for number in range(1, 71)]
    assert {chain.sequence for chain in chains} == {"MGA"}
    assert {chain.numbers for chain in chains} == {("1", "2", "3")}
    assert not fits_pdb(one)
