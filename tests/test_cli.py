"""What a person sees: words, exit codes, streams, and that nothing heavy is loaded for nothing."""

from __future__ import annotations

import hashlib
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from g4patch import __version__
from g4patch.arguments import parser
from g4patch.cli import main
from tests.conftest import SAMPLES, Copy, sample

FORMAT_LIBRARIES = ("onnx", "onnxruntime", "coremltools", "coreai", "torch", "google.protobuf")


def loaded_by(*arguments: str) -> set[str]:
    """Which format libraries a command imports."""
    code = (
        "import sys; from g4patch.cli import main\n"
        f"try: main({list(arguments)!r})\nexcept SystemExit: pass\n"
        f"print('LOADED', *[name for name in {FORMAT_LIBRARIES!r} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.splitlines()[-1].split()[1:])


def test_version_loads_no_format_library() -> None:
    assert loaded_by("--version") == set()
    assert loaded_by("explain") == set()


def test_a_format_loads_only_what_it_needs() -> None:
    assert loaded_by("check", str(sample("onnx-right"))) == {"onnx", "google.protobuf"}


def test_inspect_shows_the_row_map(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--show-ple", str(sample("onnx-stage"))]) == 0
    out = capsys.readouterr().out
    assert "RAW  (fixable)" in out
    assert "image  310     reads row 310     should read 0   wrong" in out
    assert "317 other ids read their own row" in out
    assert "for: image; not for: audio, video, pad" in out
    assert "from config.json" in out
    assert all(len(line) <= 80 for line in out.splitlines())


def test_inspect_prints_digests_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    path = sample("onnx-right")
    assert main(["inspect", "--digests", str(path)]) == 0
    assert hashlib.sha256(path.read_bytes()).hexdigest() in capsys.readouterr().out


def test_digests_are_what_sha256sum_checks(capsys: pytest.CaptureFixture[str]) -> None:
    folder = SAMPLES / "coreai-two-stage"
    assert main(["inspect", "--digests", str(folder)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if re.match("  [0-9a-f]{64}  ", line)]
    assert len(lines) == 6
    for digest, name in map(str.split, lines):
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest


def test_an_empty_path_is_not_the_current_folder(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script whose variable is not set must not mend what happens to be here."""
    bundle = copy("onnx-stage")
    before = bundle.read_bytes()
    monkeypatch.chdir(bundle.parent)
    for arguments in (["fix", ""], ["fix", str(bundle), "-o", ""], ["check", ""], ["revert", ""]):
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        assert exit_.value.code == 2
    assert bundle.read_bytes() == before


def test_commands_to_copy_are_quoted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = shutil.copytree(sample("onnx-stage").parent, tmp_path / "a b; c") / "model.onnx"
    (tmp_path / "a b; c" / "model.onnx.reference.safetensors").unlink()
    for arguments in (["check"], ["fix", "--dry-run"], ["fix"]):
        main([*arguments, str(bundle)])
        assert f"'{bundle}'".replace(" ", "") in "".join(capsys.readouterr().out.split())


def test_what_was_mended_is_not_called_fixable(copy: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fix", str(copy("onnx-stage"))]) == 0
    out = capsys.readouterr().out
    assert "RAW  (fixed)" in out
    assert "fixable" not in out


def test_hints_wrap_below_themselves(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["explain", "no-such-rule"]) == 2
    first, *hint = capsys.readouterr().err.splitlines()
    assert first.rstrip() == "error: there is no rule no-such-rule"
    assert len(hint) > 1
    assert all(line.startswith("       ") for line in hint)


def test_fix_tells_what_it_proved_and_how_to_undo(copy: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = copy("onnx-stage")
    assert main(["fix", str(bundle)]) == 0
    out = capsys.readouterr().out
    for words in ("structure      passed", "row map        passed", "differential   passed", "reference      passed"):
        assert words in out
    assert "g4patch revert" in out
    assert main(["fix", str(bundle)]) == 0
    assert "already fixed, nothing was written" in capsys.readouterr().out
    assert main(["revert", str(bundle)]) == 0
    assert bundle.read_bytes() == sample("onnx-stage").read_bytes()
    assert not bundle.with_name("model.onnx.g4patch").exists()


def test_dry_run_shows_the_nodes_concerned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fix", "--dry-run", str(sample("onnx-stage"))]) == 1
    out = capsys.readouterr().out
    assert "Gather embedding  (unchanged)" in out
    assert "Gather embedding_1  index <- $masked" in out
    assert "where($any_2, 0, input_ids)" in out


def test_check_goes_on_after_a_bundle_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(b"junk")
    assert main(["check", str(bad), str(sample("onnx-stage"))]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert "findings remain" in captured.out
    assert main(["check", str(sample("onnx-right")), str(sample("onnx-stage"))]) == 1


def test_the_only_bundle_here_is_meant(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = copy("onnx-right")
    monkeypatch.chdir(bundle.parent)
    assert main(["check"]) == 0
    bundle.with_name("second.onnx").write_bytes(bundle.read_bytes())
    assert main(["check"]) == 2
    monkeypatch.chdir(SAMPLES)
    assert main(["check"]) == 2


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("model.mlmodelc", "patch the .mlpackage"),
        ("model.mlarchive", "encrypted"),
        ("model.mlmodel", "point at the .mlpackage"),
        ("main.aimodelc", "patch the .aimodel"),
        ("model.gguf", "GGUF"),
        ("notes.txt", "bundles are called"),
    ],
)
def test_what_cannot_be_patched_says_what_to_do(
    name: str, hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(b"")
    assert main(["check", str(tmp_path / name)]) == 2
    assert hint in capsys.readouterr().err


def test_names_from_strangers_are_not_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "[red]\x1b[31m.onnx"
    path.write_bytes(b"junk")
    assert main(["check", str(path)]) == 2
    err = capsys.readouterr().err
    assert "[red]?[31m.onnx" in "".join(err.split())
    assert "\x1b" not in err


def test_names_from_strangers_hold_no_control_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = onnx.load(sample("onnx-stage"), load_external_data=False)
    for node in model.graph.node:
        node.input[:] = [name.replace("input_ids", "\x1b]0;ids\n::error::") for name in node.input]
    model.graph.input[1].name = "\x1b]0;ids\n::error::"
    model.producer_name = "\x1b[2J"
    folder = shutil.copytree(sample("onnx-stage").parent, tmp_path / "a\x9b")
    (folder / "model.onnx").unlink()
    (folder / "\x1b[31m.onnx").write_bytes(model.SerializeToString())
    for arguments in (["inspect", "--show-ple", "--digests"], ["fix", "--dry-run"], ["fix"], ["revert"]):
        main([*arguments, str(folder / "\x1b[31m.onnx")])
        out = capsys.readouterr().out
        assert "?[31m.onnx" in out
        assert not re.search("[\x1b\x9b]", out)
        assert not re.search("^ *::error", out, re.MULTILINE)


def test_explain_prints_pages_and_lists_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "ple-raw-ids"]) == 0
    assert "Why this is bad" in capsys.readouterr().out
    assert main(["explain"]) == 0
    assert "ple-raw-ids" in capsys.readouterr().out
    assert main(["explain", "checks"]) == 0
    assert "Which check sees which fault" in capsys.readouterr().out
    assert main(["explain", "no-such-rule"]) == 2
    assert "there are: " in capsys.readouterr().err


def test_module_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    result = subprocess.run([sys.executable, "-m", "g4patch", "--version"], capture_output=True, text=True, check=True)
    assert result.stdout == f"g4patch {__version__}\n"


COMMANDS = ("inspect", "check", "fix", "verify", "record", "revert", "explain", "completion")


def test_every_command_has_examples_that_parse(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    def help_of(*arguments: str) -> list[str]:
        with pytest.raises(SystemExit):
            main([*arguments, "--help"])
        return capsys.readouterr().out.splitlines()

    top = help_of()
    assert all(any(line.split()[:1] == [name] for line in top) for name in COMMANDS)
    for page in (top, *map(help_of, COMMANDS)):
        assert all(len(line) <= 80 for line in page)
        examples = [line for line in page[page.index("examples:") :] if line.startswith("  g4patch ")]
        assert examples
        for line in examples:
            command = line.strip().split("   ")[0].split(" > ")[0]
            parser().parse_args(shlex.split(command)[1:])


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in (*COMMANDS, "--show-ple", "--attest"):
        assert word in script
    place = tmp_path / "completion"
    place.write_text(script)
    if shutil.which(shell):
        subprocess.run([shell, "-n", place], check=True)


def test_bash_completes_commands_flags_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not shutil.which("bash"):
        pytest.skip("there is no bash here")
    main(["completion", "bash"])
    (tmp_path / "completion").write_text(capsys.readouterr().out)
    (tmp_path / "model.onnx").touch()

    def completed(*words: str) -> set[str]:
        code = f"""
        source ./completion
        COMP_WORDS=({" ".join(map(shlex.quote, words))}); COMP_CWORD={len(words) - 1}
        $(complete -p g4patch | sed 's/.*-F \\([^ ]*\\).*/\\1/') 2>/dev/null
        printf '%s\\n' "${{COMPREPLY[@]}}"
        """
        done = subprocess.run(["bash", "-c", code], cwd=tmp_path, capture_output=True, text=True)
        return set(done.stdout.split())

    assert completed("g4patch", "ins") == {"inspect"}
    assert "--dry-run" in completed("g4patch", "fix", "--d")
    assert completed("g4patch", "fix", "mod") == {"model.onnx"}
    assert "sarif" in completed("g4patch", "check", "--format", "sa")
