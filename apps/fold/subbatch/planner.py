"""The plan of slices: each operation's, so that a prediction stays within a budget and takes the least time.

The plan is a pure function of the model's shape, the sizes of the input, the number format, the kind of device and the
budget. It does not guess what an operation allocates: tensors are counted on the meta device (counting.py).

    1. The model runs once, one block of each stack. It tells what is alive when each operation has its turn, and the
       most that is alive outside of operations. Residuals are added in place, so neither depends on what is chosen.
    2. What an operation allocates in slices of some size is counted by doing it, once for each size that is asked for.
       Of a loop over equal slices one slice is enough, so a plan takes the same time for any length.
    3. Each operation is done in the way (whole, slices, orders of the triangle product) that takes the least time of
       those whose peak is within the budget.

If there is none for some operation, z moves to host memory (on a GPU), and the next slice and the last result, which
are on their ways, are counted with each operation. If that does not help either, the smallest budget that would do is
named.

Times are FLOPs, bytes and launches over what a machine does a second (`Rates`): they decide between ways, and say
roughly how long a prediction takes. On a CPU what an operation has alive at once may stay in the cache; bytes count as
moved so far as it does not fit there. So slices are taken even where there is room for the whole, down to the size that
fits the cache: smaller ones only add launches.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import lru_cache, partial
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from apps.fold.model.config import MULTIMER_TARGET_DIM, TARGET_DIM, ESMFoldConfig, ModelConfig, MultimerConfig
from apps.fold.model.embedders import TemplatePairEmbedder
from apps.fold.model.features import ChainIds, Features, TemplateFeatures
from apps.fold.model.multimer import Multimer, TemplateChainsEmbedder
from apps.fold.model.network import Network, network
from apps.fold.model.structure import Structure
from apps.fold.model.triangle import TriangleMultiplication
from apps.fold.subbatch.counting import MetaAccount
from apps.fold.subbatch.execute import normalise_in_slices, offload_pairs, replace_method, wrap
from apps.fold.subbatch.operations import Operation, Work, operations_of
from apps.fold.subbatch.reading import read_pairs
from apps.fold.subbatch.slices import Cuts, How, enough, every, first_only, stands_for_host
from apps.fold.weights.esmfold import esmfold_table
from apps.fold.weights.table import name_table
from core.config import UserError
from core.kernels.operator import forced
from core.runtime import available_bytes, process_holding, tensors_within

Device = Literal["cpu", "cuda"]
HEADS = "heads"  # what the heads read of the pairs: no module of the model is wrapped for it
_TILES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)


@dataclass(frozen=True)
class FoldJob:
    """The sizes of a prediction.

    rows, extra, templates  of the MSA (those of templates not counted), of the extra MSA, templates
    hidden                  whether some letters of the MSA are masked: attention on a CPU then joins mask and bias
    distances               whether the distogram is read
    """

    config: ModelConfig
    residues: int
    rows: int
    extra: int
    templates: int = 0
    dtype: torch.dtype = torch.float32
    device: Device = "cpu"
    iterations: int = 4
    hidden: bool = False
    distances: bool = True


@dataclass(frozen=True)
class Rates:
    """A machine's rates a second: FLOPs of products, bytes of memory, bytes to and from the host; a launch's time.

    cache  bytes that stay near the cores from one operator to the next; 0: operators meet in memory
    """

    flops: float
    memory: float
    host: float
    launch_s: float
    cache: float = 0.0


RATES: dict[Device, Rates] = {
    # Two cores with AVX-512 and 36 MB of L3.
    # A launch is what a block takes longer in slices of few rows than in those of the plan, over the operators more
    # ("operations" of benchmarks/evoformer.py): most of it is that products of few rows arrange their weights anew.
    "cpu": Rates(9e10, 1e10, 1e10, 9e-5, 3.6e7),
    "cuda": Rates(3e14, 2.5e12, 2.5e10, 5e-6),  # an H100, sustained
}


@dataclass(frozen=True)
class Plan:
    """The decisions, and what comes of them.

    choices     how each operation is done
    offload     whether z lies in host memory
    peak_bytes  the most bytes of tensors alive at once on the device
    seconds     of one prediction
    peaks       of each operation, of which `beside` is what was alive before it
    """

    choices: dict[str, How]
    offload: bool
    peak_bytes: int
    seconds: float
    peaks: dict[str, int] = field(default_factory=dict)
    beside: dict[str, int] = field(default_factory=dict)


def plan_subbatches(job: FoldJob, budget_bytes: int, *, of_process: bool = False) -> Plan:
    """The plan; see the module's docstring.

    of_process  whether the budget is what the process may take on a CPU, of which tensors are a part; else it is theirs

    Raises UserError when no plan stays within the budget: what the smallest one is that would do.
    """
    room = tensors_within(budget_bytes) if of_process else budget_bytes
    plan = planned(job, room)
    if plan.peak_bytes > room:
        least = gib_up(process_holding(plan.peak_bytes) if of_process else plan.peak_bytes)
        raise UserError(
            f"{job.residues} residues with {job.rows} + {job.extra} rows need at least "
            f"{least} GiB, and there are {budget_bytes / 2**30:.2f}; "
            f"give --memory {least}, fewer rows, a narrower --precision or more ranks"
        )
    return plan


def gib_up(num_bytes: int) -> str:
    """Write a size in GiB, rounded up, so that the number given back is enough."""
    return f"{-(-num_bytes * 100 // 2**30) / 100:.2f}"


@lru_cache(maxsize=256)
def planned(job: FoldJob, budget_bytes: int) -> Plan:
    """The plan, or, where none is within the budget, the one with the lowest peak."""
    plan = _Decision(_survey(job, offload=False), budget_bytes).plan()
    if plan.peak_bytes <= budget_bytes or job.device == "cpu":
        return plan
    offloaded = _Decision(_survey(job, offload=True), budget_bytes).plan()
    return min(plan, offloaded, key=lambda p: p.peak_bytes)


def least_bytes(job: FoldJob) -> int:
    """The smallest budget there is a plan for."""
    return planned(job, 0).peak_bytes


def longest(job: FoldJob, budget_bytes: int) -> int:
    """About the most residues for which there is a plan with z on the device, the rest as in the job; 0: none.

    There is a plan for what it returns, and none for a fiftieth more. Memory grows faster than the length and not
    faster than its square, so a few steps find it.
    """
    weights = weights_bytes(job.config, job.dtype)
    residues = 1024.0
    for _ in range(8):
        needed = _least_on_device(replace(job, residues=max(1, int(residues)))) - weights
        step = max(0.0, (budget_bytes - weights) / max(1, needed)) ** 0.5
        residues *= step
        if residues < 1:
            return 0
        if abs(step - 1) < 0.002:
            break
    found = int(residues)
    while found > 0 and _least_on_device(replace(job, residues=found)) > budget_bytes:
        found -= max(1, found // 500)
    return max(0, found)


def _least_on_device(job: FoldJob) -> int:
    return _Decision(_survey(job, offload=False), 0).plan().peak_bytes


# --- one pass over the model ------------------------------------------------------------------------------------------


@dataclass
class _Turn:
    """An operation of the model when its turn comes.

    beside  bytes that are alive then
    """

    module: nn.Module
    operation: Operation
    whole: Callable[..., Any]
    given: tuple[Any, ...]
    beside: int
    length: int
    work: Work

    @property
    def alike(self) -> Hashable:
        """Operations that agree in this allocate alike."""
        module = self.module
        flags = getattr(module, "outgoing", None), getattr(module, "starting", None)
        return type(module), flags, tuple(p.shape for p in module.parameters()), _alike(self.given)


class _Survey:
    """Bytes alive when each operation has its turn, and, asked for, those that it allocates done some way."""

    def __init__(self, job: FoldJob, offload: bool):
        config = job.config
        short = replace(
            config,
            evoformer=replace(config.evoformer, num_blocks=min(1, config.evoformer.num_blocks)),
            extra=replace(config.extra, num_blocks=min(1, config.extra.num_blocks)),
            structure=replace(config.structure, num_layers=1),
        )
        self.job, self.offload = job, offload
        self.turns: dict[str, _Turn] = {}
        self.outside = 0  # the most bytes alive outside of all operations
        self._account = MetaAccount()
        self._allocated: dict[Hashable, int] = {}
        self._measures = False
        self._left_out = weights_bytes(config, job.dtype) - weights_bytes(short, job.dtype)
        self._look(short)

    def _look(self, short: ModelConfig) -> None:
        with torch.device("meta"):
            model = network(short).to(self.job.dtype).eval()
        if not self.job.hidden:
            without_masks(model)
        for name, module, operation in operations_of(model):
            wrap(module, operation, partial(self._visit, name, operation))
        normalise_in_slices(model)
        if self.offload:
            offload_pairs(model, stand_in)
        features, account = meta_features(self.job), self._account
        with torch.no_grad(), self._kernels(), account:
            account.add(model.parameters())
            account.add(_tensors(features))
            found = model.fold([features])
            self._visit_heads(model, found.pair_BNNZ, features.mask_BN)
        B, N = features.aatype_BN.shape
        points = 24 if isinstance(model, Multimer) else 12  # bytes of CB, and of CA
        last = (
            B * N * (short.msa_dim * self.job.dtype.itemsize + points)
        )  # of later iterations: what recycling hands on
        layers = (self.job.config.structure.num_layers - 1) * layer_bytes(found.structure)
        for name, turn in self.turns.items():
            of_layers = layers if name == HEADS or name.startswith("structure_module") else 0
            turn.beside += self._left_out + last + of_layers
        self.outside = max(self.outside, account.peak_bytes) + self._left_out + last + layers

    def _kernels(self):
        return forced() if self.job.device == "cuda" else nullcontext()

    def _visit(self, name: str, operation: Operation, module: nn.Module, whole: Callable[..., Any], *given: Any) -> Any:
        """Note the operation, and hand on what it would: nothing is computed where it works in place."""
        if self._measures:
            return given[0]  # an operation within an operation has a turn of its own
        account = self._account
        self.outside = max(self.outside, account.peak_bytes)
        turn = _Turn(module, operation, whole, _blank(given), account.current_bytes, operation.length(module, *given),
                     operation.work(module, *given))  # fmt: skip
        known = self.turns.get(name)
        if known is None or known.beside < turn.beside:
            self.turns[name] = turn
        if operation.over is None or isinstance(module, TemplatePairEmbedder | TemplateChainsEmbedder):
            result = operation.run(module, whole, How("rows", max(1, turn.length)), every, *given)
        else:
            result = given[operation.over]
        account.peak_bytes = account.current_bytes
        return result

    def _visit_heads(self, model: Network, z: Tensor, mask: Tensor) -> None:
        host = stand_in if self.job.device == "cuda" else partial(torch.empty, device="meta")

        def read(module: nn.Module, whole: Any, how: How, cuts: Cuts, z: Tensor, mask: Tensor) -> Any:
            slices = cuts(z.shape[1], how.rows, enough(z))
            return read_pairs(model.heads, z, mask, slices, host, distances=self.job.distances)

        widths = model.heads.distogram.out_features * (1 if model.heads.pae is None else 2)
        work = Work(4 * z.numel() * widths, 4 * z.numel() * z.element_size(), 12)
        operation = Operation("forward", read, lambda _, z, mask: z.shape[1], lambda *_: work)
        beside = self._account.current_bytes
        self.turns[HEADS] = _Turn(model.heads, operation, read, _blank((z, mask)), beside, z.shape[1], work)

    def allocates(self, turn: _Turn, how: How) -> int:
        """The most bytes that the operation has alive at once beyond what was alive before it."""
        key = turn.alike, how
        if key not in self._allocated:
            self._measures = True
            with torch.no_grad(), self._kernels(), MetaAccount() as account:
                account.add(turn.module.parameters())
                given = _filled(turn.given)
                account.add(_tensors(given))
                before = account.peak_bytes = account.current_bytes
                turn.operation.run(turn.module, turn.whole, how, first_only, *given)
                self._allocated[key] = account.peak_bytes - before
            self._measures = False
        return self._allocated[key]


@lru_cache(maxsize=64)
def _survey(job: FoldJob, offload: bool) -> _Survey:
    return _Survey(job, offload)


# --- the decision -----------------------------------------------------------------------------------------------------


class _Decision:
    def __init__(self, survey: _Survey, budget_bytes: int):
        self.survey, self.job, self.budget = survey, survey.job, budget_bytes

    def plan(self) -> Plan:
        choices, peaks, seconds = {}, {}, 0.0
        for name, turn in self.survey.turns.items():
            how = choices[name] = self._choose(turn)
            peaks[name] = turn.beside + self.survey.allocates(turn, how)
            seconds += self._times(name) * self._seconds(turn, how)
        peak = max(self.survey.outside, *peaks.values())
        beside = {name: turn.beside for name, turn in self.survey.turns.items()}
        return Plan(choices, self.survey.offload, peak, seconds, peaks, beside)

    def _choose(self, turn: _Turn) -> How:
        """The way within the budget that takes the least time; where there is none, the one that takes least memory."""
        ways = _ways(turn.module, turn.length)
        fitting: list[How] = []
        for way in ways:
            if fitting and way[0].method == "copy":
                break  # it normalises z twice, and was measured to take longer
            how = self._largest(turn, way, self.budget - turn.beside)
            if how is None:
                continue
            fitting.append(self._fastest(turn, way, how))
            if len(fitting) > 1 and self._seconds(turn, fitting[-1]) > self._seconds(turn, fitting[-2]):
                break  # more tiles only take longer
        if fitting:
            return min(fitting, key=lambda how: self._seconds(turn, how))
        lowest = ways[-1][-1]
        for way in reversed(ways[:-1]):
            if self._at_least(turn, way[-1]) < self.survey.allocates(turn, lowest):
                lowest = min(lowest, way[-1], key=lambda how: self.survey.allocates(turn, how))
        return lowest

    def _largest(self, turn: _Turn, way: list[How], room: int) -> How | None:
        """The first of a way, which goes from large slices to small ones, that allocates no more than `room` bytes.

        What is allocated grows evenly with the rows, so two counts say where to look.
        """
        if self._at_least(turn, way[-1]) > room:
            return None
        if self.survey.allocates(turn, way[0]) <= room:
            return way[0]
        if self.survey.allocates(turn, way[-1]) > room:
            return None
        about = self._about(turn, way)
        for how in way[1:]:
            if about(how) <= room and self.survey.allocates(turn, how) <= room:
                return how
        return way[-1]

    def _fastest(self, turn: _Turn, way: list[How], largest: How) -> How:
        """The fastest of a way's slices, from the largest that is within the budget on.

        Halves of slices save twice as much of what leaves the cache and add twice as many launches, until they fit. So
        the largest are the fastest, or those about where the cache begins to hold them. Where z is far halves leave
        half as much to be copied before and after all computing.
        """
        cache = RATES[self.job.device].cache
        first, about = way.index(largest), self._about(turn, way)
        if cache:
            fits = next((at for at, how in enumerate(way) if about(how) <= cache), len(way) - 1)
            some = [way[at] for at in (first, fits - 1, fits) if at >= first]
        else:
            some = way[first:] if _far_bytes(turn) else [largest]
        return min(some, key=lambda how: self._seconds(turn, how, about(how)))

    def _about(self, turn: _Turn, way: list[How]) -> Callable[[How], float]:
        """how -> about what it allocates, by the largest and the smallest slices: it grows evenly with the rows."""
        most, least = self.survey.allocates(turn, way[0]), self.survey.allocates(turn, way[-1])
        slope = (most - least) / max(1, way[0].rows - way[-1].rows)
        return lambda how: least + slope * (how.rows - way[-1].rows)

    def _at_least(self, turn: _Turn, how: How) -> int:
        """A bound from below: the norm and the product, the copy, or the pool and the factors of a tile."""
        if how.method in ("whole", "rows"):
            return 0
        z, size = turn.given[0], self.job.dtype.itemsize
        wide = turn.module.get_parameter("in_bias").shape[0] // 4
        if how.method == "channels":
            return (wide + z.shape[-1]) * z.shape[1] ** 2 * size
        if how.method == "copy":
            return wide * z.shape[1] ** 2 * size
        tiles = -(-turn.length // how.tile)
        cells = max((tiles - 1 - t) * (t + 1) for t in range(tiles)) * how.tile**2
        pool = 0 if self.survey.offload else cells * z.shape[-1]
        return (pool + 2 * wide * how.tile * z.shape[1]) * size

    def _seconds(self, turn: _Turn, how: How, allocated: float | None = None) -> float:
        """Seconds of doing the operation once; allocated: bytes that it is taken to allocate, by default counted."""
        rates, length, work = RATES[self.job.device], max(1, turn.length), turn.work
        slices = -(-length // how.rows)
        flops, moved, launches = work.flops, work.bytes, slices * work.launches
        if how.method == "channels":  # the norm is read for every slice
            moved += slices * turn.given[0].shape[-1] * length**2 * self.job.dtype.itemsize
        moved *= self._beyond_cache(self.survey.allocates(turn, how) if allocated is None else allocated)
        pairs = self.job.residues**2 * self.job.config.pair_dim * self.job.dtype.itemsize
        if how.method in ("copy", "cross"):
            moved += slices * pairs  # a factor is read for every slice
        again = 0.0
        if how.method == "cross":
            tiles = -(-length // how.tile)
            again = (tiles - 1) / 2
            flops *= 1 + again * work_share(self.job.config, length)
            moved += again * 8 * pairs
            launches = work.launches * (tiles + 1) * slices
        computing = flops / rates.flops + moved / rates.memory + launches * rates.launch_s
        copying = (2 + again) * _far_bytes(turn) / rates.host
        # Copies run beside computing, but for those of the first slice and the last.
        return max(computing, copying) + min(computing, copying) / slices

    def _beyond_cache(self, allocated: float) -> float:
        """The share of what an operation has alive that does not fit the cache."""
        cache = RATES[self.job.device].cache
        return max(0.0, 1 - cache / max(1, allocated)) if cache else 1.0

    def _times(self, name: str) -> int:
        """How often a prediction does the operation."""
        config, top = self.job.config, name.partition(".")[0]
        if name == HEADS:
            return 1
        times = {"blocks": config.evoformer.num_blocks, "extra_blocks": config.extra.num_blocks}.get(top, 1)
        if top == "template_embedder" and ".blocks." in name and config.templates is not None:
            times = self.job.templates * config.templates.num_blocks
        if top == "structure_module":
            times = config.structure.num_layers
        return times * self.job.iterations


def _far_bytes(turn: _Turn) -> int:
    """Bytes of the operation's inputs that lie in host memory."""
    return sum(x.numel() * x.element_size() for x in _tensors(turn.given) if stands_for_host(x))


def work_share(config: ModelConfig, residues: int) -> float:
    """The part of a triangle product's FLOPs that are projections of its factors."""
    pair, product = config.pair_dim, config.evoformer.pair.product_dim
    projections = 8 * product * pair
    return projections / (projections + 2 * product * residues + 2 * product * pair + 2 * pair * pair)


def _halved(length: int) -> list[int]:
    sizes = [max(1, length)]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


def _rows_ways(length: int) -> list[list[How]]:
    return [[How("rows", rows) for rows in _halved(length)]]


def _ways(module: nn.Module, length: int) -> list[list[How]]:
    if not isinstance(module, TriangleMultiplication):
        return _rows_ways(length)
    wide = module.get_parameter("in_bias").shape[0] // 4
    channels = [How("channels", -(-length * some // wide), some) for some in _halved(wide)]
    copies = [How("copy", rows) for rows in _halved(length)]
    tiles = sorted({-(-length // number) for number in _TILES if number <= length}, reverse=True)
    return [
        [How("whole", length)],
        channels,
        copies,
        *([How("cross", r, tile) for r in _halved(tile)] for tile in tiles),
    ]


@dataclass(frozen=True)
class _Blank:
    """The likeness of a tensor on the meta device, without keeping it alive."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


def _blank(value: Any) -> Any:
    """The same with blanks in the place of tensors on the meta device."""

    def of(tensor: Tensor) -> Any:
        return _Blank(tensor.shape, tensor.stride(), tensor.dtype) if tensor.is_meta else tensor

    return _mapped(value, Tensor, of)


def _filled(value: Any) -> Any:
    """The same with new tensors in the place of blanks."""

    def of(blank: _Blank) -> Tensor:
        return torch.empty_strided(blank.shape, blank.strides, dtype=blank.dtype, device="meta")

    return _mapped(value, _Blank, of)


def _mapped(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, tuple):
        return tuple(_mapped(one, kind, function) for one in value)
    if is_dataclass(value) and not isinstance(value, type | _Blank):
        return replace(value, **{f.name: _mapped(getattr(value, f.name), kind, function) for f in fields(value)})
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for one in value:
            yield from _tensors(one)
    elif is_dataclass(value) and not isinstance(value, type):
        for f in fields(value):
            yield from _tensors(getattr(value, f.name))


def _alike(value: Any) -> Any:
    """The values that a key may be made of."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.device.type
    if isinstance(value, tuple):
        return tuple(map(_alike, value))
    if is_dataclass(value) and not isinstance(value, type | _Blank):
        return tuple(_alike(getattr(value, f.name)) for f in fields(value))
    return value


def layer_bytes(structure: Structure) -> int:
    """Bytes that each layer of the structure module leaves."""
    kept = (structure.backbone, structure.groups, structure.torsions, structure.unnormalized, structure.atom14)
    return sum(t.numel() * t.element_size() for t in _tensors(kept))


def stand_in(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor's stand-in on the host while planning: its shape, and no memory."""
    return torch.zeros((), dtype=dtype).expand(shape)


def without_masks(model: nn.Module) -> None:
    """Let attention not join mask and bias inside, as where nothing is hidden."""
    for module in model.modules():
        attend = getattr(module, "attend", None)
        if attend is not None:
            replace_method(module, "attend", partial(_unmasked, attend))


def _unmasked(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    mask = given.pop("mask", None)
    return attend(q, k, v, **given, mask=mask if "bias" not in given or given["bias"] is None else None)


# --- what is on the device --------------------------------------------------------------------------------------------


def weights_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    return _num_parameters(config) * dtype.itemsize


@lru_cache(maxsize=16)
def _num_parameters(config: ModelConfig) -> int:
    if isinstance(config, ESMFoldConfig):
        return sum(prod(shape) for entry in esmfold_table(config) for shape in entry.sources.values())
    return sum(prod(entry.shape) for entry in name_table(config))


def meta_features(job: FoldJob) -> Features:
    """Features of the job's sizes without values."""
    N, S, E, complexes = job.residues, job.rows, job.extra, isinstance(job.config, MultimerConfig)
    T = job.templates if job.config.templates is not None else 0

    def real(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=job.dtype, device="meta")

    def whole(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.long, device="meta")

    templates = None
    if T:
        wide = torch.promote_types(job.dtype, torch.float32)
        points = torch.empty(1, T, N, 3, dtype=wide, device="meta")
        backbone = torch.empty(1, T, N, 3, 3, dtype=wide, device="meta") if complexes else None
        templates = TemplateFeatures(
            whole(1, T, N), real(1, T), points, real(1, T, N), real(1, T, N), real(1, T, N, 7, 2),
            real(1, T, N, 7, 2), real(1, T, N, 7), backbone,
        )  # fmt: skip
    target = MULTIMER_TARGET_DIM if complexes else TARGET_DIM
    return Features(
        whole(1, N), whole(1, N), real(1, N), real(1, N, target), real(1, S, N, 49), real(1, S, N), whole(1, E, N),
        real(1, E, N), real(1, E, N), real(1, E, N), templates,
        ChainIds(whole(1, N), whole(1, N), whole(1, N)) if complexes else None,
    )  # fmt: skip


def free_bytes(device: torch.device | str) -> int:
    """A device's free bytes, less a tenth for its allocator and for what an operator needs inside."""
    if torch.device(device).type == "cuda":
        return int(0.9 * torch.cuda.mem_get_info(device)[0])
    return int(0.9 * available_bytes())
