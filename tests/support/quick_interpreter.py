"""Triton's interpreter without most of its work, for tests: kernels do and find exactly what they do without this.
An operation of a kernel takes the interpreter a hundred times longer to check, to broadcast and to describe than to
compute: types are made anew for each result, shapes are tuples of Triton's own that describe themselves, and each
sum of integers is checked for an overflow that is then not reported. Here what depends on types alone is found
once, and what would change nothing is left out. Another version of Triton, without one of these places, is left as
it is there."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, cached_property, wraps
from typing import Any


def make_quick() -> None:
    """From now on, for the whole process."""
    from triton.language import core, semantic
    from triton.runtime import interpreter

    for change, place in (
        (_hand_on_without_sorting, interpreter),
        (_replace_language_once, interpreter),
        (_leave_out_unheard_checks, interpreter),
        (_remember_types_of_numpy, interpreter),
        (_remember_promotions, semantic.TritonSemantic),
        (_leave_equal_types_and_shapes, semantic.TritonSemantic),
        (_remember_blocks, core.block_type),
        (_share_shapes, core),
        (_describe_tuples_when_asked, core),
    ):
        try:
            change(place)
        except AttributeError:
            continue  # another version of Triton: it takes longer


def _hand_on_without_sorting(interpreter: Any) -> None:
    """An operation of the language is given the interpreter's meaning for its own, without a look at each argument."""
    meaning, _ = interpreter.interpreter_semantic, interpreter._patch_attr

    def patch(owner: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
        def interpreted(*arguments: Any, _semantic: Any = None, **named: Any) -> Any:
            return member(*arguments, **named, _semantic=meaning)

        scope.set_attr(owner, name, interpreted)

    interpreter._patch_attr = patch


def _replace_language_once(interpreter: Any) -> None:
    """For each call of each function it looks through all of the language for what to replace, and puts it back later.

    Nothing in this process needs the language as it was, so once for each function is enough.
    """
    patch, nothing = interpreter._patch_lang, interpreter._LangPatchScope

    @cache
    def patch_once(function: Any) -> Any:
        patch(function)
        return nothing()  # with nothing to put back

    interpreter._patch_lang = patch_once


def _leave_out_unheard_checks(interpreter: Any) -> None:
    """Whether integers overflow is found out in a dozen operations, and said in an assertion that needs `debug`."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def _remember_types_of_numpy(interpreter: Any) -> None:
    find, known = interpreter._get_np_dtype, {}

    def find_once(kind: Any) -> Any:
        name = kind.scalar.name  # of a block only its elements count
        if name not in known:
            known[name] = find(kind)
        return known[name]

    interpreter._get_np_dtype = find_once


def _remember_promotions(semantic: Any) -> None:
    find, known = semantic.computation_type_impl, {}

    @wraps(find)
    def find_once(self: Any, one: Any, one_is_scalar: bool, other: Any, other_is_scalar: bool, divides: bool) -> Any:
        key = (one.name, one_is_scalar, other.name, other_is_scalar, divides)
        if key not in known:
            known[key] = find(self, one, one_is_scalar, other, other_is_scalar, divides)
        return known[key]

    semantic.computation_type_impl = find_once


def _leave_equal_types_and_shapes(semantic: Any) -> None:
    cast, broadcast = semantic.cast, semantic.broadcast_impl_value

    @wraps(cast)
    def cast_others(self: Any, value: Any, kind: Any, *rounding: Any, **named: Any) -> Any:
        if value.type.scalar is kind.scalar:
            return value
        return cast(self, value, kind, *rounding, **named)

    @wraps(broadcast)
    def broadcast_others(self: Any, one: Any, other: Any) -> Any:
        left, right = one.type, other.type
        blocks = left.is_block(), right.is_block()
        if blocks == (False, False) or (blocks == (True, True) and tuple(left.shape) == tuple(right.shape)):
            return one, other
        return broadcast(self, one, other)

    semantic.cast, semantic.broadcast_impl_value = cast_others, broadcast_others


def _remember_blocks(block_type: Any) -> None:
    """A block's type is checked, counted and named the first time that its elements and its shape meet."""
    begin: Callable[..., None] = block_type.__init__
    known: dict[Any, dict[str, Any]] = {}

    def begin_once(self: Any, element: Any, shape: Any) -> None:
        sizes = tuple(shape)
        if any(type(size) is not int for size in sizes):
            begin(self, element, shape)
            return
        key = (element.name, getattr(element, "address_space", None), sizes)
        if key not in known:
            begin(self, element, shape)
            known[key] = dict(vars(self))
        vars(self).update(known[key])

    block_type.__init__ = begin_once


def _share_shapes(core: Any) -> None:
    """Tensors of equal shapes share the description of it, which nothing changes."""
    begin, known = core.tensor.__init__, {}

    def begin_once(self: Any, handle: Any, kind: Any) -> None:
        key = tuple(kind.shape) if kind.is_block() else ()
        if key not in known:
            begin(self, handle, kind)
            known[key] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.numel, self.shape = known[key]

    core.tensor.__init__ = begin_once


def _describe_tuples_when_asked(core: Any) -> None:
    begin, describe = core.tuple.__init__, core._type_for_tuple_values

    def begin_bare(self: Any, values: Any, kind: Any = None) -> None:
        if kind is None:
            self.values = list(values)
        else:
            begin(self, values, kind)

    core.tuple.type = cached_property(lambda self: describe(self.values))
    core.tuple.type.__set_name__(core.tuple, "type")
    core.tuple.__init__ = begin_bare
