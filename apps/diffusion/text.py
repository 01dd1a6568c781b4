"""Prompts and captions as they come from command lines and files: strings that may be no text."""

from pathlib import Path

from core.config import UserError


def is_text(given: str) -> bool:
    """Return whether a string can be written down: JSON and command lines may hold halves of characters."""
    try:
        given.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_text(prompt: str) -> None:
    """Raises UserError for a string that holds half a character."""
    if not is_text(prompt):
        raise UserError(f"the prompt {prompt!a} holds half a character (a lone surrogate); write it in UTF-8")


def read_prompts(path: Path) -> list[str]:
    """A text file with a prompt a line.  Raises UserError for what is no such file."""
    try:
        return check_prompts(path.read_text(encoding="utf-8").splitlines(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path} ({error}); give a text file with a prompt a line") from error


def check_prompts(prompts: list[str], origin: str) -> list[str]:
    """The prompts themselves.  Raises UserError for none, for an empty one, and for half a character."""
    if not prompts:
        raise UserError(f"{origin} holds no prompt; say what to draw")
    for index, prompt in enumerate(prompts):
        if not prompt.strip():
            raise UserError(f"{origin}: prompt {index + 1} of {len(prompts)} is empty; say what to draw")
        check_text(prompt)
    return prompts
