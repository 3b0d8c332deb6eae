"""What operations and functions a piece of code calls."""

from torch.utils._python_dispatch import TorchDispatchMode

# operations that launch nothing and move no bytes
VIEWS = {"view", "_unsafe_view", "transpose", "t", "select", "slice", "detach", "alias", "split",
         "expand", "unsqueeze", "promote_types", "empty", "new_empty", "empty_like",
         "empty_strided", "permute", "unbind", "as_strided", "reshape", "squeeze"}  # fmt: skip


class Dispatched(TorchDispatchMode):
    """Within, the names of the operations are kept, outermost ones, in order."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def spied(monkeypatch, module, name):
    """A list to which every later call of the module's function adds (args, kwargs, result)."""
    calls, original = [], getattr(module, name)

    def spy(*args, **kwargs):
        calls.append((args, kwargs, original(*args, **kwargs)))
        return calls[-1][2]

    monkeypatch.setattr(module, name, spy)
    return calls
