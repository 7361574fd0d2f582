"""What a user writes to say how deep each token goes: `D3(alpha=0.9, start=0.6)`.

The one idea: a policy knows no model. It is a small frozen value that turns into a `Schedule` once the number
of layers is known, and into plain JSON (`describe`) so that a model directory, a command line and a log can
hold it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields, is_dataclass
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, cast

from d3engine.depth.draft_rule import DraftRule
from d3engine.depth.exit_rule import ExitRule
from d3engine.depth.installed import PolicyLoadError, installed_names, load_installed, package_of
from d3engine.depth.schedule import Schedule
from d3engine.errors import InvalidValueError, ModelFormatError, require
from d3engine.files import UnreadableFileError, beside, is_there, read_json

POLICY_FILE = "d3.json"
"""In a model's directory, or beside its GGUF file: the policy that calibration found for it."""

BRIDGES = "bridges"
"""The option that names what stands in for skipped layers."""

POLICY_CLASSES: Mapping[str, tuple[str, str]] = {
    "full": ("d3engine.depth.full_depth", "FullDepth"),
    "d3": ("d3engine.depth.d3", "D3"),
    "skipdecode": ("d3engine.depth.skip_decode", "SkipDecode"),
    "unified": ("d3engine.depth.unified_skip", "UnifiedSkip"),
    "even": ("d3engine.depth.even_skip", "EvenSkip"),
    "fixed": ("d3engine.depth.fixed_skip", "FixedSkip"),
    "tail-skip": ("d3engine.depth.tail_skip", "TailSkip"),
    "nested": ("d3engine.depth.nested", "Nested"),
    "early-exit": ("d3engine.depth.early_exit", "EarlyExit"),
    "table": ("d3engine.depth.layer_table", "LayerTable"),
    "self-speculative": ("d3engine.depth.self_speculative", "SelfSpeculative"),
    "draft-and-verify": ("d3engine.depth.draft_and_verify", "DraftAndVerify"),
    "lossless": ("d3engine.depth.lossless", "Lossless"),
    "speculative": ("d3engine.depth.speculative", "Speculative"),
}
"""Name -> module and class. A `DepthPolicy` of the user's own has no entry: it is passed as an object, or offered
by an installed package under the entry-point group `d3engine.policies`."""


class DepthPolicy(ABC):
    """Base of all policies: frozen dataclasses whose arguments are checked at construction."""

    name: ClassVar[str]
    """What the command line and JSON call the policy."""

    drafts: ClassVar[bool] = False
    """Whether the policy's tokens are drafted and then verified."""

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


def policy_names() -> list[str]:
    """The names of all policies: d3engine's own, then those of installed packages (entry points, see `GROUP`)."""
    return [*POLICY_CLASSES, *(name for name in installed_names() if name not in POLICY_CLASSES)]


def policy_class(name: str) -> type[DepthPolicy]:
    """The class of a named policy; no package can take the name of one of d3engine's own.

    Raises `InvalidValueError` for a name that nobody offers, `PolicyLoadError` for an offer that cannot be used.
    """
    if isinstance(name, str) and name in POLICY_CLASSES:
        module, class_name = POLICY_CLASSES[name]
        return cast(type[DepthPolicy], getattr(import_module(module), class_name))
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
    return tuple(field.name for field in fields(cast(Any, policy_class(name))) if _has_no_default(field))


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

    Whoever loads weights compares it with theirs (`d3engine.loading.depth`): a setting that is safe for one model says
    nothing of another. Raises `ModelFormatError`, naming the file, for one that cannot be read.
    """
    path = beside(directory, POLICY_FILE)
    if not is_there(path):
        return None
    with _reading(path, 'has no text under "fingerprint"'):
        return _text(read_json(path).get("fingerprint"))


def calibrated_task(directory: str | Path) -> str | None:
    """The task that the setting in `d3.json` was found for; None without that file, or where it names none.

    What is safe for one task says nothing of another, so whoever applies the setting to every request says which task
    it was. Older files name theirs among the evidence alone. Raises `ModelFormatError` as `calibrated_for` does.
    """
    path = beside(directory, POLICY_FILE)
    if not is_there(path):
        return None
    with _reading(path, 'has no text under "task"'):
        content = read_json(path)
        return _text(content.get("task", content.get("evidence", {}).get("task")))


def calibrated_bridges(directory: str | Path) -> str | None:
    """The SHA-256 of the bridges that the setting in `d3.json` was found with; None without that file, or where it
    names none. Raises `ModelFormatError` as `calibrated_for` does.
    """
    path = beside(directory, POLICY_FILE)
    if not is_there(path):
        return None
    with _reading(path, 'has no text under "sha256" of "bridges"'):
        return _text(read_json(path).get(BRIDGES, {}).get("sha256"))


def _text(found: object) -> str | None:
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
    return str(value) if isinstance(value, Fraction) else value


def _has_no_default(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING
