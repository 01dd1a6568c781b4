"""`fold msa --server` and `fold predict --msa-server`: with our server, and with servers that misbehave."""

import gzip
import io
import json
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from apps.fold import predict
from apps.fold.complexes import find_complex
from apps.fold.features.alignment import check_query, read_alignment
from apps.fold.features.sequences import read_fasta
from apps.fold.msa import main
from apps.fold.service import client, connection
from apps.fold.service.answers import packed
from apps.fold.service.client import Service
from apps.fold.service.connection import GivenUp
from core.config import UserError
from core.web.key import read_key
from tests.support.listening import CERTIFICATE, Quiet, listening
from tests.support.msa_server import CRAMBIN, UBIQUITIN, begun, configured, serving

ENTRY = f">101\n{CRAMBIN}\n>hit\n{CRAMBIN[:-1]}-\n\0"
FILES = {"uniref.a3m": ENTRY.encode(), "bfd.mgnify30.metaeuk30.smag30.a3m": f">101\n{CRAMBIN}\n\0".encode()}
Answer = Callable[..., tuple[Any, ...]]


@contextmanager
def server(answer: Answer, certificate: Path | None = None) -> Iterator[tuple[str, list[str]]]:
    """A server whose answers, (status, body, headers …), a function of path, body and headers gives.

    Its address, and the paths that were asked for.
    """
    asked: list[str] = []

    class Handler(Quiet):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            asked.append(self.path)
            status, content, *more = answer(self.path, body, self.headers)
            self.send_response(status)
            for name, value in [("Content-Length", str(len(content))), *more]:
                self.send_header(name, value)
            if status == 302:
                self.send_header("Location", "http://127.0.0.1:9/")
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

    with listening(Handler, certificate) as url:
        yield url, asked


def said(**content: Any) -> bytes:
    return json.dumps(content).encode()


def answering(files: bytes) -> Answer:
    return lambda path, *_: (200, files if "/result/" in path else said(id="x", status="COMPLETE"))


@pytest.fixture
def fasta(tmp_path: Path) -> Path:
    path = tmp_path / "in.fasta"
    path.write_text(f">cram\n{CRAMBIN}\n>two\n{UBIQUITIN}:{CRAMBIN}:{UBIQUITIN}\n>bad\nMK7\n")
    return path


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short looks, and pauses without chance."""
    monkeypatch.setattr(client, "_LOOK_S", 0.02)
    monkeypatch.setattr(connection.random, "uniform", lambda low, high: low)


def service(url: str, folder: Path, pauses: list[float] | None = None, wait_s: float = 60.0) -> Service:
    return Service(url, None, folder, wait_s, sleep=(pauses if pauses is not None else []).append)


def test_alignments_of_our_server(fasta: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = tmp_path / "keys"
    keys.write_text("0123456789abcdef anna\n")
    (tmp_path / "key").write_text("0123456789abcdef\n")
    with serving(configured(tmp_path, api_key_file=keys)) as running:
        options = [
            str(fasta),
            "--server",
            running.url,
            "--cache",
            str(tmp_path / "mine"),
            "--out",
            str(tmp_path / "out"),
        ]
        options += ["--server-key-file", str(tmp_path / "key")]
        assert main(options) == 2, "for the record that is none"
        told = capsys.readouterr()
        assert f"note: the sequences of 2 records (168 residues) are sent to {running.url}" in told.err
        assert "record 3 (bad)" in told.err
        assert "cram: 2 rows" in told.out
        assert "two: 4 rows" in told.out
        searched = begun(tmp_path)
        assert main(options) == 2
        told = capsys.readouterr()
        assert "note:" not in told.err, "what is known leaves no machine"
        assert begun(tmp_path) == searched
        assert main([*options[:-4], "--cache", str(tmp_path / "other")]) == 2
        assert "it refuses (401): this server asks for a key" in capsys.readouterr().err
    found = read_alignment(tmp_path / "out" / "cram.a3m")
    check_query(found, CRAMBIN, "cram")
    assert found.names == ("query", "hit/1-9", "hit/1-9")
    record = read_fasta(fasta)[0][1]
    target = find_complex(record, tmp_path / "out", None, False)
    assert target.files == (tmp_path / "out" / "two.a3m",)
    assert target.lengths == (76, 46, 76)
    whole = (tmp_path / "out" / "two.a3m").read_text()
    assert whole.startswith(f"#76,46\t2,1\n>101\t102\n{UBIQUITIN}{CRAMBIN}\n")
    assert f"\n>101\n{UBIQUITIN}{46 * '-'}\n>hit/1-9\n" in whole
    assert f"\n>102\n{76 * '-'}{CRAMBIN}\n>hit/1-9\n" in whole


def test_predictions_with_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fasta = tmp_path / "in.fasta"
    fasta.write_text(f">cram\n{CRAMBIN[:20]}\n>wrong\n{CRAMBIN[:20]}WWWW\n")
    options = [str(fasta), "--out", str(tmp_path / "out"), "--num-recycles", "0", "--no-plots", "--device", "cpu"]
    options += ["--msa-server-folder", str(tmp_path / "mine"), "--msa-server"]
    with serving(configured(tmp_path)) as running:
        assert predict.main([*options, running.url]) == 2
    told = capsys.readouterr()
    assert f"note: the sequences of 2 records (44 residues) are sent to {running.url}" in told.err
    assert "record 2 (wrong)" in told.err
    assert "Fatal: out of luck" in told.err
    summary = (tmp_path / "out" / "summary.csv").read_text().splitlines()
    assert summary[1].startswith("cram,20,folded,2,")
    assert summary[2].startswith("wrong,24,failed: ")
    with pytest.raises(UserError, match="--msa and --msa-server"):
        predict.main([*options, running.url, "--msa", str(tmp_path)])


def test_what_ranks_will_refuse_is_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before ranks begin: of complexes, of residues without atoms where they are relaxed, of single chains of one."""
    monkeypatch.setattr(predict, "launch", lambda *_: 0)
    fasta = tmp_path / "in.fasta"
    fasta.write_text(f">cram\n{CRAMBIN}\n>two\n{UBIQUITIN}:{CRAMBIN}\n>odd\nXX{CRAMBIN}\n")
    words = [str(fasta), "--nproc", "2", "--device", "cpu", "--msa-server-folder", str(tmp_path / "mine")]
    with server(answering(packed(FILES))) as (url, asked):
        assert predict.main([*words, "--msa-server", url, "--relax", "best"]) == 0
        assert "note: the sequences of 1 record (46 residues) are sent" in capsys.readouterr().err
        assert asked == ["/ticket/msa", "/result/download/x"]
        fasta.write_text(f">cram\n{CRAMBIN}\n>ubi\n{UBIQUITIN}\n")
        monkeypatch.setattr(predict, "is_multimer", lambda _: True)
        assert predict.main([*words, "--msa-server", url]) == 0
        assert "note: the sequences of 1 record (122 residues) are sent" in capsys.readouterr().err


def test_one_policy_of_retries(tmp_path: Path) -> None:
    """Errors of the server, then a full queue, then a wait; all of it until the answer is there."""
    script = [
        (500, b"oops"),
        (429, said(status="RATELIMIT", reason="slowly")),
        (200, said(id="x", status="PENDING")),
        (200, said(id="x", status="RUNNING")),
        (502, b""),
        (200, said(id="x", status="COMPLETE")),
        (503, b""),
        (200, packed(FILES)),
    ]
    pauses: list[float] = []
    record = read_fasta(_one(tmp_path))[0][0]
    with server(lambda *_: script.pop(0)) as (url, asked):
        path = service(url, tmp_path, pauses).alignment(record)
        assert service(url, tmp_path).alignment(record) == path
    assert path.read_text() == f">query\n{CRAMBIN}\n>hit\n{CRAMBIN[:-1]}-\n"
    assert asked == [*3 * ["/ticket/msa"], *3 * ["/ticket/x"], *2 * ["/result/download/x"]]
    assert pauses == [1.0, 1.0, 0.02, 0.03, 1.0, 1.0]


def _one(folder: Path) -> Path:
    path = folder / "one.fasta"
    path.write_text(f">cram\n{CRAMBIN}\n")
    return path


def _tar(name: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        member = tarfile.TarInfo(name)
        member.size = 3
        tar.addfile(member, io.BytesIO(b"MKT"))
    return out.getvalue()


def _long(size: int, name: str) -> bytes:
    """A member of so many zeros, or, in the header of one, a name."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        member = tarfile.TarInfo(name)
        member.size = size
        tar.addfile(member, io.BytesIO(bytes(size)))
    return out.getvalue()


def _link() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        member = tarfile.TarInfo("uniref.a3m")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(member)
    return out.getvalue()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (answering(_tar("../../uniref.a3m")), r"names '../../uniref.a3m', outside of its folder"),
        (answering(_tar("/etc/cron.d/uniref.a3m")), "outside of its folder"),
        (answering(_link()), "outside of its folder"),
        (answering(b"<html>"), "is no tar.gz"),
        (answering(packed(FILES)[:60]), "is no tar.gz"),
        (answering(gzip.compress(b"")), "holds no uniref.a3m|is no tar.gz"),
        (answering(packed({"other": b""})), "holds no uniref.a3m"),
        (answering(packed({"uniref.a3m": ENTRY.replace("101", "102").encode()})), "query '102' that was not asked"),
        (answering(packed({"uniref.a3m": f"> \n{CRAMBIN}\n".encode()})), "query '' that was not asked"),
        (answering(packed({"uniref.a3m": f"#101\n{CRAMBIN}\n".encode()})), "query '' that was not asked"),
        (answering(packed({"uniref.a3m": b">101\nMKT\n"})), "a query of 3 residues, not of 46"),
        (answering(packed({"uniref.a3m": f">101\n{CRAMBIN}\n>x\nMK\n".encode()})), "columns"),
        (lambda *_: (200, said(status="ERROR", message="no such\nmode")), "could not align it: no such mode"),
        (
            lambda path, *_: (404 if "result" in path else 200, said(id="x", status="COMPLETE", message="it is gone")),
            "sends no result: it is gone",
        ),
        (lambda *_: (200, said(id="x", status="RUNNING")), "not aligned it within 0.01 s"),
    ],
)
def test_answers_that_are_none(answer: Answer, message: str, tmp_path: Path) -> None:
    """A line for the record; the next is asked for all the same."""
    record = read_fasta(_one(tmp_path))[0][0]
    with server(answer) as (url, _):
        asked = service(url, tmp_path, wait_s=0.01)
        with pytest.raises(UserError, match=message) as caught:
            asked.alignment(record)
        assert not isinstance(caught.value, GivenUp)
        assert not asked.kept(record).exists()
    assert not list(tmp_path.rglob("uniref.a3m"))
    assert not (tmp_path.parent / "uniref.a3m").exists()


@pytest.mark.parametrize(
    ("answer", "message", "requests"),
    [
        (lambda *_: (403, b"banned"), r"it refuses \(403\): banned", 1),
        (lambda *_: (401, said(message="a key")), r"it refuses \(401\): a key", 1),
        (lambda *_: (200, b"<html>"), "not of ColabFold's protocol", 1),
        (lambda *_: (200, b"[1]"), "not of ColabFold's protocol", 1),
        (lambda *_: (200, 100_000 * b"["), "not of ColabFold's protocol", 1),
        (lambda *_: (404, b"nginx"), "it answers 404", 1),
        (lambda *_: (302, b""), "it answers 302", 1),
        (lambda *_: (500, b"oops"), r"it does not answer \(it answers 500: oops\), asked 6 times", 6),
    ],
)
def test_a_server_that_is_given_up(answer: Answer, message: str, requests: int, fasta: Path, tmp_path: Path) -> None:
    pauses: list[float] = []
    records = read_fasta(fasta)[0]
    with server(answer) as (url, asked):
        one = service(url, tmp_path, pauses)
        for record in records:
            with pytest.raises(GivenUp, match=message):
                one.alignment(record)
        assert len(asked) == requests, "the others do not ask it"
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0][: requests - 1]


@pytest.mark.parametrize(("login", "key", "sent"), [("a%40b:c@", None, "Basic YUBiOmM="), ("a:b@", "k", "Bearer k")])
def test_keys_are_sent(login: str, key: str | None, sent: str, tmp_path: Path) -> None:
    headers: list[str] = []

    def noting(path: str, body: bytes, given: Any) -> tuple[Any, ...]:
        headers.append(given["Authorization"])
        return answering(packed(FILES))(path, body)

    with server(noting) as (url, _):
        asked = Service(url.replace("//", f"//{login}"), key, tmp_path, 60.0)
        asked.alignment(read_fasta(_one(tmp_path))[0][0])
        assert asked.url == url
    assert headers == 2 * [sent]


def test_a_server_that_is_down(fasta: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    """One line for each record, exit code 2; what is known is there all the same."""
    monkeypatch.setattr(connection, "_PAUSE_S", 0.0)
    url = "http://anna:secret@127.0.0.1:9"
    asked = Service(url, None, tmp_path / "mine", 60.0)
    kept = asked.kept(read_fasta(fasta)[0][0])
    kept.parent.mkdir(parents=True)
    kept.write_text(f">query\n{CRAMBIN}\n")
    options = [str(fasta), "--server", url, "--cache", str(tmp_path / "mine"), "--out", str(tmp_path / "out")]
    assert main(options) == 2
    told = capsys.readouterr()
    assert (tmp_path / "out" / "cram.a3m").exists()
    lines = [line for line in told.err.splitlines() if line.startswith("error:")]
    assert len(lines) == 2
    assert "record 2 (two): the server http://127.0.0.1:9: it does not answer" in told.err
    assert "secret" not in told.err


def test_a_server_says_how_long_to_wait(tmp_path: Path) -> None:
    script = [(503, said(status="MAINTENANCE"), ("Retry-After", "7")), (429, b"", ("Retry-After", "Fri, 1 Jan"))]
    pauses: list[float] = []
    with server(lambda *_: script.pop(0) if script else answering(packed(FILES))(*_)) as (url, _):
        service(url, tmp_path, pauses).alignment(read_fasta(_one(tmp_path))[0][0])
    assert pauses == [7.0, 2.0]


def test_limits_of_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its size as it comes, of the time for all of it, and of that between two pieces."""
    record, whole = read_fasta(_one(tmp_path))[0][0], packed(FILES)

    def late(path: str, body: bytes, *_: Any) -> tuple[Any, ...]:
        time.sleep(0.3)
        return answering(whole)(path, body)

    with server(late) as (url, asked):
        monkeypatch.setattr(connection, "_MOST_BYTES", len(whole) - 1)
        with pytest.raises(UserError, match=r"to result has more than .* bytes") as caught:
            service(url, tmp_path).alignment(record)
        assert not isinstance(caught.value, GivenUp)
        monkeypatch.setattr(connection, "_MOST_BYTES", len(whole))
        monkeypatch.setattr(connection, "_SLOWEST_S", 0.1)
        with pytest.raises(UserError, match=r"to ticket takes more than 0\.1 s"):
            service(url, tmp_path).alignment(record)
        monkeypatch.setattr(connection, "_TIMEOUT_S", 0.05)
        asked.clear()
        with pytest.raises(GivenUp, match=r"does not answer \(timed out\), asked 6 times"):
            service(url, tmp_path).alignment(record)
        assert len(asked) == 6


@pytest.mark.parametrize("packed_small", [_long(1 << 20, "uniref.a3m"), _long(0, (1 << 20) * "a")])
def test_what_unpacks_to_too_much(packed_small: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_MOST_BYTES", 1 << 19)
    with server(answering(packed_small)) as (url, _), pytest.raises(UserError, match="unpacks to more than 512 KiB"):
        service(url, tmp_path).alignment(read_fasta(_one(tmp_path))[0][0])


def test_the_proxy_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = read_fasta(_one(tmp_path))[0][0]
    with server(answering(packed(FILES))) as (url, asked):
        monkeypatch.setenv("http_proxy", url)
        assert service("http://alignments.invalid", tmp_path).alignment(record).exists()
        assert asked == ["http://alignments.invalid/ticket/msa", "http://alignments.invalid/result/download/x"]
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert service(url, tmp_path).alignment(record).exists()
        assert len(asked) == 4
    monkeypatch.setenv("http_proxy", "gopher://127.0.0.1")
    with pytest.raises(UserError, match="mend HTTP_PROXY"):
        service(url, tmp_path)


def test_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that nobody vouches for is told of at once; the environment may name who does."""
    record = read_fasta(_one(tmp_path))[0][0]
    with server(answering(packed(FILES)), CERTIFICATE) as (url, asked):
        pauses: list[float] = []
        with pytest.raises(GivenUp, match=r"certificate is not trusted \(self-signed certificate\)"):
            service(url, tmp_path, pauses).alignment(record)
        assert asked == pauses == []
        monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
        assert service(url, tmp_path).alignment(record).exists()
        assert len(asked) == 2
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none"))
    with pytest.raises(UserError, match="SSL_CERT_FILE"):
        service(url, tmp_path)


def test_what_is_refused(tmp_path: Path) -> None:
    for words, message in (
        (["--server", "ftp://x"], "ftp://x is no address of a server"),
        (["--server", "http://x:99999"], "http://x:99999 is no address"),
        (["--server", "http://anna:secret@a..b/"], "^http://a..b/ is no address"),
        (["--server", "http://x", "--databases", "db.fasta"], "--databases with --server"),
        (["--databases", "db.fasta", "--server-wait-s", "3"], "--server-wait-s without --server"),
        (["--server", "http://x", "--server-wait-s", "0"], "server_wait_s=0"),
        (["--server", "http://x", "--server-key-file", str(tmp_path / "none")], "cannot read the key"),
    ):
        with pytest.raises(UserError, match=message):
            main([str(_one(tmp_path)), *words])
    (tmp_path / "key").write_text("schlüssel\n")
    with pytest.raises(UserError, match="printable ASCII"):
        read_key(tmp_path / "key")


def test_without_httpx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"httpx2, which is not installed; pip install 'megalith\[fold\]'"):
        main([str(_one(tmp_path)), "--server", "http://127.0.0.1:9"])
