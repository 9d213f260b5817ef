"""What is installed is whole, and the layers of the house stay apart."""

from __future__ import annotations

import ast
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "g4patch"

_FORMAT_LIBRARIES = {"onnx", "onnxruntime", "onnx_graphsurgeon", "coremltools", "coreai", "google"}
_HUGGING_FACE = {"torch", "transformers", "PIL"}
_NEVER = {*_HUGGING_FACE, "tests", "samples"}

# Imported only when a model is run.
_RECORDERS = {PACKAGE / "record" / f"{name}.py" for name in ("hugging_face", "model", "prompts")}


def imports(path: Path) -> set[str]:
    """The dotted names of all modules that a file imports, at whatever depth."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_only_formats_and_runtimes_import_format_libraries() -> None:
    for path in PACKAGE.rglob("*.py"):
        libraries = {name.split(".")[0] for name in imports(path)}
        inside = path.relative_to(PACKAGE).parts[0] in ("formats", "runtimes")
        never = _NEVER - _HUGGING_FACE if path in _RECORDERS else _NEVER
        assert not libraries & (never if inside else never | _FORMAT_LIBRARIES), path


def test_torch_is_imported_only_when_a_model_is_run() -> None:
    modules = {f"g4patch.record.{path.stem}" for path in _RECORDERS}
    importers = {path for path in PACKAGE.rglob("*.py") if modules & imports(path)} - _RECORDERS
    assert importers == {PACKAGE / "record" / "__init__.py"}
    tree = ast.parse((PACKAGE / "record" / "__init__.py").read_text(encoding="utf-8"))
    at_import = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert "g4patch.record" not in at_import
    assert not at_import & modules


def test_formats_do_not_import_each_other_and_runtimes_no_format() -> None:
    names = ("onnx", "coreml", "coreai")
    for name in names:
        own = [PACKAGE / "formats" / f"{name}.py", *(PACKAGE / "formats" / name).rglob("*.py")]
        others = tuple(f"g4patch.formats.{other}" for other in names if other != name)
        for path in (path for path in own if path.exists()):
            assert not [module for module in imports(path) if module.startswith(others)], path
    for path in (PACKAGE / "runtimes").rglob("*.py"):
        assert not [module for module in imports(path) if module.startswith("g4patch.formats")], path


def test_nothing_else_names_a_format() -> None:
    formats = tuple(f"g4patch.formats.{name}" for name in ("onnx", "coreml", "coreai"))
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] not in ("formats", "runtimes"):
            assert not [name for name in imports(path) if name.startswith(formats)], path


@pytest.mark.slow
def test_an_installed_wheel_explains_its_rules_and_mends(tmp_path: Path) -> None:
    """Outside the checkout, from a wheel, with what the package itself depends on and nothing else."""
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", wheel], check=True)

    def g4patch(*arguments: str) -> str:
        result = subprocess.run(
            [python, "-m", "g4patch", *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return result.stdout

    rules = sorted(path.parent.name for path in (ROOT / "rules").glob("*/rule.toml"))
    listed = g4patch("explain")
    for rule in rules:
        assert rule in listed
        assert "Why this is bad" in g4patch("explain", rule)
    assert "Which check sees which fault" in g4patch("explain", "checks")
    assert "fixed" in g4patch("fix", str(ROOT / "samples" / "onnx-stage"), "-o", str(tmp_path / "mended"))
    installed = subprocess.run([python, "-m", "pip", "list"], capture_output=True, text=True, check=True).stdout
    assert "torch" not in installed.split()
