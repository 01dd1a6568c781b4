"""A corpus as the batches that a model learns from, and as those that it is measured by: the next token, or masks."""

from apps.llm.config import PretrainConfig, objective_of
from apps.llm.corpus import Corpus, DataConfig
from apps.llm.tokenizer import Tokenizer
from core.config import UserError
from core.data import (
    EVALUATION_PASSES,
    Batches,
    EvalBatches,
    MaskedBatches,
    MaskedEvalBatches,
    PairBatches,
    TokenBatches,
    TokenShards,
)
from core.models.decoder import DecoderConfig
from core.runtime import leads


def training_batches(config: PretrainConfig, corpus: Corpus) -> Batches:
    data = config.data
    if data.pairs:
        batches = PairBatches(corpus.train, data.sequence_length, data.batch_size, config.seed, on_error=data.on_error)
        if batches.num_too_long and leads():
            print(f"skipped {batches.num_too_long:,} pairs: longer than a sequence of {data.sequence_length} tokens")
        return batches
    batches = TokenBatches(
        corpus.train, data.sequence_length, data.batch_size, config.seed, mask_documents=data.mask_documents
    )
    if objective_of(config.model) == "clm":
        return batches
    return MaskedBatches(batches, corpus.train, config.seed, mask_id=mask_id(corpus.tokenizer))


def evaluation_batches(
    model: DecoderConfig, data: DataConfig, shards: TokenShards, tokenizer: Tokenizer, passes: int | None = None
) -> EvalBatches | MaskedEvalBatches:
    """Every token of the shards once: from those before it, or of a masked language model hidden from all others.

    passes  of the latter: parts of a sequence that are hidden one after the other; None: EVALUATION_PASSES, or as many
            as there are places
    """
    batches = EvalBatches(shards, data.sequence_length, data.global_batch, mask_documents=data.mask_documents)
    if objective_of(model) == "clm":
        return batches
    passes = passes or min(EVALUATION_PASSES, data.sequence_length)
    return MaskedEvalBatches(batches, mask_id=mask_id(tokenizer), num_passes=passes)


def mask_id(tokenizer: Tokenizer) -> int:
    """Raises UserError for a tokenizer without a mask token."""
    if tokenizer.mask_id is None:
        raise UserError(
            "objective=mlm hides tokens by a mask token, and this tokenizer has none; give one that has, or with "
            "--data.tokenizer bpe or byte also --data.mask-token"
        )
    return tokenizer.mask_id
