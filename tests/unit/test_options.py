"""Every command of every app has a case in which its options are obeyed or refused."""

import importlib

import pytest

from core.config import UserError, option_names
from tests.support.options import options_of
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
