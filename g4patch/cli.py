"""The command line: arguments -> one engine call -> renderer -> exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.markdown import Markdown
from rich_argparse import RawDescriptionRichHelpFormatter

from g4patch import __version__, engine
from g4patch.errors import G4PatchError, UsageError
from g4patch.output import json, progress, text
from g4patch.report import Report
from g4patch.rules import find_rule, find_rules
from g4patch.tokens import MODALITIES, TokenFlags

Command = Callable[[Path | None], Report]

_EXAMPLES = """\
examples:
  g4patch inspect --show-ple bundle.mlpackage   which row does each media id read?
  g4patch check exports/*.onnx                  findings and an exit code
  g4patch fix --dry-run model.onnx              what would change?
  g4patch fix model.onnx                        mend it in place, with proof
  g4patch fix model.onnx -o mended/             mend a copy
"""

_EXIT_CODES = """\
exit codes:
  0  nothing to fix, or fixed          3  a check failed, nothing was published
  1  findings remain, or inconclusive  4  a required check could not run here
  2  usage, or a bundle that cannot be read
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run g4patch. Returns the exit code; errors are one line on stderr with a hint."""
    options = _parser().parse_args(arguments)
    err = Console(stderr=True, highlight=False)
    try:
        return int(options.run(options, err))
    except G4PatchError as error:
        _print_error(error, err)
        return 2
    except KeyboardInterrupt:
        err.print("interrupted: nothing was published")
        return 130


def _run(arguments: argparse.Namespace, err: Console, command: Command, bundles: Sequence[Path | None]) -> int:
    """Run a command on each bundle and print the reports. One that cannot be read does not stop the others."""
    reports, failures = [], []
    for bundle in bundles:
        try:
            reports.append(command(bundle))
        except G4PatchError as error:
            _print_error(error, err)
            failures.append(json.Failure(str(bundle or "."), error))
    code = max([report.exit_code for report in reports] + [2 for _ in failures])
    with _destination(arguments.output_file) as file:
        if arguments.format == "json":
            file.write(json.render(reports, failures, code))
        else:
            console = Console(file=file, highlight=False)
            for report in reports:
                shown = {name: getattr(arguments, name, False) for name in ("show_ple", "digests")}
                text.render(report, console, **shown)
    return code


@contextmanager
def _destination(path: Path | None) -> Iterator[IO[str]]:
    if path is None:
        yield sys.stdout
        return
    try:
        with path.open("w", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", "choose another --output-file") from error


def _print_error(error: G4PatchError, err: Console) -> None:
    err.print(f"[bold red]error:[/] {_escape(error.message)}")
    if error.hint:
        err.print(f"       {_escape(error.hint)}")


def _escape(message: str) -> str:
    """Messages hold file names and bytes of strangers: nothing in them is markup or a control code."""
    from rich.markup import escape

    return escape("".join(c if c.isprintable() else "?" for c in message))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="g4patch",
        description="Mend exported Gemma 4 bundles whose per-layer embeddings are looked up with media ids.",
        epilog=f"{_EXAMPLES}\n{_EXIT_CODES}",
        formatter_class=RawDescriptionRichHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"g4patch {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = _command(commands, "inspect", "show what a bundle is and what it does about PLE", _inspect)
    command.add_argument("--show-ple", action="store_true", help="show each lookup, its row map and the splice")
    command.add_argument("--digests", action="store_true", help="print the SHA-256 of each file")
    _add_bundle(command)

    command = _command(commands, "check", "look for faults; nothing is written", _check)
    command.add_argument("bundles", nargs="*", type=Path, metavar="BUNDLE", help="default: the one in this folder")
    _add_common(command)

    command = _command(commands, "fix", "mend a bundle and prove it", _fix)
    command.add_argument("-o", "--output", type=Path, metavar="OUT", help="write there; leave the input alone")
    command.add_argument("--unsafe", action="store_true", help="also make edits that are not safe everywhere")
    command.add_argument("--dry-run", action="store_true", help="stop after the plan and print it")
    _add_checks(command)
    _add_bundle(command)

    command = _command(commands, "verify", "judge a bundle as it stands, against a reference", _verify)
    _add_checks(command)
    _add_bundle(command)

    command = _command(commands, "revert", "undo the last fix in place, byte for byte", _revert)
    command.add_argument("bundle", nargs="?", type=Path, metavar="BUNDLE", help="default: the one in this folder")

    command = commands.add_parser("explain", help="print a rule's page", description="Print a rule's page.")
    command.add_argument("rule", nargs="?", help="default: list the rules")
    command.set_defaults(run=_explain)
    return parser


def _add_checks(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--reference", type=Path, metavar="FILE", help="default: BUNDLE.reference.safetensors, if it is there"
    )
    command.add_argument(
        "--require",
        action="append",
        default=[],
        choices=["structure", "row map", "differential", "reference"],
        help="do not publish if this check cannot run here",
    )


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str, run: object
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    command.set_defaults(run=run)
    return command


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
    group = command.add_argument_group(
        "token ids", "default: config.json and the like beside the bundle, then Gemma 4's"
    )
    for name in (*MODALITIES, "pad"):
        group.add_argument(f"--{name}-token-id", type=int, metavar="ID")


def _options(arguments: argparse.Namespace, err: Console) -> engine.Options:
    tokens = TokenFlags(
        arguments.image_token_id, arguments.audio_token_id, arguments.video_token_id, arguments.pad_token_id
    )
    return engine.Options(
        tokens,
        select=frozenset(arguments.select),
        ignore=frozenset(arguments.ignore),
        unsafe=getattr(arguments, "unsafe", False),
        reference=getattr(arguments, "reference", None),
        required=frozenset(getattr(arguments, "require", [])),
        progress=progress.reporter(err),
    )


def _inspect(arguments: argparse.Namespace, err: Console) -> int:
    options = _options(arguments, err)
    return _run(arguments, err, lambda bundle: engine.inspect(bundle, options), [arguments.bundle])


def _check(arguments: argparse.Namespace, err: Console) -> int:
    options = _options(arguments, err)
    return _run(arguments, err, lambda bundle: engine.check(bundle, options), arguments.bundles or [None])


def _fix(arguments: argparse.Namespace, err: Console) -> int:
    options = _options(arguments, err)

    def fix(bundle: Path | None) -> Report:
        return engine.fix(bundle, options, out=arguments.output, dry_run=arguments.dry_run)

    return _run(arguments, err, fix, [arguments.bundle])


def _verify(arguments: argparse.Namespace, err: Console) -> int:
    options = _options(arguments, err)
    return _run(arguments, err, lambda bundle: engine.verify_bundle(bundle, options), [arguments.bundle])


def _revert(arguments: argparse.Namespace, err: Console) -> int:
    for path in engine.revert(arguments.bundle):
        print(f"{path} is as it was")
    return 0


def _explain(arguments: argparse.Namespace, err: Console) -> int:
    out = Console(highlight=False)
    if arguments.rule:
        out.print(Markdown(find_rule(arguments.rule).page))
    else:
        for rule in find_rules():
            out.print(f"[bold]{rule.id}[/]  {rule.severity}, fix: {rule.fix}\n  {rule.summary}")
    return 0


def entry() -> None:
    """The console script."""
    sys.exit(main())
