"""Find rules by walking the `rules` folder, and run them.

A rule is a folder `rules/<id>/` with `rule.toml`, a page `README.md`, and `cases/`. Its check is one typed function;
adding a rule edits no list. A rule looks at each model by itself, or, with `looks_at = "bundle"`, at all models of a
bundle together, and says of which of them each finding is.
"""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from g4patch.errors import RuleError
from g4patch.report import Finding, Severity, Subject

ModelCheck = Callable[["Rule", Subject], Iterable[Finding]]
BundleCheck = Callable[["Rule", Sequence[Subject]], Iterable[tuple[Subject, Finding]]]

_LOOKS_AT = ("model", "bundle")


@dataclass(frozen=True)
class Rule:
    """One rule as its `rule.toml` states it.

    `fix` is "safe", "unsafe" or "none"; no `formats` means all; `looks_at` is "model" or "bundle".
    """

    id: str
    summary: str
    severity: Severity
    formats: tuple[str, ...]
    fix: str
    check: str
    looks_at: str
    folder: Path

    @property
    def page(self) -> str:
        """The rule's page, in Markdown."""
        return (self.folder / "README.md").read_text(encoding="utf-8")

    def run(self, subjects: Sequence[Subject]) -> Iterator[tuple[Subject, Finding]]:
        """What the rule says of the models of one bundle: of which of them, and what."""
        known = [subject for subject in subjects if not self.formats or subject.model.format in self.formats]
        if self.looks_at == "bundle":
            look_at_all: BundleCheck = _function(self)
            yield from look_at_all(self, known)
        else:
            look_at: ModelCheck = _function(self)
            yield from ((subject, finding) for subject in known for finding in look_at(self, subject))


def folders() -> tuple[Path, ...]:
    """Where rules are: beside the package in a checkout, inside it in an installed wheel."""
    package = Path(__file__).parent
    return tuple(path for path in (package / "_rules", package.parent / "rules") if path.is_dir())[:1]


def checks_page() -> str:
    """What each check of verify can see, and what it cannot, in Markdown."""
    return (folders()[0] / "checks.md").read_text(encoding="utf-8")


def find_rules(places: Iterable[Path] | None = None) -> tuple[Rule, ...]:
    """All rules, ordered by id. Raises RuleError for a folder that is not one."""
    found = [
        _load(path.parent) for place in (folders() if places is None else places) for path in place.glob("*/rule.toml")
    ]
    return tuple(sorted(found, key=lambda rule: rule.id))


def find_rule(name: str) -> Rule:
    """One rule by id. Raises RuleError with the ids there are."""
    rules = find_rules()
    for rule in rules:
        if rule.id == name:
            return rule
    raise RuleError(f"there is no rule {name}", f"there are: {', '.join(rule.id for rule in rules)}")


def _load(folder: Path) -> Rule:
    try:
        content = tomllib.loads((folder / "rule.toml").read_text(encoding="utf-8"))
        rule = Rule(
            id=content["id"],
            summary=content["summary"],
            severity=Severity(content["severity"]),
            formats=tuple(content.get("formats", ())),
            fix=content["fix"],
            check=content["check"],
            looks_at=content.get("looks_at", "model"),
            folder=folder,
        )
    except (OSError, KeyError, ValueError) as error:
        raise RuleError(f"{folder / 'rule.toml'} is not a rule: {error}", "see rules/ple-raw-ids") from error
    if rule.looks_at not in _LOOKS_AT:
        raise RuleError(f"rule {rule.id} looks at {rule.looks_at}", f"rules look at a {' or at a '.join(_LOOKS_AT)}")
    if rule.id != folder.name:
        raise RuleError(f"the rule in {folder} calls itself {rule.id}", "name the folder after the rule")
    return rule


def _function(rule: Rule) -> Any:
    module, _, name = rule.check.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise RuleError(f"rule {rule.id}: {rule.check} cannot be imported: {error}", "check rule.toml") from error
