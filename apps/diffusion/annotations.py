"""Types of the fields of configurations: what the installed classes annotate, and whether a value of JSON is of it.

JSON has no tuples, so a list stands for a tuple; `tuple[int]` is of any length there, as diffusers writes it. A whole
number is a number too, a truth value is none. Numbers are finite, unless the class's own default is not, and whole ones
have 64 bits, as tensors have. Null is taken for false, as the classes take it.
"""

import dataclasses
import inspect
import math
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

# Made of values that are found while running, which no type checker knows.
one_of: Any = Literal
_either: Any = Union
_WORDS: dict[Any, tuple[str, str]] = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    bool: ("true or false", "true or false"),
    str: ("a text", "texts"),
    dict: ("an object", "objects"),
    list: ("a list", "lists"),
    tuple: ("a list", "lists"),
    NoneType: ("null", "null"),
}
"""one, several"""


def annotated(kind: type) -> dict[str, Any]:
    """Field -> type, of a class whose constructor takes the fields, or of a dataclass.

    A default is of its field's type, whatever the annotation says.
    """
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind, localns={"torch": torch})  # which transformers imports for type checkers only
        return {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    hints = get_type_hints(kind.__init__)
    parameters = inspect.signature(kind.__init__).parameters
    return {name: _with_default(hint, parameters[name].default) for name, hint in hints.items() if name in parameters}


def _with_default(hint: Any, default: Any) -> Any:
    if default is None:
        return hint | None
    endless = isinstance(default, float) and not math.isfinite(default)
    return hint | one_of[default] if endless else hint


def merged(kinds: list[type]) -> dict[str, Any]:
    """Field -> union of its types in several classes.  Texts that one of them names are all there are."""
    found: dict[str, list[Any]] = {}
    for kind in kinds:
        for name, hint in annotated(kind).items():
            found.setdefault(name, []).extend(_members(hint))
    return {name: _union(members) for name, members in found.items()}


def _union(members: list[Any]) -> Any:
    named = tuple(dict.fromkeys(value for member in members for value in _values(member)))
    counted = any(isinstance(value, str) for value in named)
    others = [member for member in members if not _values(member) and not (counted and member is str)]
    return _either[*others, *((one_of[named],) if named else ())]


def _members(hint: Any) -> list[Any]:
    return list(get_args(hint)) if get_origin(hint) in (Union, UnionType) else [hint]


def _values(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) is Literal else ()


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value of JSON is of a type."""
    return any(_fits(value, member) for member in _members(hint))


def _fits(value: Any, member: Any) -> bool:
    origin, inner = get_origin(member) or member, get_args(member)
    if origin is Literal:
        return any(value == known and type(value) is type(known) for known in inner)
    if origin is int or (origin is float and isinstance(value, int)):
        return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
    if origin is float:
        return isinstance(value, float) and math.isfinite(value)
    if origin is bool:
        return value is None or isinstance(value, bool)
    if origin in (list, tuple):
        return isinstance(value, (list, tuple)) and _items_fit(value, inner, exact=origin is tuple)
    if origin is dict:
        return isinstance(value, dict) and (not inner or all(fits(held, inner[1]) for held in value.values()))
    return origin is Any or (origin in _WORDS and isinstance(value, origin))


def _items_fit(value: list[Any] | tuple[Any, ...], inner: tuple[Any, ...], exact: bool) -> bool:
    items = [item for item in inner if item is not Ellipsis]
    if exact and len(items) > 1:
        return len(value) == len(items) and all(map(fits, value, items))
    return not items or all(fits(item, items[0]) for item in value)


def in_words(hint: Any, several: bool = False) -> str:
    """The values that a field of this type takes, in words for a message."""
    members = _members(hint)
    said = [_in_words(member, several) for member in members if not (member is int and float in members)]
    return " or ".join(dict.fromkeys(filter(None, said)))


def _in_words(member: Any, several: bool) -> str:
    origin, inner = get_origin(member) or member, get_args(member)
    if origin is Literal:
        return " or ".join(map(repr, inner))
    items = [item for item in inner if item is not Ellipsis]
    if origin is tuple and len(items) > 1:
        return f"[{', '.join(map(in_words, items))}]"
    if origin not in _WORDS:
        return ""  # what JSON cannot hold is no advice
    word = _WORDS[origin][several]
    return f"{word} of {in_words(items[0], several=True)}" if origin in (list, tuple) and items else word
