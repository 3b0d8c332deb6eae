"""Bytes that autograd saves for the backward pass."""

import torch


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Within, the bytes of distinct storages that are saved, without those of known tensors."""

    def __init__(self, *known):
        super().__init__(self._pack, lambda tensor: tensor)
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._sizes, self._alive = {}, []

    def __enter__(self):
        super().__enter__()
        return self

    def _pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._sizes[storage._cdata] = storage.nbytes(), tensor.shape[-1:]
            self._alive.append(tensor.detach())  # so that no address is used twice
        return tensor

    def total(self, without_last_dim=None):
        sizes = self._sizes.values()
        return sum(n for n, last in sizes if tuple(last) != (without_last_dim,))

    def largest(self):
        return max(nbytes for nbytes, _ in self._sizes.values())
