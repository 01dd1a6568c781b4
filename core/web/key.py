"""The key that a client sends, and a server asks for."""

from pathlib import Path

from core.config import UserError


def read_key(path: Path | None) -> str | None:
    """The first line of a key's file.  Raises UserError where there is none."""
    if path is None:
        return None
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the key from {path} ({error})") from None
    key = lines[0].strip()
    if not key or not (key.isascii() and key.isprintable()):
        raise UserError(f"{path} holds no key; put one, of printable ASCII characters, into its first line")
    return key
