"""Where a run is: one small object for any checkpoint, refused where it does not belong."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import jax
import numpy as np

from jax_ddp_weighting._arguments import check_at_least, check_epoch, check_up_to
from jax_ddp_weighting._version import __version__
from jax_ddp_weighting.sampling.kinds import Plan, check_any_plan, count_steps, find_fingerprint
from jax_ddp_weighting.sampling.ledger import Ledger
from jax_ddp_weighting.sampling.packing import PackedPlan

_FORMAT = 1
_SIZES = ("num_replicas", "batch_size", "budget")  # which a run need not keep


@dataclass(frozen=True)
class RunPosition:
    """Where a run is, and what it is a run of: plain values, for any checkpoint.

    The rule: it is taken beside a state, after some step, and says which rows that state has seen.
    A run goes on from it on any number of processes and devices, and in batches of any size: what
    is left of the epoch's order is dealt out anew. It is refused, by name, where data, order, code,
    ledger or window are others than those it was taken of.

    Attributes:
        plan: what decides the order of ids, by name, as the plan's `fingerprint` has it; and
            `num_replicas` with `batch_size` or `budget`, which need not be kept.
        epoch: the epoch.
        position: how many places of the epoch's order have been read.
        manifest_hash: what the data set holds, from `manifest_hash`.
        ledger: `Ledger.digest` of what was consumed of the epoch, over all processes; "" where no
            ledger is kept.
        window: how many microbatches an accumulating optimizer has taken of its open window.
        rng: the random key of the run, as `{"impl": name, "data": numbers}`; None where there is
            none.
        code: whatever names the code of the run: a commit, a hash of its config; "" for nothing.
        library_version: the version of this library.

    Raises:
        TypeError: a field is of another type.
        ValueError: a number is out of range.

    Example:
        >>> plan = EpochPlan(16, num_replicas=4, batch_size=1, shuffle=False)
        >>> position = RunPosition.of(plan, 0, 2, manifest_hash=manifest_hash(np.arange(16)))
        >>> text = position.to_json()  # into the checkpoint; and on three ranks from there:
        >>> position = RunPosition.from_json(text)
        >>> fewer = EpochPlan(16, num_replicas=3, batch_size=2, shuffle=False)
        >>> position.check(fewer, manifest_hash=manifest_hash(np.arange(16)))
        >>> position.rest(fewer, position.epoch).batch(epoch=0, step=0).ids.tolist()
        [[8, 11], [9, 12], [10, 13]]
        >>> position.rest(fewer, 1) is fewer
        True
    """

    plan: Mapping[str, Any]
    epoch: int
    position: int
    manifest_hash: str
    ledger: str = ""
    window: int = 0
    rng: Mapping[str, Any] | None = None
    code: str = ""
    library_version: str = __version__

    def __post_init__(self) -> None:
        if not isinstance(self.plan, Mapping) or "num_examples" not in self.plan:
            raise TypeError(
                f"RunPosition: plan must be what a plan's fingerprint holds, got {self.plan!r}. "
                "RunPosition.of(plan, epoch, step, manifest_hash=...) makes one."
            )
        object.__setattr__(self, "plan", dict(self.plan))
        object.__setattr__(self, "epoch", check_epoch("RunPosition: epoch", self.epoch))
        for name in ("position", "window"):
            value = check_at_least(f"RunPosition: {name}", getattr(self, name), 0)
            object.__setattr__(self, name, value)
        for name in ("manifest_hash", "ledger", "code", "library_version"):
            if not isinstance(getattr(self, name), str):
                value = getattr(self, name)
                kind = type(value).__name__
                raise TypeError(f"RunPosition: {name} must be a string, got {value!r} ({kind}).")
        if self.rng is not None:
            object.__setattr__(self, "rng", dict(self.rng))

    @classmethod
    def of(
        cls,
        plan: Plan,
        epoch: int,
        step: int,
        *,
        manifest_hash: str,
        ledger: Ledger | None = None,
        window: int = 0,
        rng: jax.Array | None = None,
        code: str = "",
    ) -> "RunPosition":
        """The position before a step of a plan: that of a state that has taken those before it.

        Args:
            plan: who reads what: the plan of the epoch, or of the rest of it.
            epoch: the epoch.
            step: the next step of this plan to take, in ``[0, steps_per_epoch]``.
            manifest_hash: what the data set holds, from `manifest_hash`.
            ledger: what was consumed of the epoch, of all processes: see `gather_ledger`.
            window: how many microbatches the optimizer's open window has, as `mini_step` in the
                state of `weighted_multi_steps`.
            rng: the random key of the run, which nothing else saves.
            code: whatever names the code.

        Raises:
            TypeError: an argument is of another type.
            ValueError: there is no such epoch or step, or the ledger is of another epoch.
        """
        check_any_plan("RunPosition.of: plan", plan)
        if not isinstance(manifest_hash, str) or not manifest_hash:
            raise TypeError(
                f"RunPosition.of: manifest_hash must be a hash, got {manifest_hash!r}. "
                "manifest_hash(ids) makes one."
            )
        if ledger is not None and ledger.epoch not in (None, epoch):
            raise ValueError(
                f"RunPosition.of: ledger must be of epoch {epoch}, got epoch {ledger.epoch}. Keep "
                "a ledger for each epoch."
            )
        steps = count_steps(plan, epoch)
        step = check_up_to("RunPosition.of: step", step, steps, f"The epoch has {steps} steps.")
        packed = isinstance(plan, PackedPlan)  # where an epoch ends is its own
        place = plan.position(step, epoch=epoch) if packed else plan.position(step)
        return cls(
            _describe(plan, epoch),
            epoch,
            place,
            manifest_hash,
            "" if ledger is None else ledger.digest,
            window,
            None if rng is None else _spell_key(rng),
            code,
        )

    def check(
        self,
        plan: Plan,
        *,
        manifest_hash: str,
        ledger: Ledger | None = None,
        window: int | None = None,
        code: str = "",
        other_version: bool = False,
    ) -> None:
        """Nothing, if the run of this position can go on with all that; else an error.

        Args:
            plan: the plan of whole epochs; its ranks and the size of its batches may be others.
            manifest_hash: what the data set holds now.
            ledger: the ledger that was saved beside the position, of all processes.
            window: the `mini_step` of the optimizer's state, where it accumulates.
            code: what names the code now.
            other_version: go on with what another version of this library saved.

        Raises:
            TypeError: an argument is of another type.
            ValueError: it belongs to something else; names everything that differs, with both
                values.
        """
        check_any_plan("RunPosition.check: plan", plan)
        found = {
            **{f"plan's {name}": value for name, value in _order(plan, self.epoch).items()},
            "manifest_hash": manifest_hash,
            "code": code,
        }
        own = {f"plan's {name}": value for name, value in self.order.items()}
        own |= {"manifest_hash": self.manifest_hash, "code": self.code}
        if ledger is not None:
            found["ledger"], own["ledger"] = ledger.digest, self.ledger
        if window is not None:
            found["window"], own["window"] = window, self.window
        if not other_version:
            found["library_version"] = __version__
            own["library_version"] = self.library_version
        if different := _find_differences(own, found):
            raise ValueError(
                "RunPosition.check: a run must go on with what it was stopped with, got "
                f"{different}. It is another run's position, or these have changed since."
            )

    def rest(self, plan: Plan, epoch: int, **sizes: int) -> Plan:
        """The plan for an epoch of the run: of its own epoch what is left, of later ones all.

        Args:
            plan: the plan of whole epochs. An `EpochPlan` may have any number of ranks and rows;
                the order of a `BudgetPlan` hangs on them, so it must be the one that was stopped,
                and is resumed on others by `sizes`.
            epoch: `epoch`, or a later one.
            sizes: what `plan.resumed` takes: `num_replicas`, and `batch_size` or `budget`.

        Returns:
            A plan, whose steps count from 0.

        Raises:
            ValueError: the epoch is over, or the plan has another order.

        Example:
            >>> plan = EpochPlan(4, num_replicas=1, batch_size=1)
            >>> position = RunPosition.of(plan, 0, 3, manifest_hash="...")
            >>> [position.rest(plan, epoch).steps_per_epoch for epoch in (0, 1)]
            [1, 4]
        """
        if epoch < self.epoch:
            raise ValueError(
                f"RunPosition.rest: epoch must be at least {self.epoch}, the one that was stopped, "
                f"got {epoch}. Those before are over."
            )
        check_any_plan("RunPosition.rest: plan", plan)
        if different := _find_differences(self.order, _order(plan, self.epoch)):
            raise ValueError(
                f"RunPosition.rest: plan must have the order that was stopped, got {different}. A "
                "position in another order means other ids."
            )
        if epoch > self.epoch:
            return replace(plan, **sizes) if sizes else plan
        return plan.resumed(epoch, self.position, **sizes)

    @property
    def order(self) -> dict[str, Any]:
        """What decides the order of ids: `plan` without what need not be kept."""
        return {name: value for name, value in self.plan.items() if name not in _SIZES}

    @property
    def key(self) -> jax.Array:
        """The random key of the run, of the kind that it was.

        Raises:
            ValueError: none was given.
        """
        if self.rng is None:
            raise ValueError("RunPosition.key: rng must be given to RunPosition.of, got None.")
        data = jax.numpy.asarray(np.array(self.rng["data"], np.uint32))
        impl = self.rng["impl"]
        return data if impl is None else jax.random.wrap_key_data(data, impl=impl)

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON holds."""
        return {"format": _FORMAT, **asdict(self)}

    def to_json(self) -> str:
        """The position as one line of JSON."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RunPosition":
        """What `to_dict` gave.

        Raises:
            TypeError: it is no mapping, or a value is of another type.
            ValueError: it holds other names, or is of another format.
        """
        if not isinstance(values, Mapping):
            kind = type(values).__name__
            raise TypeError(f"RunPosition.from_dict: values must be a mapping, got {kind}.")
        names = {"format", *(field.name for field in fields(cls))}
        if set(values) != names or values["format"] != _FORMAT:
            got = f"{', '.join(sorted(map(str, values)))}; format {values.get('format')!r}"
            raise ValueError(
                f"RunPosition.from_dict: values must be a position of format {_FORMAT}, got {got}. "
                "Read it with the version that wrote it."
            )
        return cls(**{name: value for name, value in values.items() if name != "format"})

    @classmethod
    def from_json(cls, text: str) -> "RunPosition":
        """What `to_json` gave.

        Raises:
            TypeError: a value is of another type.
            ValueError: it is no JSON, or no position.
        """
        return cls.from_dict(json.loads(text))


def _order(plan: Plan, epoch: int) -> dict[str, Any]:
    return {"kind": type(plan).__name__, **find_fingerprint(plan, epoch)}


def _describe(plan: Plan, epoch: int) -> dict[str, Any]:
    sizes = {name: int(getattr(plan, name)) for name in _SIZES if hasattr(plan, name)}
    return {**_order(plan, epoch), **sizes}


def _find_differences(own: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    return "; ".join(
        f"{name} {own.get(name)!r}, here {value!r}"
        for name, value in ((name, found.get(name)) for name in dict.fromkeys([*own, *found]))
        if own.get(name) != value
    )


def _spell_key(key: jax.Array) -> dict[str, Any]:
    typed = jax.numpy.issubdtype(key.dtype, jax.dtypes.prng_key)
    data = np.asarray(jax.random.key_data(key) if typed else key)
    return {"impl": str(jax.random.key_impl(key)) if typed else None, "data": data.tolist()}
