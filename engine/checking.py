"""`interlock check`: proves lifecycles, and replays journals on them. Needs no torch."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from interlock.backends.registry import monitor
from interlock.specs import SPECS, Report, Result, Spec, UnknownName, Verdict, check
from interlock.specs.errors import JournalError
from interlock.specs.journal import BEGINNING, Journal, Replay, read_journal, replay

from .choices import (
    UsageError,
    all_composed,
    built_in_specs,
    checkable_backends,
    of_journal,
    readable,
    spec_named,
    titled,
)
from .messages import say

EXIT = {Result.PROVED: 0, Result.REFUTED: 1, Result.UNDETERMINED: 3}


def run_check(options: Namespace) -> int:
    """Prove lifecycles, or replay a journal; the exit status is that of the worst verdict."""
    if options.journal is not None:
        return _check_journal(options)
    if options.backend and options.all:
        raise UsageError("--backend and --all say different things: give one of them")
    reports = [check(spec) for spec in _to_check(options)]
    if options.backend and not options.json:
        _say_whose(options.backend)
    if options.json:
        say(json.dumps([_report_data(report) for report in reports], indent=1))
    elif len(reports) == 1:
        _say_report(reports[0])
    else:
        _say_table(reports)
    return max(EXIT[report.result] for report in reports) if _none_refuted(reports) else 1


def _say_whose(backend: str) -> None:
    """Of a backend without a lifecycle of its own, whose it is on: the names below are those."""
    whose = monitor(backend).name
    if whose != backend:
        say(f"backend      {titled(backend, whose)}")
        say()


def _none_refuted(reports: list[Report]) -> bool:
    return all(report.result is not Result.REFUTED for report in reports)


def _to_check(options: Namespace) -> list[Spec]:
    own = options.spec is not None and options.spec not in SPECS
    if own and not options.backend and not options.all:
        return [spec_named(options.spec)]
    specs = (options.spec,) if options.spec else built_in_specs()
    backends = (options.backend,) if options.backend else checkable_backends()
    return list(all_composed(specs, backends))


def _say_report(report: Report) -> None:
    for verdict in report.verdicts:
        say(str(verdict))
    if not report.verdicts:
        say("it has no property: nothing can be proved of it")
    say()
    say(_summary(report, len(report.spec.name)))


def _say_table(reports: list[Report]) -> None:
    width = max(len(report.spec.name) for report in reports)
    for report in reports:
        say(_summary(report, width))
        for verdict in report.verdicts:
            if not verdict.holds:
                say(str(verdict))
    proved = sum(report.proved for report in reports)
    say(f"{proved} of {len(reports)} lifecycles proved, in {1000 * sum(r.seconds for r in reports):.0f} ms")


def _summary(report: Report, width: int) -> str:
    return (
        f"{report.result:<12} {report.spec.name:<{width}}  {len(report.verdicts)} properties, "
        f"{report.configurations} configurations, {1000 * report.seconds:.0f} ms, hash {report.spec.hash}"
    )


def _report_data(report: Report) -> dict[str, Any]:
    return {
        "spec": report.spec.name,
        "hash": report.spec.hash,
        "result": str(report.result),
        "configurations": report.configurations,
        "transitions": report.transitions,
        "seconds": round(report.seconds, 6),
        "properties": [_verdict_data(verdict) for verdict in report.verdicts],
    }


def _verdict_data(verdict: Verdict) -> dict[str, Any]:
    data = {"name": verdict.prop.name, "result": str(verdict.result), "doc": verdict.prop.doc}
    if verdict.note:
        data["note"] = verdict.note
    return {**data, "trace": list(verdict.events), "path": verdict.path} if verdict.trace else data


def _check_journal(options: Namespace) -> int:
    if options.all:
        raise UsageError("--all does not go with --journal, which is the journal of one run on one backend")
    try:
        journal = read_journal(readable(options.journal))
    except JournalError as error:
        if not _begins_as_journal(options.journal):
            raise
        _say_finding(options, Result.REFUTED, str(error))
        return EXIT[Result.REFUTED]
    try:
        spec = of_journal(journal.header, options.spec, options.backend)
    except UnknownName as error:
        if options.spec or options.backend:
            raise
        _say_finding(
            options, Result.UNDETERMINED, f"{error} The header names it; --spec and --backend can, too"
        )
        return EXIT[Result.UNDETERMINED]
    report, found = check(spec), replay(journal, spec)
    if options.json:
        say(json.dumps(_replay_data(journal, report, found), indent=1))
    else:
        say(f"journal      {journal.source}: run {journal.header['run']}, {journal.header['spec']}")
        if options.backend is None and options.spec is None:
            whose = monitor(journal.header["backend"]).name
            say(f"backend      {titled(journal.header['backend'], whose)}")
        say(f"spec         {report.result}: {report.spec.name}, {len(report.verdicts)} properties")
        say(f"replay       {found}")
    results = (report.result, found.result)
    return EXIT[next((r for r in (Result.REFUTED, Result.UNDETERMINED) if r in results), Result.PROVED)]


def _begins_as_journal(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(BEGINNING)) == BEGINNING


def _say_finding(options: Namespace, result: Result, finding: str) -> None:
    if options.json:
        data = {"result": str(result), "finding": finding}
        say(json.dumps({"journal": str(options.journal), "replay": data}, indent=1))
    else:
        say(f"replay       {result}: {finding}")


def _replay_data(journal: Journal, report: Report, found: Replay) -> dict[str, Any]:
    return {
        "journal": journal.source,
        "header": journal.header,
        "spec": {"name": report.spec.name, "hash": report.spec.hash, "result": str(report.result)},
        "replay": {
            "result": str(found.result),
            "finding": found.finding,
            "line": found.line,
            "transitions": found.steps,
            "phase": found.phase,
            "ending": found.ending,
            "held": list(found.held),
            "ended": [list(end) for end in found.ended],
            "status": found.status,
            "residue": found.residue,
        },
    }
