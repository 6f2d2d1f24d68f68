"""Text, one picture and three pictures in one batch, in one layout after the other, while ranks and engines are killed.

Each answer is compared, token by token, with the one that the same server gave alone and undisturbed. The model is tiny and
random; the extra `vision` is needed. `soak.py --pictures N` does the same.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import random
import sys
import tempfile
import threading
from pathlib import Path

import psutil
from harness import Server, tandem_server
from pictures import damaged_beside, ended_badly
from soak_processes import Processes
from soak_requests import Outcome, Request
from soak_storm import PLACES, Found, over_layouts, storm, undisturbed

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # for its pictures and a model that sees them

APART = {"vision_rank": "own"}
LAYOUTS = PLACES | {
    "one rank, encoder apart": ({**PLACES["one rank"][0], **APART}, ("encoder", "engine")),
    "pp 2, encoder apart": ({**PLACES["pp 2"][0], **APART}, ("rank", "encoder")),
}
"""Options of `tandem serve` and what is killed, by layout. Every third new encoder is killed in its first second too, while it
loads or encodes."""
NEW = 40
"""Tokens of each answer."""
PROMPTS = ("the red sea", "one two one two one", "a stone that is not there " * 8)
COUNTS = (0, 1, 3)
"""Pictures of a request."""


def pictures(directory: Path, count: int, seed: int, device: str, folder: Path) -> bool:
    """Ask for `count` answers over all layouts, and print a table; True when all is well."""
    return over_layouts("pictures", LAYOUTS, _model(directory), _stormed, count=count, seed=seed, device=device, folder=folder)


def damaged(directory: Path, count: int, device: str, folder: Path) -> bool:
    """Send `count` damaged pictures beside a text stream, and print what came and the stream's gaps; True when all is well."""
    log = folder / "damaged-pictures.log"
    with tandem_server(_model(directory), 1, log=log, start_timeout=120, device=device) as server:
        _, odd = damaged_beside(server, count)
        odd += ended_badly(server, log)
    print("\n".join([*odd[:10], "NOT all is well" if odd else "all is well"]), flush=True)
    return not odd


def _model(directory: Path) -> Path:
    from seeing import served_model

    return Path(served_model(directory / "sees"))


def _stormed(server: Server, count: int, rng: random.Random, roles: tuple[str, ...]) -> Found:
    from processors import encoded, noise

    work, found = [], Found(figures={"pictures": 0})
    for number in range(len(PROMPTS) * len(COUNTS) * 2):
        shown = [noise(16, 16, 10 * number + at) for at in range(COUNTS[number % len(COUNTS)])]
        urls = [f"data:image/png;base64,{base64.b64encode(encoded(one)).decode()}" for one in shown]
        parts = [
            {"type": "text", "text": PROMPTS[number // len(COUNTS) % len(PROMPTS)]},
            *({"type": "image_url", "image_url": {"url": url}} for url in urls),
        ]
        how = {"temperature": 0} if number % 2 else {"temperature": 0.8, "seed": number}
        more = {"max_tokens": NEW, "ignore_eos": True, "logprobs": True, "stream": number % 4 < 2, **how}
        work.append(
            Request("/v1/chat/completions", {"model": "default", "messages": [{"role": "user", "content": parts}], **more})
        )
    rng.shuffle(work)
    expected = undisturbed(server, work, differ=True)

    def judge(at: int, got: Outcome) -> None:
        many = len(work[at].body["messages"][0]["content"]) - 1
        found.figures["pictures"] += many
        found.compare(f"{many} pictures", got, expected[at])

    over, processes = threading.Event(), Processes(server)

    def kill_new() -> None:
        seen = {one.pid for one, role in processes.living().items() if role == "encoder"}
        spared = 0
        while not over.wait(0.05):
            new = [one for one, role in processes.living().items() if role == "encoder" and one.pid not in seen]
            seen.update(one.pid for one in new)
            for one in new:
                if spared == 0 and not over.wait(rng.random()):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
                        found.kills["SIGKILL new encoder"] += 1
                spared = (spared + 1) % 3

    killing = threading.Thread(target=kill_new)
    killing.start()
    storm(server, work, count, judge, found, rng, roles)
    over.set()
    killing.join()
    return found


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--answers",
        type=int,
        default=200,
        metavar="N",
        help="over all layouts; with fewer than 80 nothing may be killed, which is not well (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is killed when (default: %(default)s)")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "gpu"), help="(default: %(default)s)")
    parser.add_argument("--evidence", type=Path, metavar="DIR", help="folder for the servers' logs, to keep")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-soak-") as directory:
        folder = args.evidence or Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        return 0 if pictures(Path(directory), args.answers, args.seed, args.device, folder) else 1


if __name__ == "__main__":
    sys.exit(main())
