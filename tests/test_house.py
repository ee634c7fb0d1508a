"""The house: what a user finds at the top, when wings are loaded, and that no floor imports one above it."""

import ast
import graphlib
import importlib
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import apgrad as ap

pytestmark = pytest.mark.quick

PACKAGE = Path(ap.__file__).parent

# What the modules of a part may import of apgrad, besides their own part.
FLOORS = {
    "_programs": set(),
    "_ground": {"_programs"},
    "expectations": {"_ground", "_programs"},
    "memory": {"_ground", "_programs"},
    "mplp": {"_ground", "_programs"},
    "rewiring": {"_ground", "_programs"},
    "tracing": {"_ground", "_programs"},
    "meta": {"_ground", "_programs", "expectations", "mplp"},
    "testing": {"_ground", "expectations"},
    "_pytest_plugin": {"testing"},
}


def imported(path):
    """The modules of apgrad that a file imports when it is run, as lists of names."""
    found, typing_only = [], set()
    tree = ast.parse(path.read_text())
    assert "import_module" not in path.read_text() or path == PACKAGE / "__init__.py", path
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            typing_only |= set(ast.walk(node))
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: modules are imported by their whole names"
            found += [[*(node.module or "").split("."), alias.name] for alias in node.names]
    return [names for names in found if names[0] == "apgrad"]


def test_no_floor_imports_a_higher_one():
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if part != "__init__":
            wrong += [(str(path), names) for names in imported(path) if names[1] not in {part} | FLOORS[part]]
    assert not wrong


def test_no_module_imports_itself_by_way_of_others():
    def name(path):
        parts = ["apgrad", *path.relative_to(PACKAGE).with_suffix("").parts]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    modules = {name(path): path for path in PACKAGE.rglob("*.py")}
    edges = {}
    for module, path in modules.items():
        candidates = [(".".join(names), ".".join(names[:-1])) for names in imported(path)]
        edges[module] = {long if long in modules else short for long, short in candidates} - {module}
        if path.name == "__init__.py":
            edges[module] = set()  # a package that hands names on is no circle: its modules do not import the package,
        else:
            own = [".".join(module.split(".")[:n]) for n in range(1, module.count(".") + 1)]
            assert not edges[module] & set(own), f"{module} imports from a package that it is in"

    graphlib.TopologicalSorter(edges).prepare()  # which raises a CycleError that names the modules


def test_wings_are_loaded_when_used_and_show_their_public_names_alone():
    program = """
import sys
import apgrad as ap
loaded = {"jax", "flax", "numpyro", "optax"} & set(sys.modules)
assert not loaded, loaded
assert set(dir(ap)) == {*ap.__all__, "__version__"}
for name in ap.__all__:
    assert getattr(ap, name) is not None, name
public = {name for name in vars(ap) if not name.startswith("_")}
assert public == set(ap.__all__), public ^ set(ap.__all__)
assert len(set(ap.__all__)) == len(ap.__all__)
try:
    ap.no_such_name
except AttributeError as error:
    assert "no_such_name" in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, cwd=PACKAGE.parent)


def test_type_checkers_see_the_names_that_are_loaded():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    branch = next(n for n in tree.body if isinstance(n, ast.If))
    aliases = [a for n in branch.body if isinstance(n, ast.ImportFrom) for a in n.names]
    whole = ast.parse((PACKAGE / "expectations" / "__init__.py").read_text()).body  # of which all names are imported
    aliases += [a for n in whole if isinstance(n, ast.ImportFrom) for a in n.names]
    names = [name for module in ap._GROUND for name in importlib.import_module(f"apgrad.{module}").__all__]
    assert {a.asname or a.name for a in aliases} | set(names) == {*ap._WINGS, *ap._MODULE_OF, "*"}


def test_private_modules_begin_with_an_underscore():
    paths = [path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py")]
    public = {str(path) for path in paths if not any(part.startswith("_") for part in path.parts)}
    assert public == {"expectations/diagnostics", "expectations/weights", "meta/data"}


def test_the_top_is_small():
    entries = [path.name for path in PACKAGE.iterdir() if path.name not in ("__pycache__", "py.typed", "__init__.py")]
    assert len(entries) <= 12, entries


def test_a_class_has_its_name_alone():
    bodies = [ast.parse(path.read_text()).body for path in PACKAGE.rglob("*.py")]
    names = Counter(node.name for body in bodies for node in body if isinstance(node, ast.ClassDef))
    assert not [name for name, count in names.items() if count > 1]


def test_the_page_of_the_house_names_folders_that_are_there():
    page = (PACKAGE.parent / "docs" / "how_it_works.md").read_text()
    named = re.findall(r"^\| `(.+?)` \|", page, re.MULTILINE)
    assert len(named) >= 8 and all((PACKAGE.parent / name).exists() for name in named), named
    parts = {f"apgrad/{path.name}/" for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert parts <= set(named), parts - set(named)
