"""JSON files that say how the models of a bundle are wired, and how to write one back with nothing else changed."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from g4patch.edits import ConfigSet
from g4patch.errors import BundleError, EditError

# Configuration files are a few KB; a larger one is not a configuration file.
_LIMIT = 4 * 1024 * 1024


@dataclass(frozen=True)
class Layout:
    """How a JSON file is laid out, as far as a JSON writer knows layouts."""

    indent: int | str | None
    ascii: bool
    end: str

    def write(self, content: Any) -> str:
        return json.dumps(content, indent=self.indent, ensure_ascii=self.ascii) + self.end


@dataclass(frozen=True)
class Config:
    """A configuration file. `layout` is None where writing it back would change more than what is set."""

    content: Mapping[str, Any]
    layout: Layout | None

    def section(self, *keys: str) -> Mapping[str, Any]:
        """The object at a path of keys, an empty one where there is none."""
        place: Any = self.content
        for key in keys:
            place = place.get(key) if isinstance(place, dict) else None
        return place if isinstance(place, dict) else {}

    def with_entries(self, entries: Sequence[ConfigSet]) -> str:
        """The file with entries set. Raises EditError where there is no place for one, or no way to write it back."""
        content: Any = copy.deepcopy(dict(self.content))
        for entry in entries:
            *above, last = entry.path
            place = content
            for key in above:
                place = place.setdefault(key, {}) if isinstance(place, dict) else None
            if not isinstance(place, dict):
                raise EditError(f"there is no place for {'.'.join(entry.path)}", "make the plan again")
            place[last] = entry.value
        if self.layout is None:
            raise EditError("the file cannot be written back as it is laid out", "add the entries by hand")
        return self.layout.write(content)


def load(path: Path) -> Any:
    """What a JSON file holds, None where there is no such file. Raises BundleError for one that cannot be read."""
    text = _text(path)
    return None if text is None else _parsed(path, text)


def read(path: Path) -> Config:
    """A configuration file with its layout. Raises BundleError where it is none."""
    text = _text(path)
    content = None if text is None else _parsed(path, text)
    if text is None or not isinstance(content, dict):
        raise BundleError(f"{path} is not a configuration file", "it should hold a JSON object")
    end = text[len(text.rstrip()) :]
    tried = itertools.product((2, 4, 3, 1, 8, "\t", None), (False, True))
    layouts = (Layout(indent, ascii, end) for indent, ascii in tried)
    return Config(content, next((layout for layout in layouts if layout.write(content) == text), None))


def _text(path: Path) -> str | None:
    try:
        if not path.is_file():
            return None
        if path.stat().st_size > _LIMIT:
            raise BundleError(f"{path} is larger than any configuration file", "is it the right file?")
        return path.read_bytes().decode()
    except (OSError, ValueError) as error:
        raise BundleError(f"{path} cannot be read: {error}", "mend or remove it") from error


def _parsed(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path} cannot be read as JSON: {error}", "mend or remove it") from error
