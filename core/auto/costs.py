"""Bytes and seconds of every collective: what the search adds up, the solver minimises and the executor is held to.

A link is told by alpha and beta (Hockney 1994): a message of b bytes takes alpha + b / bandwidth. Ranks run the ring
or, for an all-to-all, the pairwise algorithm, which send the least bytes that the collective allows (Thakur,
Rabenseifner and Gropp 2005; Patarasuk and Yuan 2009 for the all-reduce). With b bytes of the full tensor, the one
that the ranks of the axis hold together, on n ranks each rank sends

    collective      bytes             messages   b is
    all_gather      b (n - 1) / n     n - 1      the gathered result
    reduce_scatter  b (n - 1) / n     n - 1      one rank's partial sum
    all_reduce      2 b (n - 1) / n   2 (n - 1)  one rank's partial sum: a reduce-scatter and an all-gather
    all_to_all      b (n - 1) / n^2   n - 1      all shards: (n - 1) / n of a rank's b / n leaves it
    broadcast       b                 n - 1      the tensor, in pieces down a chain; the last rank sends nothing
    send            b                 1          the message

On one rank nothing is sent. `core.comm.volume` counts the same on ranks, and holds the shares of a message that a ring
sends; it calls b / n the full message of an all-to-all, what one rank has.
"""

import math
from dataclasses import dataclass

from core.comm.volume import wire_share
from core.config import UserError

_MESSAGES = {
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: n - 1,
    "all_reduce": lambda n: 2 * (n - 1),
    "all_to_all": lambda n: n - 1,
    "broadcast": lambda n: n - 1,
    "send": lambda n: 1,
}
COLLECTIVES = tuple(_MESSAGES)


@dataclass(frozen=True)
class Link:
    """What a rank sends over: seconds before a message's first byte, and bytes a second after it, one way.

    each  (collective, link) of those that were measured by themselves

    Raises UserError unless latency is finite and at least 0, and bytes a second are above 0 (`inf` is allowed).
    """

    latency_s: float
    bytes_per_s: float
    each: tuple[tuple[str, "Link"], ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s < math.inf:
            raise UserError(f"latency_s={self.latency_s} of a link: give seconds, 0 or more")
        if not self.bytes_per_s > 0:
            raise UserError(f"bytes_per_s={self.bytes_per_s} of a link: give bytes a second, more than 0")

    def of(self, collective: str) -> "Link":
        """The link as a collective finds it."""
        return next((link for name, link in self.each if name == collective), self)


def bytes_sent(collective: str, full_bytes: float, ranks: int) -> float:
    """Bytes that each rank sends; see the module's table.

    full_bytes  of the full tensor of the axis, also for an all-to-all

    Raises UserError for another collective, a size below 0 or no ranks.
    """
    _check(collective, full_bytes, ranks)
    if ranks == 1:
        return 0.0
    message = full_bytes / ranks if collective == "all_to_all" else full_bytes
    return message * wire_share(collective, ranks)


def messages_sent(collective: str, ranks: int) -> int:
    """Messages that each rank sends one after another, each with the link's latency."""
    _check(collective, 0.0, ranks)
    return 0 if ranks == 1 else _MESSAGES[collective](ranks)


def seconds_of(collective: str, full_bytes: float, ranks: int, link: Link) -> float:
    """Seconds of a collective over a link that every rank of the axis has; arguments and errors as of `bytes_sent`."""
    sent, link = bytes_sent(collective, full_bytes, ranks), link.of(collective)
    return messages_sent(collective, ranks) * link.latency_s + sent / link.bytes_per_s


def _check(collective: str, full_bytes: float, ranks: int) -> None:
    if collective not in _MESSAGES:
        raise UserError(f"no collective is called '{collective}'; choose from {', '.join(COLLECTIVES)}")
    if not 0 <= full_bytes < math.inf:
        raise UserError(f"a tensor of {full_bytes} bytes has no cost; give a number that is 0 or more")
    if ranks < 1:
        raise UserError(f"a collective over {ranks} ranks; give 1 or more")
