"""`llm` with a masked language model: the mask token, training and export, measuring, what is refused by name."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from apps.llm import generate
from apps.llm.__main__ import APP
from apps.llm.batches import training_batches
from apps.llm.config import check_objective
from apps.llm.corpus import DataConfig, prepare
from apps.llm.evaluate import EvaluateConfig, evaluate
from apps.llm.recipes import RECIPES, default_recipe
from apps.llm.tokenizer import MASK, byte_tokenizer, load_tokenizer, train_bpe
from apps.serve.model import find_model
from core.config import UserError

TEXT = "A masked model reads both sides of a word that it does not see. "


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """Some documents, by bytes, in sequences of 16."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(12):
        (folder / f"{number}.txt").write_text(f"{number}. " + TEXT * (1 + number % 3))
    return DataConfig(
        path=str(folder), suffixes=(".txt",), tokenizer="byte", mask_token=True, sequence_length=16, global_batch=4,
        cache=str(folder / "cache"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(text: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of --objective mlm, which without a recipe takes the small BERT."""
    out = tmp_path_factory.mktemp("masked") / "run"
    options = ["--data.path", text.path, "--data.sequence-length", "16", "--data.cache", text.cache, "--out", str(out)]
    options += ["--data.suffixes", ".txt", "--data.heldout-fraction", "0.3", "--data.global-batch", "4"]
    assert APP.dispatch(["pretrain", "--objective", "mlm", "--steps", "2", *options]) == 0
    return out


def test_a_tokenizer_made_here_has_a_mask_token_where_one_is_asked_for(tmp_path: Path) -> None:
    for made, mask in ((byte_tokenizer(mask=True), 257), (train_bpe([TEXT], 300, mask=True), 1)):
        made.save(tmp_path / str(mask))
        for tokenizer in (made, load_tokenizer(tmp_path / str(mask)),
                          load_tokenizer(tmp_path / str(mask) / "tokenizer.json")):  # fmt: skip
            assert tokenizer.mask_id == mask
            assert mask not in tokenizer.encode(f"text {MASK} text").tolist(), "text is only text"
    assert byte_tokenizer().mask_id is None
    assert train_bpe([TEXT], 300).mask_id is None


def test_the_run_of_one_command(run: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    assert (config["model"]["family"], config["objective"], config["data"]["mask_token"]) == ("bert", "mlm", True)
    figures = json.loads((run / "summary.json").read_text())
    assert figures["heldout_pseudo_perplexity"] > 1
    assert "heldout_bits_per_byte" not in figures


def test_evaluation_is_that_of_transformers_masked_one_by_one(run: Path, text: DataConfig) -> None:
    """Pseudo-perplexity as published, and with seven passes over the same tokens another one; of the run, and of hf."""
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    theirs = AutoModelForMaskedLM.from_pretrained(run / "hf").eval()
    mask = AutoTokenizer.from_pretrained(run / "hf").mask_token_id
    stream = torch.tensor(
        [id for n in sorted(map(str, range(12))) for id in (256, *Path(text.path, f"{n}.txt").read_bytes())]
    )
    total, count = 0.0, 0
    with torch.no_grad():
        for first in range(0, len(stream), 16):
            ids = stream[first : first + 16]
            places = (ids != 256).nonzero().flatten()
            hidden = ids.repeat(len(places), 1)
            hidden[torch.arange(len(places)), places] = mask
            logits = theirs(hidden).logits[torch.arange(len(places)), places]
            total += float(F.cross_entropy(logits, ids[places], reduction="sum"))
            count += len(places)
    data = replace(text, tokenizer="bpe", mask_token=False)
    found = evaluate(EvaluateConfig(model=run / "hf", data=data, passes=16, device="cpu"))
    assert found["tokens"] == count
    assert found["loss"] == pytest.approx(total / count, rel=1e-6)
    assert found["pseudo_perplexity"] == pytest.approx(torch.tensor(total / count).exp().item(), rel=1e-5)
    seven = evaluate(EvaluateConfig(model=run, data=data, device="cpu"))
    assert seven["tokens"] == count
    assert seven["loss"] != pytest.approx(found["loss"], rel=1e-7)


def test_the_run_learns_from_masks(run: Path, text: DataConfig) -> None:
    config = replace(RECIPES["debug_bert"](), data=text)
    corpus = prepare(text, Path(text.cache))
    batch = training_batches(config, corpus).batch(0, 0, 1)
    chosen = batch["targets"] != -100
    assert bool((chosen.sum(1) == 2).all())
    assert bool((batch["input_ids"] == 257).any())


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_continuing_text_is_refused(command: str, run: Path) -> None:
    with pytest.raises(UserError, match=r"family bert attends both ways .*megalith llm evaluate"):
        find_model(run) if command == "serve" else generate.main(["--model", str(run)])


def test_what_does_not_go_together_is_refused() -> None:
    bert, gpt = RECIPES["debug_bert"](), RECIPES["debug"]()
    for config, message in (
        (replace(gpt, objective="mlm"), "objective=mlm and a model of family gpt2, .*--recipe debug_bert"),
        (replace(bert, objective="clm"), "objective=clm and a model of family bert, .*use --objective mlm"),
        (replace(bert, data=replace(bert.data, pairs=True)), r"data\.pairs with objective=mlm"),
    ):
        with pytest.raises(UserError, match=message) as error:
            check_objective(config)
        assert "\n" not in str(error.value)
    for config in (bert, gpt, replace(bert, objective=None)):
        check_objective(config)


def test_the_recipe_of_a_command_line_without_one() -> None:
    for words in ("--objective mlm", "--objective=mlm", "--steps 2 objective=mlm"):
        assert default_recipe(words.split()) == "debug_bert"
    for words in ("", "--objective clm", "--out mlm", "--objective"):
        assert default_recipe(words.split()) == "debug"
