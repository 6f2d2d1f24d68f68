"""Pictures of requests: what the ranks of the first stage encode next, and whose features they hold."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable

from tandem.engine.recovery import RankGroup
from tandem.errors import OverloadedError, RequestError
from tandem.models.pictures import FEATURE_BYTES, INPUT_BYTES
from tandem.protocol.control import EngineMessage, Refused
from tandem.protocol.pictures import EncodePicture, Picture, PictureEncoded
from tandem.protocol.request import EngineRequest
from tandem.scheduler.scheduler import Scheduler
from tandem.scheduler.sequence import Sequence

LIVE_BYTES = 2**30
"""Most bytes of the inputs of all live requests, which the engine keeps for new ranks."""
_KEY = re.compile("[0-9a-f]{64}")


class PictureManager:
    """Encoding of pictures by a rank group, one at a time so that running sequences wait for at most one. Used only by the
    engine's thread."""

    def __init__(self, rank_group: RankGroup) -> None:
        self._group = rank_group
        self._held: OrderedDict[str, int] = OrderedDict()
        """Bytes of the features on the ranks by key, least recently used first."""
        self._evicts: list[str] = []
        """Keys to drop with the next order."""
        self.encoding: EncodePicture | None = None
        """Order that ranks have not answered yet."""
        self._step = -1
        """Step that was next when the last order was sent."""
        self._answers: dict[int, PictureEncoded] = {}
        """Answers so far by rank."""

    def check(self, request: EngineRequest, live: Iterable[Sequence]) -> None:
        """Raise RequestError for pictures that cannot be encoded, or do not fit the prompt; OverloadedError if those of `live`
        sequences leave no room."""
        if why := self._group.layout.description.no_pictures:
            raise RequestError(
                f"{self._group.layout.served_name} takes no pictures: {why}; send text alone",
                param="messages",
                code="model_takes_no_pictures",
            )
        stop = 0
        for number, picture in enumerate(request.pictures, 1):
            fits = stop <= picture.start and picture.length > 0 and picture.start + picture.length <= len(request.prompt)
            if not (fits and _KEY.fullmatch(picture.key)):
                raise RequestError(f"picture {number} has no key, or does not lie in the prompt", param="messages")
            _require_at_most(INPUT_BYTES, f"picture {number} takes", len(picture.inputs))
            if self._group.layout.description.mrope_section and not picture.span.rows:
                raise RequestError(f"picture {number} has no image_grid_thw that fits its tokens", param="messages")
            stop = picture.start + picture.length
        need = sum({picture.key: self._bytes(picture.length) for picture in request.pictures}.values())
        _require_at_most(FEATURE_BYTES, "the features of these pictures take", need)
        own, others = _input_bytes([request]), _input_bytes(sequence.request for sequence in live)
        _require_at_most(LIVE_BYTES, "these pictures take", own)
        if own + others > LIVE_BYTES:
            raise OverloadedError("pictures of other requests fill the room for them; try again later")

    def _bytes(self, positions: int) -> int:
        description = self._group.layout.description
        return 4 * description.hidden_size * (1 + description.deepstack) * positions

    def look(self, scheduler: Scheduler) -> None:
        """Let waiting sequences join whose features are held, and order the next picture if none is being encoded. Raises
        RankFailure."""
        waiting = [sequence for sequence in scheduler.waiting if sequence.request.pictures]
        if not waiting:
            return
        pinned = _keys(one for one in scheduler.batches.members() if not one.decoding)
        for sequence in waiting:
            keys = _keys([sequence])
            sequence.awaits_pictures = not keys <= self._held.keys()
            if not sequence.awaits_pictures:
                pinned |= keys
            for key in keys & self._held.keys():
                self._held.move_to_end(key)
        behind = next((one for one in waiting if one.awaits_pictures), None)
        rests = scheduler.batches.running and scheduler.next_step == self._step  # a step of those that run comes first
        if behind is not None and self.encoding is None and not rests:
            pinned |= _keys([behind])
            self._order(next(one for one in behind.request.pictures if one.key not in self._held), behind, pinned, scheduler)

    def _order(self, picture: Picture, sequence: Sequence, pinned: set[str], scheduler: Scheduler) -> None:
        """Have a picture encoded, if features that nothing needs can make room for it."""
        free, need = [key for key in self._held if key not in pinned], self._bytes(picture.length)
        while free and sum(self._held.values()) + need > FEATURE_BYTES:
            self._evicts.append(free.pop(0))
            del self._held[self._evicts[-1]]
        if sum(self._held.values()) + need > FEATURE_BYTES:
            return
        tokens = sequence.tokens[picture.start : picture.start + picture.length]
        self.encoding, self._answers = EncodePicture(picture.key, tokens, picture.inputs, self._evicts), {}
        self._evicts, self._step = [], scheduler.next_step
        for one in scheduler.waiting if not self._group.layout.ranks[0].encoder_seconds else ():
            one.encoding = picture.key in _keys([one])
        self._group.executor.encode(self.encoding)

    def take(self, report: PictureEncoded, scheduler: Scheduler) -> list[EngineMessage]:
        """Take a rank's answer. Return the refusals of waiting requests whose picture some rank could not encode."""
        if self.encoding is None or report.key != self.encoding.key:
            return []
        self._answers[report.rank] = report
        self._group.encoders[report.rank] = report.pid
        if len(self._answers) < sum(spec.layers[0] == 0 for spec in self._group.layout.ranks):
            return []
        order, self.encoding = self.encoding, None
        failed = next((one for one in self._answers.values() if one.error), None)
        users = [one for one in scheduler.waiting if one.awaits_pictures and order.key in _keys([one])]
        for sequence in users:
            sequence.encoding = False
        if failed is None:
            self._held[order.key] = self._bytes(len(order.tokens))
            return []
        self._evicts.append(order.key)  # another rank may hold it
        lost = [one.request_id for one in users if scheduler.abort(one.request_id)]
        status, code = (500, "rank_failure") if failed.died else (400, "picture_not_encoded")
        return [Refused(request_id, status, failed.error, code=code, param="messages") for request_id in lost]

    def forget(self) -> None:
        """Forget what ranks held, as they have ended; their successors encode again."""
        self._held.clear()
        self._group.encoders.clear()
        self._evicts, self.encoding = [], None


def _require_at_most(most: int, what: str, size: int) -> None:
    if size > most:
        remedy = "send fewer or smaller ones"
        raise RequestError(f"{what} {size / 2**20:.0f} MiB; at most {most // 2**20} are allowed; {remedy}", param="messages")


def _input_bytes(requests: Iterable[EngineRequest]) -> int:
    return sum(len(picture.inputs) for request in requests for picture in request.pictures)


def _keys(sequences: Iterable[Sequence]) -> set[str]:
    """Return the keys of all pictures of these sequences."""
    return {picture.key for sequence in sequences for picture in sequence.request.pictures}
