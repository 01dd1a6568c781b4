"""Frozen dataclasses are the configuration; recipes are functions that return one; the command line derives from both.

`parse(Config, recipes, argv)` turns `--recipe NAME --field.sub value …` into one frozen dataclass. Whatever the user got
wrong ends as a `UserError`: one line that says what was given, what is allowed and what to do. `run_command` prints it
and exits with code 2.
"""

from __future__ import annotations


class UserError(ValueError):
    """A mistake of the user's, told in one line: what was given, what is allowed, what to do. Commands exit with 2."""
