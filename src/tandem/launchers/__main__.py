"""Entry point of processes that launchers start: `python -m tandem.launchers ROLE ...`.

`rank-host` is a node agent, which starts and watches a rank. `agent NAME PROGRAM` runs a session with an agent, in place of ssh.
`ray ACTION ...` uses a Ray cluster.
"""

from __future__ import annotations

import sys

from tandem.crash_guard import own_process


def main(role: str, *words: str) -> int:
    """Run the role until it ends; return its exit code."""
    own_process()
    if role == "rank-host":
        from tandem.launchers.node_agent import main as host_ranks

        return host_ranks(*words)
    if role == "agent":
        from tandem.launchers.agent.link import main as link

        return link(*words)
    from tandem.launchers.ray.driver_process import main as speak_to_ray

    return speak_to_ray(*words)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
