"""What README.md recommends for pipelines is run, as far as it can be without a service."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from g4patch.arguments import parser
from tests.conftest import SAMPLES, tree

README = (SAMPLES.parent / "README.md").read_text(encoding="utf-8")

# Steps that need the network or a service, by how they begin. All others are run.
_NOT_HERE = ("pip install", "cosign")


def recipes() -> tuple[dict[str, Any], dict[str, Any]]:
    """The workflow and the pre-commit configuration."""
    workflow, hooks = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", README, re.DOTALL))
    return workflow, hooks


def test_the_table_of_rules_has_all_of_them() -> None:
    rules = {path.parent.name for path in (SAMPLES.parent / "rules").glob("*/rule.toml")}
    assert set(re.findall(r"^\| \[([a-z-]+)\] \|", README, re.MULTILINE)) == rules
    assert set(re.findall(r"^\[([a-z-]+)\]: rules/\1/README.md$", README, re.MULTILINE)) == rules


def test_the_commands_that_are_shown_parse() -> None:
    commands = re.findall(r"^    g4patch (.*?)(?:  +.*)?$", README, re.MULTILINE)
    assert len(commands) > 8
    for command in commands:
        parser().parse_args(shlex.split(command))


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """An environment in which `g4patch` is this one, and in which nothing can be fetched by it."""
    command = tmp_path / "bin" / "g4patch"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m g4patch "$@"\n')
    command.chmod(0o755)
    search = os.pathsep.join([str(SAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    no_proxy = {f"{scheme}_proxy": "http://127.0.0.1:9" for scheme in ("http", "https")}
    path = os.pathsep.join([str(command.parent), os.environ["PATH"]])
    return os.environ | {"PATH": path, "PYTHONPATH": search, "COLUMNS": "80"} | no_proxy


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A checkout with three exports: a right one, a broken one, and one whose file was cut in the middle."""
    folder = tmp_path / "job"
    for name, source in (("right", "onnx-right"), ("broken", "onnx-stage"), ("hostile", "onnx-stage")):
        shutil.copytree(SAMPLES / source, folder / "exports" / name)
    hostile = folder / "exports" / "hostile" / "model.onnx"
    hostile.write_bytes(hostile.read_bytes()[:100_000])
    return folder


def test_the_workflow_publishes_what_passed_and_tells_the_story(job: Path, shell: dict[str, str]) -> None:
    workflow, _ = recipes()
    steps = workflow["jobs"]["release"]["steps"]
    before = tree(job)
    log, codes = "", {}
    for step in steps:
        if "run" not in step or step["run"].startswith(_NOT_HERE):
            continue
        # As GitHub runs a step: one log for both streams, the first failure ends it.
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=job,
            env=shell,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        codes[step["name"]] = done.returncode
        log += done.stdout
    assert codes == {"Mend": 2, "Annotate": 0}
    assert {path: digest for path, digest in tree(job).items() if path in before} == before

    assert {path.name for path in (job / "release").iterdir()} == {"right", "broken"}
    assert tree(job / "release" / "right") == tree(job / "exports" / "right")
    mended, broken = tree(job / "release" / "broken"), tree(job / "exports" / "broken")
    assert {name for name, digest in mended.items() if broken[name] != digest} == {"model.onnx"}
    statement = json.loads((job / "release.intoto.json").read_text())
    assert {subject["name"]: subject["digest"]["sha256"] for subject in statement["subject"]} == {
        "broken/model.onnx": mended["model.onnx"],
        "right/model.onnx": tree(job / "release" / "right")["model.onnx"],
    }
    (run,) = json.loads((job / "g4patch.sarif").read_text())["runs"]
    places = [result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for result in run["results"]]
    assert set(places) == {"exports/broken/model.onnx"}

    assert "\x1b" not in log
    assert all(len(line) <= 80 for line in log.splitlines())
    story = [line.strip() for line in log.splitlines()]
    for line in (
        "fixed                           exports/broken/model.onnx",
        "error: exports/hostile/model.onnx is not an ONNX model, or is cut short",
        "3 bundles, exit code 2",
        "error                           exports/hostile",
        "nothing to fix, copied as it is exports/right/model.onnx",
        "the mended bundle is release/broken",
    ):
        assert line in story


def test_the_workflow_asks_for_no_more_than_it_needs() -> None:
    workflow, _ = recipes()
    steps = workflow["jobs"]["release"]["steps"]
    used = {step["uses"].split("@")[0] for step in steps if "uses" in step}
    # What each action needs beyond reading the repository, from their documentation.
    needs = {"github/codeql-action/upload-sarif": "security-events", "sigstore/cosign-installer": "id-token"}
    assert set(workflow["permissions"]) == {"contents", *(needs[action] for action in used & needs.keys())}
    after_mending = steps[[step.get("name") for step in steps].index("Mend") + 1 :]
    assert all(step["if"] == "${{ !cancelled() }}" for step in after_mending)


def test_the_hook_for_pre_commit(job: Path, shell: dict[str, str]) -> None:
    _, hooks = recipes()
    (hook,) = hooks["repos"][0]["hooks"]
    assert hooks["repos"][0]["repo"] == "local"
    files = [path for path in tree(job) if re.search(hook["files"], path)]
    assert sorted(files) == sorted(path for path in tree(job) if fnmatch(path, "*.onnx"))

    def run(*names: str) -> int:
        return subprocess.run([*hook["entry"].split(), *names], cwd=job, env=shell, capture_output=True).returncode

    assert run(*files) == 2
    assert run("exports/right/model.onnx") == 0
