"""Which links in a bundle are followed: a bundle from strangers must not make us read, or copy, what lies elsewhere.

There is one exception. The Hugging Face cache keeps every file of a snapshot as a link to a blob of its repository:

    models--ORG--NAME/snapshots/REVISION/stage.mlpackage/Manifest.json -> ../../../blobs/DIGEST
    models--ORG--NAME/blobs/DIGEST

The downloader writes that folder, and nothing but files of the one repository: a link into it leads to what its author
published, and to nothing of the user's. The bundle that a user names may itself be a link: they chose where it leads.
"""

from __future__ import annotations

from pathlib import Path

_REPOSITORY = "models--"


def stays_inside(path: Path, home: Path) -> bool:
    """Whether a path leads to something in the folder `home`, or to a blob of the cached repository that `home` is in.

    Raises OSError or RuntimeError for links that lead in circles.
    """
    home, target = home.resolve(), path.resolve()
    return target.is_relative_to(home) or target.parent == _blobs(home)


def _blobs(home: Path) -> Path | None:
    for folder in (home, *home.parents):
        if folder.name == "snapshots" and folder.parent.name.startswith(_REPOSITORY):
            return folder.parent / "blobs"
    return None
