"""Run a command on two nodes made of one machine: two network namespaces with a shaped link.

    sudo python scripts/bench/two_nodes.py --ranks 8 --rate 400mbit --message-bytes 50000 -- \
        python scripts/bench/bench_alltoall.py

Half of the ranks live in each namespace, under a host name of its own. Ranks of one node talk
through loopback. Ranks of two nodes talk through a veth pair whose ends send through ``tbf``: at
most ``--rate``, and with ``--message-bytes`` no packet counts as less, which is a cost per message.

The namespaces end with this process, however it ends. COMMAND finds RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR, MASTER_PORT, GLOO_SOCKET_IFNAME and TWO_NODES (this command) in its environment.
"""

import argparse
import contextlib
import ctypes
import functools
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

INTERFACE = "node-link"
_PR_SET_PDEATHSIG = 1
_NEW_NETWORK_AND_NAME = 0x40000000 | 0x04000000  # CLONE_NEWNET, CLONE_NEWUTS
_MTU = 65000  # packets as large as gloo writes them: a message is one packet or a few
_GRACE = 3.0  # seconds for the other ranks once one has failed
_NEEDS = (
    "this needs ip and tc of iproute2, nsenter of util-linux, and root, as with sudo, or a user "
    "namespace: unshare --user --map-root-user --net python scripts/bench/two_nodes.py"
)


def _end_with_parent(name: str = "") -> None:
    """Give a child a process group of its own, and SIGKILL when the parent's main thread ends.

    Args:
        name: also enter new namespaces, under this host name.
    """
    os.setsid()
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if name:
        if libc.unshare(_NEW_NETWORK_AND_NAME):
            os._exit(1)
        socket.sethostname(name)


def _call(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip() or done.returncode
        raise OSError(f"{shlex.join(words)}: {reason}: {_NEEDS}")


@contextlib.contextmanager
def two_nodes(rate: str, message_bytes: int) -> Iterator[list[list[str]]]:
    """Make the namespaces and their link; OSError if that is impossible.

    Yields:
        for each namespace the words before a command that is to run in it.
    """
    holders: list[subprocess.Popen] = []
    try:
        for node in range(2):
            enter = functools.partial(_end_with_parent, f"two-nodes-{node}")
            holders.append(subprocess.Popen(["sleep", "infinity"], preexec_fn=enter))
        a, b = (str(holder.pid) for holder in holders)
        inside = [["nsenter", "--target", pid, "--net", "--uts", "--"] for pid in (a, b)]
        pair = f"link add {INTERFACE} netns {a} type veth peer name {INTERFACE} netns {b}"
        _call("ip", *pair.split())
        shape = f"tbf rate {rate} burst {256 << 10} latency 5s"
        shape += f" mpu {message_bytes}" if message_bytes else ""
        for node in range(2):
            for command in (
                f"ip addr add 10.77.0.{node + 1}/24 dev {INTERFACE}",
                "ip link set lo up",
                f"ip link set {INTERFACE} mtu {_MTU} up",
                f"tc qdisc add dev {INTERFACE} root {shape}",
            ):
                _call(*inside[node], *command.split())
        yield inside
    finally:  # what keeps the namespaces alive; the link goes with them
        _end(holders)


def run(options: argparse.Namespace) -> int:
    """Run a command on every rank, half of them on each node.

    Returns:
        0, or the exit status of the rank that failed first (128 + signal for a signal).
    """
    half, rest = divmod(options.ranks, 2)
    if rest or not half:
        raise ValueError(f"--ranks {options.ranks}: two nodes need an even number of ranks")
    line = f"python scripts/bench/two_nodes.py --ranks {options.ranks} --rate {options.rate}"
    if options.message_bytes:
        line += f" --message-bytes {options.message_bytes}"
    processes: list[subprocess.Popen] = []
    with two_nodes(options.rate, options.message_bytes) as inside:
        try:
            for rank in range(options.ranks):
                env = {
                    "OMP_NUM_THREADS": "1",
                    **os.environ,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(options.ranks),
                    "LOCAL_RANK": str(rank % half),
                    "LOCAL_WORLD_SIZE": str(half),
                    "MASTER_ADDR": "10.77.0.1",
                    "MASTER_PORT": "29500",
                    "GLOO_SOCKET_IFNAME": INTERFACE,
                    "TWO_NODES": line,
                }
                command = [*inside[rank // half], *options.command]
                processes.append(subprocess.Popen(command, env=env, preexec_fn=_end_with_parent))
            return _wait(processes)
        finally:
            _end(processes)


def _wait(processes: Sequence[subprocess.Popen]) -> int:
    """Wait until all have ended, or a little after the first failure."""
    failed, deadline = 0, float("inf")
    while time.monotonic() < deadline:
        states = [process.poll() for process in processes]
        if not failed and any(states):
            failed = next(state for state in states if state)
            deadline = time.monotonic() + _GRACE
        if None not in states:
            break
        time.sleep(0.05)
    return 128 - failed if failed < 0 else failed


def _end(processes: Sequence[subprocess.Popen]) -> None:
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # with whatever it has started
        process.wait()


def main(argv: Sequence[str] | None = None) -> int:
    """Return the ranks' exit status; 2 if the namespaces cannot be made."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] -- COMMAND [ARGUMENT ...]",
    )  # fmt: skip
    add = parser.add_argument
    add("--ranks", type=int, default=8, help="half of them on each node (default: 8)")
    add("--rate", default="400mbit", help="of the link, as tc writes it (default: 400mbit)")
    cost = "least bytes that a packet counts as (default: 0)"
    add("--message-bytes", type=int, default=0, metavar="N", help=cost)
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.command = options.command[options.command[:1] == ["--"] :]
    if not options.command:
        parser.error("no COMMAND for the ranks")
    for number in (signal.SIGTERM, signal.SIGHUP):  # the default would skip what cleans up
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        return run(options)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"two_nodes.py: error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
