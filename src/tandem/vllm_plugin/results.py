"""Our StepResult to vLLM's ModelRunnerOutput."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

from tandem.errors import RankFailure
from tandem.protocol.request import TokenLogprob
from tandem.protocol.step import StepPlan, StepResult


def model_output(scheduled: Sequence[str], plan: StepPlan, result: StepResult) -> ModelRunnerOutput:
    """One entry for each scheduled request, empty where its prompt goes on. Raises RankFailure for broken logits."""
    tokens = dict(zip(plan.sampled(), result.tokens, strict=True))
    for request_id, token in tokens.items():
        if token < 0:
            raise RankFailure(f"the model produced logits that are not finite numbers for {request_id}; check its "
                              "weights and dtype", rank=0)
    return ModelRunnerOutput(
        req_ids=list(scheduled),
        req_id_to_index={request_id: i for i, request_id in enumerate(scheduled)},
        sampled_token_ids=[[tokens[one]] if one in tokens else [] for one in scheduled],
        logprobs=_logprobs(scheduled, result.logprobs) if result.logprobs else None,
    )


def _logprobs(scheduled: Sequence[str], found: dict[str, list[TokenLogprob]]) -> LogprobsLists:
    """vLLM's columns: the chosen token, then the most likely ones. Rows of requests that did not ask are not read."""
    width = 1 + max(len(one.top) for entries in found.values() for one in entries)
    ids = np.zeros((len(scheduled), width), dtype=np.int32)
    values = np.full((len(scheduled), width), -np.inf, dtype=np.float32)
    ranks = np.zeros(len(scheduled), dtype=np.int32)
    for row, request_id in enumerate(scheduled):
        if (entries := found.get(request_id)) is None:
            continue
        [one] = entries
        ids[row, 0], values[row, 0] = one.token, one.logprob
        for column, (token, value) in enumerate(one.top, start=1):
            ids[row, column], values[row, column] = token, value
        ranks[row] = 1 + sum(value > one.logprob for _, value in one.top)
    return LogprobsLists(ids, values, ranks)
