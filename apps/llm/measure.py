"""`llm plan --measure FILE.json`: the machine that this process runs on, as the file that --gpu takes."""

import sys

from rich.console import Console
from rich.table import Table

from apps.llm.plan_config import LLMPlanConfig
from core.auto.costs import bytes_sent
from core.auto.measure import measure
from core.auto.measured import MeasuredMachine, write_machine
from core.config import UserError, in_words, option
from core.runtime import launch, launched, start

READ = {"measure", "nproc", "device"}


def measure_machine(config: LLMPlanConfig, given: set[str], argv: list[str]) -> int:
    """Launch the ranks, measure, print and write.  Returns the exit code.

    Raises UserError for options beside it that are of a run.
    """
    assert config.measure is not None
    if unread := sorted(given - READ):
        raise UserError(f"{option(unread[0])} with --measure, which plans nothing; leave it out")
    if config.nproc > 1 and not launched():
        return launch(config.nproc, "apps.llm", ["plan", *argv])
    with start(config.device) as runtime:
        found = measure(runtime)
        if runtime.leads:
            show(found, Console(width=None if sys.stdout.isatty() else 120))
            write_machine(config.measure, found)
            print(f"written to {config.measure}; megalith llm plan --gpu {config.measure} plans for it")
    return 0


def show(machine: MeasuredMachine, console: Console) -> None:
    console.print(
        f"{machine.device}: {machine.devices} device{'s' * (machine.devices > 1)}, "
        f"{in_words(machine.memory_bytes)} at {machine.memory_bytes_per_s / 1e9:.3g} GB/s, to the host "
        f"{machine.to_host_bytes_per_s / 1e9:.3g} GB/s, on the host {machine.host_update_bytes_per_s / 1e9:.3g} GB/s; "
        f"a kernel begins in {machine.launch_s * 1e6:.3g} us"
    )
    products = Table("FLOPs of a product", *(f"{name}, GFLOP/s" for name in machine.products), title="products")
    for row in zip(*machine.products.values(), strict=True):
        products.add_row(f"{row[0][0]:.3g}", *(f"{rate / 1e9:,.3g}" for _, rate in row))
    console.print(products)
    if not machine.links:
        console.print("one rank: no links; give --nproc, or run it under torchrun")
        return
    sizes = [f"{in_words(size)}, GB/s" for size in machine.links[0].full_bytes]
    links = Table("collective", "ranks", "groups", "latency, us", "bandwidth, GB/s", *sizes, title="links of a rank")
    for link in machine.links:
        reached = (
            bytes_sent(link.collective, size, link.ranks) / seconds / 1e9
            for size, seconds in zip(link.full_bytes, link.seconds, strict=True)
        )
        told = [f"{1e6 * link.latency_s:,.3g}", f"{link.bytes_per_s / 1e9:,.3g}", *(f"{rate:,.3g}" for rate in reached)]
        links.add_row(link.collective, f"{link.ranks}", f"{link.groups}", *told)
    console.print(links)
