"""The names under which a server may be called.

A web page from elsewhere can let its own name point to this machine (DNS rebinding) and then read answers as its own.
Browsers tell the name as Host, so where no key is asked for, a name that is not this server's gets no answer.
"""

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address


class Hosts:
    """Names and addresses, beside this machine's own, under which a server is called while it asks for no key."""

    def __init__(self, hosts: Sequence[str]):
        self._hosts = {_plain(host) for host in hosts}
        self._any_address = any(_is_unspecified(host) for host in self._hosts)

    def refused(self, header: bytes) -> str | None:
        """The host that a request names, to be read, where it is none of these; None where it is one."""
        host = _plain(header.decode("latin-1"))
        address = _address(host)
        if host in self._hosts or host == "localhost" or host.endswith(".localhost"):
            return None
        if address is not None and (address.is_loopback or self._any_address):
            return None
        return host if host.isascii() and host.isprintable() and len(host) < 256 else "this host"


def _plain(host: str) -> str:
    """A host as it is compared: without a port, brackets and a final dot, in lower case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, _, port = host.rpartition(":")
    if name and ":" not in name and port.isdigit():
        host = name
    return host.removesuffix(".")


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


def _is_unspecified(host: str) -> bool:
    """Return whether a host stands for all of the machine's addresses."""
    address = _address(host)
    return host == "" or (address is not None and address.is_unspecified)
