"""Schedules drawn at random, many: what diffusers' pipeline draws is drawn, what it refuses is refused in one line."""

import logging

import pytest

from apps.diffusion.generate import PictureJob, Sampling
from tests.support.schedules import case, compare_or_refuse, shallow_pipeline

SCHEDULES = 120


@pytest.mark.soak
def test_random_schedules_equal_the_pipeline_of_diffusers() -> None:
    logging.disable(logging.WARNING)
    pipeline = shallow_pipeline()
    jobs = [PictureJob("a dog", 1), PictureJob("a cat", 2)]
    drawn = refused = 0
    for seed in range(SCHEDULES):
        one = case(seed)
        pipeline.schedule, sampling = one.stored, Sampling(one.name, one.steps, 3.0)
        if compare_or_refuse(pipeline, one, sampling, jobs):
            drawn += 1
        else:
            refused += 1
    print(f"{drawn} schedules drawn alike, {refused} refused by both")
    assert drawn > 2 * refused
