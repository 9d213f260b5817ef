"""`--attest`: an in-toto Statement v1 that in-toto's own library accepts, with digests that are those of the files."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.statement import Statement

from g4patch import __version__
from g4patch.cli import main
from g4patch.receipts import PREDICATE_TYPE
from g4patch.rules import find_rules
from tests.conftest import SAMPLES, Copy, sample


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read(path: Path) -> dict[str, Any]:
    """A statement, if it is one: in-toto's own parser knows every field, its own validator is content."""
    found: dict[str, Any] = json.loads(path.read_text())
    Statement.copy_from_pb(ParseDict(found, statement_pb2.Statement())).validate()
    return found


def subjects(statement: dict[str, Any]) -> dict[str, str]:
    return {subject["name"]: subject["digest"]["sha256"] for subject in statement["subject"]}


def test_fix_in_place(copy: Copy, tmp_path: Path) -> None:
    bundle, out = copy("onnx-stage"), tmp_path / "fix.json"
    assert main(["fix", str(bundle), "--attest", str(out)]) == 0
    statement = read(out)
    assert set(statement) == {"_type", "subject", "predicateType", "predicate"}
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == PREDICATE_TYPE
    assert subjects(statement) == {"model.onnx": sha256(bundle)}
    predicate = statement["predicate"]
    assert predicate["tool"]["version"] == __version__
    assert {rule["id"]: rule["digest"]["sha256"] for rule in predicate["rules"]} == {
        rule.id: sha256(rule.folder / "rule.toml") for rule in find_rules()
    }
    (one,) = predicate["bundles"]
    assert one["outcome"] == "fixed"
    assert one["files"] == [
        {
            "name": "model.onnx",
            "input": {"sha256": sha256(sample("onnx-stage"))},
            "output": {"sha256": sha256(bundle)},
        }
    ]
    (model,) = one["models"]
    assert (model["verdict"], model["verdict_after"]) == ("raw", "patched")
    assert model["token_ids"]["image"] == {"id": 310, "source": "config.json"}
    assert [check["status"] for check in model["checks"]] == ["passed"] * 5
    assert [layer["found"]["delta_norm"] for layer in model["checks"][3]["layers"]] == [0, 0, 0]
    receipt = json.loads((bundle.with_name("model.onnx.g4patch") / "0001" / "receipt.json").read_text())
    assert model["plan"] == receipt["models"][0]["plan"]


def test_all_files_on_request(copy: Copy, tmp_path: Path) -> None:
    bundle, out = copy("onnx-stage"), tmp_path / "fix.json"
    copied = tmp_path / "elsewhere" / "other.onnx"
    assert main(["fix", str(bundle), "-o", str(copied), "--attest", str(out), "--digests"]) == 0
    data = copied.with_name("model.onnx.data")
    assert subjects(read(out)) == {"other.onnx": sha256(copied), "model.onnx.data": sha256(data)}


def test_a_bundle_that_is_a_folder(copy: Copy, tmp_path: Path) -> None:
    bundle, out = copy("coreml-fp32"), tmp_path / "fix.json"
    assert main(["fix", str(bundle), "-o", str(tmp_path / "mended"), "--attest", str(out)]) == 0
    found = subjects(read(out))
    (graph,) = (tmp_path / "mended").rglob("model.mlmodel")
    assert found == {"stage.mlpackage/Data/com.apple.CoreML/model.mlmodel": sha256(graph)}


def test_only_what_passed_is_attested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("onnx-stage", "onnx-right", "onnx-fp16"):
        shutil.copytree(SAMPLES / name, tmp_path / name)
    (tmp_path / "onnx-stage" / "model.onnx").write_bytes(b"junk")
    out = tmp_path / "fix.json"
    folders = [str(tmp_path / name) for name in ("onnx-stage", "onnx-right", "onnx-fp16")]
    assert main(["fix", *folders, "-o", str(tmp_path / "out"), "--attest", str(out)]) == 2
    statement = read(out)
    assert subjects(statement) == {
        f"{name}/model.onnx": sha256(tmp_path / "out" / name / "model.onnx") for name in ("onnx-right", "onnx-fp16")
    }
    assert [one["outcome"] for one in statement["predicate"]["bundles"]] == [
        "nothing to fix, copied as it is",
        "fixed",
    ]
    assert main(["fix", folders[0], "--attest", str(tmp_path / "none.json")]) == 2
    assert not (tmp_path / "none.json").exists()
    assert "no statement was written" in capsys.readouterr().err
    assert main(["verify", folders[2], "--attest", str(tmp_path / "none.json")]) == 3
    assert not (tmp_path / "none.json").exists()


def test_verify(tmp_path: Path) -> None:
    out = tmp_path / "verify.json"
    assert main(["verify", str(sample("onnx-right")), "--attest", str(out)]) == 0
    statement = read(out)
    assert subjects(statement) == {"model.onnx": sha256(sample("onnx-right"))}
    (one,) = statement["predicate"]["bundles"]
    assert one["files"][0]["input"] == one["files"][0]["output"]
    assert [check["name"] for check in one["models"][0]["checks"]] == ["row map", "reference"]
