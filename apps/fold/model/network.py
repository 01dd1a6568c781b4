"""The model that a configuration describes."""

from apps.fold.model.alphafold import AlphaFold
from apps.fold.model.config import ESMFoldConfig, ModelConfig
from apps.fold.model.esmfold import ESMFold, ESMFoldHeads
from apps.fold.model.heads import Heads

Network = AlphaFold | ESMFold
NetworkHeads = Heads | ESMFoldHeads


def network(config: ModelConfig) -> Network:
    return ESMFold(config) if isinstance(config, ESMFoldConfig) else AlphaFold(config)
