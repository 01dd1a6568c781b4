"""lm-eval's own client of completions (`local-completions`) on a task of ours: every value is transformers'.

The models end many of their texts at once, since the token that a client asks for behind a scored text may be the one
that ends it.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from lm_eval.api.model import LM
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

from apps.llm.tokenizer import byte_tokenizer
from core.models import save_pretrained
from tests.support.http_server import served
from tests.unit.models.test_pretrained import FAMILIES, example, random_decoder

CHOICES, LENGTH, EOS = 3, 96, 256
LETTERS = "etaoin shrdlu, Grüße. 世界\n"


def model_folder(folder: Path, family: str) -> Path:
    """A random decoder over bytes, of whose texts many end soon."""
    shape = {"vocab_size": 257, "max_length": 256, "tied_head": family != "gpt2"}
    decoder = random_decoder(example(family, **shape)).float()
    with torch.no_grad():
        decoder.head.weight[EOS] *= 8
    save_pretrained(decoder, decoder.config, folder, special_ids={"eos_token_id": EOS})
    byte_tokenizer().save(folder)
    return folder


def documents(count: int) -> list[dict[str, Any]]:
    dice = random.Random(0)
    text = lambda low, high: "".join(dice.choice(LETTERS) for _ in range(dice.randint(low, high)))  # noqa: E731
    return [
        {"question": "Q" + text(0, 30), "choices": ["A" + text(0, 6) for _ in range(CHOICES)], "answer": 0}
        for _ in range(count)
    ]


def tasks(count: int) -> list[dict[str, Any]]:
    """What lm-eval asks of a model, in its three forms; the rolling one in several windows."""
    docs = Dataset.from_list(documents(count))
    shared = {"test_split": "test", "custom_dataset": lambda **_: {"test": docs}}
    few = shared | {"custom_dataset": lambda **_: {"test": docs.select(range(max(4, count // 4)))}}
    return [
        shared | {
            "task": "choices", "output_type": "multiple_choice", "doc_to_text": "{{question}}",
            "doc_to_choice": "choices", "doc_to_target": "answer", "metric_list": [{"metric": "acc"}],
        },
        few | {
            "task": "rolling", "output_type": "loglikelihood_rolling", "doc_to_text": "",
            "doc_to_target": "{{(question + choices[0]) * 6}}", "metric_list": [{"metric": "word_perplexity"}],
        },
        few | {
            "task": "writing", "output_type": "generate_until", "doc_to_text": "{{question}}",
            "doc_to_target": "{{choices[0]}}", "metric_list": [{"metric": "exact_match"}],
            "generation_kwargs": {"until": ["\n\n", "ee"], "max_gen_toks": 24, "do_sample": False, "temperature": 0.0},
        },
    ]  # fmt: skip


def answers(model: LM, count: int) -> dict[str, list[Any]]:
    found = simple_evaluate(
        model, tasks=tasks(count), task_manager=TaskManager(include_defaults=False), bootstrap_iters=0, log_samples=True
    )  # fmt: skip
    assert found is not None
    return {
        name: [response[0] for sample in sorted(samples, key=lambda s: s["doc_id"]) for response in sample["resps"]]
        for name, samples in found["samples"].items()
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: model_folder(root / family, family) for family in FAMILIES}


@pytest.mark.parametrize(
    ("family", "count"), [("gpt2", 8), *(pytest.param(family, 20, marks=pytest.mark.soak) for family in FAMILIES)]
)
def test_every_value_is_that_of_transformers(
    folders: dict[str, Path], family: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    folder = folders[family]
    theirs = answers(HFLM(str(folder), device="cpu", dtype="float32", max_length=LENGTH, batch_size=8), count)
    with served(folder, timeout_s=3600) as running:
        url = f"{running.url}/v1/completions"
        # Its windows are shorter by two than what it is told, transformers' are not.
        client = LocalCompletionsAPI(url, model=family, tokenizer=str(folder), max_length=LENGTH + 2, batch_size=4)
        ours = answers(client, count)
    assert theirs.keys() == ours.keys() == {"choices", "rolling", "writing"}
    assert len(ours["choices"]) == count * CHOICES
    equal = [
        is_greedy == wanted_greedy and value == pytest.approx(wanted, rel=1e-5, abs=1e-4)
        for (value, is_greedy), (wanted, wanted_greedy) in zip(ours["choices"], theirs["choices"], strict=True)
    ]
    print(f"{family}: {sum(equal)} of {len(equal)}")
    assert all(equal)
    assert ours["rolling"] == pytest.approx(theirs["rolling"], rel=1e-5)
    assert ours["writing"] == theirs["writing"]
    assert any(ours["writing"])
