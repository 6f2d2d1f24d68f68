"""Thinking budgets, in tokens, from the fields of a request and the server's settings."""

from __future__ import annotations

from fastapi import Request

from tandem.config.settings import ServerSettings
from tandem.errors import RequestError, invalid
from tandem.protocol.thinking import ThinkingBudget, ThinkingTokens
from tandem.server.chats.request_texts import RequestTexts
from tandem.server.context import note_ignored

SHARES = {"minimal": 0.1, "low": 0.2, "medium": 0.5, "high": 0.8, "xhigh": 0.95}
"""Share of a thinking budget by reasoning effort, as at OpenRouter; `max` is all of it."""
SENT_TO_ALL = "tandem.budget_sent_to_all"
"""HTTP scope key with an API's name of the budget field; set where clients send budgets to all models."""


def budget_of(
    http: Request,
    message: str | None,
    asked: tuple[str, int | None, str | None],
    tokens: ThinkingTokens | None,
    texts: RequestTexts,
    server: ServerSettings,
    *,
    most: int | None,
    left: int,
) -> ThinkingBudget | None:
    """Return the thinking budget of an answer; None for no limit.

    `message`: text to insert before the closing tag (None: the server's). `asked`: budget field, budget in tokens, effort.
    `tokens`: token ids around reasoning. `most`: output limit in tokens; `left`: tokens left in the context. Raises
    RequestError naming the field.
    """
    field, limit, effort = asked
    if limit is not None and most is not None and limit > most:
        raise invalid(field, f"'{field}' ({limit}) must not be more than the output limit ({most}): it is a part of that.")
    if limit is None and field:
        return None  # -1: also where the server has a default
    if tokens is None:
        if limit and SENT_TO_ALL not in http.scope:
            why = f"'{field}' is not supported: this model does not think, or not between tokens of its own. Leave it out."
            raise RequestError(why, param=field, code="unsupported_parameter")
        if limit:
            note_ignored(http, http.scope[SENT_TO_ALL])
        return None
    if limit is None:
        limit, share = server.thinking_budget, SHARES.get(effort or "")
        if limit is None and share is not None and "reasoning_effort" not in texts.tokenizer.template_reads:
            limit = min(most or server.default_max_tokens or left, left)
        if limit is None:
            return None
        limit = int(limit * (share or 1))
    limit = min(limit, left)
    said = message or server.thinking_message
    return ThinkingBudget(limit, tokens, tuple(texts.tokenizer.encode(said, False)) if said else ())
