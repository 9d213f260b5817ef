"""The command line: arguments -> one engine call -> renderer -> exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rich.console import Console

from g4patch import engine, record
from g4patch.arguments import options, parser, request, token_flags
from g4patch.errors import G4PatchError, UsageError
from g4patch.output import json, progress, text
from g4patch.output.layout import in_units
from g4patch.report import Report
from g4patch.rules import checks_page, find_rule, find_rules

Command = Callable[[Path | None], Report]


def main(given: Sequence[str] | None = None) -> int:
    """Run g4patch. Returns the exit code; errors are one line on stderr with a hint."""
    arguments = parser().parse_args(given)
    err = Console(stderr=True, highlight=False)
    try:
        return _COMMANDS[arguments.command](arguments, err)
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


def _inspect(arguments: argparse.Namespace, err: Console) -> int:
    wanted = options(arguments, progress.reporter(err))
    return _run(arguments, err, lambda bundle: engine.inspect(bundle, wanted), [arguments.bundle])


def _check(arguments: argparse.Namespace, err: Console) -> int:
    wanted = options(arguments, progress.reporter(err))
    return _run(arguments, err, lambda bundle: engine.check(bundle, wanted), arguments.bundles or [None])


def _fix(arguments: argparse.Namespace, err: Console) -> int:
    wanted = options(arguments, progress.reporter(err))

    def fix(bundle: Path | None) -> Report:
        return engine.fix(bundle, wanted, out=arguments.output, dry_run=arguments.dry_run)

    return _run(arguments, err, fix, [arguments.bundle])


def _verify(arguments: argparse.Namespace, err: Console) -> int:
    wanted = options(arguments, progress.reporter(err))
    return _run(arguments, err, lambda bundle: engine.verify_bundle(bundle, wanted), [arguments.bundle])


def _record(arguments: argparse.Namespace, err: Console) -> int:
    out, bar = arguments.output, progress.reporter(err)
    tokens = {name: token for name, token in vars(token_flags(arguments)).items() if token is not None}
    _refuse_unused(arguments, [f"{name}_token_id" for name in tokens])

    def say(size: int, what: str) -> None:
        err.print(_escape(f"{out} will take up to {in_units(size)}: {what}"))

    if arguments.from_npz:
        lines = record.from_npz(arguments.from_npz, out, tokens, arguments.precision, bar)
    else:
        lines = record.from_hugging_face(request(arguments), out, bar, say)
    for line in lines:
        print(line)
    print(f"{out}: {in_units(out.stat().st_size)}; compare with g4patch verify BUNDLE --reference {out}")
    return 0


def _refuse_unused(arguments: argparse.Namespace, token_flags: Sequence[str]) -> None:
    """A flag that would change nothing is a mistake about what is recorded."""
    given = [name for name in ("image", "audio", "prompt", "ids", "split") if getattr(arguments, name) is not None]
    source, unused = ("--from-npz", given) if arguments.from_npz else ("--hf", token_flags)
    if unused:
        raise UsageError(f"--{unused[0].replace('_', '-')} changes nothing with {source}", "leave it out")


def _revert(arguments: argparse.Namespace, err: Console) -> int:
    for path in engine.revert(arguments.bundle):
        print(f"{path} is as it was")
    return 0


def _explain(arguments: argparse.Namespace, err: Console) -> int:
    # Imported late: it takes as long as the rest of rich.
    from rich.markdown import Markdown

    out = Console(highlight=False)
    if arguments.topic == "checks":
        out.print(Markdown(checks_page()))
    elif arguments.topic:
        out.print(Markdown(find_rule(arguments.topic).page))
    else:
        for rule in find_rules():
            out.print(f"[bold]{rule.id}[/]  {rule.severity}, fix: {rule.fix}\n  {rule.summary}")
        out.print("[bold]checks[/]  which fault each check of verify can see, and which it cannot")
    return 0


_COMMANDS: dict[str, Callable[[argparse.Namespace, Console], int]] = {
    "inspect": _inspect,
    "check": _check,
    "fix": _fix,
    "verify": _verify,
    "record": _record,
    "revert": _revert,
    "explain": _explain,
}


def entry() -> None:
    """The console script."""
    sys.exit(main())
