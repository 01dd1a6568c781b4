"""The categories of ModelCIF (mmcif_ma.dic 1.4.9) that say what a predicted structure is, for the writer of mmCIF.

Residues' names, formulas and weights are those of the PDB's Chemical Component Dictionary.
"""

import re
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from apps.fold.model import residues

Categories = dict[str, Any]

_DICTIONARY = "https://raw.githubusercontent.com/ihmwg/ModelCIF/fece26d/dist/mmcif_ma.dic"
_COMPONENTS = """
ALA alanine C3 H7 N O2; ARG arginine C6 H15 N4 O2; ASN asparagine C4 H8 N2 O3; ASP aspartic_acid C4 H7 N O4;
CYS cysteine C3 H7 N O2 S; GLN glutamine C5 H10 N2 O3; GLU glutamic_acid C5 H9 N O4; GLY glycine C2 H5 N O2;
HIS histidine C6 H10 N3 O2; ILE isoleucine C6 H13 N O2; LEU leucine C6 H13 N O2; LYS lysine C6 H15 N2 O2;
MET methionine C5 H11 N O2 S; PHE phenylalanine C9 H11 N O2; PRO proline C5 H9 N O2; SER serine C3 H7 N O3;
THR threonine C4 H9 N O3; TRP tryptophan C11 H12 N2 O2; TYR tyrosine C9 H11 N O3; VAL valine C5 H11 N O2;
UNK unknown C4 H9 N O2
"""
_CHARGED = ("ARG", "HIS", "LYS")  # whose formulas there carry a proton more
_WEIGHTS = {"C": 12.011, "H": 1.008, "N": 14.007, "O": 15.999, "S": 32.06}
_WATER = 18.015
_TARGET, _MODEL = "1", "2"  # ids of data: the sequences, the coordinates


def _components() -> dict[str, tuple[str, str]]:
    """Three letters -> name, formula."""
    rows = (entry.split(maxsplit=2) for entry in _COMPONENTS.replace("\n", " ").split(";"))
    return {three: (name.replace("_", " ").upper(), formula.strip()) for three, name, formula in rows}


COMPONENTS = _components()


def weight(formula: str) -> float:
    """In dalton."""
    return sum(_WEIGHTS[atom] * int(count or 1) for atom, count in re.findall(r"([A-Z])(\d*)", formula))


def three_letters(sequence: str) -> list[str]:
    return [residues.THREE_LETTERS.get(letter, "UNK") for letter in sequence]


def about_software() -> Categories:
    """What wrote the file, and which dictionary it goes by."""
    return {
        "_audit_conform.dict_name": "mmcif_ma.dic",
        "_audit_conform.dict_version": "1.4.9",
        "_audit_conform.dict_location": _DICTIONARY,
        "_software.pdbx_ordinal": ["1"],
        "_software.name": ["Megalith"],
        "_software.classification": ["model building"],
        "_software.description": ["structure prediction"],
        "_software.version": [version("megalith")],
        "_software.type": ["package"],
        "_ma_software_group.ordinal_id": ["1"],
        "_ma_software_group.group_id": ["1"],
        "_ma_software_group.software_id": ["1"],
    }


def about_sequences(entities: Sequence[str], name: str, chains: Sequence[tuple[str, str]]) -> Categories:
    """Sequences, and the chains that have them.

    entities  their sequences
    chains    of each its id and its entity, from "1"
    """
    numbers = [str(number) for number in range(1, len(entities) + 1)]
    counts = [sum(entity == number for _, entity in chains) for number in numbers]
    names = [name] if len(entities) == 1 else [f"{name}, sequence {number}" for number in numbers]
    rows = [
        (number, str(at), three)
        for number, sequence in zip(numbers, entities)
        for at, three in enumerate(three_letters(sequence), 1)
    ]
    kinds = sorted({three for _, _, three in rows})
    known = ["".join(letter if letter in residues.RESTYPES else "X" for letter in one) for one in entities]
    unknown = ["".join(letter if letter in residues.RESTYPES else "(UNK)" for letter in one) for one in entities]
    return {
        "_chem_comp.id": kinds,
        "_chem_comp.type": ["PEPTIDE LINKING" if kind == "GLY" else "L-PEPTIDE LINKING" for kind in kinds],
        "_chem_comp.name": [COMPONENTS[kind][0] for kind in kinds],
        "_chem_comp.formula": [COMPONENTS[kind][1] + (" 1" if kind in _CHARGED else "") for kind in kinds],
        "_chem_comp.formula_weight": [f"{weight(COMPONENTS[kind][1]):.3f}" for kind in kinds],
        "_chem_comp.ma_provenance": ["CCD Core"] * len(kinds),
        "_entity.id": numbers,
        "_entity.type": ["polymer"] * len(numbers),
        "_entity.src_method": ["man"] * len(numbers),
        "_entity.pdbx_description": names,
        "_entity.formula_weight": [f"{_weight(sequence):.3f}" for sequence in entities],
        "_entity.pdbx_number_of_molecules": [str(count) for count in counts],
        "_entity_poly.entity_id": numbers,
        "_entity_poly.type": ["polypeptide(L)"] * len(numbers),
        "_entity_poly.nstd_linkage": ["no"] * len(numbers),
        "_entity_poly.nstd_monomer": ["no" if one.isalpha() else "yes" for one in unknown],
        "_entity_poly.pdbx_strand_id": [",".join(one for one, at in chains if at == number) for number in numbers],
        "_entity_poly.pdbx_seq_one_letter_code": unknown,
        "_entity_poly.pdbx_seq_one_letter_code_can": known,
        "_entity_poly_seq.entity_id": [row[0] for row in rows],
        "_entity_poly_seq.num": [row[1] for row in rows],
        "_entity_poly_seq.mon_id": [row[2] for row in rows],
        "_entity_poly_seq.hetero": ["n"] * len(rows),
        "_struct_asym.id": [chain for chain, _ in chains],
        "_struct_asym.entity_id": [entity for _, entity in chains],
        "_ma_target_entity.entity_id": numbers,
        "_ma_target_entity.data_id": [_TARGET] * len(numbers),
        "_ma_target_entity.origin": ["designed"] * len(numbers),
        "_ma_target_entity_instance.asym_id": [chain for chain, _ in chains],
        "_ma_target_entity_instance.entity_id": [entity for _, entity in chains],
        "_ma_target_entity_instance.details": ["."] * len(chains),
    }


def _weight(sequence: str) -> float:
    parts = [weight(COMPONENTS[three][1]) for three in three_letters(sequence)]
    return sum(parts) - _WATER * (len(parts) - 1)


def about_residues(chains: list[str], entities: list[str], three: list[str], numbers: list[str], authors) -> Categories:
    """Of each residue how ours and the authors' numbers go together.  authors: as `Numbering` has them."""
    author_chains, author_numbers, codes = (list(column) for column in zip(*authors))
    return {
        "_pdbx_poly_seq_scheme.asym_id": chains,
        "_pdbx_poly_seq_scheme.entity_id": entities,
        "_pdbx_poly_seq_scheme.seq_id": numbers,
        "_pdbx_poly_seq_scheme.mon_id": three,
        "_pdbx_poly_seq_scheme.ndb_seq_num": numbers,
        "_pdbx_poly_seq_scheme.pdb_seq_num": author_numbers,
        "_pdbx_poly_seq_scheme.auth_seq_num": author_numbers,
        "_pdbx_poly_seq_scheme.pdb_mon_id": three,
        "_pdbx_poly_seq_scheme.auth_mon_id": three,
        "_pdbx_poly_seq_scheme.pdb_strand_id": author_chains,
        "_pdbx_poly_seq_scheme.pdb_ins_code": [code if code != "?" else "." for code in codes],
        "_pdbx_poly_seq_scheme.hetero": ["n"] * len(chains),
    }


def about_model(title: str) -> Categories:
    """The model, how it was made, and the scale of its confidence: metric 1 of the whole, 2 of residues."""
    return {
        "_ma_data.id": [_TARGET, _MODEL],
        "_ma_data.name": ["sequences", "coordinates"],
        "_ma_data.content_type": ["target", "model coordinates"],
        "_ma_data_group.ordinal_id": ["1", "2"],
        "_ma_data_group.group_id": ["1", "2"],
        "_ma_data_group.data_id": [_TARGET, _MODEL],
        "_ma_protocol_step.ordinal_id": ["1"],
        "_ma_protocol_step.protocol_id": ["1"],
        "_ma_protocol_step.step_id": ["1"],
        "_ma_protocol_step.method_type": ["modeling"],
        "_ma_protocol_step.details": [title],
        "_ma_protocol_step.software_group_id": ["1"],
        "_ma_protocol_step.input_data_group_id": ["1"],
        "_ma_protocol_step.output_data_group_id": ["2"],
        "_ma_model_list.ordinal_id": ["1"],
        "_ma_model_list.model_name": [title],
        "_ma_model_list.data_id": [_MODEL],
        "_ma_model_list.model_type": ["Ab initio model"],
        "_ma_model_group.id": ["1"],
        "_ma_model_group.name": ["predictions"],
        "_ma_model_group_link.group_id": ["1"],
        "_ma_model_group_link.model_id": ["1"],
        "_ma_qa_metric.id": ["1", "2"],
        "_ma_qa_metric.name": ["pLDDT", "pLDDT"],
        "_ma_qa_metric.description": ["mean predicted lDDT of CA", "predicted lDDT of CA"],
        "_ma_qa_metric.type": ["pLDDT", "pLDDT"],
        "_ma_qa_metric.mode": ["global", "local"],
        "_ma_qa_metric.software_group_id": ["1", "1"],
    }
