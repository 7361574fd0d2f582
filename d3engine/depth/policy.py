"""A depth policy: a small frozen value, `D3(alpha=0.9, start=0.6)`, that becomes a
`Schedule` once the number of layers is known, and JSON for files and logs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from fractions import Fraction
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, cast, get_args

from d3engine.depth.schedule import BoolArray, Schedule
from d3engine.errors import D3EngineError, InvalidValueError, ModelFormatError, require, require_integer, require_number
from d3engine.utils.files import UnreadableFileError, beside, is_there, read_json

GROUP = "d3engine.policies"


class PolicyLoadError(D3EngineError):
    """A policy that an installed package offers cannot be used; the message names the package."""


def installed_names() -> list[str]:
    """The names that installed packages offer, sorted; none of them is imported."""
    return sorted(entry_points(group=GROUP).names)


def load_installed(name: str) -> object:
    """What the one installed package that offers `name` has under it: a policy's class, if the package is right."""
    offers = list({_package(entry): entry for entry in entry_points(group=GROUP, name=name)}.values())
    if len(offers) != 1:
        packages = " and ".join(sorted(_package(entry) for entry in offers))
        raise PolicyLoadError(f"the policy {name!r} is offered by more than one installed package: {packages}")
    (entry,) = offers
    try:
        return entry.load()
    except Exception as error:
        raise PolicyLoadError(
            f"the policy {name!r} of the package {_package(entry)} cannot be imported from {entry.value}: {error!r}"
        ) from error


def package_of(name: str) -> str:
    """The package that offers `name`."""
    return _package(next(iter(entry_points(group=GROUP, name=name))))


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value.partition(".")[0]


Confidence: TypeAlias = Literal["softmax_max", "softmax_diff", "cosine"]
"""What is compared with the threshold after a layer: the LM head's largest probability there, its lead over the
second, or the cosine between what went into the layer and what came out."""

BatchRule: TypeAlias = Literal["per_row", "batch_min"]
"""Who decides: each row for itself, or the least confident row of the batch for all."""


@dataclass(frozen=True)
class ExitRule:
    """A token leaves after the first checked layer where its confidence reaches the threshold of its step.

    Checked are layers min_layer, min_layer + every, min_layer + 2 every ... (from 0); after the last layer there is
    nothing to decide. Prompt tokens and step 0, which the prompt pass yields, are never asked.

    Attributes:
        confidence: see `Confidence`; the softmax ones are of the raw logits, before temperature and penalties.
        threshold: from 0 (every token leaves at the first check) to 2 (none ever does).
        decay: how fast the threshold falls, see `threshold_at`; 0 keeps it.
        min_layer: the lowest layer after which a token may leave.
        every: layers from one check to the next.
        batch: "per_row" or "batch_min"; under the second, rows of one engine step with equal rules leave together.

    Raises:
        InvalidValueError: for a value that is not allowed.
    """

    confidence: Confidence
    threshold: float
    decay: float = 4.0
    min_layer: int = 0
    every: int = 1
    batch: BatchRule = "per_row"

    def __post_init__(self) -> None:
        _require_one_of("confidence", self.confidence, get_args(Confidence))
        require_number("threshold", self.threshold, 0, 2)
        require_number("decay", self.decay, 0, 1000)
        require_integer("min_layer", self.min_layer, 0)
        require_integer("every", self.every, 1)
        _require_one_of("batch", self.batch, get_args(BatchRule))

    def checks_after(self, layer: int) -> bool:
        """Whether the confidence is looked at after this layer (from 0)."""
        return layer >= self.min_layer and (layer - self.min_layer) % self.every == 0

    def depths(self, num_layers: int) -> list[int]:
        """How many layers a token can take, deepest first."""
        return [num_layers, *(layer + 1 for layer in range(num_layers - 2, -1, -1) if self.checks_after(layer))]

    def threshold_at(self, step: int, max_tokens: int) -> float:
        """`0.9 t + 0.1 t exp(-decay step / N)`: CALM's falling threshold (Schuster et al. 2022, section 3.3).

        N is the request's own max_tokens, so it is known when the step is planned. At step 0 it is `threshold`.
        """
        return self.threshold * (0.9 + 0.1 * math.exp(-self.decay * step / max_tokens))


def _require_one_of(field: str, value: object, allowed: tuple[str, ...]) -> None:
    require(isinstance(value, str) and value in allowed, field, value, f"one of {', '.join(allowed)}")


MAX_DRAFT_LENGTH = 32
"""Tokens of a draft at most: beyond a few, hardly any is accepted."""

MAX_HISTORY = 2**20
"""Tokens of earlier answers at most: a lookup goes through them in a millisecond."""


@dataclass(frozen=True)
class DraftRule:
    """How a sequence drafts.

    Attributes:
        length: tokens of a draft at most, 1 .. MAX_DRAFT_LENGTH.
        stop_probability: a draft ends with the first token at whose place the likeliest one had less than this
            probability, by the draft's raw distribution; 0 never ends it.
        adaptive: whether each sequence finds a length of its own, in [1, length] and at first `length`: one more after
            a draft that was accepted whole, one less after any other.
        schedule: the layers of a draft by the same model: those of the step at which it begins, for all its tokens. So
            no token of a draft reads an entry that another left out, whatever the schedule. None: a second model or
            lookups draft.
        resumes: whether verification starts at the first layer that the draft skipped, from kept hidden states.
        model: the directory of the second model that drafts, or None.
        mlp_schedule: the layers whose MLP a draft runs; `schedule` is then of their attention. None: of whole layers.
        target_acceptance: the part of its drafted tokens that a sequence is to have accepted: its own
            `stop_probability` moves towards that (`scheduling/sequence.py` has how); None: it stays.
        lookup: whether drafts may also be what followed the last tokens where they stood before in the text.
        history: tokens of earlier answers of the engine that lookups see too, the newest; 0 for this text alone.
        by_cost: whether the executor chooses who drafts, and how long, by measured times, where it can; elsewhere
            drafts are adaptive.
    """

    length: int
    stop_probability: float = 0.0
    adaptive: bool = False
    schedule: Schedule | None = None
    resumes: bool = False
    model: str | None = None
    mlp_schedule: Schedule | None = None
    target_acceptance: float | None = None
    lookup: bool = False
    history: int = 0
    by_cost: bool = False

    @property
    def is_by_text(self) -> bool:
        """Whether what drafts needs the text alone, and none of this model's layers."""
        return self.schedule is None

    def layers(self, step: int) -> BoolArray | None:
        """Bool [L]: the layers of a draft that begins at `step`; None for a second model's, which runs all of its own.

        A draft that skips nothing would be the full model itself: `skips(step)` tells.
        """
        return None if self.schedule is None else self.schedule.active(step)

    def student(self, step: int) -> str | None:
        """The student whose weights such a draft runs; None where the model's own do, or a second model's."""
        return None if self.schedule is None else self.schedule.student_at(step)

    def mlps(self, step: int) -> BoolArray | None:
        """Bool [L]: the layers whose MLP such a draft runs; None where they are `layers`."""
        return None if self.mlp_schedule is None else self.mlp_schedule.active(step)

    def skips(self, step: int) -> bool:
        """Whether a draft that begins at `step` costs less than what it drafts for."""
        if self.schedule is None or self.student(step) is not None:
            return True
        parts = [self.schedule] if self.mlp_schedule is None else [self.schedule, self.mlp_schedule]
        return any(part.depth_at(step) < part.num_layers for part in parts)


POLICY_FILE = "d3.json"
"""In a model's directory, or beside its GGUF file: the policy that calibration found for it."""

BRIDGES = "bridges"
"""The option that names what stands in for skipped layers."""

STUDENT, STUDENTS = "student", "students"
"""The options that name the weights of generated tokens."""

POLICIES: dict[str, type[DepthPolicy]] = {}
"""Name -> class of d3engine's own policies, in the order of their definition: each registers itself.

A `DepthPolicy` of the user's own has no entry: it is passed as an object, or offered by an installed package under the
entry-point group `d3engine.policies`.
"""


@dataclass(frozen=True)
class Option:
    """How a field of a policy is written on a command line; `is_common` of those that most policies have."""

    help: str
    spelling: str = ""
    is_common: bool = False


OPTION = "option"
"""Key of a field's metadata."""


def option(help: str, spelling: str = "", *, is_common: bool = False) -> Mapping[str, Option]:
    """The metadata of a policy's field: its help, and its spelling where that is not its name with dashes."""
    return {OPTION: Option(help, spelling, is_common)}


class DepthPolicy(ABC):
    """Base of all policies: frozen dataclasses whose arguments are checked at construction."""

    name: ClassVar[str]
    """What the command line and JSON call the policy."""

    label: ClassVar[str] = ""
    """What people call it; the name of the class where it is empty."""

    drafts: ClassVar[bool] = False
    """Whether the policy's tokens are drafted and then verified."""

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        if cls.__module__.startswith(f"{__package__}."):  # no package can take the name of one of d3engine's own
            POLICIES[cls.name] = cls

    @abstractmethod
    def schedule(self, num_layers: int) -> Schedule:
        """The schedule for `num_layers` layers; raises `InvalidValueError` if the policy does not fit."""

    def exit_rule(self, num_layers: int) -> ExitRule | None:
        """When tokens may leave before the schedule's last layer; None: never.

        A policy with a rule has a full-depth schedule whose `on_skip` says what fills the layers left out.
        """
        return None

    def draft_rule(self, num_layers: int) -> DraftRule | None:
        """How the policy drafts tokens for full depth to verify; None: it does not."""
        return None

    def describe(self) -> dict[str, Any]:
        """`{"policy": name, option: value, ...}`, ready for JSON; `policy_from_dict` reads it back.

        A policy without bridges is described as one that cannot have any.
        """
        options = {field.name: getattr(self, field.name) for field in fields(cast(Any, self))}
        if options.get(BRIDGES, ...) is None:
            del options[BRIDGES]
        return {"policy": self.name, **{option: _plain(value) for option, value in options.items()}}


def named_bridges(policy: DepthPolicy) -> frozenset[str]:
    """What the policy calls its bridges, and that by which it drafts its own; empty where neither has any."""
    policies = (policy, getattr(policy, "draft", None))
    return frozenset(name for one in policies if (name := getattr(one, BRIDGES, None)) is not None)


def named_students(policy: DepthPolicy) -> frozenset[str]:
    """The same of its students."""
    policies = (policy, getattr(policy, "draft", None))
    names = (name for one in policies for name in (getattr(one, STUDENT, None), *getattr(one, STUDENTS, ())))
    return frozenset(name for name in names if name is not None)


def policy_names() -> list[str]:
    """The names of all policies: d3engine's own, then those of installed packages (entry points, see `GROUP`)."""
    return [*POLICIES, *(name for name in installed_names() if name not in POLICIES)]


def policy_class(name: str) -> type[DepthPolicy]:
    """The class of a named policy; no package can take the name of one of d3engine's own.

    Raises `InvalidValueError` for an unknown name, `PolicyLoadError` for an offer that cannot be used.
    """
    if isinstance(name, str) and name in POLICIES:
        return POLICIES[name]
    names = policy_names()
    require(isinstance(name, str) and name in names, "policy", name, f"one of {', '.join(names)}")
    offered = load_installed(name)
    if not (isinstance(offered, type) and issubclass(offered, DepthPolicy) and is_dataclass(offered)):
        raise PolicyLoadError(f"the policy {name!r} of {package_of(name)} is no dataclass of DepthPolicy: {offered!r}")
    own_name = getattr(offered, "name", None)
    if own_name != name:
        raise PolicyLoadError(f"the policy {name!r} of {package_of(name)} calls itself {own_name!r}")
    return offered


def policy_options(name: str) -> tuple[str, ...]:
    """The options that a named policy takes, in order."""
    return tuple(field.name for field in fields(cast(Any, policy_class(name))))


def required_options(name: str) -> tuple[str, ...]:
    """The options without which there is no policy of that name."""
    known = fields(cast(Any, policy_class(name)))
    return tuple(one.name for one in known if one.default is MISSING and one.default_factory is MISSING)


def policy_from_name(name: str, **options: Any) -> DepthPolicy:
    """The policy of that name with these options; unknown and missing options are refused by name."""
    policy = policy_class(name)
    takes = policy_options(name)
    for option, value in options.items():
        require(
            option in takes,
            option,
            value,
            f"absent, since policy {name!r} takes {', '.join(takes) if takes else 'no options'}",
        )
    missing = [option for option in required_options(name) if option not in options]
    if missing:
        raise InvalidValueError("policy", name, f"given with {' and '.join(missing)}")
    return policy(**options)


def policy_from_dict(description: Mapping[str, Any]) -> DepthPolicy:
    """The policy that `describe` wrote: a mapping with "policy", its name, and the policy's options."""
    require(
        isinstance(description, Mapping) and "policy" in description,
        "policy",
        description,
        'a mapping with "policy" and its options',
    )
    options = {str(option): value for option, value in description.items() if option != "policy"}
    require("name" not in options, "name", options.get("name"), 'absent, since the name of a policy is under "policy"')
    return policy_from_name(description["policy"], **options)


def policy_from_directory(directory: str | Path) -> DepthPolicy:
    """The policy under "depth" in the `d3.json` beside a model's weights; `FullDepth` without that file.

    What else the file holds (the evidence that calibration found) is for people to read, but for the fingerprint (see
    `calibrated_for`). Raises `ModelFormatError`, naming the file, for one that describes no policy.
    """
    path = beside(directory, POLICY_FILE)
    if not is_there(path):
        return policy_from_name("full")
    with _reading(path, 'describes no depth policy under "depth"'):
        return policy_from_dict(read_json(path)["depth"])


def calibrated_for(directory: str | Path) -> str | None:
    """The fingerprint of the weights that `d3.json` was calibrated on; None without that file, or where a file that
    was written by hand names none.

    The loader compares it with its weights (`d3engine.engine.depth`): a setting that is safe for one model says
    nothing of another. Raises `ModelFormatError`, naming the file, for one that cannot be read.
    """
    return _said(directory, '"fingerprint"', lambda content: content.get("fingerprint"))


def calibrated_task(directory: str | Path) -> str | None:
    """The task that the setting in `d3.json` was found for; None without that file, or where it names none.

    What is safe for one task says nothing of another, so a command that applies the setting names the task
    that it was found for. Older files name theirs among the evidence alone. Raises `ModelFormatError` as
    `calibrated_for` does.
    """
    return _said(directory, '"task"', lambda content: content.get("task", content.get("evidence", {}).get("task")))


def calibrated_file(directory: str | Path, name: str) -> str | None:
    """The SHA-256 of the `BRIDGES`, or of a student, that the setting in `d3.json` was found with; None without that
    file, or where it names none. Raises `ModelFormatError` as `calibrated_for` does.
    """
    return _said(directory, f'"sha256" of "{name}"', lambda content: content.get(name, {}).get("sha256"))


def _said(directory: str | Path, place: str, find: Callable[[Any], object]) -> str | None:
    path = beside(directory, POLICY_FILE)
    if not is_there(path):
        return None
    with _reading(path, f"has no text under {place}"):
        found = find(read_json(path))
        if found is not None and not isinstance(found, str):
            raise TypeError(f"it is {found!r}")
        return found


@contextmanager
def _reading(path: Path, complaint: str) -> Iterator[None]:
    """Words whatever goes wrong with a policy file; `InvalidValueError` is a ValueError."""
    try:
        yield
    except UnreadableFileError as error:
        raise ModelFormatError(str(error)) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelFormatError(f"{path} {complaint}: {error}") from error


def _plain(value: Any) -> Any:
    """An option as JSON has it."""
    if isinstance(value, DepthPolicy):
        return value.describe()
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, Fraction) else value
