"""Flags that several commands share, and the engine's options out of what was given."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import shtab

from g4patch.batch import processors
from g4patch.copying import Progress
from g4patch.digests import Hashed
from g4patch.errors import UsageError
from g4patch.options import Options
from g4patch.output import RENDERERS
from g4patch.record import Request, parse_ids, parse_stages
from g4patch.thresholds import PRESETS, parse
from g4patch.tokens import MODALITIES, TokenFlags

BUNDLE = "an .onnx, .mlpackage, .aimodel or PLE sidecar, or a folder of them; default: the one in this folder"


def add_path(command: argparse._ActionsContainer, *names: str, **about: Any) -> None:
    """An argument that is a path, and that a shell completes as one."""
    action = command.add_argument(*names, type=_path, **about)
    setattr(action, "complete", shtab.FILE)  # noqa: B010 argparse does not know it


def _path(text: str) -> Path:
    """A path. An empty one, as of a variable that is not set, is not the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)


def add_bundles(command: argparse.ArgumentParser) -> None:
    """Any number of bundles, and how many to work on at once."""
    add_path(command, "bundles", nargs="*", metavar="BUNDLE", help=BUNDLE)
    command.add_argument(
        "--jobs",
        type=_at_least_one,
        default=processors(),
        metavar="N",
        help="work on so many bundles at once, as far as half of the memory allows; default: one a processor",
    )


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def add_checks(command: argparse.ArgumentParser, names: Sequence[str], required: str) -> None:
    """What is compared with what, which checks must run, and what happens without them, and a statement about it."""
    checks = command.add_argument_group("proof")
    add_path(
        checks,
        "--reference",
        metavar="FILE",
        help="for one bundle; default: BUNDLE.reference.safetensors beside it, or reference.safetensors in a folder",
    )
    checks.add_argument(
        "--require",
        action="append",
        default=[],
        choices=[*names, "chain", "gates"],
        metavar="CHECK",
        help=f"{required} if this check cannot run here: %(choices)s",
    )
    checks.add_argument(
        "--gates",
        metavar="LIMITS",
        help=f"thresholds for logits: {', '.join(PRESETS)}, or like max_kl=0.001,argmax=0.99; default: the reference's",
    )
    add_path(
        checks,
        "--plot",
        metavar="FILE",
        help="draw cosines by layer and divergences by row, before and after, as .png or .svg",
    )
    add_path(
        checks,
        "--attest",
        metavar="FILE",
        help="write an in-toto statement about the bundles that passed, for cosign and the like to sign",
    )
    checks.add_argument(
        "--digests", action="store_true", help="let the statement cover all files of the models, weights too"
    )


def add_common(command: argparse.ArgumentParser) -> None:
    """What every command takes that opens bundles: rules, output, token ids."""
    rules = command.add_argument_group("rules", "default: all; see g4patch explain")
    for flag, what in (("select", "run only"), ("ignore", "do not run")):
        rules.add_argument(f"--{flag}", action="append", default=[], metavar="RULE", help=f"{what} this rule")
    output = command.add_argument_group("output")
    output.add_argument("--format", choices=list(RENDERERS), default="text", help="default: text")
    add_path(output, "--output-file", metavar="FILE", help="write the report there")
    add_token_ids(command, "default: config.json and the like beside the bundle, then Gemma 4's")


def add_token_ids(command: argparse.ArgumentParser, default: str) -> None:
    """The token ids that count, by modality, and the pad."""
    group = command.add_argument_group("token ids", default)
    for name in (*MODALITIES, "pad"):
        group.add_argument(f"--{name}-token-id", type=int, metavar="ID")


def options(arguments: argparse.Namespace, progress: Progress) -> Options:
    """What a user asked for, as the engine takes it. Commands without a flag get its default."""
    reference = getattr(arguments, "reference", None)
    if reference is not None and len(arguments.bundles) > 1:
        raise UsageError("--reference belongs to one bundle, and several are given", "put one beside each bundle")
    return Options(
        token_flags(arguments),
        select=frozenset(arguments.select),
        ignore=frozenset(arguments.ignore),
        unsafe=getattr(arguments, "unsafe", False),
        reference=reference,
        gates=parse(limits) if (limits := getattr(arguments, "gates", None)) is not None else None,
        required=frozenset(getattr(arguments, "require", [])),
        compute_unit=getattr(arguments, "compute_unit", ""),
        hashed=_hashed(arguments),
        progress=progress,
    )


def _hashed(arguments: argparse.Namespace) -> Hashed:
    if getattr(arguments, "attest", None) is None:
        return Hashed.NOTHING
    return Hashed.ALL if arguments.digests else Hashed.GRAPHS


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
