"""What the command line takes: one parser, with a function for each command."""

from __future__ import annotations

import argparse
from typing import TypeAlias

import shtab
from rich_argparse import RawDescriptionRichHelpFormatter

from g4patch import __version__
from g4patch.flags import BUNDLE, add_bundles, add_checks, add_common, add_path, add_token_ids

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

_EXAMPLES = """\
examples:
  g4patch inspect --show-ple bundle.mlpackage   which row is read by which id?
  g4patch check exports/*.onnx                  findings and an exit code
  g4patch fix --dry-run model.onnx              what would change?
  g4patch fix model.onnx                        mend it in place, with proof
  g4patch fix exports/* -o release/             only what passed gets there
  g4patch record --hf google/gemma-4-E2B-it -o model.onnx.reference.safetensors

g4patch COMMAND --help has examples of each command.
"""

_EXIT_CODES = """\
exit codes:
  0    nothing to fix, or fixed
  1    findings remain, or inconclusive
  2    usage, or a bundle that cannot be read
  3    a check failed, nothing was published
  4    a required check could not run here, nothing was published
  130  interrupted
Of several bundles the worst counts: 130, 2, 3, 4, 1, 0, from worst to best.
"""


def parser() -> argparse.ArgumentParser:
    """The parser of all commands. What it reads has `command`, the name of the one that was given."""
    top = argparse.ArgumentParser(
        prog="g4patch",
        description="Mend exported Gemma 4 bundles whose per-layer embeddings (PLE) are looked up\n"
        "with the ids of image, audio and video placeholders.",
        epilog=f"{_EXAMPLES}\n{_EXIT_CODES}",
        formatter_class=RawDescriptionRichHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"g4patch {__version__}")
    commands = top.add_subparsers(required=True, dest="command", metavar="COMMAND")
    for add in (
        _add_inspect,
        _add_check,
        _add_fix,
        _add_verify,
        _add_record,
        _add_revert,
        _add_explain,
        _add_completion,
    ):
        add(commands)
    return top


def _add_inspect(commands: Commands) -> None:
    command = _command(
        commands,
        "inspect",
        "show what a bundle is and what it does about PLE",
        "The exit code is 0 also where there are findings.",
        """\
  g4patch inspect model.onnx                    what it is, and the verdict
  g4patch inspect --show-ple stage.aimodel      lookups, row maps and splices
  g4patch inspect --digests bundle.mlpackage    with the SHA-256 of each file
""",
    )
    command.add_argument("--show-ple", action="store_true", help="show each lookup, its row map and the splice")
    command.add_argument("--digests", action="store_true", help="print the SHA-256 of each file")
    add_path(command, "bundle", nargs="?", metavar="BUNDLE", help=BUNDLE)
    add_common(command)


def _add_check(commands: Commands) -> None:
    command = _command(
        commands,
        "check",
        "look for faults; nothing is written",
        "",
        """\
  g4patch check                                 the only bundle in this folder
  g4patch check exports/*                       many at once; the worst decides
  g4patch check --format sarif --output-file g4patch.sarif exports/*
  g4patch check --ignore later-stage-projection stage_1.aimodel
""",
    )
    add_bundles(command)
    add_common(command)


def _add_fix(commands: Commands) -> None:
    command = _command(
        commands,
        "fix",
        "mend bundles and prove it",
        "In place, what was replaced is kept in BUNDLE.g4patch/: see g4patch revert.\n"
        "A bundle that fails a check is left as it was. With -o the inputs are left\n"
        "alone, and a bundle in which there is nothing to fix is copied as it is.",
        """\
  g4patch fix --dry-run model.onnx              the plan, and nothing else
  g4patch fix model.onnx                        in place, with proof
  g4patch fix model.onnx -o mended/             a mended copy
  g4patch fix exports/* -o release/             only what passed gets there
  g4patch fix --require reference stage.aimodel
  g4patch fix exports/* -o release/ --attest release.intoto.json
""",
    )
    add_path(command, "-o", "--output", metavar="OUT", help="write there; leave the input alone. A folder, for several")
    command.add_argument("--unsafe", action="store_true", help="also make edits that are not safe everywhere")
    command.add_argument("--dry-run", action="store_true", help="stop after the plan and print it")
    add_checks(command, ["structure", "row map", "differential", "reference"], "do not publish")
    add_bundles(command)
    add_common(command)


def _add_verify(commands: Commands) -> None:
    command = _command(
        commands,
        "verify",
        "judge bundles as they stand, against a reference",
        "Patched by g4patch or not; nothing is written.",
        """\
  g4patch verify model.onnx                     with the reference beside it
  g4patch verify --reference gold.safetensors model.onnx
  g4patch verify --require reference release/*  exit code 4 where there is none
""",
    )
    add_checks(command, ["row map", "reference", "device"], "exit code 4")
    command.add_argument(
        "--compute-unit", choices=["cpu", "gpu", "ane", "all"], default="", help="also run it on Core ML, on a Mac"
    )
    add_bundles(command)
    add_common(command)


def _add_record(commands: Commands) -> None:
    command = _command(
        commands,
        "record",
        "record what Hugging Face's model computes, as a reference",
        "A reference for bundles: with and without media, text alone, and what the\n"
        "model goes on with. Put it beside a bundle, or name it with --reference.",
        """\
  g4patch record --hf google/gemma-4-E2B-it --split 0:15,15:35 -o REF
  g4patch record --hf ./gemma --image cat.png --prompt "What is this?" -o REF
  g4patch record --hf ./tiny --ids 2,7,258880,9 --steps 8 -o REF
  g4patch record --from-npz activations.npz -o REF
""",
    )
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--hf", metavar="MODEL", help="a hub name or a local folder; needs the extra `reference`")
    add_path(source, "--from-npz", metavar="FILE", help="tensors that someone else produced")
    add_path(command, "-o", "--output", required=True, metavar="REF", help="the file to write")
    add_path(command, "--image", metavar="FILE", help="default: a drawing of coloured shapes")
    add_path(command, "--audio", metavar="FILE", help="a WAV file; default: none")
    command.add_argument("--prompt", metavar="TEXT", help="default: to name the shapes")
    command.add_argument("--ids", metavar="LIST|FILE", help="token ids in place of a prompt, used as they are")
    command.add_argument("--steps", type=int, default=64, metavar="N", help="tokens to go on for; default: 64")
    command.add_argument("--split", metavar="0:21,21:42", help="layers of each stage; default: one stage")
    command.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="what the model is run in")
    command.add_argument(
        "--precision",
        choices=["float32", "float16", "bfloat16"],
        default="float32",
        help="of the bundles to be compared: it decides the tolerances; default: float32",
    )
    add_token_ids(command, "for --from-npz; default: the file's own, then Gemma 4's")


def _add_revert(commands: Commands) -> None:
    example = "  g4patch revert bundle.mlpackage               back to before the last fix\n"
    command = _command(
        commands,
        "revert",
        "undo the last fix in place, byte for byte",
        "A bundle that changed since is refused.",
        example,
    )
    add_path(command, "bundle", nargs="?", metavar="BUNDLE", help="default: the one in this folder")


def _add_explain(commands: Commands) -> None:
    examples = """\
  g4patch explain                               the rules
  g4patch explain ple-raw-ids                   the page of one
  g4patch explain checks                        which check sees which fault
"""
    command = _command(commands, "explain", "print a rule's page, or what the checks can see", "", examples)
    command.add_argument("topic", nargs="?", help="a rule, or `checks`; default: list them")


def _add_completion(commands: Commands) -> None:
    examples = """\
  g4patch completion bash > ~/.local/share/bash-completion/completions/g4patch
  g4patch completion zsh > ~/.zfunc/_g4patch    with ~/.zfunc in fpath
"""
    command = _command(commands, "completion", "print a script that completes g4patch in a shell", "", examples)
    command.add_argument("shell", choices=shtab.SUPPORTED_SHELLS, metavar="SHELL", help="one of: %(choices)s")


def _command(commands: Commands, name: str, summary: str, more: str, examples: str) -> argparse.ArgumentParser:
    """A subcommand whose help says what it does, what is worth knowing of it, and how it is called."""
    description = f"{summary[0].upper()}{summary[1:]}."
    return commands.add_parser(
        name,
        help=summary,
        description=f"{description}\n{more}" if more else description,
        epilog=f"examples:\n{examples}",
        formatter_class=RawDescriptionRichHelpFormatter,
    )
