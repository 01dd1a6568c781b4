"""Every command of every app has a case in which its options are obeyed or refused, and all name one thing alike."""

import importlib
import re

import pytest

from core.config import UserError, _renamed, _spelled_out, option, option_names
from tests.support.options import hint_of, options_of
from tests.unit import test_llm_options
from tests.unit.diffusion import test_options as diffusion
from tests.unit.fold import test_options as fold
from tests.unit.serve import test_options as serve

CASES = {
    "llm": test_llm_options.COMMANDS,
    "diffusion": diffusion.COMMANDS,
    "fold": fold.COMMANDS,
    "serve": serve.COMMANDS,
}


@pytest.mark.parametrize("name", CASES)
def test_every_command_that_takes_options_has_a_case(name):
    """The commands are the app's own; which of them take options their parsers say."""
    app = importlib.import_module(f"apps.{name}.__main__").APP
    bare = [app.bare[0]] if app.bare else []
    taking = {command for command in app.commands if options_of(app.dispatch, [command, "--help"]) is not None}
    assert taking | set(bare) == set(CASES[name])
    assert all(CASES[name].values())
    for command in taking:
        config = options_of(app.dispatch, [command, "--help"])
        assert set(getattr(config, "ESSENTIAL", ())) <= set(option_names(config))
    for command in set(app.commands) - taking:
        with pytest.raises(UserError, match="takes no options"):
            app.dispatch([command, "--seed", "1"])


def commands():
    """(app and command, its options under the names that users type -> their values by default)."""
    for name, cases in CASES.items():
        app = importlib.import_module(f"apps.{name}.__main__").APP
        for command in cases:
            config = options_of(app.dispatch, [*([] if app.bare and command == app.bare[0] else [command]), "--help"])
            if config is None:  # `serve --help` lists the commands
                config = options_of(app.dispatch, ["--help-all"])
            assert config is not None, command
            yield f"{name} {command}", config


@pytest.fixture(scope="module")
def configs():
    return dict(commands())


def spelled(config):
    """The options as users type them -> what they are by default."""
    return {option(name, config).removeprefix("--"): hint_of(config, name) for name in option_names(config)}


WITHOUT_MODEL = {
    "llm pretrain",
    "llm tokenize",
    "llm scaling",
    "fold msa",
    "fold msa-server",
    "fold relax",
    "fold evaluate",
    "fold doctor",
}
"""They make a model, or take none; of the first --model.… says its shape."""
OTHER_NAMES = {"source", "weights", "checkpoint", "run", "model-path", "model-dir", "ckpt"}
OTHER_RANKS = {"ranks", "world-size", "gpus", "devices", "num-gpus", "processes", "nproc-per-node"}
MEMORY = {"memory", "gemini.budget", "recompute.budget", "engine.cache", "max-body"}


def test_long_lists_of_options_have_a_short_help(configs):
    """`--help` shows what most people need, at most a good screen of it; `--help-all` everything."""
    for name, config in configs.items():
        count, shown = len(list(option_names(config))), len(getattr(config, "ESSENTIAL", ()))
        assert shown <= 32, (name, count, shown)
        assert shown or count < 20, (name, count)


def test_a_model_that_is_given_has_one_name(configs):
    assert {name for name, config in configs.items() if "model" not in spelled(config)} == WITHOUT_MODEL
    assert not {name: found for name, config in configs.items() if (found := OTHER_NAMES & spelled(config).keys())}


def test_ranks_have_one_name(configs):
    other = {name: OTHER_RANKS & spelled(config).keys() for name, config in configs.items()}
    assert {name: found for name, found in other.items() if found} == {"llm plan": {"gpus"}}  # a search launches none
    meshes = [name for name, config in configs.items() if "mesh.tp" in spelled(config)]
    assert meshes
    assert all("nproc" in spelled(configs[name]) for name in meshes)


def test_memory_is_written_with_its_unit(configs):
    """--memory 24GiB: a text, and no number whose unit the option's name says; rates a second are numbers."""
    found = {(name, one): hint for name, config in configs.items() for one, (hint, _) in spelled(config).items()}
    asked = {key: hint for key, hint in found.items() if key[1] in MEMORY}
    assert {one for _, one in asked} == MEMORY
    assert all(hint in (str, str | None) for hint in asked.values())
    units = r"(^|[-.])(memory|cache|budget|size|body|[kmgt]i?b|bytes)-?([kmgt]i?b|bytes)?$"
    counted = {one for _, one in found if re.search(units, one)} - MEMORY
    # Counts of rows, tokens, elements and FLOPs; folders of what is computed once.
    sizes = {"model.vocab-size", "data.vocab-size", "group-size", "engine.page-size"}
    assert counted == {"budget", "data.cache", "cache"} | sizes


def test_every_device_is_chosen_by_itself(configs):
    devices = {name: spelled(config)["device"][1] for name, config in configs.items() if "device" in spelled(config)}
    assert set(devices.values()) == {"auto"}
    computing = {"predict", "doctor", "evaluate", "generate", "sample", "serve", "pretrain", "finetune", "dreambooth"}
    computing |= {"train", "plan", "quantize"}
    there = {name for name in configs if name.split()[1] in computing} - {"fold evaluate"}  # which computes no model
    assert set(devices) == there


def test_plans_are_asked_alike(configs):
    plans = {name: spelled(config) for name, config in configs.items() if name.endswith(" plan")}
    assert set(plans) == {f"{name} plan" for name in CASES}
    assert all({"memory", "device"} <= options.keys() for options in plans.values())
    assert {name for name, options in plans.items() if "nproc" not in options} == {"serve plan"}  # which finds them


def test_what_was_called_otherwise_is_taken_with_a_line(configs):
    """Every former name of every command, also with underscores, where one place knows them."""
    seen = set()
    for name, config in configs.items():
        options = spelled(config)
        for former, now in _renamed(config):
            now, _, unit = now.partition("=")
            taken, notes = _spelled_out([option(former), "24"], config)
            assert now.replace("_", "-") in options, (name, now)
            assert former.replace("_", "-") not in options, (name, former)
            assert taken[-1] == f"24{unit}", name
            assert notes == [
                f"{option(former)} is called {option(now)} now; the former name goes with the next version"
            ]
            seen.add((name, former))
    names = {"llm finetune": "source", "llm export": "run", "fold predict": "weights", "fold convert": "source"}
    names |= {"fold train": "weights", "diffusion sample": "weights", "diffusion plan": "ranks"}
    names |= {"llm pretrain": "gemini.trace"}
    assert names.items() <= seen
