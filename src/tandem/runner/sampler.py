"""Sampler: from logits to tokens for a whole batch at once, vectorised inside the graph.

Per-row parameters are device arrays, rebuilt only when the batch changes. Only requested operations run: all-greedy batches
use an argmax; nothing is sorted without top-k, top-p or min-p; log probabilities are computed only for rows that request
them. The order is: logit bias, penalties, grammar, thinking budget, (log probabilities), temperature, top-k, top-p, min-p,
draw. Hugging Face has the same order of filters. vLLM applies min-p before top-k and top-p, and by default reports log
probabilities of the model's raw logits.

Grammar masks depend on the previous token, so `sample` waits for it in rows with a grammar or a nearly exhausted thinking
budget. Dispatch the logits first: the device then computes them while masks are built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from tandem.guided.guides import Guides
from tandem.guided.vocabulary import Vocabulary
from tandem.protocol.logprobs import TokenLogprob
from tandem.protocol.request import SamplingParams
from tandem.protocol.step import NOT_FINITE
from tandem.runner.budgets import Budgets, ruled
from tandem.runner.filters import FilterRows, TopP, draw, filtered_weights, largest, seed_keys, uniform_pairs
from tandem.runner.penalties import PenaltyRows, TokenEdits, TokenHistory

Allowed = Mapping[str, npt.NDArray[np.bool_]]
"""Allowed tokens by request id: bool [V], or [positions, V] with drafts. Other ids are unrestricted."""

PLANS = 64
"""Maximum cached batches; with drafts the same sequences form many."""
COLDEST = 1e-5
"""Temperature below which sampling is greedy, as in vLLM, since dividing by it would overflow."""


@dataclass
class Sampled:
    """Tokens of one call of `Sampler.sample`; lazy until evaluated."""

    tokens: mx.array
    """int32 [n], in the order of the ids; negative error codes for rows without a token (`protocol.step`)."""
    arrays: list[mx.array] = field(default_factory=list)
    """Arrays to dispatch together: tokens, and log probabilities if requested."""
    _asked: list[tuple[str, int]] = field(default_factory=list)
    _columns: tuple[mx.array, ...] = ()

    def logprobs(self) -> dict[str, list[TokenLogprob]]:
        """Log probabilities by request id, for rows that requested them. Waits for the device."""
        if not self._asked:
            return {}
        columns: list[list[Any]] = [column.tolist() for column in self._columns]  # type: ignore[misc]
        tokens, chosen, *best = columns
        found: dict[str, list[TokenLogprob]] = {}
        for row, (request_id, k) in enumerate(self._asked):
            pairs = zip(best[0][row], best[1][row], strict=True) if k else ()
            ranked = sorted(((t, p) for t, p in pairs if p > -np.inf), key=lambda pair: (-pair[1], pair[0]))
            found.setdefault(request_id, []).append(TokenLogprob(tokens[row], chosen[row], ranked[:k]))
        return found


@dataclass
class _Sequence:
    """Sampling state of one sequence."""

    params: SamplingParams
    seed: int
    prompt_len: int
    produced: int
    """Output tokens so far; also the position of the next random number."""

    @property
    def follows(self) -> bool:
        """True if its next token depends on all tokens before, so only one position can be sampled at a time."""
        return self.params.penalised or self.params.structured_outputs is not None


@dataclass
class _Plan:
    """Device arrays for one batch of ids."""

    sequences: list[_Sequence]
    ahead: list[int]
    """[n]: number of earlier rows of the same sequence."""
    bias: TokenEdits | None
    penalties: PenaltyRows | None
    greedy: mx.array | None
    """bool [n]: greedy rows; None if there are none."""
    keys: npt.NDArray[np.uint64] | None
    """uint64 [n]: random-number keys; None if all rows are greedy."""
    inverse_temperature: mx.array | None
    """float32 [n, 1]; 1 for greedy rows; None if all are 1."""
    filters: FilterRows
    asked: list[tuple[str, int]]
    asked_rows: mx.array | None
    """int32 [a]: rows that request log probabilities; None if all or none do."""
    _bans: tuple[list[int], TokenEdits | None] = ([], None)
    """(Rows below their min_tokens, edits that ban their end tokens)."""

    def banned(self, eos: Sequence[int], vocab_size: int) -> TokenEdits | None:
        """Return edits that ban end tokens until `min_tokens`; rebuilt when a row reaches its minimum. None if no row is
        below."""
        early = [row for row, one in enumerate(self.sequences) if one.produced + self.ahead[row] < one.params.min_tokens]
        if self._bans[0] != early:
            entries = []
            for row in early:
                params = self.sequences[row].params
                ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
                entries += [(row, token, -np.inf) for token in sorted(ends) if 0 <= token < vocab_size]
            self._bans = early, TokenEdits.build(entries)
        return self._bans[1]


class Sampler:
    """Sampler with the sampling state of its sequences. Exists only on the sampling rank."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int] = (), vocabulary: Vocabulary | None = None) -> None:
        """Create a sampler without sequences. `vocab_size`: width of the logits; `eos_token_ids`: the model's end-of-sequence
        ids.

        Grammars need `vocabulary`.
        """
        self._vocab_size = vocab_size
        self._eos = tuple(eos_token_ids)
        self._top_p = _top_p_method()
        self._sequences: dict[str, _Sequence] = {}
        self._history = TokenHistory(vocab_size)
        self._plans: dict[tuple[str, ...], _Plan] = {}
        self._guides = Guides(vocabulary) if vocabulary is not None else None
        self._budgets = Budgets()
        self._untaken: list[tuple[list[tuple[int, str]], mx.array]] = []
        """(Rows with ids, tokens int32 [n]) that the matchers have not consumed yet, as they may still be computed."""

    def add(self, request_id: str, params: SamplingParams, seed: int, tokens: list[int], prompt_len: int) -> None:
        """Add a sequence; tokens[prompt_len:] are earlier output (a replay) and count as such.

        Raises ValueError for a known id, or a grammar without a vocabulary.
        """
        if request_id in self._sequences:
            raise ValueError(f"sequence {request_id} is being sampled already")
        self._sequences[request_id] = _Sequence(params, seed, prompt_len, len(tokens) - prompt_len)
        if params.penalised:
            self._history.add(request_id, tokens[:prompt_len], tokens[prompt_len:])
        if params.structured_outputs is not None:
            if self._guides is None:
                raise ValueError(f"sequence {request_id} has a grammar, and there is no vocabulary")
            self._guides.add(request_id, params.structured_outputs, tokens[prompt_len:])
        if params.thinking is not None:
            self._budgets.add(request_id, params.thinking, tokens[prompt_len:])
        self._plans.clear()

    def place(self, request_id: str, tokens: int, fed: Sequence[int]) -> None:
        """Record that the sequence has `tokens` tokens, prompt included, before the next one is sampled.

        For plans with drafts, as only the engine decides how many are accepted. `fed`: the last of these tokens, then the
        drafts. Raises KeyError if unknown.
        """
        sequence = self._sequences[request_id]
        sequence.produced = tokens - sequence.prompt_len
        self._budgets.place(request_id, sequence.produced, fed)

    def remove(self, request_id: str) -> None:
        """Remove a sequence. Raises KeyError if unknown."""
        del self._sequences[request_id]
        self._history.remove(request_id)
        self._budgets.remove(request_id)
        if self._guides is not None and request_id in self._guides:
            self._follow()
            self._guides.remove(request_id)
        self._plans.clear()

    def guided(self, ids: Sequence[str]) -> list[tuple[int, str]]:
        """Return (row, id) of the ids that have a grammar."""
        guides = self._guides
        return [] if guides is None else [(row, one) for row, one in enumerate(ids) if one in guides]

    def waits(self, ids: Sequence[str]) -> bool:
        """Return True if `sample` waits for earlier tokens of one of `ids`."""
        return bool(self.guided(ids)) or self._budgets.waits(ids)

    def sample(self, logits: mx.array, ids: Sequence[str], allowed: Allowed | None = None) -> Sampled:
        """Sample one token for each row of logits [n, V] (any float dtype), where row i belongs to ids[i].

        Adjacent rows of one id are its consecutive next positions. `allowed` restricts the tokens of the ids that it names.
        Raises ValueError for a wrong shape, or several rows of an id with penalties or a grammar; KeyError for an unknown id.
        """
        if logits.shape != (len(ids), self._vocab_size):
            raise ValueError(f"logits {logits.shape} for {len(ids)} rows of {self._vocab_size} tokens")
        plan = self._plan(tuple(ids))
        raw = logits.astype(mx.float32)
        edited = self._edited(raw, plan)
        given_up: dict[int, int] = {}
        if guided := self.guided(ids):
            edited, given_up = self._constrained(edited, ids)
        if allowed and not allowed.keys().isdisjoint(ids):
            free = np.ones(self._vocab_size, dtype=np.bool_)
            masks = [np.atleast_2d(allowed.get(one, free)) for one in ids]
            rows = [mask[min(i, len(mask) - 1)] for mask, i in zip(masks, plan.ahead, strict=True)]
            edited = mx.where(mx.array(np.stack(rows)), edited, -mx.inf)
        if rulings := self._budgets.rulings(ids, plan.ahead):
            edited = ruled(edited, rulings)
        plain = edited is raw and plan.keys is None
        tokens = _most_likely(logits) if plain else _marked(self._chosen(edited, plan), raw, edited)
        for sequence in plan.sequences:
            sequence.produced += 1
        if plan.penalties is not None:
            self._history.count(tokens, plan.penalties)
        columns = _logprob_columns(edited, tokens, plan)
        arrays = [tokens, *columns]
        if guided:
            # Copy, as another thread fetches the tokens, and on CUDA two threads must not fetch the same buffer at once.
            self._untaken.append((guided, tokens + 0))
            arrays.append(self._untaken[-1][1])
        if (followed := self._budgets.took(ids, plan.ahead, tokens)) is not None:
            arrays.append(followed)
        if given_up:
            why = mx.array([given_up.get(row, 0) for row in range(len(ids))])
            tokens = mx.where(why < 0, why, tokens)
        return Sampled(tokens, arrays, plan.asked, columns)

    def _constrained(self, logits: mx.array, ids: Sequence[str]) -> tuple[mx.array, dict[int, int]]:
        """Return logits with grammar masks applied, and row -> error code for rows whose grammar failed."""
        assert self._guides is not None
        self._follow()
        masks = self._guides.masks(ids)
        if not masks.rows:
            return logits, masks.given_up
        words = mx.array(masks.bits)[..., None] >> mx.arange(32, dtype=mx.uint32)
        allowed = (words & 1).reshape(len(masks.rows), -1)[:, : self._vocab_size] == 1
        return logits.at[mx.array(masks.rows)].add(mx.where(allowed, 0.0, -mx.inf)), masks.given_up

    def _follow(self) -> None:
        """Advance the matchers by all tokens sampled so far; waits for those being computed."""
        assert self._guides is not None
        for rows, tokens in self._untaken:
            values: list[int] = tokens.tolist()  # type: ignore[assignment]
            for row, request_id in rows:
                self._guides.advance(request_id, values[row])
        self._untaken.clear()

    def _edited(self, logits: mx.array, plan: _Plan) -> mx.array:
        """Return logits after bias, penalties and the ban on early ends."""
        if plan.bias is not None:
            logits = plan.bias.added(logits)
        if plan.penalties is not None:
            logits = self._history.penalise(logits, plan.penalties)
        bans = plan.banned(self._eos, self._vocab_size)
        return logits if bans is None else bans.added(logits)

    def _chosen(self, logits: mx.array, plan: _Plan) -> mx.array:
        """Return int32 [n]: the argmax of greedy rows, a random draw of other rows."""
        if plan.keys is None:
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        scaled = logits - logits.max(axis=-1, keepdims=True)
        if plan.inverse_temperature is not None:
            scaled = scaled * plan.inverse_temperature
        positions = np.array([one.produced + i for one, i in zip(plan.sequences, plan.ahead, strict=True)], dtype=np.uint64)
        uniforms = mx.array(uniform_pairs(plan.keys, positions))
        drawn = draw(filtered_weights(scaled, plan.filters, top_p=self._top_p), uniforms)
        if plan.greedy is None:
            return drawn
        return mx.where(plan.greedy, mx.argmax(logits, axis=-1).astype(mx.int32), drawn)

    def _plan(self, ids: tuple[str, ...]) -> _Plan:
        if ids not in self._plans:
            if len(self._plans) >= PLANS:
                self._plans.clear()
            self._plans[ids] = self._build(ids)
        return self._plans[ids]

    def _build(self, ids: tuple[str, ...]) -> _Plan:
        sequences = [self._sequences[request_id] for request_id in ids]
        params = [sequence.params for sequence in sequences]
        first = {one: row for row, one in reversed(list(enumerate(ids)))}
        ahead = [row - first[one] for row, one in enumerate(ids)]
        if any(i and one.follows for i, one in zip(ahead, sequences, strict=True)):
            raise ValueError("a sequence with penalties or a grammar takes one position at a time")
        greedy = [one.temperature < COLDEST for one in params]
        biased = [(row, token, value) for row, one in enumerate(params) for token, value in one.logit_bias.items()]
        bias = [entry for entry in biased if 0 <= entry[1] < self._vocab_size]
        heat = [1.0 if cold else 1.0 / one.temperature for one, cold in zip(params, greedy, strict=True)]
        asked = [(row, one.logprobs) for row, one in enumerate(params) if one.logprobs is not None]
        return _Plan(
            sequences=sequences,
            ahead=ahead,
            bias=TokenEdits.build(bias),
            penalties=self._history.rows(ids, params),
            greedy=mx.array(greedy) if any(greedy) else None,
            keys=None if all(greedy) else seed_keys([sequence.seed for sequence in sequences]),
            inverse_temperature=None if set(heat) == {1.0} else mx.array(heat, dtype=mx.float32)[:, None],
            filters=_filter_rows(params, greedy, self._vocab_size),
            asked=[(ids[row], min(k, self._vocab_size)) for row, k in asked],
            asked_rows=None if len(asked) in (0, len(ids)) else mx.array([row for row, _ in asked], dtype=mx.int32),
        )


def _top_p_method() -> TopP:
    """Return the top-p method for this device. On Metal, sorting or partitioning the vocabulary takes as long as several
    model layers."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return "head"
    return "halve" if mx.metal.is_available() else "sort"


def _filter_rows(params: list[SamplingParams], greedy: list[bool], vocab_size: int) -> FilterRows:
    """Return the filters of a batch. Greedy rows count as unfiltered."""
    live = list(zip(params, greedy, strict=True))
    top_k = [one.top_k if not cold and 0 < one.top_k < vocab_size else vocab_size for one, cold in live]
    top_p = [1.0 if cold else one.top_p for one, cold in live]
    min_p = [0.0 if cold else one.min_p for one, cold in live]
    used_k = [k for k in top_k if k < vocab_size]
    return FilterRows(
        top_k=mx.array(top_k, dtype=mx.int32)[:, None] if used_k else None,
        largest_k=max(used_k, default=0),
        all_k=all(k < vocab_size for k, p in zip(top_k, top_p, strict=True) if p < 1.0),
        top_p=mx.array(top_p, dtype=mx.float32)[:, None] if min(top_p) < 1.0 else None,
        min_p=mx.array(min_p, dtype=mx.float32)[:, None] if max(min_p) > 0.0 else None,
    )


def _most_likely(logits: mx.array) -> mx.array:
    """Return int32 [n]: the most likely tokens, NOT_FINITE as in `_marked`. Uses the logits' own type and reads only the
    maximum, which is NaN if any logit is."""
    return mx.where(mx.abs(logits.max(axis=-1)) < mx.inf, mx.argmax(logits, axis=-1).view(mx.int32), NOT_FINITE)


def _marked(tokens: mx.array, raw: mx.array, edited: mx.array) -> mx.array:
    """Return tokens, replaced by NOT_FINITE where the model's logits have a NaN or +inf, or no finite token could be chosen."""
    chosen = mx.take_along_axis(edited, tokens[:, None], axis=-1)[:, 0]
    sound = (raw.sum(axis=-1) < mx.inf) & mx.isfinite(chosen)  # a NaN anywhere makes the sum NaN, which is not < inf
    return mx.where(sound, tokens, NOT_FINITE)


def _logprob_columns(logits: mx.array, tokens: mx.array, plan: _Plan) -> tuple[mx.array, ...]:
    """Return tokens [a], their log probabilities [a], and ids and log probabilities of the most likely [a, k]; () if not
    requested."""
    if not plan.asked:
        return ()
    if plan.asked_rows is not None:
        logits, tokens = logits[plan.asked_rows], tokens[plan.asked_rows]
    else:
        tokens = tokens + 0  # copy: another thread reads it while the next step takes the tokens
    norm = mx.logsumexp(logits, axis=-1, keepdims=True)
    places = mx.maximum(tokens, 0)[:, None]
    chosen = (mx.take_along_axis(logits, places, axis=-1) - norm)[:, 0]
    k = max(k for _, k in plan.asked)
    if not k:
        return tokens, chosen
    best, places_of_best = largest(logits, k)
    return tokens, chosen, places_of_best, best - norm
