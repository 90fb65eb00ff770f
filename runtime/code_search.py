"""Whether the code that a config names is there: looked for without running any of it."""

import ast
import difflib
import importlib
import importlib.util
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from rubato.runtime.importer import LoadError, add_folder, check_name, file_spec, split_target


def find_module(target: str) -> None:
    """Raises LoadError where `target` is malformed, its module is nowhere, or the module's text is no Python or lacks the name.

    Runs no code of the module or its packages, and so takes a name on trust that the module may make as it runs.
    """
    place, name = split_target(target)
    if place.endswith(".py"):
        path = Path(place).expanduser().resolve()
        spec = file_spec(path.stem, path, target)
    else:
        check_name(place, target)
        spec = _spec_of(place)
    if isinstance(spec, str):
        raise LoadError(f"{target} does not exist: there is no module {spec}")
    _check_defines(spec, place, name.partition(".")[0], target)


def has_module(name: str) -> bool:
    """Whether Python finds the module; runs no code of it or its packages."""
    return not isinstance(_spec_of(name), str)


def _spec_of(module: str) -> ModuleSpec | str:
    """How to import `module`, or the part of its name that leads nowhere."""
    add_folder(Path.cwd())
    top, *rest = module.split(".")
    spec, found = importlib.util.find_spec(top) if top else None, top
    for part in rest:
        if spec is None:
            break
        found = f"{found}.{part}"
        spec = PathFinder.find_spec(found, spec.submodule_search_locations or ())
    return spec or found


def _check_defines(spec: ModuleSpec, place: str, name: str, target: str) -> None:
    """The names in a package may be modules of it: those are not looked for."""
    get_source = getattr(spec.loader, "get_source", None)
    try:
        text = get_source(spec.name) if get_source else None
        tree = ast.parse(text, spec.origin or place) if text is not None else None
    except (SyntaxError, ValueError) as error:
        raise LoadError(f"{target} can't be imported: {type(error).__name__}: {error}") from error
    if tree is not None and (gone := _missing_import(tree, Path(place).expanduser().resolve())):
        raise LoadError(f"{target} can't be imported: it imports {gone}, and there is no such module")
    names = None if tree is None or spec.submodule_search_locations is not None else _top_names(tree)
    if names is not None and name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        guess = f". Did you mean {near[0]}?" if near else ""
        raise LoadError(f"{target} does not exist: {place} defines no {name}{guess}")


def _missing_import(tree: ast.Module, file: Path) -> str:
    """The first package that a user's file imports whatever happens, and that is neither installed nor beside it; else empty."""
    for node in tree.body if file.suffix == ".py" else ():
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module else []
        for top in (name.partition(".")[0] for name in names):
            beside = (file.parent / top).is_dir() or (file.parent / f"{top}.py").is_file()
            if not beside and isinstance(_spec_of(top), str):
                return top
    return ""


def _top_names(tree: ast.Module) -> set[str] | None:
    """Names that a module has once it is imported; None where its text can't tell."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
    dynamic = {"*", "__getattr__", "globals", "locals", "vars", "setattr", "exec"}
    called = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return None if dynamic & (found | called) else found
