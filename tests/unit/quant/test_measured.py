"""Ways of products with quantized weights: what is measured, what is kept, and what is taken then.

There is no GPU here, so a clock is told what it shall find; that a way computes the product is in the SPECs.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from core.kernels import quantized_matmul, ways
from core.quant import quantize
from core.quant.measured import measure_weights

NAME = "Some GPU 80GB"


class Clock:
    """Way -> milliseconds; `timed` counts what was asked."""

    def __init__(self) -> None:
        self.milliseconds = {"tile": 2.0, "wide": 1.0, "library": 1.5}
        self.timed: list[str] = []

    def __call__(self, launch: Callable[[], object]) -> float:
        how = launch.args[-1]  # pyright: ignore[reportAttributeAccessIssue]
        self.timed.append(how)
        return self.milliseconds[how]


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    ways.forget()
    with (
        patch.object(ways, "_milliseconds", clock),
        patch.object(torch.cuda, "get_device_name", lambda *_: NAME),
        patch("core.quant.measured._is_on_gpu", lambda _: True),
    ):
        yield clock
    ways.forget()


def model(scheme: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 96))
    return quantize(made, scheme, **options)


def chosen(rows: int, group: int = 64) -> str:
    return ways.way("int4_matmul", rows, (96, 64, torch.bfloat16, group), "the rule")


def test_each_size_is_measured_once_and_kept_by_the_name_of_the_device(clock: Clock, tmp_path: Path) -> None:
    quantized = model("int4", group_size=32)
    measure_weights(quantized, torch.bfloat16, tmp_path)
    assert len(clock.timed) == 2 * len(ways.ROWS) * 2  # sizes, rows, ways
    assert chosen(3, 32) == chosen(5000, 32) == "wide"
    assert ways.way("int4_matmul", 3, (96, 64, torch.float16, 32), "the rule") == "the rule"
    (kept,) = tmp_path.iterdir()
    assert kept.name == "Some-GPU-80GB.json"
    clock.timed.clear()
    measure_weights(quantized, torch.bfloat16, tmp_path)
    ways.forget()
    assert chosen(3, 32) == "the rule"
    measure_weights(quantized, torch.bfloat16, tmp_path)
    assert chosen(3, 32) == "wide"
    assert not clock.timed


def test_what_other_versions_found_is_measured_again(clock: Clock, tmp_path: Path) -> None:
    measure_weights(model("int8"), torch.bfloat16, tmp_path)
    (kept,) = tmp_path.iterdir()
    content = json.loads(kept.read_text())
    content["made_by"]["torch"] = "1.0"
    kept.write_text(json.dumps(content))
    ways.forget()
    clock.timed.clear()
    measure_weights(model("int8"), torch.bfloat16, tmp_path)
    assert clock.timed


@pytest.mark.parametrize("content", ["", "[]", '{"made_by": {}}'])
def test_a_damaged_file_is_as_none(clock: Clock, tmp_path: Path, content: str) -> None:
    measure_weights(model("int8"), torch.bfloat16, tmp_path)
    (kept,) = tmp_path.iterdir()
    kept.write_text(content)
    ways.forget()
    clock.timed.clear()
    measure_weights(model("int8"), torch.bfloat16, tmp_path)
    assert clock.timed
    assert json.loads(kept.read_text())["ways"]


def test_a_folder_that_cannot_be_written_is_a_warning(
    clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    assert measure_weights(model("int8"), torch.bfloat16, tmp_path / "file" / "products")
    assert ways.way("int8_matmul", 3, (96, 64, torch.bfloat16, False), "the rule") == "wide"
    assert "products are measured again at the next start" in caplog.text


def test_rows_take_the_measurement_that_is_not_smaller() -> None:
    assert [ways.rows_measured(n) for n in (3, 16, 17, 64, 65, 1024, 1025, 9999)] == [
        16,
        16,
        64,
        64,
        256,
        1024,
        4096,
        4096,
    ]


def test_the_library_is_asked_where_it_takes_the_sizes(clock: Clock, tmp_path: Path) -> None:
    clock.milliseconds["library"] = 0.5
    measure_weights(model("w8a8"), torch.bfloat16, tmp_path)
    key = (96, 64, torch.bfloat16)
    assert ways.way("int8_dynamic_matmul", 3, key, "the rule") == "tile"  # it takes more than 16 rows
    assert ways.way("int8_dynamic_matmul", 17, key, "the rule") == "library"


def test_a_cpu_and_outliers_measure_nothing(clock: Clock, tmp_path: Path) -> None:
    assert measure_weights(model("llm.int8"), torch.bfloat16, tmp_path) == []
    with patch("core.quant.measured._is_on_gpu", lambda _: False):
        assert measure_weights(model("int4"), torch.bfloat16, tmp_path) == []
    assert not clock.timed


@pytest.mark.parametrize(
    ("kernel", "more"), [("int4_matmul", (64,)), ("int8_matmul", (False,)), ("int8_dynamic_matmul", ())]
)
def test_what_was_measured_is_what_a_product_takes(clock: Clock, tmp_path: Path, kernel: str, more: tuple) -> None:
    scheme = {"int4_matmul": "int4", "int8_matmul": "int8", "int8_dynamic_matmul": "w8a8"}[kernel]
    measure_weights(model(scheme), torch.bfloat16, tmp_path)
    x = torch.empty(300, 64, dtype=torch.bfloat16)
    best = "library" if scheme == "w8a8" else "wide"
    assert quantized_matmul._how(kernel, x, 96, *more) == best
    assert quantized_matmul._how(kernel, x.float(), 96, *more) == "tile"  # not measured, and not on a GPU
