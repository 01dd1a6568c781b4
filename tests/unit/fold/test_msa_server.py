"""`fold msa-server`: the protocol, the life of tickets, keys, limits, quotas, kills; searches by a stand-in."""

import base64
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from apps.fold.msa_server import main
from apps.fold.service.keys import read_keys
from apps.fold.service.protocol import Mode, mode_of, query_of
from apps.fold.service.tickets import remove_oldest
from core.config import UserError
from tests.support.msa_server import (
    CRAMBIN,
    SLOWEST_S,
    UBIQUITIN,
    Running,
    begun,
    configured,
    databases,
    serving,
    stand_in,
)
from tests.support.programs import require_program

ROOT = Path(__file__).parents[3]
ENV = "bfd.mgnify30.metaeuk30.smag30.a3m"
NUM_CLIENTS = 64


def entry(name: str, sequence: str) -> str:
    """What the stand-in finds of a sequence."""
    return f">{name}\n{sequence}\n>hit/1-9\n{sequence[:-1]}-\n\0"


def wait_until(true: Any) -> None:
    deadline = time.monotonic() + SLOWEST_S
    while not true():
        assert time.monotonic() < deadline, "it does not come to that"
        time.sleep(0.02)


# --- what is asked ----------------------------------------------------------------------------------------------------


def test_modes() -> None:
    assert mode_of("msa", "env") == Mode(env=True, filtered=True, templates=True, complete=False)
    assert mode_of("msa", "") == mode_of("msa", "all") == Mode(False, True, True, False)
    assert mode_of("msa", "env-nofilter-notemplates") == Mode(True, False, False, False)
    assert mode_of("pair", "pairgreedy-env") == Mode(True, True, False, False)
    assert mode_of("pair", "paircomplete") == Mode(False, True, False, True)
    for kind, mode, said in (
        ("msa", "env-taxonomy", "no 'taxonomy'; ticket/msa takes all, env"),
        ("msa", "pairgreedy", "no 'pairgreedy'"),
        ("msa", "a\nb", r"^mode='a\\nb': this server has no 'a\\nb'; ticket"),
        ("msa", "all-env", "all and env exclude each other; ticket/msa takes"),
        ("pair", "pairgreedy-paircomplete", "pairgreedy and paircomplete exclude each other"),
        ("pair", "nofilter", "ticket/pair takes pairgreedy"),
    ):
        with pytest.raises(UserError, match=said):
            mode_of(kind, mode)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (b"mode=env", "no q"),
        (b"q=%3E101%0AMKT&mode=env&email=a%40b", "'email'"),
        (b"q=%3E101%0AMKT&q=%3E101%0AMKT", "a field twice"),
        (b"\xff\xfe", "no form"),
        (b"q=MKT", "before the first >"),
        (b"q=%3E101%0AMK7", "letter '7' at position 3"),
        (b"q=%3E101%0AMKT%3AGSH", "records of their own"),
        (b"q=%3E101%0AMKT%0A%3E101%0AMKT", "rename one"),
        (b"q=%3E%0AMKT", "give it a name"),
        (b"q=%3E101%0AMKT%0A%3E102%0AMKT%0A%3E103%0AMKT", "3 sequences; this server takes 2"),
        (b"q=%3E101%0AMKTMKTMKTMKT", "12 residues; this server takes 10"),
    ],
)
def test_forms_that_are_refused(form: bytes, said: str) -> None:
    with pytest.raises(UserError, match=said):
        query_of("msa", form, 2, 10)


def test_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    for text, said in (
        ("", "holds no key"),
        ("short anna", "16 ASCII characters"),
        ("0123456789abcdef", "no name behind"),
        ("0123456789abcdef anna cores=3", "cores=3 is no limit"),
        ("0123456789abcdef anna\n0123456789abcdef bert", "twice"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=said):
            read_keys(path)
    path.write_text("# ours\n0123456789abcdef anna jobs=2 disk=1MiB\nfedcba9876543210 bert\n")
    keys = read_keys(path)
    basic = b"Basic " + base64.b64encode(b"anyone:0123456789abcdef")
    for headers in ({"authorization": b"Bearer 0123456789abcdef"}, {"authorization": basic}):
        owner = keys.owner(headers)
        assert owner is not None
        assert (owner.name, owner.most_jobs, owner.most_bytes) == ("anna", 2, 2**20)
    assert keys.owner({"x-api-key": b"fedcba9876543210"}) == keys.named("bert")
    assert keys.owner({}) is keys.owner({"authorization": b"Bearer 0123456789abcde"}) is None


# --- the life of a ticket ---------------------------------------------------------------------------------------------


def test_answers_and_equal_searches(tmp_path: Path) -> None:
    config = configured(tmp_path)
    with serving(config) as server:
        asked = server.submit(UBIQUITIN, CRAMBIN)
        done = server.ended(asked)
        assert done["status"] == "COMPLETE"
        files = server.files(done)
        assert files["uniref.a3m"] == entry("101", UBIQUITIN) + entry("102", CRAMBIN) == files[ENV]
        assert files["pdb70.m8"] == ""
        assert "# mgnify: version HMMER 9" in files["msa.sh"]
        began = time.process_time()  # of the server, too, on a machine that others use
        assert server.submit(UBIQUITIN, CRAMBIN) == done
        assert time.process_time() - began < 1
        alone = server.ended(server.submit(CRAMBIN, mode="nofilter-notemplates"))  # by another ticket's searches
        assert alone["status"] == "COMPLETE"
        assert set(server.files(alone)) == {"uniref.a3m", "msa.sh"}
        pair = server.ended(server.submit(UBIQUITIN, CRAMBIN, kind="pair", mode="pairgreedy"))
        assert server.files(pair)["pair.a3m"] == f">101\n{UBIQUITIN}\n\0>102\n{CRAMBIN}\n\0"  # its hits have no species
        assert len(begun(tmp_path)) == len(set(begun(tmp_path))) == 6
        assert len({one["id"] for one in (done, alone, pair)}) == 3
        metrics = server.ask("metrics")[1].decode()
        assert 'msa_server_tickets_total{kind="msa",status="COMPLETE"} 2.0' in metrics
        assert 'msa_server_searches_total{how="run"} 6.0' in metrics
    with serving(configured(tmp_path, *config.databases, jackhmmer=config.jackhmmer)) as server:
        assert server.submit(UBIQUITIN, CRAMBIN) == done, "after a restart it is the same ticket"
        assert server.files(done) == files
    with serving(configured(tmp_path, *config.databases, jackhmmer=config.jackhmmer, state=tmp_path / "new")) as server:
        began = time.process_time()
        again = server.ended(server.submit(UBIQUITIN, CRAMBIN))
        assert time.process_time() - began < 1
        assert again["status"] == "COMPLETE", "its searches are known"
        assert again["id"] != done["id"], "ids follow from a secret"
        assert server.files(again) == files
    assert len(begun(tmp_path)) == 6


def test_what_is_refused_and_who_is_answered(tmp_path: Path) -> None:
    with serving(configured(tmp_path, max_body="1KB", allow_host=("box.lan",))) as server:

        def said(path: str, form: Any = None, **headers: str) -> tuple[int, str]:
            status, body = server.ask(path, form, **headers)
            answer = json.loads(body)
            return status, answer.get("message", answer.get("status", ""))

        assert said("ticket/msa", {"q": ">101\nMKT", "mode": "m8output"})[0] == 400
        assert "no 'm8output'" in said("ticket/msa", {"q": ">101\nMKT", "mode": "m8output"})[1]
        assert said("ticket/msa", b"{}", **{"Content-Type": "application/json"})[0] == 415
        assert said("ticket/msa", {"q": ">101\n" + 2000 * "M"})[0] == 413
        assert said("ticket/" + 48 * "0") == (404, "UNKNOWN")
        assert said("result/download/" + 48 * "0")[0] == said("result/download/..%2Fsecret")[0] == 404
        assert "no templates" in said("template/1abc_A")[1]
        assert "it answers POST /ticket/msa" in said("ticket/foldseek/x")[1]
        assert said("/ticket/" + 48 * "0") == (404, "UNKNOWN"), "of a client whose address ends with a slash"
        assert said("queue", Host="box.lan") == (200, "")
        assert "does not answer for evil.example" in said("queue", Host="evil.example")[1]
        assert said("queue", Origin="https://evil.example")[0] == said("queue", Origin="null")[0] == 403
        assert said("queue", Origin=server.url)[0] == 200
        assert server.ask("health")[0] == server.ask("ready")[0] == 200


def test_what_is_known_waits_for_nobody(tmp_path: Path) -> None:
    with serving(configured(tmp_path, tickets_at_once=1)) as server:
        assert server.ended(server.submit(CRAMBIN, mode="env"))["status"] == "COMPLETE"
        (tmp_path / "hold").touch()
        held = server.submit(UBIQUITIN)
        wait_until(lambda: server.tickets.num_running == 1)
        assert server.ended(server.submit(CRAMBIN, mode="all"))["status"] == "COMPLETE"
        assert json.loads(server.ask(f"ticket/{held['id']}")[1])["status"] == "RUNNING"
        (tmp_path / "hold").unlink()
        assert server.ended(held)["status"] == "COMPLETE"


def test_keys_have_limits_and_tickets_of_their_own(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("0123456789abcdef anna jobs=1\nfedcba9876543210 bert\n")
    (tmp_path / "hold").touch()
    with serving(configured(tmp_path, api_key_file=keys, max_queue=2, tickets_at_once=1)) as server:
        assert server.ask("queue")[0] == 401
        assert server.ask("metrics")[0] == 200
        anna, bert = (Running(server.url, server.tickets, key) for key in ("0123456789abcdef", "fedcba9876543210"))
        first = anna.submit(UBIQUITIN)
        wait_until(lambda: server.tickets.num_running == 1)
        assert anna.submit(UBIQUITIN)["id"] == first["id"]
        limited = anna.submit(CRAMBIN)
        assert (limited["status"], limited["id"]) == ("RATELIMIT", "")
        assert "1 tickets of anna" in limited["message"]
        assert json.loads(bert.ask(f"ticket/{first['id']}")[1])["status"] == "UNKNOWN"
        others = [bert.submit(UBIQUITIN[:40] + letter) for letter in "AC"]
        assert [one["status"] for one in others] == ["PENDING", "PENDING"]
        assert json.loads(bert.ask("queue")[1]) == {"queued": 2}
        full = bert.submit(CRAMBIN)
        assert full["status"] == "RATELIMIT"
        assert "2 tickets wait" in full["message"]
        (tmp_path / "hold").unlink()
        assert {bert.ended(one)["status"] for one in others} == {anna.ended(first)["status"]} == {"COMPLETE"}
        assert bert.ask(f"result/download/{first['id']}")[0] == 404
        assert bert.ended(bert.submit(CRAMBIN))["status"] == "COMPLETE"


def test_a_search_that_fails_is_an_error_and_can_be_asked_again(tmp_path: Path) -> None:
    with serving(configured(tmp_path)) as server:
        bad = UBIQUITIN[:30] + "WWWW"
        failed = server.ended(server.submit(bad, CRAMBIN))
        assert failed["status"] == "ERROR"
        assert "Fatal: out of luck" in failed["message"]
        assert server.ended(server.submit(CRAMBIN))["status"] == "COMPLETE"
        Path(server.tickets.databases.uniref[0].tool.program).write_text(
            (tmp_path / "jackhmmer").read_text().replace("WWWW", "nothing")
        )
        again = server.ended(server.submit(bad, CRAMBIN))
        assert (again["id"], again["status"]) == (failed["id"], "COMPLETE")


def test_a_database_that_changes_under_a_search(tmp_path: Path) -> None:
    """What was found in one and the other is nobody's answer; the next ticket is answered by the new one."""
    config = configured(tmp_path)
    (tmp_path / "hold").touch()
    with serving(config) as server:
        asked = server.submit(UBIQUITIN, mode="all")
        wait_until(lambda: begun(tmp_path))
        with config.databases[0].open("a") as file:
            file.write(">more\nMKT\n")
        (tmp_path / "hold").unlink()
        failed = server.ended(asked)
        assert failed["status"] == "ERROR"
        assert "uniref.fasta changed while it was in use" in failed["message"]
        again = server.ended(server.submit(UBIQUITIN, mode="all"))
        assert (again["id"], again["status"]) == (failed["id"], "COMPLETE")
        assert len(begun(tmp_path)) == 2
        config.databases[0].write_text("no database any more")
        assert "begin with '>'" in server.ended(server.submit(UBIQUITIN, mode="all"))["message"]


def test_disks_have_quotas(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("0123456789abcdef anna disk=9KB\nfedcba9876543210 bert disk=4200B\n")
    with serving(configured(tmp_path, api_key_file=keys)) as server:
        server.key = "0123456789abcdef"
        tickets = [server.ended(server.submit(UBIQUITIN[:number])) for number in (40, 41, 42)]
        wait_until(lambda: json.loads(server.ask(f"ticket/{tickets[0]['id']}")[1])["status"] == "UNKNOWN")
        left = [json.loads(server.ask(f"ticket/{one['id']}")[1])["status"] for one in tickets]
        assert left == ["UNKNOWN", "COMPLETE", "COMPLETE"], "the oldest goes"
        assert len(list((tmp_path / "state" / "results").glob("*.tar.gz"))) == 2
        assert len(list((tmp_path / "state" / "jobs").glob("*.json"))) == 2
        assert server.ended(server.submit(UBIQUITIN[:40]))["status"] == "COMPLETE"
        server.key = "fedcba9876543210"
        assert "more than may be kept" in server.ended(server.submit(UBIQUITIN))["message"]
    (folder := tmp_path / "searches").mkdir()
    for number in (3, 1, 2):
        (folder / f"{number}").write_bytes(bytes(100))
        os.utime(folder / f"{number}", (number, number))
    remove_oldest(folder, 250)
    assert sorted(path.name for path in folder.iterdir()) == ["2", "3"]


# --- many, and kills --------------------------------------------------------------------------------------------------


def crowd(server: Running, clients: int, rounds: int) -> list[str]:
    """Clients at the same time, each of which asks for sequences in turn; what was wrong with an answer."""
    draw = random.Random(0)
    sequences = [UBIQUITIN[: 30 + number] for number in range(8)]
    wrong: list[str] = []

    def client(mine: list[list[str]]) -> None:
        for asked in mine:
            try:
                ticket = server.submit(*asked, mode="all")
                while ticket["status"] == "RATELIMIT":
                    time.sleep(0.05)
                    ticket = server.submit(*asked, mode="all")
                text = server.files(server.ended(ticket))["uniref.a3m"]
                if text != "".join(entry(str(101 + at), one) for at, one in enumerate(asked)):
                    wrong.append(text)
            except Exception as error:
                wrong.append(repr(error))

    plans = [[draw.sample(sequences, draw.randint(1, 3)) for _ in range(rounds)] for _ in range(clients)]
    threads = [threading.Thread(target=client, args=(plan,)) for plan in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def test_64_clients_at_once(tmp_path: Path) -> None:
    with serving(configured(tmp_path, max_queue=16)) as server:
        assert crowd(server, NUM_CLIENTS, 1) == []
        assert len(begun(tmp_path)) == len(set(begun(tmp_path))) <= 8, "every sequence is searched once"
        assert server.tickets.num_waiting == server.tickets.num_running == 0


def start(folder: Path, paths: list[Path], *more: str) -> tuple[subprocess.Popen, Running]:
    """The command, and its address."""
    require_program("hhfilter")
    options = ["--databases", *map(str, paths), "--jackhmmer", stand_in(folder), "--port", "0"]
    options += ["--state", str(folder / "state"), "--cache", str(folder / "cache"), "--workers", "2", *more]
    process = subprocess.Popen(
        [sys.executable, "-m", "apps.fold", "msa-server", *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=(folder / "log").open("a"),
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("serving alignments at "), (folder / "log").read_text()
    return process, Running(line.split()[-1].rstrip("/"), None)


def test_a_killed_server_goes_on_with_what_it_had_promised(tmp_path: Path) -> None:
    (tmp_path / "hold").touch()
    made = databases(tmp_path)
    process, server = start(tmp_path, made)
    sequences = [UBIQUITIN[: 40 + number] for number in range(5)]
    tickets = [server.submit(sequence) for sequence in sequences]
    assert {one["status"] for one in tickets} <= {"PENDING", "RUNNING"}
    wait_until(lambda: begun(tmp_path))
    process.kill()
    process.wait()
    (tmp_path / "hold").unlink()
    process, server = start(tmp_path, made)
    for ticket, sequence in zip(tickets, sequences):
        assert server.ended(ticket) == {"id": ticket["id"], "status": "COMPLETE"}
        assert server.files(ticket)["uniref.a3m"] == entry("101", sequence)
    for name in ("secret", "jobs", "results"):
        assert (tmp_path / "state" / name).stat().st_mode & 0o77 == 0
    with pytest.raises(UserError, match="is in use by process"):
        main(["--databases", str(made[0]), "--state", str(tmp_path / "state"), "--port", "0"])
    process.send_signal(signal.SIGTERM)
    assert process.wait(SLOWEST_S) == 0


def test_what_cannot_be_started(tmp_path: Path) -> None:
    paths = databases(tmp_path)
    given = ["--databases", *map(str, paths), "--jackhmmer", stand_in(tmp_path), "--port", "0"]
    given += ["--state", str(tmp_path / "state"), "--cache", str(tmp_path / "cache")]
    for more, said in (
        (["--environmental", "nothing"], "--environmental nothing: no database is called so"),
        (["--environmental", "uniref", "mgnify", "uniprot"], "all of uniref, mgnify, uniprot are environmental"),
        (["--hhfilter", "no-such-program"], "no no-such-program on the PATH"),
        (["--max-queue", "0"], "max_queue=0"),
        (["--hhsearch-databases", "pdb70"], "without --templates"),
        (["--hhsearch-databases", "a", "b", "--templates", str(tmp_path)], "2 --hhsearch-databases; clients know one"),
        (["--templates", str(tmp_path)], "without --hhsearch-databases"),
        (["--port", "70000"], "port=70000"),
    ):
        with pytest.raises(UserError, match=said):
            main([*given, *more])
    with pytest.raises(UserError, match="needs databases"):
        main([])
