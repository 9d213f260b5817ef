"""SHA-256 of files, and of those of a bundle before and after the work on it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from g4patch.report import HashedFile, Report


class Hashed(StrEnum):
    """Which files of a bundle are hashed: those that hold its graphs, or all. Weights may be gigabytes."""

    NOTHING = "nothing"
    GRAPHS = "graphs"
    ALL = "all"


def sha256(path: Path) -> str:
    """The digest of a file's bytes, hexadecimal. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def taken(report: Report, which: Hashed) -> dict[Path, str]:
    """Digests of a bundle's files as they are, before anything is published."""
    if which is Hashed.NOTHING:
        return {}
    models = [model.subject.model for model in report.models]
    files = [path for model in models for path in (model.replaced if which is Hashed.GRAPHS else model.files)]
    return {path: sha256(path) for path in dict.fromkeys(files)}


def compared(report: Report, before: Mapping[Path, str]) -> tuple[HashedFile, ...]:
    """The same files as the command left them. What it did not write is not read again."""
    written = {path for model in report.models if model.plan.edits for path in model.subject.model.replaced}
    if report.publication is None:
        written = set()
    places = {path: _place(report, path) for path in before}
    return tuple(
        HashedFile(places[path], sha256(places[path]) if path in written else digest, digest)
        for path, digest in before.items()
    )


def _place(report: Report, path: Path) -> Path:
    """Where a file of the bundle is now: elsewhere if a copy was made."""
    if report.publication is None:
        return path
    source, target = report.publication.source, report.publication.target
    if path.is_relative_to(source):
        return target / path.relative_to(source) if path != source else target
    return target.parent / path.relative_to(source.parent)
