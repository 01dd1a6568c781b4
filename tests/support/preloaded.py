"""What the process that tests are forked from imports: what most of them would spend their time on."""

import docstring_parser  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo
import torch.utils.tensorboard  # noqa: F401
import transformers
import tyro  # noqa: F401

import apps.diffusion.train
import apps.fold.train
import apps.llm.pretrain
import apps.serve.server  # noqa: F401
import core.train  # noqa: F401

_LAZY = (transformers.PreTrainedTokenizerFast, transformers.AutoConfig, transformers.AutoModelForCausalLM)
