"""`megalith llm scaling`: planted laws are found again, within their intervals, and what is no law is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from apps.llm import laws
from apps.llm.__main__ import APP
from apps.llm.laws import Law, fit
from apps.llm.recipes import debug
from apps.llm.scaling import num_parameters
from core.config import UserError, as_json
from core.models.decoder import Decoder

PLANTED = Law(E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28)  # those of Hoffmann et al. 2022, section 3.3
SIZES, TOKENS = (1e7, 4e7, 2e8, 1e9), (2e8, 1e9, 5e9, 3e10)


def observed(noise: float, seed: int = 0, law: Law = PLANTED) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    n, d = (grid.flatten() for grid in np.meshgrid(SIZES, TOKENS))
    losses = np.array([law(*at) for at in zip(n, d, strict=True)])
    return n, d, losses * np.exp(noise * np.random.default_rng(seed).standard_normal(len(losses)))


@pytest.mark.parametrize(
    "law", [PLANTED, Law(E=0.4, A=20.0, B=900.0, alpha=0.2, beta=0.4), Law(E=2.5, A=5e3, B=50.0, alpha=0.6, beta=0.2)]
)
def test_a_law_without_noise_is_found(law: Law) -> None:
    found = fit(*observed(0.0, law=law), samples=20, seed=0)
    for name in ("E", "A", "B", "alpha", "beta"):
        assert getattr(found.law, name) == pytest.approx(getattr(law, name), rel=1e-4), name


def test_planted_constants_lie_within_their_intervals() -> None:
    found = fit(*observed(2e-3), samples=200, seed=0)
    for name in ("E", "A", "B", "alpha", "beta"):
        low, high = found.interval(name)
        assert low < getattr(PLANTED, name) < high, name
        assert low < getattr(found.law, name) < high, name
    for name in ("parameters", "tokens", "loss"):
        low, high = found.interval(name, 1e21)
        assert low < getattr(PLANTED.best(1e21), name) < high, name
    wide = fit(*observed(2e-2), samples=200, seed=0).interval("E")
    assert wide[1] - wide[0] > 3 * (found.interval("E")[1] - found.interval("E")[0])


@pytest.mark.soak
def test_intervals_hold_what_they_claim() -> None:
    """Of 200 planted laws with noise, 95 % intervals of each constant hold at least 80 %: runs are few."""
    held = dict.fromkeys(("E", "A", "B", "alpha", "beta"), 0)
    for seed in range(200):
        found = fit(*observed(5e-3, seed), samples=200, seed=seed)
        for name in held:
            low, high = found.interval(name)
            held[name] += low < getattr(PLANTED, name) < high
    assert min(held.values()) >= 160, held


def test_one_run_that_failed_moves_little() -> None:
    """Huber's loss: a run that is 5 % off counts as a few that are 0.1 % off."""
    n, d, losses = observed(1e-3)
    losses[5] *= 1.05
    found = fit(n, d, losses, samples=20, seed=0).law
    assert found.alpha == pytest.approx(PLANTED.alpha, rel=0.1)
    assert found.beta == pytest.approx(PLANTED.beta, rel=0.1)


def test_the_best_of_a_budget_is_the_least_loss_on_its_line() -> None:
    best = PLANTED.best(1e21)
    assert best.parameters * best.tokens * 6 == pytest.approx(1e21)
    assert best.loss == pytest.approx(PLANTED(best.parameters, best.tokens))
    for by in (0.9, 1.1):
        assert PLANTED(best.parameters * by, best.tokens / by) > best.loss


# --- folders ----------------------------------------------------------------------------------------------------------


def a_run(folder: Path, dim: int, steps: int, loss: float | None = None, **changes: Any) -> Path:
    """A folder as `llm pretrain` leaves it, as far as it is read; its loss is the planted law's."""
    recipe = debug()
    model = replace(recipe.model, dim=dim, num_layers=2, num_heads=2, ffn_dim=2 * dim)
    config = as_json(replace(recipe, model=model, steps=steps, out=folder))
    for name, value in changes.items():
        *path, last = name.split("__")
        inner = config
        for part in path:
            inner = inner[part]
        inner[last] = value
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    tokens = steps * recipe.data.global_batch * recipe.data.sequence_length
    heldout = loss or Law(1.0, 20.0, 30.0, 0.4, 0.3)(num_parameters(folder, model), tokens)
    summary = {"status": "complete", "step": steps, "loss": heldout, "heldout_loss": heldout}
    (folder / "summary.json").write_text(json.dumps(summary))
    rows = [{"step": step + 1, "loss": 5.0 if step < steps - 1 else heldout + 0.1} for step in range(steps)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [a_run(folder / f"{dim}-{steps}", dim, steps) for dim in (8, 16, 32) for steps in (3, 7, 10)]


def scaling(*words: Any) -> int:
    return APP.dispatch(["scaling", *map(str, words)])


def test_the_command_finds_the_law_of_runs(runs: list[Path], tmp_path: Path, capsys) -> None:
    assert scaling(*runs, "--budget", 1e9, "--samples", 40, "--draw", tmp_path / "law.png", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["law"]["alpha"]["value"] == pytest.approx(0.4, rel=1e-3)
    assert found["law"]["B"]["value"] == pytest.approx(30.0, rel=1e-3)
    best = found["budget"]
    assert 6 * best["parameters"]["value"] * best["tokens"]["value"] == pytest.approx(1e9)
    assert best["loss"]["low"] <= best["loss"]["value"] <= best["loss"]["high"]
    with Image.open(tmp_path / "law.png") as picture:
        assert len(set(picture.convert("RGB").getdata())) > 50
    assert scaling(*runs, "--budget", 1e9, "--samples", 40) == 0
    said = capsys.readouterr().out
    for part in ("9 runs", "alpha 0.4 ", "1e+09 FLOPs = 6 N D should train", "the law only guesses"):
        assert part in said
    assert scaling("--runs", *runs, "--loss", "train", "--samples", 20, "--json") == 0
    last = json.loads(capsys.readouterr().out)["runs"][0]["loss"]
    assert last == pytest.approx(found["runs"][0]["loss"] + 0.1), "the mean of the last tenth of the steps"


def test_parameters_are_those_that_multiply_every_token(runs: list[Path]) -> None:
    model = replace(debug().model, dim=16, num_layers=2, num_heads=2, ffn_dim=32)
    named = dict(Decoder(model).named_parameters())
    inner = sum(p.numel() for name, p in named.items() if name.startswith("blocks"))
    found = num_parameters(runs[0], model)
    assert inner <= found <= inner + 2 * 16, "the blocks, and a norm behind them"
    assert num_parameters(runs[0], replace(model, vocab_size=1000)) == found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data__path": "elsewhere"}, "data.path=.*elsewhere: losses of different data"),
        ({"data__sequence_length": 64}, r"data\.sequence_length=32 and .* 64"),
        ({"data__tokenizer": "bpe"}, r"data\.tokenizer=byte"),
        ({"source": "somewhere"}, "megalith llm finetune"),
        ({"model__moe": {"num_experts": 4}}, "a model with experts"),
    ],
)
def test_runs_of_another_kind_are_refused(runs: list[Path], tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        scaling(*runs, a_run(tmp_path / "other", 64, 12, loss=2.0, **change))


def test_what_cannot_be_fitted_is_refused(runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="0 runs, and a law of five constants is fitted to at least 6"):
        scaling()
    with pytest.raises(UserError, match="5 runs, and a law"):
        scaling(*runs[:5])
    with pytest.raises(UserError, match="is given twice"):
        scaling(*runs, runs[0])
    with pytest.raises(UserError, match="2 numbers of parameters, and a law needs at least 3"):
        scaling(*runs[:6])
    line = [a_run(tmp_path / f"line-{n}", 8 * n, 4 * n * n) for n in range(1, 7)]
    with pytest.raises(UserError, match="the tokens follow from the parameters"):
        scaling(*line)
    with pytest.raises(UserError, match=r"holds no config\.json"):
        scaling(*runs, tmp_path / "nowhere")


@pytest.mark.parametrize("kind", ["stopped", "interrupted", "no heldout", "diverged", "unread"])
def test_a_run_that_did_not_end_is_refused(runs: list[Path], tmp_path: Path, kind: str) -> None:
    folder = a_run(tmp_path / kind, 64, 10)
    path = folder / "summary.json"
    summary = json.loads(path.read_text())
    changes = {"stopped": {"step": 4, "status": "stopped"}, "diverged": {"heldout_loss": float("nan")}}
    said = {
        "stopped": "is at step 4 of 10: the run did not end",
        "interrupted": "has no summary.json: the run did not end",
        "no heldout": "no held-out loss; give --loss train",
        "diverged": "has a loss of nan",
        "unread": "summary.json cannot be read",
    }[kind]
    path.write_text(json.dumps(summary | changes.get(kind, {})))
    if kind == "interrupted":
        path.unlink()
    if kind == "no heldout":
        path.write_text(json.dumps({k: v for k, v in summary.items() if k != "heldout_loss"}))
    if kind == "unread":
        path.write_text("{")
    with pytest.raises(UserError, match=said):
        scaling(*runs, folder)


@pytest.mark.parametrize(("option", "said"), [("--samples=3", "at least 20"), ("--budget=0", "at least 1"),
                                              ("--draw=law.svg", "is a PNG"), ("--los=train", "loss")])  # fmt: skip
def test_options_out_of_range_are_refused(runs: list[Path], option: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        scaling(*runs, option)


def test_a_fit_without_hubers_weights_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laws, "DELTA", 1e9)
    n, d, losses = observed(1e-3)
    losses[5] *= 1.05
    assert fit(n, d, losses, samples=20, seed=0).law.alpha != pytest.approx(PLANTED.alpha, rel=0.1)
