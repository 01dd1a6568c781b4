"""ESMFold against transformers' own, its folders, and its plans."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from apps.fold.features.alignment import single_sequence
from apps.fold.features.msa import draw, features_of
from apps.fold.model import residues
from apps.fold.model.config import ESMFoldConfig
from apps.fold.model.esmfold import ESMFold, ESMFoldPrediction
from apps.fold.model.features import Features
from apps.fold.model.heads import plddt, predicted_aligned_error, predicted_tm_score
from apps.fold.output.confidence import folded
from apps.fold.subbatch import HEADS, FoldJob, How, apply_subbatches, least_bytes, plan_subbatches
from apps.fold.subbatch.operations import operations_of
from apps.fold.subbatch.planner import weights_bytes
from apps.fold.subbatch.reading import read_pairs
from apps.fold.subbatch.slices import every
from apps.fold.weights.esmfold import Entry, _words, esmfold_table, load_esmfold
from apps.fold.weights.source import build, read_alphafold, read_weights
from core.config import UserError
from core.trace.account import MemoryAccount
from tests.support import esmfold
from tests.support.fold import GOLDEN

SEQUENCE = "MKTAYGXQRQISFVKSH"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return esmfold.save(tmp_path_factory.mktemp("weights") / "esmfold")


def _model(folder: Path, dtype: torch.dtype = torch.float32) -> ESMFold:
    model = build(*read_weights(folder), dtype, "cpu")
    assert isinstance(model, ESMFold)
    return model


def _features(config: ESMFoldConfig, sequence: str = SEQUENCE) -> Features:
    alignment = single_sequence(sequence)
    return features_of(sequence, alignment, draw(alignment, config, np.random.default_rng(0)), config)


def _run(model: ESMFold, dtype: torch.dtype = torch.float32, sequence: str = SEQUENCE) -> ESMFoldPrediction:
    features = _features(model.config, sequence).to("cpu", dtype)
    with torch.inference_mode():
        return model([features] * (model.config.num_recycles + 1))


def _differs(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference, relative to the largest element."""
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max())


def test_every_output_is_that_of_transformers(folder: Path) -> None:
    expected, got = esmfold.theirs().infer(SEQUENCE), _run(_model(folder))
    mask = torch.ones(1, len(SEQUENCE))
    pairs = {
        "s_s": got.msa_BSND[:, 0],
        "s_z": got.pair_BNNZ,
        "positions": got.structure.atom14,
        "angles": got.structure.torsions,
        "states": got.structure.single_BND,
        "plddt": plddt(got.logits.plddt) / 100,
        "distogram_logits": got.logits.distogram,
        "ptm_logits": got.logits.pae,
        "predicted_aligned_error": predicted_aligned_error(got.logits.pae),
        "lm_logits": got.logits.letters,
    }
    theirs = dict(expected) | {"states": expected["states"][-1]}
    for name, ours in pairs.items():
        assert _differs(ours, theirs[name]) <= 1e-5, name
    assert abs(float(predicted_tm_score(got.logits.pae, mask)) - float(theirs["ptm"])) <= 1e-5
    assert (got.atom_mask_BN37 == theirs["atom37_atom_exists"]).all()

    # Recycling and the language model count: without either the result is another one.
    with torch.inference_mode():
        once = _model(folder)([_features(_model(folder).config)])
        other = _run(_model(folder), sequence=SEQUENCE[::-1])
    assert _differs(once.pair_BNNZ, theirs["s_z"]) > 1e-2
    assert _differs(other.pair_BNNZ, theirs["s_z"]) > 1e-2


def test_confidence_is_that_of_the_atom_in_the_middle(folder: Path) -> None:
    model = _model(folder)
    got = _run(model)
    numbers = folded(
        SEQUENCE, got, model.heads, read_pairs(model.heads, got.pair_BNNZ, torch.ones(1, 17), every(17, 4))
    )
    atoms = plddt(got.logits.plddt)[0]
    assert np.allclose(numbers.plddt, atoms[:, residues.CA], atol=1e-4)
    assert numbers.pae is not None
    assert np.allclose(numbers.pae, predicted_aligned_error(got.logits.pae)[0], atol=1e-4)


# --- folders ----------------------------------------------------------------------------------------------------------


def test_the_table_names_every_tensor_of_a_folder_once(folder: Path) -> None:
    config, _ = load_esmfold(folder)
    stored = set(esmfold.theirs().state_dict())
    names = [name for entry in esmfold_table(config) for name in entry.sources]
    assert len(names) == len(set(names))
    known = {"af2_to_esm", "esm.contact_head.regression.weight", "esm.contact_head.regression.bias"}
    assert set(names) | known == stored
    with torch.device("meta"):
        ours = {name: tuple(value.shape) for name, value in ESMFold(config).state_dict().items()}
    assert {entry.name for entry in esmfold_table(config)} == set(ours)
    numbers = sum(value.numel() for value in ESMFold(config).parameters())
    frequencies = config.language.dim // config.language.num_heads // 2
    assert weights_bytes(config, torch.float32) == 4 * (numbers + frequencies)


RELEASED = {
    "vocab_size": 33,
    "mask_token_id": 32,
    "pad_token_id": 1,
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 40,
    "intermediate_size": 10240,
    "layer_norm_eps": 1e-5,
    "position_embedding_type": "rotary",
    "token_dropout": True,
    "emb_layer_norm_before": False,
    "is_folding_model": True,
}
"""config.json of facebook/esmfold_v1; of the folding part transformers' defaults are the released ones"""


def test_every_released_tensor_is_consumed_exactly_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The 4,500 tensors of facebook/esmfold_v1, by transformers' module of the released widths on the meta device."""
    from transformers import EsmConfig, EsmForProteinFolding

    config = EsmConfig(**RELEASED)
    with torch.device("meta"):
        theirs = EsmForProteinFolding(config).state_dict()
    released = {}
    for name, shape in json.loads((GOLDEN.parent / "esmfold_v1.json").read_text()).items():
        stack = re.match(r"(trunk\.blocks|esm\.encoder\.layer)\.0\.", name)
        for number in range(1 if stack is None else {"t": 48, "e": 36}[name[0]]):
            numbered = name if stack is None else f"{stack[1]}.{number}.{name.removeprefix(stack[0])}"
            released[numbered] = tuple(shape)
    assert len(released) == 4500
    assert {name: tuple(value.shape) for name, value in theirs.items()} == released

    taken: Counter[int] = Counter()
    made_of = Entry.made_of

    def noted(entry: Entry, tensors) -> torch.Tensor:
        taken.update(id(tensors[name]) for name in entry.sources)
        return made_of(entry, tensors)

    theirs["af2_to_esm"] = torch.tensor(_words(tuple(config.vocab_list)))
    monkeypatch.setattr(Entry, "made_of", noted)
    monkeypatch.setattr("apps.fold.weights.esmfold.Weights", lambda folder: theirs)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    config, parameters = load_esmfold(tmp_path)
    aside = {"af2_to_esm", "esm.contact_head.regression.weight", "esm.contact_head.regression.bias"}
    assert {name: taken[id(value)] for name, value in theirs.items()} == {
        name: int(name not in aside) for name in theirs
    }
    assert set(taken.values()) == {1}
    with torch.device("meta"):
        ours = ESMFold(config).state_dict()
    assert {name: value.shape for name, value in parameters.items()} == {name: v.shape for name, v in ours.items()}
    assert config.num_recycles == 3
    assert round(sum(value.numel() for value in theirs.values()) / 1e6) == 3525


def _changed(folder: Path, to: Path, tensors=lambda tensors: tensors, config=lambda config: config) -> Path:
    to.mkdir()
    save_file(tensors(load_file(folder / "model.safetensors")), to / "model.safetensors")
    (to / "config.json").write_text(json.dumps(config(json.loads((folder / "config.json").read_text()))))
    return to


def test_folders_of_former_versions_are_read(folder: Path, tmp_path: Path) -> None:
    """Frequencies in every layer, a buffer of positions, no head for contacts, the language model in half precision."""

    def former(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        shared = [name for name in tensors if name.endswith("inv_freq")]
        frequencies = tensors.pop(shared[0])
        for layer in range(2):
            tensors[f"esm.encoder.layer.{layer}.attention.self.rotary_embeddings.inv_freq"] = frequencies.clone()
        tensors["esm.embeddings.position_ids"] = torch.arange(1026)[None]
        kept = {name: value for name, value in tensors.items() if "contact_head" not in name}
        return {n: v.half() if n.startswith("esm.encoder") and "inv_freq" not in n else v for n, v in kept.items()}

    half, ours = _changed(folder, tmp_path / "former", former), _run(_model(folder))
    got = _run(_model(half))
    assert 0 < _differs(got.pair_BNNZ, ours.pair_BNNZ) < 0.02
    assert _model(half, torch.bfloat16).language.model.rotary_embeddings.inv_freq.dtype == torch.float32


@pytest.mark.parametrize(
    ("tensors", "config", "said"),
    [
        (
            lambda t: {n: v for n, v in t.items() if n != "trunk.recycle_disto.weight"},
            None,
            "lacks trunk.recycle_disto",
        ),
        (lambda t: t | {"trunk.more": torch.zeros(2)}, None, "holds trunk.more"),
        (lambda t: t | {"esm_s_combine": torch.zeros(7)}, None, r"esm_s_combine of shape \[7\] and not \[3\]"),
        (lambda t: t | {"af2_to_esm": t["af2_to_esm"].flip(0)}, None, "af2_to_esm"),
        (None, lambda c: c | {"is_folding_model": False}, "holds ESM-2 alone"),
        (None, lambda c: c | {"position_embedding_type": "absolute"}, "position_embedding_type=absolute"),
        (None, lambda c: c | {"vocab_list": ["<cls>", "<pad>", "<eos>", "<mask>", "A"]}, "vocab_list lacks R, N"),
        (None, lambda c: c | {"hidden_size": "wide"}, "no configuration of ESMFold"),
        (None, lambda c: c | {"esmfold_config": {"trunk": {"max_recycles": 0}}}, "max_recycles=0"),
    ],
)
def test_what_is_wrong_with_a_folder_is_said(folder: Path, tmp_path: Path, tensors, config, said: str) -> None:
    wrong = _changed(folder, tmp_path / "wrong", tensors or (lambda t: t), config or (lambda c: c))
    with pytest.raises(UserError, match=said):
        load_esmfold(wrong)


def test_what_works_with_alphafold_alone_refuses_it(folder: Path) -> None:
    with pytest.raises(UserError, match="holds ESMFold"):
        read_alphafold(folder)


# --- plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "product"), [(1, How("copy", 2)), (3, How("cross", 2, 3)), (100, How("whole", 17))])
def test_any_slices_give_the_same(folder: Path, rows: int, product: How) -> None:
    model = _model(folder, torch.float64)
    expected = _run(model, torch.float64)
    names = [name for name, _, _ in operations_of(model)]
    assert {"embed_pairs", "blocks.*.sequence_to_pair", "structure_module.attention"} <= set(names)
    choices = {n: product if n.endswith(("outgoing", "incoming")) else How("rows", rows) for n in names}
    for offload in (False, True):
        apply_subbatches(model, choices, offload=offload)
        got = _run(model, torch.float64)
        assert _differs(got.pair_BNNZ, expected.pair_BNNZ) < 1e-10
        assert _differs(got.positions_BN373, expected.positions_BN373) < 1e-10
    apply_subbatches(model, {})
    assert _differs(_run(model, torch.float64).pair_BNNZ, expected.pair_BNNZ) == 0


def test_no_budget_is_exceeded_and_peaks_are_as_predicted(folder: Path) -> None:
    model = _model(folder)
    for residues_, share in ((9, 1.0), (9, 1.2), (40, 1.0), (40, 1.05), (40, 20)):
        job = FoldJob(model.config, residues_, 1, 1, iterations=2)
        plan = plan_subbatches(job, int(share * least_bytes(job)))
        apply_subbatches(model, {name: how for name, how in plan.choices.items() if name != HEADS})
        features = _features(model.config, "A" * residues_)
        with torch.no_grad(), MemoryAccount() as account:
            account.add(model.parameters())
            features.map(lambda tensor: account.add([tensor]) or tensor)
            found = model.fold([features] * 2)
            slices = every(residues_, plan.choices[HEADS].rows)
            read_pairs(model.heads, found.pair_BNNZ, features.mask_BN, slices)
        measured = account.peak_bytes
        assert measured <= share * least_bytes(job)
        assert abs(plan.peak_bytes - measured) <= 0.05 * measured, (residues_, share, plan.peak_bytes, measured)


def test_released_widths_are_planned_in_seconds(folder: Path) -> None:
    config, _ = load_esmfold(folder)
    language = replace(config.language, dim=2560, num_layers=36, num_heads=40, inner_dim=10240)
    job = FoldJob(replace(config, language=language), 1000, 1, 1, dtype=torch.bfloat16, device="cuda")
    assert least_bytes(job) > weights_bytes(job.config, torch.bfloat16) > 5.6e9
