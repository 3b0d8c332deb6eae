"""A finished job ends with 0, also right after a collective.

A worker thread of gloo that drops an operation's tensors while the interpreter shuts down aborts
the process, now and then. ``release_at_exit`` (distributed/world.py) leaves none that could.
"""

import sys

import pytest
from helpers import commands

# all_gather into a list: an operation whose tensors gloo's thread has to give back to Python
END = """
tensors = [torch.empty(1_000_000) for _ in range(dist.get_world_size(group) + 1)]
dist.barrier()
work = dist.all_gather(tensors[1:], tensors[0], group=group, async_op=True)
if referred_to:  # nobody can join these threads, or know of an operation that waits for its peers
    work.wait()
del tensors, work
"""
# functions of atexit run in reverse order: this one after all others
START = """
import atexit, glob, os, sys, torch, torch.distributed as dist

@atexit.register
def after_all_others():
    threads = [open(path).read() for path in glob.glob("/proc/self/task/*/comm")]
    left = [name for name in threads if "gloo" in name]
    if dist.is_initialized() or (left and not referred_to):
        sys.stderr.write(f"left: {threads}\\n")
        sys.stderr.flush()
        os._exit(7)

world_size, file = int(sys.argv[1]), sys.argv[2]
from fairseq_tutel import training
from fairseq_tutel.config import EXCHANGES, ExchangeConfig
from fairseq_tutel.distributed import build_exchange, build_groups
from fairseq_tutel.moe import MoELayer

for rank in range(world_size):
    if not os.fork():
        break
else:
    sys.exit(any([os.wait()[1] for _ in range(world_size)]))
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world_size)
referred_to = False
"""
PROGRAMS = {
    # groups of their own, to which placements and the exchanges refer: whoever holds a group has to
    # let go of it (world.release_at_exit), or its thread is there when the interpreter goes
    "groups": (4, """
groups = [build_groups(2), build_groups(4)]
exchanges = [build_exchange(ExchangeConfig(name, 2), groups[1]) for name in EXCHANGES]
for exchange in exchanges:
    exchange.dispatch(torch.ones(4, 4))
group = groups[0].ep_group
"""),
    # the default group, to which torch's DistributedDataParallel refers for ever, also when it is
    # gone; its user ends it or does not
    "layer": (2, """
referred_to = True
net = training.wrap_data_parallel(MoELayer(8, 2, 16))
loss = net(torch.randn(4, 8)).sum()
loss.backward()
group = net.module.groups.ep_group
"""),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_ends_with_0_right_after_a_collective(name, tmp_path):
    world_size, program = PROGRAMS[name]
    program = START + program + END
    if name == "groups":
        program += "del group\n"  # a user's own reference is the user's
    commands.run([sys.executable, "-c", program, str(world_size), str(tmp_path / "rendezvous")])
