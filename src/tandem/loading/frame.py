"""mlx-lm's own model with the layers of one stage, the others passed over (mlx).

A stage runs the model's own `__call__`, so that its masks, scales, offsets and the arguments of its layers are mlx-lm's
and need no table. In the call the model's list of layers holds stand-ins: a layer of another stage hands on what it
gets, the one before the first own layer gives what the stage before sent, and the last own layer ends the call. MLX is
lazy: what the model computes for other stages (the embedding of tokens that are not here, a mask that no own layer
reads) is never evaluated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache

from tandem.errors import UnsupportedModel
from tandem.loading.shard_modules import at, put


class Frame:
    """One stage's way through mlx-lm's model. Not thread-safe."""

    def __init__(self, model: nn.Module, own: range, *, carries: int = 0, grouped_scores: bool = False) -> None:
        """`model` is whole and may be without weights: nothing of it is computed here. `own`: numbers of the stage's
        layers. `carries`: values besides the hidden states that each layer hands to the next one. `grouped_scores`:
        attention's scores have an axis for the queries of a kv head, and so must masks that differ by row.

        Raises UnsupportedModel when the model does not go through a list of layers, once and in order.
        """
        self.model = model
        self.own = own
        self._holder, self._name, self.path = _layer_list(model)
        self.layers: list[Any] = list(self._holder[self._name])
        """mlx-lm's modules. Those with weights take their places through `put_layer`."""
        self._made = make_prompt_cache(model)
        self._given = _Given()
        self._cache_of, self._extras, self._hidden, self._carried = self._trace(carries)
        self._kept = self._kept_caches()
        self._places = [self._place(i) for i in range(len(self._made))]
        self._counts = next((at for at, i in enumerate(self._kept) if hasattr(self._made[i], "offset")), None)
        self._grouped_scores = grouped_scores
        self._in_run: list[Any] = []
        self._in_head: list[Any] = []
        self._try()

    @property
    def carried_width(self) -> int:
        """Elements that a position hands on besides its hidden states."""
        return sum(math.prod(shape) for shape in self._carried)

    def put_layer(self, i: int, layer: nn.Module) -> None:
        """Let `layer` compute as the model's layer `i`."""
        self.layers[i] = layer
        self._in_run, self._in_head = [], []

    def make_caches(self) -> list[Any]:
        """Fresh single-sequence caches of mlx-lm that this stage keeps; a layer may have one, none, or share one."""
        made = make_prompt_cache(self.model)
        return [made[i] for i in self._kept]

    def run(self, x: mx.array, caches: Sequence[Any]) -> mx.array:
        """Tokens [B, L] on the first stage, elsewhere what the stage before returned, to hidden states [B, L, H].

        Where layers carry more than hidden states it stands behind them: [B, L, H + ...]. `caches` are those of
        `make_caches`, or batches of such.
        """
        full = [caches[at] if at is not None else self._elsewhere(i, caches) for i, at in enumerate(self._places)]
        if self._grouped_scores:
            full = [_GroupedMask(cache) for cache in full]
        tokens = x
        if self.own.start:
            self._given.values = self._unpacked(x)
            tokens = mx.zeros(x.shape[:2], mx.int32)
        self._in_run = self._in_run or [self._stand_in(i) for i in range(len(self.layers))]
        out = self._call(self._in_run, tokens, full)
        if not isinstance(out, tuple):
            return out
        if not self._carried or self.own.stop == len(self.layers):
            return out[0]
        return mx.concatenate([one.reshape(*x.shape[:2], -1) for one in out[: 1 + len(self._carried)]], axis=-1)

    def head(self, h: mx.array) -> mx.array:
        """Hidden states [B, L, H] of the last layer to logits [B, L, V]."""
        self._given.values = (h,)
        if not self._in_head:
            others = [_PassedOver(*one) for one in zip(self.layers[:-1], self._extras[:-1], strict=True)]
            self._in_head = [*others, _Source(self.layers[-1], self._given, self._extras[-1])]
        with self._layers_are(self._in_head):
            # What the embedding keeps (the last tokens) must not stay from call to call.
            made = [cache if i in self._cache_of else deepcopy(cache) for i, cache in enumerate(self._made)]
            logits: mx.array = self.model(mx.zeros(h.shape[:2], mx.int32), cache=made)
        return logits

    def final(self, h: mx.array, projection: str, *, embedding: bool) -> mx.array:
        """Hidden states [B, L, H] of the last layer to what the output projection gets of them.

        `projection` is its path; with `embedding` it is the embedding that serves as one.
        """
        module = at(self.model, projection)
        put(self.model, projection, _Projection(module if embedding else None))
        try:
            self.head(h)
        except _Reached as reached:
            found: mx.array = reached.value
            return found
        finally:
            put(self.model, projection, module)
        raise UnsupportedModel(f"its forward pass does not call {projection}")

    # ---- inside

    def _unpacked(self, x: mx.array) -> tuple[mx.array, ...]:
        """Hidden states and what else is carried, out of what `run` packed."""
        values, end = [], x.shape[-1] - self.carried_width
        values.append(x[..., :end])
        for shape in self._carried:
            values.append(x[..., end : end + math.prod(shape)].reshape(*x.shape[:2], *shape))
            end += math.prod(shape)
        return tuple(values)

    def _try(self) -> None:
        """Build a call of this stage, which computes nothing, to learn whether its layers can be called by themselves.
        """
        shape = (1, 1) if self.own.start == 0 else (1, 1, self._hidden + self.carried_width)
        try:
            self.run(mx.zeros(shape, mx.float32 if self.own.start else mx.int32), self.make_caches())
        except (TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
            raise UnsupportedModel(f"layers {self.own.start} to {self.own.stop - 1} do not run without the others: "
                                   f"{error}") from error

    def _stand_in(self, i: int) -> Any:
        if i in self.own:
            return self.layers[i] if i < self.own.stop - 1 else _End(self.layers[i])
        if i == self.own.start - 1:
            return _Source(self.layers[i], self._given, self._extras[i])
        return _PassedOver(self.layers[i], self._extras[i])

    def _call(self, layers: list[Any], tokens: mx.array, caches: list[Any]) -> Any:
        try:
            with self._layers_are(layers):
                self.model(tokens, cache=caches)
        except _Reached as reached:
            return reached.value
        raise UnsupportedModel("its forward pass leaves out the last layer")

    @contextmanager
    def _layers_are(self, layers: list[Any]) -> Iterator[None]:
        whole = self._holder[self._name]
        self._holder[self._name] = layers
        try:
            yield
        finally:
            self._holder[self._name], self._given.values = whole, ()

    def _trace(self, carries: int) -> tuple[list[int | None], list[int], int, list[tuple[int, ...]]]:
        """From a call on one token: which cache each layer gets, how many values it returns besides the first, the
        width of the hidden states, and the shapes of a position's carried values."""
        seen: list[tuple[int | None, tuple[Any, ...]]] = []
        caches = make_prompt_cache(self.model)
        watched = [_Watched(layer, caches, seen.append) for layer in self.layers]
        try:
            with self._layers_are(watched):
                self.model(mx.zeros((1, 1), mx.int32), cache=caches)
        except (TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
            raise UnsupportedModel(f"its forward pass fails: {type(error).__name__}: {error}") from error
        if len(seen) != len(self.layers):
            raise UnsupportedModel(f"its forward pass calls {len(seen)} layers, and has {len(self.layers)}")
        out = seen[0][1]
        carried = [tuple(value.shape[2:]) for value in out[1 : 1 + carries]]
        self._idle = {i for i, cache in enumerate(caches) if type(cache) is KVCache and cache.keys is None}
        used = [None if cache in self._idle else cache for cache, _ in seen]
        return used, [len(out) - 1 for _, out in seen], out[0].shape[-1], carried

    def _kept_caches(self) -> list[int]:
        """Those of the own layers; on the first stage also those that belong to no layer, but to what comes before."""
        kept = {self._cache_of[i] for i in self.own} - {None}
        if self.own.start == 0:
            kept |= set(range(len(self._made))) - set(self._cache_of) - self._idle
        others = {cache for i, cache in enumerate(self._cache_of) if i not in self.own}
        if shared := list(kept & others):
            users = [i for i, cache in enumerate(self._cache_of) if cache == shared[0]]
            raise UnsupportedModel(f"layers {users[0]} to {users[-1]} share keys and values, so they stay in one stage")
        return sorted(cache for cache in kept if cache is not None)

    def _elsewhere(self, index: int, caches: Sequence[Any]) -> Any:
        """In the place of the model's cache `index`, of whose kind the stage has none: offsets can be made from it."""
        made = self._made[index]
        return made if self._counts is None or not hasattr(made, "offset") else _Elsewhere(made, caches[self._counts])

    def _place(self, index: int) -> int | None:
        """Place among this stage's caches of the model's cache `index`, or of one from which masks are made alike."""
        if index in self._kept:
            return self._kept.index(index)
        kinds = [_kind(self._made[i]) for i in self._kept]
        kind = _kind(self._made[index])
        return kinds.index(kind) if kind in kinds else None


class _Reached(BaseException):
    """Ends the model's call with the output of the last own layer. No `Exception`: nothing in between may catch it."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class _Given:
    """What the stage before sent. Apart from the frame, so that stand-ins do not keep the frame and its weights."""

    values: tuple[Any, ...] = ()

    def as_output(self, extras: int) -> Any:
        """As a layer returns it that has so many values besides hidden states."""
        values = (*self.values, *[None] * (extras + 1 - len(self.values)))
        return values if extras else values[0]


class _StandIn:
    """In a layer's place in the model's list. Models ask for `layer.is_linear` and such, and for the layer's class."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    # What isinstance asks for, after the real type.
    __class__ = property(lambda self: type(self._layer))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class _PassedOver(_StandIn):
    """A layer of another stage: hands on what it gets, in the form in which the layer would."""

    def __init__(self, layer: Any, extras: int) -> None:
        super().__init__(layer)
        self._extras = (None,) * extras

    def __call__(self, h: Any, *args: Any, **kwargs: Any) -> Any:
        return (h, *self._extras) if self._extras else h


class _Source(_StandIn):
    """The layer before the first own one: returns what the frame was given."""

    def __init__(self, layer: Any, given: _Given, extras: int) -> None:
        super().__init__(layer)
        self._given, self._extras = given, extras

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._given.as_output(self._extras)


class _End(_StandIn):
    """The last own layer."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise _Reached(self._layer(*args, **kwargs))


class _Projection(nn.Module):
    """In the place of the output projection, or of the embedding that serves as one: ends the call with its input."""

    def __init__(self, embedding: nn.Module | None) -> None:
        super().__init__()
        self._embedding = embedding

    def __call__(self, x: mx.array) -> mx.array:
        if self._embedding is None:
            raise _Reached(x)
        found: mx.array = self._embedding(x)
        return found

    def as_linear(self, h: mx.array) -> mx.array:
        raise _Reached(h)


class _Watched(_StandIn):
    """Tells which cache the layer is given (its number, or None), and what it returns."""

    def __init__(
        self, layer: Any, caches: Sequence[Any], tell: Callable[[tuple[int | None, tuple[Any, ...]]], None]
    ) -> None:
        super().__init__(layer)
        self._caches, self._tell = caches, tell

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        number = next((i for i, cache in enumerate(self._caches) if any(one is cache for one in given)), None)
        out = self._layer(*args, **kwargs)
        self._tell((number, out if isinstance(out, tuple) else (out,)))
        return out


class _GroupedMask:
    """A cache whose masks [rows, 1, L, positions] get an axis for the queries of a kv head."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        mask = self._cache.make_mask(*args, **kwargs)
        return mask[:, :, None] if isinstance(mask, mx.array) and mask.ndim == 4 else mask


class _Elsewhere:
    """A cache of another stage, of a kind that this stage has not: stands where one of the stage's own caches does."""

    def __init__(self, made: Any, own: Any) -> None:
        self._made, self.offset = made, own.offset
        if hasattr(own, "make_mask"):
            self.make_mask = own.make_mask

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made, name)


def _kind(cache: Any) -> Any:
    """What makes two caches alike: class, window, number of states; of a list, those of its members."""
    if isinstance(cache, CacheList):
        return tuple(_kind(one) for one in cache.caches)
    sizes = (getattr(cache, name, None) for name in ("max_size", "keep", "chunk_size"))
    return type(cache), len(getattr(cache, "cache", ())), *sizes


def _layer_list(model: nn.Module) -> tuple[nn.Module, str, str]:
    """Module that holds the list of layers, its name there, and its path in the model."""
    layers = list(model.layers)
    for path, module in model.named_modules():
        for name, value in module.items():
            if isinstance(value, list) and len(value) == len(layers) > 0 and value[0] is layers[0]:
                return module, name, f"{path}.{name}".lstrip(".")
    raise UnsupportedModel("it has no list of layers")
