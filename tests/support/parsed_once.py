"""Parsers of options that are made once: tyro makes one anew for each line of words, and tests of options parse
thousands."""

from typing import Any


def parse_with_known_parsers() -> None:
    """Keep tyro's specification of each parser, by what it is made of: the type of its options and their defaults."""
    from tyro import _parsers

    known: dict[tuple[Any, ...], Any] = {}
    specification: Any = _parsers.ParserSpecification
    make = specification.from_callable_or_type

    def remembered(f: Any, **given: Any) -> Any:
        if given.get("parent_classes") or given.get("intern_prefix"):
            return make(f, **given)  # a part of one
        key = (f, repr(sorted(given.items(), key=lambda item: item[0])))
        if key not in known:
            known[key] = make(f, **given)
        return known[key]

    specification.from_callable_or_type = staticmethod(remembered)
