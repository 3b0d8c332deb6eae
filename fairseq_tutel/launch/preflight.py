"""The launchers of a job's nodes compare what they are about to start, before they start it.

Ranks that disagree on their number would wait for each other in torch's rendezvous, for half an
hour and without naming the reason. The launcher of node 0 opens torch's key-value store at
MASTER_ADDR:MASTER_PORT, where its rank 0 will; every node puts its report there and reads node 0's
verdict.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from datetime import timedelta

from .shared_errors import SharedError

_POLL_SECONDS = 0.1
_LATECOMER_SECONDS = 5.0  # nodes that report so long after a difference was found get it, too


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
    "num_nodes": "nodes",
    "ranks_per_node": "ranks per node",
    "device": "device",
    "program": "command",
}


def compare_nodes(own: Report, address: str, port: int, seconds: float) -> None:
    """Returns once all nodes have reported the same.

    Raises:
        SharedError: they differ or some did not report within ``seconds``; raised on all nodes.
        ValueError: node 0 could not be reached, or gave no verdict in time.
    """
    if own.node == 0:
        verdict = _collect(own, port, seconds)
    else:
        verdict = _report(own, address, port, seconds)
    if verdict:
        raise SharedError(verdict)


def _store(address: str, port: int, seconds: float, is_master: bool):
    from torch.distributed import TCPStore  # seconds to import, and one node does without

    return TCPStore(
        address,
        port,
        is_master=is_master,
        wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
    )


def _collect(own: Report, port: int, seconds: float) -> str:
    """Node 0's side: everyone's report, and the verdict to everyone; "" if all is well."""
    try:
        store = _store("127.0.0.1", port, seconds, is_master=True)
    except RuntimeError as error:
        raise ValueError(f"cannot listen at MASTER_PORT {port}: {_reason(error)}") from None
    end = time.monotonic() + seconds
    reports, errors, num_reports = {0: own}, [], 0
    while num_reports < own.num_nodes - 1 and time.monotonic() < end:
        if num_reports == store.add("reports", 0):
            time.sleep(_POLL_SECONDS)
            continue
        num_reports += 1
        other = Report(**json.loads(store.get(f"report {num_reports}")))
        error = _difference(own, other, reports)
        reports.setdefault(other.node, other)
        if error:
            errors.append(error)
            end = min(end, time.monotonic() + _LATECOMER_SECONDS)
    missing = [str(node) for node in range(own.num_nodes) if node not in reports]
    if missing and not errors:
        errors.append(
            f"no report from node{'s' * (len(missing) > 1)} {', '.join(missing)} of "
            f"{own.num_nodes} within {seconds:g} seconds (see the launcher's output there)"
        )
    verdict = "; ".join(errors)
    store.set("verdict", verdict)
    # the store ends with this process's reference to it, so the others read first
    end = time.monotonic() + _LATECOMER_SECONDS
    while store.add("read", 0) < num_reports and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
    return verdict


def _difference(own: Report, other: Report, reports: dict[int, Report]) -> str:
    """What keeps ``other`` from being a node of the job, "" if nothing does."""
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


def _report(own: Report, address: str, port: int, seconds: float) -> str:
    """The other nodes' side: the verdict of node 0."""
    try:
        store = _store(address, port, seconds, is_master=False)
        number = store.add("reports", 1)
        store.set(f"report {number}", json.dumps(asdict(own)))
        # node 0 may have begun only now, and has as much time again
        store.wait(["verdict"], timedelta(seconds=seconds + 2 * _LATECOMER_SECONDS))
        verdict = store.get("verdict").decode()
        store.add("read", 1)
        return verdict
    except RuntimeError as error:
        raise ValueError(
            f"node {own.node} had no answer from node 0 at {address}:{port} within {seconds:g} "
            f"seconds: {_reason(error)}"
        ) from None


def _reason(error: RuntimeError) -> str:
    """The first line of torch's message, which goes on with a C++ stack."""
    return str(error).partition("\n")[0]
