"""Schedules drawn at random, many: what diffusers' pipeline draws is drawn, what it refuses is refused in one line."""

import logging

import pytest
import torch

from apps.diffusion.generate import Job, Sampling, check_sampling
from core.config import UserError
from tests.support.diffusion_training import tiny_pipeline
from tests.support.schedules import case, compare, theirs

SCHEDULES = 120


@pytest.mark.soak
def test_random_schedules_equal_the_pipeline_of_diffusers() -> None:
    logging.disable(logging.WARNING)
    pipeline = tiny_pipeline(0).to(torch.float64)
    jobs = [Job("a dog", 1), Job("a cat", 2)]
    drawn = refused = 0
    for seed in range(SCHEDULES):
        one = case(seed)
        pipeline.schedule, sampling = one.stored, Sampling(one.name, one.steps, 3.0)
        try:
            check_sampling(pipeline, sampling)
        except UserError:
            refused += 1
            with pytest.raises(Exception):  # noqa: B017
                assert theirs(pipeline, one, sampling, jobs)[1].isfinite().all()
        else:
            drawn += 1
            compare(pipeline, one, sampling, jobs)
    print(f"{drawn} schedules drawn alike, {refused} refused by both")
    assert drawn > 2 * refused
