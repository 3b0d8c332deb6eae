"""The launchers of a job's nodes compare what they are about to start, before they start it.

Ranks that disagree on their number would wait for each other in torch's rendezvous, for half an
hour and without a word about why. The launcher of node 0 listens at MASTER_ADDR:MASTER_PORT, where
its rank 0 will; the others report to it, in one line of JSON each, and get the verdict in another.
"""

from __future__ import annotations

import json
import socket
import time
from dataclasses import asdict, dataclass

from fairseq_tutel.launch.mistakes import SharedMistake

_HELLO = "fairseq_tutel.launch 1"
_LINE_LIMIT = 1 << 16
_RETRY_SECONDS = 0.2
_CONNECT_SECONDS = 10.0
_STRANGER_SECONDS = 5.0  # for one line, so that a stranger does not take the others' time
_LATECOMER_SECONDS = 5.0  # nodes that come so long after a mistake was found hear of it, too


@dataclass(frozen=True)
class Report:
    """One node's part of the job. device: cpu or cuda; program: the command's name."""

    node: int
    host: str
    num_nodes: int
    ranks_per_node: int
    device: str
    program: str


_COMPARED = {
    "num_nodes": "nodes", "ranks_per_node": "ranks per node", "device": "device",
    "program": "command",
}


def agree(own: Report, address: str, port: int, seconds: float) -> None:
    """Returns once all nodes have reported the same.

    Raises:
        SharedMistake: they differ or some did not report within `seconds`; all nodes hear it.
        ValueError: node 0 could not be reached, or gave no verdict in time.
    """
    if own.node > 0:
        verdict = _report(own, address, port, seconds)
    else:
        with _listener(port) as listener:
            verdict = _collect(own, listener, seconds)
    if verdict:
        raise SharedMistake(verdict)


def _listener(port: int) -> socket.socket:
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise ValueError(f"cannot listen at MASTER_PORT {port}: {error.strerror}") from None


def _collect(own: Report, listener: socket.socket, seconds: float) -> str:
    """Node 0's side: everyone's report, and the verdict to everyone; "" if all is well."""
    end = time.monotonic() + seconds
    reports, mistakes, connections = {0: own}, [], []
    while len(connections) < own.num_nodes - 1 and (left := end - time.monotonic()) > 0:
        listener.settimeout(left)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            break
        other = _receive_report(connection)
        if other is None:
            connection.close()
            continue
        connections.append(connection)
        mistake = _difference(own, other, reports)
        reports.setdefault(other.node, other)
        if mistake:
            mistakes.append(mistake)
            end = min(end, time.monotonic() + _LATECOMER_SECONDS)
    missing = [str(node) for node in range(own.num_nodes) if node not in reports]
    if missing and not mistakes:
        mistakes.append(
            f"no word from node{'s' * (len(missing) > 1)} {', '.join(missing)} of {own.num_nodes} "
            f"within {seconds:g} seconds (see what the launcher said there)"
        )
    verdict = "; ".join(mistakes)
    for connection in connections:
        _tell(connection, verdict)
    return verdict


def _difference(own: Report, other: Report, reports: dict[int, Report]) -> str:
    """What keeps `other` from being a node of the job, "" if nothing does."""
    if other.node in reports:
        hosts = f"{reports[other.node].host} and {other.host}"
        return f"{hosts} both say that they are node {other.node}"
    differences = [
        f"{text}: {getattr(own, key)} on {own.host} (node 0), "
        f"{getattr(other, key)} on {other.host} (node {other.node})"
        for key, text in _COMPARED.items()
        if getattr(own, key) != getattr(other, key)
    ]
    return "the nodes do not fit together: " + ", and ".join(differences) if differences else ""


def _receive_report(connection: socket.socket) -> Report | None:
    """None for what is no launcher."""
    connection.settimeout(_STRANGER_SECONDS)
    try:
        words = json.loads(_read_line(connection))
        return Report(**words["report"]) if words["hello"] == _HELLO else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _tell(connection: socket.socket, verdict: str) -> None:
    """Sends the verdict, and lets the other side close first: the port must be free at once."""
    with connection:
        connection.settimeout(_STRANGER_SECONDS)
        try:
            connection.sendall(json.dumps({"hello": _HELLO, "verdict": verdict}).encode() + b"\n")
            connection.recv(1)
        except OSError:
            return


def _report(own: Report, address: str, port: int, seconds: float) -> str:
    """The other nodes' side: the verdict of node 0."""
    end = time.monotonic() + seconds
    words = json.dumps({"hello": _HELLO, "report": asdict(own)}).encode() + b"\n"
    reason: object = "no answer"
    while (left := end - time.monotonic()) > 0:
        try:
            # for each address of the name: one of them may lead nowhere
            wait = min(left, _CONNECT_SECONDS)
            with socket.create_connection((address, port), timeout=wait) as connection:
                connection.sendall(words)
                # node 0 may have begun only now, and has as much time again
                connection.settimeout(seconds + 2 * _STRANGER_SECONDS)
                answer = json.loads(_read_line(connection) or "{}")
                if isinstance(answer, dict) and answer.get("hello") == _HELLO:
                    return answer.get("verdict", "")
                reason = "what listens there is no launcher"
        except (OSError, ValueError) as error:  # it may not have started yet
            reason = error
        time.sleep(_RETRY_SECONDS)
    raise ValueError(
        f"node {own.node} had no word from node 0 at {address}:{port} within {seconds:g} seconds: "
        f"{reason}"
    )


def _read_line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n") and len(line) < _LINE_LIMIT:
        part = connection.recv(4096)
        if not part:
            break
        line += part
    return line
