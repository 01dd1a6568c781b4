"""Long sequences in the memory there is: a plan, and the model's operations in slices as it says."""

from apps.fold.subbatch.execute import apply_subbatches
from apps.fold.subbatch.planner import HEADS, FoldJob, Plan, free_bytes, least_bytes, longest, plan_subbatches
from apps.fold.subbatch.slices import How

__all__ = [
    "HEADS", "FoldJob", "How", "Plan", "apply_subbatches", "free_bytes", "least_bytes", "longest", "plan_subbatches"
]  # fmt: skip
