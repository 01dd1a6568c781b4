"""Pairs in host memory: what is copied runs beside what is computed, in an order that events hold, and is counted."""

from collections import Counter
from dataclasses import replace
from itertools import groupby

import pytest
import torch
from torch import Tensor

from apps.fold.model.alphafold import AlphaFold
from apps.fold.model.config import ModelConfig, MultimerConfig, released, tiny, tiny_multimer
from apps.fold.model.features import Features
from apps.fold.model.network import trainable
from apps.fold.subbatch import HEADS, FoldJob, How, Plan, apply_subbatches
from apps.fold.subbatch.counting import MetaAccount
from apps.fold.subbatch.execute import offload_pairs
from apps.fold.subbatch.operations import operations_of
from apps.fold.subbatch.planner import _Decision, _survey, meta_features, stand_in, without_masks
from apps.fold.subbatch.reading import read_pairs
from apps.fold.subbatch.slices import every, host_zeros, settle, update_rows
from core.kernels.operator import forced
from core.link import Coming
from tests.support.fold import random_features, random_parameters
from tests.support.original_multimer import features_of
from tests.support.recorded_streams import COMPUTING, HOST, RecordedStreams, recorded_link

N = 7
LIKE = torch.zeros(1)


def _passes(columns: tuple[bool, ...], rows: int, deaf_to: int | None = None) -> RecordedStreams:
    """Loops over z, one after the other, by rows or columns: z <- 2 z + 1."""
    with torch.no_grad(), recorded_link(deaf_to) as streams:
        z = host_zeros((1, N, N, 3), torch.float32)
        for by_column in columns:
            update_rows(z.transpose(1, 2) if by_column else z, LIKE, every(N, rows), lambda _, x: x.take() * 2 + 1)
        settle(z, LIKE)
        z.sub_(2 ** len(columns) - 1)  # by the host itself
    assert not bool(z.any())
    return streams


def _phases(streams: RecordedStreams) -> list[str]:
    """What is done with z, as it is issued."""
    actors = ["compute" if actor == COMPUTING else name for actor, name in streams.order if actor != HOST]
    return [name for actor, some in groupby(actors) for name in ([actor] if actor == "compute" else some)]


@pytest.mark.parametrize("columns", [False, True])
def test_the_next_slice_is_on_its_way_before_one_is_computed(columns: bool) -> None:
    streams = _passes((columns,), 2)
    first, steady, last = ["fetch", "fetch"], ["compute", "send", "fetch"], ["compute", "send"]
    assert _phases(streams)[:12] == [*first, *steady[:2], "fetch", *steady, *last, *last]
    assert streams.races == []


def test_slices_of_rows_let_the_host_wait_for_nothing() -> None:
    waits = Counter(_passes((False, False), 2).waits)
    assert waits.pop(HOST) == 2, "at the end, for what was fetched and what was sent"
    assert waits.pop(COMPUTING) == 8 + 8, "computing waits for each slice, and for each result before it has its memory"
    assert list(waits.values()) == [8, 8], "each copy waits for what was computed before it"


def test_columns_stop_over_in_two_places_each_way() -> None:
    """The host waits before it fills a place again, and before it reads what has arrived."""
    streams = _passes((True,), 1)
    assert streams.races == []
    assert streams.waits.count(HOST) == (N - 2) + N + 2


@pytest.mark.parametrize(
    ("columns", "rows"),
    [((False,), 2), ((False, False), 7), ((False, False), 4), ((False, True), 4), ((True, False), 4), ((True,), 1)],
)
def test_without_any_wait_nothing_orders_two_uses(columns: tuple[bool, ...], rows: int) -> None:
    """But for the host's at the end: of fetches, and of sends where columns have arrived, others make them good."""
    waits = len(_passes(columns, rows).waits)
    quiet = {number - waits for number in range(waits) if not _passes(columns, rows, number).races}
    assert quiet == ({-2, -1} if columns[-1] else {-2})


@pytest.mark.parametrize("columns", [False, True])
def test_what_fails_waits_for_what_is_under_way(columns: bool) -> None:
    """Before anybody else has the memory."""

    def fails(at: slice, coming: Coming) -> Tensor:
        if at.start == 4:
            raise MemoryError
        return coming.take() + 1

    with torch.no_grad(), recorded_link() as streams:
        z = host_zeros((1, N, N, 3), torch.float32)
        with pytest.raises(MemoryError):
            update_rows(z.transpose(1, 2) if columns else z, LIKE, every(N, 2), fails)
        z.zero_()
    assert streams.waits.count(HOST) >= 2
    assert streams.races == []


@pytest.mark.parametrize("given", [tiny(), replace(tiny_multimer(), max_msa=3, max_extra_msa=2)], ids=["chain", "two"])
def test_numbers_are_the_same_to_the_bit_and_nothing_races(given: ModelConfig) -> None:
    config = replace(given, evoformer=replace(tiny().evoformer, num_blocks=1))
    model = trainable(config).eval()
    model.load_state_dict(random_parameters(config))
    of_complex = isinstance(config, MultimerConfig)
    one = features_of("AB", config) if of_complex else random_features(7, rows=3, extra=2, templates=2)
    features = [one] * 2
    for rows, product in (
        (2, How("copy", 2)),
        (3, How("cross", 1, 2)),
        (20, How("whole", 20)),
        (2, How("channels", 3, 5)),
    ):
        with torch.inference_mode():
            near = _folded(model, features, rows, product, offload=False)
            with recorded_link() as streams:
                far = _folded(model, features, rows, product, offload=True)
        assert streams.races == [], product
        assert {"fetch", "send"} <= {name for _, name in streams.order}
        for name, wanted, found in zip(("positions", "distances", "pae", "ptm"), near, far, strict=True):
            assert torch.equal(wanted, found), (str(product), name)


def _folded(model: AlphaFold, features: list[Features], rows: int, product: How, *, offload: bool) -> list[Tensor]:
    names = [name for name, _, _ in operations_of(model)]
    ways = {name: product if name.endswith(("outgoing", "incoming")) else How("rows", rows) for name in names}
    apply_subbatches(model, ways, offload=offload)
    found = model.fold(features)
    read = read_pairs(model.heads, found.pair_BNNZ, features[0].mask_BN, every(features[0].mask_BN.shape[1], rows))
    apply_subbatches(model, {})
    assert read.distances is not None
    assert read.pae is not None
    assert read.ptm is not None
    return [found.positions_BN373, read.distances, read.pae, read.ptm]


# --- what is on the device --------------------------------------------------------------------------------------------


def _carried_out(job: FoldJob, plan: Plan) -> int:
    """The most bytes alive at once on the meta device in a prediction that follows the plan, every slice of it."""
    with torch.device("meta"):
        model = trainable(job.config).to(job.dtype).eval()
    without_masks(model)
    apply_subbatches(model, {name: how for name, how in plan.choices.items() if name != HEADS})
    offload_pairs(model, stand_in)
    features = meta_features(job)
    with torch.no_grad(), forced(), MetaAccount() as account:
        account.add(model.parameters())
        features.map(lambda tensor: account.add([tensor]) or tensor)
        found = model.fold([features] * job.iterations)
        read_pairs(
            model.heads, found.pair_BNNZ, features.mask_BN, every(job.residues, plan.choices[HEADS].rows), stand_in
        )
    return account.peak_bytes


def _small(residues: int, name: str = "model_5_ptm") -> FoldJob:
    config = released(name)
    stacks = {name: replace(getattr(config, name), num_blocks=1) for name in ("evoformer", "extra")}
    sizes = (residues, 5, 6, 0 if config.templates is None else 2)
    return FoldJob(replace(config, **stacks), *sizes, torch.bfloat16, "cuda", iterations=2)


SHARES = (1.0, 1.02, 1.1, 1.3, 2.0, 20.0)


@pytest.mark.parametrize("name", ["model_5_ptm", pytest.param("model_1_multimer_v3", marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("residues", "shares"),
    [(13, (1.0, 1.1, 20.0)), *(pytest.param(n, SHARES, marks=pytest.mark.soak) for n in (23, 61))],
)
def test_what_is_under_way_is_in_the_plan(residues: int, shares: tuple[float, ...], name: str) -> None:
    """An upper bound, within 5 % of what carrying it out takes, from the least budget on."""
    survey = _survey(_small(residues, name), offload=True)
    least = _Decision(survey, 0).plan().peak_bytes
    methods = set()
    for share in shares:
        plan = _Decision(survey, int(share * least)).plan()
        counted = _carried_out(survey.job, plan)
        assert counted <= plan.peak_bytes <= share * least + 1
        assert plan.peak_bytes <= 1.05 * counted, (share, plan.peak_bytes, counted)
        methods |= {how.method for how in plan.choices.values()}
    assert methods >= {"rows", "copy"}


def test_an_operation_counts_the_slice_that_comes_and_the_result_that_leaves() -> None:
    near, far = (_survey(_small(100), offload=offload) for offload in (False, True))
    name = "blocks.*.pair.transition"
    assert far.turns[name].length == 100
    row = 100 * 128 * 2
    for rows in (1, 10, 30):
        how = How("rows", rows)
        own = near.allocates(near.turns[name], how)
        assert far.allocates(far.turns[name], how) == own + 3 * rows * row, "z's own slice, the next and the last"


def test_copies_are_hidden_by_more_slices() -> None:
    """With z far an operation is done in slices though all of it would fit: nothing else runs beside its copies."""
    far, near = (_Decision(_survey(_small(100), offload), 10**15).plan() for offload in (True, False))
    name = "blocks.*.pair.starting"
    assert far.choices[name].rows < near.choices[name].rows == 100
