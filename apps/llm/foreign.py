"""Models that our decoder does not compute: built by transformers from a folder's config.json, without weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from core.config import UserError
from core.placement.table import NO_PLAN, ModelPlan


class ForeignModel:
    """A causal model of any family that the installed transformers know; nothing is loaded, no code of the folder run.

    Raises UserError where the folder is of none; `refused` is why our decoder does not compute it.
    """

    plan: ModelPlan = NO_PLAN

    def __init__(self, folder: Path, refused: UserError):
        from transformers import AutoConfig, AutoModelForCausalLM

        self.folder = folder
        self.refused = refused
        self._build = AutoModelForCausalLM.from_config
        try:
            self.config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            self.num_parameters = sum(parameter.numel() for parameter in self.build().parameters())
        except (ValueError, KeyError, TypeError, AttributeError, OSError, ImportError) as error:
            said = next(iter(str(error).splitlines()), type(error).__name__)
            raise UserError(f"{refused}; nor do transformers build a causal model of {folder}: {said}") from error
        self._check_heads()

    def _check_heads(self) -> None:
        """Raises UserError for key/value heads that transformers build and cannot run, such as a default's of 32."""
        heads, kv_heads = (getattr(self.config, f"num_{of}_heads", None) for of in ("attention", "key_value"))
        if isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads > 0 and heads % kv_heads:
            raise UserError(
                f"{self.folder}: num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}; give a "
                "divisor of it in config.json, which has transformers' default where it says nothing"
            )

    def build(self) -> nn.Module:
        """On the meta device, as it trains."""
        with torch.device("meta"):
            return self._build(self.config, dtype=torch.float32, trust_remote_code=False).train()

    @property
    def longest(self) -> int | None:
        """Tokens that it has positions for, where that is said."""
        return getattr(self.config, "max_position_embeddings", None)

    def check_length(self, option: str, length: int) -> None:
        """Raises UserError for sequences longer than the model is made for."""
        if self.longest is not None and length > self.longest:
            raise UserError(
                f"{option}={length} and the model of {self.folder} has positions for {self.longest}; shorten the "
                "sequence"
            )

    def loss(self, rows: int, length: int) -> Callable[[nn.Module], Tensor]:
        """Its own, of a microbatch.  Raises UserError for sequences longer than the model is made for."""
        self.check_length("data.sequence_length", length)

        def loss(model: nn.Module) -> Tensor:
            ids = torch.zeros(rows, length, dtype=torch.int64)
            return model(input_ids=ids, labels=ids, use_cache=False).loss

        return loss
