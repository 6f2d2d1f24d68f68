"""A step counts once all ranks have reported it, and agree on what they computed.

When a rank or a link is lost, MLX hands out whatever stands in the buffers of sums that were under way: its error is
raised for one of those who wait for the step, once, and for none where the step was over before they looked
(`Error::check` and `array::is_available` in MLX 0.32). A rank may so send on what is no sum, and the last stage samples
from that. But a rank that was lost has not reported the step, and those that were left alone with their own parts of a
sum do not hold the same bits: what leaves a stage must reach the next one bit for bit, and all ranks of a stage must
hold the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tandem.errors import RankFailure
from tandem.protocol.control import Stepped
from tandem.protocol.layout import StageSpec
from tandem.protocol.step import RankStep


class Quorum:
    """Keeps the results of steps back until every rank has done them."""

    def __init__(self) -> None:
        self._reports: dict[int, dict[int, Stepped]] = {}
        """By step and rank."""

    def complete(self, report: Stepped, ranks: Sequence[StageSpec]) -> Stepped | None:
        """The report that has the result, with the last report of a step. Raises RankFailure if they disagree."""
        step_id = report.step.step_id
        reports = self._reports.setdefault(step_id, {})
        reports[report.step.rank] = report
        if len(reports) < len(ranks):
            return None
        del self._reports[step_id]
        if found := disagreement(step_id, {rank: one.step for rank, one in reports.items()}, ranks):
            raise RankFailure(f"what was computed does not count: {found}; see to the links (`tandem doctor`)",
                              cause="link")
        return next(one for one in reports.values() if one.result is not None)

    def forget(self) -> None:
        """The ranks are gone: what they have not finished together does not count."""
        self._reports.clear()


def disagreement(step_id: int, reports: Mapping[int, RankStep], ranks: Sequence[StageSpec]) -> str:
    """How the digests of a step disagree, empty if they do not: every rank's against those of its stage's leader, and
    each stage's input against the output of the one before."""
    arrived = leader = reports[0].digest
    for spec in ranks:
        found = reports[spec.rank].digest
        if found is None:  # not asked for, or a step that only removes sequences
            continue
        if spec.tp_rank == 0:
            if spec.stage and arrived is not None and found[0] != arrived[1]:
                return (f"the activations that stage {spec.stage} sent in step {step_id} (digest {arrived[1]:08x}) are "
                        f"not those that stage {spec.stage + 1} received ({found[0]:08x})")
            arrived = leader = found
        elif leader is not None and found != leader:
            return (f"rank {spec.rank} holds other activations in step {step_id} (digests {found[0]:08x} "
                    f"{found[1]:08x}) than rank {spec.rank - spec.tp_rank}, the leader of its stage ({leader[0]:08x} "
                    f"{leader[1]:08x})")
    return ""
