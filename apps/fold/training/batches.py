"""The batches of a step: crops of chains, with features that are drawn anew for every recycling iteration.

1. row g = step * global_batch + row of the run is a chain of epoch g // chains, in the epoch's order; of clusters an
   epoch has one chain each, a random one (1.2.5 of the supplement, without its weight of lengths). With predictions
   beside experiments the row's place says which it is, and each go through epochs of their own (distillation.py)
2. blocks of neighbouring rows are deleted from its alignment (supplement, 1.2.6, algorithm 1)
3. centres, masking, clusters and extra rows as in a prediction (`features.msa`), one draw an iteration
4. a random number of random templates, the same in every iteration (1.2.3; `features.templates`)
5. a random stretch of at most `crop` residues (1.2.8)
6. the rows of a rank are padded to the longest; padding is masked

How many iterations a step has is drawn from the step alone, so all ranks recycle equally often. The draws of a row
depend on the seed, the step and the row's number in the global batch, not on the mesh; a batch is a function of its
step, so resuming needs no state.

A batch is a dict of tensors with rows in front. Coordinates are whole thousandths of an Angstrom, the precision of the
files: what is an integer keeps its value when a run computes in 16 bits.

Of a complex (Evans et al. 2021) the crop comes first, of an interface or of each chain's stretches (crops.py); its rows
are drawn from what is left, and none are deleted. Positions are those of all copies of a chain, of which the loss takes
those that suit the prediction.

A model with templates is given all that it takes, masked where there are fewer: its stack runs once for each, and ranks
whose parameters are sharded have to run it equally often.

Shapes: B rows, R iterations, S rows of the MSA, E extra rows, T templates, N residues.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from apps.fold.features.alignment import Alignment
from apps.fold.features.arrays import template_features
from apps.fold.features.msa import Draw, draw, features_of, true_letters
from apps.fold.features.sampling import draw_rows, features_of_complex
from apps.fold.features.sequences import residue_types
from apps.fold.features.templates import Template, drawn
from apps.fold.loss.truth import Truth, truth_of_atoms
from apps.fold.model import residues
from apps.fold.model.config import ModelConfig, MultimerConfig
from apps.fold.model.features import ChainIds, Features, TemplateFeatures
from apps.fold.training.complexes import ComplexExample, labels_of, matched_positions, part_of, with_templates
from apps.fold.training.crops import crop_of_complex
from apps.fold.training.dataset import Clusters, Dataset, Example
from apps.fold.training.distillation import Turns, some_of
from core.config import UserError
from core.data.batches import rows_of_rank, shuffled

_DELETED_BLOCKS, _DELETED_SHARE = 5, 0.3
_MILLI = 1000


@dataclass(frozen=True)
class BatchConfig:
    """The options that make rows of chains."""

    global_batch: int = 128
    crop: int = 256
    """residues of a row"""
    decoys: float = 0.0
    """share of rows whose sequence is shuffled: they teach only the confidence heads, that an unknown sequence is not
    to be trusted"""

    def __post_init__(self) -> None:
        if self.global_batch < 1 or self.crop < 8:
            raise UserError(
                f"data.global_batch={self.global_batch}, data.crop={self.crop}; "
                "give at least 1 row, of at least 8 residues"
            )
        if not 0 <= self.decoys < 1:
            raise UserError(f"data.decoys={self.decoys}; give a share from 0 to below 1")


@dataclass(frozen=True)
class Predictions:
    """Predictions among a run's rows; max_rows: of an alignment, at most."""

    dataset: Dataset
    turns: Turns
    max_rows: int


class FoldBatches:
    """Endless shuffled epochs over the chains of a dataset, and over predictions; see the module's docstring."""

    def __init__(
        self,
        dataset: Dataset,
        config: BatchConfig,
        model: ModelConfig,
        seed: int,
        clusters: Clusters | None = None,
        predictions: Predictions | None = None,
    ):
        self.dataset, self.config, self.model, self.seed = dataset, config, model, seed
        self.clusters, self.predictions = clusters, predictions

    def num_iterations(self, step: int) -> int:
        """Iterations of recycling, 1 to num_recycles + 1, alike for all rows of a step (1.10, "N' uniform")."""
        return int(np.random.default_rng([self.seed % 2**64, step]).integers(self.model.num_recycles + 1)) + 1

    def batch(self, step: int, rank: int, num_ranks: int) -> dict[str, Tensor]:
        rows = rows_of_rank(self.config.global_batch, rank, num_ranks)
        return stacked([self.row(step, row) for row in rows])

    def row(self, step: int, row: int) -> dict[str, Tensor]:
        """One row of a step, without the dim of rows."""
        turn = step * self.config.global_batch + row
        generator = np.random.default_rng([self.seed % 2**64, step, row])
        if self.predictions is not None:
            predicted, turn = self.predictions.turns.place(turn)
            if predicted:
                return self._predicted(self.predictions, turn, self.num_iterations(step), generator)
        number = self._number(turn, len(self.dataset if self.clusters is None else self.clusters))
        if self.clusters is not None:
            number = int(generator.choice(self.clusters[number]))
        example = self.dataset[number]
        if isinstance(example, ComplexExample):
            assert isinstance(self.model, MultimerConfig)
            return drawn_complex(example, self.model, self.num_iterations(step), generator, self.config.crop)
        taught = generator.random() >= self.config.decoys
        if not taught:
            example = shuffled_sequence(example, generator)
        return self._drawn(example, self.num_iterations(step), generator, taught=taught)

    def _number(self, turn: int, size: int) -> int:
        """Which of so many chains has this turn."""
        epoch, place = divmod(turn, size)
        return int(shuffled(np.array([place]), size, self.seed, epoch)[0])

    def _predicted(
        self, predictions: Predictions, turn: int, iterations: int, generator: np.random.Generator
    ) -> dict[str, Tensor]:
        example = predictions.dataset[self._number(turn, len(predictions.dataset))]
        assert isinstance(example, Example)
        alignment = some_of(example.alignment, predictions.max_rows, generator)
        return self._drawn(replace(example, alignment=alignment), iterations, generator, measured=False)

    def _drawn(
        self, example: Example, iterations: int, generator: np.random.Generator, **kind: bool
    ) -> dict[str, Tensor]:
        """A row of a chain, drawn; kind: as in `row_of`."""
        alignment = delete_blocks(example.alignment, generator)
        templates = ()
        if self.model.templates is not None:
            templates = drawn(example.templates, self.model.max_templates, generator)
        draws = [draw(alignment, self.model, generator) for _ in range(iterations)]
        made = row_of(replace(example, alignment=alignment, templates=templates), draws, self.model, **kind)
        start = int(generator.integers(max(1, len(example.entry) - self.config.crop + 1)))
        return cropped(made, start, self.config.crop)


def delete_blocks(alignment: Alignment, generator: np.random.Generator) -> Alignment:
    """The alignment without some blocks of neighbouring rows, related sequences lying together (algorithm 1)."""
    count = len(alignment)
    size = int(_DELETED_SHARE * count)
    starts = generator.integers(count, size=_DELETED_BLOCKS)
    kept = np.ones(count, bool)
    for start in starts:
        kept[start : start + size] = False
    kept[0] = True
    if kept.all():
        return alignment
    names = tuple(name for name, keep in zip(alignment.names, kept) if keep)
    return Alignment(alignment.letters[kept], alignment.deletions[kept], names)


def shuffled_sequence(example: Example, generator: np.random.Generator) -> Example:
    """The chain's coordinates with its residues, and the alignment's columns, in another order; no templates."""
    order = generator.permutation(len(example.entry))
    sequence = "".join(example.entry.sequence[place] for place in order)
    alignment = example.alignment
    shuffled = Alignment(alignment.letters[:, order], alignment.deletions[:, order], alignment.names)
    return Example(replace(example.entry, sequence=sequence), shuffled)


def row_of(
    example: Example, draws: list[Draw], model: ModelConfig, *, taught: bool = True, measured: bool = True
) -> dict[str, Tensor]:
    """A chain, with templates if the model reads any, as tensors of the whole length, an iteration for each draw.

    taught    whether its structure is learned from
    measured  whether that is an experiment's, which alone teaches confidence
    """
    entry, alignment = example.entry, example.alignment
    made = [features_of(entry.sequence, alignment, one, model) for one in draws]
    types = np.minimum(residue_types(entry.sequence), residues.UNKNOWN)
    atom_mask = entry.mask * residues.ATOM37_MASK[types]
    milli = np.rint(entry.positions.astype(np.float64) * _MILLI * atom_mask[..., None]).astype(np.int32)
    templates = {} if model.templates is None else _template_tensors(example.templates, len(entry), model.max_templates)
    return {
        **_feature_tensors(made),
        "residue_index": torch.from_numpy(entry.index.astype(np.int64)),
        "letters": torch.from_numpy(true_letters(alignment, draws[-1]).astype(np.int64)),
        "hidden": torch.from_numpy(draws[-1].hidden),
        "positions_milli": torch.from_numpy(milli),
        "atom_mask": torch.from_numpy(atom_mask > 0),
        "resolution_milli": torch.tensor(round(entry.resolution * _MILLI), dtype=torch.int64),
        "taught": torch.tensor(taught),
        "measured": torch.tensor(measured),
        **templates,
    }


def _feature_tensors(made: list[Features]) -> dict[str, Tensor]:
    last = made[-1]

    def each(name: str) -> Tensor:
        return torch.stack([getattr(features, name)[0] for features in made])

    return {
        "aatype": last.aatype_BN[0],
        "residue_index": last.residue_index_BN[0],
        "mask": last.mask_BN[0],
        "target": last.target_BNF[0],
        "msa": each("msa_BSNF"),
        "msa_mask": each("msa_mask_BSN"),
        "extra_msa": each("extra_msa_BEN"),
        "extra_has_deletion": each("extra_has_deletion_BEN"),
        "extra_deletion": each("extra_deletion_BEN"),
        "extra_mask": each("extra_mask_BEN"),
    }


def drawn_complex(
    example: ComplexExample, model: MultimerConfig, iterations: int, generator: np.random.Generator, crop: int
) -> dict[str, Tensor]:
    """A row of a complex: random templates of each chain, a crop, rows drawn anew for every iteration."""
    chosen = [drawn(range(count), model.max_templates, generator) for count in example.num_templates]
    alpha = example.positions[:, residues.CA], example.mask[:, residues.CA]
    places = crop_of_complex(*alpha, example.complex.asym_id, crop, generator)
    return row_of_complex(example, model, iterations, generator, chosen, places)


def row_of_complex(
    example: ComplexExample,
    model: MultimerConfig,
    iterations: int,
    generator: np.random.Generator,
    templates: Sequence[Sequence[int]],
    places: np.ndarray,
) -> dict[str, Tensor]:
    """The residues `places` of a complex with these templates of its chains, as tensors."""
    one = part_of(with_templates(example, templates, model.max_templates), places)
    draws = [draw_rows(one, model, generator) for _ in range(iterations)]
    last, centres = draws[-1], draws[-1].order[: len(draws[-1].letters)]
    assert last.hidden is not None
    milli = np.rint(one.template_positions.astype(np.float64) * _MILLI * one.template_mask[..., None])
    return {
        **_feature_tensors([features_of_complex(one, drawn, model) for drawn in draws]),
        **labels_of(example, places),
        "letters": torch.from_numpy(one.msa[centres].astype(np.int64)),
        "hidden": torch.from_numpy(last.hidden & (one.bert_mask[centres] > 0)),
        "resolution_milli": torch.tensor(round(example.resolution * _MILLI), dtype=torch.int64),
        "taught": torch.tensor(True),
        "measured": torch.tensor(True),
        "template_aatype": torch.from_numpy(one.template_aatype.astype(np.int64)),
        "template_mask": torch.ones(len(one.template_aatype)),
        "template_positions_milli": torch.from_numpy(milli.astype(np.int32)),
        "template_atom_mask": torch.from_numpy(one.template_mask > 0),
    }


def _template_tensors(templates: tuple[Template, ...], length: int, count: int) -> dict[str, Tensor]:
    """`count` templates, those masked that are not there."""
    shape = (count, length, residues.NUM_ATOM37)
    aatype = np.full(shape[:2], residues.GAP, np.int64)
    positions, mask = np.zeros((*shape, 3)), np.zeros(shape, bool)
    for number, one in enumerate(templates):
        aatype[number], positions[number], mask[number] = one.aatype, one.positions, one.mask > 0
    milli = np.rint(positions * _MILLI * mask[..., None]).astype(np.int32)
    return {
        "template_aatype": torch.from_numpy(aatype),
        "template_mask": (torch.arange(shape[0]) < len(templates)).float(),
        "template_positions_milli": torch.from_numpy(milli),
        "template_atom_mask": torch.from_numpy(mask),
    }


# The dim of a row's tensors (without that of rows) that residues lie along.
_RESIDUE_DIM = {"msa": 2, "msa_mask": 2, "extra_msa": 2, "extra_has_deletion": 2, "extra_deletion": 2, "extra_mask": 2}
_RESIDUE_DIM |= {"letters": 1, "hidden": 1}
_RESIDUE_DIM |= dict.fromkeys(("template_aatype", "template_positions_milli", "template_atom_mask"), 1)
_RESIDUE_DIM |= dict.fromkeys(("aatype", "residue_index", "mask", "target", "positions_milli", "atom_mask"), 0)
_RESIDUE_DIM |= dict.fromkeys(("asym", "entity", "sym", "copies"), 0)
_PADDING = {"aatype": residues.UNKNOWN, "template_aatype": residues.GAP}


def cropped(row: dict[str, Tensor], start: int, length: int) -> dict[str, Tensor]:
    """The residues from `start` on, at most `length`."""
    most = max(0, min(length, len(row["aatype"]) - start))
    return {n: t.narrow(_RESIDUE_DIM[n], start, most) if n in _RESIDUE_DIM else t for n, t in row.items()}


def cropped_shape(name: str, shape: Sequence[int], length: int) -> tuple[int, ...]:
    """The shape of a row's tensor, of any chain, once it is cropped to `length` residues."""
    dim = _RESIDUE_DIM.get(name)
    return tuple(length if place == dim else size for place, size in enumerate(shape))


def stacked(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Rows below each other, each dim padded to its largest; padding is masked."""
    return {name: _stack([row[name] for row in rows], _PADDING.get(name, 0)) for name in rows[0]}


def _stack(tensors: list[Tensor], value: int) -> Tensor:
    shape = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors))]
    whole = tensors[0].new_full((len(tensors), *shape), value)
    for row, tensor in zip(whole, tensors):
        row[tuple(slice(size) for size in tensor.shape)] = tensor
    return whole


def iterations_of(batch: dict[str, Tensor]) -> list[Features]:
    """The features of every recycling iteration."""
    templates = templates_of(batch)
    chains = ChainIds(batch["asym"], batch["entity"], batch["sym"]) if "asym" in batch else None
    return [
        Features(
            aatype_BN=batch["aatype"],
            residue_index_BN=batch["residue_index"],
            mask_BN=batch["mask"],
            target_BNF=batch["target"],
            msa_BSNF=batch["msa"][:, number],
            msa_mask_BSN=batch["msa_mask"][:, number],
            extra_msa_BEN=batch["extra_msa"][:, number],
            extra_has_deletion_BEN=batch["extra_has_deletion"][:, number],
            extra_deletion_BEN=batch["extra_deletion"][:, number],
            extra_mask_BEN=batch["extra_mask"][:, number],
            templates=templates,
            chains=chains,
        )
        for number in range(batch["msa"].shape[1])
    ]


def templates_of(batch: dict[str, Tensor]) -> TemplateFeatures | None:
    """Templates as the network reads them, in the batch's number format; None for a model without templates."""
    if "template_mask" not in batch:
        return None
    dtype = batch["mask"].dtype
    wide = torch.promote_types(dtype, torch.float32)
    atoms = batch["template_positions_milli"].to(wide) / _MILLI, batch["template_atom_mask"].to(wide)
    of_complex = "asym" in batch
    return template_features(batch["template_aatype"], batch["template_mask"], *atoms, backbone=of_complex).to(dtype)


def truth_of(batch: dict[str, Tensor], predicted_BN373: Tensor) -> Truth:
    """The experiment's atoms, in fp32 or in the features' format where that is wider; of a complex those of the copies
    of chains that suit the prediction."""
    wide = torch.promote_types(batch["mask"].dtype, torch.float32)
    milli, mask = batch["positions_milli"], batch["atom_mask"]
    if "asym" in batch:
        milli, mask = matched_positions(batch, predicted_BN373)
    return truth_of_atoms(batch["aatype"], milli.to(wide) / _MILLI, mask.to(wide))


def resolution_of(batch: dict[str, Tensor]) -> Tensor:
    """Angstrom [B]."""
    return batch["resolution_milli"].to(torch.promote_types(batch["mask"].dtype, torch.float32)) / _MILLI
