"""A bed of two nodes on one machine: ranks in two network namespaces with a shaped link between.

    sudo python scripts/bench/two_nodes.py --ranks 8 --rate 400mbit --message-bytes 50000 -- \\
        python scripts/bench/bench_exchange.py sizes

Half of the ranks live in each namespace, under a host name of its own, so that they take themselves
for two machines. What ranks of one node say to each other goes through loopback, as fast as the
machine is; what they say to the other node goes through a veth pair whose two ends send through
``tbf``: at most ``--rate``, and with ``--message-bytes`` no packet counts as less than that, which
is a cost per message (delay, netem's, is another thing and not needed to see it).

The namespaces have no name: they live as long as the two processes that hold them, and those end
with this one, however it ends. COMMAND finds RANK, WORLD_SIZE, LOCAL_RANK, GLOO_SOCKET_IFNAME,
INIT_METHOD (a file to meet at) and TWO_NODES (this command line) in its environment.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "node-link"
_TOOLS = ("ip", "tc", "unshare", "nsenter")
_PR_SET_PDEATHSIG = 1
_BURST, _LATENCY = 256 << 10, "5s"
# packets as large as gloo writes them, so that a message is one packet or a few
_MTU = 65000
_GRACE = 3.0  # seconds for the other ranks once one has failed


class NoBed(RuntimeError):
    """This process may not, or this machine cannot, make the namespaces; the message says why."""


@dataclass(frozen=True)
class Link:
    """How the nodes are joined.

    Attributes:
        rate: in the notation of tc, such as 400mbit; of each direction.
        message_bytes: no packet counts as less (tbf's mpu); 0: as it is.
    """

    rate: str = "400mbit"
    message_bytes: int = 0

    def qdisc(self) -> list[str]:
        """Arguments of ``tc qdisc``."""
        words = ["tbf", "rate", self.rate, "burst", str(_BURST), "latency", _LATENCY]
        return words + (["mpu", str(self.message_bytes)] if self.message_bytes else [])


class TwoNodes:
    """The two namespaces, while a ``with`` block lasts."""

    def __init__(self, link: Link):
        self.link = link
        self._holders: list[subprocess.Popen] = []

    def __enter__(self) -> TwoNodes:
        missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
        if missing:
            raise NoBed(f"{', '.join(missing)} not found: install iproute2 and util-linux")
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def close(self) -> None:
        """End what keeps the namespaces alive; the link goes with them."""
        for holder in self._holders:
            holder.kill()
            holder.wait()
        self._holders = []

    def inside(self, node: int, words: Sequence[str]) -> list[str]:
        """The command that runs ``words`` on a node."""
        pid = str(self._holders[node].pid)
        return ["nsenter", "--target", pid, "--net", "--uts", "--", *words]

    def _build(self) -> None:
        self._holders = [_hold(f"two-nodes-{node}") for node in range(2)]
        a, b = (str(holder.pid) for holder in self._holders)
        _call(
            "ip",
            "link",
            "add",
            INTERFACE,
            "netns",
            a,
            "type",
            "veth",
            "peer",
            "name",
            INTERFACE,
            "netns",
            b,
        )
        for node in range(2):
            for words in (
                ["ip", "addr", "add", f"10.77.0.{node + 1}/24", "dev", INTERFACE],
                ["ip", "link", "set", "lo", "up"],
                ["ip", "link", "set", INTERFACE, "mtu", str(_MTU), "up"],
                ["tc", "qdisc", "add", "dev", INTERFACE, "root", *self.link.qdisc()],
            ):
                _call(*self.inside(node, words))


def _hold(name: str) -> subprocess.Popen:
    """A process in namespaces of its own, ready, that ends with this one."""
    script = f"hostname {name} && echo ready && exec sleep infinity"
    holder = subprocess.Popen(
        ["unshare", "--net", "--uts", "--", "sh", "-c", script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_end_with_parent,
    )
    if holder.stdout.readline() != "ready\n":
        holder.kill()
        reason = holder.communicate()[1].strip() or "no answer"
        raise NoBed(
            f"cannot make a network namespace ({reason}): this needs root, as with sudo, or a "
            "user namespace: unshare --user --map-root-user --net python scripts/bench/two_nodes.py"
        )
    return holder


def _end_with_parent() -> None:
    """In a child: a process group of its own, and SIGKILL when the parent's main thread ends."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _call(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoBed(f"{shlex.join(words)}: {done.stderr.strip() or done.returncode}")


def rank_environment(
    rank: int, ranks: int, folder: str | Path, command_line: str
) -> dict[str, str]:
    """Variables of one rank; the first half is on node 0."""
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


def run(
    link: Link,
    ranks: int,
    words: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    command_line: str = "",
) -> int:
    """Run a command on every rank.

    Args:
        link: between the nodes.
        ranks: an even number; half of them on each node.
        words: the command.
        env: of the ranks, besides their own variables; this process's if None.
        command_line: for the record.

    Returns:
        0, or the exit status of the rank that failed first (128 + signal for a signal).

    Raises:
        NoBed: no root, tools or namespaces.
    """
    if ranks < 2 or ranks % 2:
        raise ValueError(f"--ranks {ranks}: two nodes need an even number of ranks")
    base = dict(os.environ if env is None else env)
    with TwoNodes(link) as nodes, tempfile.TemporaryDirectory(prefix="two-nodes-") as folder:
        processes: list[subprocess.Popen] = []
        try:
            for rank in range(ranks):
                processes.append(
                    subprocess.Popen(
                        nodes.inside(rank // (ranks // 2), words),
                        env={**base, **rank_environment(rank, ranks, folder, command_line)},
                        preexec_fn=_end_with_parent,
                    )
                )
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
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], usage="%(prog)s [options] -- COMMAND [ARGUMENT ...]"
    )
    add = parser.add_argument
    add("--ranks", type=int, default=8, help="half of them on each node (default: 8)")
    add("--rate", default="400mbit", help="of the link, as tc writes it (default: 400mbit)")
    add(
        "--message-bytes",
        type=int,
        default=0,
        metavar="N",
        help="a packet counts as N bytes at least: a cost per message (default: 0, none)",
    )
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.command = options.command[options.command[:1] == ["--"] :]
    if not options.command:
        parser.error("no COMMAND for the ranks")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """The ranks' exit status; 2 where there can be no bed."""
    options = parse_arguments(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):  # the default would skip what cleans up
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    line = f"--ranks {options.ranks} --rate {options.rate}"
    if options.message_bytes:
        line += f" --message-bytes {options.message_bytes}"
    try:
        return run(
            Link(options.rate, options.message_bytes),
            options.ranks,
            options.command,
            command_line=f"python scripts/bench/two_nodes.py {line}",
        )
    except (NoBed, ValueError) as error:
        sys.stderr.write(f"two_nodes.py: error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
