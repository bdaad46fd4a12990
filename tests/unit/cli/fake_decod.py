"""Stands in for `decod` in tests of the demo: says what a leader says, or waits like a relay.

    fake_decod.py leader RUN.toml --export DIR ... | fake_decod.py join JOINSTRING ...

What goes wrong is told by files in the demo's folder, beside the run file.
"""

import signal
import sys
import threading
from pathlib import Path


def option(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def lead() -> int:
    folder = Path(sys.argv[2]).parent
    for behaviour in ("leader-dies", "leader-ends"):
        if (folder / behaviour).exists():
            print("port 7700 is taken", file=sys.stderr)
            return 4 if behaviour == "leader-dies" else 0
    print("12:03:41 the run's page is at http://127.0.0.1:7780/", file=sys.stderr)
    print("decod 0.1.0 is starting")
    print(f"device: {option('--device')}")
    print("join string: decod1-fake@127.0.0.1:1", flush=True)
    if (folder / "leader-hangs").exists():
        threading.Event().wait()
    last = int((folder / "num_iterations").read_text())
    for index in range(1, last + 1):
        print(f"iteration {index}  loss {5.5 - 3.0 * index / last:.4f}  1830 tokens/s")
    print(f"model of iteration {last}: {option('--export')}", flush=True)
    return 0


def join() -> int:
    folder = Path(option("--state-dir")).parent
    assert sys.argv[2] == "decod1-fake@127.0.0.1:1"
    if (folder / f"{option('--name')}-dies").exists():
        print("E-HW-001 too little memory\x1b[2J", file=sys.stderr)
        return 6
    if (folder / "leader-hangs").exists() or (folder / "relays-stay").exists():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(lead() if sys.argv[1] == "leader" else join())
