"""The model that a configuration describes."""

from dataclasses import replace

from apps.fold.model.alphafold import AlphaFold
from apps.fold.model.config import ESMFoldConfig, ModelConfig, MultimerConfig
from apps.fold.model.esmfold import ESMFold, ESMFoldHeads
from apps.fold.model.heads import Heads
from apps.fold.model.multimer import Multimer

Network = AlphaFold | ESMFold
NetworkHeads = Heads | ESMFoldHeads


def network(config: ModelConfig) -> Network:
    if isinstance(config, ESMFoldConfig):
        return ESMFold(config)
    return Multimer(config) if isinstance(config, MultimerConfig) else AlphaFold(config)


def trainable(config: ModelConfig) -> AlphaFold:
    """The model as it is trained: recycling does not end before, so that all ranks recycle equally often."""
    if isinstance(config, MultimerConfig):
        config = replace(config, recycle_tolerance=-1.0)
    model = network(config)
    assert isinstance(model, AlphaFold)
    return model
