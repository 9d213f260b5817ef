"""Links in bundles: those of the Hugging Face cache are read, and never written through; no other leads out."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from g4patch import check, fix, inspect
from g4patch.cli import main
from g4patch.errors import BundleError
from g4patch.links import stays_inside
from g4patch.report import Outcome, Status
from g4patch.verdicts import Verdict
from tests.conftest import Copy, tree
from tests.test_coreai_format import needs_coreai


@pytest.mark.parametrize(
    "name", ["onnx-stage", "coreml-fp32", pytest.param("coreai-stage", marks=[pytest.mark.slow, needs_coreai])]
)
def test_the_cache_is_read_and_left_alone(
    name: str, cached: Copy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = cached(name)
    before = tree(tmp_path)
    assert check(bundle).verdict is Verdict.RAW
    assert main(["fix", str(bundle)]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "which other bundles may share" in error
    assert "-o OUT" in error
    report = fix(bundle, out=tmp_path / "out")
    assert report.outcome is Outcome.FIXED
    assert {found.status for found in report.checks} == {Status.PASSED}
    mended = tmp_path / "out" / bundle.name
    assert not [path for path in (mended, *mended.rglob("*")) if path.is_symlink()]
    shutil.rmtree(tmp_path / "out")
    assert tree(tmp_path) == before


def test_a_folder_in_the_cache(cached: Copy, tmp_path: Path) -> None:
    """A whole snapshot, with the configuration in it."""
    snapshot = cached("mobius-text").parent
    assert fix(snapshot, out=tmp_path / "out").outcome is Outcome.FIXED


@pytest.mark.parametrize("place", ["../mine", "../models--org--other/blobs/blob"])
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("onnx-stage", "model.onnx.data"),
        ("coreml-fp32", "stage.mlpackage/Manifest.json"),
        ("coreml-fp32", "stage.mlpackage/Data/com.apple.CoreML/model.mlmodel"),
        ("coreml-fp32", "stage.mlpackage/Data/com.apple.CoreML/weights/weight.bin"),
        pytest.param("coreai-stage", "stage.aimodel/main.hash", marks=needs_coreai),
    ],
)
def test_links_to_anything_else_are_refused(name: str, file: str, place: str, cached: Copy) -> None:
    bundle = cached(name)
    snapshot = bundle.parent
    target, link = snapshot.parents[1] / place, snapshot / file
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(link, target)
    link.unlink()
    link.symlink_to(target)
    with pytest.raises(BundleError, match=r"out of the|outside"):
        inspect(bundle)


def test_a_folder_that_only_looks_like_the_cache(cached: Copy) -> None:
    """Without the downloader's own name for a repository, the blobs may be anybody's."""
    bundle = cached("coreml-fp32")
    repository = bundle.parents[2]
    moved = repository.rename(repository.with_name("photos")) / bundle.relative_to(repository)
    with pytest.raises(BundleError, match="out of the package"):
        inspect(moved)


def test_blobs_that_are_a_link_themselves(cached: Copy, tmp_path: Path) -> None:
    bundle = cached("coreml-fp32")
    blobs = bundle.parents[2] / "blobs"
    blobs.rename(tmp_path / "mine")
    blobs.symlink_to(tmp_path / "mine")
    with pytest.raises(BundleError, match="out of the package"):
        inspect(bundle)


def test_a_folder_of_the_package_that_is_a_link(copy: Copy, tmp_path: Path) -> None:
    package = copy("coreml-fp32")
    (package / "Data").rename(tmp_path / "Data")
    (package / "Data").symlink_to(tmp_path / "Data")
    with pytest.raises(BundleError, match="out of the package"):
        inspect(package)


def test_a_bundle_that_is_a_link_itself(copy: Copy, tmp_path: Path) -> None:
    """The user named it, and so chose where it leads."""
    package = copy("coreml-fp32")
    link = package.with_name("link.mlpackage")
    link.symlink_to(package.rename(tmp_path / "stage.mlpackage"))
    assert inspect(link).verdict is Verdict.RAW


@pytest.mark.parametrize("name", ["onnx-stage", "coreml-fp32"])
def test_nothing_from_elsewhere_is_copied(name: str, copy: Copy, tmp_path: Path) -> None:
    """A file that no format asks for may be a link too."""
    (tmp_path / "mine").write_text("a secret")
    bundle = copy(name)
    folder = bundle if bundle.is_dir() else bundle.parent
    if bundle.is_file():
        shutil.copy(bundle, folder / "another.onnx")  # of one model alone, nothing else would be copied
    (folder / "README.md").symlink_to(tmp_path / "mine")
    with pytest.raises(BundleError, match=r"README.md is a link out of"):
        fix(folder, out=tmp_path / ("out" if bundle.is_file() else "out.mlpackage"))
    copies = [path for path in tmp_path.rglob("*") if path.is_file() and path.read_text(errors="ignore") == "a secret"]
    assert set(copies) == {tmp_path / "mine", folder / "README.md"}


def test_links_in_circles_are_an_error_of_the_bundle(copy: Copy) -> None:
    package = copy("coreml-fp32")
    weights = package / "Data/com.apple.CoreML/weights/weight.bin"
    weights.unlink()
    weights.symlink_to(weights)
    with pytest.raises(BundleError):
        inspect(package)


def test_inside(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "link").symlink_to("../home/file")
    assert stays_inside(tmp_path / "home" / "link", tmp_path / "home")
    assert not stays_inside(tmp_path / "home" / ".." / "file", tmp_path / "home")
    assert not stays_inside(tmp_path / "homes", tmp_path / "home")
    blobs, snapshot = tmp_path / "models--org--name" / "blobs", tmp_path / "models--org--name" / "snapshots" / "0123abc"
    assert stays_inside(blobs / "blob", snapshot / "stage.mlpackage")
    assert not stays_inside(blobs / "more" / "blob", snapshot / "stage.mlpackage")
    assert not stays_inside(blobs, snapshot / "stage.mlpackage")
