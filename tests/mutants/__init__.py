"""Wrong fixes, and which check of `verify` sees which: `python -m tests.mutants [FORMAT]` prints the table.

A mutant is a mended bundle with one fault. There are two kinds. A *wrong plan* (`tests.mutants.plans`) is what a
faulty rule would ask for; the format's own writer writes it faithfully, and the structure check is told that plan. A
*wrong file* has a fault that no plan asked for, put in with the format's own tools (`tests.mutants.onnx_files` and its
kind).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from g4patch import engine, formats, inspect, reference, verify
from g4patch.edits import Plan
from g4patch.report import Check, Status, Subject

# The bundles that mutants are made of: a whole stage with a reference, two lookups in one graph, lookups in two
# functions or branches.
STAGE, TWO_LOOKUPS, TWO_FUNCTIONS = "stage", "two lookups", "two functions"

Builder = Callable[[Path], Path]  # puts an unpatched bundle into an empty folder
PlanChange = Callable[[Subject, Plan], Plan]
FileChange = Callable[[Path, Subject], None]  # changes a mended bundle; the subject is the unpatched one


@dataclass(frozen=True)
class Mutant:
    """One fault: of a plan that is right, or of a bundle that is mended rightly."""

    name: str
    plan: PlanChange | None = None
    file: FileChange | None = None
    base: str = STAGE


@dataclass(frozen=True)
class Bench:
    """A format's mutants, and the bundles they are made of."""

    name: str
    bases: Mapping[str, Builder]
    mutants: tuple[Mutant, ...]


@dataclass(frozen=True)
class Judged:
    """What each check said of a mutant. `differs`: the file is not the right fix, byte for byte of its graph."""

    checks: Mapping[str, Check]
    differs: bool

    @property
    def killers(self) -> frozenset[str]:
        """The checks that fail. None sees what another one says: each kills what it kills by itself."""
        return frozenset(name for name, check in self.checks.items() if check.status is Status.FAILED)


@dataclass
class Workshop:
    """Makes and judges mutants of one format below a folder. Each base is built and analysed once."""

    bench: Bench
    folder: Path
    _bases: dict[str, tuple[Path, Subject, Plan]] = field(default_factory=dict)

    def base(self, name: str) -> tuple[Path, Subject, Plan]:
        """The unpatched bundle, and the plan that is right for it."""
        if name not in self._bases:
            folder = self.folder / name
            folder.mkdir(parents=True)
            bundle = self.bench.bases[name](folder)
            report = inspect(bundle)
            self._bases[name] = bundle, report.subject, report.plan
        return self._bases[name]

    def make(self, mutant: Mutant) -> tuple[Path, Plan]:
        """Write a mutant into a folder of its own; the plan is the one that was written."""
        bundle, before, right = self.base(mutant.base)
        folder = self.folder / "mutants" / mutant.name
        shutil.copytree(bundle.parent, folder)
        made = folder / bundle.name
        staged = {target: made.parent / target.relative_to(bundle.parent) for target in before.model.replaced}
        for stage in staged.values():
            stage.unlink()
        plan = mutant.plan(before, right) if mutant.plan else right
        formats.of(before.model).write(before.model, plan, staged)
        if mutant.file:
            mutant.file(made, before)
        return made, plan

    def judge(self, mutant: Mutant) -> Judged:
        """All checks of a mutant, as `fix` runs them."""
        bundle, before, right = self.base(mutant.base)
        made, plan = self.make(mutant)
        after = engine.open_model(made)
        place = reference.beside(bundle)
        checks = verify.verify_patch(before, after, plan, reference.load(place) if place else None)
        differs = bool(formats.of(before.model).differences(before.model, after.model, right))
        return Judged({check.name: check for check in checks}, differs)

    def judge_all(self) -> Iterator[tuple[Mutant, Judged]]:
        for mutant in self.bench.mutants:
            yield mutant, self.judge(mutant)


def sample(name: str) -> Builder:
    """A base that is one of the samples."""
    return partial(_copy_sample, name)


def _copy_sample(name: str, folder: Path) -> Path:
    from tests.conftest import SAMPLES
    from tests.conftest import sample as bundle_of

    shutil.copytree(SAMPLES / name, folder, dirs_exist_ok=True)
    return folder / bundle_of(name).name


def benches() -> dict[str, Bench]:
    """Each format's mutants, by the name that the command takes."""
    from tests.mutants.coreai_files import BENCH as COREAI
    from tests.mutants.coreml_files import BENCH as COREML
    from tests.mutants.onnx_files import BENCH as ONNX

    return {"onnx": ONNX, "coreml": COREML, "coreai": COREAI}
