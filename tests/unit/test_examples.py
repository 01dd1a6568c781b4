"""The examples of the pages: shells and YAML parse, and what they start is a run that could start."""

import re
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from apps.llm.config import check_combination
from apps.llm.recipes import RECIPES, default_recipe
from core.config import parse

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = DOCS / "examples"
PAGES = "scaling", "elastic", "auto_parallelize", "any_module"
ELASTIC = EXAMPLES / "elastic_slurm.sh"
SHELLS = sorted({*EXAMPLES.glob("*.sh")} - {ELASTIC})


def check_run(words: list[str], nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The words after `torchrun`: that many nodes, and a configuration whose mesh fits all of their ranks."""
    per_node = int(words[words.index("--nproc-per-node") + 1])
    assert words[words.index("-m") + 1 :][:2] == ["apps.llm", "pretrain"]
    monkeypatch.setenv("WORLD_SIZE", str(nodes * per_node))
    monkeypatch.setenv("RANK", "0")
    config = parse(RECIPES, words[words.index("pretrain") + 1 :], "llm pretrain", default="debug")
    mesh = check_combination(config)
    assert mesh.data_ranks * mesh.tp * mesh.cp * mesh.pp == nodes * per_node
    assert config.resume == "auto"


def check_replica(words: list[str], store: str, replicas: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """The words after `megalith`: a replica of that store whose mesh fits its ranks. Returns how many they are."""
    assert words[:2] == ["llm", "pretrain"]
    ranks = int(words[words.index("--nproc") + 1])
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("RANK", "0")
    config = parse(RECIPES, words[2:], "llm pretrain", default="debug")
    mesh = check_combination(config)
    assert mesh.data_ranks * mesh.tp * mesh.cp * mesh.pp == ranks
    assert config.resume == "auto"
    assert config.elastic.store == store
    assert config.elastic.min <= replicas
    return ranks


@pytest.mark.parametrize("script", SHELLS, ids=lambda path: path.name)
def test_shell_scripts(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text = script.read_text().replace("\\\n", " ")
    line = next(line for line in text.splitlines() if " -m apps.llm " in line)
    words = shlex.split(line[line.index("torchrun ") :].partition("||")[0])
    nodes = re.search(r"^#SBATCH --nodes=(\d+)$", text, re.MULTILINE)
    check_run(words, int(nodes[1]) if nodes else 4, monkeypatch)


def test_a_broken_shell_script_is_seen(tmp_path: Path) -> None:
    (tmp_path / "broken.sh").write_text(SHELLS[0].read_text() + "\nif true; then\n")
    assert subprocess.run(["bash", "-n", tmp_path / "broken.sh"], capture_output=True).returncode != 0


def test_kubernetes(monkeypatch: pytest.MonkeyPatch) -> None:
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    assert [part["kind"] for part in (service, job)] == ["Service", "Job"]
    spec: dict[str, Any] = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    words = [part for word in container["args"] for part in (word.split("=", 1) if word.startswith("--") else [word])]
    check_run(words, spec["completions"], monkeypatch)
    assert int(words[words.index("--nnodes") + 1]) == spec["completions"] == spec["parallelism"]
    # The name under which the pods meet is that of the first pod, below the service that knows the job's pods.
    host = words[words.index("--rdzv-endpoint") + 1].split(":")[0]
    assert host == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == int(words[words.index("--nproc-per-node") + 1])
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    assert all(isinstance(variable["value"], str) for variable in container["env"])


def test_replicas_on_kubernetes(monkeypatch: pytest.MonkeyPatch) -> None:
    service, store, replicas = yaml.safe_load_all((EXAMPLES / "elastic.yaml").read_text())
    assert [part["kind"] for part in (service, store, replicas)] == ["Service", "Pod", "Deployment"]
    assert service["spec"]["selector"] == store["metadata"]["labels"]
    ((container,), port) = store["spec"]["containers"], service["spec"]["ports"][0]["port"]
    assert container["command"] == ["python", "-m", "core.members", f"0.0.0.0:{port}"]
    template = replicas["spec"]["template"]
    assert replicas["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    assert service["spec"]["selector"] != template["metadata"]["labels"]
    (container,) = template["spec"]["containers"]
    words = [*container["command"], *container["args"]]
    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    assert words[0] == "megalith"
    ranks = check_replica(words[1:], f"{service['metadata']['name']}:{port}", replicas["spec"]["replicas"], monkeypatch)
    assert container["resources"]["limits"]["nvidia.com/gpu"] == ranks
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in template["spec"]["volumes"]}


def test_replicas_on_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is run, with an sbatch that writes down what it is given."""
    said = tmp_path / "said"
    (tmp_path / "sbatch").write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" END >> {said}\nwc -l < {said}\n')
    (tmp_path / "sbatch").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "STORE_NODE": "node-0"}
    done = subprocess.run(["bash", ELASTIC], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    jobs = [job.splitlines() for job in said.read_text().split("END\n")[:-1]]
    store, replicas, end = ({a: b for a, b in pairwise(job) if a.startswith("-")} for job in jobs)
    address = store["--wrap"].removeprefix("python -m core.members ")
    assert address == f"{store['--nodelist']}:29400" == "node-0:29400"
    words = shlex.split(replicas["--wrap"])
    assert words[:2] == ["srun", "megalith"]
    ranks = check_replica(words[2:], address, int(replicas["--array"].split("-")[1]) + 1, monkeypatch)
    assert int(replicas["--gpus-per-node"]) == ranks
    numbers = [str(sum(len(job) + 1 for job in jobs[: place + 1])) for place in range(2)]  # what sbatch has answered
    assert replicas["--dependency"] == f"after:{numbers[0]}"
    assert (end["--dependency"], end["--wrap"]) == (f"afterany:{numbers[1]}", f"scancel {numbers[0]}")


def test_the_page_names_every_example_and_its_shell_blocks_parse() -> None:
    page = "".join((DOCS / f"{name}.md").read_text() for name in PAGES)
    for path in EXAMPLES.glob("*.*"):
        assert f"examples/{path.name}" in page
    blocks = re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True)
        assert done.returncode == 0, f"{done.stderr}\n{block}"


@pytest.mark.parametrize("page", ["slow_networks", "local_training", "elastic"])
def test_commands_of_messages_could_run_and_get_to_what_they_show(page: str) -> None:
    commands = re.findall(r"^megalith llm pretrain ([^#\n]*)", (DOCS / f"{page}.md").read_text(), re.MULTILINE)
    assert commands
    for command in commands:
        words = shlex.split(command)
        config = parse(RECIPES, words, "llm pretrain", default=default_recipe(words))
        check_combination(config)
        assert max(config.local.start + config.local.every, config.comm.start + 1) <= config.steps, command
