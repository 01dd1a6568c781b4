"""A server of alignments that is killed by -9 again and again, and one that many clients ask: no ticket is lost."""

import random
import threading
import time
import urllib.error
from http.client import HTTPException
from pathlib import Path

import pytest

from tests.support.msa_server import UBIQUITIN, begun, configured, databases, serving
from tests.unit.fold.test_msa_server import crowd, entry, start

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]
NUM_KILLS = 40


def test_kills_at_any_moment_lose_no_ticket(tmp_path: Path) -> None:
    """Clients go on asking meanwhile; whatever was promised is answered in the end, right, under the id it had."""
    draw, paths = random.Random(0), databases(tmp_path)
    sequences = [UBIQUITIN[number : number + 30 + draw.randrange(16)] for number in range(30)]
    promised: dict[str, str] = {}
    wrong: list[str] = []
    for _ in range(NUM_KILLS):
        process, server = start(tmp_path, paths)
        began, life = time.monotonic(), draw.uniform(0, 1.5)

        def client(seed: int, server=server) -> None:
            dice = random.Random(seed)
            while True:
                sequence = dice.choice(sequences)
                try:
                    ticket = server.submit(sequence, mode="all")
                except (OSError, ValueError, urllib.error.URLError, HTTPException):
                    return  # it was killed
                if promised.setdefault(sequence, ticket["id"]) != ticket["id"]:
                    wrong.append(f"{sequence} had another id")
                time.sleep(dice.uniform(0, 0.1))

        threads = [threading.Thread(target=client, args=(draw.randrange(1 << 30),)) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(max(0.0, began + life - time.monotonic()))
        process.kill()
        process.wait()
        for thread in threads:
            thread.join()
    assert wrong == []
    process, server = start(tmp_path, paths)
    for sequence, name in promised.items():
        assert server.ended({"id": name, "status": "PENDING"})["status"] == "COMPLETE"
        assert server.files({"id": name})["uniref.a3m"] == entry("101", sequence)
    process.terminate()
    assert process.wait(120) == 0
    print(f"{NUM_KILLS} kills, {len(promised)} tickets promised, all of them answered; {len(begun(tmp_path))} searches")
    assert len(promised) > 20


def test_64_clients_for_long(tmp_path: Path) -> None:
    with serving(configured(tmp_path, max_queue=16)) as server:
        assert crowd(server, 64, 60) == []
        assert len(begun(tmp_path)) == len(set(begun(tmp_path)))
