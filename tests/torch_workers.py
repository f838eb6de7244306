"""The workers of torch's loaders, as the tests have them: spawned, for JAX has threads.

A worker that is stopped while it sends a tensor may be aborted by torch itself: the thread that
sends is ended inside C++ when Python ends, "terminate called without an active exception", and the
loader raises that wherever the program then is. Loaders whose workers sent lists never did, in 50
of 50 such stops, against 11 of 50 whose workers sent tensors.
"""

SPAWN = {"num_workers": 2, "multiprocessing_context": "spawn"}
STOPPED = SPAWN | {"collate_fn": list}  # for a loader that is not read to its end
