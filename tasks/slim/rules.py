"""The one table of what in a checkpoint is no weight of the model, and the user's additions to it (`model.drop`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from enginesmith.tasks.errors import EnginesmithError


@dataclass(frozen=True)
class Rule:
    """What is left out under one name.

    Attributes:
        name: how the report calls it.
        entries: patterns for the entries of a checkpoint, lower case; ``*`` stands for anything.
        names: patterns for whole names inside a state dict, lower case.
    """

    name: str
    entries: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


RULES = (
    Rule("optimizer", ("opt", "optim", "optims", "optimizer*", "*_optimizer", "*_optimizers", "optim_*", "*_optim")),
    Rule("scheduler", ("*scheduler", "*schedulers", "*scheduler_state*", "sched", "lr_sched*")),
    Rule("scaler", ("scaler", "*_scaler", "scaler_*", "amp", "amp_*", "loss_scale*", "*mixedprecision*")),
    Rule("FP32 masters", ("fp32_groups*", "fp32_from_fp16*", "*fp32_master*", "*master_param*", "*master_weight*")),
    Rule(
        "loss",
        ("loss", "losses", "*_loss", "*_losses", "loss_*", "criterion", "criterion_*"),
        ("loss.*", "losses.*", "loss_fn.*", "loss_func.*", "*_loss.*", "criterion.*", "criterion_*.*"),
    ),
    Rule("callback", ("callback", "callbacks", "hooks", "loops")),
    Rule("RNG state", ("rng", "*rng_state*", "*random_state*", "*_rng", "rng_*")),
    Rule("hash", ("hash", "*_hash", "md5*", "sha*sum", "sha1", "sha256", "checksum*")),
    Rule("EMA counter", names=("n_averaged",)),
)


@dataclass(frozen=True)
class Drops:
    """The table with the user's additions: patterns of names to leave out, and with ``!`` in front, names to keep."""

    patterns: tuple[str, ...]

    def by_user(self, name: str) -> str:
        """The user's rule that leaves a name out, empty when none does."""
        if self._kept(name):
            return ""
        return next((f"model.drop: {p}" for p in self.patterns if fnmatchcase(name, p)), "")

    def for_entry(self, name: str) -> str:
        """The rule that leaves an entry of a checkpoint out, empty when none does."""
        return self.by_user(name) or self._by_table(name, [(r.name, r.entries) for r in RULES])

    def for_name(self, name: str) -> str:
        """The rule that leaves a name of a state dict out, empty when none does."""
        return self.by_user(name) or self._by_table(name, [(r.name, r.names) for r in RULES])

    def check(self, names: Sequence[str]) -> None:
        """Refuse a pattern that matches nothing.

        Raises:
            EnginesmithError: it names the pattern, and by its key the line where it stands.
        """
        for index, pattern in enumerate(self.patterns):
            if not any(fnmatchcase(name, pattern.removeprefix("!")) for name in names):
                raise EnginesmithError(
                    f"{pattern!r} matches no key of the checkpoint",
                    key=f"model.drop.{index}",
                    hint="patterns match whole keys, as in loss_head.*",
                )

    def _by_table(self, name: str, rules: Sequence[tuple[str, tuple[str, ...]]]) -> str:
        if self._kept(name):
            return ""
        lower = name.lower()
        return next((rule for rule, patterns in rules if any(fnmatchcase(lower, p) for p in patterns)), "")

    def _kept(self, name: str) -> bool:
        return any(fnmatchcase(name, p[1:]) for p in self.patterns if p.startswith("!"))
