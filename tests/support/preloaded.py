"""What the process that tests are forked from imports: what most of them would spend their time on."""

from importlib.util import find_spec

import docstring_parser  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo
import transformers
import tyro  # noqa: F401

import apps.diffusion.train
import apps.fold.train
import apps.llm.pretrain
import apps.serve.server  # noqa: F401
import core.train  # noqa: F401
from apps.llm.recipes import RECIPES
from core.config import parse
from tests.support.parsed_once import parse_with_known_parsers

if find_spec("tensorboard") is not None:  # images for GPUs lack it
    import torch.utils.tensorboard  # noqa: F401

_LAZY = (
    transformers.PreTrainedTokenizerFast,
    transformers.AutoConfig,
    transformers.AutoModelForCausalLM,
    transformers.GPT2LMHeadModel,
)

# Of each command, and of each rank that it launches, it would make the same parser.
parse_with_known_parsers()
for _recipe in ("debug", "debug_moe"):
    parse(RECIPES, ["--recipe", _recipe], "megalith llm pretrain", default=_recipe)
