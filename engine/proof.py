"""Lifecycles that have been proved, once per process and backend: what a run may start on."""

from __future__ import annotations

from interlock.specs import TRAINING, Lifecycle, Monitor, Report, Spec, check, compose, lifecycle

from .errors import NotProved

_reports: dict[str, Report] = {}


def proved(monitor: Monitor, spec: Spec = TRAINING) -> Lifecycle:
    """The lifecycle of a spec on a backend, after its proof (kept for the process).

    Args:
        monitor: The backend's.
        spec: The lifecycle to refine.

    Raises:
        NotProved: With each property that is not, and its trace.
    """
    composed = compose(spec, monitor)
    report = _reports.get(composed.hash)
    if report is None:
        report = _reports.setdefault(composed.hash, check(composed))
    if not report.proved:
        broken = "\n".join(str(verdict) for verdict in report.verdicts if not verdict.holds)
        raise NotProved(f"'{composed.name}' is {report.result}, so no run may start on it:\n{broken}")
    return lifecycle(composed)
