"""`python -m benchmarks.run --stale [NAME...]`: which committed results are not of the code as it is, and why.

A result is of the code as it is when

1. the tree that it was measured on was a commit's, and nothing else;
2. that commit is in the history of what is checked out, so that anyone can go back to it;
3. what it measures (`Benchmark.measures`) holds the same today as then: by git's object ids, or else by the syntax
   trees of its Python files, so that comments, docstrings and the layout of lines age no figure.

A change of code need not touch a figure either: the list says what changed, the code that is measured apart from the
scripts that measure it, and whoever reads it decides whether to measure again. Results of before they named what they
measure are compared by what their benchmark measures now. Other machines' results (NAME-MACHINE.json) are listed too.
"""

import ast
from pathlib import Path

from benchmarks.result import Result, contents, git, in_history, read
from benchmarks.run import load


def list_stale(names: list[str], folder: Path) -> int:
    """Print them.  Returns 1 where there are some, as a check does."""
    found = {path: reasons(read(path), load(name).measures) for name in names for path in results(name, folder)}
    stale = {path.stem: why for path, why in found.items() if why}
    for name, why in stale.items():
        print(f"{name}: {'; '.join(why)}")
    for name in names:
        if not results(name, folder):
            print(f"{name}: no result")
    print(f"{len(stale)} of {len(found)} results are stale")
    return int(bool(stale))


def results(name: str, folder: Path) -> list[Path]:
    """The result of that name and those of other machines."""
    return [path for path in sorted(folder.glob(f"{name}*.json")) if path.stem.partition("-")[0] == name]


def reasons(result: Result, measures: tuple[str, ...]) -> list[str]:
    """Why a result is not of the code as it is; empty where it is. measures: for a result that names nothing."""
    found = []
    if result.dirty:
        found.append("measured on a tree with changes that no commit has")
    if not in_history(result.commit):
        found.append(f"its commit {result.commit[:9]} is not in the history")
    then = result.measures or contents(result.commit, measures)
    now = contents("HEAD", then)
    changed = [
        path
        for path, what in then.items()
        if not what or (what != now[path] and _acts_otherwise(path, what, now[path]))
    ]
    scripts = [path for path in changed if path.startswith("benchmarks/")]
    for what, paths in (("code", [path for path in changed if path not in scripts]), ("scripts", scripts)):
        if paths:
            found.append(f"{what} changed since {result.commit[:9]}: {', '.join(paths)}")
    return found


def _acts_otherwise(path: str, then: str, now: str) -> bool:
    """Whether what lies at a path, by git's object ids, differs in more than comments, docstrings and layout."""
    before, after = _files(path, then), _files(path, now)
    if not before or before.keys() != after.keys():
        return True
    pairs = ((name, what, after[name]) for name, what in before.items())
    return any(a != b and (not name.endswith(".py") or _code(a) != _code(b)) for name, a, b in pairs)


def _files(path: str, what: str) -> dict[str, str]:
    """name -> object id of the files in a folder, or of the one file; empty where git has no such object."""
    kind = git("cat-file", "-t", what)
    if kind != "tree":
        return {path: what} if kind == "blob" else {}
    lines = git("ls-tree", "-r", what).splitlines()
    return {name: line.split()[2] for line, _, name in (one.partition("\t") for one in lines)}


def _code(what: str) -> str:
    """The syntax tree of a Python file, without strings that stand by themselves, as docstrings do."""
    tree = ast.parse(git("cat-file", "blob", what))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            node.body = [one for one in node.body if not _is_text(one)]
    return ast.dump(tree)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(getattr(statement.value, "value", None), str)
