"""Pictures of requests: what the ranks of the first stage encode next, and whose features they hold."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable

from tandem.engine.recovery import RankGroup
from tandem.errors import OverloadedError, RequestError
from tandem.models.footprint import compute_item
from tandem.models.pictures import FEATURE_BYTES, INPUT_BYTES
from tandem.protocol.control import EngineMessage, NeedPicture, PictureContent, Refused
from tandem.protocol.pictures import EncodePicture, Picture, PictureEncoded
from tandem.protocol.request import EngineRequest
from tandem.scheduler.scheduler import Scheduler
from tandem.scheduler.sequence import Sequence

LIVE_BYTES = 2**30
"""Most bytes of the inputs of all live requests, which are kept for new ranks."""
_KEY, _NOTHING = re.compile("[0-9a-f]{64}"), PictureContent("", b"")


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
        self._asked: NeedPicture | None = None
        """Last question to an api since the last order."""
        self._given = _NOTHING
        self._answers: dict[int, PictureEncoded] = {}
        """Answers so far by rank."""

    def check(self, request: EngineRequest, live: Iterable[Sequence]) -> None:
        """Raise RequestError for pictures that cannot be encoded, or do not fit the prompt; OverloadedError if those of `live`
        sequences leave no room."""
        description, name = self._group.layout.description, self._group.layout.served_name
        if description.no_pictures:
            why = f"{name} takes no pictures: {description.no_pictures}; send text alone"
            raise RequestError(why, param="messages", code="model_takes_no_pictures")
        stop = 0
        for number, picture in enumerate(request.pictures, 1):
            fits = stop <= picture.start and picture.length > 0 and picture.stop <= len(request.prompt)
            if not (fits and _KEY.fullmatch(picture.key)):
                raise RequestError(f"picture {number} has no key, or does not lie in the prompt", param="messages")
            _require_at_most(INPUT_BYTES, f"picture {number} takes", picture.size)
            _require_at_most(FEATURE_BYTES, f"the features of picture {number} take", self._bytes(picture.length))
            if description.mrope_section and picture.rows * picture.columns != picture.length:
                raise RequestError(f"picture {number} has no image_grid_thw that fits its tokens", param="messages")
            stop = picture.stop
        own, *others = (sum(one.size for one in each.pictures) for each in (request, *(one.request for one in live)))
        _require_at_most(LIVE_BYTES, "these pictures take", own)
        if own + sum(others) > LIVE_BYTES:
            raise OverloadedError("pictures of other requests fill the room for them; try again later")

    def _bytes(self, positions: int) -> int:
        """Return the bytes of features of so many positions, in the type that ranks compute in."""
        description, spec = self._group.layout.description, self._group.layout.ranks[0]
        item = compute_item(description, spec.dtype, gpu=bool(self._group.ready) and self._group.ready[0].gpu)
        return item * description.hidden_size * (1 + description.deepstack) * positions

    def give(self, answer: PictureContent) -> None:
        """Take the inputs of the picture that `look` asked for last."""
        if self._asked is not None and answer.key == self._asked.key:
            self._given = answer

    def look(self, scheduler: Scheduler) -> list[EngineMessage]:
        """Let waiting sequences join whose next features are held, and order the next picture if none is being encoded. Return
        the question for its inputs if an api has them. Raises RankFailure."""
        looked, needs = list[tuple[Sequence, dict[str, Picture]]](), dict[str, tuple[Picture, Sequence]]()
        need = 0
        for sequence in _prompts(scheduler):
            if need > FEATURE_BYTES:
                break
            if sequence.awaits_kv:
                continue
            looked.append((sequence, found := self._next(sequence, scheduler)))
            need += sum(self._bytes(one.length) for key, one in found.items() if key not in needs)
            for key, one in found.items():
                needs.setdefault(key, (one, sequence))
            for key in [one.key for one in sequence.request.pictures if one.key in self._held]:
                self._held.move_to_end(key)
        lacks = next((key for key in needs if key not in self._held), None)
        runs = any(one.decoding or one.computable for one in scheduler.batches.members())
        rests = runs and scheduler.next_step == self._step  # a step of those that run comes first
        asks = list[EngineMessage]()
        if lacks is not None and self.encoding is None:
            picture, sequence = needs[lacks]
            if picture.size and not picture.inputs and self._given.key != lacks:
                ask = NeedPicture(sequence.request_id, lacks)
                asks, self._asked = [ask] if ask != self._asked else [], ask
            elif not rests:
                self._order(picture, sequence, [*needs], scheduler)
        for sequence, found in looked:
            sequence.features, sequence.awaits_pictures = self._held, not found.keys() <= self._held.keys()
        return asks

    def _next(self, sequence: Sequence, scheduler: Scheduler) -> dict[str, Picture]:
        """Return the pictures behind what is computed or cached of a prompt, as many as ranks may hold."""
        done, room, found = sequence.computed, FEATURE_BYTES, dict[str, Picture]()
        if sequence.micro_batch is None and not sequence.whole and scheduler.prefixes.enabled:
            done = scheduler.prefixes.peek(sequence.hashes(len(sequence.tokens) - 1))
        for picture in sequence.request.pictures:
            if picture.stop > done and picture.key not in found:
                room -= self._bytes(picture.length)
                if room < 0 and found:
                    break
                found[picture.key] = picture
        return found

    def _order(self, picture: Picture, sequence: Sequence, needs: list[str], scheduler: Scheduler) -> None:
        """Have a picture encoded, if features that are needed later (`needs`: keys in this order) or not at all can make room."""
        before = needs[: needs.index(picture.key)]
        most = max(FEATURE_BYTES - self._bytes(picture.length), 0)  # ranks of another type may need more for it than all
        if sum(self._held[key] for key in before) > most:
            return
        free = [key for key in self._held if key not in needs]
        free += [key for key in reversed(needs) if key in self._held and key not in before]
        while sum(self._held.values()) > most:
            self._evicts.append(free.pop(0))
            del self._held[self._evicts[-1]]
        tokens = sequence.tokens[picture.start : picture.stop]
        self.encoding, self._answers = EncodePicture(picture.key, tokens, picture.inputs or self._given.inputs, self._evicts), {}
        self._evicts, self._step, self._asked, self._given = [], scheduler.next_step, None, _NOTHING
        for one in _prompts(scheduler, picture.key) if not self._group.layout.ranks[0].encoder_seconds else ():
            one.encoding = True
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
        for sequence in scheduler.sequences.values():
            sequence.encoding = False
        if failed is None:
            self._held[order.key] = self._bytes(len(order.tokens))
            return []
        self._evicts.append(order.key)  # another rank may hold it
        lost = [one.request_id for one in _prompts(scheduler, order.key) if scheduler.abort(one.request_id)]
        status, code = (500, "rank_failure") if failed.died else (400, "picture_not_encoded")
        return [Refused(request_id, status, failed.error, code=code, param="messages") for request_id in lost]

    def forget(self) -> None:
        """Forget what ranks held, as they have ended; their successors encode again."""
        self._held.clear()
        self._group.encoders.clear()
        self._evicts, self.encoding, self._asked, self._given = [], None, None, _NOTHING


def _require_at_most(most: int, what: str, size: int) -> None:
    if size > most:
        remedy = "send fewer or smaller ones"
        raise RequestError(f"{what} {size / 2**20:.0f} MiB; at most {most // 2**20} are allowed; {remedy}", param="messages")


def _prompts(scheduler: Scheduler, key: str = "") -> list[Sequence]:
    """Return the sequences whose prompts still have pictures (that of `key`, if it is given) to compute: those that run, oldest
    first, then those that wait."""
    running = sorted(scheduler.batches.members(), key=lambda one: one.number)
    return [
        sequence
        for sequence in (*running, *scheduler.waiting)
        if any(one.stop > sequence.computed and key in ("", one.key) for one in sequence.request.pictures)
    ]
