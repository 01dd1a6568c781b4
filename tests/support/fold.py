"""Small models and golden runs for the tests of fold."""

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from apps.fold.axial import axial_plan, shard_evoformer
from apps.fold.features.alignment import Alignment, single_sequence
from apps.fold.features.arrays import template_features
from apps.fold.features.complexes import ChainInput
from apps.fold.features.entries import Entry
from apps.fold.features.templates import Template
from apps.fold.model import residues
from apps.fold.model.alphafold import AlphaFold
from apps.fold.model.config import (
    EvoformerConfig,
    ModelConfig,
    MultimerConfig,
    PairConfig,
    StructureConfig,
    tiny,
    tiny_multimer,
)
from apps.fold.model.features import Features
from apps.fold.model.network import network
from apps.fold.training.complexes import ComplexExample, example_of
from apps.fold.training.dataset import Example
from core.comm.volume import count_volume
from core.mesh import MeshConfig, build_mesh
from core.parallel.plan import block_lists
from core.parallel.recompute import RecomputeConfig, apply_recompute
from core.placement.messages import Widths, microbatch_bytes
from core.trace.segments import Lean, Segments

GOLDEN = Path(__file__).parents[1] / "data" / "fold" / "mini_model_1_ptm"
MULTIMER_GOLDEN = GOLDEN.parent / "mini_multimer_v3"

M = TypeVar("M", bound=ModelConfig)


def random_parameters(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Values for every parameter, none of them 0: what begins as 0 in training would hide what follows it."""
    with torch.device("meta"):
        model = network(config)
    generator = torch.Generator().manual_seed(seed)
    return {name: _value(name, p, generator) for name, p in model.named_parameters()}


def _value(name: str, parameter: nn.Parameter, generator: torch.Generator) -> Tensor:
    noise = torch.randn(parameter.shape, generator=generator)
    if parameter.ndim == 2:
        return noise / parameter.shape[1] ** 0.5
    return 0.1 * noise + (1.0 if "norm" in name and name.endswith("weight") else 0.0)


def randomise(module: nn.Module, seed: int = 0) -> nn.Module:
    """The module with random values in every parameter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(_value(name, parameter, generator))
    return module


def random_features(residues: int, *, rows: int, extra: int, templates: int, seed: int = 0, pad: int = 0) -> Features:
    """Features of a random sequence; `pad` more residues, rows and templates than said are there and masked."""
    generator = torch.Generator().manual_seed(seed)

    def real(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    N, S, E, T = residues, rows, extra, templates
    aatype_BN = torch.randint(0, 20, (1, N), generator=generator)
    target_BNF, msa_BSNF = real(1, N, 22), real(1, S, N, 49)
    extra_BEN = torch.randint(0, 22, (1, E, N), generator=generator)
    deletions = real(1, E, N)
    at = (torch.randint(0, 22, (1, T, N), generator=generator), torch.ones(1, T), 9 * real(1, T, N, 37, 3))
    atom_mask = (real(1, T, N, 37) < 0.9).float()

    def padded(tensor: Tensor, *dims: int, value: float = 0) -> Tensor:
        for dim in dims if pad else ():
            shape = list(tensor.shape)
            shape[dim] = pad
            tensor = torch.cat([tensor, torch.full(shape, value).to(tensor.dtype)], dim)
        return tensor

    return Features(
        padded(aatype_BN, 1, value=3),
        torch.arange(N + pad)[None],
        padded(torch.ones(1, N), 1),
        padded(target_BNF, 1, value=0.5),
        padded(msa_BSNF, 1, 2, value=0.7),
        padded(torch.ones(1, S, N), 1, 2),
        padded(extra_BEN, 1, 2, value=4),
        padded((deletions > 0.5).float(), 1, 2),
        padded(deletions, 1, 2, value=0.2),
        padded(torch.ones(1, E, N), 1, 2),
        template_features(
            padded(at[0], 1, 2), padded(at[1], 1), padded(at[2], 1, 2, value=1.5), padded(atom_mask, 1, 2)
        ),
    )


def small_model() -> ModelConfig:
    """The tiny model as training takes it: no templates, no dropout, one draw of recycling more than none."""
    return replace(_dropping(tiny(templates=False), 0.0, 0.0, 0.0), max_msa=5, max_extra_msa=4)


def one_block(templates: bool = False) -> ModelConfig:
    """The tiny model with one block of each stack and one layer of structure."""
    whole = tiny(templates)
    structure = replace(whole.structure, num_layers=1)
    return replace(whole, evoformer=replace(whole.evoformer, num_blocks=1), structure=structure)


def of_blocks(config: M, evoformer: int, extra: int, templates: int) -> M:
    """The same with stacks of so many blocks."""
    assert config.templates is not None
    return replace(
        config,
        evoformer=replace(config.evoformer, num_blocks=evoformer),
        extra=replace(config.extra, num_blocks=extra),
        templates=replace(config.templates, num_blocks=templates),
    )


def dropping(model: ModelConfig) -> ModelConfig:
    """The model with the paper's dropout."""
    return _dropping(model, PairConfig().dropout, EvoformerConfig().msa_dropout, StructureConfig().dropout)


def _dropping(model: ModelConfig, pair: float, msa: float, structure: float) -> ModelConfig:
    def stack(config: EvoformerConfig) -> EvoformerConfig:
        return replace(config, msa_dropout=msa, pair=replace(config.pair, dropout=pair))

    templates = model.templates
    return replace(
        model,
        evoformer=stack(model.evoformer),
        extra=stack(model.extra),
        structure=replace(model.structure, dropout=structure),
        templates=None if templates is None else replace(templates, pair=replace(templates.pair, dropout=pair)),
    )


class Chains:
    """Five random chains of 7 to 15 residues, with alignments of 1 to 15 rows; some residues were not seen."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, number: int) -> Example:
        generator = np.random.default_rng(number)
        length = 7 + 2 * number
        letters = generator.integers(0, 20, length)
        sequence = "".join(residues.RESTYPES[letter] for letter in letters)
        mask = residues.ATOM37_MASK[letters] * (generator.random((length, 1)) < 0.9)
        positions = generator.normal(0, 6, (length, residues.NUM_ATOM37, 3)).astype(np.float32)
        index = np.arange(length)
        entry = Entry(f"chain{number}", sequence, index, positions, mask.astype(np.float32), 2.0)
        query = single_sequence(sequence)
        rows = generator.integers(0, 22, (3 * number + 1, length)).astype(np.uint8)
        deletions = generator.integers(0, 3, rows.shape).astype(np.int32)
        rows[0], deletions[0] = query.letters[0], 0
        return Example(entry, Alignment(rows, deletions, ("",) * len(rows)))


class Complexes:
    """Complexes of random chains of 5 to 9 residues: A2, AB, A2B, A3 and one chain alone.

    With alignments, some rows of species, templates, and residues that were not seen.
    """

    kinds = ("AA", "AB", "ABA", "AAA", "B")

    def __len__(self) -> int:
        return len(self.kinds)

    def __getitem__(self, number: int) -> ComplexExample:
        generator = np.random.default_rng(100 + number)
        sequences = {letter: generator.integers(0, 20, 5 + number % 3 + 2 * (letter == "B")) for letter in "AB"}
        inputs = {
            letter: _chain_input(letters, number if letter == "A" else 1, generator)
            for letter, letters in sequences.items()
        }
        entries = [_random_entry(sequences[letter], generator) for letter in self.kinds[number]]
        return example_of(f"complex{number}", entries, [inputs[letter] for letter in self.kinds[number]])


def _random_entry(letters: np.ndarray, generator: np.random.Generator) -> Entry:
    length = len(letters)
    mask = residues.ATOM37_MASK[letters] * (generator.random((length, 1)) < 0.9)
    positions = generator.normal(0, 6, (length, residues.NUM_ATOM37, 3)) + generator.normal(0, 9, 3)
    sequence = "".join(residues.RESTYPES[letter] for letter in letters)
    return Entry("chain", sequence, np.arange(length), positions.astype(np.float32), mask.astype(np.float32), 2.0)


def _chain_input(letters: np.ndarray, templates: int, generator: np.random.Generator) -> ChainInput:
    entry = _random_entry(letters, generator)

    def rows(count: int, name: str) -> Alignment:
        found = generator.integers(0, 22, (count + 1, len(letters))).astype(np.uint8)
        deletions = generator.integers(0, 3, found.shape).astype(np.int32)
        found[0], deletions[0] = single_sequence(entry.sequence).letters[0], 0
        return Alignment(found, deletions, tuple(name.format(row) for row in range(count + 1)))

    uniprot = rows(3, "tr|A0A14{0}SKV9|A0A14{0}SKV9_S{0}")
    return ChainInput(entry.sequence, rows(6, ""), uniprot, random_templates(entry, templates, 7))


def small_multimer() -> MultimerConfig:
    """The tiny model of complexes without dropout, at most 2 templates a chain."""
    model = replace(_dropping(tiny_multimer(), 0.0, 0.0, 0.0), max_msa=6, max_extra_msa=4, max_templates=2)
    assert isinstance(model, MultimerConfig)
    return model


def random_templates(entry: Entry, count: int, seed: int) -> tuple[Template, ...]:
    """Of random residues, gaps among them, and random atoms."""
    generator, N = np.random.default_rng(seed), len(entry)
    found = []
    for number in range(count):
        aatype = generator.integers(0, 22, N)
        mask = (generator.random((N, 37)) < 0.9).astype(np.float32) * (aatype < 20)[:, None]
        positions = generator.normal(0, 6, (N, 37, 3)).astype(np.float32).round(3) * mask[..., None]
        found.append(Template(f"t{number}", aatype, positions, mask))
    return tuple(found)


class TemplateChains(Chains):
    """Random chains with 0, 6, 1, 7 and 2 templates."""

    def __getitem__(self, number: int) -> Example:
        example = super().__getitem__(number)
        return replace(example, templates=random_templates(example.entry, (0, 6, 1, 7, 2)[number], number))


def small_template_model() -> ModelConfig:
    """`small_model`, and it reads templates, at most 3."""
    return replace(_dropping(tiny(), 0.0, 0.0, 0.0), max_msa=6, max_extra_msa=4, max_templates=3)


def hhr_text(query: str, hits: list[tuple[str, str, str, int, int, float]]) -> str:
    """As hhsearch writes it: hits of (name, the query's row, the template's, their first residues, sum_probs)."""
    lines = [
        "Query         query",
        f"Match_columns {len(query)}",
        "",
        " No Hit                             Prob E-value",
    ]
    lines += [f"{n:3d} {hit[0]} some protein   99.9 1.1E-20" for n, hit in enumerate(hits, 1)] + [""]
    for number, (name, above, below, first, start, probs) in enumerate(hits, 1):
        columns = sum(a != "-" and b != "-" for a, b in zip(above, below))
        lines += [f"No {number}", f">{name} SOME PROTEIN; HYDROLASE, 1.7A {{Homo sapiens}}"]
        lines.append(
            f"Probab=99.97  E-value=1.1e-20  Score=120.30  Aligned_cols={columns}  Identities=98%  "
            f"Similarity=1.504  Sum_probs={probs:.1f}  Template_Neff=7.500"
        )
        lines.append("")
        for at in range(0, len(above), 80):
            rows = (("Q query", above, first), ("T " + name, below, start))
            for side, row, begin in rows:
                before = begin + len(row[:at].replace("-", ""))
                part = row[at : at + 80]
                end = before + len(part.replace("-", "")) - 1
                label, consensus = f"{side[:16]:16}", f"{side[0]} Consensus     "
                if side[0] == "T":
                    lines.append(" " * 22 + "|" * len(part))
                    lines.append(f"{consensus:16} {before:4d} {part.lower()} {end:4d} (120)")
                lines.append(f"{label} {before:4d} {part} {end:4d} (120)")
                if side[0] == "Q":
                    lines.append(f"{consensus:16} {before:4d} {part.lower()} {end:4d} (120)")
                else:
                    lines.append(f"T ss_pred              {'C' * len(part)}")
            lines += ["Confidence            " + "9" * 10, "", ""]
    return "\n".join(["", *lines][1:]) + "\n"


BUDGET = RecomputeConfig("budget", budget="1GiB")


def budget_segments(model: AlphaFold, single: bool = False) -> Segments:
    """Such as are chosen of a model, whose extra MSA and Evoformer are one chain; single: each of one block."""
    lists = [len(blocks) for blocks in block_lists(model)]
    ahead = 0 if model.template_embedder is None else lists.pop(0)
    chain, behind = sum(lists[:2]), sum(lists[2:])
    one: Segments = ((1,),)
    own: Segments = (1, *one * (chain - 2), Lean(1, "products"))
    if not single:
        most = chain - 2  # over the end of the extra MSA's stack
        own = ((((1,), 1), *((most - 2,) if most > 2 else ())), Lean(1, "products"), 1) if most > 1 else ((chain,),)
    return (*one * ahead, *own, *one * behind)


def sent_in_training(
    size: int, model: AlphaFold, features: Features, recompute: RecomputeConfig | None = None
) -> tuple[dict, dict]:
    """Bytes that a rank of `size` sends in a forward with gradients and its backward, counted, and by closed forms."""
    segments = budget_segments(model) if recompute is not None and recompute.mode == "budget" else None
    mesh, plan = build_mesh(MeshConfig(tp=size).resolve(size), "cpu"), axial_plan(recompute, segments)
    model = model.float()
    expected = microbatch_bytes(model, plan, mesh, 1, features.aatype_BN.shape[1], Widths(4, 4))
    shard_evoformer(model, mesh["tp"])
    apply_recompute(model, recompute or RecomputeConfig(), segments=segments)
    with count_volume(mesh) as volume:
        found = model([features])
        logits = [x for x in vars(found.logits).values() if x is not None]
        torch.stack([(x**2).sum() for x in (found.positions_BN373, *logits)]).sum().backward()
    return {key: n for key, n in volume.bytes.items() if n}, dict(expected)
