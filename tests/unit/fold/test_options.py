"""Every option of the fold commands is read by a run, or refused where a run would not read it."""

import threading
import urllib.parse
import urllib.request
from importlib.util import find_spec

import pytest

from apps.fold import msa_server
from apps.fold.__main__ import APP
from apps.fold.search import on_ray
from apps.fold.service import client
from apps.fold.toy import DEMO_WEIGHTS, STRUCTURES
from apps.fold.training.config import _OWN_MODELS
from apps.fold.training.plan import FoldTrainPlanConfig, without_effect
from tests.support.fake_ray import FakeRay
from tests.support.fold import GOLDEN, one_block
from tests.support.options import TRAINING, Probe
from tests.support.programs import require_program

SEQUENCE = "TTCCPSIVARSNFNVCRLPG"
_METHODS = ["violations", *(["amber"] if find_spec("openmm") else [])]
COMMANDS = {
    "predict": [f"OUT/in.fasta --out OUT/out --num-recycles 0 --overwrite{more}" for more in ("", " --relax best")],
    "plan": [
        *("--length 60", "--length 60 --nproc 2", "--length 60 --device cpu --memory 4GiB"),
        "--recipe debug --data.crop 12 --num-recycles 0 --max-msa 1 --max-extra-msa 1",
    ],
    "msa": [
        *(f"OUT/in.fasta --databases OUT/db.fasta --out OUT/out{more}" for more in ("", " --ray local")),
        "OUT/in.fasta --server URL --out OUT/out",
    ],
    "msa-server": [f"--databases OUT/db.fasta --port 0{more}" for more in ("", " --api-key-file OUT/keys")],
    "train": ["--recipe debug --steps 1 --out OUT/run --device cpu --optim.schedule.warmup-steps 0"],
    "relax": [f"{STRUCTURES}/1ejg.pdb --out OUT/out --method {method}" for method in _METHODS],
    "evaluate": [f"--predicted {STRUCTURES}/1ejg.pdb --reference {STRUCTURES}/1ejg.pdb"],
    "convert": [f"--model {DEMO_WEIGHTS} --out OUT/weights", f"--model {DEMO_WEIGHTS} --out OUT/weights.npz"],
    "doctor": [f"--golden {GOLDEN}", f"--golden {GOLDEN} --limit 1e-2"],
}
"""command -> words of each of its modes"""
# Read, as part of what is handed on, by runs that have no use for them.
ALSO = {"predict": ["max_template_date"], "train": ["data.max_template_date"]}
VALUES = TRAINING | {"max_template_date": "2018-04-30", "data.max_template_date": "2018-04-30", "memory": "3GiB"}

VALUES_ALONE = ["compile", "optim.lr", "optim.betas", "optim.eps", "optim.weight_decay"]
"""Options that a plan of training hands to what it runs, and that its figures are the same without."""


@pytest.fixture
def asked_once(monkeypatch):
    """A server of alignments answers one request, and ends; a client's server says what it would of a sequence."""

    def ask(config, databases, keys, listener):
        def request():
            try:
                query = urllib.parse.urlencode({"q": f">101\n{SEQUENCE}", "mode": "env"}).encode()
                key = {"X-API-Key": "0123456789abcdef"}
                asked = urllib.request.Request(f"http://127.0.0.1:{listener.port}/ticket/msa", query, key)
                with urllib.request.urlopen(asked, timeout=60) as answer:
                    answers.append(answer.status)
            finally:
                listener.should_exit = True

        threading.Thread(target=request, daemon=True).start()

    answers = []
    monkeypatch.setattr(msa_server, "_announce", ask)
    files = {"uniref.a3m": f">101\n{SEQUENCE}\n\0"}
    monkeypatch.setattr(client.Service, "_ticket", lambda service, *_: (service.wait_s, files)[1])
    yield
    assert set(answers) <= {200}, answers


@pytest.mark.parametrize(("command", "mode"), [(c, mode) for c, modes in COMMANDS.items() for mode in modes])
def test_an_option_is_obeyed_or_refused(command, mode, tmp_path, asked_once, monkeypatch):
    if "--databases" in mode:
        require_program("jackhmmer")
    if command == "msa-server":
        require_program("hhfilter")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(_OWN_MODELS, "debug", one_block)
    monkeypatch.setattr(on_ray, "find_ray", lambda: FakeRay({"a": {"CPU": 2.0, "memory": 8e9}}))
    (tmp_path / "in.fasta").write_text(f">one\n{SEQUENCE}\n")
    (tmp_path / "out" / "one").mkdir(parents=True)
    (tmp_path / "db.fasta").write_text(f">a\n{SEQUENCE}\n>b\n{SEQUENCE[::-1]}\n")
    (tmp_path / "keys").write_text("0123456789abcdef anna\n")
    words = mode.replace("OUT", str(tmp_path)).replace("URL", "http://127.0.0.1:9").split()
    given = ["--model", str(DEMO_WEIGHTS)] if command == "plan" and "--recipe" not in words else []
    probe = Probe(APP.dispatch, [command, *words, *given], VALUES, ALSO.get(command, ()), notes=["_key"])
    if isinstance(config := probe.config(), FoldTrainPlanConfig):
        probe.ignored, probe.held = without_effect(config), VALUES_ALONE
    probe.check()
