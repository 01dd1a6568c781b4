"""What training under a budget takes of its process on a CPU, beside the account."""

from unittest.mock import patch

import pytest
import torch

from core.gemini import replicas, wrap
from core.runtime import join
from tests.support.gemini import Net
from tests.support.gemini_memory import SMALL, Size, measured


def test_what_leaves_the_account_leaves_the_process() -> None:
    join("cpu")
    model = Net()
    with patch.object(replicas, "give_back_freed_memory") as gives_back:
        wrap(model, torch.optim.AdamW(model.parameters()), budget="1MB", device="cpu")
    gives_back.assert_called_once_with(1_000_000)


def test_the_process_takes_what_the_account_and_the_plan_of_the_host_say() -> None:
    """337 MB of model data, 60 % of them on the host; tests/soak/test_gemini.py takes larger ones and more budgets."""
    assert measured(Size(SMALL, "135MB")).ratio == pytest.approx(1, abs=0.1)
