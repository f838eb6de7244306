"""What nobody here can run: agreement of 10,240 processes, and plans of 65,536 ranks.

`python benchmarks/scale.py` holds meetings of so many simulated processes through a real
coordination service, that of `jax.distributed` on this machine: the keys, the calls and the
conclusions are those of real processes; one machine serves and asks, so the seconds are an upper
bound of the service's. Up to 1,024 processes are threads that wait for each other. 10,240 take
turns on a few threads, since so many waiting ones starve two cores: all speak, and when the last
one has judged all hear. Then the arithmetic of plans, positions and budgets, which needs no other
process. The ratios that are kept are those of calls and bytes a process to those at 128 processes,
1 where they do not grow.
"""

import json
import socket
import statistics
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from ratios import headed, keep

PROCESSES = (128, 1_024, 10_240)
THREADS = 1_024  # above so many processes they take turns
RANKS = 65_536


class Counting:
    """A client that counts its calls, and the bytes that go in and out."""

    def __init__(self, client):
        self._client, self.calls, self.bytes, self._lock = client, Counter(), 0, threading.Lock()

    def __getattr__(self, name):
        call = getattr(self._client, name)

        def counted(*arguments, **options):
            returned = call(*arguments, **options)
            texts = [each for each in arguments if isinstance(each, str)]
            texts += [returned] if isinstance(returned, str) else []
            if isinstance(returned, list):
                texts += [text for pair in returned for text in pair]
            with self._lock:
                self.calls[name] += 1
                self.bytes += sum(map(len, texts))
            return returned

        return counted


class Speaking(Counting):
    """A client of processes that take turns: none of them waits."""

    def blocking_key_value_get(self, *_):
        raise Spoken


class Spoken(RuntimeError):
    """This process has said what it has to say, and will hear the conclusion in another turn."""


class Hearing:
    """A client of processes that have spoken: what they say again is not sent."""

    def __init__(self, client):
        self._client = client

    def __getattr__(self, name):
        return getattr(self._client, name)

    def key_value_set(self, key, value):
        assert "/said/" in key

    def key_value_increment(self, key, by):
        return by if key.endswith("/spoken") else self._client.key_value_increment(key, by)


def hold(count, topic, said, judge):
    """One meeting of so many processes: seconds, calls, bytes, and what all were told."""
    from jax_ddp_weighting.distributed import coordination

    service = coordination.distributed.global_state.client
    counting = Counting(service)
    among, told = tuple(range(count)), [None] * count
    runs = "-".join(coordination._runs(among))

    def take_part(index):
        folder = f"jax_ddp_weighting/{topic}/{runs}/0"
        meeting = coordination.Meeting(folder, index, among)
        with suppress(Spoken):
            told[index] = meeting.conclude(said(index), judge, timeout_s=300)

    start = time.perf_counter()
    if count <= THREADS:
        coordination._client = lambda: counting
        threads = [threading.Thread(target=take_part, args=(index,)) for index in among]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    else:
        counting = Speaking(service)
        with ThreadPoolExecutor(32) as pool:  # process 0 comes first, and so is not the last
            coordination._client = lambda: counting
            list(pool.map(take_part, among))
            hearing = Counting(service)
            hearing.calls, hearing.bytes = counting.calls, counting.bytes
            coordination._client = lambda: Hearing(hearing)
            list(pool.map(take_part, [index for index in among if told[index] is None]))
            counting = hearing
    seconds = time.perf_counter() - start
    left = len(service.key_value_dir_get("jax_ddp_weighting/"))
    (conclusion,) = set(told)
    return seconds, counting, conclusion, left


def meetings():
    import numpy as np

    from jax_ddp_weighting import EpochPlan, EpochRecord, manifest_hash
    from jax_ddp_weighting.data.agreement import _findings
    from jax_ddp_weighting.data.opening import Opening
    from jax_ddp_weighting.distributed import coordination
    from jax_ddp_weighting.distributed.allgather import _FRAME

    threading.stack_size(256 * 1024)
    # a thread stands for a process already; one more for each call is for signals alone
    coordination._ask_service = lambda talk, limit_s=10.0: talk()
    # and slices of a second are too: ten thousand threads would do nothing else
    coordination._await = lambda client, key, deadline, left: client.blocking_key_value_get(
        key, 300_000
    )
    few: dict[str, tuple[float, float]] = {}
    for count in PROCESSES:
        plan = EpochPlan(10**9, num_replicas=8 * count, batch_size=8)
        record = json.loads(EpochRecord.of(plan, 0, manifest_hash(np.arange(10))).to_json())
        among = tuple(range(count))
        opening = Opening("batches", coordination.Meeting("", 0, among), {}, 300)
        first = {"reading": record, "format": {"data": "float32[1024]"}, "width": 0}
        held = {
            "agreement": (
                lambda index, record=record: json.dumps(record | {"rank": index}),
                partial(_findings, among=among, timeout_s=300),
            ),
            "agreement, one of another seed": (
                lambda index, record=record: json.dumps(
                    record | {"rank": index, "seed": int(index == 7)}
                ),
                partial(_findings, among=among, timeout_s=300),
            ),
            "opening of batches or of a join": (
                lambda index, first=first: json.dumps(first),
                opening._judge,
            ),
        }
        headed(f"{count:,} processes")
        for name, (said, judge) in held.items():
            seconds, counting, conclusion, left = hold(count, name, said, judge)
            calls = sum(counting.calls.values())
            each = calls / count, counting.bytes / count
            if name in few:
                keep(f"{name}: calls a process", each[0] / few[name][0])
                keep(f"{name}: bytes a process", each[1] / few[name][1])
            few.setdefault(name, each)
            print(
                f"  {name:<34}{seconds:7.2f} s {calls / count:6.2f} calls and "
                f"{counting.bytes / count / 1e3:6.2f} kB a process, {left} keys left   "
                f"{conclusion[:60]}",
                flush=True,
            )
        frames = count * _FRAME / 1e6
        print(
            f"  {'an exchange of a gather':<34}{frames:7.2f} MB to each process, by the devices; "
            "6 exchanges a gather, and its rows",
            flush=True,
        )


def timed(what, act, times=20):
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        found = act()
        seconds.append(time.perf_counter() - start)
    low, high = min(seconds) * 1e3, max(seconds) * 1e3
    print(f"  {what:<58}{statistics.median(seconds) * 1e3:9.3f} ms ({low:.3f} to {high:.3f})")
    return found


def arithmetic():
    import numpy as np

    from jax_ddp_weighting import BudgetPlan, EpochPlan, Ledger, RunPosition

    print(f"{RANKS:,} ranks", flush=True)
    plan = EpochPlan(10**12 + 7, RANKS, 64)
    last = plan.steps_per_epoch - 1
    timed("one rank's batch of 64 of 1e12 examples", lambda: plan.batch(3, last, [RANKS - 1]))
    timed("audit of an epoch", lambda: plan.audit(3))
    position = timed(
        "a position, as JSON",
        lambda: RunPosition.of(plan, 3, last // 2, manifest_hash="m").to_json(),
    )
    rest = timed(
        "the rest on 65,519 ranks, and one rank's first batch",
        lambda: RunPosition.from_json(position).rest(plan, 3, num_replicas=65_519),
    )
    assert rest.batch(3, 0, [0]).ids[0, 0] == plan.batch(3, last // 2, [0]).ids[0, 0]
    lengths = np.random.default_rng(0).integers(1, 2_049, 10**7)
    budget = timed("a budget plan of 1e7 lengths", lambda: BudgetPlan(lengths, RANKS, 16_384), 1)
    timed("its first batch of a rank", lambda: budget.batch(0, 0, [RANKS - 1]), 5)
    timed("its rest on half the ranks", lambda: budget.resumed(0, budget.position(5)), 5)
    ledger = Ledger(10**9, epoch=0)
    ledger.add(np.arange(0, 10**9, 1_000))
    timed("a ledger of 1e9 examples as bytes, 125 MB", ledger.to_bytes, 3)


def main():
    import jax

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    jax.distributed.initialize(f"127.0.0.1:{port}", 1, 0, heartbeat_timeout_seconds=600)
    meetings()
    arithmetic()
    return 0


if __name__ == "__main__":
    sys.exit(main())
