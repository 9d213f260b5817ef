"""The command line: arguments -> one engine call a bundle -> renderer -> exit code."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import IO

import shtab
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from g4patch import batch, engine, receipts, record
from g4patch.arguments import parser
from g4patch.bundle import outputs
from g4patch.copying import silent
from g4patch.errors import G4PatchError, UsageError
from g4patch.flags import options, request, token_flags
from g4patch.output import RENDERERS, plot, progress
from g4patch.output.layout import hanging, in_units, indented, printable
from g4patch.output.shown import Shown
from g4patch.report import Failure, Report, Result, worst_exit_code
from g4patch.rules import checks_page, find_rule, find_rules


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


def _run(arguments: argparse.Namespace, err: Console, jobs: Sequence[batch.Job]) -> int:
    """Do the jobs and print the results as they come. One that cannot be worked on does not stop the others."""
    picture: Path | None = getattr(arguments, "plot", None)
    if picture is not None:
        plot.require(picture)
    several = len(jobs) > 1
    shown = Shown(getattr(arguments, "show_ple", False), getattr(arguments, "digests", False), several)
    seen: list[Result] = []
    with (
        _destination(arguments.output_file) as file,
        progress.bundles(err, len(jobs)) as watch,
        closing(batch.run(jobs, getattr(arguments, "jobs", 1), watch)) as results,
    ):
        RENDERERS[arguments.format](_seen(results, seen, err), file, shown)
    reports = [result for result in seen if isinstance(result, Report)]
    _attest(arguments, reports, err)
    if picture is not None and reports:
        plot.save(reports, picture)
    return worst_exit_code(result.exit_code for result in seen)


def _seen(results: Iterable[Result], seen: list[Result], err: Console) -> Iterator[Result]:
    """The results on their way to the renderer; errors are also said on stderr, whatever the format."""
    for result in results:
        if isinstance(result, Failure):
            _print_error(result.error, err)
        seen.append(result)
        yield result


def _attest(arguments: argparse.Namespace, reports: Sequence[Report], err: Console) -> None:
    """Write the statement that was asked for, if there is something to state."""
    place: Path | None = getattr(arguments, "attest", None)
    if place is None:
        return
    statement = receipts.statement(arguments.command, reports)
    if statement is None:
        err.print("no statement was written: no bundle ended with exit code 0")
        return
    with _destination(place) as file:
        file.write(json.dumps(statement, indent=2) + "\n")


@contextmanager
def _destination(path: Path | None) -> Iterator[IO[str]]:
    if path is None:
        yield sys.stdout
        return
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", "choose another file") from error
    with file:
        yield file


def _print_error(error: G4PatchError, err: Console) -> None:
    err.print(f"[bold red]error:[/] {escape(printable(error.message))}")
    if error.hint:
        err.print(hanging([("", error.hint)], 6))


def _inspect(arguments: argparse.Namespace, err: Console) -> int:
    work = partial(engine.inspect, arguments.bundle, options(arguments, silent))
    return _run(arguments, err, [batch.Job(arguments.bundle, work)])


def _check(arguments: argparse.Namespace, err: Console) -> int:
    wanted = options(arguments, silent)
    bundles = arguments.bundles or [None]
    return _run(arguments, err, [batch.Job(bundle, partial(engine.check, bundle, wanted)) for bundle in bundles])


def _fix(arguments: argparse.Namespace, err: Console) -> int:
    bundles = arguments.bundles or [None]
    # The processes that work on several bundles have no terminal of their own.
    wanted = options(arguments, progress.reporter(err) if len(bundles) == 1 else silent)
    with outputs(bundles, arguments.output, make=not arguments.dry_run) as places:
        return _run(
            arguments,
            err,
            [
                batch.Job(bundle, partial(engine.fix, bundle, wanted, out=out, dry_run=arguments.dry_run), runs=True)
                for bundle, out in zip(bundles, places, strict=True)
            ],
        )


def _verify(arguments: argparse.Namespace, err: Console) -> int:
    wanted = options(arguments, silent)
    bundles = arguments.bundles or [None]
    jobs = [batch.Job(bundle, partial(engine.verify_bundle, bundle, wanted), runs=True) for bundle in bundles]
    return _run(arguments, err, jobs)


def _record(arguments: argparse.Namespace, err: Console) -> int:
    out, bar = arguments.output, progress.reporter(err)
    tokens = {name: token for name, token in vars(token_flags(arguments)).items() if token is not None}
    _refuse_unused(arguments, [f"{name}_token_id" for name in tokens])

    def say(size: int, what: str) -> None:
        err.print(escape(printable(f"{out} will take up to {in_units(size)}: {what}")))

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
        print(f"{printable(str(path))} is as it was")
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
            out.print(f"[bold]{rule.id}[/]  {rule.severity}, fix: {rule.fix}")
            out.print(indented(Text(rule.summary)))
        out.print("[bold]checks[/]  which fault each check of verify can see, and which it cannot")
    return 0


def _completion(arguments: argparse.Namespace, err: Console) -> int:
    print(shtab.complete(parser(), arguments.shell))
    return 0


_COMMANDS: dict[str, Callable[[argparse.Namespace, Console], int]] = {
    "inspect": _inspect,
    "check": _check,
    "fix": _fix,
    "verify": _verify,
    "record": _record,
    "revert": _revert,
    "explain": _explain,
    "completion": _completion,
}


def entry() -> None:
    """The console script. A job that is cancelled is told by SIGTERM: it ends as Ctrl-C does."""
    signal.signal(signal.SIGTERM, batch.interrupt)
    sys.exit(main())
