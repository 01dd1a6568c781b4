"""Bytes and seconds of a training step before it runs.

step     estimate_step: any module under any ParallelConfig, by running its step on tensors without memory
growth, stages  by how many blocks a list is cut down for it; the ranks and microbatches of a pipeline that tell of all
chain    estimate_chain: the same step, block by block
residency estimate_budget: the same with Gemini, in a given device memory
profile  tables and a picture of a step's graph: by module, by operator, at its peak
options  PlannedMachine, PlannedRun: the machine that a run is planned for, and a run's configuration with it

and of our decoder in closed form, in no time:

shape    what is estimated: ModelShape (weights, what a block keeps for its backward, head) and RunShape (precision,
         optimizer, mesh, ZeRO level, checkpointing, batch)
local    outer_bytes, outer_message: what workers that train locally keep and send beside a step
memory   estimate_memory: bytes per rank, by kind and by phase of the step; require_fit: a clear refusal
time     estimate_time: compute at an assumed utilisation, communication by volume, pipeline bubble; sent_bytes
pipeline stage_costs, which balance the stages; simulated_timeline: the step of a pipeline on a clock; draw_timelines
"""

from core.estimate.draw import draw_timelines
from core.estimate.memory import MemoryEstimate, estimate_memory, require_fit
from core.estimate.options import PlannedMachine, PlannedRun
from core.estimate.pipeline import Timeline, simulated_timeline, stage_costs, timeline_of
from core.estimate.shape import (
    BlockShape,
    HeadShape,
    Kept,
    ModelShape,
    RunShape,
    Weight,
    decoder_shape,
    megatron_block,
)
from core.estimate.step import StepEstimate, estimate_step
from core.estimate.time import Machine, TimeEstimate, data_parallel_bytes, estimate_time, sent_bytes

__all__ = [
    "BlockShape",
    "HeadShape",
    "Kept",
    "Machine",
    "MemoryEstimate",
    "ModelShape",
    "PlannedMachine",
    "PlannedRun",
    "RunShape",
    "StepEstimate",
    "TimeEstimate",
    "Timeline",
    "Weight",
    "data_parallel_bytes",
    "decoder_shape",
    "draw_timelines",
    "estimate_memory",
    "estimate_step",
    "estimate_time",
    "megatron_block",
    "require_fit",
    "sent_bytes",
    "simulated_timeline",
    "stage_costs",
    "timeline_of",
]
