"""Entry point of a process that waits to become a rank (`--spares`): `python -m tandem.executors.spare`.

It has imported all that a rank needs when the gang that it is for comes. Its standard input brings three lines: the
specification of the rank in whose place it will be, then variables of the environment, and the payload of a worker.
"""

from __future__ import annotations

from importlib import import_module

import msgspec

from tandem.comm.blas import preload_blas
from tandem.env import set_variables
from tandem.executors.worker import prepare, serve
from tandem.processes.child import receive_payload
from tandem.protocol.layout import StageSpec
from tandem.protocol.payloads import WorkerPayload


def main() -> None:
    """Get ready, wait, and be the rank."""
    spec = msgspec.json.decode(receive_payload(), type=StageSpec)
    prepare(spec)
    preload_blas(spec.blas)
    for module in ("tandem.executors.rank_loop", "tandem.executors.assembly", "tandem.runner.links"):
        import_module(module)
    set_variables(msgspec.json.decode(receive_payload(), type=dict[str, str]))
    serve(msgspec.json.decode(receive_payload(), type=WorkerPayload))


if __name__ == "__main__":
    main()
