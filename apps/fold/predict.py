"""`fold predict IN.fasta`: structures with confidences, one folder a sequence.

1. read the records; those that cannot be folded get a line each
2. for each record, shortest first: its alignment and templates, every model and seed, the ranking
3. each prediction is written when it is there, into a folder aside, which gets its name when the last one is: a folder
   is complete or not there, and a second run goes on with what is missing
   with --relax the best, or all, are relaxed before that
4. summary.csv, after each record
"""

import contextlib
import csv
import io
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, cast

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from apps.fold.axial import read_shards, shard_evoformer
from apps.fold.compiled import compile_operations
from apps.fold.complexes import ComplexTarget, find_complex, in_input_order
from apps.fold.features.sequences import SUMMARY, Record, Refused, one_complex, read_fasta
from apps.fold.features.templates import Allowed
from apps.fold.features.text import unpacked_name
from apps.fold.model import residues
from apps.fold.model.alphafold import AlphaFold
from apps.fold.model.config import ESMFoldConfig, ModelConfig, MultimerConfig
from apps.fold.model.features import Features
from apps.fold.model.network import Network
from apps.fold.output.confidence import Folded, folded
from apps.fold.output.files import fits_pdb, write_confidence, write_mmcif, write_pdb
from apps.fold.output.plots import plot, plot_coverage, plot_pairing
from apps.fold.output.report import AlignmentPicture, add_relaxed, write_report
from apps.fold.output.unfinished import Row, Unfinished, lacking, read_object
from apps.fold.precision import PredictionPrecision, chosen_precision
from apps.fold.relax import TIME_LIMIT, check_limit, chosen, relax_file, said
from apps.fold.service.client import Service
from apps.fold.shares import plan_shares
from apps.fold.subbatch import HEADS, FoldJob, apply_subbatches, free_bytes, plan_subbatches
from apps.fold.subbatch.reading import read_pairs
from apps.fold.subbatch.slices import every
from apps.fold.targets import Target, find_target
from apps.fold.toy import DEMO_WEIGHTS, NOTE
from apps.fold.weights.esmfold import is_esmfold
from apps.fold.weights.folder import read_note
from apps.fold.weights.source import build, identify, is_multimer, read_weights
from core.config import UserError, parse, size_in_bytes
from core.files import replace_file
from core.mesh import MeshConfig
from core.precision import MatmulPrecision, Precision, compute_dtype, set_matmul_precision
from core.runtime import (
    agreed,
    device_kind,
    give_back_freed_memory,
    keep_freed_memory,
    launch,
    launched,
    leads,
    require_compiler,
    start,
    world_size,
)
from core.web.key import read_key

Relaxations = Literal["none", "best", "all"]


@dataclass(frozen=True)
class PredictConfig:
    ESSENTIAL: ClassVar[tuple[str, ...]] = (
        *("input", "model", "msa", "templates", "out", "num_recycles", "seed", "num_seeds", "precision", "device"),
        *("memory", "nproc", "relax", "overwrite", "msa_server"),
    )

    input: Path | None = None
    """a FASTA file, of complexes with chains joined by `:`; `megalith fold predict IN.fasta` means the same"""
    model: tuple[Path, ...] = ()
    """one or more of: params_model_*.npz of AlphaFold (of complexes *_multimer*.npz), .pt of OpenFold, folders of
    `megalith fold convert`, of ESMFold as transformers has them; none: demo-tiny, a toy that the package carries"""
    out: Path = Path("folded")
    """one folder a sequence, and summary.csv"""
    msa: Path | None = None
    """an A3M or Stockholm file, or a folder of NAME.a3m, NAME.sto or NAME/*; none: the sequence alone"""
    msa_server: str | None = None
    """address of a server of ColabFold's protocol, such as megalith fold msa-server, that alignments are asked of:
    sequences are sent there"""
    msa_server_key_file: Path | None = None
    """file whose first line is the key that the server asks for"""
    msa_server_wait_s: float = 7200.0
    """longest time for the alignment of a record, that in the server's queue included"""
    msa_server_folder: Path = Path("runs/searches")
    """where alignments are kept that a server has sent; what is there is not asked for again"""
    templates: Path | None = None
    """an mmCIF or PDB file, or a folder of NAME.cif or NAME/*; where --msa holds NAME.hhr (megalith fold msa
    --hhsearch-databases), a folder of mmCIF files by the entries' names, for its hits"""
    max_template_date: str = ""
    """of hits those that were published until then, as 2018-04-30; by default all"""
    num_recycles: int | None = None
    """recycling iterations; by default the model's, 3"""
    seed: int = 0
    num_seeds: int = 1
    """predictions of each model, with the seeds from --seed on"""
    precision: PredictionPrecision = "auto"
    """auto: bf16 on a GPU, for models of AlphaFold's kind (see docs/fold.md), else fp32"""
    matmul_precision: MatmulPrecision = "highest"
    """of products in fp32: highest (exact), high (on a GPU by TF32, with 11 bits) or medium (as bf16)"""
    device: str = "auto"
    """cpu or cuda; auto: CUDA where there is one"""
    memory: str | None = None
    """what a prediction may take on each rank's device, such as 24GiB (24 alone is GiB); by default what that has free
    (on a CPU, which the ranks of a machine share, a rank's part of it)"""
    compile: bool = False
    """compute by graphs of torch.compile, which take minutes to make, once for all sequences; on a CPU with g++"""
    pdb: bool = True
    """write PDB files, too"""
    plots: bool = True
    """draw pictures, and write rank_N.html, a report with the structure to turn, which opens without a network"""
    distogram: bool = False
    """write the probabilities of distances, too: rank_N_distogram.npz, of 128 bytes for each pair of residues"""
    relax: Relaxations = "none"
    """predictions that are also written without clashes, rank_N_relaxed.cif (see `megalith fold relax`): none, the best
    of each record, or all"""
    relax_time_limit: float = TIME_LIMIT
    """seconds that a relaxation may take; what was reached by then is written"""
    proteins: bool = False
    """take every record as a protein, also one of the letters A C G T U N alone, which is refused as DNA or RNA"""
    overwrite: bool = False
    """fold records anew whose folders stem from other options or files"""
    nproc: int = 1
    """ranks on this machine that share each prediction (axial parallelism); under torchrun leave it out"""

    def __post_init__(self) -> None:
        Allowed(self.max_template_date)
        check_limit(self.relax_time_limit, "relax_time_limit")
        if self.msa_server is not None and self.msa is not None:
            raise UserError("--msa and --msa-server, of which either gives alignments; leave out one of the two")
        if self.msa_server_wait_s <= 0:
            raise UserError(f"msa_server_wait_s={self.msa_server_wait_s}; give a time in seconds")
        if self.memory is not None:
            size_in_bytes(self.memory, "memory", "GiB")
        for name in ("num_seeds", "nproc"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}; give 1 or more")

    @property
    def computing(self) -> Precision:
        """The precision, once it is chosen (`resolved`)."""
        assert self.precision != "auto"
        return self.precision

    def unread(self) -> dict[str, str]:
        """See `core.config.Unread`."""
        found = {} if self.templates else {"max_template_date": "without templates; give --templates FOLDER, too"}
        if self.msa_server is None:
            of_server = ("msa_server_key_file", "msa_server_wait_s", "msa_server_folder")
            found |= dict.fromkeys(of_server, "without --msa-server; give it, too")
        return found | ({"relax_time_limit": "without --relax best or all"} if self.relax == "none" else {})


_NO_WEIGHTS = f"""no --model: folding with demo-tiny, a toy that knows three proteins by heart.
Its outputs are marked "{NOTE}".
For real predictions give --model one or more of
  params_model_N.npz or params_model_N_ptm.npz, N from 1 to 5, as they lie in AlphaFold's archive:
    https://storage.googleapis.com/alphafold/alphafold_params_2022-12-06.tar (CC BY 4.0)
  OpenFold's finetuning_*.pt: https://huggingface.co/nz/OpenFold (CC BY 4.0)
  ESMFold's folder, which needs no alignment: https://huggingface.co/facebook/esmfold_v1 (MIT)
  a folder of `megalith fold convert` or of `megalith fold train`"""


@dataclass(frozen=True)
class Model:
    """One set of weights; `note` marks all that they predict; `identity` changes with them."""

    name: str
    identity: str
    config: ModelConfig
    module: Network
    note: str = ""
    axis: DeviceMesh | None = None


AnyTarget = Target | ComplexTarget


@dataclass(frozen=True)
class Outcome:
    """The outcome of one record: a row of the summary."""

    name: str
    residues: int
    status: str
    msa_rows: int | None = None
    best: str = ""
    plddt: float | None = None
    ptm: float | None = None
    iptm: float | None = None
    seconds: float | None = None


def main(argv: list[str]) -> int:
    """Exit code 2 when a record could not be folded; the others are."""
    config = parse({"default": PredictConfig}, argv, "megalith fold predict", default="default", places=("input",))
    config = resolved(config)
    set_matmul_precision(config.matmul_precision)
    if config.input is None:
        raise UserError("megalith fold predict needs a FASTA file: megalith fold predict IN.fasta --model W --out DIR")
    for path in config.model if max(config.nproc, world_size()) > 1 else ():
        if path.is_dir() and is_esmfold(path):
            raise UserError(f"{path} holds ESMFold, which one rank predicts; leave out --nproc, or torchrun")
    if config.nproc > 1 and not launched():
        _ask_ahead(config)
        return launch(config.nproc, "apps.fold", ["predict", *argv])
    if world_size() == 1:
        _set_allocator(config)
        return _run(config, None)
    with start(config.device, config.seed) as runtime:
        _set_allocator(config)
        mesh = MeshConfig(tp=runtime.world_size)  # the axis that shards what one sequence computes
        code = _run(config, runtime.mesh(mesh)["tp"])
        return code if runtime.leads else 0  # a launcher ends all ranks when one fails, and the first one writes


def _ask_ahead(config: PredictConfig) -> None:
    """Ask a server before ranks begin, which wait for one another half an hour at most; they say what fails."""
    models = config.model or (DEMO_WEIGHTS,)
    if config.msa_server is None or config.input is None or not all(path.exists() for path in models):
        return
    kinds = [(path.stem, is_multimer(path)) for path in models]
    records, refused = read_fasta(config.input, proteins=config.proteins)
    records = _as_one_complex(records, refused, any(of_complexes for _, of_complexes in kinds), config.input)
    service = _server(config)
    asked = _not_refused(records, kinds, config)
    service.announce(asked)
    for record in asked:
        with contextlib.suppress(UserError, OSError):
            service.alignment(record)


def resolved(config: PredictConfig) -> PredictConfig:
    """The config with the device and the precision that are taken."""
    device = device_kind(config.device)
    measured = not any(is_esmfold(path) for path in config.model)
    return replace(config, device=device, precision=chosen_precision(config.precision, device, measured))


def _set_allocator(config: PredictConfig) -> None:
    """On a CPU: keep what tensors leave, which is faster, unless the user says what the process may take."""
    if torch.device(config.device).type == "cpu":
        if config.memory is None:
            keep_freed_memory()
        else:
            give_back_freed_memory(size_in_bytes(config.memory, "memory", "GiB"))


def _run(config: PredictConfig, axis: DeviceMesh | None) -> int:
    """axis: the ranks that share each prediction; its first one writes and speaks."""
    assert config.input is not None
    if config.compile:
        require_compiler(config.device)
    records, refused = read_fasta(config.input, proteins=config.proteins)
    if (config.out / SUMMARY).is_dir():
        raise UserError(f"{config.out / SUMMARY} is a folder, where the summary goes; give another --out")
    if not config.model:
        config = replace(config, model=(DEMO_WEIGHTS,))
        if leads():
            print(_NO_WEIGHTS, file=sys.stderr)
    outcomes = {one.number: Outcome(one.name, 0, f"refused: {one.reason}") for one in refused}
    for one in refused:
        if leads():
            print(f"error: {config.input}, {one}", file=sys.stderr)
    models = [_load(path, config, axis) for path in config.model] if records else []
    records = _as_one_complex(records, refused, any(map(_is_of_complexes, models)), config.input)
    service = _service(config, models, records)
    config.out.mkdir(parents=True, exist_ok=True)
    with _progress() as progress:
        task = progress.add_task("folding", total=len(records))
        for record in sorted(records, key=lambda record: len(record.sequence)):
            outcomes[record.number] = _attempt(record, models, config, progress, len(records) == 1, service)
            _write_summary(config.out / SUMMARY, outcomes)
            progress.advance(task)
    _write_summary(config.out / SUMMARY, outcomes)
    if leads():
        _print_summary(outcomes)
    return 2 if any(outcome.plddt is None for outcome in outcomes.values()) else 0


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(soft_wrap=True, highlight=False, quiet=not leads()), transient=True)


def _load(path: Path, config: PredictConfig, axis: DeviceMesh | None) -> Model:
    model, parameters = read_weights(path)
    if config.num_recycles is not None:
        model = replace(model, num_recycles=config.num_recycles)
    module = build(model, parameters, compute_dtype(config.computing), config.device)
    if config.compile:
        compile_operations(module)
    return Model(path.stem, identify(path), model, module, read_note(path), axis)


def _server(config: PredictConfig) -> Service:
    assert config.msa_server is not None
    key = read_key(config.msa_server_key_file)
    return Service(config.msa_server, key, config.msa_server_folder, config.msa_server_wait_s)


def _service(config: PredictConfig, models: list[Model], records: list[Record]) -> Service | None:
    """The server that alignments are asked of.  Raises UserError where no model reads any."""
    if config.msa_server is None:
        return None
    if models and all(isinstance(model.config, ESMFoldConfig) for model in models):
        raise UserError(
            "--msa-server, and ESMFold reads the sequence alone; leave it out, or give a model of AlphaFold's"
        )
    service = _server(config)
    if leads():
        service.announce(_not_refused(records, _kinds(models), config))
    return service


def _attempt(
    record: Record,
    models: list[Model],
    config: PredictConfig,
    progress: Progress,
    alone: bool,
    service: Service | None,
) -> Outcome:
    """Fold one record; whatever is wrong with it becomes its outcome and a line."""
    try:
        allowed = Allowed(config.max_template_date)
        _check(record, _kinds(models), config)
        msa = config.msa if service is None else _on_the_first(partial(service.alignment, record))
        find = find_complex if record.chains else find_target
        target = find(record, msa, config.templates, alone, allowed, own=service is not None)
        return _fold(target, models, config, progress)
    except _OF_A_RECORD as error:
        reason = _reason(error)
        if leads():
            print(f"error: {config.input}, record {record.number} ({record.name}): {reason}", file=sys.stderr)
        return Outcome(record.name, len(record.sequence), f"failed: {reason}")


_OF_A_RECORD = (UserError, MemoryError, RuntimeError, OSError)
"""Errors after which the other records are folded all the same."""

_Result = TypeVar("_Result")


def _reason(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _on_the_first(do: Callable[[], _Result]) -> _Result:
    """Return on every rank the result of `do`, which rank 0 alone calls, or raise the error that it meets.

    So all of them go on with the same record; each alone, they would meet in collectives of different ones.
    """
    result, failure = None, None
    if leads():
        try:
            result = do()
        except _OF_A_RECORD as error:
            failure = _reason(error)
    result, failure = agreed((result, failure))
    if failure is not None:
        raise UserError(failure)
    return cast(_Result, result)


def _is_of_complexes(model: Model) -> bool:
    return isinstance(model.config, MultimerConfig)


def _kinds(models: list[Model]) -> list[tuple[str, bool]]:
    """The name of each model, and whether it is of complexes."""
    return [(model.name, _is_of_complexes(model)) for model in models]


def _as_one_complex(
    records: list[Record], refused: list[Refused], of_complexes: bool, origin: Path | None
) -> list[Record]:
    """The records, or, where models of complexes are given single chains, the complex that all of them are."""
    several = len(records) > 1 and not refused and not any(record.chains for record in records)
    if origin is None or not (several and of_complexes):
        return records
    return [one_complex(records, unpacked_name(origin).stem)]


def _not_refused(records: list[Record], kinds: Sequence[tuple[str, bool]], config: PredictConfig) -> list[Record]:
    """Those that can be folded: no others' sequences are sent to a server."""
    found = []
    for record in records:
        with contextlib.suppress(UserError):
            _check(record, kinds, config)
            found.append(record)
    return found


def _check(record: Record, kinds: Sequence[tuple[str, bool]], config: PredictConfig) -> None:
    """Raises UserError for a record that the models, or the relaxation, cannot take."""
    _check_models(record, kinds)
    if config.relax != "none":
        _check_relaxable(record)


def _check_models(record: Record, kinds: Sequence[tuple[str, bool]]) -> None:
    """Raises UserError for a model of single chains and a complex, and the other way round."""
    for name, of_complexes in kinds:
        if record.chains and not of_complexes:
            raise UserError(
                f"a complex of {len(record.chains)} chains needs weights of AlphaFold-Multimer, and {name} is a "
                "model of single chains; give params_model_1_multimer_v3.npz or its like"
            )
        if not record.chains and of_complexes:
            raise UserError(
                f"{name} is a model of complexes, and this is one chain; give its chains joined by ':', "
                "a complex's chains as the file's only records, or a monomer's weights"
            )


def _check_relaxable(record: Record) -> None:
    """Raises UserError for a residue that is predicted without atoms."""
    for number, letter in enumerate(record.sequence, 1):
        if letter not in residues.RESTYPES:
            raise UserError(
                f"residue {number} ({letter}) is predicted without atoms, and so cannot be relaxed; replace it, or "
                "leave out --relax"
            )


def _fold(target: AnyTarget, models: list[Model], config: PredictConfig, progress: Progress) -> Outcome:
    record, folder = target.record, config.out / target.record.safe_name
    key = _key(target, models, config)
    unfinished = Unfinished(folder, key)
    done, unfinished.rows = _on_the_first(partial(_left, folder, key, config.overwrite, unfinished))
    if done is not None:
        progress.console.print(f"{record.name}: done before", markup=False)
        return _outcome(target, done)
    of_templates = target.notes if any(model.config.templates is not None for model in models) else ()
    for note in filter(None, (_about_alignment(target, models), *of_templates)):
        progress.console.print(f"{record.name}: {note}", markup=False)
    try:
        seconds = _predict_all(target, models, config, unfinished, progress)
    except BaseException:
        if leads():
            unfinished.leave()
        raise
    rows = unfinished.rows
    order = sorted(rows, key=lambda number: (-rows[number].get("confidence", rows[number]["mean_plddt"]), number))
    ranking = [{"rank": rank, **rows[number]} for rank, number in enumerate(order, 1)]
    if config.relax != "none":
        _on_the_first(
            partial(_relax, target, order[:1] if config.relax == "best" else order, config, unfinished, progress)
        )
    done = {"key": key, "name": record.name, "predictions": ranking, "seconds": round(seconds, 2)}
    _on_the_first(partial(unfinished.finish, order, done))
    return _outcome(target, done)


def _left(
    folder: Path, key: dict[str, Any], overwrite: bool, unfinished: Unfinished
) -> tuple[dict[str, Any] | None, dict[int, Row]]:
    """Find what earlier runs left of a record: its ranking where it is done, and rows where it is not.

    Raises UserError where its folder cannot be, or is another's.
    """
    done = read_object(folder / "ranking.json")
    missing = None if done is None else lacking(done, folder, key)
    if missing == []:
        return done, {}
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}, where its folder goes, is a file; give another --out, or another name")
    if missing and not overwrite:
        raise UserError(
            f"{folder} is of a run without {' and '.join(missing)}; give --overwrite, leave "
            f"{'that' if len(missing) == 1 else 'these'} out here, too, or give another --out"
        )
    if folder.exists() and not overwrite:
        raise UserError(f"{folder} stems from other options or files; give --overwrite, or another --out")
    return None, unfinished.left()


def _predict_all(
    target: AnyTarget, models: list[Model], config: PredictConfig, unfinished: Unfinished, progress: Progress
) -> float:
    """Every model and seed whose prediction an earlier run has not left; the seconds that it took."""
    begun, record = time.monotonic(), target.record
    origins = [(model, seed) for model in models for seed in range(config.seed, config.seed + config.num_seeds)]
    for number, (model, seed) in enumerate(origins):
        origin = _origin(model, seed)
        of_record = f"{record.name} ({len(record.sequence)} residues), {_named(origin)}"
        if number in unfinished.rows:
            progress.console.print(f"{of_record}: predicted before", markup=False)
            continue
        one = _predict(target, model, seed, config)
        _check_finite(one, f"{model.name}, seed {seed}", config.computing)
        row = {**origin, "mean_plddt": one.mean_plddt, "ptm": one.ptm}
        row |= {} if one.iptm is None else {"iptm": one.iptm, "confidence": one.confidence}
        files = partial(_write, one=one, target=target, row=origin, config=config)
        _on_the_first(partial(unfinished.write, number, row, files))
        unfinished.rows[number] = row  # on the other ranks, too
        progress.console.print(f"{of_record}: {_said(one)}", markup=False)
    return time.monotonic() - begun


def _relax(
    target: AnyTarget, numbers: list[int], config: PredictConfig, unfinished: Unfinished, progress: Progress
) -> None:
    """Of predictions that are written, in that order; those that an earlier run has not left."""
    minimizer = chosen("auto")
    for number in numbers:
        of_record = f"{target.record.name}, {_named(unfinished.rows[number])}, relaxed"
        stem = unfinished.stem(number)
        if (unfinished.folder / f"{stem}_relaxation.json").exists():
            continue
        found = relax_file(
            unfinished.folder / f"{stem}.cif",
            unfinished.folder,
            stem,
            minimizer,
            config.relax_time_limit,
            name=target.record.safe_name,
            pdb=config.pdb,
        )
        if config.plots:
            structure = (unfinished.folder / f"{stem}_relaxed.cif").read_text(encoding="utf-8")
            add_relaxed(unfinished.folder / f"{stem}.html", structure)
        progress.console.print(f"{of_record}: {said(found)}", markup=False)


def _about_alignment(target: AnyTarget, models: list[Model]) -> str:
    """Notes for the user on the alignment, or on there being none."""
    of_alignments = any(not isinstance(model.config, ESMFoldConfig) for model in models)
    if target.num_rows == 1:
        found = "no row of its alignment differs from the query" if target.alignments else "no alignment"
        return f"{found}; a sequence alone folds poorly" if of_alignments else ""
    return "" if of_alignments else "ESMFold reads the sequence alone; its alignment is left aside"


def _predict(target: AnyTarget, model: Model, seed: int, config: PredictConfig) -> Folded:
    dtype = compute_dtype(config.computing)
    of_process = torch.device(config.device).type == "cpu"
    if model.axis is None:  # features of the longest are gigabytes themselves: what does not fit is refused before
        expected = _expected_job(target, model.config, dtype, config.device)
        room = _budget(config, None)
        plan_subbatches(replace(expected, distances=config.distogram), room, of_process=of_process)
    features = target.iterations(model.config, seed)
    first = features[0]  # all iterations are alike but for what is drawn; they are made when it is their turn
    job = job_of(model.config, [first], dtype, config.device)
    job = replace(job, iterations=len(features), distances=config.distogram)
    budget = _budget(config, model.axis)
    mask_BN = first.mask_BN.to(config.device, dtype)
    chains_N = None if first.chains is None else first.chains.asym_BN[0].to(config.device) - 1
    asked = {"distances": config.distogram, "chains_N": chains_N}
    del first
    iterations = OnDevice(features, config.device, dtype)
    with torch.inference_mode():
        if model.axis is not None:
            assert isinstance(model.module, AlphaFold)
            shares = plan_shares(job, budget, model.axis, of_process=of_process)
            shard_evoformer(model.module, model.axis, shares)
            folding = model.module.fold(iterations)
            pairs = read_shards(model.module.heads, folding.pair_BNNZ, mask_BN, model.axis, shares[HEADS], **asked)
            if model.axis.get_local_rank() > 0:
                pairs = replace(pairs, distances=None, pae=None)  # the first rank has those of all rows, and writes
        else:
            plan = plan_subbatches(job, budget, of_process=of_process)
            choices = {name: how for name, how in plan.choices.items() if name != HEADS}
            apply_subbatches(model.module, choices, offload=plan.offload)
            folding = model.module.fold(iterations)
            slices = every(job.residues, plan.choices[HEADS].rows)
            pairs = read_pairs(model.module.heads, folding.pair_BNNZ, mask_BN, slices, **asked)
        one = folded(target.sequence, folding, model.module.heads, pairs)
        return in_input_order(one, target) if isinstance(target, ComplexTarget) else one


def _check_finite(one: Folded, origin: str, precision: Precision) -> None:
    """Raises UserError for numbers that overflowed, as in fp16 they may, or that damaged weights or inputs made."""
    if not (np.isfinite(one.positions).all() and np.isfinite(one.plddt).all()):
        more = "weights that are whole" if precision in ("fp32", "fp64") else "--precision fp32"
        raise UserError(f"{origin}: what it predicts in {precision} is not finite; give {more}")


def _budget(config: PredictConfig, axis: DeviceMesh | None) -> int:
    """Bytes of this rank."""
    if config.memory is not None:
        return size_in_bytes(config.memory, "memory", "GiB")
    shared = axis is not None and torch.device(config.device).type == "cpu"
    return free_bytes(config.device) // (axis.size() if axis is not None and shared else 1)


class OnDevice(Sequence[Features]):
    """Features that go to the device one iteration at a time, as they are asked for."""

    def __init__(self, features: Sequence[Features], device: str, dtype: torch.dtype):
        self.features, self.device, self.dtype = features, device, dtype

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index):
        return self.features[index].to(self.device, self.dtype)


def job_of(model: ModelConfig, features: Sequence[Features], dtype: torch.dtype, device: str) -> FoldJob:
    """The planner's question: the sizes of the largest iteration."""
    sizes = [max(numbers) for numbers in zip(*(one.sizes() for one in features))]
    hidden = isinstance(model, MultimerConfig) or any(bool((m == 0).any()) for one in features for m in _masks(one))
    kind = "cuda" if torch.device(device).type == "cuda" else "cpu"
    return FoldJob(model, *sizes, dtype=dtype, device=kind, iterations=len(features), hidden=hidden)


def _expected_job(target: AnyTarget, model: ModelConfig, dtype: torch.dtype, device: str) -> FoldJob:
    """The job that `job_of` will make of the target's features: mostly the same, so that its plan is known by then."""
    sizes = target.sizes(model)
    hidden = sizes[1] == target.num_rows or sizes[3] > 0  # no extra row, or templates with unknown angles
    kind = "cuda" if torch.device(device).type == "cuda" else "cpu"
    return FoldJob(model, *sizes, dtype=dtype, device=kind, iterations=model.num_recycles + 1, hidden=hidden)


def _masks(features: Features) -> list[Tensor]:
    """The rows that attention may hide: those that are not there, and rows of templates where an angle is not known."""
    templates = [] if features.templates is None else [features.templates.torsion_mask_BTNA[..., 2]]
    return [features.mask_BN, features.msa_mask_BSN, features.extra_mask_BEN, *templates]


def _write(folder: Path, stem: str, one: Folded, target: AnyTarget, row: dict[str, Any], config: PredictConfig) -> None:
    record = target.record
    title = f"{record.name}, predicted by {_named(row)}"
    write_mmcif(folder / f"{stem}.cif", one, record.safe_name, title)
    if config.pdb and fits_pdb(one):
        write_pdb(folder / f"{stem}.pdb", one, title)
    sequence = ":".join(chain.sequence for chain in record.chains) or record.sequence
    write_confidence(folder, stem, one, {"name": record.name, "sequence": sequence, **row})
    if config.plots:
        plot(folder, stem, one, f"{record.name}, {_named(row)}")
        structure = (folder / f"{stem}.cif").read_text(encoding="utf-8")
        alignment = AlignmentPicture(target.letters, target.species)
        origin = f"{row['model']}, seed {row['seed']}"
        write_report(folder / f"{stem}.html", one, structure, record.name, origin, alignment, row.get("note", ""))
        _plot_alignment(folder, target)


def _plot_alignment(folder: Path, target: AnyTarget) -> None:
    """What all predictions of a record share: drawn with the first of them."""
    if target.num_rows > 1 and not (folder / "coverage.png").exists():
        plot_coverage(folder, target.letters, target.lengths, target.record.name)
        if target.species:
            plot_pairing(folder, target.species, target.record.name)


def _key(target: AnyTarget, models: list[Model], config: PredictConfig) -> dict[str, Any]:
    """The options that a record's folder and its files on request depend on; `lacking` says which folder is done."""
    exact = config.matmul_precision == "highest"
    return {
        "input": target.digest(),
        "weights": [f"{model.name} {model.identity}" for model in models],
        "num_recycles": config.num_recycles,
        "seeds": [config.seed, config.num_seeds],
        "max_template_date": config.max_template_date,
        "precision": config.precision if exact else f"{config.precision}, products {config.matmul_precision}",
        "compile": config.compile,
        "files": [name for name in ("pdb", "plots", "distogram") if getattr(config, name)] + _relaxations(config),
    }


def _relaxations(config: PredictConfig) -> list[str]:
    """All are also the best."""
    return {"none": [], "best": ["relax best"], "all": ["relax best", "relax all"]}[config.relax]


def _outcome(target: AnyTarget, done: dict[str, Any]) -> Outcome:
    best = done["predictions"][0]
    return Outcome(
        target.record.name,
        len(target.sequence),
        "folded",
        target.num_rows,
        _named(best),
        best["mean_plddt"],
        best["ptm"],
        best.get("iptm"),
        done["seconds"],
    )


def _origin(model: Model, seed: int) -> dict[str, Any]:
    """The origin of a prediction, as its files say it."""
    return {"model": model.name, "seed": seed} | ({"note": model.note} if model.note else {})


def _named(origin: dict[str, Any]) -> str:
    note = f" ({origin['note']})" if "note" in origin else ""
    return f"{origin['model']}{note}, seed {origin['seed']}"


def _said(one: Folded) -> str:
    of_whole = "" if one.ptm is None else f", pTM {one.ptm:.2f}"
    return f"pLDDT {one.mean_plddt:.1f}{of_whole}" + ("" if one.iptm is None else f", ipTM {one.iptm:.2f}")


_HEADER = ("name", "residues", "status", "msa_rows", "best", "plddt", "ptm", "iptm", "seconds")


def _rows(outcomes: dict[int, Outcome]) -> list[list[str]]:
    def text(value: object) -> str:
        return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)

    return [[text(getattr(outcomes[number], name)) for name in _HEADER] for number in sorted(outcomes)]


def _write_summary(path: Path, outcomes: dict[int, Outcome]) -> None:
    if not leads():
        return
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([_HEADER, *_rows(outcomes)])
    replace_file(path, text.getvalue().encode())


def _print_summary(outcomes: dict[int, Outcome]) -> None:
    table = Table(*(name.replace("_", " ") for name in _HEADER))
    for row in _rows(outcomes):
        table.add_row(*map(escape, row))
    Console(width=None if sys.stdout.isatty() else 140, highlight=False).print(table)
