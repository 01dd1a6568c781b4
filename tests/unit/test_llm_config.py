"""The llm commands' configuration: recipes, the check of a combination, the warning before a run that does not fit."""

from dataclasses import replace

import pytest

from apps.llm.config import check_combination
from apps.llm.plan import run_shape, warning
from apps.llm.recipes import RECIPES
from core.config import UserError, parse
from core.data import RampConfig
from core.estimate import decoder_shape, estimate_memory
from core.gemini.config import GeminiConfig
from core.mesh import MeshConfig
from tests.support.combinations import PAGE, TABLES, on_page, shown


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_whole_and_divides_over_common_meshes(name: str) -> None:
    config = RECIPES[name]()
    assert config.data.sequence_length <= config.model.max_length
    for ranks in (1, 2, 4, 8):
        mesh = check_combination(replace(config, nproc=ranks))
        assert mesh.data_ranks == ranks


def test_the_debug_recipe_runs_on_three_ranks_and_refuses_three_way_tensor_parallelism() -> None:
    debug = RECIPES["debug"]()
    assert (debug.model.num_heads, debug.model.num_layers, debug.data.global_batch) == (8, 16, 24)
    assert check_combination(replace(debug, nproc=3)).data_ranks == 3
    assert check_combination(replace(debug, nproc=3, mesh=MeshConfig(cp=3))).data_ranks == 1
    with pytest.raises(UserError, match=r"8 heads do not divide over tp=3; use tp in {1, 2, 4, 8}"):
        check_combination(replace(debug, nproc=3, mesh=MeshConfig(tp=3)))


def test_every_stage_of_a_growing_batch_has_to_divide() -> None:
    debug = RECIPES["debug"]()
    growing = replace(debug, nproc=8, data=replace(debug.data, ramp=RampConfig(start=8, steps=4)))
    assert check_combination(growing).data_ranks == 8
    growing = replace(growing, data=replace(debug.data, ramp=RampConfig(start=8, steps=4, increment=4)))
    with pytest.raises(UserError, match=r"batch of 12 rows \(--data.global-batch, --data.ramp\).* over 8 .*{1, 2, 3, "):
        check_combination(growing)


def test_stages_are_checked_and_counted() -> None:
    debug = replace(RECIPES["debug"](), nproc=4, mesh=MeshConfig(pp=4))
    run = run_shape(debug)
    assert (run.pp, run.num_microbatches, run.microbatch_size) == (4, 16, 2)
    assert run_shape(replace(debug, microbatch=5)).num_microbatches == 5
    with pytest.raises(UserError, match="makes 17 stages, and the model has 16 blocks"):
        check_combination(replace(debug, nproc=17, mesh=MeshConfig(pp=17)))


def test_a_run_that_does_not_fit_says_what_would() -> None:
    config = replace(RECIPES["gpt2_xl"](), nproc=8, zero=0, precision="bf16")
    needed = estimate_memory(decoder_shape(config.model), run_shape(config)).peak_bytes
    assert warning(config, "cuda", needed, needed) is None
    line = warning(config, "cuda", needed - 1, needed)
    assert line is not None
    assert "--zero 1" in line
    assert "\n" not in line


def test_with_a_budget_the_budget_has_to_fit_and_the_rest_has_to_fit_the_host() -> None:
    """What needs 25 GB of state in 4 GiB of a device runs where the host has room for the rest."""
    config = replace(RECIPES["gpt2_xl"](), zero=0, precision="bf16", gemini=GeminiConfig("4GiB"))
    state = 20 * decoder_shape(config.model).num_parameters()
    assert warning(config, "cuda", 4 << 30, state - (4 << 30)) is None
    assert "gemini.budget=4GiB and the device has" in str(warning(config, "cuda", (4 << 30) - 1, 1 << 40))
    assert "more than the host's" in str(warning(config, "cuda", 4 << 30, state - (4 << 30) - (1 << 30)))
    assert "more than the host's" in str(warning(config, "cpu", state, state - 1000)), "on a CPU the host is the device"
    assert warning(config, "cpu", state, state + 1000) is None


@pytest.mark.parametrize("name", TABLES)
def test_the_page_says_what_goes_together(name: str) -> None:
    """And why not, in the words of the refusals."""
    assert on_page(PAGE.read_text(), name) == shown(TABLES[name]), "python -m tests.support.combinations writes it anew"


def test_where_no_single_change_suffices_the_nearest_plan_is_named() -> None:
    """And it is one: with its options the run fits."""
    config = replace(RECIPES["gpt2_xl"](), nproc=8, zero=0, precision="bf16", microbatch=4)
    line = str(warning(config, "cuda", 4 << 30, 0))
    words = line.partition("the nearest plan that fits is ")[2].split()
    assert len(words) >= 4, line
    fixed = ["--recipe", "gpt2_xl", "--nproc", "8", "--zero", "0", "--precision", "bf16", "--microbatch", "4"]
    nearer = parse(RECIPES, [*fixed, *words], "llm pretrain", default="debug")
    assert warning(nearer, "cuda", 4 << 30, 0) is None
    assert "nor do several" in str(warning(config, "cuda", 2 << 30, 0))
