"""A model that exists, as `llm evaluate` and `llm generate` see it: what it computes is what transformers computes."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from apps.llm.corpus import DataConfig
from apps.llm.evaluate import EvaluateConfig, evaluate
from apps.llm.model import find_model
from apps.llm.tokenizer import byte_tokenizer
from core.models import save_pretrained
from core.nn.routing import MoEConfig
from tests.unit.models.test_pretrained import example, random_decoder

TEXT = "The router sends each token to a few experts. " * 20


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of experts whose router would add a balance loss and noise, were it training."""
    moe = MoEConfig(5, experts_per_token=2, balance_weight=0.25, jitter=0.3)
    config = example("llama", vocab_size=257, attention_bias=False, mlp_bias=False, tied_head=False, moe=moe)
    folder = tmp_path_factory.mktemp("mixtral")
    save_pretrained(random_decoder(config).float(), config, folder)
    byte_tokenizer().save(folder)
    return folder


def test_evaluate_gives_the_cross_entropy_alone(mixtral: Path, tmp_path: Path) -> None:
    """No balance loss and no noise of the router, which belong to training."""
    from transformers import AutoModelForCausalLM

    (tmp_path / "text.txt").write_text(TEXT)
    data = DataConfig(path=str(tmp_path / "text.txt"), sequence_length=48, cache=str(tmp_path / "cache"))
    figures = evaluate(EvaluateConfig(model=mixtral, data=data))
    theirs = AutoModelForCausalLM.from_pretrained(mixtral).eval()
    theirs.set_experts_implementation("eager")
    stream = torch.tensor([256, *TEXT.encode(), 256])
    total = 0.0
    with torch.no_grad():
        for first in range(0, len(stream) - 1, 48):
            ids = stream[first : first + 49]
            total += float(F.cross_entropy(theirs(ids[None, :-1]).logits[0], ids[1:], reduction="sum"))
    assert figures["loss"] == pytest.approx(total / (len(stream) - 1), rel=1e-6)


def test_what_is_loaded_computes_the_same_twice(mixtral: Path) -> None:
    """`llm generate` loads like this: noise of the router would draw another text each time."""
    model, ids = find_model(mixtral).load(), torch.arange(30)[None]
    with torch.no_grad():
        assert torch.equal(model(ids), model(ids))
