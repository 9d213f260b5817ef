"""What the command line takes: one parser, and the engine's options out of what it read."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from rich_argparse import RawDescriptionRichHelpFormatter

from g4patch import __version__
from g4patch.copying import Progress
from g4patch.engine import Options
from g4patch.record import Request, parse_ids, parse_stages
from g4patch.tokens import MODALITIES, TokenFlags

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

_EXAMPLES = """\
examples:
  g4patch inspect --show-ple bundle.mlpackage   which row does each media id read?
  g4patch check exports/*.onnx                  findings and an exit code
  g4patch fix --dry-run model.onnx              what would change?
  g4patch fix model.onnx                        mend it in place, with proof
  g4patch fix model.onnx -o mended/             mend a copy
  g4patch record --hf google/gemma-4-E2B-it -o model.onnx.reference.safetensors
                                                what the model should compute
"""

_RECORD_EXAMPLES = """\
examples:
  g4patch record --hf google/gemma-4-E2B-it --split 0:15,15:35 -o REF
  g4patch record --hf ./gemma --image cat.png --prompt "What is this?" -o REF
  g4patch record --hf ./tiny --ids 2,7,258880,9 --steps 8 -o REF
  g4patch record --from-npz activations.npz -o REF
then:
  g4patch verify BUNDLE --reference REF
"""

_EXIT_CODES = """\
exit codes:
  0  nothing to fix, or fixed          3  a check failed, nothing was published
  1  findings remain, or inconclusive  4  a required check could not run here
  2  usage, or a bundle that cannot be read
"""


def parser() -> argparse.ArgumentParser:
    """The parser of all commands. What it reads has `command`, the name of the one that was given."""
    top = argparse.ArgumentParser(
        prog="g4patch",
        description="Mend exported Gemma 4 bundles whose per-layer embeddings are looked up with media ids.",
        epilog=f"{_EXAMPLES}\n{_EXIT_CODES}",
        formatter_class=RawDescriptionRichHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"g4patch {__version__}")
    commands = top.add_subparsers(required=True, dest="command", metavar="COMMAND")
    for add in (_add_inspect, _add_check, _add_fix, _add_verify, _add_record, _add_revert, _add_explain):
        add(commands)
    return top


def _add_inspect(commands: Commands) -> None:
    command = _command(commands, "inspect", "show what a bundle is and what it does about PLE")
    command.add_argument("--show-ple", action="store_true", help="show each lookup, its row map and the splice")
    command.add_argument("--digests", action="store_true", help="print the SHA-256 of each file")
    _add_bundle(command)


def _add_check(commands: Commands) -> None:
    command = _command(commands, "check", "look for faults; nothing is written")
    command.add_argument("bundles", nargs="*", type=Path, metavar="BUNDLE", help="default: the one in this folder")
    _add_common(command)


def _add_fix(commands: Commands) -> None:
    command = _command(commands, "fix", "mend a bundle and prove it")
    command.add_argument("-o", "--output", type=Path, metavar="OUT", help="write there; leave the input alone")
    command.add_argument("--unsafe", action="store_true", help="also make edits that are not safe everywhere")
    command.add_argument("--dry-run", action="store_true", help="stop after the plan and print it")
    _add_checks(command, ["structure", "row map", "differential", "reference"])
    _add_bundle(command)


def _add_verify(commands: Commands) -> None:
    command = _command(commands, "verify", "judge a bundle as it stands, against a reference")
    _add_checks(command, ["row map", "reference", "device"])
    command.add_argument(
        "--compute-unit", choices=["cpu", "gpu", "ane", "all"], default="", help="also run it on Core ML, on a Mac"
    )
    _add_bundle(command)


def _add_record(commands: Commands) -> None:
    command = commands.add_parser(
        "record",
        help="record what Hugging Face's model computes, as a reference",
        description="Record what Hugging Face's own model computes, as a reference for bundles: with\n"
        "and without media, text alone, and what the model goes on with.",
        epilog=_RECORD_EXAMPLES,
        formatter_class=RawDescriptionRichHelpFormatter,
    )
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--hf", metavar="MODEL", help="a hub name or a local folder; needs the extra `reference`")
    source.add_argument("--from-npz", type=Path, metavar="FILE", help="tensors that someone else produced")
    command.add_argument("-o", "--output", type=Path, required=True, metavar="REF", help="the file to write")
    command.add_argument("--image", type=Path, metavar="FILE", help="default: a drawing of coloured shapes")
    command.add_argument("--audio", type=Path, metavar="FILE", help="a WAV file; default: none")
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
    _add_token_ids(command, "for --from-npz; default: the file's own, then Gemma 4's")


def _add_revert(commands: Commands) -> None:
    command = _command(commands, "revert", "undo the last fix in place, byte for byte")
    command.add_argument("bundle", nargs="?", type=Path, metavar="BUNDLE", help="default: the one in this folder")


def _add_explain(commands: Commands) -> None:
    command = _command(commands, "explain", "print a rule's page, or what the checks can see")
    command.add_argument("topic", nargs="?", help="a rule, or `checks`; default: list them")


def _add_checks(command: argparse.ArgumentParser, checks: Sequence[str]) -> None:
    command.add_argument(
        "--reference", type=Path, metavar="FILE", help="default: BUNDLE.reference.safetensors, if it is there"
    )
    command.add_argument(
        "--require",
        action="append",
        default=[],
        choices=checks,
        help="do not publish if this check cannot run here",
    )


def _command(commands: Commands, name: str, summary: str) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")


def _add_bundle(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "bundle",
        nargs="?",
        type=Path,
        metavar="BUNDLE",
        help=".onnx, .mlpackage or .aimodel; default: the one in this folder",
    )
    _add_common(command)


def _add_common(command: argparse.ArgumentParser) -> None:
    rules = command.add_argument_group("rules", "default: all; see g4patch explain")
    for flag, what in (("select", "run only"), ("ignore", "do not run")):
        rules.add_argument(f"--{flag}", action="append", default=[], metavar="RULE", help=f"{what} this rule")
    output = command.add_argument_group("output")
    output.add_argument("--format", choices=["text", "json"], default="text", help="default: text")
    output.add_argument("--output-file", type=Path, metavar="FILE", help="write the report there")
    _add_token_ids(command, "default: config.json and the like beside the bundle, then Gemma 4's")


def _add_token_ids(command: argparse.ArgumentParser, default: str) -> None:
    group = command.add_argument_group("token ids", default)
    for name in (*MODALITIES, "pad"):
        group.add_argument(f"--{name}-token-id", type=int, metavar="ID")


def options(arguments: argparse.Namespace, progress: Progress) -> Options:
    """What a user asked for, as the engine takes it. Commands without a flag get its default."""
    return Options(
        token_flags(arguments),
        select=frozenset(arguments.select),
        ignore=frozenset(arguments.ignore),
        unsafe=getattr(arguments, "unsafe", False),
        reference=getattr(arguments, "reference", None),
        required=frozenset(getattr(arguments, "require", [])),
        compute_unit=getattr(arguments, "compute_unit", ""),
        progress=progress,
    )


def token_flags(arguments: argparse.Namespace) -> TokenFlags:
    """The token ids that a user gave."""
    return TokenFlags(
        arguments.image_token_id, arguments.audio_token_id, arguments.video_token_id, arguments.pad_token_id
    )


def request(arguments: argparse.Namespace) -> Request:
    """What a user asked `record --hf` for."""
    return Request(
        arguments.hf,
        image=arguments.image,
        audio=arguments.audio,
        prompt=arguments.prompt,
        ids=parse_ids(arguments.ids) if arguments.ids is not None else None,
        steps=arguments.steps,
        stages=parse_stages(arguments.split) if arguments.split is not None else None,
        dtype=arguments.dtype,
        precision=arguments.precision,
    )
