"""The house stands: layers import downwards only, core/ needs the standard library alone, `import octavo` is light."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import octavo

ROOT = Path(octavo.__file__).parent
LAYERS = (
    "core", "backends", "models", "tokenizers", "weights", "decoding", "engine", "sim", "cluster", "serve", "cli",
)  # fmt: skip
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))
IN_LAYERS = [name for name in MODULES if "/" in name]


def imported(name: str, source: str) -> set[str]:
    """Absolute names of all that a module imports, wherever in the file."""
    package = ["octavo", *name.split("/")[:-1]]
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{module}.{alias.name}" for alias in node.names} if module in ("octavo", "") else {module}
    return names


def layers_above(name: str, source: str) -> list[str]:
    """Imports of a module that go up the house."""
    own = LAYERS.index(name.split("/")[0])
    inside = [item.split(".") for item in imported(name, source) if item.startswith("octavo.")]
    return sorted(".".join(parts) for parts in inside if parts[1] in LAYERS and LAYERS.index(parts[1]) > own)


def test_every_folder_is_a_layer():
    assert {name.split("/")[0] for name in IN_LAYERS} <= set(LAYERS)


@pytest.mark.parametrize("name", IN_LAYERS)
def test_imports_go_down(name):
    assert layers_above(name, (ROOT / name).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import octavo.engine.llm",
        "from octavo.engine import llm",
        "from octavo import serve",
        "from ..engine.llm import LLM",
        "def f():\n    from octavo.cli.main import main",
    ],
)
def test_the_rule_sees_every_kind_of_import(source):
    assert len(layers_above("core/x.py", source)) == 1
    assert layers_above("cli/x.py", source) == []


@pytest.mark.parametrize("name", [name for name in IN_LAYERS if name.startswith("core/")])
def test_core_names_the_standard_library_only(name):
    tops = {item.split(".")[0] for item in imported(name, (ROOT / name).read_text(encoding="utf-8"))}
    assert tops - {"octavo"} <= sys.stdlib_module_names


BLOCKED = """
import importlib, json, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if top not in sys.stdlib_module_names and top != "octavo":
            raise ImportError(f"blocked: {name}")

sys.meta_path.insert(0, Block())
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    importlib.import_module(name)
tops = {name.split(".")[0] for name in sys.modules}
print(json.dumps(sorted(name for name in tops if name not in sys.stdlib_module_names | {"octavo", "__main__"})))
"""


def import_blocked(*names: str) -> subprocess.CompletedProcess:
    """Import modules in a bare interpreter (no site-packages) that refuses everything third-party."""
    command = [sys.executable, "-I", "-S", "-c", BLOCKED, str(ROOT.parent), *names]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_core_imports_with_everything_else_blocked():
    core = [name for name in IN_LAYERS if name.startswith("core/")]
    names = ["octavo." + name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in core]
    assert len(names) > 10
    result = import_blocked(*names)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == []


def test_the_block_blocks():
    assert "blocked: pytest" in import_blocked("pytest").stderr


def test_import_octavo_is_light():
    code = "import sys; before = set(sys.modules); import octavo; print('\\n'.join(set(sys.modules) - before))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    tops = {name.split(".")[0] for name in result.stdout.split()}
    assert "octavo" in tops
    assert tops - {"octavo"} <= sys.stdlib_module_names


@pytest.mark.parametrize("role", ["supervisor", "api", "tokenizer", "detokenizer"])
def test_processes_that_run_no_model_load_nothing_of_it(role):
    engine = {
        "octavo.engine.runner",
        "octavo.engine.core",
        "octavo.backends.numpy_backend",
        "octavo.decoding.speculation",
    }
    code = f"import octavo.serve.roles.{role}, sys; print([name for name in {sorted(engine)} if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"
