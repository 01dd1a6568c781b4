"""A keeper holds the last two copies of each rank, and is there when the rank is not."""

import json
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from core.keeper import Keeper, start_keeper


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as store:
        found = start_keeper(store.getsockname())
        yield found
        with suppress(OSError):
            Keeper(*found).end()


def copy(rank: int, step: int) -> dict[str, int]:
    return {"rank": rank, "step": step, "generation": 1}


def test_the_last_two_of_each_rank_are_held(address: tuple[str, int]) -> None:
    keeper = Keeper(*address)
    for step in (4, 8, 12):
        keeper.put(copy(0, step), [memoryview(b"first "), memoryview(str(step).encode())])
    keeper.put(copy(1, 12), [memoryview(b"second")])
    keeper.close()
    again = Keeper(*address)
    assert again.held() == [copy(0, 8), copy(0, 12), copy(1, 12)]
    assert again.get(copy(0, 8)) == b"first 8"
    assert again.get(copy(1, 12)) == b"second"
    with pytest.raises(LookupError, match="does not hold"):
        again.get(copy(0, 4))


def test_a_copy_that_has_not_come_whole_is_none(address: tuple[str, int]) -> None:
    keeper = Keeper(*address)
    keeper.put(copy(0, 4), [memoryview(b"whole")])
    head = json.dumps({"do": "put", **copy(0, 8)}).encode()
    with socket.create_connection(address) as torn:
        torn.sendall(struct.pack("!QQ", len(head), 9) + head + b"torn")
    assert keeper.held() == [copy(0, 4)]


def test_a_keeper_of_a_store_of_this_machine_is_reached_from_this_machine_alone(address: tuple[str, int]) -> None:
    host, port = address
    assert host == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):  # as at any other address of this machine
        socket.create_connection(("127.0.0.2", port), timeout=10.0)


def test_one_that_is_told_to_end_is_gone(address: tuple[str, int]) -> None:
    Keeper(*address).end()
    begin = time.monotonic()
    while is_there(address):
        assert time.monotonic() - begin < 10.0


def is_there(address: tuple[str, int]) -> bool:
    try:
        Keeper(*address).close()
    except OSError:
        return False
    return True
