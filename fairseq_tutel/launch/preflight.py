"""Comparison of what the launchers of a job's nodes are about to start, before they start it.

Ranks that disagree on their number would wait in torch's rendezvous for half an hour. Node 0's
launcher opens torch's key-value store at MASTER_ADDR:MASTER_PORT, where its rank 0 will; every node
puts its report there, and all come to the same verdict.
"""

import json
import os
import time
from datetime import timedelta
from typing import Any

_OTHER_STORE_SECONDS = 1.0  # how long a store may take to turn out to be node 0's
_SHORTEST_WAIT = 0.1
_LATECOMER_SECONDS = 5.0  # how long node 0 keeps the store open for those that still read


class SharedError(ValueError):
    """Error that every rank of the job finds, in the same words; one of them reports it."""


def compare_nodes(
    own: dict[str, Any], address: str, port: int, seconds: float, start: int = 0
) -> None:
    """Return once all nodes have reported the same.

    SharedError is raised on all nodes if reports differ or some are missing, ValueError on one
    that cannot reach node 0's launcher. ``own`` is this node's report: "node" (its number), "host",
    "nodes" and whatever must be equal. ``start`` is the number of earlier starts.
    """
    # in a call of its own: it ends the store
    verdict = _verdict(own, address, port, seconds, start)
    if verdict:
        raise SharedError(verdict)


def _verdict(own: dict[str, Any], address: str, port: int, seconds: float, start: int) -> str:
    """Return what is wrong with the job, the same on all nodes; "" if nothing is."""
    # what becomes of a store that is not node 0's is no warning; of this process only
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from torch.distributed import TCPStore  # seconds to import, and one node does without

    first, wait = own["node"] == 0, timedelta(seconds=seconds)
    try:
        if first:
            store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
            store.set(f"start {start}", "")
        else:
            store = _store_of_start(start, address, port, seconds)
        store.set(f"node {own['node']}", json.dumps(own))
        if not first:  # node 0 may have begun only now, and has as much time again
            store.wait(["verdict"], wait + timedelta(seconds=2 * _LATECOMER_SECONDS))
            verdict = store.get("verdict").decode()
            store.add("read", 1)
            return verdict
    except RuntimeError as error:
        what = "cannot listen at" if first else f"had no answer within {seconds:g} seconds from"
        reason = str(error).partition("\n")[0]  # torch's message goes on with a C++ stack
        raise ValueError(f"node {own['node']} {what} {address}:{port}: {reason}") from None
    verdict, readers = _collect(store, own["nodes"], seconds)
    store.set("verdict", verdict)
    end = time.monotonic() + _LATECOMER_SECONDS  # the store ends with node 0's reference to it
    while store.add("read", 0) < readers - 1 and time.monotonic() < end:
        time.sleep(0.1)
    return verdict


def _store_of_start(start: int, address: str, port: int, seconds: float):
    """Return node 0's store, however many others listened there; torch's RuntimeError if none."""
    from torch.distributed import TCPStore

    end = time.monotonic() + seconds
    while True:
        left = timedelta(seconds=max(end - time.monotonic(), _SHORTEST_WAIT))
        try:
            store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=left)
            store.wait([f"start {start}"], min(left, timedelta(seconds=_OTHER_STORE_SECONDS)))
            return store
        except RuntimeError:
            if time.monotonic() >= end:
                raise
            time.sleep(0.1)


def _collect(store, num_nodes: int, seconds: float) -> tuple[str, int]:
    """Return what is wrong with all nodes' reports ("": nothing), and how many will read it."""
    end = time.monotonic() + seconds
    while True:
        there = [node for node in range(num_nodes) if store.check([f"node {node}"])]
        reports = [json.loads(store.get(f"node {node}")) for node in there]
        difference = _difference(reports)
        if difference or len(there) == num_nodes:
            return difference, num_nodes  # the others are on their way
        if time.monotonic() >= end:
            missing = ", ".join(str(node) for node in range(num_nodes) if node not in there)
            text = (
                f"no report from node {missing} of {num_nodes} within {seconds:g} seconds "
                "(see the launcher's output there)"
            )
            return text, len(there)
        time.sleep(0.1)


def _difference(reports: list[dict[str, Any]]) -> str:
    """Return what keeps nodes from forming one job with node 0; "" if nothing does."""
    found = [
        f"{key}: {reports[0][key]} on {reports[0]['host']} (node 0), "
        f"{other[key]} on {other['host']} (node {other['node']})"
        for other in reports
        for key in other
        if key not in ("node", "host") and other[key] != reports[0][key]
    ]
    return "the nodes do not fit together: " + ", and ".join(found) if found else ""
