"""A step counts once all ranks have reported it.

When a rank is lost, MLX hands out whatever stands in the buffers of sums that were under way: its error is raised for
one of those who wait for the step, once, and for none where the step was over before they looked (`Error::check` and
`array::is_available` in MLX 0.32). A rank may so send on what is no sum, and the last stage samples from that. But the
rank that was lost has not reported the step.
"""

from __future__ import annotations

from tandem.protocol.control import Stepped


class Quorum:
    """Keeps the results of steps back until every rank has done them."""

    def __init__(self) -> None:
        self._reports: dict[int, list[Stepped]] = {}

    def complete(self, report: Stepped, ranks: int) -> Stepped | None:
        """The report that has the result, with the last of `ranks` reports of a step."""
        reports = self._reports.setdefault(report.step.step_id, [])
        reports.append(report)
        if len(reports) < ranks:
            return None
        del self._reports[report.step.step_id]
        return next(one for one in reports if one.result is not None)

    def forget(self) -> None:
        """The ranks are gone: what they have not finished together does not count."""
        self._reports.clear()
