"""The examples of the pages: shells and YAML parse, and what they start is a run that could start."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from apps.llm.config import check_combination
from apps.llm.recipes import RECIPES
from core.config import parse

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = DOCS / "examples"
SHELLS = sorted(EXAMPLES.glob("*.sh"))


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


def test_the_page_names_every_example_and_its_shell_blocks_parse() -> None:
    page = "".join((DOCS / f"{name}.md").read_text() for name in ("scaling", "auto_parallelize", "any_module"))
    for path in EXAMPLES.glob("*.*"):
        assert f"examples/{path.name}" in page
    blocks = re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True)
        assert done.returncode == 0, f"{done.stderr}\n{block}"
