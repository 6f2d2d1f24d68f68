"""Drafts for vLLM's scheduler (its method `ngram`), from each sequence's own tokens. On the rank that samples."""

from __future__ import annotations

from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from tandem.protocol.step import StepPlan
from tandem.speculation.ngram import NgramIndex


class Drafter:
    """Follows plans and what came of them."""

    def __init__(self, *, most: int, shortest: int, longest: int) -> None:
        """`most` drafts of a sequence in a step; `shortest` and `longest` as `NgramIndex` has them."""
        self._most, self._shortest, self._longest = most, shortest, longest
        self._indexes: dict[str, NgramIndex] = {}
        self._drafts: dict[str, list[int]] = {}

    def follow(self, plan: StepPlan) -> None:
        """Who leaves and who joins. With penalties a token depends on all before it: none is drafted."""
        for request_id in plan.removes:
            self._indexes.pop(request_id, None)
        for op in plan.inserts:
            if not op.params.penalised:
                self._indexes[op.request_id] = index = NgramIndex(self._shortest, self._longest)
                index.extend(op.tokens)

    def read(self, output: ModelRunnerOutput) -> None:
        """What a step's sequences were given: draft what may follow."""
        self._drafts = {}
        for request_id, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            index = self._indexes.get(request_id)
            if index is not None and tokens:
                index.extend(tokens)
                self._drafts[request_id] = index.drafts(self._most)

    def take(self) -> DraftTokenIds:
        """The drafts of the last step's sequences; each is handed out once."""
        drafts, self._drafts = self._drafts, {}
        return DraftTokenIds(list(drafts), list(drafts.values()))
