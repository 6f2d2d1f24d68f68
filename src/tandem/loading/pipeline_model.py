"""mlx-lm's own model restricted to the layers of one stage (mlx).

A stage runs the model's own `__call__`, so masks, scales, offsets and layer arguments are mlx-lm's and need no table.
During the call the model's list of layers holds placeholders. A placeholder for another stage's layer returns its
input. The one before the first own layer returns what the previous stage sent. The last own layer ends the call. MLX is
lazy: what the model computes for other stages (embeddings of absent tokens, unused masks) is never evaluated.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NamedTuple, NoReturn

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache

from tandem.errors import UnsupportedModel
from tandem.loading.adapters import Adapters
from tandem.loading.mlx_lm_models import FAILURES
from tandem.loading.prefix import members
from tandem.loading.quantized_kv import Cache
from tandem.loading.seams import ChangedLayer, Placeholder
from tandem.loading.shard_modules import at, put
from tandem.loading.stage_caches import MaskedCache, NotedLayer, OtherStageCache, cache_kind, grouped
from tandem.loading.stage_payload import TRACED, ArraySpec, StagePayload, residuals
from tandem.loading.weights import one_line
from tandem.models.families.table import Family

_PLAIN = Family()
_TRACING = threading.RLock()


@contextmanager
def unevaluated() -> Iterator[None]:
    """Ignore `mx.async_eval`, by which some models start what they compute: a trace must not evaluate absent weights. One
    thread at a time, since it is replaced for all of them."""
    with _TRACING:
        theirs, mx.async_eval = mx.async_eval, lambda *arrays: None
        try:
            yield
        finally:
            mx.async_eval = theirs


class PipelineModel:
    """mlx-lm's model, run for the layers of one stage. Not thread-safe."""

    def __init__(self, model: nn.Module, own: range, family: Family = _PLAIN, *, grouped_scores: bool = False) -> None:
        """Trace `model`, which may be without weights: nothing is computed. `own`: numbers of the stage's layers.
        `family`: arguments and outputs of layers. `grouped_scores`: attention scores have an axis for the queries of a
        kv head, so masks need it too.

        Raise UnsupportedModel if the model does not call a list of layers once and in order.
        """
        self.model = model
        self.own = own
        self._holder, self._name, self.path = _layer_list(model)
        self.layers: list[nn.Module] = list(self._holder[self._name])
        """mlx-lm's modules; `put_layer` replaces them with loaded ones."""
        self.made: list[Cache] = make_prompt_cache(model)
        """Fresh caches of all layers, to be copied. mlx-vlm makes them by the type of a layer's attention, which ranks wrap."""
        self._received = _Received()
        self._captures: tuple[int, ...] = ()
        self._captured: list[mx.array] = []
        self._family = family
        before = {id(module): set(module) for module in model.modules()}
        self._cache_of, self._extras, self._forwarded_of, self._stage_payload = self._trace()
        self._kept = self._kept_caches()
        counted = [i for i, cache in enumerate(self.made) if hasattr(cache, "offset")]
        self._counting = family.counts and not set(counted) & set(self._kept)
        if self._counting:  # own layers have no cache that counts positions: one does, with one-element keys
            self._kept = sorted([*self._kept, counted[0]])
        self._places = [self._place(i) for i in range(len(self.made))]
        self._counts = next((at for at, i in enumerate(self._kept) if i in counted), None)
        self._grouped_scores = grouped_scores
        self.adapters: Adapters | None = None
        """LoRA adapters of the layers, for calls that compute states again; None without any."""
        self._in_run: list[nn.Module | Placeholder] = []
        self._in_head: list[nn.Module | Placeholder] = []
        self._try()
        for module in model.modules():
            for name in set(module) - before.get(id(module), set(module)):
                setattr(module, name, None)  # derived from weights, which are not loaded yet

    @property
    def width(self) -> int:
        """Elements per position in the payload from the previous stage, or to the next one of the first stage."""
        earlier = sum(i < self.own.start for i in self._captures)
        return self._stage_payload.width + earlier * self._stage_payload.hidden.width

    def capture(self, layers: Sequence[int]) -> None:
        """Append the outputs of these layers of the model, in order, to the payload and to the last stage's hidden states."""
        self._captures, self._in_run = tuple(layers), []

    def put_layer(self, i: int, layer: nn.Module) -> None:
        """Replace the model's layer `i` with `layer`."""
        self.layers[i] = layer
        self._in_run, self._in_head = [], []

    def make_caches(self) -> list[Cache]:
        """Return fresh single-sequence mlx-lm caches of this stage; a layer may have one, none, or share one."""
        return [deepcopy(self.made[i]) for i in self._kept]

    def layers_of(self, at: int) -> set[int]:
        """Return the numbers of the own layers that use the stage's cache number `at`."""
        return {i for i in self.own if self._cache_of[i] == self._kept[at]}

    def run(self, x: mx.array, caches: Sequence[Any]) -> mx.array:
        """Map the input to hidden states [B, L, H]: tokens [B, L] on the first stage, elsewhere the previous stage's
        output.

        Other values that later layers need are appended, and then captured states: [B, L, H + ...]. `caches` are those of
        `make_caches`, or batches of such.
        """
        full: list[Any] = [
            self._elsewhere(i, caches) if at is None else functools.reduce(operator.getitem, at, caches)
            for i, at in enumerate(self._places)
        ]
        if self._grouped_scores:
            full = [MaskedCache(cache, grouped) for cache in full]
        tokens = x
        forwarded: list[Any] = [None] * len(self._stage_payload.forwarded)
        if self.own.start:
            values = self._stage_payload.unpacked(x)
            count = len(values) - len(forwarded)
            forwarded[:] = values[count:]
            self._received.values = self._as_given(values[:count], self.own.start - 1)
            tokens = mx.zeros(x.shape[:2], mx.int32)
        self._received.forwarded = forwarded
        self._in_run = self._in_run or [self._placeholder(i) for i in range(len(self.layers))]
        out = self._call(self._in_run, tokens, full)
        if self._counting and self._counts is not None:
            zeros = mx.zeros((x.shape[0], 1, x.shape[1], 1), mx.float32)
            caches[self._counts].update_and_fetch(zeros, zeros)
        out = out if isinstance(out, tuple) else (out,)
        sent = (*self._as_sent(out)[: 1 + len(self._stage_payload.carried)], *forwarded)
        if self.own.stop == len(self.layers):
            sent = self._as_sent(out)[: 1 + len(self._stage_payload.carried) * bool(self._residuals)]
        packed = self._stage_payload.packed(sent)
        if not self._captures:
            return packed
        earlier = [x[..., self._stage_payload.width :]] if self.own.start else []
        states, self._captured[:] = [state.astype(packed.dtype) for state in self._captured], []
        return mx.concatenate([packed, *earlier, *states], axis=-1)

    def head(self, h: mx.array) -> mx.array:
        """Map hidden states [B, L, H] of the last layer to logits [B, L, V]."""
        self._received.values = self._as_given(self._stage_payload.unpacked(h), len(self.layers) - 1)
        if not self._in_head:
            others = [_OtherStage(*one) for one in zip(self.layers[:-1], self._extras[:-1], strict=True)]
            self._in_head = [*others, _Source(self.layers[-1], self._received, self._extras[-1])]
        with self._layers_are(self._in_head):
            # Tokens that the embedding caches must not persist between calls.
            made = [cache if i in self._cache_of else deepcopy(cache) for i, cache in enumerate(self.made)]
            logits: mx.array = self.model(mx.zeros(h.shape[:2], mx.int32), cache=made)
        return logits

    def final(self, h: mx.array, projection: str, *, embedding: bool) -> mx.array:
        """Return the input [B, L, H] of the output projection for hidden states [B, L, H] of the last layer.

        `projection` is its path; with `embedding` that is the embedding used as projection. Raise UnsupportedModel if
        it is not called.
        """
        module = at(self.model, projection)
        placeholder = _Projection(self._stage_payload.unpacked(h)[0], module if embedding else None)
        put(self.model, projection, placeholder)
        try:
            states: mx.array = self.head(h)
            if placeholder.multiplied:
                return states
        except _Reached as reached:
            states = reached.value
            return states
        finally:
            put(self.model, projection, module)
        raise UnsupportedModel(f"its forward pass does not call {projection}")

    # ---- inside

    def _as_given(self, values: tuple[mx.array, ...], layer: int) -> tuple[object, ...]:
        """Convert received values to the output of layer `layer`."""
        return (values[0], self._residuals.made(values[1], layer)) if self._residuals else values

    def _as_sent(self, out: tuple[Any, ...]) -> tuple[mx.array, ...]:
        return (out[0], self._residuals.filled(out[1])) if self._residuals else out

    @unevaluated()
    def _try(self) -> None:
        """Trace a call of this stage, without computing. Raise UnsupportedModel if its layers do not run separately."""
        shape = (1, 1) if self.own.start == 0 else (1, 1, self.width)
        try:
            self.run(mx.zeros(shape, mx.float32 if self.own.start else mx.int32), self.make_caches())
        except FAILURES as error:
            raise UnsupportedModel(
                f"layers {self.own.start} to {self.own.stop - 1} do not run without the others: {one_line(error)}"
            ) from error

    def _placeholder(self, i: int) -> nn.Module | Placeholder:
        layer, last = self.layers[i], self.own.stop - 1
        if i == self.own.start - 1:
            return _Source(layer, self._received, self._extras[i])
        forwarded = self._forwarded_of[i]
        if i not in self.own:
            after = self._stage_payload.forwarded and self.own.start == 0 and i > last
            inputs = _ForwardedInputs(self._received, forwarded) if after else None
            return _OtherStage(layer, self._extras[i], self._family.hidden, inputs, i == len(self.layers) - 1)
        if ArraysCache in map(type, members(self.made[at] for at in [self._cache_of[i]] if at is not None)):
            layer = NotedLayer(layer, self.adapters)
        if i in self._captures:
            layer = ChangedLayer(layer, functools.partial(_capture, self._captured))
        if forwarded:
            layer = _TakesForwarded(layer, _ForwardedInputs(self._received, forwarded), take=self.own.start > 0)
        if i < last:
            return layer
        later = self._stage_payload.forwarded and self.own.start == 0 and self.own.stop < len(self.layers)
        return ChangedLayer(layer, self._received.keep if later else _end)

    def _call(self, layers: Sequence[nn.Module | Placeholder], tokens: mx.array, caches: list[Cache]) -> object:
        try:
            with self._layers_are(layers):
                self.model(tokens, cache=caches)
        except _Reached as reached:
            return reached.value
        raise UnsupportedModel("its forward pass leaves out the last layer")

    @contextmanager
    def _layers_are(self, layers: Sequence[nn.Module | Placeholder]) -> Iterator[None]:
        whole = self._holder[self._name]
        self._holder[self._name] = layers
        try:
            yield
        finally:
            self._holder[self._name] = whole
            self._received.values, self._received.forwarded, self._received.out = (), (), None

    @unevaluated()
    def _trace(self) -> tuple[list[int | None], list[int], list[dict[int | str, int]], StagePayload]:
        """Trace a whole call without computing.

        Return each layer's cache, its number of extra outputs, its forwarded arguments (by number), and the payload's
        layout.
        """
        seen: list[_Seen] = []
        caches = make_prompt_cache(self.model)
        watched = [_Watched(layer, caches, seen.append) for layer in self.layers]
        try:
            with self._layers_are(watched):
                self.model(mx.zeros(TRACED, mx.int32), cache=caches)
            if len(seen) != len(self.layers):
                raise UnsupportedModel(f"its forward pass calls {len(seen)} layers, and has {len(self.layers)}")
            forwarded: list[mx.array] = []
            forwarded_of = [_numbered(one, self._family.gives, forwarded) for one in seen]
            out = seen[0].out
            self._residuals = residuals(self.layers, out)
            carried = self._as_sent(out)[1 : 1 + self._family.extra_outputs]
            stage_payload = StagePayload(
                ArraySpec.of(out[0]), tuple(map(ArraySpec.of, carried)), tuple(map(ArraySpec.of, forwarded))
            )
        except FAILURES as error:
            raise UnsupportedModel(f"its forward pass fails: {type(error).__name__}: {one_line(error)}") from error
        self._idle = {i for i, cache in enumerate(caches) if type(cache) is KVCache and cache.keys is None}
        used = [None if one.cache in self._idle else one.cache for one in seen]
        return used, [len(one.out) - 1 for one in seen], forwarded_of, stage_payload

    def _kept_caches(self) -> list[int]:
        """Return the indices of the own layers' caches; on the first stage also of caches that only the embedding uses."""
        kept = {self._cache_of[i] for i in self.own} - {None}
        if self.own.start == 0:
            kept |= set(range(len(self.made))) - set(self._cache_of) - self._idle
        others = {cache for i, cache in enumerate(self._cache_of) if i not in self.own}
        if shared := list(kept & others):
            users = [i for i, cache in enumerate(self._cache_of) if cache == shared[0]]
            raise UnsupportedModel(f"layers {users[0]} to {users[-1]} share keys and values, so they stay in one stage")
        return sorted(cache for cache in kept if cache is not None)

    def _elsewhere(self, index: int, caches: Sequence[Cache]) -> Cache:
        """Return a placeholder for the model's cache `index`, whose kind this stage lacks. Its offset is that of an own
        cache, and writes are discarded after the call."""
        made: Cache = deepcopy(self.made[index])
        if self._counts is None or not hasattr(made, "offset"):
            return made
        return OtherStageCache(made, caches[self._counts])

    def _place(self, index: int) -> tuple[int, ...] | None:
        """Return the index of this stage's cache for the model's cache `index`, or of one that yields equal masks, as a
        member of a list at last; None if there is none."""
        if index in self._kept:
            return (self._kept.index(index),)
        kind, kept = cache_kind(self.made[index]), [self.made[i] for i in self._kept]
        places: list[tuple[tuple[int, ...], Cache]] = [((at,), cache) for at, cache in enumerate(kept)]
        places += [((at, i), one) for (at,), cache in places for i, one in enumerate(getattr(cache, "caches", ()))]
        return next((place for place, cache in places if cache_kind(cache) == kind), None)


class _Reached(BaseException):
    """Raised to end the model's call with the output of the last own layer. A BaseException, so that no code in between
    catches it."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class _Received:
    """Values from the previous stage. Separate from the pipeline model, so that placeholders do not keep weights alive."""

    values: tuple[object, ...] = ()
    forwarded: Sequence[mx.array] = ()
    """Forwarded inputs: layer arguments that only the first stage can compute. It stores them; other stages receive
    them."""
    out: object = None
    """Output of the last own layer."""

    def as_output(self, extras: int) -> object:
        """Return the values in the form of a layer's output with `extras` values besides the hidden states."""
        values = (*self.values, *[None] * (extras + 1 - len(self.values)))
        return values if extras else values[0]

    def keep(self, out: object) -> object:
        """Store and return the output of a first stage's last layer, as later layers' forwarded inputs are still to be stored."""
        self.out = out
        return out


class _ForwardedInputs:
    """Forwarded inputs of one layer; `numbers` maps position or name of the argument to the number of the input."""

    def __init__(self, received: _Received, numbers: Mapping[int | str, int]) -> None:
        self._received, self._numbers = received, numbers

    def note(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Store the layer's forwarded inputs."""
        for place, number in self._numbers.items():
            self._received.forwarded[number] = _argument(place, args, kwargs)  # type: ignore[index]

    def put(self, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[object, ...]:
        """Return the positional arguments with the received inputs in place; `kwargs` are updated."""
        found = list(args)
        for place, number in self._numbers.items():
            if isinstance(place, str):
                kwargs[place] = self._received.forwarded[number]
            else:
                found[place] = self._received.forwarded[number]
        return tuple(found)


class _Seen(NamedTuple):
    """One traced call of a layer."""

    cache: int | None
    """Index of the cache passed to it; None for no cache."""
    out: tuple[mx.array, ...]
    args: tuple[object, ...]
    kwargs: Mapping[str, object]


def _argument(place: int | str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
    if isinstance(place, str):
        return kwargs.get(place)
    return args[place] if place < len(args) else None


def _numbered(seen: _Seen, places: Sequence[int | str], forwarded: list[mx.array]) -> dict[int | str, int]:
    """Return the numbers of a layer's forwarded inputs, by position or name; each new array is appended to `forwarded`
    once."""
    found: dict[int | str, int] = {}
    for place in places:
        value = _argument(place, seen.args, seen.kwargs)
        if isinstance(value, mx.array):
            number = next((i for i, one in enumerate(forwarded) if one is value), len(forwarded))
            forwarded += [value] if number == len(forwarded) else []
            found[place] = number
    return found


class _OtherStage(Placeholder):
    """Placeholder for a layer of another stage: returns its input in the form of the layer's output.

    With `forwarded` the first stage stores that layer's forwarded inputs; with `ends` the call then ends.
    """

    def __init__(
        self, layer: nn.Module, extras: int, hidden: int | str = 0, forwarded: _ForwardedInputs | None = None, ends: bool = False
    ) -> None:
        super().__init__(layer)
        self._extras, self._hidden, self._forwarded, self._ends = (None,) * extras, hidden, forwarded, ends

    def __call__(self, *args: object, **kwargs: object) -> object:
        if self._forwarded is not None:
            self._forwarded.note(args, kwargs)
            if self._ends:
                raise _Reached(self._forwarded._received.out)
        h = _argument(self._hidden, args, kwargs)
        return (h, *self._extras) if self._extras else h


class _TakesForwarded(Placeholder):
    """Placeholder for an own layer with forwarded inputs: stores them on the first stage, inserts them on others."""

    def __init__(self, layer: nn.Module, forwarded: _ForwardedInputs, *, take: bool) -> None:
        super().__init__(layer)
        self._forwarded, self._take = forwarded, take

    def __call__(self, *args: object, **kwargs: object) -> object:
        if self._take:
            return self._layer(*self._forwarded.put(args, kwargs), **kwargs)
        self._forwarded.note(args, kwargs)
        return self._layer(*args, **kwargs)


class _Source(Placeholder):
    """Placeholder for the layer before the first own one: returns the values that this stage received."""

    def __init__(self, layer: nn.Module, received: _Received, extras: int) -> None:
        super().__init__(layer)
        self._received, self._extras = received, extras

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self._received.as_output(self._extras)


def _capture(states: list[mx.array], out: Any) -> object:
    """Append a layer's hidden states to `states`, and return its output."""
    states.append(out[0] if isinstance(out, tuple) else out)
    return out


def _end(out: object) -> NoReturn:
    """End the call with the output of the last own layer."""
    raise _Reached(out)


class _Projection(nn.Module):
    """Replacement for the output projection, or for the embedding used as one: ends the call with its input."""

    def __init__(self, states: mx.array, embedding: nn.Module | None) -> None:
        super().__init__()
        self._width, self._dtype, self._embedding = states.shape[-1], states.dtype, embedding
        self.multiplied = False

    @property
    def weight(self) -> mx.array:
        """Identity matrix, for models that multiply by the embedding's weight themselves: the product is then the
        hidden states."""
        self.multiplied = True
        return mx.eye(self._width, dtype=self._dtype)

    def __call__(self, x: mx.array) -> mx.array:
        if self._embedding is None:
            raise _Reached(x)
        found: mx.array = self._embedding(x)
        return found

    def as_linear(self, h: mx.array) -> mx.array:
        raise _Reached(h)


class _Watched(Placeholder):
    """Wrapper of a layer that reports its arguments and output to `tell`."""

    def __init__(self, layer: nn.Module, caches: Sequence[Cache], tell: Callable[[_Seen], None]) -> None:
        super().__init__(layer)
        self._caches, self._tell = caches, tell

    def __call__(self, *args: object, **kwargs: object) -> object:
        values = (*args, *kwargs.values())
        number = next((i for i, cache in enumerate(self._caches) if any(value is cache for value in values)), None)
        out = self._layer(*args, **kwargs)
        self._tell(_Seen(number, out if isinstance(out, tuple) else (out,), args, kwargs))
        return out


def _layer_list(model: nn.Module) -> tuple[nn.Module, str, str]:
    """Return the module that holds the list of layers, the list's attribute name, and its path in the model."""
    layers = list(model.layers)
    for path, module in model.named_modules():
        for name, value in module.items():
            if isinstance(value, list) and len(value) == len(layers) > 0 and value[0] is layers[0]:
                return module, name, f"{path}.{name}".lstrip(".")
    raise UnsupportedModel("it has no list of layers")
