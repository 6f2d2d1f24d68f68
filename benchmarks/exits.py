"""How `tandem generate` ends, many times, while other processes keep the machine busy.

usage: benchmarks/exits.py MODEL [--times 200] [--burners 4] [--jobs 1]

Exit code 1 when one run ended otherwise than with 0, or said anything on stderr.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from harness import child_environment

BURN = "while True: pass"
TIMEOUT_S = 300


def main() -> int:
    """Run, count, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--burners", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=1, help="how many run at once (default: %(default)s)")
    args = parser.parse_args()
    command = [sys.executable, "-P", "-m", "tandem", "generate", args.model, "--prompt", "a b", "--max-tokens", "2"]
    burners = [subprocess.Popen([sys.executable, "-P", "-c", BURN]) for _ in range(args.burners)]
    codes, complaints = Counter[int](), Counter[str]()

    def run(_: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, env=child_environment(), timeout=TIMEOUT_S)

    try:
        with ThreadPoolExecutor(args.jobs) as pool:
            for number, done in enumerate(pool.map(run, range(args.times)), 1):
                codes[done.returncode] += 1
                complaints.update([done.stderr.strip()] if done.stderr.strip() else [])
                if number % 20 == 0:
                    print(f"{number} of {args.times}: {dict(codes)}", flush=True)
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    for code, count in codes.most_common():
        print(f"{count} x exit code {code}")
    for text, count in complaints.most_common():
        print(f"{count} x {text}")
    return 0 if set(codes) == {0} and not complaints else 1


if __name__ == "__main__":
    sys.exit(main())
