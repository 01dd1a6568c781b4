"""Files to batches: readers of documents, memory-mapped token shards, mesh-independent resumable batches."""

from core.data.batches import (
    Batches,
    EvalBatches,
    GlobalBatches,
    MapBatches,
    PairBatches,
    TokenBatches,
    rows_of_step,
    some_rows,
)
from core.data.masked import EVALUATION_PASSES, MaskedBatches, MaskedEvalBatches
from core.data.prefetch import Prefetch
from core.data.ramp import BatchSize, RampConfig
from core.data.readers import FORMATS, Document, Faults, TextSource, split_of
from core.data.tokens import ShardWriter, TokenShards

__all__ = [
    "EVALUATION_PASSES",
    "FORMATS",
    "BatchSize",
    "Batches",
    "Document",
    "EvalBatches",
    "Faults",
    "GlobalBatches",
    "MapBatches",
    "MaskedBatches",
    "MaskedEvalBatches",
    "PairBatches",
    "Prefetch",
    "RampConfig",
    "ShardWriter",
    "TextSource",
    "TokenBatches",
    "TokenShards",
    "rows_of_step",
    "some_rows",
    "split_of",
]
