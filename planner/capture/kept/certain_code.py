"""Whether a Python file depends only on inputs of the cache key: judged by the names in the file, and fails closed.

    import torch, math, own_file       certain: packages are in the key, a user's own files are checked themselves
    import requests, time              uncertain: any other import
    os.environ, os.path.join           certain; os.listdir, path.exists(), torch.distributed are not

It assumes honest code. Code that hides its inputs can evade it, as it can evade a capture.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from planner.capture.kept.uncertain import Uncertain

_IMPORTS = """
    __future__ abc argparse bisect builtins collections contextlib copy dataclasses decimal einops enum fractions
    functools heapq inspect itertools json logging math numbers numpy operator os pathlib random re statistics string
    sys textwrap torch transformers types typing typing_extensions warnings yaml
"""
_OF_OS = "environ getenv path PathLike fspath sep linesep name"
_OF_SYS = "path version version_info modules maxsize float_info stdout stderr platform exit"
_OF_FILES = """
    exists lexists is_file is_dir is_symlink is_mount isfile isdir islink ismount iterdir glob rglob stat lstat walk
    samefile owner group cwd home getmtime getctime getatime getsize listdir scandir readlink memmap from_file safe_open
"""
_OF_PROCESSES = """
    argv getpid _getframe currentframe stack distributed hub cpp_extension get_device_properties get_device_name
    get_device_capability mem_get_info memory_allocated memory_reserved max_memory_allocated current_device Event
"""
_OF_CHANCE = "default_rng SystemRandom initial_seed urandom id hash"  # also seeds of hashes and addresses
_OF_CODE = "eval exec __import__ input"
_CERTAIN = frozenset(_IMPORTS.split())
_PARTS = {"os": frozenset(_OF_OS.split()), "sys": frozenset(_OF_SYS.split())}
_ASKS = frozenset(" ".join((_OF_FILES, _OF_PROCESSES, _OF_CHANCE, _OF_CODE)).split())


def check_code(path: Path, own_packages: Collection[str], is_of_a_process: Callable[[str], bool]) -> None:
    """Raises Uncertain for a file that may ask the world outside of the process, or which process it runs in.

    ``own_packages``: imports that are the user's own files. ``is_of_a_process``: of a variable of the environment,
    whether ranks of one host may have different values of it.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        raise Uncertain(f"{path} cannot be read") from error
    asked = next(_asked(tree, own_packages, is_of_a_process), None)
    if asked is not None:
        line, what = asked
        raise Uncertain(f"{path}:{line} {what}")


def _asked(
    tree: ast.AST, own_packages: Collection[str], is_of_a_process: Callable[[str], bool]
) -> Iterator[tuple[int, str]]:
    """(line, uncertain use)."""
    aliases = {alias.asname or alias.name: alias.name for node in ast.walk(tree) if isinstance(node, ast.Import)
               for alias in node.names if alias.name in _PARTS}  # fmt: skip
    certain_uses: set[int] = set()
    for node in ast.walk(tree):  # parents come before their children
        match node:
            case ast.Import(names=names):
                modules, parts = [alias.name for alias in names], []
            case ast.ImportFrom(module=module, names=names, level=level):
                modules = [] if level else [module or ""]
                parts = [alias.name for alias in names]
                if module in _PARTS and (others := set(parts) - _PARTS[module]):
                    yield node.lineno, f"imports {', '.join(sorted(others))} of {module}"
            case ast.Attribute(value=ast.Name(id=name) as owner, attr=attribute) if name in aliases:
                if attribute not in _PARTS[aliases[name]]:
                    yield node.lineno, f"uses {name}.{attribute}"
                certain_uses.add(id(owner))
                continue
            case ast.Attribute(attr=attribute):
                modules, parts = [], [attribute]
            case ast.Name(id=name):
                if name in aliases and id(node) not in certain_uses:
                    yield node.lineno, f"hands {name} on"
                modules, parts = [], [name]
            case ast.Constant(value=str() as text):
                if len(text) > 1 and is_of_a_process(text):
                    yield node.lineno, f"names {text}, which is another in each process"
                continue
            case _:
                continue
        for module in modules:
            words = module.split(".")
            if words[0] not in _CERTAIN and words[0] not in own_packages:
                yield node.lineno, f"imports {module}"
            parts = [*parts, *words[1:]]
        if asks := _ASKS.intersection(parts):
            yield node.lineno, f"uses {', '.join(sorted(asks))}"
