"""GPUs and links by name, and which link the ranks of an axis have."""

import math

import pytest
import torch

from core.auto.costs import Link
from core.auto.machines import GPUS, LINK_SHARE, LINKS, cluster_of, gpu_named
from core.config import UserError


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_has_its_sheet(name: str) -> None:
    gpu = gpu_named(name)
    assert gpu.name == name
    assert gpu.peak_flops(torch.float16) is not None
    assert {gpu.inside, gpu.across, gpu.host} <= LINKS.keys()
    assert 0 < gpu.usable_bytes < gpu.memory_gib * 2**30
    assert gpu.memory_gb_s > 100
    assert gpu.watts > 50


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("a100-40gb", "a100-40gb"),
        ("A100_80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("A100", "a100-40gb"),  # what fits there fits the other
        ("h100", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("H100 PCIe", "h100-pcie"),
        ("rtx 4090", "rtx-4090"),
        ("V100", "v100-16gb"),
    ],
)
def test_names_are_taken_as_they_are_written(typed: str, name: str) -> None:
    assert gpu_named(typed).name == name


@pytest.mark.parametrize(
    ("typed", "near"), [("a100-60gb", "a100-40gb"), ("h10", "h100"), ("gtx 4090", "rtx-4090"), ("", "")]
)
def test_an_unknown_gpu_is_refused_with_the_nearest(typed: str, near: str) -> None:
    with pytest.raises(UserError, match=f"no GPU is called .*{near}") as refused:
        gpu_named(typed)
    assert "\n" not in str(refused.value)


def test_an_axis_has_the_link_that_its_ranks_share() -> None:
    cluster = cluster_of(gpu_named("a100-40gb"), 64)
    assert cluster.ranks_per_machine == cluster.machines == 8
    port = LINK_SHARE * 25e9
    assert cluster.link(1, 8) == cluster.link(4, 2) == Link(5e-6, LINK_SHARE * 300e9)
    assert cluster.link(8, 8) == Link(1e-5, port)  # one rank in each machine, one port
    assert cluster.link(2, 16) == Link(1e-5, 4 * port)  # four
    assert cluster.link(1, 64) == Link(1e-5, 8 * port)
    assert cluster.link(1, 3) == Link(1e-5, 3 * port)  # of machines of eight some triple lies in two


def test_ranks_that_fill_no_machines_are_spread_evenly() -> None:
    assert cluster_of(gpu_named("a100"), 5).ranks_per_machine == 5
    assert cluster_of(gpu_named("a100"), 12).ranks_per_machine == 4
    assert cluster_of(gpu_named("a100"), 61).ranks_per_machine == 1


def test_what_is_given_takes_the_place_of_the_sheet() -> None:
    cluster = cluster_of(gpu_named("l4"), 8, memory_bytes=7, memory_gb_s=2, across_gb_s=3, utilisation=0.25)
    assert (cluster.memory_bytes, cluster.bytes_per_s, cluster.across.bytes_per_s, cluster.utilisation) == (
        7,
        2e9,
        3e9,
        0.25,
    )
    assert math.isclose(cluster.to_host.bytes_per_s, LINK_SHARE * 32e9)
