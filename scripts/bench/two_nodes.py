"""Run a command on two nodes made of one machine: two network namespaces with a shaped link.

    sudo python scripts/bench/two_nodes.py --ranks 8 --rate 400mbit --message-bytes 50000 -- \
        python scripts/bench/bench_alltoall.py

Half of the ranks live in each namespace, under a host name of its own. Ranks of one node talk
through loopback. Ranks of two nodes talk through a veth pair whose ends send through ``tbf``: at
most ``--rate``, and with ``--message-bytes`` no packet counts as less, which is a cost per message.

The namespaces end with this process, however it ends. COMMAND finds RANK, WORLD_SIZE, LOCAL_RANK,
GLOO_SOCKET_IFNAME, INIT_METHOD (a file to meet at) and TWO_NODES (this command) in its environment.
"""

import argparse
import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

INTERFACE = "node-link"
_TOOLS = ("ip", "tc", "unshare", "nsenter")
_PR_SET_PDEATHSIG = 1
_MTU = 65000  # packets as large as gloo writes them: a message is one packet or a few
_GRACE = 3.0  # seconds for the other ranks once one has failed


class NoBed(RuntimeError):
    """The namespaces cannot be made; the message says why."""


def qdisc(rate: str, message_bytes: int = 0) -> list[str]:
    """Return the arguments of ``tc qdisc``: a rate as tc writes it, least bytes of a packet."""
    words = ["tbf", "rate", rate, "burst", str(256 << 10), "latency", "5s"]
    return words + (["mpu", str(message_bytes)] if message_bytes else [])


@contextlib.contextmanager
def two_nodes(shape: Sequence[str]) -> Iterator[list[list[str]]]:
    """Make the namespaces, their link with a :func:`qdisc`; NoBed if that is impossible.

    Yields:
        for each namespace the words before a command that is to run in it.
    """
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        raise NoBed(f"{', '.join(missing)} not found: install iproute2 and util-linux")
    holders: list[subprocess.Popen] = []
    try:
        for node in range(2):
            holders.append(_hold(f"two-nodes-{node}"))
        a, b = (str(holder.pid) for holder in holders)
        inside = [["nsenter", "--target", pid, "--net", "--uts", "--"] for pid in (a, b)]
        pair = f"link add {INTERFACE} netns {a} type veth peer name {INTERFACE} netns {b}"
        _call("ip", *pair.split())
        for node in range(2):
            for words in (
                ["ip", "addr", "add", f"10.77.0.{node + 1}/24", "dev", INTERFACE],
                ["ip", "link", "set", "lo", "up"],
                ["ip", "link", "set", INTERFACE, "mtu", str(_MTU), "up"],
                ["tc", "qdisc", "add", "dev", INTERFACE, "root", *shape],
            ):
                _call(*inside[node], *words)
        yield inside
    finally:  # what keeps the namespaces alive; the link goes with them
        for holder in holders:
            holder.kill()
            holder.wait()


def _hold(name: str) -> subprocess.Popen:
    """Start a process in namespaces of its own that ends with this one."""
    script = f"hostname {name} && echo ready && exec sleep infinity"
    words = ["unshare", "--net", "--uts", "--", "sh", "-c", script]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    holder = subprocess.Popen(words, text=True, preexec_fn=_end_with_parent, **pipes)
    if holder.stdout.readline() != "ready\n":
        holder.kill()
        reason = holder.communicate()[1].strip() or "no answer"
        raise NoBed(
            f"cannot make a network namespace ({reason}): this needs root, as with sudo, or a "
            "user namespace: unshare --user --map-root-user --net python scripts/bench/two_nodes.py"
        )
    return holder


def _end_with_parent() -> None:
    """Give a child a process group of its own, and SIGKILL when the parent's main thread ends."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _call(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoBed(f"{shlex.join(words)}: {done.stderr.strip() or done.returncode}")


def rank_environment(rank: int, ranks: int, folder: str, command_line: str) -> dict[str, str]:
    """Variables of one rank."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank % (ranks // 2)),
        "LOCAL_WORLD_SIZE": str(ranks // 2),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "INIT_METHOD": f"file://{folder}/meet",
        "TWO_NODES": command_line,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def run(shape: Sequence[str], ranks: int, words: Sequence[str], command_line: str = "") -> int:
    """Run a command on every rank, half of them on each node of a link with a :func:`qdisc`.

    Returns:
        0, or the exit status of the rank that failed first (128 + signal for a signal).
    """
    if ranks < 2 or ranks % 2:
        raise ValueError(f"--ranks {ranks}: two nodes need an even number of ranks")
    with two_nodes(shape) as inside, tempfile.TemporaryDirectory(prefix="two-nodes-") as folder:
        processes: list[subprocess.Popen] = []
        try:
            for rank in range(ranks):
                command = [*inside[rank // (ranks // 2)], *words]
                env = {**os.environ, **rank_environment(rank, ranks, folder, command_line)}
                processes.append(subprocess.Popen(command, env=env, preexec_fn=_end_with_parent))
            return _wait(processes)
        finally:
            _end(processes)


def _wait(processes: Sequence[subprocess.Popen]) -> int:
    """Until all have ended, or a little after the first failure."""
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
            try:
                os.killpg(process.pid, signal.SIGKILL)  # with whatever it has started
            except ProcessLookupError:
                process.kill()
        process.wait()


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
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
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Return the ranks' exit status; 2 if the namespaces cannot be made."""
    options = parse_arguments(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):  # the default would skip what cleans up
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    line = f"--ranks {options.ranks} --rate {options.rate}"
    if options.message_bytes:
        line += f" --message-bytes {options.message_bytes}"
    try:
        shape = qdisc(options.rate, options.message_bytes)
        line = f"python scripts/bench/two_nodes.py {line}"
        return run(shape, options.ranks, options.command, line)
    except (NoBed, ValueError) as error:
        sys.stderr.write(f"two_nodes.py: error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
