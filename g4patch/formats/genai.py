"""onnxruntime-genai's `genai_config.json`: which model's outputs feed which model's inputs."""

from __future__ import annotations

from pathlib import Path

from g4patch import configs
from g4patch.edits import Plan
from g4patch.errors import EditError
from g4patch.formats import NOT_STAGED, Model, Staged
from g4patch.runtimes import Probe, Unavailable

NAME = "onnxruntime-genai config"
MASK_DTYPES: frozenset[str] = frozenset()


def open_model(path: Path, staged: Staged = NOT_STAGED) -> Model:
    """Read a configuration. Raises BundleError where it is none."""
    source = staged.get(path, path)
    return Model(path, NAME, (), (path,), (path,), source, (), None, config=configs.read(source))


def complete(model: Model, plan: Plan) -> Plan:
    """The plan itself."""
    return plan


def write(model: Model, plan: Plan, staged: Staged) -> None:
    """Write the file with the plan's entries. Raises EditError where they have no place in it."""
    staged[model.path].write_bytes(_with_entries(model, plan).encode())


def _with_entries(model: Model, plan: Plan) -> str:
    if model.config is None or len(plan.config_sets) < len(plan.edits):
        raise EditError(f"the plan does not fit {model.path.name}", "make it again")
    return model.config.with_entries(plan.config_sets)


def differences(before: Model, after: Model, plan: Plan) -> tuple[str, ...]:
    """Whether the file is the old one with the plan's entries, byte by byte."""
    if after.graph_file.read_bytes() == _with_entries(before, plan).encode():
        return ()
    return (f"{after.path.name} is not the old file with the planned entries",)


def validate(model: Model) -> tuple[str, ...]:
    """Nothing to say: there is no validator for these files."""
    return ()


def probe(model: Model, graph: str) -> Probe:
    """Raises Unavailable: nothing in a configuration runs."""
    raise Unavailable("a configuration computes nothing")
