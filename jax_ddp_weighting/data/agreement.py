"""Do all ranks hold the same epoch? Said before the first collective, with the ranks' names."""

import json
import logging
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import cast

from jax_ddp_weighting._arguments import check_integer, check_up_to
from jax_ddp_weighting._errors import JdwError
from jax_ddp_weighting._version import __version__
from jax_ddp_weighting.distributed import coordination
from jax_ddp_weighting.distributed.coordination import find_differences, name_ranks
from jax_ddp_weighting.sampling.kinds import Plan, check_any_plan, count_steps, find_fingerprint
from jax_ddp_weighting.sampling.plan import EpochPlan

_log = logging.getLogger("jax_ddp_weighting.agreement")  # as documented


class DisagreementError(JdwError):
    """Ranks that do not hold the same epoch, or are not there; the message names them."""


@dataclass(frozen=True)
class EpochRecord:
    """What one process holds of an epoch: every number that decides who reads what.

    Attributes:
        world_size: data-parallel ranks over all processes, the plan's `num_replicas`.
        rank: the process that speaks, `jax.process_index()`. It speaks for all its devices.
        manifest_hash: what the data set holds, in order; see `manifest_hash`.
        num_examples: length of the data set.
        seed: the plan's seed.
        epoch: the epoch.
        shuffle: whether ids are read in an order of the epoch's own.
        order: "keyed", "torch", or the digest of an order of one's own, in this epoch; of other
            plans what makes their steps, and the shapes of these; the place from which a resumed
            plan reads it; and the digest of a plan's own weights.
        tail: "mask", "repeat" or "drop".
        batch_size: rows per rank and step; the most, where steps differ.
        steps: steps in the epoch.
        accepted: slots of weight 1 in the epoch, over all ranks.
        library_version: this library's version.
        start_step: the step it starts at, above 0 where it resumes.

    Raises:
        TypeError: a field is of another type.
        ValueError: a number is out of range.

    Example:
        >>> plan = EpochPlan(47, num_replicas=3, batch_size=8)
        >>> record = EpochRecord.of(plan, 0, manifest_hash(np.arange(47)))
        >>> record.steps, record.accepted
        (2, 47)
    """

    world_size: int
    rank: int
    manifest_hash: str
    num_examples: int
    seed: int
    epoch: int
    shuffle: bool
    order: str
    tail: str
    batch_size: int
    steps: int
    accepted: int
    library_version: str
    start_step: int = 0

    def __post_init__(self) -> None:
        # records may come from files and command lines, and are compared as they are
        remedy = "EpochRecord.of(plan, epoch, manifest_hash) makes one."
        for field in fields(self):
            value, kind = getattr(self, field.name), cast(type, field.type)
            if kind is int:
                argument = f"EpochRecord: {field.name}"
                low = -(2**63) if field.name == "seed" else 0
                value = check_integer(argument, value, low, 2**64 - 1, remedy)
                object.__setattr__(self, field.name, value)
            elif not isinstance(value, kind):
                raise TypeError(
                    f"EpochRecord: {field.name} must be of type {kind.__name__}, got {value!r} "
                    f"({type(value).__name__}). {remedy}"
                )

    @classmethod
    def of(
        cls, plan: Plan, epoch: int, manifest_hash: str, *, start_step: int = 0
    ) -> "EpochRecord":
        """The record of a plan's epoch in this process.

        Args:
            plan: who reads what.
            epoch: the epoch, at least 0.
            manifest_hash: what the data set holds, from `manifest_hash`.
            start_step: the first step that is read, as `batches` is given it.

        Returns:
            An `EpochRecord` of this process and this version of the library.

        Raises:
            TypeError: an argument is of another type.
            ValueError: `epoch` is negative, `manifest_hash` empty, or the plan has no such step.
        """
        check_any_plan("EpochRecord.of: plan", plan)
        rule = "be an integer of at least 0"
        epoch = check_integer("EpochRecord.of: epoch", epoch, 0, 2**63 - 1, rule=rule)
        remedy = "A later step belongs to the next epoch."
        steps = count_steps(plan, epoch)
        start_step = check_up_to("EpochRecord.of: start_step", start_step, steps, remedy)
        if not isinstance(manifest_hash, str):
            raise TypeError(
                f"EpochRecord.of: manifest_hash must be a string, got {manifest_hash!r}. "
                "manifest_hash(ids) makes one."
            )
        if not manifest_hash:
            raise ValueError(
                "EpochRecord.of: manifest_hash must not be empty, got ''. manifest_hash(ids) makes "
                "one."
            )
        fingerprint = find_fingerprint(plan, epoch)
        if not isinstance(plan, EpochPlan):
            shapes = ", ".join(f"{rows} x {length}" for rows, length in plan.step_shapes)
            fingerprint["order"] += f", steps of {shapes}"
        if plan.start:  # processes that go on from different places read different ids
            fingerprint["order"] += f" from place {plan.start}"
        if own := fingerprint.pop("weights", ""):
            fingerprint["order"] += f" with {own}"
        return cls(
            world_size=plan.num_replicas,
            rank=coordination.this_process()[0],
            manifest_hash=manifest_hash,
            epoch=epoch,
            **fingerprint,
            batch_size=plan.batch_size,
            steps=steps,
            accepted=plan.accepted_per_epoch,
            library_version=__version__,
            start_step=start_step,
        )

    def to_json(self) -> str:
        """The record as one line of JSON."""
        return json.dumps(asdict(self))


def check_agreement(
    record: EpochRecord, timeout_s: float = coordination.WAIT_S, *, name: str = ""
) -> None:
    """Nothing, if every process has called this with the same record; else an error for all.

    The rule: records are compared through the coordination service of `jax.distributed`, not by a
    device collective, so that a process that is absent, late or different is named, by every other
    one, within its time. The n-th call of one process meets the n-th calls of the others; a process
    that comes late is told what the others have concluded. Only `rank` may differ.

    Call it before the first collective of an epoch, the first use of a device included: JAX itself
    waits there, for minutes and without naming anybody. The record is logged, as one line of JSON
    at level INFO, by the logger `jax_ddp_weighting.agreement`.

    The verdict is logged too, before anybody waits for others to be told it: at level INFO where
    several processes agree, else ERROR. Process 0, which holds the service, returns last, when all
    who were heard have been told, within the time left.

    Each process makes four small calls to the service whatever the number of processes, and one
    more for each second that it waits; the last one to arrive also reads all the records: 10,000 of
    them are 5 MB, read in about 0.1 s, and the 40,000 calls are some seconds of the service's time.

    What it cannot do: process 0 holds the service. If that one is killed, JAX ends all the others,
    at once and with a message of its own. If another is killed, JAX ends all the others when
    `heartbeat_timeout_seconds` of `jax.distributed.initialize` (100) are over: keep `timeout_s`
    below. And a process that leaves by an error waits for the missing ones as it exits, up to
    `shutdown_timeout_seconds` (300).

    Args:
        record: this process's record, from `EpochRecord.of`.
        timeout_s: how many seconds to wait for the other processes.
        name: what is agreed on, such as ``"evaluation"``. Calls of one name meet calls of the same:
            give threads that check records of their own a name each.

    Raises:
        DisagreementError: records differ, or ranks are absent; names each differing field with its
            ranks and values, and each absent rank.
        TypeError: `record` is no record, `timeout_s` no number, or `name` no string.
        ValueError: `timeout_s` is not above 0, `name` holds a slash, or the record is another
            process's.
        RuntimeError: there are several processes without `jax.distributed`, or its service does not
            answer.

    Example:
        >>> plan = EpochPlan(47, num_replicas=3, batch_size=8)
        >>> record = EpochRecord.of(plan, 0, manifest_hash(np.arange(47)))
        >>> check_agreement(record)  # one process agrees with itself
    """
    if not isinstance(record, EpochRecord):
        raise TypeError(
            f"check_agreement: record must be an EpochRecord, got {type(record).__name__}. "
            "EpochRecord.of(plan, epoch, manifest_hash) makes one."
        )
    timeout_s = coordination.check_timeout("check_agreement: timeout_s", timeout_s)
    if not isinstance(name, str):
        raise TypeError(f"check_agreement: name must be a string, got {name!r}.")
    if "/" in name:
        raise ValueError(
            f"check_agreement: name must hold no slash, got {name!r}. It is a part of a key."
        )
    index, count = coordination.this_process()
    if record.rank != index:
        raise ValueError(
            f"check_agreement: record must be this process's own, rank {index}, got rank "
            f"{record.rank}. Make it here, with EpochRecord.of."
        )
    line = record.to_json()
    _log.info(line)
    among = tuple(range(count))
    topic = f"agreement {name}" if name else "agreement"
    meeting = coordination.next_meeting(topic, index, among, timeout_s)
    judge = partial(_findings, among=among, timeout_s=timeout_s)

    def log(findings: str) -> None:
        if findings:
            _log.error(findings)
        elif count > 1:
            _log.info("check_agreement: epoch %d: %d processes agree.", record.epoch, count)

    findings = meeting.conclude(line, judge, timeout_s=timeout_s, log=log)
    if findings:
        raise DisagreementError(findings)
    ours = __version__
    if record.library_version != ours:
        raise DisagreementError(
            f"check_agreement: epoch {record.epoch}: the record must be made by this version, "
            f"{ours}, got library_version {record.library_version!r} on {name_ranks([index])}. "
            "Install one version everywhere."
        )


def _findings(said: dict[int, str], *, among: tuple[int, ...], timeout_s: float) -> str:
    """What is wrong, in words; nothing if all processes have said the same."""
    records = {rank: json.loads(line) for rank, line in said.items()}
    absent = [rank for rank in among if rank not in said]
    epochs = sorted({record["epoch"] for record in records.values()})
    for record in records.values():
        del record["rank"]
    differences = find_differences(records)
    if not (absent or differences):
        return ""
    parts = [f"check_agreement: epoch {', '.join(map(str, epochs))}:"]
    if absent:
        parts.append(
            f"{name_ranks(absent)} absent, not there after {timeout_s:g} s; "
            f"{name_ranks(said)} waited. Look at the logs of the absent: they are gone, busy, or a "
            "call behind."
        )
    if differences:
        parts.append(
            f"ranks must hold the same epoch, got {'; '.join(differences)}. Give every rank the "
            "same arguments and the same data."
        )
    return " ".join(parts)
