"""Tensor, context, expert parallelism and pipelines of modules without a plan, found in what their forwards compute.

axes    the dims of tensors as products and concatenations of axes; which axes are one
rules   what operators do to axes
flow    the trace of a forward, without values
local   a rank's part of a tensor
styles  what one module does with its part
find    which axes are cut, what each module does, and the trial that proves it
blocks  the list of blocks that stages are made of
context what of the blocks works on each place of a sequence by itself
places  what a block does with a rank's places
experts the modules that hold experts, and the trial that they can be dealt out
sample  what a forward is given, by the names of its arguments
"""

from core.parallel.infer.blocks import infer_stages
from core.parallel.infer.context import infer_context
from core.parallel.infer.experts import infer_experts
from core.parallel.infer.find import Found, infer_plan
from core.parallel.infer.sample import sample_of

__all__ = ["Found", "infer_context", "infer_experts", "infer_plan", "infer_stages", "sample_of"]
