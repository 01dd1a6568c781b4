"""Prompts and captions as they come from command lines and files: strings that may be no text."""

from core.config import UserError


def is_text(given: str) -> bool:
    """Whether a string can be written down: JSON and command lines may hold halves of characters."""
    try:
        given.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_text(prompt: str) -> None:
    """Raises UserError for a string that holds half a character."""
    if not is_text(prompt):
        raise UserError(f"the prompt {prompt!a} holds half a character (a lone surrogate); write it in UTF-8")
